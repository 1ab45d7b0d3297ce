//! Events that other threads leave for a worker.
//!
//! The first event of a batch signals the worker's eventfd; those that follow before the worker has taken the batch do
//! not. The decision is made under the lock that guards the events. So an event is either in the batch that a pending
//! signal announces, or signals itself. The loom model below runs this code in every interleaving.

/// Events that the worker has not taken yet. Shared behind a lock.
#[derive(Debug)]
pub(crate) struct PendingEvents<T> {
    events: Vec<T>,
    /// True if the worker was signalled, or is about to be, since it took the last batch.
    signalled: bool,
}

impl<T> Default for PendingEvents<T> {
    fn default() -> Self {
        PendingEvents { events: Vec::new(), signalled: false }
    }
}

impl<T> PendingEvents<T> {
    /// Adds an event. Returns true if the caller must signal the worker, after it has released the lock.
    #[must_use = "the worker sleeps until it is signalled"]
    pub(crate) fn push(&mut self, event: T) -> bool {
        self.events.push(event);
        !std::mem::replace(&mut self.signalled, true)
    }

    /// Like [`push`](Self::push), unless an event for which `same` is true is pending.
    #[must_use = "the worker sleeps until it is signalled"]
    pub(crate) fn push_once(&mut self, event: T, same: impl Fn(&T) -> bool) -> bool {
        !self.events.iter().any(same) && self.push(event)
    }

    /// Takes all events, in exchange for an empty list with capacity. Called by the worker after each signal.
    pub(crate) fn take(&mut self, empty: &mut Vec<T>) {
        debug_assert!(empty.is_empty());
        self.signalled = false;
        std::mem::swap(&mut self.events, empty);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::{Arc, Mutex, Notify};

    const THREADS: u32 = 2;
    const EVENTS: u32 = 2;

    /// Runs senders against a worker that sleeps after each batch. A lost event is a deadlock, which loom reports.
    fn model(push: fn(&mut PendingEvents<u32>, u32) -> bool) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let shared = Arc::new((Mutex::new(PendingEvents::default()), Notify::new()));
            let senders: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || {
                        for event in 0..EVENTS {
                            let signal = push(&mut shared.0.lock().unwrap(), thread * EVENTS + event);
                            if signal {
                                shared.1.notify();
                            }
                        }
                    })
                })
                .collect();
            let (mut found, mut batch) = (vec![], vec![]);
            while found.len() < (THREADS * EVENTS) as usize {
                shared.1.wait();
                shared.0.lock().unwrap().take(&mut batch);
                found.append(&mut batch);
            }
            found.sort_unstable();
            assert!(found.into_iter().eq(0..THREADS * EVENTS), "each event once");
            senders.into_iter().for_each(|sender| sender.join().unwrap());
        });
    }

    #[test]
    fn every_event_wakes_the_worker() {
        model(PendingEvents::push);
    }

    /// The signal is decided by the list before the lock is taken.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn a_signal_that_is_left_out_is_found() {
        model(|pending, event| {
            let first = pending.events.is_empty() && event == 0;
            let _ = pending.push(event);
            first
        });
    }

    #[test]
    fn one_signal_announces_a_batch() {
        let (mut pending, mut batch) = (PendingEvents::default(), vec![]);
        assert!(pending.push(1));
        assert!(
            !pending.push(2)
                && !pending.push_once(1, |event| *event == 1)
                && !pending.push_once(3, |event| *event == 3)
        );
        pending.take(&mut batch);
        assert_eq!(batch, [1, 2, 3]);
        batch.clear();
        assert!(pending.push_once(1, |event| *event == 1) && !pending.push_once(1, |event| *event == 1));
        pending.take(&mut batch);
        assert_eq!(batch, [1]);
    }
}
