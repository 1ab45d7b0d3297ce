//! Statistics of a served device, readable from any thread.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mqblk_blkif::{BlkifQueue, GrantCounters, Vbd};
use mqblk_core::counters::QueueCounters;
use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex};
use mqblk_core::{ByteLen, DiskSlot};
use mqblk_engine::{
    AnyDisk, Detached, DiskHealth, Draining, Engine, MoveResult, PlugOptions, QueueHandle, QueueId, QueueMove,
    QueuePolicy, QueueSettings, QueueStats, SharedQueueSettings, StatsRegistry, UringContext, WorkerError, WorkerStats,
};
use mqblk_ring::blkif::RingPosition;

use crate::name::DeviceName;

/// The rings that are attached now.
#[derive(Default)]
struct AttachedRings {
    handles: Vec<QueueHandle<BlkifQueue<UringContext>>>,
    vbd: Option<Arc<Vbd>>,
    /// Counters of the rings of earlier connections.
    earlier: GrantCounters,
}

/// Result of [`DeviceStats::detach_rings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DetachResult {
    /// Number of rings that were attached.
    pub(crate) rings: usize,
    /// True if requests are still in flight, which this process never completes.
    pub(crate) is_frozen: bool,
}

/// Statistics of a device with an open disk, and the handles of its rings.
pub struct DeviceStats {
    /// The device.
    pub name: DeviceName,
    /// Id of its disk.
    pub id: String,
    /// Name of the storage backend.
    pub storage: String,
    /// Plugging and merging of its requests.
    pub plug: PlugOptions,
    /// Error policy and stop of the disk.
    pub health: Arc<DiskHealth>,
    queues: Arc<SharedQueueSettings>,
    registry: StatsRegistry,
    rings: RankedMutex<AttachedRings>,
    /// The device keeps the disk open.
    disk: RankedMutex<Option<Weak<AnyDisk>>>,
}

impl DeviceStats {
    pub(crate) fn new(
        name: DeviceName,
        id: String,
        storage: String,
        plug: PlugOptions,
        health: Arc<DiskHealth>,
        queues: Arc<SharedQueueSettings>,
    ) -> DeviceStats {
        let registry = StatsRegistry::new(queues.get().map.len());
        let rings = RankedMutex::new(LockRank::XenRings, AttachedRings::default());
        let disk = RankedMutex::leaf(None);
        DeviceStats { name, id, storage, plug, health, queues, registry, rings, disk }
    }

    fn lock(&self) -> RankedGuard<'_, AttachedRings> {
        self.rings.lock()
    }

    /// Returns the statistics of each ring since the disk was opened, from the workers' statistics. `None` if a ring
    /// was attached or detached while these were read: read them again.
    pub fn queue_stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        self.registry.report(workers)
    }

    /// Returns the grant counters since the disk was opened, over all rings. Queries the workers.
    pub fn grant_counters(&self) -> GrantCounters {
        let served = self.lock();
        let mut total = served.earlier;
        for handle in &served.handles {
            if let Ok(now) = handle.visit(|queue, _| queue.grant_counters()) {
                total.add(&now);
            }
        }
        total
    }

    /// Returns the number of attached rings.
    pub fn rings(&self) -> usize {
        self.lock().handles.len()
    }

    /// Returns the settings of its rings, with the worker of each offered one.
    pub fn queue_settings(&self) -> QueueSettings {
        self.queues.get()
    }

    /// Returns the rings that are served now, each by its number.
    pub fn attached_rings(&self) -> Vec<(u16, QueueId)> {
        self.registry.attached_queues()
    }

    /// Returns the number of rings offered.
    pub(crate) fn rings_offered(&self) -> usize {
        self.queues.get().map.len()
    }

    /// Changes the polling of the rings, and the coalescing of events to the guest.
    ///
    /// # Errors
    /// When a worker has ended, or does not respond: it uses the new ones when it does. The others use them already.
    pub fn set_policy(&self, policy: QueuePolicy) -> Result<(), WorkerError> {
        // Locked first: rings that connect meanwhile get the settings afterwards.
        let served = self.lock();
        self.queues.set_policy(policy);
        served.handles.iter().try_for_each(|handle| handle.set_policy(policy))
    }

    /// Moves a ring to another worker (modulo their number) while the guest uses it, unless its requests in flight take
    /// longer than `timeout`. It begins there from now on, also when the guest connects again.
    ///
    /// # Errors
    /// When the other worker refuses the ring, which is served by its former one again.
    pub fn move_ring(&self, engine: &Engine, ring: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        let at = usize::from(ring);
        // Locked throughout: a detach waits for the ring.
        let mut served = self.lock();
        if at >= served.handles.len() {
            self.queues.set_worker(ring, worker);
            return Ok(QueueMove::AtStart);
        }
        let handle = served.handles.swap_remove(at);
        let (handle, result) = match handle.move_to(engine, worker, timeout) {
            Ok(MoveResult::Moved(handle)) => (handle, Ok(QueueMove::Moved)),
            Ok(MoveResult::Busy(handle)) => (handle, Ok(QueueMove::Busy)),
            Ok(MoveResult::Refused(handle, why)) => (handle, Err(format!("ring {ring}: {why}"))),
            // Without its handle the ring cannot be detached; the guest's requests stay in it.
            Ok(MoveResult::Stranded(_, why)) => return Err(format!("ring {ring}: no worker takes it: {why}")),
            Err(gone) => return Err(format!("ring {ring}: {gone}")),
        };
        if result == Ok(QueueMove::Moved) {
            self.queues.set_worker(ring, worker);
        }
        self.registry.attached(ring, handle.id());
        served.handles.push(handle);
        let last = served.handles.len() - 1;
        served.handles.swap(at, last);
        result
    }

    /// Registers the attached rings of a connection. `connected_with`: their polling and coalescing.
    pub(crate) fn set_rings(
        &self,
        vbd: Arc<Vbd>,
        handles: Vec<QueueHandle<BlkifQueue<UringContext>>>,
        connected_with: QueuePolicy,
    ) {
        for (handle, index) in handles.iter().zip(0..) {
            self.registry.attached(index, handle.id());
        }
        let mut served = self.lock();
        let QueueSettings { policy, .. } = self.queues.get();
        for handle in handles.iter().filter(|_| policy != connected_with) {
            // A worker that has ended serves nothing.
            let _ = handle.set_policy(policy);
        }
        (served.vbd, served.handles) = (Some(vbd), handles);
    }

    /// Lets idle rings release unused pages. Not while a ring of the device moves, which may wait for its storage.
    pub(crate) fn reclaim(&self) {
        if let Some(served) = self.rings.lock_until(Instant::now())
            && let Some(vbd) = &served.vbd
        {
            vbd.reclaim();
        }
    }

    /// Registers the open disk.
    pub(crate) fn set_disk(&self, disk: &Arc<AnyDisk>) {
        *self.disk.lock() = Some(Arc::downgrade(disk));
    }

    /// Returns the disk, while it is open.
    pub fn disk(&self) -> Option<Arc<AnyDisk>> {
        self.disk.lock().as_ref()?.upgrade()
    }

    /// Sets the size against which rings validate requests.
    pub(crate) fn set_size(&self, size: ByteLen) {
        if let Some(vbd) = &self.lock().vbd {
            vbd.set_size(size);
        }
    }

    /// Notifies the rings' workers of the disk's new size.
    pub(crate) fn refresh_disk(&self) {
        for handle in &self.lock().handles {
            if let Err(gone) = handle.refresh_disk(DiskSlot::FIRST) {
                tracing::error!(device = %self.name, "{gone}");
            }
        }
    }

    /// Detaches the rings and waits until they have nothing in flight, at most until the time that `end` returns, if
    /// any. `resumes`: the next process replays requests without a response from the rings' journals, so requests
    /// parked at a stopped disk are left to it.
    pub(crate) fn detach_rings(&self, end: &dyn Fn() -> Option<Instant>, resumes: bool) -> DetachResult {
        let (handles, _vbd) = {
            let mut served = self.lock();
            (std::mem::take(&mut served.handles), served.vbd.take())
        };
        let drain = |handle: QueueHandle<BlkifQueue<UringContext>>| {
            let counters = handle.visit(|queue, _| queue.grant_counters()).unwrap_or_default();
            let draining = match resumes {
                true => handle.drain_unanswered(),
                false => handle.drain(),
            };
            (draining, counters)
        };
        let draining: Vec<_> = handles.into_iter().map(drain).collect();
        let (count, mut total, mut is_frozen) = (draining.len(), QueueCounters::default(), false);
        for ((draining, counters), index) in draining.into_iter().zip(0..) {
            match draining.and_then(|draining| self.wait_drained(index, draining, end)) {
                Ok(Some(detached)) => {
                    self.ring_detached(index, &detached);
                    total.add(&detached.report.counters);
                }
                Ok(None) => {
                    is_frozen = true;
                    let what = match resumes {
                        true => "its requests in flight are left to the next process",
                        false => "its requests in flight are lost: there is no journal",
                    };
                    tracing::warn!(device = %self.name, ring = index, "storage did not answer in time: {what}");
                }
                Err(gone) => {
                    is_frozen = true;
                    tracing::error!(device = %self.name, ring = index, "{gone}");
                }
            }
            // Nothing is mapped or buffered any more.
            let ended = GrantCounters { mapped_pages: 0, buffer_pages: 0, ..counters };
            self.lock().earlier.add(&ended);
        }
        if count > 0 {
            let QueueCounters { requests, errors, malformed, .. } = total;
            tracing::info!(device = %self.name, rings = count, requests, errors, malformed, "frontend disconnected");
        }
        DetachResult { rings: count, is_frozen }
    }

    /// Waits for a drain. `None`: requests are still in flight at the deadline; the queue is frozen, and this process
    /// never completes them.
    fn wait_drained(
        &self,
        index: u16,
        mut draining: Draining<RingPosition>,
        end: &dyn Fn() -> Option<Instant>,
    ) -> Result<Option<Detached<RingPosition>>, WorkerError> {
        let waiting = |waited: Duration| {
            tracing::warn!(device = %self.name, ring = index, "waiting for storage since {} s", waited.as_secs());
        };
        match draining.wait_until(end, waiting)? {
            Some(detached) => Ok(Some(detached)),
            None => draining.freeze().map(|_| None),
        }
    }

    fn ring_detached(&self, index: u16, detached: &Detached<RingPosition>) {
        self.registry.detached(index, &detached.report);
        let c = detached.report.counters;
        tracing::debug!(
            device = %self.name,
            ring = index,
            requests = c.requests,
            reads = c.reads,
            writes = c.writes,
            flushes = c.flushes,
            errors = c.errors,
            malformed = c.malformed,
            kicks = c.kicks,
            calls = c.calls,
            "ring stopped"
        );
    }
}
