//! The sockets that the daemon listens on, and their permissions: the keys of vhost-user sockets and of the admin
//! socket.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use mqblk_core::settings::{Key, SettingError, Settings};
pub use mqblk_vhost_user_server::discard;
use mqblk_vhost_user_server::{
    PASSED_PREFIX, SocketAccess, SocketError, claim_passed, is_passed, is_prepared, make_early, passed_names,
};
use nix::unistd::{Gid, Group, Uid, User};

use crate::file_use::FileUse;
use crate::pair::{Pair, string};
use crate::user::UserConfig;

/// Maximum length of a Unix socket's path, without the terminating NUL (unix(7)).
const SOCKET_PATH_BYTES: usize = 107;

/// A user or group of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostId {
    /// As given: a name or a number.
    pub name: String,
    /// Its number.
    pub id: u32,
}

/// The permissions of a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketPermissions {
    /// Its permission bits.
    pub mode: SocketMode,
    /// Its owner; `None`: the daemon's user.
    pub owner: Option<HostId>,
    /// Its group; `None`: the daemon's.
    pub group: Option<HostId>,
}

impl Default for SocketPermissions {
    fn default() -> SocketPermissions {
        SocketPermissions { mode: SocketMode::OWNER_ONLY, owner: None, group: None }
    }
}

/// The keys of a socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketKeys {
    /// The key of its path.
    pub path: &'static Key,
    /// The key of its permission bits.
    pub mode: &'static Key,
    /// The keys of its owner and group; `None`: they are the daemon's.
    pub owner: Option<(&'static Key, &'static Key)>,
}

const fn mode(name: &'static str) -> Key {
    Key::text(name, "BITS", "octal, `0000` to `0777`").default("0600")
}
const fn owner(name: &'static str) -> Key {
    Key::text(name, "NAME|UID", "a user of this host, by name or number").otherwise("the daemon's")
}
const fn group(name: &'static str) -> Key {
    Key::text(name, "NAME|GID", "a group of this host, by name or number").otherwise("the daemon's")
}

/// The vhost-user socket.
pub static SOCKET: Key = Key::text("socket", "PATH", "a path of at most 107 bytes, or `fd:NAME`").required().about(
    "the vhost-user socket to make; fd:NAME: systemd's socket of that name",
    "A stale socket is replaced; one that somebody listens on, or another type of file, is an error. Removed at exit. `fd:NAME`: \
     [systemd.md](systemd.md#socket-activation).",
);
/// The permissions of a vhost-user socket.
pub static SOCKET_MODE: Key =
    mode("socket-mode").about("the socket's permissions, octal", "A user who can connect can read and write the disk.");
/// The owner of a vhost-user socket.
pub static SOCKET_OWNER: Key =
    owner("socket-owner").about("the socket's owner", "[systemd.md](systemd.md#sockets-for-vmms).");
/// The group of a vhost-user socket.
pub static SOCKET_GROUP: Key = group("socket-group").about("the socket's group", "");
/// The admin socket.
pub static ADMIN: Key = Key::text("admin", "PATH", "a path of at most 107 bytes, or `fd:NAME`").bare("on").about(
    "make an admin socket for `mqblk stat` and others; without PATH at their default path",
    "See [the admin socket](#the-admin-socket). `fd:NAME`: systemd's socket of that name.",
);
/// The permissions of the admin socket.
pub static ADMIN_MODE: Key = mode("admin-mode").about("the admin socket's permissions, octal", "");
/// The owner of the admin socket.
pub static ADMIN_OWNER: Key = owner("admin-owner").about("the admin socket's owner", "");
/// The group of the admin socket.
pub static ADMIN_GROUP: Key = group("admin-group").about("the admin socket's group", "");
/// The address that scrapers connect to.
pub static METRICS: Key =
    Key::text("metrics", "IP:PORT|unix:PATH", "an address of this host, or `unix:` and a path of at most 107 bytes")
        .about(
            "serve metrics there over HTTP, for Prometheus and others, without authentication",
            "[metrics.md](metrics.md).",
        );
/// The permissions of a Unix socket for metrics.
pub static METRICS_MODE: Key = mode("metrics-mode").about("the permissions of a Unix socket for metrics, octal", "");

/// Those of a vhost-user socket.
pub const VHOST_USER_KEYS: SocketKeys =
    SocketKeys { path: &crate::sockets::SOCKET, mode: &SOCKET_MODE, owner: Some((&SOCKET_OWNER, &SOCKET_GROUP)) };
/// Those of the admin socket.
pub const ADMIN_KEYS: SocketKeys =
    SocketKeys { path: &ADMIN, mode: &ADMIN_MODE, owner: Some((&ADMIN_OWNER, &ADMIN_GROUP)) };

/// Those of the socket for metrics.
pub const METRICS_KEYS: SocketKeys = SocketKeys { path: &METRICS, mode: &METRICS_MODE, owner: None };

/// Returns true if a key has permission bits.
pub fn is_mode_key(key: &str) -> bool {
    [&SOCKET_MODE, &ADMIN_MODE, &METRICS_MODE].iter().any(|mode| mode.name == key)
}

impl SocketKeys {
    /// Returns the first given key of permissions.
    pub fn given_permission(&self, settings: &Settings) -> Option<&'static Key> {
        let owner = self.owner.into_iter().flat_map(|(owner, group)| [owner, group]);
        std::iter::once(self.mode).chain(owner).find(|key| settings.peek(key).is_some())
    }

    /// Checks the path of a socket. If it names a socket that the process was started with, claims that. Does not take
    /// permissions.
    ///
    /// # Errors
    /// If the path is invalid, or permissions are given for a socket that another process has made.
    pub fn check_path(&self, settings: &Settings, path: String) -> Result<PathBuf, SettingError> {
        if path.len() > SOCKET_PATH_BYTES || path.contains('\0') {
            let found = format!("a path of {} bytes", path.len());
            return Err(settings.error(
                self.path,
                found,
                format!("at most {SOCKET_PATH_BYTES} bytes, none of them NUL"),
            ));
        }
        let is_passed = claim_passed(Path::new(&path));
        if !is_passed && path.starts_with(PASSED_PREFIX) {
            let names = passed_names(false);
            let expected = match names.is_empty() {
                true => "a socket that the process was started with, of which there is none (LISTEN_FDS)".to_owned(),
                false => format!("a socket that the process was started with: fd:{}", names.join(", fd:")),
            };
            return Err(settings.error(self.path, format!("{path:?}"), expected));
        }
        if let Some(key) = self.given_permission(settings).filter(|_| is_passed) {
            let found =
                format!("{:?} for a socket that the process was started with", settings.peek(key).unwrap_or_default());
            let expected =
                "the permissions where the socket is made (SocketMode=, SocketUser= and SocketGroup= of its unit)";
            return Err(settings.error(key, found, expected));
        }
        Ok(PathBuf::from(path))
    }

    /// Takes the permissions of a socket.
    ///
    /// # Errors
    /// If one is invalid.
    pub fn take_permissions(&self, settings: &mut Settings) -> Result<SocketPermissions, SettingError> {
        Ok(SocketPermissions {
            mode: take_mode(settings, self.mode)?.unwrap_or(SocketMode::OWNER_ONLY),
            owner: take_id(settings, self.owner.map(|(owner, _)| owner), "user", find_user)?,
            group: take_id(settings, self.owner.map(|(_, group)| group), "group", find_group)?,
        })
    }

    /// Returns the permissions of a socket as keys with their values.
    pub fn pairs(&self, permissions: &SocketPermissions) -> Vec<Pair> {
        let SocketPermissions { mode, owner, group } = permissions;
        let mut pairs = vec![(self.mode.name, string(&mode.to_string()))];
        if let Some((owner_key, group_key)) = self.owner {
            pairs.extend(owner.as_ref().map(|owner| (owner_key.name, string(&owner.name))));
            pairs.extend(group.as_ref().map(|group| (group_key.name, string(&group.name))));
        }
        pairs
    }
}

/// Takes permission bits.
pub fn take_mode(settings: &mut Settings, key: &'static Key) -> Result<Option<SocketMode>, SettingError> {
    let Some(text) = settings.text(key) else { return Ok(None) };
    match SocketMode::parse(&text) {
        Some(mode) => Ok(Some(mode)),
        None => Err(settings.error(key, format!("{text:?}"), "octal permission bits from 0000 to 0777")),
    }
}

/// Takes a user or group, by name or number.
fn take_id(
    settings: &mut Settings,
    key: Option<&'static Key>,
    noun: &str,
    find: impl Fn(&str) -> nix::Result<Option<u32>>,
) -> Result<Option<HostId>, SettingError> {
    let Some((key, name)) = key.and_then(|key| Some((key, settings.text(key)?))) else { return Ok(None) };
    let failed = |why: &dyn Display| {
        settings.error(key, format!("{name:?}{why}"), format!("a {noun} of this host, or its number"))
    };
    // The largest number means "no change" (chown(2)).
    let number = name.parse().ok().filter(|id| *id != u32::MAX && name.bytes().all(|byte| byte.is_ascii_digit()));
    let id = match number {
        Some(id) => id,
        None => find(&name).map_err(|error| failed(&format!(": {error}")))?.ok_or_else(|| failed(&""))?,
    };
    Ok(Some(HostId { name, id }))
}

fn find_user(name: &str) -> nix::Result<Option<u32>> {
    Ok(User::from_name(name)?.map(|user| Uid::as_raw(user.uid)))
}

fn find_group(name: &str) -> nix::Result<Option<u32>> {
    Ok(Group::from_name(name)?.map(|group| Gid::as_raw(group.gid)))
}

impl SocketPermissions {
    /// Returns them with their numbers.
    pub fn access(&self) -> SocketAccess {
        SocketAccess {
            mode: self.mode.bits(),
            owner: self.owner.as_ref().map(|owner| owner.id),
            group: self.group.as_ref().map(|group| group.id),
        }
    }
}

/// Permission bits of a socket, `0000` to `0777`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

impl SocketMode {
    /// Read and write by the owner only.
    pub const OWNER_ONLY: SocketMode = SocketMode(0o600);

    /// Parses three or four octal digits, with no bits above `0777`.
    pub fn parse(text: &str) -> Option<SocketMode> {
        let octal = (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
        let bits = u32::from_str_radix(text, 8).ok()?;
        (octal && bits <= 0o777).then_some(SocketMode(bits))
    }

    /// Returns the bits, as for `chmod`.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// A socket that will be made.
#[derive(Clone, Debug)]
pub struct PlannedSocket {
    /// Its disk or controller, for messages.
    pub subject: String,
    /// Its path.
    pub path: PathBuf,
    /// Its permissions.
    pub permissions: SocketPermissions,
}

impl PlannedSocket {
    /// Makes the socket if it has an owner or a group, while the process may still set them. Unset ones are those of
    /// `user`, which the process becomes.
    ///
    /// # Errors
    /// If the socket cannot be made with them.
    pub(crate) fn make_early(&self, user: Option<&UserConfig>) -> Result<(), SocketError> {
        let access = self.permissions.access();
        if !access.changes_owner() || is_prepared(&self.path) {
            return Ok(());
        }
        let (uid, gid) = user.map(UserConfig::ids).unzip();
        make_early(&self.path, &SocketAccess { owner: access.owner.or(uid), group: access.group.or(gid), ..access })
    }
}

/// Returns the file that a served socket needs; `None` if another process has made it.
pub fn file_of_socket(path: &Path) -> Option<FileUse> {
    (!is_passed(path)).then(|| FileUse::Socket(path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permissions(pairs: &[(&str, &str)]) -> Result<SocketPermissions, String> {
        let mut settings = Settings::new("disk \"a\"");
        pairs.iter().for_each(|(key, value)| settings.insert(key, value).unwrap());
        VHOST_USER_KEYS.take_permissions(&mut settings).map_err(|error| error.to_string())
    }

    #[test]
    fn owners_and_groups_are_names_or_numbers() {
        let taken =
            permissions(&[("socket-owner", "root"), ("socket-group", "4711"), ("socket-mode", "0660")]).unwrap();
        assert_eq!(taken.access(), SocketAccess { mode: 0o660, owner: Some(0), group: Some(4711) });
        let printed = VHOST_USER_KEYS.pairs(&taken);
        let texts: Vec<_> = printed.iter().map(|(key, value)| (*key, value.as_str().unwrap())).collect();
        assert_eq!(texts, [("socket-mode", "0660"), ("socket-owner", "root"), ("socket-group", "4711")]);
        assert_eq!(permissions(&[]).unwrap(), SocketPermissions::default());
    }

    #[test]
    fn owners_and_groups_that_this_host_does_not_have_are_refused() {
        for (key, value, want) in [
            (
                "socket-owner",
                "no such user",
                "socket-owner: found \"no such user\", expected a user of this host, or its number",
            ),
            (
                "socket-group",
                "no such group",
                "socket-group: found \"no such group\", expected a group of this host, or its number",
            ),
            (
                "socket-group",
                "4294967295",
                "socket-group: found \"4294967295\", expected a group of this host, or its number",
            ),
            ("socket-group", "-1", "socket-group: found \"-1\", expected a group of this host, or its number"),
        ] {
            assert_eq!(permissions(&[(key, value)]).unwrap_err(), format!("disk \"a\": {want}"));
        }
    }

    #[test]
    fn a_socket_that_was_not_passed_is_refused() {
        let error = VHOST_USER_KEYS.check_path(&Settings::new("disk \"a\""), "fd:none".to_owned()).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with(
                "disk \"a\": socket: found \"fd:none\", expected a socket that the process was started with"
            ),
            "{error}"
        );
    }

    #[test]
    fn socket_modes() {
        for (text, want) in [("0600", Some(0o600)), ("660", Some(0o660)), ("0777", Some(0o777)), ("000", Some(0))] {
            assert_eq!(SocketMode::parse(text).map(SocketMode::bits), want, "{text}");
        }
        for text in ["", "6", "66", "0o600", "+600", "-600", "0800", "1777", "00600", "rw-------"] {
            assert_eq!(SocketMode::parse(text), None, "{text}");
        }
    }
}
