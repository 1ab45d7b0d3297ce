//! Locations of the data of clusters, as far as requests have found them, for lookups by workers without the library.
//!
//! The disk's threads write an entry while they share the image, and a thread with exclusive access forgets it. In
//! between, an entry changes in one direction only: unknown, then read elsewhere (a backing file, zeroes), then in the
//! image itself and writable. So a thread with late knowledge, from before another one's write, cannot undo that one's
//! entry: it only replaces unknown ones.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use mqblk_core::lock::lock;

/// Entries of a chunk, which is allocated for its first entry.
const CHUNK: u64 = 4096;
/// Most chunks: 64 MiB, enough for 512 GiB of clusters of 64 KiB. Beyond, clusters stay unknown.
const MAX_CHUNKS: usize = 2048;
/// A disk that grows beyond this many times its size has unknown clusters at its end.
const GROWTH: u64 = 4;
/// Most files of entries.
const MAX_FILES: usize = 64;

const KIND: u64 = 0b11;
/// At an offset of a file; a write first needs its own cluster.
const READABLE: u64 = 1;
/// At an offset of the image's own data file, exclusive to the cluster.
const WRITABLE: u64 = 2;
const ZERO: u64 = 3;
/// Unknown, but no longer elsewhere: only a location in the image can be entered.
const WRITTEN: u64 = 1 << 2;
const FILE_SHIFT: u32 = 2;
/// Offsets are multiples of 512, the smallest cluster.
const OFFSET: u64 = !0x1ff;

/// Location of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// At this offset of a file of the chain. Only in file 0, the image's own, it may be writable.
    Data { file: usize, at: u64, writable: bool },
    /// Nowhere: it reads as zeroes.
    Zero,
}

impl Place {
    fn pack(self) -> Option<u64> {
        match self {
            Place::Zero => Some(ZERO),
            Place::Data { file: 0, at, writable: true } if at & !OFFSET == 0 => Some(at | WRITABLE),
            Place::Data { file, at, writable: false } if at & !OFFSET == 0 && file < MAX_FILES => {
                Some(at | (file as u64) << FILE_SHIFT | READABLE)
            }
            Place::Data { .. } => None,
        }
    }

    fn unpack(entry: u64) -> Option<Place> {
        let at = entry & OFFSET;
        match entry & KIND {
            ZERO => Some(Place::Zero),
            WRITABLE => Some(Place::Data { file: 0, at, writable: true }),
            READABLE => {
                let file = (entry & !OFFSET) >> FILE_SHIFT;
                Some(Place::Data { file: file as usize, at, writable: false })
            }
            _ => None,
        }
    }

    /// Returns the location this many bytes further.
    pub(super) fn skip(self, bytes: u64) -> Place {
        match self {
            Place::Data { file, at, writable } => Place::Data { file, at: at + bytes, writable },
            Place::Zero => Place::Zero,
        }
    }
}

type Chunk = Box<[AtomicU64]>;

/// The map of an image.
#[derive(Debug)]
pub(super) struct ClusterMap {
    cluster_bits: u32,
    chunks: Box<[OnceLock<Chunk>]>,
    /// Number of chunks that are allocated.
    allocated: Mutex<usize>,
}

impl ClusterMap {
    /// Creates an empty map for a disk of `size` bytes.
    pub(super) fn new(size: u64, cluster_bits: u32) -> ClusterMap {
        let clusters = size.saturating_mul(GROWTH).div_ceil(1 << cluster_bits);
        let chunks = clusters.div_ceil(CHUNK).min(64 * MAX_CHUNKS as u64);
        let chunks = (0..chunks).map(|_| OnceLock::new()).collect();
        ClusterMap { cluster_bits, chunks, allocated: Mutex::new(0) }
    }

    fn known(&self, cluster: u64) -> Option<&AtomicU64> {
        let chunk = self.chunks.get(usize::try_from(cluster / CHUNK).ok()?)?.get()?;
        chunk.get((cluster % CHUNK) as usize)
    }

    /// Returns the entry of a cluster; `None` beyond the bounds.
    fn entry(&self, cluster: u64) -> Option<&AtomicU64> {
        let place = self.chunks.get(usize::try_from(cluster / CHUNK).ok()?)?;
        if place.get().is_none() {
            // One thread at a time: a thread without room must be sure that no other one makes the chunk, and enters
            // older knowledge in it.
            let mut allocated = lock(&self.allocated);
            if place.get().is_none() && *allocated < MAX_CHUNKS {
                *allocated += 1;
                place.get_or_init(|| (0..CHUNK).map(|_| AtomicU64::new(0)).collect());
            }
        }
        place.get()?.get((cluster % CHUNK) as usize)
    }

    /// Enters the location of a whole cluster. Called by threads that share the image.
    pub(super) fn learn(&self, cluster: u64, place: Place) {
        let Some(packed) = place.pack() else { return self.mark_written(cluster) };
        let Some(entry) = self.entry(cluster) else { return };
        if packed & KIND == WRITABLE {
            entry.store(packed, Ordering::Release);
        } else {
            let _ = entry.compare_exchange(0, packed, Ordering::Release, Ordering::Relaxed);
        }
    }

    /// Makes a cluster unknown after a write whose location is not known, or not writable by others yet. Earlier
    /// locations are no longer entered.
    pub(super) fn mark_written(&self, cluster: u64) {
        if let Some(entry) = self.entry(cluster) {
            entry.store(WRITTEN, Ordering::Release);
        }
    }

    /// Forgets clusters. Requires exclusive access to the image.
    pub(super) fn forget(&self, clusters: Range<u64>) {
        for index in clusters.start / CHUNK..clusters.end.div_ceil(CHUNK).min(self.chunks.len() as u64) {
            let Some(chunk) = self.chunks[index as usize].get() else { continue };
            let first = index * CHUNK;
            let range = clusters.start.saturating_sub(first)..(clusters.end - first).min(CHUNK);
            for entry in &chunk[range.start as usize..range.end as usize] {
                entry.store(0, Ordering::Release);
            }
        }
    }

    /// Returns the location of a range that is contiguous.
    #[inline]
    pub(super) fn find(&self, at: u64, len: u64) -> Option<Place> {
        let look_up = |cluster| Place::unpack(self.known(cluster)?.load(Ordering::Acquire));
        let (first, last) = (at >> self.cluster_bits, (at + len - 1) >> self.cluster_bits);
        let place = look_up(first)?;
        for cluster in first + 1..=last {
            if look_up(cluster)? != place.skip((cluster - first) << self.cluster_bits) {
                return None;
            }
        }
        Some(place.skip(at & ((1 << self.cluster_bits) - 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: u64 = 1 << 16;

    fn data(file: usize, at: u64) -> Place {
        Place::Data { file, at, writable: false }
    }

    fn own(at: u64) -> Place {
        Place::Data { file: 0, at, writable: true }
    }

    #[test]
    fn a_range_is_found_if_it_is_in_one_place() {
        let map = ClusterMap::new(1 << 30, 16);
        assert_eq!(map.find(0, 512), None);
        map.learn(0, own(10 * CLUSTER));
        map.learn(1, own(11 * CLUSTER));
        map.learn(2, own(13 * CLUSTER));
        map.learn(3, Place::Zero);
        map.learn(4, Place::Zero);
        map.learn(5, data(63, 5 * CLUSTER));
        map.learn(6, data(62, 6 * CLUSTER));
        assert_eq!(map.find(512, CLUSTER), Some(own(10 * CLUSTER + 512)));
        assert_eq!(map.find(512, 2 * CLUSTER), None, "the third is elsewhere");
        assert_eq!(map.find(2 * CLUSTER, CLUSTER + 1), None);
        assert_eq!(map.find(3 * CLUSTER + 7, 2 * CLUSTER - 7), Some(Place::Zero));
        assert_eq!(map.find(5 * CLUSTER + 1024, 512), Some(data(63, 5 * CLUSTER + 1024)));
        assert_eq!(map.find(5 * CLUSTER, 2 * CLUSTER), None, "another file");
        assert_eq!(map.find(6 * CLUSTER, 2 * CLUSTER), None, "the next is unknown");
    }

    #[test]
    fn who_learns_late_undoes_nothing() {
        let map = ClusterMap::new(1 << 30, 16);
        map.learn(9, data(1, 0));
        map.learn(9, own(CLUSTER));
        map.learn(9, data(1, 0));
        map.learn(9, Place::Zero);
        assert_eq!(map.find(9 * CLUSTER, 512), Some(own(CLUSTER)));
        map.mark_written(9);
        map.learn(9, Place::Zero);
        assert_eq!(map.find(9 * CLUSTER, 512), None);
        map.learn(9, own(CLUSTER));
        assert_eq!(map.find(9 * CLUSTER, 512), Some(own(CLUSTER)));
        map.forget(9..10);
        map.learn(9, Place::Zero);
        assert_eq!(map.find(9 * CLUSTER, 512), Some(Place::Zero));
        // Impossible entries are unknown.
        map.learn(9, own(100));
        assert_eq!(map.find(9 * CLUSTER, 512), None);
    }

    #[test]
    fn what_is_forgotten_is_the_range() {
        let map = ClusterMap::new(1 << 40, 16);
        let clusters = [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK, 3 * CHUNK + 1];
        for range in [0..1, 1..CHUNK, CHUNK - 1..CHUNK + 1, 1..3 * CHUNK + 1, 0..u64::MAX, 5..5] {
            clusters.iter().for_each(|cluster| map.learn(*cluster, Place::Zero));
            map.forget(range.clone());
            for cluster in clusters {
                assert_eq!(map.find(cluster << 16, 512).is_none(), range.contains(&cluster), "{cluster} of {range:?}");
            }
        }
    }

    #[test]
    fn memory_is_bounded() {
        let map = ClusterMap::new(1 << 50, 16);
        for chunk in 0..MAX_CHUNKS as u64 + 10 {
            map.learn(chunk * CHUNK, own(CLUSTER));
        }
        assert_eq!(*map.allocated.lock().unwrap(), MAX_CHUNKS);
        assert!(map.find(((MAX_CHUNKS as u64 - 1) * CHUNK) << 16, 512).is_some());
        assert!(map.find((MAX_CHUNKS as u64 * CHUNK) << 16, 512).is_none());
        assert!(map.find(u64::MAX - 512, 512).is_none());
        map.learn(u64::MAX >> 16, own(0));
    }
}
