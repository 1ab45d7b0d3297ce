//! TLS to a server: the connection's own thread encrypts and decrypts, so that the worker's ring always has a plain
//! socket.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::thread::spawn;
use rustix::event::{PollFd, PollFlags, poll};
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::address::ServerAddress;
use super::timed_stream::TimedStream;
use crate::secret_file::warn_if_public;

pub(super) static TLS_CREDS: Key = Key::text("tls-creds", "DIR", "a folder")
    .about("the folder of certificates for TLS: ca-cert.pem, and client-cert.pem with client-key.pem", "");
pub(super) static TLS_HOSTNAME: Key =
    Key::text("tls-hostname", "NAME", "a name").otherwise("the host").about("the name in the server's certificate", "");

/// The file names of QEMU's and libvirt's credentials.
const CA: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";
const CERTIFICATE: &str = "client-cert.pem";
const KEY: &str = "client-key.pem";
/// Bytes on the way in each direction.
const CHUNK: usize = 128 << 10;

/// A client's data for TLS.
#[derive(Clone, Debug)]
pub(super) struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    folder: String,
}

impl TlsClient {
    /// Takes `tls-creds` and `tls-hostname`.
    ///
    /// # Errors
    /// When a file is missing or has other content.
    pub(super) fn take(settings: &mut Settings, server: &ServerAddress) -> Result<TlsClient, SettingError> {
        let Some(folder) = settings.text(&TLS_CREDS) else {
            let expected = format!("a folder with {CA}, and for a client's own certificate {CERTIFICATE} and {KEY}");
            return Err(settings.error(&TLS_CREDS, "nothing", expected));
        };
        let host = match (settings.text(&TLS_HOSTNAME), server) {
            (Some(name), _) => name,
            (None, ServerAddress::Tcp { host, .. }) => host.clone(),
            (None, ServerAddress::Unix(_)) => {
                let expected = "the name in the server's certificate: a Unix socket has none";
                return Err(settings.error(&TLS_HOSTNAME, "nothing", expected));
            }
        };
        let name = ServerName::try_from(host.clone())
            .map_err(|error| settings.error(&TLS_HOSTNAME, format!("{host:?} ({error})"), "a host name or address"))?;
        let config = load(Path::new(&folder)).map_err(|why| {
            settings.refused(&TLS_CREDS, format!("{folder:?} ({why})"), format!("a folder with {CA} in PEM form"))
        })?;
        Ok(TlsClient { config: Arc::new(config), name, folder })
    }

    /// Returns its keys.
    pub(super) fn resolved(&self) -> [(&'static str, String); 2] {
        [("tls-creds", self.folder.clone()), ("tls-hostname", self.name.to_str().into_owned())]
    }

    /// Makes the handshake.
    ///
    /// # Errors
    /// When the server's certificate is not trusted, or the handshake fails.
    pub(super) fn connect(&self, stream: TimedStream) -> io::Result<Tunnel> {
        let session = ClientConnection::new(Arc::clone(&self.config), self.name.clone()).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(session, stream);
        while stream.conn.is_handshaking() {
            let StreamOwned { conn, sock } = &mut stream;
            conn.complete_io(sock).map_err(|error| io::Error::new(error.kind(), format!("TLS: {error}")))?;
        }
        Ok(Tunnel(stream))
    }
}

fn load(folder: &Path) -> Result<ClientConfig, String> {
    let in_file = |name: &str, error: &dyn std::fmt::Display| format!("{name}: {error}");
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(folder.join(CA)).map_err(|error| in_file(CA, &error))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| in_file(CA, &error))?;
        roots.add(certificate).map_err(|error| in_file(CA, &error))?;
    }
    if roots.is_empty() {
        return Err(format!("{CA}: no certificate"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let verifier = match revoked(folder)? {
        None => verifier,
        // As in GnuTLS, whose names these are: an expired list is an error, and certificates without a list are
        // accepted.
        Some(lists) => verifier.with_crls(lists).allow_unknown_revocation_status().enforce_revocation_expiration(),
    };
    let verifier = verifier.build().map_err(|error| in_file(REVOKED, &error))?;
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = versions.map_err(|error| error.to_string())?.with_webpki_verifier(verifier);
    if !folder.join(CERTIFICATE).exists() {
        return Ok(builder.with_no_client_auth());
    }
    let chain = CertificateDer::pem_file_iter(folder.join(CERTIFICATE)).and_then(Iterator::collect);
    let chain: Vec<CertificateDer<'static>> = chain.map_err(|error| in_file(CERTIFICATE, &error))?;
    let metadata = folder.join(KEY).metadata().map_err(|error| in_file(KEY, &error))?;
    warn_if_public(&folder.join(KEY), &metadata);
    let key = PrivateKeyDer::from_pem_file(folder.join(KEY)).map_err(|error| in_file(KEY, &error))?;
    builder.with_client_auth_cert(chain, key).map_err(|error| in_file(CERTIFICATE, &error))
}

/// Returns the certificates that their issuer has revoked; `None` without a list.
fn revoked(folder: &Path) -> Result<Option<Vec<CertificateRevocationListDer<'static>>>, String> {
    let path = folder.join(REVOKED);
    // An unreadable list is an error.
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        _ => {}
    }
    let lists = CertificateRevocationListDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match lists {
        Ok(lists) if lists.is_empty() => Err(format!("{REVOKED}: no list of revoked certificates")),
        Ok(lists) => Ok(Some(lists)),
        Err(error) => Err(format!("{REVOKED}: {error}")),
    }
}

/// A connection with TLS.
#[derive(Debug)]
pub(super) struct Tunnel(StreamOwned<ClientConnection, TimedStream>);

impl Read for Tunnel {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Tunnel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Tunnel {
    /// Returns a socket for the plain data. A thread forwards it until either side ends.
    ///
    /// # Errors
    /// When the host refuses the sockets or the thread.
    pub(super) fn into_socket(self) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixStream::pair()?;
        let StreamOwned { conn, sock } = self.0;
        let sock = sock.into_inner();
        sock.set_nonblocking(true)?;
        ours.set_nonblocking(true)?;
        let forwarding = move || {
            if let Err(error) = forward(conn, &sock, &ours) {
                tracing::warn!("NBD connection with TLS ended: {error}");
            }
        };
        spawn("nbd-tls", forwarding)?;
        Ok(theirs.into())
    }
}

/// Bytes that the plain socket has not taken yet.
struct Pending {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

fn is_blocked(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn forward(mut tls: ClientConnection, mut server: &TcpStream, mut plain: &UnixStream) -> io::Result<()> {
    tls.set_buffer_limit(None);
    let mut outgoing = vec![0; CHUNK];
    let mut incoming = Pending { bytes: vec![0; CHUNK], start: 0, end: 0 };
    loop {
        let mut progress = false;
        if incoming.start == incoming.end {
            match tls.reader().read(&mut incoming.bytes) {
                Ok(0) => return Ok(()),
                Ok(read) => (incoming.start, incoming.end) = (0, read),
                Err(error) if is_blocked(&error) => {}
                Err(error) => return Err(error),
            }
        }
        if incoming.start < incoming.end {
            match plain.write(&incoming.bytes[incoming.start..incoming.end]) {
                Ok(written) => (incoming.start, progress) = (incoming.start + written, true),
                Err(error) if is_blocked(&error) => {}
                // The channel was closed.
                Err(_) => return Ok(()),
            }
        } else {
            match tls.read_tls(&mut server) {
                Ok(0) => return Ok(()),
                Ok(_) => {
                    tls.process_new_packets().map_err(io::Error::other)?;
                    progress = true;
                }
                Err(error) if is_blocked(&error) => {}
                Err(error) => return Err(error),
            }
        }
        if !tls.wants_write() {
            match plain.read(&mut outgoing) {
                Ok(0) => {
                    tls.send_close_notify();
                    // The server may be gone.
                    let _ = tls.write_tls(&mut server);
                    return Ok(());
                }
                Ok(read) => {
                    tls.writer().write_all(&outgoing[..read])?;
                    progress = true;
                }
                Err(error) if is_blocked(&error) => {}
                Err(error) => return Err(error),
            }
        }
        while tls.wants_write() {
            match tls.write_tls(&mut server) {
                Ok(_) => progress = true,
                Err(error) if is_blocked(&error) => break,
                Err(error) => return Err(error),
            }
        }
        if !progress && !wait(&tls, server, plain, incoming.start < incoming.end)? {
            return Ok(());
        }
    }
}

/// Waits until a direction can continue. Returns false when the channel was closed.
fn wait(tls: &ClientConnection, server: &TcpStream, plain: &UnixStream, has_incoming: bool) -> io::Result<bool> {
    let flags = |read: bool, write: bool| {
        let read = if read { PollFlags::IN } else { PollFlags::empty() };
        read | if write { PollFlags::OUT } else { PollFlags::empty() }
    };
    let mut fds = [
        PollFd::new(server, flags(!has_incoming, tls.wants_write())),
        PollFd::new(plain, flags(!tls.wants_write(), has_incoming)),
    ];
    match poll(&mut fds, None) {
        Ok(_) => Ok(!fds[1].revents().intersects(PollFlags::HUP | PollFlags::ERR)),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(error) => Err(error.into()),
    }
}
