//! A worker's handles to disks: one channel per disk, shared by all the worker's queues of it.
//!
//! A turn visits only *busy* channels: those with requests plugged, ready or outstanding, and a worker's only one. Each
//! turn begins with the next one, and while several are busy none may exceed its [`Quota`].

use std::sync::Arc;
use std::time::Instant;

use mqblk_core::{DiskChannel, DiskError, DiskSlot, Tag};
use mqblk_uring::UringContext;

use crate::AnyDisk;
use crate::errors::{DiskHealth, EngineChannel, SharedGuard, guarded};
use crate::limits::Throttle;
use crate::options::PlugOptions;
use crate::plug::{Merger, Merges, PlugCounters};
use crate::queue_options::QueueDisk;
use crate::quota::{ByteQuota, Quota, SubmitQuota, TurnBytes};
use crate::request::{AnyCompletion, AnyRequest, cancelled};
use crate::slices::{SliceBudget, SlicedChannel};

mod changing;
mod parked;
mod throttled;

/// An open channel and the requests that wait to be submitted to it.
pub(crate) struct OpenChannel {
    pub(crate) disk: Arc<AnyDisk>,
    pub(crate) health: Arc<DiskHealth>,
    channel: EngineChannel,
    /// Parks and repeats failed requests; `None` when they are completed with their errors.
    pub(crate) guard: Option<SharedGuard>,
    /// Requests pulled in this turn, and those that the channel did not take in the last one.
    pub(crate) plug: Vec<AnyRequest>,
    /// True if the last turn left requests in the plug or in the ready list.
    left: bool,
    /// True if it is in the list of busy channels.
    busy: bool,
    /// Merges plugged requests; `None` when they are submitted as they are.
    merger: Option<Box<Merger>>,
    /// Holds requests back until the disk's limits allow them; `None` when nothing is limited.
    throttle: Option<Box<Throttle>>,
    /// Most requests outstanding; 0: any number.
    depth: u32,
    /// True if it has a depth or a throttle.
    is_bounded: bool,
    /// The plugging of requests.
    options: PlugOptions,
    users: usize,
}

impl OpenChannel {
    /// Returns its disk, for another worker to open in this slot of a queue.
    pub(crate) fn queue_disk(&self, slot: DiskSlot) -> QueueDisk {
        let (disk, health) = (Arc::clone(&self.disk), Arc::clone(&self.health));
        QueueDisk { slot, disk, plug: self.options, health }
    }

    /// Returns true if more requests should be pulled into the plug in this turn.
    #[inline]
    pub(crate) fn wants_more(&self) -> bool {
        self.merger.as_ref().is_some_and(|merger| merger.wants_more(self.plug.len() + self.throttled()))
    }

    /// Returns the number of requests that wait to be offered, without throttled ones.
    #[inline]
    fn waiting(&self) -> usize {
        self.plug.len() + self.merger.as_ref().map_or(0, |merger| merger.ready())
    }

    /// Returns the number of requests that may be offered now.
    fn budget(&self, context: &UringContext, shared: bool, contended: bool) -> usize {
        let share = Quota { depth: self.depth, shared, contended };
        share.budget(self.waiting(), self.channel.outstanding() as usize, context.room(), context.capacity())
    }

    /// Collects completions. Returns the number of requests to offer again.
    #[inline]
    fn reap(
        &mut self,
        context: &mut UringContext,
        counts: &mut PlugCounters,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let before = finished.len();
        self.channel.reap(context, finished);
        self.merger.as_mut().map_or(0, |merger| merger.fan_out(context, before, counts, finished))
    }

    /// Returns the plugged requests of which the storage may receive `most` now.
    fn to_stamp(&self, most: usize) -> &[AnyRequest] {
        // A plan may reorder them.
        let plans = self.merger.as_ref().is_some_and(|merger| merger.will_plan(&self.plug));
        &self.plug[..if plans { self.plug.len() } else { most.min(self.plug.len()) }]
    }

    /// Returns true if the whole plug is submitted as it is: there are no bounds, nothing to merge and nothing to
    /// stamp.
    #[inline]
    fn is_plain(&self) -> bool {
        // One comparison for both.
        !(self.is_bounded | self.left)
            && self.plug.len() < STAMPED
            && self.merger.as_ref().is_none_or(|merger| merger.passes_through(&self.plug))
    }

    /// Submits waiting requests within the quota. Returns the number of requests that were taken or must be offered
    /// again.
    #[inline(always)] // it is called from two places, one of which is rare
    fn submit_within(
        &mut self,
        context: &mut UringContext,
        mut quota: SubmitQuota<'_>,
        stamp: &mut impl FnMut(&[AnyRequest]),
        counts: &mut PlugCounters,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        if quota.most == 0 {
            self.left = self.waiting() > 0;
            return 0;
        }
        if self.plug.len() >= STAMPED || self.left {
            stamp(self.to_stamp(quota.most));
        }
        let (channel, plug) = (&mut self.channel, &mut self.plug);
        let mut happened = 0;
        if let Some(merger) = self.merger.as_mut().filter(|merger| !merger.passes_through(plug)) {
            happened = merger.submit(context, channel, plug, quota, counts, finished);
            self.left = !plug.is_empty() || merger.ready() > 0;
        } else {
            if !plug.is_empty() {
                happened = quota.submit(context, channel, plug, finished);
            }
            self.left = !plug.is_empty();
        }
        self.end_pass_throttle();
        happened
    }
}

/// An index that no channel has.
const NO_CHANNEL: usize = usize::MAX;

/// Capacity of a plug, so that a turn does not allocate: more than a worker pulls in one turn.
const PLUG_ROOM: usize = 4096;

/// All of a worker's channels, with the completions and cancellations between them and the queues.
#[derive(Default)]
pub(crate) struct Channels {
    /// Boxed, so that a lookup by index takes a few instructions.
    open: Vec<Option<Box<OpenChannel>>>,
    /// Channels that are open.
    count: usize,
    /// Index of the only one; [`NO_CHANNEL`] while there are none or several.
    only: usize,
    /// Indexes of the busy channels. A channel that is the only open one is always busy.
    busy: Vec<usize>,
    /// Index in `busy` of the one that this turn begins with.
    first: usize,
    left: bool,
    /// Counters of all plugs.
    counts: PlugCounters,
    /// Completions that wait for their queues and come from outside a turn's pull, submission and reaping.
    pub(crate) completions: Vec<AnyCompletion>,
    /// Requests to cancel, with the index of their channel.
    pub(crate) cancelled: Vec<(usize, Tag)>,
    /// Indexes of the channels whose plugs got requests since the list was last cleared. May contain duplicates.
    plugged: Vec<usize>,
    /// The part of a plug that is being offered; kept for its capacity.
    part: Vec<AnyRequest>,
    /// Bytes of long requests that all channels may submit in a turn.
    slices: SliceBudget,
    /// Channels with a throttle.
    throttles: usize,
    /// True if a channel has a retired merger.
    retired: bool,
    /// True if all submitted requests have completed: [`reap`](Self::reap) would find nothing.
    settled: bool,
}

impl Channels {
    /// Returns an empty set with capacity for a busy turn.
    pub(crate) fn new() -> Channels {
        Channels { only: NO_CHANNEL, completions: Vec::with_capacity(PLUG_ROOM), ..Channels::default() }
    }

    /// Returns the index of a disk's channel. Opens it if this worker has none yet.
    pub(crate) fn open(
        &mut self,
        context: &mut UringContext,
        QueueDisk { disk, plug: options, health, .. }: &QueueDisk,
    ) -> Result<usize, DiskError> {
        let same = |open: &OpenChannel| std::ptr::addr_eq(Arc::as_ptr(&open.disk), Arc::as_ptr(disk));
        if let Some(at) = self.open.iter().position(|open| open.as_deref().is_some_and(same)) {
            self.get(at).users += 1;
            return Ok(at);
        }
        let options = &health.plug().unwrap_or(*options);
        let limits = disk.limits();
        let sliced = SlicedChannel::new(disk.open_channel(context)?, options, &limits, self.slices.clone());
        let (channel, guard) = guarded(sliced, health, &limits);
        let merger = Merger::new(options, &limits, &disk.geometry(), PLUG_ROOM);
        let plug = Vec::with_capacity(PLUG_ROOM);
        let throttle = Throttle::new(health.limits(), 0);
        self.throttles += usize::from(throttle.is_some());
        let (disk, health, depth, options) = (Arc::clone(disk), Arc::clone(health), options.depth, *options);
        let is_bounded = depth > 0 || throttle.is_some();
        let (left, busy, users) = (false, true, 1);
        let open = OpenChannel {
            disk,
            health,
            channel,
            guard,
            plug,
            left,
            busy,
            merger,
            throttle,
            depth,
            is_bounded,
            options,
            users,
        };
        let at = self.open.iter().position(Option::is_none).unwrap_or_else(|| {
            self.open.push(None);
            self.open.len() - 1
        });
        self.open[at] = Some(Box::new(open));
        self.count += 1;
        self.only = if self.count == 1 { at } else { NO_CHANNEL };
        self.settled = false;
        // So that becoming busy does not allocate.
        self.busy.reserve(self.open.len());
        self.busy.push(at);
        self.plugged.reserve(PLUG_ROOM);
        self.part.reserve(PLUG_ROOM);
        Ok(at)
    }

    /// Releases one use of a channel; the last one closes it. All its requests have completed.
    pub(crate) fn close(&mut self, context: &mut UringContext, at: usize) {
        let open = self.get(at);
        open.users -= 1;
        if open.users == 0 {
            debug_assert!(open.plug.is_empty() && open.merger.as_ref().is_none_or(|merger| merger.is_idle()));
            debug_assert!(open.throttled() == 0, "throttled requests of a queue that leaves pass at once");
            open.channel.close(context);
            let throttles = usize::from(open.throttle.is_some());
            self.throttles -= throttles;
            self.open[at] = None;
            self.count -= 1;
            self.only = NO_CHANNEL;
            self.busy.retain(|busy| *busy != at);
            if self.count == 1 {
                self.busy.clear();
                for (at, open) in self.open.iter_mut().enumerate().filter_map(|(at, open)| Some((at, open.as_mut()?))) {
                    open.busy = true;
                    self.busy.push(at);
                    self.only = at;
                }
            }
        }
    }

    /// Returns the channel at an index that [`open`](Self::open) returned.
    #[inline]
    pub(crate) fn get(&mut self, at: usize) -> &mut OpenChannel {
        self.open[at].as_mut().expect("a queue holds its channel's place")
    }

    /// Returns the channel at an index, if there is one.
    pub(crate) fn find(&self, at: usize) -> Option<&OpenChannel> {
        self.open.get(at)?.as_deref()
    }

    /// Returns the lists that a queue's requests for a channel enter: its plug and the cancellations.
    #[inline(always)] // as the worker's pull
    pub(crate) fn lists(&mut self, at: usize) -> (&mut Vec<AnyRequest>, &mut Vec<(usize, Tag)>) {
        let open = self.open[at].as_deref_mut().expect("a queue holds its channel's place");
        (&mut open.plug, &mut self.cancelled)
    }

    /// Marks a channel busy because its plug got requests.
    #[inline(always)] // as the worker's pull
    pub(crate) fn mark_plugged(&mut self, at: usize) {
        if self.only != at {
            self.mark_one_of_several(at);
        }
    }

    #[inline(never)]
    fn mark_one_of_several(&mut self, at: usize) {
        let open = self.open[at].as_mut().expect("a queue holds its channel's place");
        if !open.busy {
            open.busy = true;
            self.busy.push(at);
        }
    }

    /// Puts a request in a channel's plug.
    #[inline]
    pub(crate) fn plug(&mut self, at: usize, request: AnyRequest) {
        let open = self.open[at].as_mut().expect("a queue holds its channel's place");
        open.plug.push(request);
        if !open.busy {
            open.busy = true;
            self.busy.push(at);
        }
        if self.plugged.last() != Some(&at) {
            self.plugged.push(at);
        }
    }

    /// Clears the list of plugs that got requests: plugs of a pull are offered in the same turn.
    #[inline]
    pub(crate) fn forget_plugged(&mut self) {
        self.plugged.clear();
    }

    /// Returns true if a disk that the last pull had requests for wants more of them in this turn.
    pub(crate) fn wants_more(&self, only: Option<usize>) -> bool {
        let wants = |at: &usize| self.open[*at].as_deref().is_some_and(OpenChannel::wants_more);
        only.iter().chain(&self.plugged).any(wants)
    }

    /// Returns true if requests were plugged outside of a pull, or cancellations wait.
    #[inline]
    pub(crate) fn has_pending(&self) -> bool {
        self.plugged.len() | self.cancelled.len() != 0
    }

    /// Returns true if requests were plugged, completed or chosen to be cancelled outside of a pull, a submission and
    /// reaping.
    #[inline]
    pub(crate) fn has_aside(&self) -> bool {
        self.plugged.len() | self.cancelled.len() | self.completions.len() != 0
    }

    /// Re-offers plugged requests next turn. Returns true if a cancellation is pending.
    pub(crate) fn flush_pending(&mut self) -> bool {
        self.left |= !self.plugged.is_empty();
        self.plugged.clear();
        !self.cancelled.is_empty()
    }

    /// Offers waiting requests to the channels, to each within its quota, beginning with another channel each time.
    /// `stamp` gets the requests that are about to be submitted, if their time in the plug is worth measuring: a few
    /// are pulled and submitted in less than a microsecond. Returns the number of requests that were taken or must be
    /// offered again.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        context: &mut UringContext,
        finished: &mut Vec<AnyCompletion>,
        stamp: impl FnMut(&[AnyRequest]),
    ) -> usize {
        if let Some(Some(open)) = self.open.get_mut(self.only)
            && open.is_plain()
        {
            // `submit_within` has the same effect for 50 more instructions a turn.
            let open = &mut **open;
            let before = finished.len();
            let taken = if open.plug.is_empty() { 0 } else { open.channel.submit(context, &mut open.plug, finished) };
            self.settled &= finished.len() - before == taken;
            let left = !open.plug.is_empty();
            (open.left, self.left) = (left, left);
            return taken;
        }
        self.submit_shared(context, finished, stamp)
    }

    #[inline(never)]
    fn submit_shared(
        &mut self,
        context: &mut UringContext,
        finished: &mut Vec<AnyCompletion>,
        mut stamp: impl FnMut(&[AnyRequest]),
    ) -> usize {
        (self.left, self.settled) = (false, false);
        let (shared, contended) = (self.count > 1, self.busy.len() > 1);
        self.first = if self.first + 1 < self.busy.len() { self.first + 1 } else { 0 };
        let (last, first) = self.busy.split_at(self.first);
        let (mut happened, mut bytes) = (0, TurnBytes::new());
        for at in first.iter().chain(last) {
            let Some(open) = self.open[*at].as_mut() else { continue };
            if open.throttle.is_some() {
                open.pass_throttle();
            }
            let quota = if shared { bytes.of_channel() } else { ByteQuota::UNLIMITED };
            let mut left = quota;
            let most = if shared || open.depth > 0 { open.budget(context, shared, contended) } else { usize::MAX };
            let submit = SubmitQuota { most, bytes: &mut left, part: &mut self.part };
            happened += open.submit_within(context, submit, &mut stamp, &mut self.counts, finished);
            bytes.spend(quota, left);
            self.left |= open.left;
        }
        happened
    }

    /// Cancels requests of a channel: removes those that the storage has not seen, and asks it to cancel the others.
    /// `tags` are sorted.
    pub(crate) fn cancel(&mut self, context: &mut UringContext, at: usize, tags: &[Tag]) {
        self.settled = false;
        let open = self.open[at].as_mut().expect("a queue holds its channel's place");
        let finished = &mut self.completions;
        let chosen = |tag: Tag| tags.binary_search(&tag).is_ok();
        open.cancel_throttled(chosen, finished);
        finished.extend(open.plug.extract_if(.., |request| chosen(request.tag)).map(cancelled));
        let Some(merger) = &mut open.merger else {
            open.channel.cancel(context, tags, finished);
            return;
        };
        let merged = merger.cancel(context, chosen, finished);
        let before = finished.len();
        if merged.is_empty() {
            open.channel.cancel(context, tags, finished);
        } else {
            let mut all = [tags, &merged].concat();
            all.sort_unstable();
            open.channel.cancel(context, &all, finished);
        }
        if merger.fan_out(context, before, &mut self.counts, finished) > 0 || merger.ready() > 0 {
            self.left = true;
        }
    }

    /// Returns all open channels with their indexes.
    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, &OpenChannel)> {
        self.open.iter().enumerate().filter_map(|(at, open)| Some((at, open.as_deref()?)))
    }

    /// Marks a channel busy because its guard has requests to repeat.
    pub(crate) fn mark_busy(&mut self, at: usize) {
        self.settled = false;
        let open = self.open[at].as_mut().expect("the caller has found the channel");
        if !open.busy {
            open.busy = true;
            self.busy.push(at);
        }
    }

    /// Returns true if requests must be offered even if the turn pulls none.
    #[inline]
    pub(crate) fn has_left(&self) -> bool {
        self.left
    }

    /// Returns true if all submitted requests have completed: [`reap`](Self::reap) would find nothing.
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Collects completions from all busy channels. Returns true if requests must be offered again.
    #[inline(never)]
    pub(crate) fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<AnyCompletion>) -> bool {
        self.slices.renew();
        let (mut again, mut at_storage) = (0, false);
        let mut nth = 0;
        while let Some(at) = self.busy.get(nth).copied() {
            let Some(open) = self.open[at].as_mut() else { break };
            let mut outstanding = open.channel.outstanding();
            if outstanding > 0 {
                again += open.reap(context, &mut self.counts, finished);
                outstanding = open.channel.outstanding();
            }
            at_storage |= outstanding > 0;
            if outstanding == 0 && self.count > 1 && open.waiting() == 0 && open.throttled() == 0 {
                open.busy = false;
                self.busy.remove(nth);
            } else {
                nth += 1;
            }
        }
        if self.throttles > 0 {
            again += self.due_throttles();
        }
        self.left |= again > 0;
        let listed = self.count > 1 && !self.busy.is_empty();
        self.settled = !at_storage && !listed && self.throttles == 0 && self.slices.is_full();
        again > 0
    }

    /// Reaps every channel, also those with nothing outstanding: a channel may have operations of its own in the ring
    /// (a connection that it watches), and only the channel can read their completions.
    pub(crate) fn reap_all(&mut self, context: &mut UringContext, finished: &mut Vec<AnyCompletion>) {
        self.settled = false;
        for open in self.open.iter_mut().flatten() {
            let again = open.reap(context, &mut self.counts, finished);
            // Its completions may let it take waiting requests.
            self.left |= again > 0 || open.left;
        }
    }

    /// Returns the earliest time at which a channel must be reaped without a completion.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let throttles = self.busy().filter_map(OpenChannel::throttle_deadline);
        self.busy().filter_map(|open| open.channel.deadline()).chain(throttles).min()
    }

    fn busy(&self) -> impl Iterator<Item = &OpenChannel> {
        self.busy.iter().filter_map(|at| self.open[*at].as_deref())
    }

    /// Returns the merge counters of the queue in `slot`.
    pub(crate) fn merges(&self, slot: u16) -> Merges {
        self.counts.merges.get(usize::from(slot)).copied().unwrap_or_default()
    }

    /// Takes the merge counters of the queue in `slot`: the next queue in that slot begins at 0.
    pub(crate) fn take_merges(&mut self, slot: u16) -> Merges {
        self.counts.merges.get_mut(usize::from(slot)).map(std::mem::take).unwrap_or_default()
    }

    /// Sets the merge counters of a queue that has come from another worker.
    pub(crate) fn set_merges(&mut self, slot: u16, merges: Merges) {
        let at = usize::from(slot);
        if self.counts.merges.len() <= at {
            self.counts.merges.resize(at + 1, Merges::default());
        }
        self.counts.merges[at] = merges;
    }

    /// Returns the plugs' counters.
    pub(crate) fn counts(&self) -> &PlugCounters {
        &self.counts
    }
}

/// Number of plugged requests from which their time in the plug is measured: more than the batch of one queue, which is
/// pulled in 1 to 2 us.
const STAMPED: usize = 33;
