//! A worker's handles to disks: one channel per disk, shared by all the worker's queues of it.

use std::sync::Arc;
use std::time::Instant;

use mqblk_core::{DiskChannel, DiskError};
use mqblk_uring::Lane;

use crate::AnyDisk;
use crate::options::PlugOptions;
use crate::runner::{AnyFinished, AnyRequest};

/// One open channel and the requests that wait to be submitted to it.
pub(crate) struct Open {
    disk: Arc<AnyDisk>,
    channel: Box<dyn DiskChannel<Lane>>,
    /// Requests pulled this turn, and those that the channel left last turn.
    pub(crate) plug: Vec<AnyRequest>,
    /// The channel did not take all of the plug last turn.
    left: bool,
    options: PlugOptions,
    users: usize,
}

impl Open {
    /// Whether requests of an earlier turn are in the plug.
    #[inline]
    pub(crate) fn is_left(&self) -> bool {
        self.left
    }
}

/// Room in a plug, so that a turn does not allocate: more than one turn of a worker pulls.
const PLUG_ROOM: usize = 4096;

/// All of a worker's channels.
#[derive(Default)]
pub(crate) struct Channels {
    open: Vec<Option<Open>>,
    left: bool,
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
        let open = Open {
            disk: Arc::clone(disk),
            channel,
            plug: Vec::with_capacity(PLUG_ROOM),
            left: false,
            options,
            users: 1,
        };
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
            open.channel.close(lane);
            self.open[at] = None;
        }
    }

    /// The channel at a place that [`open`](Self::open) gave.
    #[inline]
    pub(crate) fn get(&mut self, at: usize) -> &mut Open {
        self.open[at].as_mut().expect("a queue holds its channel's place")
    }

    /// Offers every plug to its channel. Returns how many requests were taken.
    #[inline]
    pub(crate) fn submit(&mut self, lane: &mut Lane, finished: &mut Vec<AnyFinished>) -> usize {
        let mut taken = 0;
        self.left = false;
        for open in self.open.iter_mut().flatten() {
            if !open.plug.is_empty() {
                taken += open.channel.submit(lane, &mut open.plug, finished);
                open.left = !open.plug.is_empty();
                self.left |= open.left;
            }
        }
        taken
    }

    /// All open channels.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Open> {
        self.open.iter().flatten()
    }

    /// Whether channels have left requests in their plugs.
    #[inline]
    pub(crate) fn has_left(&self) -> bool {
        self.left
    }

    /// Collects what has ended in all channels.
    #[inline]
    pub(crate) fn reap(&mut self, lane: &mut Lane, finished: &mut Vec<AnyFinished>) {
        for open in self.open.iter_mut().flatten() {
            if open.channel.outstanding() > 0 {
                open.channel.reap(lane, finished);
            }
        }
    }

    /// The earliest time that a channel wants to be reaped without a completion.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.open.iter().flatten().filter_map(|open| open.channel.deadline()).min()
    }
}
