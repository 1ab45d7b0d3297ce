//! The error policy of a disk.

use std::fmt;
use std::time::Duration;

use mqblk_core::{Errno, Op, Outcome};

/// Handling of a request that the storage failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// It is completed with the error.
    #[default]
    Report,
    /// The disk stops: the request and all that follow are parked until the disk is resumed.
    Stop,
    /// It is repeated for this long, then completed with the error.
    Retry(Duration),
}

/// Handling of a request for which the host's storage has no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNoSpace {
    /// It is completed with the error.
    #[default]
    Report,
    /// As [`OnError::Stop`].
    Stop,
}

/// The error policy of a disk. Malformed, unsupported and cancelled requests are always completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// For errors other than a lack of space.
    pub on_error: OnError,
    /// For a lack of space.
    pub on_enospc: OnNoSpace,
}

/// Shortest and longest time for which a request may be repeated, in seconds.
const RETRY_S: std::ops::RangeInclusive<u64> = 1..=86_400;
/// The delay before the first repetition; each further one is twice as long, up to the longest.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

impl OnError {
    /// The syntax of [`parse`](Self::parse), for error messages.
    pub const EXPECTED: &'static str = "report, stop or retry:SECONDS, with 1 to 86400 seconds";

    /// Parses the text form of [`Display`](fmt::Display).
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

    /// Returns the choice of one of [`OnNoSpace::WORDS`].
    pub fn from_word(word: &str) -> OnNoSpace {
        if word == "stop" { OnNoSpace::Stop } else { OnNoSpace::Report }
    }

    /// Returns the word that a user writes for it.
    pub const fn word(self) -> &'static str {
        match self {
            OnNoSpace::Report => "report",
            OnNoSpace::Stop => "stop",
        }
    }
}

/// Handling of a request that the channel has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disposition {
    /// Complete it.
    Report,
    /// Stop the disk and park it.
    Stop,
    /// Repeat it, up to this long after its first failure.
    Retry(Duration),
}

impl ErrorPolicy {
    /// Returns true if every failed request is completed with its error, so that no guard is needed.
    pub(crate) fn always_reports(&self) -> bool {
        *self == ErrorPolicy::default()
    }

    /// Returns the handling of a request of this outcome. `cached`: the storage goes through the host's page cache.
    pub(crate) fn disposition(&self, op: Op, outcome: Outcome, cached: bool) -> Disposition {
        match outcome {
            Outcome::NoSpace if self.on_enospc == OnNoSpace::Stop => Disposition::Stop,
            // The guest's memory has failed, not the storage.
            Outcome::Failed(Errno::FAULT) => Disposition::Report,
            Outcome::Failed(_) => match self.on_error {
                OnError::Report => Disposition::Report,
                OnError::Stop => Disposition::Stop,
                OnError::Retry(_) if is_lost(op, outcome, cached) => Disposition::Report,
                OnError::Retry(time) => Disposition::Retry(time),
            },
            _ => Disposition::Report,
        }
    }
}

/// Returns true if a repetition could succeed although data was lost. After a failed writeback Linux may have marked
/// pages clean that are not on the disk: the next sync succeeds without them. The pages are unknown, so the success of
/// a flush or of a durable write proves nothing. A write without space was refused before any of it was in the page
/// cache.
pub(crate) fn is_lost(op: Op, outcome: Outcome, cached: bool) -> bool {
    let durable = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
    cached && (op == Op::Flush || (durable && outcome != Outcome::NoSpace))
}

/// Returns the delay before the next repetition of a request that was repeated this many times.
pub(crate) fn retry_delay(tries: u32) -> Duration {
    FIRST_DELAY.saturating_mul(1 << tries.min(16)).min(LONGEST_DELAY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mqblk_core::{ByteLen, Errno};

    const EIO: Outcome = Outcome::Failed(Errno(5));
    const WRITE: Op = Op::Write { fua: false };

    #[test]
    fn a_policys_text_form_parses_back() {
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
    fn storage_errors_and_lack_of_space_have_a_setting_each_and_other_outcomes_none() {
        let stop = ErrorPolicy { on_error: OnError::Stop, on_enospc: OnNoSpace::Stop };
        let only_space = ErrorPolicy { on_enospc: OnNoSpace::Stop, ..ErrorPolicy::default() };
        let only_errors = ErrorPolicy { on_error: OnError::Stop, ..ErrorPolicy::default() };
        for (policy, of_error, of_space) in [
            (ErrorPolicy::default(), Disposition::Report, Disposition::Report),
            (stop, Disposition::Stop, Disposition::Stop),
            (only_space, Disposition::Report, Disposition::Stop),
            (only_errors, Disposition::Stop, Disposition::Report),
        ] {
            assert_eq!(policy.disposition(WRITE, EIO, true), of_error);
            assert_eq!(policy.disposition(WRITE, Outcome::NoSpace, true), of_space);
            for other in [
                Outcome::Done(ByteLen(512)),
                Outcome::OutOfRange,
                Outcome::ReadOnly,
                Outcome::Unsupported,
                Outcome::Aborted,
            ] {
                assert_eq!(policy.disposition(WRITE, other, true), Disposition::Report, "{other:?}");
            }
        }
    }

    #[test]
    fn a_request_whose_data_may_be_lost_is_not_repeated() {
        let time = Duration::from_secs(9);
        let retry = ErrorPolicy { on_error: OnError::Retry(time), ..ErrorPolicy::default() };
        let durable = Op::Write { fua: true };
        for (op, cached, expected) in [
            (WRITE, true, Disposition::Retry(time)),
            (Op::Read, true, Disposition::Retry(time)),
            (Op::Flush, true, Disposition::Report),
            (durable, true, Disposition::Report),
            (Op::WriteZeroes { may_unmap: false, fua: true }, true, Disposition::Report),
            (Op::Flush, false, Disposition::Retry(time)),
            (durable, false, Disposition::Retry(time)),
        ] {
            assert_eq!(retry.disposition(op, EIO, cached), expected, "{op:?} {cached}");
        }
        assert!(!is_lost(durable, Outcome::NoSpace, true) && is_lost(Op::Flush, Outcome::NoSpace, true));
    }

    #[test]
    fn retry_delays_grow_to_their_bound() {
        let delays: Vec<u128> = (0..8).map(|tries| retry_delay(tries).as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(retry_delay(u32::MAX), LONGEST_DELAY);
    }
}
