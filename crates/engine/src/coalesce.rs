//! Coalescing of calls: a call to the guest is deferred so that it covers more completions. Pure: time is an argument.

use crate::clock::Ticks;
use crate::options::Coalesce;

/// A queue's call coalescing.
#[derive(Debug)]
pub(crate) struct CallCoalescer {
    delay_ns: u64,
    /// Completions since the last call that make a call due at once.
    max_completions: u64,
    /// Due time of the deferred call, if there is one.
    deferred_until: Option<Ticks>,
    /// The queue's completions at the last call, or at the last publish without a need for one.
    at_last_call: u64,
}

/// Decision after a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallDecision {
    /// No call is needed.
    NoCall,
    /// Call now.
    Call,
    /// Call at this time at the latest.
    Defer(Ticks),
}

impl CallCoalescer {
    pub(crate) fn new(options: Coalesce) -> CallCoalescer {
        let max_completions = if options.answers == 0 { u64::MAX } else { options.answers.into() };
        CallCoalescer {
            delay_ns: options.delay.as_nanos() as u64,
            max_completions,
            deferred_until: None,
            at_last_call: 0,
        }
    }

    /// Returns the state of a queue that has completed this many requests, and whose calls are sent.
    pub(crate) fn resume(options: Coalesce, completions: u64) -> CallCoalescer {
        CallCoalescer { at_last_call: completions, ..CallCoalescer::new(options) }
    }

    /// Returns true if no call is ever deferred.
    #[inline]
    pub(crate) fn is_immediate(&self) -> bool {
        self.delay_ns == 0
    }

    /// Decides after a publish. `wanted`: the guest asked to be called for one of the completions. `completions`: their
    /// total number. `more`: requests are in flight; without any a call is not deferred.
    pub(crate) fn published(&mut self, wanted: bool, completions: u64, more: bool, now: Ticks) -> CallDecision {
        if self.deferred_until.is_none() {
            if !wanted {
                self.at_last_call = completions;
                return CallDecision::NoCall;
            }
            self.deferred_until = Some(Ticks(now.0.saturating_add(self.delay_ns)));
        }
        match self.deferred_until {
            Some(due) if more && due > now && completions - self.at_last_call < self.max_completions => {
                CallDecision::Defer(due)
            }
            _ => {
                self.called(completions);
                CallDecision::Call
            }
        }
    }

    /// Returns when the deferred call is due.
    pub(crate) fn due(&self) -> Option<Ticks> {
        self.deferred_until
    }

    /// Records a call after this many completions in all.
    pub(crate) fn called(&mut self, completions: u64) {
        self.deferred_until = None;
        self.at_last_call = completions;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn calls(us: u64, answers: u32) -> CallCoalescer {
        CallCoalescer::new(Coalesce { delay: Duration::from_micros(us), answers })
    }

    const US: u64 = 1000;

    #[test]
    fn a_lone_completion_is_called_at_once() {
        assert!(calls(0, 0).is_immediate());
        assert_eq!(calls(50, 8).published(true, 1, false, Ticks(5)), CallDecision::Call);
        assert_eq!(calls(50, 8).published(false, 1, false, Ticks(5)), CallDecision::NoCall);
    }

    #[test]
    fn a_deferred_call_is_due_after_the_delay() {
        let mut calls = calls(50, 0);
        assert_eq!(calls.published(true, 1, true, Ticks(0)), CallDecision::Defer(Ticks(50 * US)));
        // The guest asked once: later completions past its mark do not withdraw the request.
        assert_eq!(calls.published(false, 2, true, Ticks(49 * US)), CallDecision::Defer(Ticks(50 * US)));
        assert_eq!(calls.due(), Some(Ticks(50 * US)));
        assert_eq!(calls.published(false, 3, true, Ticks(50 * US)), CallDecision::Call);
        assert_eq!(calls.due(), None);
        assert_eq!(calls.published(true, 4, true, Ticks(60 * US)), CallDecision::Defer(Ticks(110 * US)));
        calls.called(4);
        assert_eq!(calls.published(false, 5, true, Ticks(120 * US)), CallDecision::NoCall);
    }

    #[test]
    fn a_call_is_due_when_enough_completions_wait_or_nothing_is_in_flight() {
        let mut calls = calls(50, 4);
        assert_eq!(
            calls.published(false, 100, true, Ticks(0)),
            CallDecision::NoCall,
            "completions that the guest did not ask about"
        );
        assert_eq!(calls.published(true, 103, true, Ticks(1)), CallDecision::Defer(Ticks(50 * US + 1)));
        assert_eq!(calls.published(true, 104, true, Ticks(2)), CallDecision::Call);
        assert_eq!(calls.published(true, 107, true, Ticks(3)), CallDecision::Defer(Ticks(50 * US + 3)));
        assert_eq!(calls.published(true, 107, false, Ticks(4)), CallDecision::Call);
    }
}
