//! What a user may choose.

use std::fmt;
use std::time::Duration;

use mqblk_core::{Op, Outcome};

/// What becomes of a request that the storage failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest is told.
    #[default]
    Report,
    /// The request is parked, and so are all that follow, until somebody says `resume`.
    Stop,
    /// It is tried again for so long, then the guest is told.
    Retry(Duration),
}

/// What becomes of a request for which the host's storage has no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNoSpace {
    /// The guest is told.
    #[default]
    Report,
    /// As [`OnError::Stop`].
    Stop,
}

/// Both of a disk. A guest's mistakes, what the storage cannot do, and what was cancelled are always answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// Of errors other than a lack of space.
    pub on_error: OnError,
    /// Of a lack of space.
    pub on_enospc: OnNoSpace,
}

/// Shortest and longest time that a request may be tried again, in seconds.
const RETRY_S: std::ops::RangeInclusive<u64> = 1..=86_400;
/// The pause before a request is tried again for the first time; each further one is twice as long, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl OnError {
    /// What is expected where [`parse`](Self::parse) finds nothing.
    pub const EXPECTED: &'static str = "report, stop or retry:SECONDS, with 1 to 86400 seconds";

    /// Reads what [`Display`](fmt::Display) writes.
    pub fn parse(text: &str) -> Option<OnError> {
        match text {
            "report" => Some(OnError::Report),
            "stop" => Some(OnError::Stop),
            text => {
                let seconds = text.strip_prefix("retry:")?;
                let digits = seconds.bytes().all(|byte| byte.is_ascii_digit());
                let seconds: u64 = seconds.parse().ok().filter(|seconds| digits && RETRY_S.contains(seconds))?;
                Some(OnError::Retry(Duration::from_secs(seconds)))
            }
        }
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OnError::Report => f.write_str("report"),
            OnError::Stop => f.write_str("stop"),
            OnError::Retry(time) => write!(f, "retry:{}", time.as_secs()),
        }
    }
}

impl OnNoSpace {
    /// The words that a user writes, in the order of [`OnNoSpace::from_word`].
    pub const WORDS: &'static [&'static str] = &["report", "stop"];

    /// That of one of [`OnNoSpace::WORDS`].
    pub fn from_word(word: &str) -> OnNoSpace {
        if word == "stop" { OnNoSpace::Stop } else { OnNoSpace::Report }
    }

    /// The word that a user writes for it.
    pub const fn word(self) -> &'static str {
        match self {
            OnNoSpace::Report => "report",
            OnNoSpace::Stop => "stop",
        }
    }
}

/// What is to be done about a request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is answered.
    Report,
    /// The disk stops.
    Stop,
    /// It is tried again, up to so long after its first failure.
    Retry(Duration),
}

impl ErrorPolicy {
    /// Whether every request is answered, so that there is nothing to do.
    pub(crate) fn always_reports(&self) -> bool {
        *self == ErrorPolicy::default()
    }

    /// What becomes of a request with this outcome. `cached`: the storage goes through the host's page cache.
    pub(crate) fn judge(&self, op: Op, outcome: Outcome, cached: bool) -> Fate {
        match outcome {
            Outcome::NoSpace if self.on_enospc == OnNoSpace::Stop => Fate::Stop,
            Outcome::Failed(_) => match self.on_error {
                OnError::Report => Fate::Report,
                OnError::Stop => Fate::Stop,
                OnError::Retry(_) if is_lost(op, outcome, cached) => Fate::Report,
                OnError::Retry(time) => Fate::Retry(time),
            },
            _ => Fate::Report,
        }
    }
}

/// Whether trying again could succeed and prove nothing. After a failed writeback Linux may have marked pages clean that are not
/// on the disk: the next sync succeeds without them. Which ones is not known, so neither a flush nor a write that was to be
/// durable says anything any more. A write that found no space was refused before anything of it was in the page cache.
pub(crate) fn is_lost(op: Op, outcome: Outcome, cached: bool) -> bool {
    let durable = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
    cached && (op == Op::Flush || (durable && outcome != Outcome::NoSpace))
}

/// The pause before a request is tried again that was so many times.
pub(crate) fn pause(tries: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << tries.min(16)).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mqblk_core::{ByteLen, Errno};

    const EIO: Outcome = Outcome::Failed(Errno(5));
    const WRITE: Op = Op::Write { fua: false };

    #[test]
    fn what_is_written_is_read_back() {
        for text in ["report", "stop", "retry:1", "retry:86400"] {
            assert_eq!(OnError::parse(text).unwrap().to_string(), text);
        }
        for text in
            ["", "Stop", "retry", "retry:", "retry:0", "retry:86401", "retry:-1", "retry:+1", "retry:1s", "ignore"]
        {
            assert_eq!(OnError::parse(text), None, "{text}");
        }
        for word in OnNoSpace::WORDS {
            assert_eq!(OnNoSpace::from_word(word).word(), *word);
        }
    }

    #[test]
    fn each_kind_of_error_has_its_own_setting_and_what_is_no_error_of_the_storage_none() {
        let stop = ErrorPolicy { on_error: OnError::Stop, on_enospc: OnNoSpace::Stop };
        let only_space = ErrorPolicy { on_enospc: OnNoSpace::Stop, ..ErrorPolicy::default() };
        let only_errors = ErrorPolicy { on_error: OnError::Stop, ..ErrorPolicy::default() };
        for (policy, of_error, of_space) in [
            (ErrorPolicy::default(), Fate::Report, Fate::Report),
            (stop, Fate::Stop, Fate::Stop),
            (only_space, Fate::Report, Fate::Stop),
            (only_errors, Fate::Stop, Fate::Report),
        ] {
            assert_eq!(policy.judge(WRITE, EIO, true), of_error);
            assert_eq!(policy.judge(WRITE, Outcome::NoSpace, true), of_space);
            for other in [
                Outcome::Done(ByteLen(512)),
                Outcome::OutOfRange,
                Outcome::ReadOnly,
                Outcome::Unsupported,
                Outcome::Aborted,
            ] {
                assert_eq!(policy.judge(WRITE, other, true), Fate::Report, "{other:?}");
            }
        }
    }

    #[test]
    fn what_a_failed_sync_may_have_lost_is_not_tried_again() {
        let time = Duration::from_secs(9);
        let retry = ErrorPolicy { on_error: OnError::Retry(time), ..ErrorPolicy::default() };
        let durable = Op::Write { fua: true };
        for (op, cached, fate) in [
            (WRITE, true, Fate::Retry(time)),
            (Op::Read, true, Fate::Retry(time)),
            (Op::Flush, true, Fate::Report),
            (durable, true, Fate::Report),
            (Op::WriteZeroes { may_unmap: false, fua: true }, true, Fate::Report),
            (Op::Flush, false, Fate::Retry(time)),
            (durable, false, Fate::Retry(time)),
        ] {
            assert_eq!(retry.judge(op, EIO, cached), fate, "{op:?} {cached}");
        }
        assert!(!is_lost(durable, Outcome::NoSpace, true) && is_lost(Op::Flush, Outcome::NoSpace, true));
    }

    #[test]
    fn pauses_grow_to_their_bound() {
        let pauses: Vec<u128> = (0..8).map(|tries| pause(tries).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }
}
