//! Who is told what happens to a disk's storage.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::DiskObserver;

/// A disk's observer, and what it was told. Kept by backends that have something to say: [`Disk::observe`](mqblk_core::Disk::observe) calls
/// [`set`](Self::set).
///
/// A disk has a connection for each channel. It is lost with the first that is lost, and restored when one is made and no other is lost.
#[derive(Default)]
pub struct Observers(Mutex<ObservedState>);

#[derive(Default)]
struct ObservedState {
    observer: Option<Arc<dyn DiskObserver>>,
    /// Connections that are lost.
    lost: usize,
    /// Why the first of them was, until it is restored.
    why: Option<String>,
}

impl Observers {
    fn lock(&self) -> MutexGuard<'_, ObservedState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the observer, and tells it at once if a connection is lost.
    pub fn set(&self, observer: Arc<dyn DiskObserver>) {
        let mut state = self.lock();
        if let Some(why) = &state.why {
            observer.connection_lost(why);
        }
        state.observer = Some(observer);
    }

    /// The storage may have another size.
    pub fn size_changed(&self) {
        if let Some(observer) = &self.lock().observer {
            observer.size_changed();
        }
    }

    /// A connection is lost, until the value is dropped.
    #[must_use = "the connection counts as lost until this is dropped"]
    pub fn connection_lost(self: &Arc<Self>, why: &str) -> LostConnection {
        let mut state = self.lock();
        state.lost += 1;
        if state.why.is_none() {
            state.why = Some(why.to_owned());
            if let Some(observer) = &state.observer {
                observer.connection_lost(why);
            }
        }
        drop(state);
        LostConnection(Arc::clone(self))
    }

    /// A connection was made, and no longer counts as lost.
    pub fn connection_made(&self) {
        let mut state = self.lock();
        if state.lost == 0
            && state.why.take().is_some()
            && let Some(observer) = &state.observer
        {
            observer.connection_restored();
        }
    }
}

impl std::fmt::Debug for Observers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observers").field("lost", &self.lock().lost).finish_non_exhaustive()
    }
}

/// A connection that is lost.
#[derive(Debug)]
pub struct LostConnection(Arc<Observers>);

impl Drop for LostConnection {
    fn drop(&mut self) {
        self.0.lock().lost -= 1;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Writes down what it is told.
    #[derive(Debug, Default)]
    pub(crate) struct Log(Mutex<Vec<String>>);

    impl Log {
        pub(crate) fn take(&self) -> Vec<String> {
            std::mem::take(&mut *self.0.lock().unwrap())
        }
    }

    impl DiskObserver for Log {
        fn size_changed(&self) {
            self.0.lock().unwrap().push("size".to_owned());
        }

        fn connection_lost(&self, why: &str) {
            self.0.lock().unwrap().push(format!("lost: {why}"));
        }

        fn connection_restored(&self) {
            self.0.lock().unwrap().push("restored".to_owned());
        }
    }

    #[test]
    fn a_disk_is_lost_with_its_first_connection_and_restored_with_its_last() {
        let observers = Arc::new(Observers::default());
        observers.size_changed();
        let log = Arc::new(Log::default());
        observers.set(log.clone());
        assert!(log.take().is_empty());
        observers.size_changed();
        let first = observers.connection_lost("reset");
        let second = observers.connection_lost("timeout");
        assert_eq!(log.take(), ["size", "lost: reset"]);
        drop(first);
        observers.connection_made();
        assert!(log.take().is_empty());
        let late = Arc::new(Log::default());
        observers.set(late.clone());
        assert_eq!(late.take(), ["lost: reset"]);
        drop(second);
        assert!(late.take().is_empty(), "the connection that was lost may be gone with its channel");
        observers.connection_made();
        observers.connection_made();
        drop(observers.connection_lost("again"));
        assert_eq!(late.take(), ["restored", "lost: again"]);
        assert!(log.take().is_empty(), "another observer took its place");
    }
}
