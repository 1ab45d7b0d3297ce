//! Lines over a stream socket: bounded in length and in time, and abandoned at once when the server stops.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Bytes of one read.
const CHUNK: usize = 16 << 10;

/// The result of waiting for a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A line, without its newline.
    Whole(Vec<u8>),
    /// The line is longer than allowed.
    TooLong,
    /// The peer closed the connection; an incomplete last line is dropped.
    Closed,
    /// The deadline has passed.
    TimedOut,
    /// The server is stopping.
    Stopped,
}

/// Deadline of reading a line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LineDeadline {
    /// This long after the line's first byte. The first byte is waited for without a limit.
    FromFirstByte(Duration),
    /// At this time.
    Until(Instant),
}

enum WaitResult {
    Ready,
    TimedOut,
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
    /// The descriptor that came with the last bytes.
    descriptor: Option<OwnedFd>,
}

impl Lines {
    /// Returns the user of the process at the other end.
    pub(crate) fn peer_uid(&self) -> Option<u32> {
        rustix::net::sockopt::socket_peercred(&self.stream).ok().map(|peer| peer.uid.as_raw())
    }

    /// Wraps a socket, for lines of at most `limit` bytes without the newline.
    pub(crate) fn new(stream: UnixStream, stop: Option<Arc<UnixStream>>, limit: usize) -> io::Result<Lines> {
        stream.set_nonblocking(true)?;
        Ok(Lines { stream, stop, limit, pending: Vec::new(), descriptor: None })
    }

    /// Reads the next line.
    pub(crate) fn read(&mut self, deadline_from: LineDeadline) -> io::Result<Line> {
        let mut deadline = match deadline_from {
            LineDeadline::Until(time) => Some(time),
            LineDeadline::FromFirstByte(_) => None,
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
            if let (None, false, LineDeadline::FromFirstByte(time)) = (deadline, self.pending.is_empty(), deadline_from)
            {
                deadline = Some(Instant::now() + time);
            }
            match self.wait(PollFlags::IN, deadline)? {
                WaitResult::Ready => {}
                WaitResult::TimedOut => return Ok(Line::TimedOut),
                WaitResult::Stopped => return Ok(Line::Stopped),
            }
            self.pending.resize(searched + CHUNK, 0);
            let got = self.receive(searched);
            self.pending.truncate(searched + *got.as_ref().unwrap_or(&0));
            match got {
                Ok(0) => return Ok(Line::Closed),
                Ok(_) => {}
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives bytes behind the first `start` pending ones, and their descriptor. Of several descriptors one is kept.
    fn receive(&mut self, start: usize) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let bytes = &mut [IoSliceMut::new(&mut self.pending[start..])];
        let received = recvmsg(&self.stream, bytes, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
                self.descriptor = descriptors.next();
            }
        }
        Ok(received.bytes)
    }

    /// Takes the descriptor that came with the last line.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }

    /// Returns the socket.
    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Writes a short line at once, with a descriptor.
    ///
    /// # Errors
    /// When the socket does not take it all.
    pub(crate) fn write_with(&mut self, line: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let descriptors = [descriptor];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let sent = sendmsg(&self.stream, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)?;
        if sent == line.len() { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
    }

    /// Writes all of `bytes` before `deadline`.
    ///
    /// # Errors
    /// `TimedOut` when the peer does not read, `Interrupted` when the server stops, or the system's error.
    pub(crate) fn write(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    match self.wait(PollFlags::OUT, Some(deadline))? {
                        WaitResult::Ready => {}
                        WaitResult::TimedOut => return Err(ErrorKind::TimedOut.into()),
                        WaitResult::Stopped => return Err(ErrorKind::Interrupted.into()),
                    }
                }
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
            // Otherwise a reader that takes a byte at a time would never time out.
            if !bytes.is_empty() && Instant::now() >= deadline {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags, deadline: Option<Instant>) -> io::Result<WaitResult> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(WaitResult::TimedOut);
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
                return Ok(WaitResult::Stopped);
            }
            if !fds[0].revents().is_empty() {
                return Ok(WaitResult::Ready);
            }
        }
    }
}

/// Returns true if the same call may succeed later.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Converts a time. Longer ones than the kernel can represent become its maximum.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}
