//! Inline I/O: transfers inside `submit`, without the ring, for data that is in memory anyway.

use mqblk_core::{Op, Request};
use mqblk_memory::Buffer;
use mqblk_uring::UringContext;
use rustix::io::Errno;

use super::{FileKind, OpenFile};

/// Longer transfers go through the ring, whose kernel threads copy in parallel to the worker.
const MAX_INLINE: u64 = 256 << 10;

/// Decides which transfers are tried inline.
#[derive(Debug)]
pub(super) struct InlineIo {
    mode: InlineMode,
    /// Backoff for the page cache; an in-memory file never misses.
    backoff: MissBackoff,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InlineMode {
    /// Direct I/O: always waits for storage.
    None,
    /// An in-memory file: every transfer is a copy. (Swapped-out pages are waited for, as for all memory of the daemon.)
    All,
    /// Reads of cached pages (`RWF_NOWAIT`).
    Cached,
}

/// Backoff after misses: each miss in a row doubles the number of requests that go directly to the ring, so that uncached storage costs a
/// useless system call for one request of 64 only.
#[derive(Debug, Default)]
struct MissBackoff {
    skip: u32,
    misses: u32,
}

impl MissBackoff {
    const MAX_SKIPPED: u32 = 64;

    #[inline]
    fn should_try(&mut self) -> bool {
        let now = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        now
    }

    #[inline]
    fn record_hit(&mut self) {
        self.misses = 0;
    }

    fn record_miss(&mut self) {
        self.misses = (self.misses * 2).clamp(1, Self::MAX_SKIPPED);
        self.skip = self.misses;
    }
}

impl InlineIo {
    pub(super) fn new(file: &OpenFile) -> InlineIo {
        let mode = match file.kind {
            FileKind::InMemory => InlineMode::All,
            _ if file.direct.is_none() => InlineMode::Cached,
            _ => InlineMode::None,
        };
        InlineIo { mode, backoff: MissBackoff::default() }
    }

    /// Returns true if the file is in memory, so that flushes are no-ops.
    #[inline]
    pub(super) fn is_in_memory(&self) -> bool {
        self.mode == InlineMode::All
    }

    /// Transfers as much of a read or write as is possible without waiting. Returns the number of bytes.
    #[inline]
    pub(super) fn transfer(&mut self, context: &mut UringContext, file: &OpenFile, request: &Request<Buffer>) -> u64 {
        let (Some(buffer), Request { start, len, op, .. }) = (&request.buffer, request) else { return 0 };
        // A write to a frozen file system waits in the system call even with RWF_NOWAIT (Linux, fs/read_write.c takes the file system's
        // write lock first); a write through the ring does not block the worker.
        if self.mode == InlineMode::None || len.0 > MAX_INLINE || (*op != Op::Read && self.mode == InlineMode::Cached) {
            return 0;
        }
        if !self.backoff.should_try() {
            return 0;
        }
        let no_wait = self.mode == InlineMode::Cached;
        let fd = std::os::fd::AsFd::as_fd(&file.fd);
        let moved = match op {
            Op::Read => context.read_inline(fd, *start, buffer, 0, no_wait),
            _ => context.write_inline(fd, *start, buffer, 0),
        };
        match moved {
            Ok(bytes) => {
                self.backoff.record_hit();
                bytes
            }
            // Not cached, or a file system without RWF_NOWAIT: the request goes through the ring. Other errors recur there.
            Err(error) => {
                if matches!(Errno::from_io_error(&error), Some(Errno::AGAIN | Errno::OPNOTSUPP)) {
                    self.backoff.record_miss();
                }
                0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misses_in_a_row_back_off() {
        let mut backoff = MissBackoff::default();
        let mut tries = Vec::new();
        for at in 0..400 {
            if backoff.should_try() {
                tries.push(at);
                backoff.record_miss();
            }
        }
        assert_eq!(tries, [0, 2, 5, 10, 19, 36, 69, 134, 199, 264, 329, 394]);
        backoff.skip = 0;
        backoff.record_hit();
        assert!(backoff.should_try() && backoff.should_try());
    }
}
