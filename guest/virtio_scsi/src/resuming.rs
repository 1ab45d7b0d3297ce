//! Commands of several steps after a crash: one that had compared equal goes before all that have not compared yet, on whichever
//! queue they are taken up again. Its blocks may hold what it writes, or not yet; another that compared them first would find the old
//! content, succeed too, and be overwritten.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What a controller waits for before commands may compare.
#[derive(Default)]
pub(crate) struct Resuming {
    /// Queues that were served before and are not yet.
    queues: Mutex<Vec<u16>>,
    /// Those, and commands on the others that had compared and have not entered their sections again.
    left: AtomicUsize,
}

impl Resuming {
    /// These queues were served before. None: nothing is waited for.
    pub(crate) fn begin(&self, queues: Vec<u16>) {
        let mut held = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        self.left.store(queues.len(), Ordering::SeqCst);
        *held = queues;
    }

    /// Whether commands that compare have to wait.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.left.load(Ordering::SeqCst) > 0
    }

    /// A queue is served again, with so many commands that had compared. Whether nothing is waited for any more, for the first time.
    pub(crate) fn queue_is_back(&self, index: u16, compared: usize) -> bool {
        let mut held = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = held.iter().position(|queue| *queue == index) else { return false };
        held.swap_remove(at);
        self.left.fetch_add(compared, Ordering::SeqCst);
        self.one_less()
    }

    /// A command that had compared has entered its section, or is in line for it. Whether it was the last.
    pub(crate) fn one_less(&self) -> bool {
        let less = |left: usize| left.checked_sub(1);
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(1)
    }

    /// Whatever has not come back is not waited for.
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
    fn it_ends_with_the_last_command_of_the_last_queue() {
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
