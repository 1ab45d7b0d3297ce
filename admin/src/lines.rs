//! Lines over a stream socket: bounded in length and in time, and given up at once when the server stops.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// What is read at once.
const CHUNK: usize = 16 << 10;

/// What came of waiting for a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A line, without its newline.
    Whole(Vec<u8>),
    /// More bytes than a line may have.
    TooLong,
    /// The other side closed; what it sent of a last line is dropped.
    Ended,
    /// The time was over.
    Late,
    /// The server stops.
    Stopped,
}

/// When reading a line is given up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Timeouts {
    /// So long after the line's first byte; for the first byte it is waited for ever.
    FromFirstByte(Duration),
    /// At this moment.
    Until(Instant),
}

enum Woken {
    Ready,
    Late,
    Stopped,
}

/// A socket that is read and written in lines.
#[derive(Debug)]
pub(crate) struct Lines {
    stream: UnixStream,
    /// Hangs up when the server stops.
    stop: Option<Arc<UnixStream>>,
    limit: usize,
    pending: Vec<u8>,
}

impl Lines {
    /// Lines of at most `limit` bytes, without the newline.
    pub(crate) fn new(stream: UnixStream, stop: Option<Arc<UnixStream>>, limit: usize) -> io::Result<Lines> {
        stream.set_nonblocking(true)?;
        Ok(Lines { stream, stop, limit, pending: Vec::new() })
    }

    /// The next line.
    pub(crate) fn read(&mut self, timeouts: Timeouts) -> io::Result<Line> {
        let mut deadline = match timeouts {
            Timeouts::Until(moment) => Some(moment),
            Timeouts::FromFirstByte(_) => None,
        };
        let mut searched = 0;
        loop {
            if let Some(at) = self.pending[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.pending.split_off(searched + at + 1);
                let mut line = std::mem::replace(&mut self.pending, rest);
                line.pop();
                return Ok(if line.len() > self.limit { Line::TooLong } else { Line::Whole(line) });
            }
            searched = self.pending.len();
            if searched > self.limit {
                return Ok(Line::TooLong);
            }
            if let (None, false, Timeouts::FromFirstByte(time)) = (deadline, self.pending.is_empty(), timeouts) {
                deadline = Some(Instant::now() + time);
            }
            match self.wait(PollFlags::IN, deadline)? {
                Woken::Ready => {}
                Woken::Late => return Ok(Line::Late),
                Woken::Stopped => return Ok(Line::Stopped),
            }
            self.pending.resize(searched + CHUNK, 0);
            let got = self.stream.read(&mut self.pending[searched..]);
            self.pending.truncate(searched + *got.as_ref().unwrap_or(&0));
            match got {
                Ok(0) => return Ok(Line::Ended),
                Ok(_) => {}
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes all of `bytes` before `deadline`.
    ///
    /// # Errors
    /// `TimedOut` when the other side does not read, `Interrupted` when the server stops, or what the host says.
    pub(crate) fn write(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    match self.wait(PollFlags::OUT, Some(deadline))? {
                        Woken::Ready => {}
                        Woken::Late => return Err(ErrorKind::TimedOut.into()),
                        Woken::Stopped => return Err(ErrorKind::Interrupted.into()),
                    }
                }
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
            // A reader that takes a byte at a time would else never run out of time.
            if !bytes.is_empty() && Instant::now() >= deadline {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags, deadline: Option<Instant>) -> io::Result<Woken> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Woken::Late);
            }
            let left = left.map(timespec);
            let mut fds = vec![PollFd::new(&self.stream, flags)];
            fds.extend(self.stop.as_deref().map(|stop| PollFd::new(stop, PollFlags::IN)));
            match rustix::event::poll(&mut fds, left.as_ref()) {
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
            if fds.get(1).is_some_and(|stop| !stop.revents().is_empty()) {
                return Ok(Woken::Stopped);
            }
            if !fds[0].revents().is_empty() {
                return Ok(Woken::Ready);
            }
        }
    }
}

/// Whether the same call may go well a moment later.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// A time that is longer than the kernel can count is as long as it can count.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}
