//! Finishes completed requests: counts them, ends their tags, and gives them to the queue.

use std::mem::discriminant;

use mqblk_core::{FinishedRequest, GuestQueue, Op, Outcome, Tag};
use mqblk_uring::UringContext;

use super::ended::{EndedRequests, FinishedGroup, record_all};
use super::intake::QueueIntake;
use super::{AfterPublish, AnyQueue, QueueRunner};
use crate::clock::{Clock, Ticks};
use crate::counters::{CountRequests, OpClass};
use crate::request::AnyCompletion;
use crate::route::{SubmitContext, ToDisks};
use crate::tags::{NO_TAG, Timestamps};

impl<Q: GuestQueue> QueueRunner<Q> {
    /// Counts and finishes a request that completes alone: it is compared with no other. The caller notes or records
    /// the result. Does nothing and returns `None` unless the request has one part and has succeeded.
    #[inline(always)] // it has one caller
    pub(super) fn finish_lone(
        &mut self,
        context: &mut UringContext,
        done: &mut AnyCompletion,
        submit: &mut SubmitContext<ToDisks<'_>>,
    ) -> Option<EndedRequests>
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let outcome @ Outcome::Done(len) = done.outcome else { return None };
        let (token, op, stamps) = self.tags.end_single(done.tag.index())?;
        let class = self.counters.count(op, 1, len.0);
        let request = FinishedRequest { token, outcome, buffer: done.buffer.take() };
        let (tags, counters, on_fault) = (&mut self.tags, &mut self.counters, &mut self.on_fault);
        self.queue.finish(context, request, &mut QueueIntake { submit, tags, counters, on_fault });
        Some(EndedRequests { class, stamps, times: 1 })
    }

    /// As [`complete_any`](Self::complete_any), kept out of line: a lone request needs fewer registers.
    #[inline(never)]
    pub(super) fn complete_several(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
        publish: Option<&mut Clock>,
    ) -> (usize, Option<AfterPublish>)
    where
        Q: GuestQueue<Context = UringContext>,
    {
        self.complete_any(context, completed, submit, publish)
    }

    /// As [`complete`](AnyQueue::complete), of any completions.
    #[inline(always)] // of the two callers a queue type has one
    pub(super) fn complete_any(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
        publish: Option<&mut Clock>,
    ) -> (usize, Option<AfterPublish>)
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let count = self.finish(context, completed, submit);
        match publish {
            Some(clock) if count == completed.len() && !submit.route.channels.has_aside() => {
                let finished = clock.now();
                (count, Some(self.publish(finished, clock)))
            }
            _ => (count, None),
        }
    }

    /// Finishes completed requests of any kind, those of this queue up to the first one of another queue. Returns their
    /// number.
    #[inline(always)] // it has one caller
    fn finish(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
    ) -> usize
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let slot = submit.slot;
        if self.per_disk.is_some() {
            let others = completed.iter().position(|done| done.tag.queue() != slot);
            self.count_by_disk(&completed[..others.unwrap_or(completed.len())]);
        }
        // In two passes, each of which has few values to keep: in one loop half of the instructions would move them to
        // the stack and back.
        let count = self.account(slot, completed, &submit.route);
        for done in &mut completed[..count] {
            let Some(token) = self.tags.end(done.tag.index()) else { continue };
            let request = FinishedRequest { token, outcome: done.outcome, buffer: done.buffer.take() };
            let (tags, counters, on_fault) = (&mut self.tags, &mut self.counters, &mut self.on_fault);
            self.queue.finish(context, request, &mut QueueIntake { submit: &mut *submit, tags, counters, on_fault });
        }
        count
    }

    /// Counts the completed requests of the queue in this slot, up to the first one of another queue, and notes their
    /// latencies. Returns their number.
    #[inline]
    fn account(&mut self, slot: u16, completed: &mut [AnyCompletion], route: &ToDisks<'_>) -> usize {
        // Counted and noted as one while they have the same operation and timestamps: often all of a batch.
        let first = completed.first().and_then(|done| self.tags.kind(done.tag.index()));
        let (op, stamps) = first.unwrap_or((Op::Read, Timestamps::default()));
        let mut group = FinishedGroup { op, stamps, times: 0, bytes: 0 };
        let mut count = 0;
        // Not in the group yet: values in registers.
        let (mut times, mut bytes) = (0, 0);
        while let Some(done) = completed.get_mut(count)
            && done.tag.queue() == slot
        {
            count += 1;
            match done.outcome {
                Outcome::Done(len) if self.tags.is_single(done.tag.index(), group.op, group.stamps) => {
                    times += 1;
                    bytes += len.0;
                }
                _ => {
                    group.add(std::mem::take(&mut times), std::mem::take(&mut bytes));
                    self.account_any(done, &mut group, route);
                }
            }
        }
        group.add(times, bytes);
        self.end_group(&group);
        count
    }

    /// Counts a completed request of any kind. One of several parts gets the outcome of all with the last part; the
    /// others get a tag that is never in use.
    #[inline(never)]
    fn account_any(&mut self, done: &mut AnyCompletion, group: &mut FinishedGroup, route: &ToDisks<'_>) {
        let index = done.tag.index();
        let Some((op, outcome, stamps)) = self.tags.complete_part(index, done.outcome) else {
            done.tag = Tag::new(done.tag.queue(), NO_TAG);
            return;
        };
        if group.stamps != stamps || discriminant(&group.op) != discriminant(&op) {
            self.end_group(group);
            *group = FinishedGroup { op, stamps, times: 0, bytes: 0 };
        }
        group.times += 1;
        match outcome {
            Outcome::Done(len) => group.bytes += len.0,
            failure => self.count_failed(index, op, failure, route),
        }
        done.outcome = outcome;
    }

    /// Counts finished requests of one operation, and notes their latencies.
    #[inline(always)] // else the group would travel through memory
    fn end_group(&mut self, group: &FinishedGroup) {
        let FinishedGroup { op, stamps, times, bytes } = *group;
        if times > 0 {
            let class = self.counters.count(op, times, bytes);
            self.note_ended(EndedRequests { class, stamps, times });
        }
    }

    /// Notes requests that have ended, until their latencies are recorded.
    #[inline(always)] // as `end_group`
    pub(super) fn note_ended(&mut self, ended: EndedRequests) {
        if self.ended.times == 0 {
            self.ended = ended;
        } else if self.ended.stamps == ended.stamps && self.ended.class == ended.class {
            self.ended.times += ended.times;
        } else {
            self.ended_before.push(std::mem::replace(&mut self.ended, ended));
        }
    }

    /// Counts and logs a finished request that did not succeed.
    #[cold]
    fn count_failed(&mut self, index: u16, op: Op, failure: Outcome, route: &ToDisks<'_>) {
        self.counters.count_error(op);
        if let Some((disk, start)) = self.tags.place(index) {
            route.failed(disk, op, start, failure);
        }
    }

    /// Counts a run that is about to be finished, for a queue of several disks. Not in [`finish`](Self::finish), where
    /// it would cost each request of a queue with one disk.
    #[inline(never)]
    fn count_by_disk(&mut self, run: &[AnyCompletion]) {
        let Some(per_disk) = &mut self.per_disk else { return };
        for (at, done) in run.iter().enumerate() {
            let index = done.tag.index();
            let Some(entry) = self.tags.get(index) else { continue };
            let mut outcome = done.outcome;
            if entry.parts > 1 {
                // It completes with its last part, and fails with any.
                let parts = || run[..=at].iter().filter(|part| part.tag == done.tag);
                if parts().count() < usize::from(entry.remaining) {
                    continue;
                }
                let failed = |outcome: &Outcome| !outcome.is_done();
                outcome = parts().map(|part| part.outcome).chain([entry.outcome]).find(failed).unwrap_or(outcome);
            }
            let transferred = match outcome {
                Outcome::Done(len) => Some(len),
                _ => None,
            };
            per_disk.finished(entry.disk, OpClass::of(entry.op), transferred, entry.stamps.pulled);
        }
    }

    /// Records the latencies of the requests that were finished since the last publish, `lone` among them.
    #[inline(always)] // as `publish_with`
    pub(super) fn record_latencies(&mut self, lone: Option<EndedRequests>, finished: Ticks, published: Ticks) {
        if let Some(lone) = lone {
            lone.record(&mut self.latency, finished, published);
            if self.ended.times > 0 {
                self.record_noted(finished, published);
            }
            return;
        }
        if self.ended.times > 0 {
            self.ended.record(&mut self.latency, finished, published);
            self.ended.times = 0;
            if !self.ended_before.is_empty() {
                record_all(&mut self.ended_before, &mut self.latency, finished, published);
            }
        }
        if let Some(per_disk) = &mut self.per_disk {
            per_disk.record_latencies(published);
        }
    }

    /// Records the latencies of requests noted before one that completes alone.
    #[cold]
    fn record_noted(&mut self, finished: Ticks, published: Ticks) {
        self.record_latencies(None, finished, published);
    }
}
