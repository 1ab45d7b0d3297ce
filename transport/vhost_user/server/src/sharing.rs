//! Whether the VMM shares the guest's memory. One that maps it privately hands its descriptors over all the same: then the guest's
//! writes never reach us, its rings look empty for ever, and its firmware waits for ever.
//!
//! Nothing tells us so but this: the guest kicks, and yet its rings are empty. A thread looks for that while a connection is young,
//! until the first request; not where a ring is resumed, whose driver may be idle.

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

/// How often in a row there must have been kicks and no request: a kick may come just before its request.
const IN_VAIN: u32 = 4;

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
        let before = kicks_and_requests(&options, &tally, control)?;
        let look = move || {
            let mut in_vain = 0;
            for _ in 0..LOOKS {
                if ended.recv_timeout(LOOK_EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let Some((kicks, requests)) = kicks_and_requests(&options, &tally, control) else { continue };
                if requests > before.1 {
                    return;
                }
                in_vain = if kicks > before.0 { in_vain + 1 } else { 0 };
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
        let thread = std::thread::Builder::new().name(name).spawn(look).ok()?;
        Some(Watch { end: Some(end), thread: Some(thread) })
    }
}

/// Of the device's queues for requests so far: kicks, and what came of them in any way.
fn kicks_and_requests(options: &ServerOptions, tally: &Tally, control: usize) -> Option<(u64, u64)> {
    let queues = tally.report(&options.engine.reports().ok()?)?;
    let sum = |(kicks, requests), queue: &QueueReport| {
        let counters = &queue.counters;
        (kicks + counters.kicks, requests + counters.requests + counters.malformed + u64::from(queue.in_flight))
    };
    Some(queues.iter().skip(control).fold((0, 0), sum))
}
