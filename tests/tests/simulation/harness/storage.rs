//! Difficult storage: late, out of order, and taking little at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, Completion, DiskChannel, DiskSlot, Limits, Outcome, Request, Tag};
use mqblk_engine::{AnyDisk, MergeMode, PlugOptions, QueueDisk, UringContext};
use mqblk_memory::Buffer;
use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::seeds::counters;

/// The queue slot in a merged request's tag.
const MERGED: u16 = u16::MAX;

/// Opens a disk by its settings.
pub(crate) fn open_disk(kind: &str, given: &[(&str, &str)]) -> Arc<AnyDisk> {
    let mut settings = Settings::new("disk");
    for (key, value) in given {
        settings.insert(key, value).unwrap();
    }
    let disk = mqblk_storage::open(kind, &mut settings).unwrap();
    settings.finish().unwrap();
    disk
}

/// Returns a disk in memory that mostly is late and completes out of order.
pub(crate) fn late_disk(random: &mut SmallRng, bytes: u64) -> Arc<AnyDisk> {
    let jitter = if random.random_ratio(2, 3) { random.random_range(1..300) } else { 0 };
    let reorder = if random.random_ratio(2, 3) { random.random_range(2..12) } else { 0 };
    let [bytes, jitter, reorder, seed] = [bytes, jitter, reorder, random.random_range(0..1000)].map(|n| n.to_string());
    let given = [("fault-jitter-us", &*jitter), ("fault-reorder", &*reorder), ("fault-seed", &*seed)];
    open_disk("fault", &[&[("inner", "ram"), ("size", &bytes)], &given[..]].concat())
}

/// Returns options that merge requests or not.
pub(crate) fn any_merge(random: &mut SmallRng) -> PlugOptions {
    let merge = if random.random() { MergeMode::On } else { MergeMode::Off };
    PlugOptions { merge, ..PlugOptions::default() }
}

/// Returns such options with any depth.
pub(crate) fn any_plug(random: &mut SmallRng) -> PlugOptions {
    let depth = if random.random() { 0 } else { random.random_range(1..12) };
    PlugOptions { depth, ..any_merge(random) }
}

/// Returns a queue's disk that reports errors.
pub(crate) fn queue_disk(slot: u16, disk: &Arc<AnyDisk>, plug: PlugOptions) -> QueueDisk {
    QueueDisk { slot: DiskSlot(slot), disk: Arc::clone(disk), plug, health: Arc::default() }
}

counters! {
    /// Counters of requests offered to a stingy disk.
    pub(crate) struct ChannelCounts {
        requests,
        merged,
        merged_failed,
        merged_aborted,
        cancels,
        refused,
    }
}

struct StingyState {
    random: SmallRng,
    counts: ChannelCounts,
}

/// State shared by the channels of stingy disks. They take only a part of the offered requests, and check and count
/// all.
#[derive(Clone)]
pub(crate) struct Stinginess(Arc<Mutex<StingyState>>);

impl Stinginess {
    pub(crate) fn new(seed: u64) -> Stinginess {
        let random = SmallRng::seed_from_u64(seed);
        Stinginess(Arc::new(Mutex::new(StingyState { random, counts: ChannelCounts::default() })))
    }

    /// Returns `inner` with stingy channels and these limits. No merged request may be longer than `longest`.
    pub(crate) fn disk(&self, inner: Arc<AnyDisk>, limits: Limits, longest: ByteLen) -> Arc<AnyDisk> {
        let shared = self.clone();
        let wrap_channel =
            move |inner| Box::new(StingyChannel { inner, shared: shared.clone(), longest }) as AnyChannel;
        Arc::new(FilterDisk { inner, limits, wrap_channel })
    }

    pub(crate) fn counts(&self) -> ChannelCounts {
        self.lock().counts
    }

    fn lock(&self) -> MutexGuard<'_, StingyState> {
        // A killed backend may have held it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct StingyChannel {
    inner: AnyChannel,
    shared: Stinginess,
    longest: ByteLen,
}

impl StingyChannel {
    fn count(&self, finished: &[Completion<Buffer>]) {
        let counts = &mut self.shared.lock().counts;
        for done in finished.iter().filter(|done| done.tag.queue() == MERGED) {
            counts.merged_aborted += u64::from(done.outcome == Outcome::Aborted);
            counts.merged_failed += u64::from(!done.outcome.is_done() && done.outcome != Outcome::Aborted);
        }
    }
}

impl DiskChannel<UringContext> for StingyChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        assert!(!batch.is_empty());
        let most = {
            let random = &mut self.shared.lock().random;
            if random.random_ratio(1, 4) { random.random_range(0..=batch.len()) } else { batch.len() }
        };
        let before = finished.len();
        let mut rest = batch.split_off(most);
        let offered: Vec<_> = batch.iter().map(|request| (request.tag.queue() == MERGED, request.len)).collect();
        let taken = self.inner.submit(context, batch, finished);
        batch.append(&mut rest);
        for (merged, len) in &offered[..taken] {
            assert!(!merged || *len <= self.longest, "a merged request of {len:?}");
            let counts = &mut self.shared.lock().counts;
            counts.requests += 1;
            counts.merged += u64::from(*merged);
        }
        self.shared.lock().counts.refused += batch.len() as u64;
        self.count(&finished[before..]);
        taken
    }
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        let count = self.inner.reap(context, finished);
        self.count(&finished[before..]);
        count
    }
    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        assert!(tags.is_sorted() && !tags.is_empty());
        self.shared.lock().counts.cancels += tags.len() as u64;
        let before = finished.len();
        self.inner.cancel(context, tags, finished);
        self.count(&finished[before..]);
    }
    fn outstanding(&self) -> u32 {
        self.inner.outstanding()
    }
    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }
    fn close(&mut self, context: &mut UringContext) {
        assert_eq!(self.inner.outstanding(), 0, "a channel is drained before it is closed");
        self.inner.close(context);
    }
}
