//! Order of multi-step commands after a crash: a COMPARE AND WRITE that had compared equal precedes all that have not
//! compared yet, on all queues. Its blocks may or may not hold its data; another command that compared them first could
//! find the old content, succeed too, and be overwritten.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use mqblk_core::lock::lock;

/// Holds back commands that compare until those that had compared before a crash have requested their range locks.
#[derive(Default)]
pub(crate) struct ReplayGate {
    /// Queues that were served before the crash and are not served yet.
    queues: Mutex<Vec<u16>>,
    /// Number of those queues, plus commands on the others that had compared and have not requested their range locks
    /// again.
    remaining: AtomicUsize,
}

impl ReplayGate {
    /// Starts waiting for these queues, which were served before. Does not wait if there are none.
    pub(crate) fn begin(&self, queues: Vec<u16>) {
        let mut held = lock(&self.queues);
        self.remaining.store(queues.len(), Ordering::SeqCst);
        *held = queues;
    }

    /// Returns true if commands that compare have to wait.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.remaining.load(Ordering::SeqCst) > 0
    }

    /// Records that a queue is served again, with this many commands that had compared. Returns true if nothing else is
    /// waited for.
    pub(crate) fn queue_started(&self, index: u16, compared: usize) -> bool {
        let mut held = lock(&self.queues);
        let Some(at) = held.iter().position(|queue| *queue == index) else { return false };
        held.swap_remove(at);
        self.remaining.fetch_add(compared, Ordering::SeqCst);
        self.command_locked()
    }

    /// Records that a command that had compared has requested its range lock. Returns true if it was the last.
    pub(crate) fn command_locked(&self) -> bool {
        let decrement = |left: usize| left.checked_sub(1);
        self.remaining.fetch_update(Ordering::SeqCst, Ordering::SeqCst, decrement) == Ok(1)
    }

    /// Stops waiting. Returns true if it was waiting.
    pub(crate) fn cancel(&self) -> bool {
        let mut held = lock(&self.queues);
        held.clear();
        self.remaining.swap(0, Ordering::SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_with_the_last_command_of_the_last_queue() {
        let resuming = ReplayGate::default();
        assert!(!resuming.is_active() && !resuming.queue_started(2, 1), "nothing was served before");
        assert!(!resuming.command_locked() && !resuming.is_active());
        resuming.begin(vec![2, 3, 5]);
        assert!(resuming.is_active());
        assert!(!resuming.queue_started(3, 2) && !resuming.queue_started(3, 7) && !resuming.queue_started(2, 0));
        assert!(!resuming.command_locked() && !resuming.queue_started(5, 0) && resuming.is_active());
        assert!(resuming.command_locked() && !resuming.is_active());
        resuming.begin(vec![2]);
        assert!(resuming.queue_started(2, 0) && !resuming.is_active());
        resuming.begin(vec![2, 4]);
        assert!(resuming.cancel() && !resuming.is_active() && !resuming.cancel());
        assert!(!resuming.queue_started(4, 1) && !resuming.is_active());
    }
}
