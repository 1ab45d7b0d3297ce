//! Plug and merge: the requests that a worker pulled for one disk in one turn, from all its queues of that disk, are merged
//! where their ranges touch, before the storage sees them.
//!
//! `plan` decides which are merged, `merged` remembers who they were. This file
//! carries it out: it merges buffers, offers requests to the channel, and gives each member its answer. A merged request that
//! fails is done again, member by member, once: so only the guilty ones fail.

mod merged;
mod plan;

use mqblk_core::{ByteLen, ByteOffset, DiskChannel, Geometry, Limits, Op, Outcome, Tag};
use mqblk_uring::UringContext;

use crate::channels::cancelled;
use crate::options::{MergeMode, PlugOptions};
use crate::quota::SubmitQuota;
use crate::runner::{AnyCompletion, AnyRequest, Buffer};

pub(crate) use merged::MERGED_SLOT;
use merged::{Member, MergedTable};
use plan::{Bounds, Planner};

/// Requests of a queue that were merged to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Merges {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) others: u64,
}

/// What a worker's plugs count.
#[derive(Debug, Default)]
pub(crate) struct PlugCounts {
    /// By the queue's slot.
    pub(crate) merges: Vec<Merges>,
    /// Merged requests whose members were done one by one.
    pub(crate) splits: u64,
}

impl PlugCounts {
    fn merged(&mut self, tag: Tag, op: Op) {
        let slot = usize::from(tag.queue());
        if self.merges.len() <= slot {
            self.merges.resize(slot + 1, Merges::default());
        }
        let merges = &mut self.merges[slot];
        match op {
            Op::Read => merges.reads += 1,
            Op::Write { .. } => merges.writes += 1,
            _ => merges.others += 1,
        }
    }
}

/// Requests in a plug up to which a turn goes on pulling from queues that have more.
const DEEP: usize = 256;
/// One of so many turns pulls deeply although the plug before was no stream: streams that take turns in a queue touch only in
/// a deep plug. Long turns cost random I/O: with one in 16 a file in memory lost 5 percent at 8 queues on 2 cores.
const PROBE: u32 = 64;

/// A plug of which fewer requests were planned before is planned again in any case.
const REPLANNED: usize = 64;

/// Joins the requests of one disk on one worker.
pub(crate) struct Merger {
    bounds: Bounds,
    planner: Planner,
    /// Requests that were planned, or are done again one by one: offered before the plug, and never merged any more.
    ready: Vec<AnyRequest>,
    merged: MergedTable,
    /// Plugs since one of which a quarter was merged or more.
    unmerged_plugs: u32,
    /// So many at the head of the plug were planned, and left in it because none touches another.
    planned: usize,
}

impl Merger {
    /// `None` when requests of this disk are not merged.
    pub(crate) fn new(options: &PlugOptions, limits: &Limits, geometry: &Geometry, room: usize) -> Option<Box<Merger>> {
        let merge = match options.merge {
            MergeMode::Auto => limits.cost_per_request,
            MergeMode::On => true,
            MergeMode::Off => false,
        };
        merge.then(|| {
            Box::new(Merger {
                bounds: Bounds::new(options, limits, geometry.logical_block),
                planner: Planner::with_capacity(room),
                ready: Vec::with_capacity(room),
                merged: MergedTable::with_room(),
                unmerged_plugs: 0,
                planned: 0,
            })
        })
    }

    /// Whether to pull on from a queue that has more, into a plug of so many requests.
    #[inline]
    pub(crate) fn wants_more(&self, plugged: usize) -> bool {
        plugged < DEEP && self.unmerged_plugs.is_multiple_of(PROBE)
    }

    /// No request waits here, and none that was merged is in the storage.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.merged.in_use() == 0
    }

    /// Cancels requests that have left the plug. Takes back what was planned and not
    /// offered yet: of a merged request the chosen members, while the others are offered one by one. Returns the tags of those
    /// merged requests that the channel has and of which all members are chosen.
    pub(crate) fn cancel(
        &mut self,
        context: &mut UringContext,
        chosen: impl Fn(Tag) -> bool,
        finished: &mut Vec<AnyCompletion>,
    ) -> Vec<Tag> {
        self.planned = 0;
        let mut ready = Vec::with_capacity(self.ready.len());
        ready.append(&mut self.ready);
        for request in ready {
            let tag = request.tag;
            if tag.queue() != MERGED_SLOT && chosen(tag) {
                finished.push(cancelled(request));
            } else if tag.queue() == MERGED_SLOT && self.merged.any(tag, &chosen) {
                self.end(context, cancelled(request), MemberOutcome::Again(&|tag| !chosen(tag)), finished);
            } else {
                self.ready.push(request);
            }
        }
        self.merged.cancel(&chosen)
    }

    /// Requests to be offered before the plug.
    #[inline]
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Whether the next [`submit`](Self::submit) looks for neighbours in the plug. A plug that is left over is looked at again
    /// only when it has grown by a quarter: else a long one would be for each few requests that the channel takes of it.
    #[inline]
    pub(crate) fn will_plan(&self, plug: &[AnyRequest]) -> bool {
        let fresh = plug.len().saturating_sub(self.planned);
        self.planned < REPLANNED || fresh * 4 >= self.planned
    }

    /// Whether a plug can go to the channel as it is, and nothing that the channel ends was merged: a single request when
    /// nothing else is going on.
    #[inline]
    pub(crate) fn lets_pass(&self, plug: &[AnyRequest]) -> bool {
        plug.len() <= 1 && self.is_idle()
    }

    /// Offers what is ready, then the plug, merged. Returns how many requests were taken or are to be done again.
    #[inline(never)] // a disk that does not merge shall not pay for it in registers
    pub(crate) fn submit(
        &mut self,
        context: &mut UringContext,
        channel: &mut dyn DiskChannel<UringContext>,
        plug: &mut Vec<AnyRequest>,
        mut offer: SubmitQuota<'_>,
        counts: &mut PlugCounts,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let before = finished.len();
        let mut happened = 0;
        if !self.ready.is_empty() {
            happened += offer.submit(context, channel, &mut self.ready, finished);
        }
        if self.ready.is_empty() && !plug.is_empty() && offer.most > 0 {
            happened += self.unplug(context, channel, plug, offer, counts, finished);
        }
        happened + self.fan_out(context, before, counts, finished)
    }

    #[inline]
    fn unplug(
        &mut self,
        context: &mut UringContext,
        channel: &mut dyn DiskChannel<UringContext>,
        plug: &mut Vec<AnyRequest>,
        mut offer: SubmitQuota<'_>,
        counts: &mut PlugCounts,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let mut merged = 0;
        if !self.will_plan(plug) {
            offer.most = offer.most.min(self.planned);
        } else if plug.len() > 1 {
            self.planned = plug.len();
            merged = self.planner.plan(plug, &self.bounds, |request| segments(context, request));
            // Random requests touch by chance, a few of a deep plug.
            self.unmerged_plugs = if merged * 4 >= plug.len() { 0 } else { self.unmerged_plugs.wrapping_add(1) };
        }
        if merged == 0 {
            let taken = offer.submit(context, channel, plug, finished);
            self.planned = self.planned.saturating_sub(taken);
            return taken;
        }
        self.planned = 0;
        self.join(context, plug, counts);
        offer.submit(context, channel, &mut self.ready, finished)
    }

    /// Moves the plug to the ready list, in the planned order and merged.
    fn join(&mut self, context: &mut UringContext, plug: &mut Vec<AnyRequest>, counts: &mut PlugCounts) {
        let mut take = |index: u32| std::mem::replace(&mut plug[index as usize], VACANT);
        let mut left = self.planner.steps();
        while let [first, after @ ..] = left {
            let others = after.iter().take_while(|step| step.merged).count();
            let (group, rest) = left.split_at(1 + others);
            left = rest;
            let head = take(first.index);
            let room = if others > 0 { self.merged.take(head.op, head.start) } else { None };
            let Some((tag, merged)) = room else {
                self.ready.push(head);
                self.ready.extend(group[1..].iter().map(|step| take(step.index)));
                continue;
            };
            let (op, start) = (head.op, head.start);
            let has_data = op.has_data();
            let mut member = |request: AnyRequest| {
                if !merged.members.is_empty() {
                    counts.merged(request.tag, op);
                }
                merged.members.push(Member { tag: request.tag, len: request.len, cancelled: false });
                merged.len.0 += request.len.0;
                request.buffer
            };
            let requests = std::iter::once(head).chain(group[1..].iter().map(|step| take(step.index)));
            let buffer = if has_data {
                Some(context.buffers.merge(requests.filter_map(member)))
            } else {
                requests.for_each(|request| _ = member(request));
                None
            };
            self.ready.push(AnyRequest { op, start, len: merged.len, tag, buffer });
        }
        plug.clear();
    }

    /// Gives the members of merged requests that ended their answers, among those from index `from`. Returns how many are to
    /// be done again.
    #[inline]
    pub(crate) fn fan_out(
        &mut self,
        context: &mut UringContext,
        from: usize,
        counts: &mut PlugCounts,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let ready = self.ready.len();
        if self.merged.in_use() > 0 {
            self.end_merged(context, from, counts, finished);
        }
        self.ready.len() - ready
    }

    #[inline(never)]
    fn end_merged(
        &mut self,
        context: &mut UringContext,
        from: usize,
        counts: &mut PlugCounts,
        finished: &mut Vec<AnyCompletion>,
    ) {
        let mut at = from;
        while at < finished.len() {
            if finished[at].tag.queue() == MERGED_SLOT {
                // The last one takes its place and is looked at next.
                let done = finished.swap_remove(at);
                let again = !matches!(done.outcome, Outcome::Done(_) | Outcome::Aborted);
                counts.splits += u64::from(again);
                self.end(
                    context,
                    done,
                    if again { MemberOutcome::Again(&|_| true) } else { MemberOutcome::AsMerged },
                    finished,
                );
            } else {
                at += 1;
            }
        }
    }

    /// A merged request has ended, or is taken apart.
    fn end(
        &mut self,
        context: &mut UringContext,
        done: AnyCompletion,
        fate: MemberOutcome<'_>,
        finished: &mut Vec<AnyCompletion>,
    ) {
        let AnyCompletion { outcome, tag, buffer } = done;
        let merged = self.merged.end(tag);
        let mut start = merged.start;
        let mut members = merged.members.iter();
        let mut each = |buffer: Option<Buffer>| {
            let Some(Member { tag, len, cancelled }) = members.next().copied() else { return };
            let again = matches!(fate, MemberOutcome::Again(which) if which(tag));
            if again && !cancelled {
                self.ready.push(AnyRequest { op: merged.op, start, len, tag, buffer });
            } else {
                let outcome = match outcome {
                    _ if again => Outcome::Aborted,
                    // Storage says 0 for what transfers nothing, and then of the members too.
                    Outcome::Done(done) if done != merged.len => Outcome::Done(ByteLen::ZERO),
                    Outcome::Done(_) => Outcome::Done(len),
                    other => other,
                };
                finished.push(AnyCompletion { outcome, tag, buffer });
            }
            start = ByteOffset(start.0 + len.0);
        };
        match buffer {
            Some(buffer) => context.buffers.split(buffer, |member| each(Some(member))),
            None => (0..merged.members.len()).for_each(|_| each(None)),
        }
    }
}

/// What becomes of a merged request's members.
#[derive(Clone, Copy)]
enum MemberOutcome<'a> {
    /// They end as it did.
    AsMerged,
    /// Those of these tags are offered one by one, but for such as are to end early; the others end as it did.
    Again(&'a dyn Fn(Tag) -> bool),
}

/// What is left in the place of a request that was taken out of a plug.
const VACANT: AnyRequest =
    AnyRequest { op: Op::Flush, start: ByteOffset(0), len: ByteLen::ZERO, tag: Tag::new(MERGED_SLOT, 0), buffer: None };

/// Memory segments of a request; `None` when storage would refuse it for its buffer, so that it stays alone.
#[inline]
fn segments(context: &UringContext, request: &AnyRequest) -> Option<u32> {
    match &request.buffer {
        None if !request.op.has_data() => Some(0),
        Some(_) if !request.op.has_data() => None,
        Some(buffer) if context.buffers.len(buffer) == request.len => {
            Some(context.buffers.segments(buffer).len() as u32)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
