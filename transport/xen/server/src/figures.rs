//! What can be asked of a device from any thread while it is served: what its rings count.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use mqblk_blkif::{BlkifQueue, GrantCounters, Vbd};
use mqblk_core::{ByteLen, DiskSlot};
use mqblk_engine::{
    AnyDisk, Detached, DiskHealth, Draining, PlugOptions, QueueHandle, QueueStats, StatsRegistry, UringContext,
    WorkerGone, WorkerStats,
};
use mqblk_ring::blkif::RingPosition;

use crate::name::DeviceName;

/// The rings that are served now.
#[derive(Default)]
struct Served {
    handles: Vec<QueueHandle<BlkifQueue<UringContext>>>,
    vbd: Option<Arc<Vbd>>,
    /// What rings of earlier connections counted.
    before: GrantCounters,
}

/// One device with an open disk.
pub struct Figures {
    /// The device.
    pub name: DeviceName,
    /// Names its disk.
    pub id: String,
    /// The kind of storage.
    pub storage: String,
    /// How its requests are joined.
    pub plug: PlugOptions,
    /// What becomes of its failed requests, and whether it is stopped.
    pub health: Arc<DiskHealth>,
    /// Rings that it offers, each with its worker.
    pub queue_map: Vec<u16>,
    tally: StatsRegistry,
    served: Mutex<Served>,
    /// Kept open by the device, not from here.
    disk: Mutex<Option<Weak<AnyDisk>>>,
}

impl Figures {
    pub(crate) fn new(
        name: DeviceName,
        id: String,
        storage: String,
        plug: PlugOptions,
        health: Arc<DiskHealth>,
        queue_map: Vec<u16>,
    ) -> Figures {
        let tally = StatsRegistry::new(queue_map.len());
        let (served, disk) = (Mutex::default(), Mutex::default());
        Figures { name, id, storage, plug, health, queue_map, tally, served, disk }
    }

    fn lock(&self) -> MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each ring has counted since the disk was opened, by what the workers said. `None` when they were asked while a ring came
    /// or went: ask them again.
    pub fn report(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        self.tally.report(workers)
    }

    /// What its rings counted of grants, since the disk was opened. Asks the workers.
    pub fn grants(&self) -> GrantCounters {
        let served = self.lock();
        let mut total = served.before;
        for handle in &served.handles {
            if let Ok(now) = handle.visit(|queue, _| queue.grant_counters()) {
                total.add(&now);
            }
        }
        total
    }

    /// Rings that are served now.
    pub fn rings(&self) -> usize {
        self.lock().handles.len()
    }

    /// Rings are served from now on.
    pub(crate) fn connected(&self, vbd: Arc<Vbd>, handles: Vec<QueueHandle<BlkifQueue<UringContext>>>) {
        for (handle, index) in handles.iter().zip(0..) {
            self.tally.attached(index, handle.id());
        }
        let mut served = self.lock();
        (served.vbd, served.handles) = (Some(vbd), handles);
    }

    /// Has idle rings let go of what they do not use.
    pub(crate) fn tend(&self) {
        if let Some(vbd) = &self.lock().vbd {
            vbd.tend();
        }
    }

    /// The disk is open.
    pub(crate) fn opened(&self, disk: &Arc<AnyDisk>) {
        *self.disk.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::downgrade(disk));
    }

    /// The disk, while it is open.
    pub fn disk(&self) -> Option<Arc<AnyDisk>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.upgrade()
    }

    /// Rings judge by this size from now on.
    pub(crate) fn set_size(&self, size: ByteLen) {
        if let Some(vbd) = &self.lock().vbd {
            vbd.set_size(size);
        }
    }

    /// Has the rings' workers see the disk's new size.
    pub(crate) fn refresh(&self) {
        for handle in &self.lock().handles {
            if let Err(gone) = handle.refresh_disk(DiskSlot::FIRST) {
                tracing::error!(device = %self.name, "{gone}");
            }
        }
    }

    /// Takes the rings back, and waits until nothing of them is in flight, once `end` is known until then at most. `resumes`: a process
    /// after this one does again what is not answered, by the rings' journals; so what is parked at a stopped disk is left to that one.
    /// How many rings there were.
    pub(crate) fn tear_down(&self, end: &OnceLock<Instant>, resumes: bool) -> usize {
        let (handles, _vbd) = {
            let mut served = self.lock();
            (std::mem::take(&mut served.handles), served.vbd.take())
        };
        let leave = |handle: QueueHandle<BlkifQueue<UringContext>>| {
            let last = handle.visit(|queue, _| queue.grant_counters()).unwrap_or_default();
            let draining = match resumes {
                true => handle.drain_unanswered(|queue, lane, token, buffer| queue.forget(lane, token, buffer)),
                false => handle.drain(),
            };
            (draining, last)
        };
        let leaving: Vec<_> = handles.into_iter().map(leave).collect();
        let count = leaving.len();
        for ((draining, last), index) in leaving.into_iter().zip(0..) {
            match draining.and_then(|draining| self.wait_drained(index, draining, end)) {
                Ok(Some(left)) => self.left(index, &left),
                Ok(None) => {
                    let what = match resumes {
                        true => "its requests in flight are left to whoever serves the ring next",
                        false => "its requests in flight are lost: there is no journal",
                    };
                    tracing::warn!(device = %self.name, ring = index, "storage did not answer in time: {what}");
                }
                Err(gone) => tracing::error!(device = %self.name, ring = index, "{gone}"),
            }
            // Nothing is mapped or kept any more.
            let ended = GrantCounters { held: 0, buffer_pages: 0, ..last };
            self.lock().before.add(&ended);
        }
        count
    }

    /// `None`: requests are in flight at the end of the time, and are not answered by this process any more.
    fn wait_drained(
        &self,
        index: u16,
        mut draining: Draining<RingPosition>,
        end: &OnceLock<Instant>,
    ) -> Result<Option<Detached<RingPosition>>, WorkerGone> {
        let waiting = |waited: Duration| {
            tracing::warn!(device = %self.name, ring = index, "waiting for storage since {} s", waited.as_secs());
        };
        match draining.wait_until(|| end.get().copied(), waiting)? {
            Some(left) => Ok(Some(left)),
            None => draining.freeze().map(|()| None),
        }
    }

    fn left(&self, index: u16, left: &Detached<RingPosition>) {
        self.tally.detached(index, &left.report);
        let c = left.report.counters;
        tracing::info!(
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
