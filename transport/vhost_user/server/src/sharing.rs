//! Detects guest memory that the VMM does not share. A VMM that maps it privately still passes the descriptors: then the backend never
//! sees the guest's writes, the rings stay empty, and the guest's firmware waits for ever.
//!
//! The only sign is that the guest kicks while its rings are empty. A thread checks for this until the connection's first request; not for
//! resumed rings, whose driver may be idle. QEMU kicks each queue once when it starts it (`virtio_bus_set_host_notifier` creates the
//! eventfd with value 1), so one kick says nothing about the guest. Other VMMs (cloud-hypervisor) refuse private memory.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mqblk_core::thread::spawn;
use mqblk_engine::{QueueStats, StatsRegistry};

use crate::server::ServerOptions;

/// Advice for the log: how to share guest memory.
pub(crate) const SHARE_HINT: &str = "give the VM shared memory (QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on \
     -machine memory-backend=mem; cloud-hypervisor: --memory shared=on)";

/// Interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Number of checks: two minutes, in which a guest boots.
const MAX_CHECKS: u32 = 240;

/// Consecutive checks with kicks and no request before the warning: a kick may be seen just before its request, and a driver that restarts
/// just before its first one.
const SUSPECT_CHECKS: u32 = 8;

/// Kicks of one queue since its start that include at least one of the guest's: the VMM's own is the first.
const GUEST_KICKED: u64 = 2;

/// Checks one connection for shared memory. Stops on drop.
pub(crate) struct SharingMonitor {
    /// Dropped first, which ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for SharingMonitor {
    fn drop(&mut self) {
        self.stop = None;
        // A panic costs only the warning.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl SharingMonitor {
    /// Starts to check a connection whose queues start at index 0. The first `control` queues are control queues, which are not checked.
    pub(crate) fn start(
        options: &Arc<ServerOptions>,
        stats: &Arc<StatsRegistry>,
        control: usize,
    ) -> Option<SharingMonitor> {
        let (end, ended) = channel();
        let (options, stats) = (Arc::clone(options), Arc::clone(stats));
        let (name, disk) = (format!("share-{}", options.name), options.name.clone());
        let at_start = count_available(&stats.report(&options.engine.stats().ok()?)?, control);
        let watch = move || {
            let mut suspect = 0;
            for _ in 0..MAX_CHECKS {
                if ended.recv_timeout(CHECK_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let Some(rings) = ring_activity(&options, &stats, control, at_start) else { continue };
                if rings == RingActivity::InUse {
                    return;
                }
                suspect = if rings == RingActivity::KickedAndEmpty { suspect + 1 } else { 0 };
                if suspect == SUSPECT_CHECKS {
                    tracing::warn!(
                        disk = options.name,
                        "the guest kicks, but its rings stay empty: found what looks like private memory, expected shared memory; \
                         {SHARE_HINT}"
                    );
                    return;
                }
            }
        };
        // Without a thread there is only no warning.
        let thread = spawn(name, watch)
            .inspect_err(|error| tracing::debug!(disk, "shared memory is not checked: {error}"))
            .ok()?;
        Some(SharingMonitor { stop: Some(end), thread: Some(thread) })
    }
}

/// Activity of the request queues.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RingActivity {
    /// The guest made a request available.
    InUse,
    /// The guest kicked and made no request available.
    KickedAndEmpty,
    /// Neither a kick nor a request.
    Idle,
}

fn ring_activity(
    options: &ServerOptions,
    stats: &StatsRegistry,
    control: usize,
    at_start: u64,
) -> Option<RingActivity> {
    let workers = options.engine.stats().ok()?;
    let kicked =
        |(index, queue): &(u16, QueueStats)| usize::from(*index) >= control && queue.counters.kicks >= GUEST_KICKED;
    Some(if count_available(&stats.report(&workers)?, control) > at_start {
        RingActivity::InUse
    } else if stats.report_served(&workers)?.iter().any(kicked) {
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
