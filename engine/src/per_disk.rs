//! What a queue of several disks counts for each of them.

use mqblk_core::{ByteLen, DiskSlot};

use crate::clock::Ticks;
use crate::counters::{DiskCounters, Kind};

/// A queue's disks. Queues of one disk have none of this: the queue's own counters are the disk's.
#[derive(Debug, Default)]
pub(crate) struct PerDisk {
    /// By slot; `None` where no disk ever was.
    disks: Vec<Option<DiskCounters>>,
    /// Requests that were finished and not yet published.
    ended: Vec<(DiskSlot, Kind, Ticks)>,
}

impl PerDisk {
    /// For a queue of `depth` requests.
    pub(crate) fn new(depth: u16) -> PerDisk {
        PerDisk { disks: Vec::new(), ended: Vec::with_capacity(depth.into()) }
    }

    /// A disk comes into a slot: it begins at 0.
    pub(crate) fn open(&mut self, slot: DiskSlot) {
        self.open_with(DiskCounters::new(slot));
    }

    /// A disk comes into its slot, having counted something already.
    pub(crate) fn open_with(&mut self, counted: DiskCounters) {
        let at = usize::from(counted.slot.0);
        if self.disks.len() <= at {
            self.disks.resize(at + 1, None);
        }
        self.disks[at] = Some(counted);
    }

    /// A request has ended; `done`: how much was transferred, if it succeeded.
    #[inline]
    pub(crate) fn finished(&mut self, slot: DiskSlot, kind: Kind, done: Option<ByteLen>, pulled: Ticks) {
        // A request for a disk that never was counts for none.
        let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) else { return };
        let bytes = done.map_or(0, |len| len.0);
        match kind {
            Kind::Read => {
                disk.reads += 1;
                disk.read_bytes += bytes;
            }
            Kind::Write => {
                disk.writes += 1;
                disk.written_bytes += bytes;
            }
            Kind::Other => disk.others += 1,
        }
        disk.errors += u64::from(done.is_none());
        self.ended.push((slot, kind, pulled));
    }

    /// Counts how long they took.
    #[inline(never)]
    pub(crate) fn settle(&mut self, published: Ticks) {
        for (slot, kind, pulled) in self.ended.drain(..) {
            let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) else { continue };
            let sum = match kind {
                Kind::Read => &mut disk.read_ns,
                Kind::Write => &mut disk.write_ns,
                Kind::Other => &mut disk.other_ns,
            };
            *sum += published.since(pulled);
        }
    }

    /// All of them, with what is in flight and for how long.
    pub(crate) fn report(&self, in_flight: impl Iterator<Item = (DiskSlot, u64)>) -> Vec<DiskCounters> {
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
