//! Plug and merge: the requests that a worker pulled for one disk in one turn, from all its queues of that disk, are
//! merged where their ranges touch, before the storage sees them.
//!
//! `plan` decides which requests are merged, `merged` is the table of merged requests. This file executes the plan: it
//! merges buffers, submits to the channel, and completes each member. A merged request that fails is split and its
//! members are repeated one by one, once: so only requests that the storage cannot do fail.

mod merged;
mod plan;

use mqblk_core::{ByteLen, ByteOffset, DiskChannel, Geometry, Limits, Op, Outcome, Tag};
use mqblk_uring::UringContext;

use crate::options::{MergeMode, PlugOptions};
use crate::quota::SubmitQuota;
use crate::request::{AnyCompletion, AnyRequest, Buffer, MERGED_SLOT, cancelled};

use merged::{Member, MergedTable};
use plan::{Bounds, Planner};

/// Numbers of a queue's requests that were merged into the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Merges {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) others: u64,
}

/// Counters of a worker's plugs.
#[derive(Debug, Default)]
pub(crate) struct PlugCounters {
    /// Merges by the queue's slot.
    pub(crate) merges: Vec<Merges>,
    /// Merged requests that were split after a failure.
    pub(crate) splits: u64,
}

impl PlugCounters {
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

/// Requests in a plug up to which a turn pulls again from queues that have more.
const DEEP: usize = 256;
/// One in this many turns pulls deep although few requests of the earlier plugs were merged: interleaved streams of a
/// queue touch only in a deep plug. Long turns slow random I/O down: with one in 16 a file in memory lost 5 percent at
/// 8 queues on 2 cores.
const PROBE: u32 = 64;

/// A plug with fewer planned requests is always planned again.
const REPLANNED: usize = 64;

/// Merges the requests of one disk on one worker.
pub(crate) struct Merger {
    bounds: Bounds,
    planner: Planner,
    /// Planned requests and members to repeat: submitted before the plug, and not merged again.
    ready: Vec<AnyRequest>,
    merged: MergedTable,
    /// Plugs since the last one of which at least a quarter was merged.
    unmerged_plugs: u32,
    /// Planned requests at the head of the plug, which stayed because none touches another.
    planned: usize,
    /// True if nothing more is merged; merged requests end as usual.
    retired: bool,
}

impl Merger {
    /// Returns a merger; `None` when requests of this disk are not merged.
    pub(crate) fn new(options: &PlugOptions, limits: &Limits, geometry: &Geometry, room: usize) -> Option<Box<Merger>> {
        merges(options, limits).then(|| {
            Box::new(Merger {
                bounds: Bounds::new(options, limits, geometry.logical_block),
                planner: Planner::with_capacity(room),
                ready: Vec::with_capacity(room),
                merged: MergedTable::with_room(),
                unmerged_plugs: 0,
                planned: 0,
                retired: false,
            })
        })
    }

    /// Uses other options from the next plug on. Options without merging [retire](Self::is_retired) it.
    pub(crate) fn set_options(&mut self, options: &PlugOptions, limits: &Limits, geometry: &Geometry) {
        self.retired = !merges(options, limits);
        self.bounds = Bounds::new(options, limits, geometry.logical_block);
        // A retired one never wants more.
        (self.planned, self.unmerged_plugs) = (0, u32::from(self.retired));
    }

    /// Returns true if it merges nothing more: it is needed until it [is idle](Self::is_idle).
    pub(crate) fn is_retired(&self) -> bool {
        self.retired
    }

    /// Returns true if a plug of this many requests wants more from a queue in this turn.
    #[inline]
    pub(crate) fn wants_more(&self, plugged: usize) -> bool {
        plugged < DEEP && self.unmerged_plugs.is_multiple_of(PROBE)
    }

    /// Returns true if no request waits here and no merged request is at the storage.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.merged.in_use() == 0
    }

    /// Cancels requests that have left the plug. Removes planned requests that are not submitted yet; a merged one is
    /// split, and its other members are submitted one by one. Returns the tags of the merged requests at the channel of
    /// which all members are chosen.
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
            } else if tag.queue() == MERGED_SLOT && self.merged.has_member(tag, &chosen) {
                self.end(context, cancelled(request), MemberOutcome::Repeat(&|tag| !chosen(tag)), finished);
            } else {
                self.ready.push(request);
            }
        }
        self.merged.cancel(&chosen)
    }

    /// Returns the number of requests to submit before the plug.
    #[inline]
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Returns true if the next [`submit`](Self::submit) plans the plug. A plug that was planned before is planned
    /// again only when it has grown by a quarter: otherwise a long one would be planned after every few requests that
    /// the channel takes.
    #[inline]
    pub(crate) fn will_plan(&self, plug: &[AnyRequest]) -> bool {
        let fresh = plug.len().saturating_sub(self.planned);
        self.planned < REPLANNED || fresh * 4 >= self.planned
    }

    /// Returns true if the plug can be submitted unchanged, and the channel has no merged request: a single request
    /// while the merger is idle.
    #[inline]
    pub(crate) fn passes_through(&self, plug: &[AnyRequest]) -> bool {
        plug.len() <= 1 && self.is_idle()
    }

    /// Submits the ready requests, then the plug, merged. Returns the number of requests that were taken or must be
    /// repeated.
    #[inline(never)] // so that a disk without merging does not pay for it in registers
    pub(crate) fn submit(
        &mut self,
        context: &mut UringContext,
        channel: &mut impl DiskChannel<UringContext>,
        plug: &mut Vec<AnyRequest>,
        mut quota: SubmitQuota<'_>,
        counts: &mut PlugCounters,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let before = finished.len();
        let mut happened = 0;
        if !self.ready.is_empty() {
            happened += quota.submit(context, channel, &mut self.ready, finished);
        }
        if self.ready.is_empty() && !plug.is_empty() && quota.most > 0 {
            happened += self.unplug(context, channel, plug, quota, counts, finished);
        }
        happened + self.fan_out(context, before, counts, finished)
    }

    #[inline]
    fn unplug(
        &mut self,
        context: &mut UringContext,
        channel: &mut impl DiskChannel<UringContext>,
        plug: &mut Vec<AnyRequest>,
        mut quota: SubmitQuota<'_>,
        counts: &mut PlugCounters,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let mut merged = 0;
        if self.retired {
            self.planned = 0;
        } else if !self.will_plan(plug) {
            quota.most = quota.most.min(self.planned);
        } else if plug.len() > 1 {
            self.planned = plug.len();
            merged = self.planner.plan(plug, &self.bounds, |request| segments(context, request));
            // Random requests touch by chance, a few of a deep plug.
            self.unmerged_plugs = if merged * 4 >= plug.len() { 0 } else { self.unmerged_plugs.wrapping_add(1) };
        }
        if merged == 0 {
            let taken = quota.submit(context, channel, plug, finished);
            self.planned = self.planned.saturating_sub(taken);
            return taken;
        }
        self.planned = 0;
        self.merge_plug(context, plug, counts);
        quota.submit(context, channel, &mut self.ready, finished)
    }

    /// Merges the plug as planned and moves it to the ready list, in the planned order.
    fn merge_plug(&mut self, context: &mut UringContext, plug: &mut Vec<AnyRequest>, counts: &mut PlugCounters) {
        let mut take = |index: u32| std::mem::replace(&mut plug[index as usize], VACANT);
        let mut left = self.planner.planned();
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

    /// Replaces the completions of merged requests, from index `from` on, by those of their members. Returns the number
    /// of members to repeat.
    #[inline]
    pub(crate) fn fan_out(
        &mut self,
        context: &mut UringContext,
        from: usize,
        counts: &mut PlugCounters,
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
        counts: &mut PlugCounters,
        finished: &mut Vec<AnyCompletion>,
    ) {
        let mut at = from;
        while at < finished.len() {
            if finished[at].tag.queue() == MERGED_SLOT {
                // The last one takes its index and is checked next.
                let done = finished.swap_remove(at);
                let repeat = !matches!(done.outcome, Outcome::Done(_) | Outcome::Aborted);
                counts.splits += u64::from(repeat);
                self.end(
                    context,
                    done,
                    if repeat { MemberOutcome::Repeat(&|_| true) } else { MemberOutcome::AsMerged },
                    finished,
                );
            } else {
                at += 1;
            }
        }
    }

    /// Ends a merged request, which is completed or split: completes its members, or moves them to the ready list.
    fn end(
        &mut self,
        context: &mut UringContext,
        done: AnyCompletion,
        members_end: MemberOutcome<'_>,
        finished: &mut Vec<AnyCompletion>,
    ) {
        let AnyCompletion { outcome, tag, buffer } = done;
        let merged = self.merged.end(tag);
        let mut start = merged.start;
        let mut members = merged.members.iter();
        let mut each = |buffer: Option<Buffer>| {
            let Some(Member { tag, len, cancelled }) = members.next().copied() else { return };
            let repeat = matches!(members_end, MemberOutcome::Repeat(which) if which(tag));
            if repeat && !cancelled {
                self.ready.push(AnyRequest { op: merged.op, start, len, tag, buffer });
            } else {
                let outcome = match outcome {
                    _ if repeat => Outcome::Aborted,
                    // Storage reports a length of 0 for operations without data: so do the members.
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

/// Returns true if requests of a disk with these options and limits are merged.
fn merges(options: &PlugOptions, limits: &Limits) -> bool {
    match options.merge {
        MergeMode::Auto => limits.cost_per_request,
        MergeMode::On => true,
        MergeMode::Off => false,
    }
}

/// The end of the members of a merged request.
#[derive(Clone, Copy)]
enum MemberOutcome<'a> {
    /// All with its outcome.
    AsMerged,
    /// Those with the chosen tags are repeated one by one, or aborted if they are cancelled; the others end with its
    /// outcome.
    Repeat(&'a dyn Fn(Tag) -> bool),
}

/// A placeholder for a request taken out of a plug.
const VACANT: AnyRequest =
    AnyRequest { op: Op::Flush, start: ByteOffset(0), len: ByteLen::ZERO, tag: Tag::new(MERGED_SLOT, 0), buffer: None };

/// Returns the number of a request's memory segments; `None` when storage would refuse its buffer, so that it must not
/// be merged.
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
