//! Inline I/O: transfers inside `submit`, without the ring, for data that is in memory anyway.

use mqblk_core::{ByteLen, Op, Request};
use mqblk_memory::Buffer;
use mqblk_uring::UringContext;
use rustix::io::Errno;

use super::open_file::{FileKind, OpenFile};

/// Longer transfers are copied by kernel threads, in parallel to the worker and to each other.
const MAX_INLINE: u64 = 256 << 10;

/// Shorter transfers are always copied inline: a kernel thread costs more than the copy.
const MIN_IN_THREAD: u64 = 64 << 10;

/// Bytes of transfers from [`MIN_IN_THREAD`] on that one submission copies inline: about 100 us, which the worker's
/// other disks wait. Kernel threads copy the others.
const INLINE_BYTES: u64 = 1 << 20;

/// Selects the transfers that are tried inline.
#[derive(Debug)]
pub(super) struct InlineIo {
    mode: InlineMode,
    /// Backoff for the page cache; an in-memory file never misses.
    backoff: MissBackoff,
    budget: InlineBudget,
}

/// Bytes that a submission may still copy inline.
#[derive(Debug)]
struct InlineBudget(u64);

impl InlineBudget {
    /// Returns true if a transfer of `len` bytes is short enough to be copied inline now.
    #[inline]
    fn allows(&self, len: u64) -> bool {
        len < MIN_IN_THREAD || len <= self.0.min(MAX_INLINE)
    }

    #[inline]
    fn spend(&mut self, len: u64) {
        if len >= MIN_IN_THREAD {
            self.0 = self.0.saturating_sub(len);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InlineMode {
    /// Direct I/O: always waits for storage.
    None,
    /// An in-memory file: every transfer is a copy. (Swapped-out pages are waited for, as for all memory of the
    /// daemon.)
    All,
    /// Reads of cached pages (`RWF_NOWAIT`).
    Cached,
}

/// Backoff after misses: each miss in a row doubles the number of requests that go directly to the ring, so that
/// uncached storage costs a useless system call for only one request in 64.
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
        InlineIo { mode, backoff: MissBackoff::default(), budget: InlineBudget(INLINE_BYTES) }
    }

    /// Begins a submission.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.budget = InlineBudget(INLINE_BYTES);
    }

    /// Returns true if a kernel thread must execute a transfer of `len` bytes in the ring, because the ring would copy
    /// it within the submission.
    #[inline]
    pub(super) fn needs_thread(&self, len: ByteLen) -> bool {
        self.mode != InlineMode::None && !self.budget.allows(len.0)
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
        // A write to a frozen file system waits in the system call even with RWF_NOWAIT (Linux, fs/read_write.c takes
        // the file system's write lock first); a write through the ring does not block the worker.
        if self.mode == InlineMode::None
            || !self.budget.allows(len.0)
            || (*op != Op::Read && self.mode == InlineMode::Cached)
        {
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
                self.budget.spend(bytes);
                bytes
            }
            // Not cached, or a file system without RWF_NOWAIT: the request goes through the ring. Other errors recur
            // there.
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
    fn a_submission_copies_its_share_inline() {
        let mut budget = InlineBudget(INLINE_BYTES);
        assert!(budget.allows(MAX_INLINE) && !budget.allows(MAX_INLINE + 512));
        budget.spend(MIN_IN_THREAD - 512);
        assert_eq!(budget.0, INLINE_BYTES, "short transfers are free");
        for _ in 0..INLINE_BYTES / MAX_INLINE {
            assert!(budget.allows(MAX_INLINE));
            budget.spend(MAX_INLINE);
        }
        assert!(!budget.allows(MIN_IN_THREAD) && budget.allows(MIN_IN_THREAD - 512));
    }

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
