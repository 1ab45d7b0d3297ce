//! Setup of tests that step their workers.

use std::sync::Arc;

use mqblk_engine::{PollPolicy, QueueDisk, QueueFault, QueueOptions, SteppedWorker, UringOptions};
use mqblk_memory::{GuestAddress, GuestMemory, Region};

/// Starts workers that the caller steps.
///
/// # Panics
/// Without io_uring.
pub fn start_workers(count: usize) -> Vec<SteppedWorker> {
    let options = UringOptions { submissions: 64, in_flight: 512, files: 4, buffers: 4 };
    (0..count).map(|_| SteppedWorker::new(options).expect("the host has io_uring")).collect()
}

/// Returns the options of a queue that is always polled, because nothing wakes a stepped worker. The queue must not
/// break.
pub fn polled_queue(disks: Vec<QueueDisk>) -> QueueOptions {
    QueueOptions {
        disks,
        kick: None,
        policy: PollPolicy::Busy.into(),
        paused: false,
        on_fault: Box::new(|fault| assert!(!matches!(fault, QueueFault::BrokenRing(_)), "{fault:?}")),
    }
}

/// Returns a guest's memory: one region at address 0.
///
/// # Panics
/// Without memory.
pub fn guest_memory(bytes: u64) -> Arc<GuestMemory> {
    let region = Region::shared("guest", bytes, GuestAddress(0)).expect("memory for a guest").0;
    Arc::new(GuestMemory::new(vec![Arc::new(region)]).expect("one region"))
}
