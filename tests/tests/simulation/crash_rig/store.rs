//! A storage that survives its users. Requests take effect at random times, in parts, before their completion. If their
//! user is killed meanwhile, a part of them still takes effect, or none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mqblk_core::{
    BlockSize, ByteLen, Completion, DiscardLimits, Disk, DiskChannel, DiskError, Geometry, Limits, Op, Outcome,
    Request, Tag,
};
use mqblk_engine::UringContext;
use mqblk_memory::Buffer;
use mqblk_tests::crash::oracle::SECTOR;
use mqblk_tests::filter_disk::AnyChannel;
use mqblk_tests::load_queues::SectorRange;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::harness::seeds::counters;

type Content = [u8; SECTOR];

/// A write in flight: its sectors not on the disk yet.
struct Change {
    start: usize,
    sectors: Vec<Option<Content>>,
}

counters! {
    /// Counters of the simulation's coverage.
    pub(crate) struct StoreCounts {
        cancelled,
        /// Changes in flight when their user was killed, of which a part took effect afterwards.
        late,
    }
}

struct Inner {
    random: SmallRng,
    bytes: Vec<u8>,
    changes: BTreeMap<u64, Change>,
    next: u64,
    /// For each sector, the guest's requests in flight that may change it.
    open: Vec<u32>,
    counts: StoreCounts,
}

impl Inner {
    /// Applies those sectors of a change that `chosen` picks.
    fn apply(&mut self, key: u64, mut chosen: impl FnMut(&mut SmallRng) -> bool) {
        let Some(change) = self.changes.get_mut(&key) else { return };
        for (sector, content) in (change.start..).zip(&mut change.sectors) {
            if content.is_some()
                && chosen(&mut self.random)
                && let Some(content) = content.take()
            {
                assert!(self.open[sector] > 0, "sector {sector} is changed, but all that was to do so is answered");
                self.bytes[sector * SECTOR..][..SECTOR].copy_from_slice(&content);
            }
        }
    }

    /// Applies some sectors of the changes in flight.
    fn apply_some(&mut self) {
        let keys: Vec<u64> = self.changes.keys().copied().collect();
        for key in keys {
            match self.random.random_range(0..12) {
                0 => self.apply(key, |_| true),
                1 => self.apply(key, |random| random.random()),
                _ => {}
            }
        }
    }
}

/// The storage.
pub(crate) struct Store(Mutex<Inner>);

impl Store {
    /// Returns a storage of this many sectors, all zeroes.
    pub(crate) fn new(sectors: u64, seed: u64) -> Arc<Store> {
        Arc::new(Store(Mutex::new(Inner {
            random: SmallRng::seed_from_u64(seed),
            bytes: vec![0; sectors as usize * SECTOR],
            changes: BTreeMap::new(),
            next: 0,
            open: vec![0; sectors as usize],
            counts: StoreCounts::default(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a request which may change these sectors is visible to the backend.
    pub(crate) fn opened(&self, ranges: &[SectorRange]) {
        let mut inner = self.lock();
        for (start, count) in ranges {
            inner.open[*start as usize..][..*count as usize].iter_mut().for_each(|open| *open += 1);
        }
    }

    /// Records its completion: from here on it must not change anything.
    pub(crate) fn closed(&self, ranges: &[SectorRange]) {
        let mut inner = self.lock();
        for (start, count) in ranges {
            inner.open[*start as usize..][..*count as usize].iter_mut().for_each(|open| *open -= 1);
        }
    }

    /// Handles the death of its user: changes in flight take effect or not, all or in part, in any order, and nothing
    /// afterwards.
    pub(crate) fn killed(&self) {
        let inner = &mut *self.lock();
        let mut keys: Vec<u64> = inner.changes.keys().copied().collect();
        while !keys.is_empty() {
            let key = keys.swap_remove(inner.random.random_range(0..keys.len()));
            match inner.random.random_range(0..3) {
                0 => {}
                1 => inner.apply(key, |_| true),
                _ => inner.apply(key, |random| random.random()),
            }
            inner.counts.late += 1;
        }
        inner.changes.clear();
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    pub(crate) fn counts(&self) -> StoreCounts {
        self.lock().counts
    }
}

/// The disk over the storage.
pub(crate) struct StoreDisk(pub Arc<Store>);

impl Disk<UringContext> for StoreDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: ByteLen(self.0.lock().bytes.len() as u64),
            logical_block: BlockSize::B512,
            physical_block: BlockSize::B512,
            alignment_offset: 0,
            min_io: ByteLen::ZERO,
            opt_io: ByteLen::ZERO,
            read_only: false,
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            max_transfer: ByteLen(1 << 20),
            max_segments: 128,
            discard: Some(DiscardLimits { granularity: ByteLen(512), max_len: ByteLen(1 << 20) }),
            write_zeroes: Some(ByteLen(1 << 20)),
            volatile_cache: true,
            cost_per_request: true,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![]
    }

    fn resize(&self, _: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        Ok(self.geometry().size)
    }

    fn open_channel(&self, _: &mut UringContext) -> Result<AnyChannel, DiskError> {
        Ok(Box::new(StoreChannel { store: Arc::clone(&self.0), held: vec![] }))
    }
}

/// A request taken by the channel.
struct Held {
    key: u64,
    tag: Tag,
    op: Op,
    start: usize,
    len: ByteLen,
    buffer: Option<Buffer>,
}

struct StoreChannel {
    store: Arc<Store>,
    held: Vec<Held>,
}

impl DiskChannel<UringContext> for StoreChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let inner = &mut *self.store.lock();
        let taken = batch.len();
        for Request { start, len, tag, buffer, op } in batch.drain(..) {
            let mut bytes = vec![0; len.0 as usize];
            if let (Op::Write { .. }, Some(buffer)) = (op, &buffer) {
                assert!(context.buffers.copy_out(buffer, 0, &mut bytes), "a write's data is as long as its range");
            }
            let (key, start) = (inner.next, start.0 as usize / SECTOR);
            inner.next += 1;
            if op.modifies() {
                let sectors = bytes.as_chunks::<SECTOR>().0.iter().map(|content| Some(*content)).collect();
                inner.changes.insert(key, Change { start, sectors });
            }
            self.held.push(Held { key, tag, op, start, len, buffer });
        }
        taken
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let inner = &mut *self.store.lock();
        let before = finished.len();
        inner.apply_some();
        let mut at = 0;
        while at < self.held.len() {
            if !inner.random.random_ratio(1, 3) {
                at += 1;
                continue;
            }
            let Held { key, tag, op, start, len, buffer } = self.held.swap_remove(at);
            inner.apply(key, |_| true);
            inner.changes.remove(&key);
            if let (Op::Read, Some(buffer)) = (op, &buffer) {
                let read = context.buffers.copy_in(buffer, 0, &inner.bytes[start * SECTOR..][..len.0 as usize]);
                assert!(read, "a read's room is as long as its range");
            }
            let done = if op.has_data() { len } else { ByteLen::ZERO };
            finished.push(Completion { outcome: Outcome::Done(done), tag, buffer });
        }
        finished.len() - before
    }

    fn cancel(&mut self, _: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        let inner = &mut *self.store.lock();
        for at in (0..self.held.len()).rev() {
            if tags.binary_search(&self.held[at].tag).is_err() || inner.random.random_ratio(1, 3) {
                continue;
            }
            let Held { key, tag, buffer, .. } = self.held.swap_remove(at);
            if inner.random.random() {
                inner.apply(key, |random| random.random());
            }
            inner.changes.remove(&key);
            inner.counts.cancelled += 1;
            finished.push(Completion { outcome: Outcome::Aborted, tag, buffer });
        }
    }

    fn outstanding(&self) -> u32 {
        self.held.len() as u32
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.held.is_empty()).then(Instant::now)
    }

    fn close(&mut self, _: &mut UringContext) {}
}
