//! A worker's handles to disks: one channel per disk, shared by all the worker's queues of it.
//!
//! Only *busy* channels (those with requests plugged, ready or outstanding, and a worker's only one) are looked at in a turn. Each
//! turn begins with another one of them, and while several are busy none may have more than its [`Share`].

use std::sync::Arc;
use std::time::Instant;

use mqblk_core::{DiskChannel, DiskError, Outcome, Tag};
use mqblk_uring::UringContext;

use crate::AnyDisk;
use crate::attached_disks::{AttachedDisk, QueueDisk};
use crate::errors::{DiskHealth, SharedGuard, guarded};
use crate::plug::{Merger, Merges, PlugCounts};
use crate::quota::{Quota, SubmitQuota};
use crate::runner::{AnyCompletion, AnyRequest, Route};

/// One open channel and the requests that wait to be submitted to it.
pub(crate) struct OpenChannel {
    pub(crate) disk: Arc<AnyDisk>,
    pub(crate) health: Arc<DiskHealth>,
    channel: Box<dyn DiskChannel<UringContext>>,
    /// What parks and repeats its failed requests; `None` when they are answered.
    pub(crate) guard: Option<SharedGuard>,
    /// Requests pulled this turn, and those that the channel left last turn.
    pub(crate) plug: Vec<AnyRequest>,
    /// Requests were left over last turn, here or ready to be offered.
    left: bool,
    /// It is among the busy ones.
    busy: bool,
    /// Joins them; `None` when they are submitted as they are.
    merger: Option<Box<Merger>>,
    /// Most requests outstanding; 0: any number.
    depth: u32,
    users: usize,
}

impl OpenChannel {
    /// Whether to pull on from a queue that has more.
    #[inline]
    pub(crate) fn wants_more(&self) -> bool {
        self.merger.as_ref().is_some_and(|merger| merger.wants_more(self.plug.len()))
    }

    /// Requests that wait to be offered.
    #[inline]
    fn waiting(&self) -> usize {
        self.plug.len() + self.merger.as_ref().map_or(0, |merger| merger.ready())
    }

    /// How many of them may be offered now.
    fn budget(&self, context: &UringContext, shared: bool, contended: bool) -> usize {
        let share = Quota { depth: self.depth, shared, contended };
        share.budget(self.waiting(), self.channel.outstanding() as usize, context.room(), context.capacity())
    }

    /// Collects what has ended. Returns how many requests are to be offered again.
    #[inline]
    fn reap(
        &mut self,
        context: &mut UringContext,
        counts: &mut PlugCounts,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let before = finished.len();
        self.channel.reap(context, finished);
        self.merger.as_mut().map_or(0, |merger| merger.fan_out(context, before, counts, finished))
    }

    /// Those in the plug of which the storage may be handed `most` now.
    #[cold]
    fn to_stamp(&self, most: usize) -> &[AnyRequest] {
        // A plan may put any of them first.
        let plans = self.merger.as_ref().is_some_and(|merger| merger.will_plan(&self.plug));
        &self.plug[..if plans { self.plug.len() } else { most.min(self.plug.len()) }]
    }

    /// Offers what waits, as far as the offer goes.
    #[inline(always)] // it is called from two places, one of which is rare
    fn submit(
        &mut self,
        context: &mut UringContext,
        mut offer: SubmitQuota<'_>,
        stamp: &mut impl FnMut(&[AnyRequest]),
        counts: &mut PlugCounts,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        if offer.most == 0 {
            self.left = self.waiting() > 0;
            return 0;
        }
        if self.plug.len() >= STAMPED || self.left {
            stamp(self.to_stamp(offer.most));
        }
        let (channel, plug) = (self.channel.as_mut(), &mut self.plug);
        let mut happened = 0;
        if let Some(merger) = self.merger.as_mut().filter(|merger| !merger.lets_pass(plug)) {
            happened = merger.submit(context, channel, plug, offer, counts, finished);
            self.left = !plug.is_empty() || merger.ready() > 0;
        } else {
            if !plug.is_empty() {
                happened = offer.submit(context, channel, plug, finished);
            }
            self.left = !plug.is_empty();
        }
        happened
    }
}

/// Room in a plug, so that a turn does not allocate: more than one turn of a worker pulls.
const PLUG_ROOM: usize = 4096;

/// All of a worker's channels, and what is on its way between them and the queues.
#[derive(Default)]
pub(crate) struct Channels {
    open: Vec<Option<OpenChannel>>,
    /// Open ones.
    count: usize,
    /// Places of the busy ones; when only one is open it counts as busy.
    busy: Vec<usize>,
    /// Index in `busy` of the one that this turn begins with.
    first: usize,
    left: bool,
    /// What their plugs count.
    counts: PlugCounts,
    /// Requests that have ended and are to be handed back.
    pub(crate) completions: Vec<AnyCompletion>,
    /// Requests to be ended early, by their channel's place.
    pub(crate) cancelled: Vec<(usize, Tag)>,
    /// Places that were given requests since somebody looked, in part several times.
    plugged: Vec<usize>,
    /// The part of a plug that is offered; kept for its room.
    part: Vec<AnyRequest>,
}

impl Channels {
    /// None open yet, with room for a busy turn.
    pub(crate) fn new() -> Channels {
        Channels { completions: Vec::with_capacity(PLUG_ROOM), ..Channels::default() }
    }

    /// The channel to a disk, opened if this worker has none yet. Returns its place.
    pub(crate) fn open(
        &mut self,
        context: &mut UringContext,
        QueueDisk { disk, plug: options, health, .. }: &QueueDisk,
    ) -> Result<usize, DiskError> {
        let same = |open: &OpenChannel| std::ptr::addr_eq(Arc::as_ptr(&open.disk), Arc::as_ptr(disk));
        if let Some(at) = self.open.iter().position(|open| open.as_ref().is_some_and(same)) {
            self.get(at).users += 1;
            return Ok(at);
        }
        let (channel, guard) = guarded(disk.open_channel(context)?, health, &disk.limits());
        let merger = Merger::new(options, &disk.limits(), &disk.geometry(), PLUG_ROOM);
        let plug = Vec::with_capacity(PLUG_ROOM);
        let (disk, health, depth) = (Arc::clone(disk), Arc::clone(health), options.depth);
        let open = OpenChannel { disk, health, channel, guard, plug, left: false, busy: true, merger, depth, users: 1 };
        let at = self.open.iter().position(Option::is_none).unwrap_or_else(|| {
            self.open.push(None);
            self.open.len() - 1
        });
        self.open[at] = Some(open);
        self.count += 1;
        // So that becoming busy does not allocate.
        self.busy.reserve(self.open.len());
        self.busy.push(at);
        self.plugged.reserve(PLUG_ROOM);
        self.part.reserve(PLUG_ROOM);
        Ok(at)
    }

    /// One user less; the last one closes the channel. All its requests have ended.
    pub(crate) fn close(&mut self, context: &mut UringContext, at: usize) {
        let open = self.get(at);
        open.users -= 1;
        if open.users == 0 {
            debug_assert!(open.plug.is_empty() && open.merger.as_ref().is_none_or(|merger| merger.is_idle()));
            open.channel.close(context);
            self.open[at] = None;
            self.count -= 1;
            self.busy.retain(|busy| *busy != at);
            if self.count == 1 {
                self.busy.clear();
                for (at, open) in self.open.iter_mut().enumerate().filter_map(|(at, open)| Some((at, open.as_mut()?))) {
                    open.busy = true;
                    self.busy.push(at);
                }
            }
        }
    }

    /// The channel at a place that [`open`](Self::open) gave.
    #[inline]
    pub(crate) fn get(&mut self, at: usize) -> &mut OpenChannel {
        self.open[at].as_mut().expect("a queue holds its channel's place")
    }

    /// The channel at a place, if there is one.
    pub(crate) fn look(&self, at: usize) -> Option<&OpenChannel> {
        self.open.get(at)?.as_ref()
    }

    /// The way of requests to the disk of a queue that has only this one. [`note_plugged`](Self::note_plugged) follows.
    #[inline]
    pub(crate) fn route_to<'a>(&'a mut self, disk: &'a AttachedDisk) -> Route<'a> {
        let open = self.open[disk.channel].as_mut().expect("a queue holds its channel's place");
        Route::One { disk, plug: &mut open.plug, finished: &mut self.completions, cancelled: &mut self.cancelled }
    }

    /// Requests came into the plug at a place.
    #[inline]
    pub(crate) fn note_plugged(&mut self, at: usize) {
        if self.count == 1 {
            return;
        }
        let open = self.open[at].as_mut().expect("a queue holds its channel's place");
        if !open.busy {
            open.busy = true;
            self.busy.push(at);
        }
    }

    /// Puts a request in the plug at a place.
    #[inline(never)] // else it would cost queues of one disk, which do not come here, registers
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

    /// Forgets which plugs were given requests: a pull's are offered in the same turn.
    #[inline]
    pub(crate) fn forget_plugged(&mut self) {
        self.plugged.clear();
    }

    /// Whether to pull on from the queue that gave requests to these plugs, when it has more: whether one of its disks wants that.
    pub(crate) fn wants_more(&self, only: Option<usize>) -> bool {
        let wants = |at: &usize| self.open[*at].as_ref().is_some_and(OpenChannel::wants_more);
        only.iter().chain(&self.plugged).any(wants)
    }

    /// Whether requests came into plugs otherwise than by a pull, or requests are to end early.
    #[inline]
    pub(crate) fn has_pending(&self) -> bool {
        self.plugged.len() | self.cancelled.len() != 0
    }

    /// Re-offers plugged requests next turn. Returns true if a cancellation is pending.
    pub(crate) fn flush_pending(&mut self) -> bool {
        self.left |= !self.plugged.is_empty();
        self.plugged.clear();
        !self.cancelled.is_empty()
    }

    /// Offers what waits to the channels, each its share, beginning with another one each time. `stamp` is given requests that are
    /// about to be handed to the storage, where it is worth noting when that is: a few are pulled and handed over in less than a
    /// microsecond. Returns how many were taken, or are to be offered again.
    #[inline]
    pub(crate) fn submit(&mut self, context: &mut UringContext, mut stamp: impl FnMut(&[AnyRequest])) -> usize {
        if self.count > 1 {
            return self.submit_shared(context, stamp);
        }
        self.left = false;
        let Some(open) = self.busy.first().and_then(|at| self.open[*at].as_mut()) else { return 0 };
        if open.depth > 0 || open.merger.is_some() {
            let most = if open.depth == 0 { usize::MAX } else { open.budget(context, false, false) };
            let offer = SubmitQuota { most, contended: false, part: &mut self.part };
            let happened = open.submit(context, offer, &mut stamp, &mut self.counts, &mut self.completions);
            self.left = open.left;
            return happened;
        }
        if open.plug.len() >= STAMPED || open.left {
            stamp(&open.plug);
        }
        let taken =
            if open.plug.is_empty() { 0 } else { open.channel.submit(context, &mut open.plug, &mut self.completions) };
        open.left = !open.plug.is_empty();
        self.left = open.left;
        taken
    }

    #[inline(never)]
    fn submit_shared(&mut self, context: &mut UringContext, mut stamp: impl FnMut(&[AnyRequest])) -> usize {
        self.left = false;
        let contended = self.busy.len() > 1;
        self.first = if self.first + 1 < self.busy.len() { self.first + 1 } else { 0 };
        let (last, first) = self.busy.split_at(self.first);
        let mut happened = 0;
        for at in first.iter().chain(last) {
            let Some(open) = self.open[*at].as_mut() else { continue };
            let offer = SubmitQuota { most: open.budget(context, true, contended), contended, part: &mut self.part };
            happened += open.submit(context, offer, &mut stamp, &mut self.counts, &mut self.completions);
            self.left |= open.left;
        }
        happened
    }

    /// Ends requests early of the channel at a place: takes back those that the storage has not seen, and asks it to give up the
    /// others. `tags` are in order.
    pub(crate) fn cancel(&mut self, context: &mut UringContext, at: usize, tags: &[Tag]) {
        let open = self.open[at].as_mut().expect("a queue holds its channel's place");
        let finished = &mut self.completions;
        let chosen = |tag: Tag| tags.binary_search(&tag).is_ok();
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

    /// All that are open, with their places.
    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, &OpenChannel)> {
        self.open.iter().enumerate().filter_map(|(at, open)| Some((at, open.as_ref()?)))
    }

    /// The channel at a place has requests of its own to offer again.
    pub(crate) fn mark_busy(&mut self, at: usize) {
        let open = self.open[at].as_mut().expect("whoever stirs a channel has found it");
        if !open.busy {
            open.busy = true;
            self.busy.push(at);
        }
    }

    /// Whether there are requests to offer that no turn has pulled.
    #[inline]
    pub(crate) fn has_left(&self) -> bool {
        self.left
    }

    /// Collects what has ended in all channels. Whether requests are to be offered again.
    #[inline]
    pub(crate) fn reap(&mut self, context: &mut UringContext) -> bool {
        let mut again = 0;
        let mut nth = 0;
        while let Some(at) = self.busy.get(nth).copied() {
            let Some(open) = self.open[at].as_mut() else { break };
            let mut outstanding = open.channel.outstanding();
            if outstanding > 0 {
                again += open.reap(context, &mut self.counts, &mut self.completions);
                outstanding = open.channel.outstanding();
            }
            if outstanding == 0 && self.count > 1 && open.waiting() == 0 {
                open.busy = false;
                self.busy.remove(nth);
            } else {
                nth += 1;
            }
        }
        self.left |= again > 0;
        again > 0
    }

    /// Reaps every channel, also those with nothing outstanding: a channel may have operations of its own in the ring (a connection that
    /// it watches), and only the channel can read their completions.
    #[cold]
    pub(crate) fn reap_all(&mut self, context: &mut UringContext) {
        for open in self.open.iter_mut().flatten() {
            let again = open.reap(context, &mut self.counts, &mut self.completions);
            // What it read may let it take requests that wait.
            self.left |= again > 0 || open.left;
        }
    }

    /// The earliest time that a channel wants to be reaped without a completion.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.busy().filter_map(|open| open.channel.deadline()).min()
    }

    fn busy(&self) -> impl Iterator<Item = &OpenChannel> {
        self.busy.iter().filter_map(|at| self.open[*at].as_ref())
    }

    /// Requests of the queue in `slot` that were merged to another one.
    pub(crate) fn merges(&self, slot: u16) -> Merges {
        self.counts.merges.get(usize::from(slot)).copied().unwrap_or_default()
    }

    /// The same, for the last time: the next queue in that slot begins at 0.
    pub(crate) fn take_merges(&mut self, slot: u16) -> Merges {
        self.counts.merges.get_mut(usize::from(slot)).map(std::mem::take).unwrap_or_default()
    }

    /// What the plugs counted so far.
    pub(crate) fn counts(&self) -> &PlugCounts {
        &self.counts
    }
}

/// From how many plugged requests on their time in the plug is measured.
const STAMPED: usize = 16;

/// The end of a request that the storage has not seen.
pub(crate) fn cancelled(request: AnyRequest) -> AnyCompletion {
    AnyCompletion { outcome: Outcome::Aborted, tag: request.tag, buffer: request.buffer }
}
