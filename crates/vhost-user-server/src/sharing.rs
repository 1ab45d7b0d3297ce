//! Detects guest memory that the VMM does not share. A VMM that maps it privately still passes the descriptors: then
//! the backend never sees the guest's writes, the rings stay empty, and the guest's firmware hangs.
//!
//! The sign is a queue that is kicked while its ring stays empty, in memory where nothing was ever written. Kicks alone
//! say nothing about the guest: QEMU kicks each queue itself when it starts it, later versions more than once. A thread
//! checks for this until the connection's first request; not for resumed rings, whose driver may be idle. Other VMMs
//! (cloud-hypervisor) refuse private memory.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::thread::spawn;
use mqblk_engine::{Engine, QueueStats, StatsRegistry, WorkerStats};
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::options::ServerOptions;

/// Advice for the log: how to share guest memory.
pub(crate) const SHARE_HINT: &str = "give the VM shared memory (QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on \
     -machine memory-backend=mem; cloud-hypervisor: --memory shared=on)";

/// Interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Number of checks: two minutes, in which a guest boots.
const MAX_CHECKS: u32 = 240;

/// Consecutive checks with kicks and no request before the warning: a kick may be seen just before its request, and a
/// driver that restarts just before its first one.
const SUSPECT_CHECKS: u32 = 8;

/// Bytes at the start of each region that are checked. A guest that has come to its disk's driver has written some:
/// tables of interrupts and pages, data of the BIOS, the device tree.
const CHECKED_BYTES: u64 = 1 << 20;

/// The statistics that the checks of all connections of an engine share: a worker copies those of all its queues, which
/// would take all its time if hundreds of booting guests queried it separately.
static RECENT: RankedMutex<Option<RecentStats>> = RankedMutex::new(LockRank::SharedStats, None);

struct RecentStats {
    engine: Weak<Engine>,
    read: Instant,
    /// Kept by its users until their next check.
    workers: Weak<Vec<WorkerStats>>,
}

/// Returns the statistics of the workers, at most [`CHECK_INTERVAL`] old. `None` if a worker does not respond.
fn recent_stats(engine: &Arc<Engine>) -> Option<Arc<Vec<WorkerStats>>> {
    let mut recent = RECENT.lock();
    let is_recent = |recent: &&RecentStats| {
        std::ptr::eq(recent.engine.as_ptr(), Arc::as_ptr(engine)) && recent.read.elapsed() < CHECK_INTERVAL
    };
    if let Some(workers) = recent.as_ref().filter(is_recent).and_then(|recent| recent.workers.upgrade()) {
        return Some(workers);
    }
    let read = Instant::now();
    let workers = Arc::new(engine.stats().ok()?);
    *recent = Some(RecentStats { engine: Arc::downgrade(engine), read, workers: Arc::downgrade(&workers) });
    Some(workers)
}

/// Checks one connection for shared memory. Stops on drop.
pub(crate) struct SharingMonitor {
    /// Tells the thread of a new memory table. Dropped first, which ends it.
    tables: Option<Sender<Weak<GuestMemory>>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for SharingMonitor {
    fn drop(&mut self) {
        self.tables = None;
        // A panic costs only the warning.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl SharingMonitor {
    /// Starts to check a connection whose queues start at index 0. The first `control` queues are control queues, which
    /// are not checked.
    pub(crate) fn start(
        options: &Arc<ServerOptions>,
        stats: &Arc<StatsRegistry>,
        control: usize,
        memory: &Arc<GuestMemory>,
    ) -> Option<SharingMonitor> {
        let (tables, changed) = channel();
        let mut memory = Arc::downgrade(memory);
        let (options, stats) = (Arc::clone(options), Arc::clone(stats));
        let (name, disk) = (format!("share-{}", options.name), options.name.clone());
        let before = count_available(&stats.earlier(), control);
        let watch = move || {
            let (mut suspect, mut _kept) = (0, None);
            for _ in 0..MAX_CHECKS {
                match changed.recv_timeout(CHECK_INTERVAL) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                    Ok(table) => {
                        memory = table;
                        continue;
                    }
                }
                let Some(workers) = recent_stats(&options.engine) else { continue };
                let rings = ring_activity(&workers, &stats, control, before);
                _kept = Some(workers);
                // A queue was attached after the statistics were read.
                let Some(rings) = rings else { continue };
                if rings == RingActivity::InUse {
                    return;
                }
                suspect = if rings == RingActivity::KickedAndEmpty { suspect + 1 } else { 0 };
                if suspect == SUSPECT_CHECKS {
                    let Some(memory) = memory.upgrade() else { continue };
                    if is_written(&memory) {
                        return;
                    }
                    tracing::warn!(
                        disk = options.name,
                        "a queue is kicked, but nothing is ever written to the guest's memory: found private memory, expected shared \
                         memory; \
                         {SHARE_HINT}"
                    );
                    return;
                }
            }
        };
        // Without a thread only the warning is missing.
        let thread = spawn(name, watch)
            .inspect_err(|error| tracing::debug!(disk, "shared memory is not checked: {error}"))
            .ok()?;
        Some(SharingMonitor { tables: Some(tables), thread: Some(thread) })
    }

    /// The VMM has sent another memory table.
    pub(crate) fn memory_changed(&self, memory: &Arc<GuestMemory>) {
        // The thread has ended: nothing is left to check.
        let _ = self.tables.as_ref().map(|tables| tables.send(Arc::downgrade(memory)));
    }
}

/// Returns true if a byte at the start of a region is not zero, or cannot be read.
fn is_written(memory: &GuestMemory) -> bool {
    memory.regions().iter().any(|region| {
        let pages = region.len().min(CHECKED_BYTES) / 4096;
        (0..pages).any(|page| {
            let mut bytes = [0; 4096];
            let read = memory.read(GuestAddress(region.guest().0 + page * 4096), &mut bytes);
            read.is_none() || bytes.iter().any(|byte| *byte != 0)
        })
    })
}

/// Activity of the request queues.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RingActivity {
    /// The guest made a request available.
    InUse,
    /// A queue was kicked, and no request was made available.
    KickedAndEmpty,
    /// Neither a kick nor a request.
    Idle,
}

/// `before`: the chains of earlier connections.
fn ring_activity(workers: &[WorkerStats], stats: &StatsRegistry, control: usize, before: u64) -> Option<RingActivity> {
    let kicked = |(index, queue): &(u16, QueueStats)| usize::from(*index) >= control && queue.counters.kicks > 0;
    Some(if count_available(&stats.report(workers)?, control) > before {
        RingActivity::InUse
    } else if stats.report_served(workers)?.iter().any(kicked) {
        RingActivity::KickedAndEmpty
    } else {
        RingActivity::Idle
    })
}

/// Counts the chains that request queues have made available.
fn count_available(queues: &[QueueStats], control: usize) -> u64 {
    let chains = |queue: &QueueStats| queue.counters.requests + queue.counters.malformed + u64::from(queue.in_flight);
    queues.iter().skip(control).map(chains).sum()
}
