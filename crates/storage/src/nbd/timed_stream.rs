//! A socket whose calls end in time.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

/// Timeout of each call.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// A socket with a timeout for each of its calls ([`TIMEOUT`]) and for all of them: a server that sends occasional
/// bytes cannot prolong it.
#[derive(Debug)]
pub(super) struct TimedStream {
    stream: TcpStream,
    end: Instant,
}

impl TimedStream {
    pub(super) fn new(stream: TcpStream, timeout: Duration) -> TimedStream {
        TimedStream { stream, end: Instant::now() + timeout }
    }

    pub(super) fn into_inner(self) -> TcpStream {
        self.stream
    }

    /// Sets the bound of the next call.
    fn bound(&self, direction: sockopt::Timeout) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(sockopt::set_socket_timeout(&self.stream, direction, Some(left.min(TIMEOUT)))?)
    }
}

impl Read for TimedStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.bound(sockopt::Timeout::Recv)?;
        self.stream.read(bytes)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bound(sockopt::Timeout::Send)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Each of its bytes arrives in time.
    #[test]
    fn a_server_that_sends_a_byte_now_and_then_ends_in_time() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            while theirs.write_all(b"N").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let ours = TcpStream::from(OwnedFd::from(ours));
        let mut stream = TimedStream::new(ours, Duration::from_millis(200));
        let error = stream.read_exact(&mut vec![0; 1 << 20]).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock), "{error}");
    }
}
