//! Lines over a Unix stream socket, each read with a deadline.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use mqblk_test_bounds::Bound;

/// The most bytes kept of a line that does not end.
const LINE_LIMIT: usize = 64 << 20;

/// Interval of connection attempts.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Result of waiting for a line.
pub(crate) enum LineResult {
    /// A line, without its end.
    Text(String),
    /// No complete line before the deadline.
    Late,
    /// The other side closed the stream.
    Closed,
}

/// The socket and the part of the next line that was read.
#[derive(Debug)]
pub(crate) struct LineStream {
    stream: UnixStream,
    read: Vec<u8>,
    searched: usize,
}

impl LineStream {
    /// Connects to the socket at `path`. It exists once QEMU has bound it, and refuses connections until QEMU listens.
    pub(crate) fn connect(path: &Path, within: Bound) -> Result<Self> {
        let deadline = Instant::now() + within.time();
        let stream = loop {
            match UnixStream::connect(path) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                result => break result.with_context(|| format!("cannot connect to {}", path.display()))?,
            }
        };
        stream.set_write_timeout(Some(within.time()))?;
        Ok(Self { stream, read: Vec::new(), searched: 0 })
    }

    /// Sends a line.
    pub(crate) fn send(&mut self, line: &str) -> Result<()> {
        let mut bytes = line.as_bytes().to_vec();
        bytes.push(b'\n');
        self.stream.write_all(&bytes).context("cannot send to the guest")
    }

    /// Returns the next line, or [`LineResult::Late`] at the deadline.
    pub(crate) fn next(&mut self, deadline: Instant) -> Result<LineResult> {
        loop {
            if let Some(end) = self.read[self.searched..].iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=self.searched + end).collect();
                self.searched = 0;
                let text = String::from_utf8_lossy(&line);
                return Ok(LineResult::Text(text.trim_end_matches(['\r', '\n']).to_owned()));
            }
            self.searched = self.read.len();
            ensure!(self.read.len() < LINE_LIMIT, "a line of more than {LINE_LIMIT} bytes");
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(LineResult::Late);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; 16 << 10];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(LineResult::Closed),
                Ok(count) => self.read.extend_from_slice(&chunk[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(LineResult::Late);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(LineResult::Closed),
                Err(error) => bail!("cannot read the stream: {error}"),
            }
        }
    }
}
