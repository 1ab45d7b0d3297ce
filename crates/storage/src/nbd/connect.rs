//! Connections to a server. They block: only for control threads and threads that connect.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

use mqblk_core::BlockSize;
use mqblk_core::lock::lock;
use rustix::net::sockopt;

use super::address::{ExportAddress, ServerAddress};
use super::negotiate::{self, ExportInfo, Purpose};
use super::protocol::{RequestHeader, command};
use super::timed_stream::{TIMEOUT, TimedStream};
use super::tls::TlsClient;

/// Timeout of all steps until the export is known.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(30);
/// A TCP connection to a lost host ends after half a minute: probes begin after 15 s without traffic, and sent data
/// must be acknowledged in 30 s. A slow server keeps it.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// A connection after its negotiation.
#[derive(Debug)]
pub(super) struct Session {
    pub socket: OwnedFd,
    pub export: ExportInfo,
}

/// Connects to one export.
#[derive(Debug)]
pub(super) struct Dialer {
    pub address: ExportAddress,
    pub tls: Option<TlsClient>,
    /// Addresses of the name's last lookup: the sandbox may forbid another one.
    resolved: Mutex<Vec<SocketAddr>>,
}

impl Dialer {
    pub(super) fn new(address: ExportAddress, tls: Option<TlsClient>) -> Dialer {
        Dialer { address, tls, resolved: Mutex::default() }
    }

    /// Connects and negotiates.
    ///
    /// # Errors
    /// With the server's name and the reason.
    pub(super) fn dial(&self, purpose: Purpose) -> io::Result<Session> {
        let named = |error: io::Error| {
            let what = match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => format!(
                    "no answer within {} s, or no end of the negotiation within {} s",
                    TIMEOUT.as_secs(),
                    NEGOTIATION_TIMEOUT.as_secs()
                ),
                _ => error.to_string(),
            };
            io::Error::new(error.kind(), format!("{}: {what}", self.address))
        };
        self.connect().and_then(|socket| self.negotiate(socket, purpose)).map_err(named)
    }

    fn connect(&self) -> io::Result<OwnedFd> {
        let socket: OwnedFd = match &self.address.server {
            ServerAddress::Unix(path) => UnixStream::connect(path)?.into(),
            ServerAddress::Tcp { host, port } => {
                let stream = self.connect_tcp(host, *port)?;
                set_keepalive(&stream)?;
                stream.into()
            }
        };
        Ok(socket)
    }

    fn negotiate(&self, socket: OwnedFd, purpose: Purpose) -> io::Result<Session> {
        // Reads and writes are the same calls for every stream socket.
        let mut stream = TimedStream::new(TcpStream::from(socket), NEGOTIATION_TIMEOUT);
        let no_zeroes = negotiate::greet(&mut stream)?;
        let name = &self.address.export;
        let (socket, export): (OwnedFd, _) = match &self.tls {
            None => {
                let export = negotiate::negotiate(&mut stream, name, purpose, no_zeroes)?;
                probe(&mut stream, &export, purpose)?;
                (stream.into_inner().into(), export)
            }
            Some(tls) => {
                negotiate::start_tls(&mut stream)?;
                let mut tunnel = tls.connect(stream)?;
                // Data from before TLS may be forged.
                let export = negotiate::negotiate(&mut tunnel, name, purpose, no_zeroes)?;
                probe(&mut tunnel, &export, purpose)?;
                (tunnel.into_socket()?, export)
            }
        };
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
        Ok(Session { socket, export })
    }

    fn connect_tcp(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let mut resolved = lock(&self.resolved);
        match (host, port).to_socket_addrs() {
            Ok(addresses) => *resolved = addresses.collect(),
            Err(error) if resolved.is_empty() => return Err(error),
            Err(_) => {}
        }
        let mut last = io::Error::new(ErrorKind::NotFound, "the name stands for no address");
        for address in resolved.iter() {
            match TcpStream::connect_timeout(address, TIMEOUT) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// The cookie of a probe's requests; a transmission counts its requests from 0.
pub(super) const PROBE_COOKIE: u64 = u64::MAX;

/// For a probe, reads a block and ends the connection: a server may refuse a connection after the negotiation.
fn probe(stream: &mut (impl Read + Write), export: &ExportInfo, purpose: Purpose) -> io::Result<()> {
    if purpose != Purpose::Probe || export.size == 0 {
        return Ok(());
    }
    let len = u64::from(export.block.max(BlockSize::B512.bytes())).min(export.size);
    let send = |stream: &mut dyn Write, command, len| {
        let header = RequestHeader { flags: 0, command, cookie: PROBE_COOKIE, offset: 0, len };
        stream.write_all(&header.encode(export.headers)[..export.headers.request_bytes()])
    };
    send(stream, command::READ, len)?;
    // The first bytes of a reply, an error too, show that the server serves this connection.
    stream.read_exact(&mut [0; 4]).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => {
            io::Error::new(ErrorKind::ConnectionReset, "the server ended the connection after the negotiation")
        }
        _ => error,
    })?;
    // The server may have ended the connection.
    let _ = send(stream, command::DISCONNECT, 0);
    Ok(())
}

fn set_keepalive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED.as_millis() as u32)?;
    Ok(())
}
