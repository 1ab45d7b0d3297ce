//! A worker's handles to disks: one channel per disk, shared by all the worker's queues of it.

use std::sync::Arc;
use std::time::Instant;

use mqblk_core::{DiskChannel, DiskError, Outcome, Tag};
use mqblk_uring::Lane;

use crate::AnyDisk;
use crate::clock::{Clock, Moment};
use crate::options::PlugOptions;
use crate::plug::{Merger, Merges, PlugCounts};
use crate::runner::{AnyFinished, AnyRequest};

/// One open channel and the requests that wait to be submitted to it.
pub(crate) struct Open {
    pub(crate) disk: Arc<AnyDisk>,
    channel: Box<dyn DiskChannel<Lane>>,
    /// Requests pulled this turn, and those that the channel left last turn.
    pub(crate) plug: Vec<AnyRequest>,
    /// Requests were left over last turn, here or ready to be offered.
    left: bool,
    /// Joins them; `None` when they are submitted as they are.
    merger: Option<Box<Merger>>,
    users: usize,
}

impl Open {
    /// Whether requests of an earlier turn wait here.
    #[inline]
    pub(crate) fn is_left(&self) -> bool {
        self.left
    }

    /// Whether to pull on from a queue that has more.
    #[inline]
    pub(crate) fn wants_more(&self) -> bool {
        self.merger.as_ref().is_some_and(|merger| merger.wants_more(self.plug.len()))
    }
}

/// Room in a plug, so that a turn does not allocate: more than one turn of a worker pulls.
const PLUG_ROOM: usize = 4096;

/// All of a worker's channels.
#[derive(Default)]
pub(crate) struct Channels {
    open: Vec<Option<Open>>,
    left: bool,
    /// What their plugs count.
    counts: PlugCounts,
}

impl Channels {
    /// The channel to `disk`, opened if this worker has none yet. Returns its place.
    pub(crate) fn open(
        &mut self,
        lane: &mut Lane,
        disk: &Arc<AnyDisk>,
        options: PlugOptions,
    ) -> Result<usize, DiskError> {
        let same = |open: &Open| std::ptr::addr_eq(Arc::as_ptr(&open.disk), Arc::as_ptr(disk));
        if let Some(at) = self.open.iter().position(|open| open.as_ref().is_some_and(same)) {
            self.get(at).users += 1;
            return Ok(at);
        }
        let channel = disk.open_channel(lane)?;
        let merger = Merger::new(&options, &disk.limits(), &disk.geometry(), PLUG_ROOM);
        let plug = Vec::with_capacity(PLUG_ROOM);
        let open = Open { disk: Arc::clone(disk), channel, plug, left: false, merger, users: 1 };
        let at = self.open.iter().position(Option::is_none).unwrap_or_else(|| {
            self.open.push(None);
            self.open.len() - 1
        });
        self.open[at] = Some(open);
        Ok(at)
    }

    /// One user less; the last one closes the channel. All its requests have ended.
    pub(crate) fn close(&mut self, lane: &mut Lane, at: usize) {
        let open = self.get(at);
        open.users -= 1;
        if open.users == 0 {
            debug_assert!(open.plug.is_empty() && open.merger.as_ref().is_none_or(|merger| merger.is_idle()));
            open.channel.close(lane);
            self.open[at] = None;
        }
    }

    /// The channel at a place that [`open`](Self::open) gave.
    #[inline]
    pub(crate) fn get(&mut self, at: usize) -> &mut Open {
        self.open[at].as_mut().expect("a queue holds its channel's place")
    }

    /// Offers every plug to its channel. Returns how many requests were taken, or are to be offered again.
    #[inline]
    pub(crate) fn submit(&mut self, lane: &mut Lane, clock: &Clock, finished: &mut Vec<AnyFinished>) -> usize {
        let mut happened = 0;
        self.left = false;
        for open in self.open.iter_mut().flatten() {
            let (channel, plug) = (open.channel.as_mut(), &mut open.plug);
            if let Some(merger) = open.merger.as_mut().filter(|merger| !merger.lets_pass(plug)) {
                happened += merger.submit(lane, clock, channel, plug, &mut self.counts, finished);
                open.left = !plug.is_empty() || merger.has_ready();
            } else {
                if !plug.is_empty() {
                    happened += channel.submit(lane, plug, finished);
                }
                open.left = !plug.is_empty();
            }
            self.left |= open.left;
        }
        happened
    }

    /// All open channels.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Open> {
        self.open.iter().flatten()
    }

    /// Requests came into a plug after the turn's submit.
    #[inline]
    pub(crate) fn note_left(&mut self) {
        self.left = true;
    }

    /// Ends requests early of the channel at a place: takes back those that the storage has not seen, and asks it to give up the
    /// others.
    pub(crate) fn cancel(&mut self, lane: &mut Lane, at: usize, tags: &[Tag], finished: &mut Vec<AnyFinished>) {
        let open = self.get(at);
        let taken_back =
            |request: AnyRequest| AnyFinished { outcome: Outcome::Aborted, tag: request.tag, buffer: request.buffer };
        finished.extend(open.plug.extract_if(.., |request| tags.contains(&request.tag)).map(taken_back));
        if let Some(merger) = &mut open.merger {
            finished.extend(merger.take_back(|tag| tags.contains(&tag)).map(taken_back));
        }
        open.channel.cancel(lane, tags);
    }

    /// Whether there are requests to offer that no turn has pulled.
    #[inline]
    pub(crate) fn has_left(&self) -> bool {
        self.left
    }

    /// Collects what has ended in all channels. Whether requests are to be offered again.
    #[inline]
    pub(crate) fn reap(&mut self, lane: &mut Lane, finished: &mut Vec<AnyFinished>) -> bool {
        let mut again = 0;
        for open in self.open.iter_mut().flatten() {
            if open.channel.outstanding() > 0 {
                let before = finished.len();
                open.channel.reap(lane, finished);
                if let Some(merger) = &mut open.merger {
                    again += merger.fan_out(lane, before, &mut self.counts, finished);
                }
            }
        }
        self.left |= again > 0;
        again > 0
    }

    /// The earliest time that a channel wants to be reaped without a completion.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.open.iter().flatten().filter_map(|open| open.channel.deadline()).min()
    }

    /// The earliest end of a plug's hold.
    pub(crate) fn held_until(&self) -> Option<Moment> {
        self.open.iter().flatten().filter_map(|open| open.merger.as_ref()?.held_until()).min()
    }

    /// Requests of the queue in `slot` that were joined to another one.
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
