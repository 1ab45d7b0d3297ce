//! Transfers that are done inside `submit`, without the ring: for data that is in memory anyway.

use mqblk_core::{Op, Request};
use mqblk_memory::Buffer;
use mqblk_uring::Lane;
use rustix::io::Errno;

use super::{Kind, OpenFile};

/// Longer transfers go through the ring, whose threads copy beside the worker.
const LONGEST: u64 = 256 << 10;

/// Which transfers are tried inline.
#[derive(Debug)]
pub(super) struct Inline {
    kind: Tried,
    /// In the page cache: a file that is memory never misses.
    trust: Trust,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tried {
    /// Direct I/O: there is always a wait.
    None,
    /// The file is memory: everything is a copy. (Pages that were swapped out are waited for, as all the daemon's are.)
    All,
    /// Reads of what is in the page cache (`RWF_NOWAIT`).
    Cached,
}

/// How often to try: each miss in a row doubles the number of requests that go straight to the ring, so that storage that
/// is not cached pays for a useless system call in one request of 64.
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

    /// Whether the file is memory, so that nothing can be made more durable than it is.
    #[inline]
    pub(super) fn is_memory(&self) -> bool {
        self.kind == Tried::All
    }

    /// Does what can be done at once of a read or write; returns how many bytes that was.
    #[inline]
    pub(super) fn transfer(&mut self, lane: &mut Lane, file: &OpenFile, request: &Request<Buffer>) -> u64 {
        let (Some(buffer), Request { start, len, op, .. }) = (&request.buffer, request) else { return 0 };
        // A write to a frozen file system waits in the system call whatever is asked of it (Linux, fs/read_write.c takes the file system's
        // write lock first); the ring's does not.
        if self.kind == Tried::None || len.0 > LONGEST || (*op != Op::Read && self.kind == Tried::Cached) {
            return 0;
        }
        if !self.trust.try_now() {
            return 0;
        }
        let no_wait = self.kind == Tried::Cached;
        let fd = std::os::fd::AsFd::as_fd(&file.fd);
        let moved = match op {
            Op::Read => lane.read_inline(fd, *start, buffer, 0, no_wait),
            _ => lane.write_inline(fd, *start, buffer, 0),
        };
        match moved {
            Ok(bytes) => {
                self.trust.hit();
                bytes
            }
            // Not cached, or a file system without RWF_NOWAIT: the ring does it. An error is met there again.
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
    fn misses_in_a_row_are_tried_less_and_less() {
        let mut trust = Trust::default();
        let mut tries = Vec::new();
        for at in 0..400 {
            if trust.try_now() {
                tries.push(at);
                trust.miss();
            }
        }
        assert_eq!(tries, [0, 2, 5, 10, 19, 36, 69, 134, 199, 264, 329, 394]);
        trust.skip = 0;
        trust.hit();
        assert!(trust.try_now() && trust.try_now());
    }
}
