//! A worker's handles to disks: one channel per disk, shared by all the worker's queues of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{DiskChannel, DiskError};
use mqblk_uring::Lane;

use crate::AnyDisk;
use crate::clock::Clock;
use crate::options::PlugOptions;
use crate::plug::{Merger, Merges, PlugCounts};
use crate::runner::{AnyFinished, AnyRequest};

/// One open channel and the requests that wait to be submitted to it.
pub(crate) struct Open {
    disk: Arc<AnyDisk>,
    channel: Box<dyn DiskChannel<Lane>>,
    /// Requests pulled this turn, and those that the channel left last turn.
    pub(crate) plug: Vec<AnyRequest>,
    /// Joins them; `None` when they are submitted as they are.
    merger: Option<Box<Merger>>,
    users: usize,
}

impl Open {
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
        let open = Open { disk: Arc::clone(disk), channel, plug: Vec::with_capacity(PLUG_ROOM), merger, users: 1 };
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
        for open in self.open.iter_mut().flatten() {
            let (channel, plug) = (open.channel.as_mut(), &mut open.plug);
            if let Some(merger) = open.merger.as_mut().filter(|merger| !merger.lets_pass(plug)) {
                happened += merger.submit(lane, clock, channel, plug, &mut self.counts, finished);
            } else if !plug.is_empty() {
                happened += channel.submit(lane, plug, finished);
            }
        }
        happened
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
        again > 0
    }

    /// The earliest time that a channel wants to be reaped without a completion, or that a plug is held.
    pub(crate) fn deadline(&self, clock: &Clock) -> Option<Instant> {
        let held = |open: &Open| {
            let until = open.merger.as_ref()?.held_until()?;
            Some(Instant::now() + Duration::from_nanos(until.since(clock.now())))
        };
        self.open.iter().flatten().flat_map(|open| [open.channel.deadline(), held(open)]).flatten().min()
    }

    /// Requests of the queue in `slot` that were joined to another one since this was asked last.
    pub(crate) fn take_merges(&mut self, slot: u16) -> Merges {
        self.counts.merges.get_mut(usize::from(slot)).map(std::mem::take).unwrap_or_default()
    }

    /// What the plugs counted so far.
    pub(crate) fn counts(&self) -> &PlugCounts {
        &self.counts
    }
}
