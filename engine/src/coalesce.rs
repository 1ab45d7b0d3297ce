//! When to make a call that could tell of more answers if it came later. Pure: time comes in as an argument.

use crate::clock::Ticks;
use crate::options::Coalesce;

/// The call that a queue owes its guest.
#[derive(Debug)]
pub(crate) struct Calls {
    delay_ns: u64,
    /// Answers that make a call due at once.
    most: u64,
    /// Until when, while a call is owed.
    owed: Option<Ticks>,
    /// Answers up to the last call, or up to the last time that none was owed.
    told: u64,
}

/// What to do after a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing is owed.
    Nothing,
    /// Call now.
    Call,
    /// Call at this time at the latest.
    PutOff(Ticks),
}

impl Calls {
    pub(crate) fn new(options: Coalesce) -> Calls {
        let most = if options.answers == 0 { u64::MAX } else { options.answers.into() };
        Calls { delay_ns: options.delay.as_nanos() as u64, most, owed: None, told: 0 }
    }

    /// Whether no call is ever put off.
    #[inline]
    pub(crate) fn is_immediate(&self) -> bool {
        self.delay_ns == 0
    }

    /// Answers were published. `wanted`: the guest asked to be called for one of them. `answers`: how many there have been in
    /// all. `more`: others are in flight; without any there is nothing to wait for.
    pub(crate) fn published(&mut self, wanted: bool, answers: u64, more: bool, now: Ticks) -> Verdict {
        if self.owed.is_none() {
            if !wanted {
                self.told = answers;
                return Verdict::Nothing;
            }
            self.owed = Some(Ticks(now.0.saturating_add(self.delay_ns)));
        }
        match self.owed {
            Some(due) if more && due > now && answers - self.told < self.most => Verdict::PutOff(due),
            _ => {
                self.called(answers);
                Verdict::Call
            }
        }
    }

    /// When a call is due that was put off.
    pub(crate) fn due(&self) -> Option<Ticks> {
        self.owed
    }

    /// It was made, and told of so many answers in all.
    pub(crate) fn called(&mut self, answers: u64) {
        self.owed = None;
        self.told = answers;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn calls(us: u64, answers: u32) -> Calls {
        Calls::new(Coalesce { delay: Duration::from_micros(us), answers })
    }

    const US: u64 = 1000;

    #[test]
    fn a_lone_answer_is_told_at_once() {
        assert!(calls(0, 0).is_immediate());
        assert_eq!(calls(50, 8).published(true, 1, false, Ticks(5)), Verdict::Call);
        assert_eq!(calls(50, 8).published(false, 1, false, Ticks(5)), Verdict::Nothing);
    }

    #[test]
    fn a_call_is_made_by_the_clock_at_the_latest() {
        let mut calls = calls(50, 0);
        assert_eq!(calls.published(true, 1, true, Ticks(0)), Verdict::PutOff(Ticks(50 * US)));
        // The guest asked once; that later answers pass its mark takes nothing away.
        assert_eq!(calls.published(false, 2, true, Ticks(49 * US)), Verdict::PutOff(Ticks(50 * US)));
        assert_eq!(calls.due(), Some(Ticks(50 * US)));
        assert_eq!(calls.published(false, 3, true, Ticks(50 * US)), Verdict::Call);
        assert_eq!(calls.due(), None);
        assert_eq!(calls.published(true, 4, true, Ticks(60 * US)), Verdict::PutOff(Ticks(110 * US)));
        calls.called(4);
        assert_eq!(calls.published(false, 5, true, Ticks(120 * US)), Verdict::Nothing);
    }

    #[test]
    fn or_when_enough_answers_wait_or_none_is_to_come() {
        let mut calls = calls(50, 4);
        assert_eq!(calls.published(false, 100, true, Ticks(0)), Verdict::Nothing, "answers that nobody asked about");
        assert_eq!(calls.published(true, 103, true, Ticks(1)), Verdict::PutOff(Ticks(50 * US + 1)));
        assert_eq!(calls.published(true, 104, true, Ticks(2)), Verdict::Call);
        assert_eq!(calls.published(true, 107, true, Ticks(3)), Verdict::PutOff(Ticks(50 * US + 3)));
        assert_eq!(calls.published(true, 107, false, Ticks(4)), Verdict::Call);
    }
}
