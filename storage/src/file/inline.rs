//! Inline I/O: transfers inside `submit`, without the ring, for data that is in memory anyway.

use mqblk_core::{Op, Request};
use mqblk_memory::Buffer;
use mqblk_uring::Lane;
use rustix::io::Errno;

use super::{Kind, OpenFile};

/// Longer transfers go through the ring, whose kernel threads copy in parallel to the worker.
const LONGEST: u64 = 256 << 10;

/// Decides which transfers are tried inline.
#[derive(Debug)]
pub(super) struct Inline {
    kind: Tried,
    /// Backoff for the page cache; an in-memory file never misses.
    trust: Trust,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tried {
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
struct Trust {
    skip: u32,
    misses: u32,
}

impl Trust {
    const MOST_SKIPPED: u32 = 64;

    #[inline]
    fn try_now(&mut self) -> bool {
        let now = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        now
    }

    #[inline]
    fn hit(&mut self) {
        self.misses = 0;
    }

    fn miss(&mut self) {
        self.misses = (self.misses * 2).clamp(1, Self::MOST_SKIPPED);
        self.skip = self.misses;
    }
}

impl Inline {
    pub(super) fn new(file: &OpenFile) -> Inline {
        let kind = match file.kind {
            Kind::InMemory => Tried::All,
            _ if file.direct.is_none() => Tried::Cached,
            _ => Tried::None,
        };
        Inline { kind, trust: Trust::default() }
    }

    /// Returns true if the file is in memory, so that flushes are no-ops.
    #[inline]
    pub(super) fn is_memory(&self) -> bool {
        self.kind == Tried::All
    }

    /// Transfers as much of a read or write as is possible without waiting. Returns the number of bytes.
    #[inline]
    pub(super) fn transfer(&mut self, context: &mut Lane, file: &OpenFile, request: &Request<Buffer>) -> u64 {
        let (Some(buffer), Request { start, len, op, .. }) = (&request.buffer, request) else { return 0 };
        // A write to a frozen file system waits in the system call even with RWF_NOWAIT (Linux, fs/read_write.c takes the file system's
        // write lock first); a write through the ring does not block the worker.
        if self.kind == Tried::None || len.0 > LONGEST || (*op != Op::Read && self.kind == Tried::Cached) {
            return 0;
        }
        if !self.trust.try_now() {
            return 0;
        }
        let no_wait = self.kind == Tried::Cached;
        let fd = std::os::fd::AsFd::as_fd(&file.fd);
        let moved = match op {
            Op::Read => context.read_inline(fd, *start, buffer, 0, no_wait),
            _ => context.write_inline(fd, *start, buffer, 0),
        };
        match moved {
            Ok(bytes) => {
                self.trust.hit();
                bytes
            }
            // Not cached, or a file system without RWF_NOWAIT: the request goes through the ring. Other errors recur there.
            Err(error) => {
                if matches!(Errno::from_io_error(&error), Some(Errno::AGAIN | Errno::OPNOTSUPP)) {
                    self.trust.miss();
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
        let mut backoff = Trust::default();
        let mut tries = Vec::new();
        for at in 0..400 {
            if backoff.try_now() {
                tries.push(at);
                backoff.miss();
            }
        }
        assert_eq!(tries, [0, 2, 5, 10, 19, 36, 69, 134, 199, 264, 329, 394]);
        backoff.skip = 0;
        backoff.hit();
        assert!(backoff.try_now() && backoff.try_now());
    }
}
