//! Gives completions to their queues, publishes, and calls their guests.

use super::{Worker, mark_dirty};
use crate::route::{SubmitContext, ToDisks};
use crate::runner::AfterPublish;

impl Worker {
    /// Gives completions to their queues, publishes and calls. Returns true if there were any.
    #[inline]
    pub(super) fn complete(&mut self) -> bool {
        let has_completions = self.has_completions();
        if !has_completions && self.dirty.is_empty() {
            return false;
        }
        let published = (has_completions && self.complete_batch()) || self.complete_rest();
        if self.leaving {
            self.end_leaving();
        }
        published
    }

    /// Completes and publishes the rest after a first batch. Returns true if there was anything to publish.
    #[inline(never)] // a turn mostly ends with one batch, of one queue
    fn complete_rest(&mut self) -> bool {
        while self.has_completions() {
            if self.complete_batch() {
                return true;
            }
        }
        if self.dirty.is_empty() {
            return false;
        }
        self.publish_dirty();
        true
    }

    /// Returns true if completions wait for their queues. A queue's next step may be refused, and so complete at once;
    /// or the queue cancels.
    #[inline]
    fn has_completions(&mut self) -> bool {
        if !self.channels.completions.is_empty() {
            self.completing.append(&mut self.channels.completions);
        }
        !self.completing.is_empty()
    }

    /// Gives one batch of completions to their queues. Returns true if all were published too, without new ones.
    #[inline(always)] // for the first batch, and for the others
    fn complete_batch(&mut self) -> bool {
        let (finished, published) = self.complete_run(0);
        let published = published || self.complete_runs(finished);
        self.completing.clear();
        published
    }

    /// Gives the completions from `at` on to their queues. As [`complete_batch`](Self::complete_batch).
    #[inline(never)] // mostly the first run is all
    fn complete_runs(&mut self, mut at: usize) -> bool {
        while at < self.completing.len() {
            let (finished, published) = self.complete_run(at);
            if published {
                return true;
            }
            at += finished;
        }
        if self.channels.has_pending() {
            self.flush_pending();
        }
        false
    }

    /// Gives the completions from `at` on to the queue of the first one, up to one of another queue. Returns their
    /// number, and true if they were published too: then they were the last ones, without new ones.
    #[inline(always)] // for the first run, and for each of the others
    fn complete_run(&mut self, at: usize) -> (usize, bool) {
        let left = &mut self.completing[at..];
        let [first, ..] = left else { return (0, false) };
        let slot = first.tag.queue();
        let Some(attached) = self.queues[usize::from(slot)].as_deref_mut() else { return (1, false) };
        if attached.frozen {
            self.abandon_completed(at);
            return (1, false);
        }
        mark_dirty(&mut self.dirty, &mut attached.dirty, slot);
        let route = ToDisks { disks: &attached.disks, channels: &mut self.channels };
        let mut submit = SubmitContext { slot, now: self.clock.last(), route };
        let publish = (self.dirty.len() == 1).then_some(&mut self.clock);
        let (finished, after) = attached.runner.complete(&mut self.context, left, &mut submit, publish);
        let Some(after) = after else { return (finished, false) };
        attached.dirty = false;
        self.dirty.clear();
        self.follow_publish(slot, after);
        (finished, true)
    }

    /// Publishes the queues with completions that are not published yet.
    #[inline(never)]
    fn publish_dirty(&mut self) {
        let finished = self.clock.now();
        for at in 0..self.dirty.len() {
            let slot = self.dirty[at];
            let Some(attached) = self.queues[usize::from(slot)].as_mut() else { continue };
            attached.dirty = false;
            let after = attached.runner.publish(finished, &mut self.clock);
            self.follow_publish(slot, after);
        }
        self.dirty.clear();
    }

    /// Does the rest of a publish.
    #[inline]
    fn follow_publish(&mut self, slot: u16, after: AfterPublish) {
        if after == AfterPublish::More {
            self.do_after_publish(slot);
        }
    }

    /// Polls a newly disarmed queue again, and lists its deferred call, unless it is listed.
    #[cold]
    fn do_after_publish(&mut self, slot: u16) {
        let Some(attached) = self.queues[usize::from(slot)].as_mut() else { return };
        if attached.runner.take_resumed() {
            self.poll_list.kicked(slot);
        }
        let listed = self.deferred_calls.iter().any(|(deferred, _)| *deferred == slot);
        if let Some(due) = attached.runner.call_due().filter(|_| !listed) {
            self.deferred_calls.push((slot, due));
        }
    }

    /// Sends the deferred calls that are due.
    #[cold]
    pub(super) fn send_deferred_calls(&mut self) {
        let (queues, now) = (&mut self.queues, self.clock.last());
        self.deferred_calls.retain_mut(|(slot, due)| {
            if *due > now {
                return true;
            }
            let attached = queues[usize::from(*slot)].as_mut();
            // The call may have been sent meanwhile, and another one deferred.
            match attached.and_then(|attached| attached.runner.send_due_call(now)) {
                Some(later) => {
                    *due = later;
                    true
                }
                None => false,
            }
        });
    }
}
