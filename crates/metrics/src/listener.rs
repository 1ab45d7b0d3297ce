//! Sockets of either kind: TCP and Unix.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// A socket that scrapers connect to.
#[derive(Debug)]
pub enum MetricsListener {
    /// Of TCP.
    Tcp(TcpListener),
    /// A Unix socket, whose file belongs to the caller.
    Unix(UnixListener),
}

impl MetricsListener {
    pub(crate) fn prepare(&self) -> io::Result<()> {
        match self {
            MetricsListener::Tcp(listener) => listener.set_nonblocking(true),
            MetricsListener::Unix(listener) => listener.set_nonblocking(true),
        }
    }

    /// Accepts a client, if one waits. Its stream does not block.
    pub(crate) fn accept(&self) -> io::Result<ScraperStream> {
        let stream = match self {
            MetricsListener::Tcp(listener) => ScraperStream::Tcp(listener.accept()?.0),
            MetricsListener::Unix(listener) => ScraperStream::Unix(listener.accept()?.0),
        };
        match &stream {
            ScraperStream::Tcp(stream) => stream.set_nonblocking(true)?,
            ScraperStream::Unix(stream) => stream.set_nonblocking(true)?,
        }
        Ok(stream)
    }
}

impl AsFd for MetricsListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            MetricsListener::Tcp(listener) => listener.as_fd(),
            MetricsListener::Unix(listener) => listener.as_fd(),
        }
    }
}

/// The other end of a connection, as reported by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Of a Unix socket: the user.
    User(u32),
    /// Of TCP: the host.
    Host(IpAddr),
    /// The client is gone.
    Unknown,
}

/// A client's stream.
#[derive(Debug)]
pub(crate) enum ScraperStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl ScraperStream {
    /// Returns the other end.
    pub(crate) fn peer(&self) -> Peer {
        match self {
            ScraperStream::Tcp(stream) => stream.peer_addr().map_or(Peer::Unknown, |address| Peer::Host(address.ip())),
            ScraperStream::Unix(stream) => rustix::net::sockopt::socket_peercred(stream)
                .map_or(Peer::Unknown, |process| Peer::User(process.uid.as_raw())),
        }
    }

    /// Ends the stream to the client after the response.
    pub(crate) fn end_writing(&self) -> io::Result<()> {
        match self {
            ScraperStream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            ScraperStream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

impl Read for ScraperStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            ScraperStream::Tcp(stream) => stream.read(into),
            ScraperStream::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for ScraperStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            ScraperStream::Tcp(stream) => stream.write(bytes),
            ScraperStream::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for ScraperStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ScraperStream::Tcp(stream) => stream.as_fd(),
            ScraperStream::Unix(stream) => stream.as_fd(),
        }
    }
}
