//! Whether the VMM shares the guest's memory. One that maps it privately hands its descriptors over all the same: then the guest's
//! writes never reach us, its rings look empty for ever, and its firmware waits for ever.
//!
//! Nothing tells us so but this: the guest kicks, and yet its rings are empty. A thread looks for that while a connection is young,
//! until the first request; not where a ring is resumed, whose driver may be idle. QEMU itself kicks each queue once as it starts it
//! (`virtio_bus_set_host_notifier` makes the eventfd with 1 in it), so one kick of a queue says nothing of the guest. Other VMMs
//! (cloud-hypervisor) refuse private memory themselves.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mqblk_engine::{QueueReport, Tally};

use crate::server::ServerOptions;

/// How to mend it.
pub(crate) const SHARE: &str = "give the VM shared memory (QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on \
     -machine memory-backend=mem; cloud-hypervisor: --memory shared=on)";

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How many times: after two minutes a guest has come up, or is looked at by somebody.
const LOOKS: u32 = 240;

/// How often in a row there must have been kicks and no request: a kick may come just before its request, and a driver that begins
/// anew just before its first.
const IN_VAIN: u32 = 8;

/// Of one queue since it started: more than the VMM's own.
const GUEST_KICKED: u64 = 2;

/// Looks at one connection. Ends when dropped.
pub(crate) struct Watch {
    /// Dropped first: the thread waits for that.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end = None;
        // It had nothing but a warning to give.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Watch {
    /// Looks at a connection whose queues begin at 0. The first `control` queues are none for requests: what is kicked there may wait.
    pub(crate) fn start(options: &Arc<ServerOptions>, tally: &Arc<Tally>, control: usize) -> Option<Watch> {
        let (end, ended) = channel();
        let (options, tally) = (Arc::clone(options), Arc::clone(tally));
        let name = format!("share-{}", options.name);
        let before = made_available(&tally.report(&options.engine.reports().ok()?)?, control);
        let watch = move || {
            let mut in_vain = 0;
            for _ in 0..LOOKS {
                if ended.recv_timeout(LOOK_EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let Some(rings) = look(&options, &tally, control, before) else { continue };
                if rings == Rings::InUse {
                    return;
                }
                in_vain = if rings == Rings::KickedAndEmpty { in_vain + 1 } else { 0 };
                if in_vain == IN_VAIN {
                    tracing::warn!(
                        disk = options.name,
                        "the guest kicks, but its rings stay empty: found what looks like private memory, expected shared memory; \
                         {SHARE}"
                    );
                    return;
                }
            }
        };
        // Without a thread to spare there is no warning, but all else works.
        let thread = std::thread::Builder::new().name(name).spawn(watch).ok()?;
        Some(Watch { end: Some(end), thread: Some(thread) })
    }
}

/// What the queues for requests have shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rings {
    /// Something was made available.
    InUse,
    /// Nothing was, though the guest kicked.
    KickedAndEmpty,
    /// Neither.
    Idle,
}

fn look(options: &ServerOptions, tally: &Tally, control: usize, before: u64) -> Option<Rings> {
    let reports = options.engine.reports().ok()?;
    let kicked =
        |(index, queue): &(u16, QueueReport)| usize::from(*index) >= control && queue.counters.kicks >= GUEST_KICKED;
    Some(if made_available(&tally.report(&reports)?, control) > before {
        Rings::InUse
    } else if tally.report_served(&reports)?.iter().any(kicked) {
        Rings::KickedAndEmpty
    } else {
        Rings::Idle
    })
}

/// Whatever came of the queues for requests.
fn made_available(queues: &[QueueReport], control: usize) -> u64 {
    let of = |queue: &QueueReport| queue.counters.requests + queue.counters.malformed + u64::from(queue.in_flight);
    queues.iter().skip(control).map(of).sum()
}
