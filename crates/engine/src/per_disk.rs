//! Counters of each disk of a queue that has several.

use mqblk_core::{ByteLen, DiskSlot};

use crate::clock::Ticks;
use crate::counters::{DiskCounters, OpClass};

/// Counters of a queue's disks. Not for queues of one disk: the queue's own counters are the disk's.
#[derive(Debug, Default)]
pub(crate) struct PerDisk {
    /// By slot; `None` where there never was a disk.
    disks: Vec<Option<DiskCounters>>,
    /// Requests that are finished and not yet published.
    ended: Vec<(DiskSlot, OpClass, Ticks)>,
}

impl PerDisk {
    /// Returns counters for a queue of `depth` requests.
    pub(crate) fn new(depth: u16) -> PerDisk {
        PerDisk { disks: Vec::new(), ended: Vec::with_capacity(depth.into()) }
    }

    /// Starts a disk's counters at 0.
    pub(crate) fn open(&mut self, slot: DiskSlot) {
        self.open_with(DiskCounters::new(slot));
    }

    /// Starts a disk's counters at the given values.
    pub(crate) fn open_with(&mut self, counted: DiskCounters) {
        let at = usize::from(counted.slot.0);
        if self.disks.len() <= at {
            self.disks.resize(at + 1, None);
        }
        self.disks[at] = Some(counted);
    }

    /// Counts a finished request. `done`: the length transferred, if it succeeded.
    #[inline]
    pub(crate) fn finished(&mut self, slot: DiskSlot, class: OpClass, done: Option<ByteLen>, pulled: Ticks) {
        // A request for a slot that never had a disk is not counted.
        let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) else { return };
        let bytes = done.map_or(0, |len| len.0);
        match class {
            OpClass::Read => {
                disk.reads += 1;
                disk.read_bytes += bytes;
            }
            OpClass::Write => {
                disk.writes += 1;
                disk.written_bytes += bytes;
            }
            OpClass::Other => disk.others += 1,
        }
        disk.errors += u64::from(done.is_none());
        self.ended.push((slot, class, pulled));
    }

    /// Adds the latencies of the finished requests, which are published now.
    #[inline(never)]
    pub(crate) fn record_latencies(&mut self, published: Ticks) {
        for (slot, class, pulled) in self.ended.drain(..) {
            let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) else { continue };
            let sum = match class {
                OpClass::Read => &mut disk.read_ns,
                OpClass::Write => &mut disk.write_ns,
                OpClass::Other => &mut disk.other_ns,
            };
            *sum += published.since(pulled);
        }
    }

    /// Returns the counters of all disks. `in_flight`: the requests in flight, by disk and age.
    pub(crate) fn stats(&self, in_flight: impl Iterator<Item = (DiskSlot, u64)>) -> Vec<DiskCounters> {
        let mut disks = self.disks.clone();
        for (slot, age_ns) in in_flight {
            if let Some(Some(disk)) = disks.get_mut(usize::from(slot.0)) {
                disk.in_flight += 1;
                disk.oldest_ns = disk.oldest_ns.max(Some(age_ns));
            }
        }
        disks.into_iter().flatten().collect()
    }
}
