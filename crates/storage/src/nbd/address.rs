//! Address of an export: the NBD project's URIs (`doc/uri.md`) and their keys.

use std::fmt;
use std::path::PathBuf;

use mqblk_core::settings::{Key, SettingError, Settings};

/// Most bytes of an export's name that a server must accept.
const MAX_EXPORT: usize = 4096;
const EXPECTED: &str =
    "nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH, or with TLS nbds://HOST[:PORT]/EXPORT";

/// The key of an export's URI.
pub(crate) static PATH: Key =
    Key::text("path", "URI", "a URI such as `nbd://HOST/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`")
        .otherwise("the keys that follow")
        .about("an export of an NBD server", "[storage/nbd.md](storage/nbd.md).");
pub(super) static HOST: Key =
    Key::text("host", "HOST", "a name or address").about("instead of a URI: the server's host", "");
/// IANA's port of NBD servers.
pub(super) static PORT: Key =
    Key::number("port", 1, 65_535).default("10809").about("instead of a URI: the server's port", "");
pub(super) static SOCKET_PATH: Key =
    Key::text("socket-path", "PATH", "a path").about("instead of a URI: the server's Unix socket", "");
pub(super) static EXPORT: Key = Key::text("export", "NAME", "a name of at most 4096 bytes")
    .otherwise("the server's default export")
    .about("instead of a URI: the export", "");

/// The server's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ServerAddress {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerAddress::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            ServerAddress::Tcp { host, port } => write!(f, "{host}:{port}"),
            ServerAddress::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExportAddress {
    pub server: ServerAddress,
    pub export: String,
    /// True if the URI demands TLS.
    pub tls: bool,
}

impl fmt::Display for ExportAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NBD server {}, export {:?}", self.server, self.export)
    }
}

impl ExportAddress {
    /// Takes `path` (a URI), or `host` and `port` or `socket`, and `export`.
    pub(super) fn take(settings: &mut Settings) -> Result<ExportAddress, SettingError> {
        let uri = settings.text(&PATH);
        let (host, socket) = (settings.text(&HOST), settings.text(&SOCKET_PATH));
        let (port, export) = (settings.number(&PORT)?, settings.text(&EXPORT));
        let address = match (uri, host, socket) {
            (Some(uri), None, None) if port.is_none() && export.is_none() => {
                parse(&uri).map_err(|why| settings.error(&PATH, format!("{uri:?} ({why})"), EXPECTED))?
            }
            (None, Some(host), None) => ExportAddress {
                server: ServerAddress::Tcp { host, port: port.unwrap_or_else(|| PORT.default_number()) as u16 },
                export: export.unwrap_or_default(),
                tls: false,
            },
            (None, None, Some(path)) if port.is_none() => ExportAddress {
                server: ServerAddress::Unix(path.into()),
                export: export.unwrap_or_default(),
                tls: false,
            },
            (None, None, None) => {
                return Err(settings.error(&PATH, "nothing", format!("{EXPECTED}; or host=, or socket-path=")));
            }
            _ => {
                let expected = "either path=, or host= with port= and export=, or socket-path= with export=";
                return Err(settings.error(&PATH, "more than one address", expected));
            }
        };
        if address.export.len() > MAX_EXPORT {
            let found = format!("a name of {} bytes", address.export.len());
            return Err(settings.error(&EXPORT, found, format!("at most {MAX_EXPORT} bytes")));
        }
        Ok(address)
    }
}

impl ExportAddress {
    /// Returns its keys.
    pub(super) fn resolved(&self) -> Vec<(&'static str, String)> {
        let export = ("export", self.export.clone());
        match &self.server {
            ServerAddress::Tcp { host, port } => vec![("host", host.clone()), ("port", port.to_string()), export],
            ServerAddress::Unix(path) => vec![("socket-path", path.display().to_string()), export],
        }
    }
}

/// Parses a URI. Errors describe the fault.
fn parse(uri: &str) -> Result<ExportAddress, String> {
    let (scheme, rest) = uri.split_once("://").ok_or("no scheme and ://")?;
    let (unix, tls) = match scheme {
        "nbd" => (false, false),
        "nbds" => (false, true),
        "nbd+unix" => (true, false),
        "nbds+unix" => (true, true),
        _ => return Err(format!("an unknown scheme {scheme:?}")),
    };
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    let export = percent_decode(export)?;
    let mut socket = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("socket", path)) => socket = Some(percent_decode(path)?),
            _ => return Err(format!("an unknown query {pair:?}")),
        }
    }
    let server = match (unix, socket) {
        (true, Some(path)) if authority.is_empty() && !path.is_empty() => ServerAddress::Unix(path.into()),
        (true, Some(_)) => return Err("a host as well as a socket".to_owned()),
        (true, None) => return Err("no ?socket=".to_owned()),
        (false, Some(_)) => return Err("?socket= is for nbd+unix".to_owned()),
        (false, None) => tcp(authority)?,
    };
    Ok(ExportAddress { server, export, tls })
}

/// Parses `HOST[:PORT]`, where the host may be an IPv6 address in brackets.
fn tcp(authority: &str) -> Result<ServerAddress, String> {
    if authority.contains('@') {
        return Err("a user name, which NBD does not have".to_owned());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("a [ without a ]")?;
            (host, rest.strip_prefix(':').or(rest.is_empty().then_some("")).ok_or("something after the ]")?)
        }
        None => authority.split_once(':').unwrap_or((authority, "")),
    };
    if host.is_empty() {
        return Err("no host".to_owned());
    }
    let port = match port {
        "" => PORT.default_number() as u16,
        port => port.parse().ok().filter(|port| *port > 0).ok_or_else(|| format!("the port {port:?}"))?,
    };
    Ok(ServerAddress::Tcp { host: percent_decode(host)?, port })
}

fn percent_decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.ok_or("a % without two hexadecimal digits")?);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).map_err(|_| "a name that is not UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(uri: &str) -> String {
        match parse(uri) {
            Ok(ExportAddress { server, export, tls }) => {
                format!("{server} {export:?}{}", if tls { " tls" } else { "" })
            }
            Err(why) => format!("error: {why}"),
        }
    }

    #[test]
    fn uris_are_parsed() {
        for (uri, expected) in [
            ("nbd://localhost", "localhost:10809 \"\""),
            ("nbd://localhost/", "localhost:10809 \"\""),
            ("nbd://localhost:10810/disk%201", "localhost:10810 \"disk 1\""),
            ("nbd://[::1]/a/b", "[::1]:10809 \"a/b\""),
            ("nbds://[fe80::1]:5/", "[fe80::1]:5 \"\" tls"),
            ("nbd+unix:///?socket=/run/nbd.sock", "/run/nbd.sock \"\""),
            ("nbd+unix:///vm1?socket=/run/a%3fb", "/run/a?b \"vm1\""),
            ("nbds+unix:///vm1?socket=s", "s \"vm1\" tls"),
            ("nbd+unix:///vm1", "error: no ?socket="),
            ("nbd+unix://host/vm1?socket=s", "error: a host as well as a socket"),
            ("nbd://h/vm1?socket=s", "error: ?socket= is for nbd+unix"),
            ("nbd://h/vm1?tls=on", "error: an unknown query \"tls=on\""),
            ("nbd:///vm1", "error: no host"),
            ("nbd://h:0/", "error: the port \"0\""),
            ("nbd://h:99999/", "error: the port \"99999\""),
            ("nbd://[::1/", "error: a [ without a ]"),
            ("nbd://[::1]x/", "error: something after the ]"),
            ("nbd://a@h/", "error: a user name, which NBD does not have"),
            ("nbd://h/%4", "error: a % without two hexadecimal digits"),
            ("nbd://h/%ff", "error: a name that is not UTF-8"),
            ("nbd+vsock://1/", "error: an unknown scheme \"nbd+vsock\""),
            ("nbd:h", "error: no scheme and ://"),
        ] {
            assert_eq!(address(uri), expected, "{uri}");
        }
    }

    #[test]
    fn keys_stand_for_the_same() {
        let take = |pairs: &[(&str, &str)]| {
            let mut settings = Settings::new("disk \"a\"");
            pairs.iter().for_each(|(key, value)| settings.insert(key, value).unwrap());
            ExportAddress::take(&mut settings).map(|address| address.to_string()).map_err(|error| error.to_string())
        };
        assert_eq!(take(&[("path", "nbd://h/x")]).unwrap(), "NBD server h:10809, export \"x\"");
        assert_eq!(take(&[("host", "h"), ("port", "5"), ("export", "x")]).unwrap(), "NBD server h:5, export \"x\"");
        assert_eq!(take(&[("socket-path", "/s")]).unwrap(), "NBD server /s, export \"\"");
        for (pairs, error) in [
            (&[][..], "path: found nothing"),
            (&[("path", "nbd://h"), ("export", "x")], "path: found more than one address"),
            (&[("host", "h"), ("socket-path", "/s")], "path: found more than one address"),
            (&[("socket-path", "/s"), ("port", "5")], "path: found more than one address"),
            (&[("host", "h"), ("port", "0")], "port: found \"0\""),
            (&[("path", "nbd:h")], "path: found \"nbd:h\" (no scheme and ://)"),
        ] {
            let found = take(pairs).unwrap_err();
            assert!(found.starts_with(&format!("disk \"a\": {error}")), "{found}");
        }
    }
}
