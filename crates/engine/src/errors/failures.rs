//! The log of a disk's failed requests: the first at once, those that follow within [`INTERVAL`] in one line.

use std::fmt;
use std::time::{Duration, Instant};

use mqblk_core::{ByteOffset, Op, Outcome};

/// Shortest time between two log lines about failed requests of a disk.
const INTERVAL: Duration = Duration::from_secs(10);

/// A failed request and its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FailedRequest {
    pub(crate) outcome: Outcome,
    pub(crate) op: Op,
    pub(crate) start: ByteOffset,
}

impl FailedRequest {
    /// Returns the name of its operation.
    pub(crate) fn op_name(&self) -> &'static str {
        match self.op {
            Op::Read => "read",
            Op::Write { .. } => "write",
            Op::Flush => "flush",
            Op::Discard { .. } => "discard",
            Op::WriteZeroes { .. } => "write-zeroes",
        }
    }
}

impl fmt::Display for FailedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op_name())?;
        if self.op != Op::Flush {
            write!(f, " at {}", self.start.0)?;
        }
        write!(f, ": {}", FailureText(self.outcome))
    }
}

/// Describes an outcome.
struct FailureText(Outcome);

impl fmt::Display for FailureText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Outcome::NoSpace => f.write_str("no space left on the host's storage"),
            Outcome::Failed(errno) => std::io::Error::from_raw_os_error(errno.0).fmt(f),
            Outcome::OutOfRange => f.write_str("past the end of the disk"),
            Outcome::ReadOnly => f.write_str("the disk is read-only"),
            Outcome::Unsupported => f.write_str("the disk does not support it"),
            other => write!(f, "{other:?}"),
        }
    }
}

/// The failures of a disk.
#[derive(Debug, Default)]
pub(super) struct FailureLog {
    total: u64,
    last: Option<(FailedRequest, Instant)>,
    /// No line is written before this time.
    quiet_until: Option<Instant>,
    /// Failures since the last line.
    followed: u64,
}

/// A line to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureLine {
    /// A request failed after a time without failures.
    First(FailedRequest),
    /// This many failed after the first; the last of them.
    Followed(u64, FailedRequest),
}

impl FailureLog {
    /// Counts a failure. Returns the line to log, if any.
    pub(super) fn add(&mut self, request: FailedRequest, now: Instant) -> Option<FailureLine> {
        self.total += 1;
        self.last = Some((request, now));
        if self.quiet_until.is_some_and(|until| now < until) {
            self.followed += 1;
            return None;
        }
        // Earlier failures belong to the past interval; without a call of `summary` they are reported here.
        let followed = std::mem::take(&mut self.followed);
        self.quiet_until = Some(now + INTERVAL);
        Some(if followed > 0 { FailureLine::Followed(followed + 1, request) } else { FailureLine::First(request) })
    }

    /// Returns the line about the failures that followed, once it is due; with `all` at once.
    pub(super) fn summary(&mut self, now: Instant, all: bool) -> Option<FailureLine> {
        let (request, _) = self.last?;
        if self.followed == 0 || !(all || self.quiet_until.is_none_or(|until| now >= until)) {
            return None;
        }
        self.quiet_until = Some(now + INTERVAL);
        Some(FailureLine::Followed(std::mem::take(&mut self.followed), request))
    }

    /// Returns true if failures have followed that no line has reported.
    pub(super) fn has_untold(&self) -> bool {
        self.followed > 0
    }

    /// Returns the number of failures.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the last failure and its time.
    pub(super) fn last(&self) -> Option<(FailedRequest, Instant)> {
        self.last
    }
}

impl FailureLine {
    /// Logs the line.
    pub(super) fn log(self, disk: &str) {
        let (FailureLine::First(request) | FailureLine::Followed(_, request)) = self;
        let (op, offset, error) = (request.op_name(), request.start.0, FailureText(request.outcome));
        match self {
            FailureLine::First(_) => {
                tracing::warn!(disk, op, offset, %error, "I/O error: a request of the guest failed");
            }
            FailureLine::Followed(failed, _) => {
                tracing::warn!(disk, failed, op, offset, %error, "more I/O errors followed; the last of them");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mqblk_core::Errno;

    fn read_at(start: u64) -> FailedRequest {
        FailedRequest { outcome: Outcome::Failed(Errno(5)), op: Op::Read, start: ByteOffset(start) }
    }

    #[test]
    fn the_first_is_told_at_once_and_the_others_together() {
        let (mut log, start) = (FailureLog::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(log.summary(start, true), None);
        assert_eq!(log.add(read_at(0), at(0)), Some(FailureLine::First(read_at(0))));
        for nth in 1..=1000 {
            assert_eq!(log.add(read_at(nth), at(nth)), None);
        }
        assert_eq!(log.summary(at(9_999), false), None);
        assert_eq!(log.summary(at(10_000), false), Some(FailureLine::Followed(1000, read_at(1000))));
        assert_eq!(log.summary(at(30_000), false), None, "nothing followed");
        assert_eq!(log.add(read_at(7), at(30_000)), Some(FailureLine::First(read_at(7))), "after a quiet time");
        assert_eq!(log.add(read_at(8), at(30_001)), None);
        assert_eq!(log.summary(at(30_002), false), None);
        assert_eq!(log.summary(at(30_002), true), Some(FailureLine::Followed(1, read_at(8))), "at the end");
        assert_eq!((log.total(), log.last()), (1003, Some((read_at(8), at(30_001)))));
    }

    #[test]
    fn failures_that_nobody_summed_up_are_told_with_the_next() {
        let (mut log, start) = (FailureLog::default(), Instant::now());
        log.add(read_at(0), start);
        log.add(read_at(1), start);
        let later = start + INTERVAL;
        assert_eq!(log.add(read_at(2), later), Some(FailureLine::Followed(2, read_at(2))));
        assert_eq!(log.add(read_at(3), later), None);
    }

    #[test]
    fn each_outcome_has_a_text() {
        let text = |outcome, op| FailedRequest { outcome, op, start: ByteOffset(512) }.to_string();
        assert_eq!(text(Outcome::Failed(Errno(5)), Op::Read), "read at 512: Input/output error (os error 5)");
        assert_eq!(text(Outcome::OutOfRange, Op::Write { fua: true }), "write at 512: past the end of the disk");
        assert_eq!(text(Outcome::NoSpace, Op::Flush), "flush: no space left on the host's storage");
    }
}
