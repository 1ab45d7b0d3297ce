//! Order of multi-step commands after a crash: a COMPARE AND WRITE that had compared equal goes before all that have
//! not compared yet, on all queues. Its blocks may or may not hold its data; another command that compared them first
//! would find the old content, succeed too, and be overwritten.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Holds back commands that compare until those that had compared before a crash have requested their range locks.
#[derive(Default)]
pub(crate) struct Resuming {
    /// Queues that were served before the crash and are not yet.
    queues: Mutex<Vec<u16>>,
    /// Number of those queues, plus commands on the others that had compared and have not requested their range locks
    /// again.
    left: AtomicUsize,
}

impl Resuming {
    /// Starts waiting for these queues, which were served before; for nothing if there are none.
    pub(crate) fn begin(&self, queues: Vec<u16>) {
        let mut held = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        self.left.store(queues.len(), Ordering::SeqCst);
        *held = queues;
    }

    /// Returns true if commands that compare have to wait.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.left.load(Ordering::SeqCst) > 0
    }

    /// Records that a queue is served again, with so many commands that had compared. Returns true if that was the
    /// last thing waited for.
    pub(crate) fn queue_is_back(&self, index: u16, compared: usize) -> bool {
        let mut held = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = held.iter().position(|queue| *queue == index) else { return false };
        held.swap_remove(at);
        self.left.fetch_add(compared, Ordering::SeqCst);
        self.one_less()
    }

    /// Records that a command that had compared has requested its range lock. Returns true if it was the last.
    pub(crate) fn one_less(&self) -> bool {
        let decrement = |left: usize| left.checked_sub(1);
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, decrement) == Ok(1)
    }

    /// Stops waiting. Returns true if something was still waited for.
    pub(crate) fn give_up(&self) -> bool {
        let mut held = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        held.clear();
        self.left.swap(0, Ordering::SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_with_the_last_command_of_the_last_queue() {
        let resuming = Resuming::default();
        assert!(!resuming.is_on() && !resuming.queue_is_back(2, 1), "nothing was served before");
        assert!(!resuming.one_less() && !resuming.is_on());
        resuming.begin(vec![2, 3, 5]);
        assert!(resuming.is_on());
        assert!(!resuming.queue_is_back(3, 2) && !resuming.queue_is_back(3, 7) && !resuming.queue_is_back(2, 0));
        assert!(!resuming.one_less() && !resuming.queue_is_back(5, 0) && resuming.is_on());
        assert!(resuming.one_less() && !resuming.is_on());
        resuming.begin(vec![2]);
        assert!(resuming.queue_is_back(2, 0) && !resuming.is_on());
        resuming.begin(vec![2, 4]);
        assert!(resuming.give_up() && !resuming.is_on() && !resuming.give_up());
        assert!(!resuming.queue_is_back(4, 1) && !resuming.is_on());
    }
}
