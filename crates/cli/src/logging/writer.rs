//! Writes to standard error only lines that fit without waiting: a stopped reader (a full pipe, a terminal after
//! Ctrl-S) must not block a thread that serves disks.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use super::format::LogFormat;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::AsFd;

/// Bytes that a writable pipe or socket takes at once (PIPE_BUF, pipe(7)). Longer lines are cut.
const LONGEST: usize = 4096;

/// Lines lost since the last written one.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Standard error, for whole lines.
pub(super) struct Lines(pub(super) LogFormat);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Only one thread at a time checks for room, and uses it.
        let mut stderr = io::stderr().lock();
        let lost = LOST.load(Ordering::Relaxed);
        if lost > 0 && has_room(&stderr) {
            LOST.store(0, Ordering::Relaxed);
            writeln!(stderr, "{}", self.0.note(&format!("{lost} lines were lost: nobody read standard error")))?;
        }
        if !has_room(&stderr) {
            LOST.fetch_add(1, Ordering::Relaxed);
        } else if line.len() <= LONGEST {
            stderr.write_all(line)?;
        } else if self.0 == LogFormat::Json {
            writeln!(stderr, "{}", self.0.note(&format!("a line of {} bytes was left out", line.len())))?;
        } else {
            stderr.write_all(&line[..LONGEST - 1])?;
            stderr.write_all(b"\n")?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn has_room(file: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(file, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Writing to a closed one is an error for its writer.
    rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}
