//! Takes requests off the ring: a lone one, or a batch.

use mqblk_core::{GuestQueue, LonePull, PullEnd};
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
        let pulled = if Q::SERVES_LONE {
            let (tags, counters) = (&mut self.tags, &mut self.counters);
            match self.queue.pull_lone(context, &mut QueueIntake { submit: &mut *submit, tags, counters }) {
                LonePull::Nothing => (0, PullResult::Nothing),
                LonePull::Admitted => {
                    self.took(submit.now);
                    return PullResult::Requests;
                }
                LonePull::Other => self.pull_several(context, submit),
            }
        } else {
            self.pull_any(context, submit)
        };
        let (taken, result) = pulled;
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

    /// As [`pull_any`](Self::pull_any), in a function of its own: a lone request needs fewer registers.
    #[inline(never)]
    fn pull_several<R: Route>(&mut self, context: &mut UringContext, submit: &mut SubmitContext<R>) -> (u64, PullResult)
    where
        Q: GuestQueue<Context = UringContext>,
    {
        self.pull_any(context, submit)
    }

    /// Pulls a batch. Returns how many requests were taken.
    #[inline(always)] // of the two callers a queue type has one
    fn pull_any<R: Route>(&mut self, context: &mut UringContext, submit: &mut SubmitContext<R>) -> (u64, PullResult)
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let (tags, counters) = (&mut self.tags, &mut self.counters);
        match self.queue.pull(context, &mut QueueIntake { submit, tags, counters }) {
            PullEnd::Broken(why) => {
                self.why_broken = why;
                (0, PullResult::Broken)
            }
            PullEnd::Empty { taken } => (taken as u64, PullResult::Requests),
            PullEnd::MoreWaiting { taken } => (taken as u64, PullResult::More),
        }
    }
}
