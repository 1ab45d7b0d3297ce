//! Connections to a server. They block: only for control threads and threads that connect.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt;

use super::address::{ExportAddress, ServerAddress};
use super::negotiate::{self, ExportInfo, Purpose};
use super::tls::TlsClient;

/// How long a server may take for each step until its export is known.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A TCP connection to a host that is gone ends after half a minute: probes begin after 15 s without traffic, and what is sent must be
/// acknowledged in 30 s. A server that answers slowly keeps it.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// A connection whose negotiation is over.
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
    /// What the name stood for when it was last looked up: in the sandbox it may not be looked up again.
    resolved: Mutex<Vec<SocketAddr>>,
}

impl Dialer {
    pub(super) fn new(address: ExportAddress, tls: Option<TlsClient>) -> Dialer {
        Dialer { address, tls, resolved: Mutex::default() }
    }

    /// Connects and negotiates.
    ///
    /// # Errors
    /// With the server's name, and what went wrong.
    pub(super) fn dial(&self, purpose: Purpose) -> io::Result<Session> {
        let named = |error: io::Error| {
            let what = match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("no answer within {} s", TIMEOUT.as_secs()),
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
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(TIMEOUT))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(TIMEOUT))?;
        Ok(socket)
    }

    fn negotiate(&self, socket: OwnedFd, purpose: Purpose) -> io::Result<Session> {
        // Reads and writes are the same calls for every stream socket.
        let mut stream = TcpStream::from(socket);
        let no_zeroes = negotiate::greet(&mut stream)?;
        let name = &self.address.export;
        let (socket, export): (OwnedFd, _) = match &self.tls {
            None => {
                let export = negotiate::negotiate(&mut stream, name, purpose, no_zeroes)?;
                (stream.into(), export)
            }
            Some(tls) => {
                negotiate::start_tls(&mut stream)?;
                let mut tunnel = tls.connect(stream)?;
                // What was said before TLS may have been anybody's.
                let export = negotiate::negotiate(&mut tunnel, name, purpose, no_zeroes)?;
                (tunnel.into_socket()?, export)
            }
        };
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
        Ok(Session { socket, export })
    }

    fn connect_tcp(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let mut resolved = self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
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

fn set_keepalive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED.as_millis() as u32)?;
    Ok(())
}
