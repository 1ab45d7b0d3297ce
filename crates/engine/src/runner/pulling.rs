//! Takes a batch of requests off the ring.

use mqblk_core::{GuestQueue, PullEnd};
use mqblk_uring::UringContext;

use super::intake::QueueIntake;
use super::{NOT_BUSY, PullResult, QueueRunner};
use crate::clock::Ticks;
use crate::route::{Route, SubmitContext};

impl<Q: GuestQueue> QueueRunner<Q> {
    #[inline(always)] // it has two callers, each of which has its own kind of route
    pub(super) fn pull_batch<R: Route>(
        &mut self,
        context: &mut UringContext,
        submit: &mut SubmitContext<R>,
    ) -> PullResult
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let (taken, result) = self.pull_requests(context, submit);
        if result == PullResult::Broken {
            return result;
        }
        if taken == 0 {
            self.counters.empty_turns += 1;
            return PullResult::Nothing;
        }
        self.took(submit.now);
        result
    }

    /// Notes that a pull took requests.
    #[inline]
    fn took(&mut self, now: Ticks) {
        self.counters.turns += 1;
        if self.busy_since == NOT_BUSY {
            self.busy_since = now;
        }
        self.poll.active(true, now);
    }

    /// Pulls a batch. Returns how many requests were taken.
    #[inline(always)] // it has one caller
    fn pull_requests<R: Route>(
        &mut self,
        context: &mut UringContext,
        submit: &mut SubmitContext<R>,
    ) -> (u64, PullResult)
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let (tags, counters, on_fault) = (&mut self.tags, &mut self.counters, &mut self.on_fault);
        match self.queue.pull(context, &mut QueueIntake { submit, tags, counters, on_fault }) {
            PullEnd::Broken(why) => {
                self.why_broken = why;
                (0, PullResult::Broken)
            }
            PullEnd::Empty { taken } => (taken as u64, PullResult::Requests),
            PullEnd::MoreWaiting { taken } => (taken as u64, PullResult::More),
        }
    }
}
