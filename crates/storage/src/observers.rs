//! Notifications and statistics of a disk's storage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use mqblk_core::counters::ConnectionCounters;
use mqblk_core::lock::lock;
use mqblk_core::{ConnectionStats, DiskObserver};

/// A disk's observer, its state, and the statistics of its connections. For backends with notifications:
/// [`Disk::observe`](mqblk_core::Disk::observe) calls [`set`](Self::set),
/// [`Disk::connections`](mqblk_core::Disk::connections) [`stats`](Self::stats).
///
/// A disk has a connection for each channel. The disk's connection counts as lost with the first loss, and as restored
/// when one is made and no other is lost.
#[derive(Default)]
pub struct Observers(Mutex<ObservedState>);

#[derive(Default)]
struct ObservedState {
    observer: Option<Arc<dyn DiskObserver>>,
    /// Connections that are lost.
    lost: usize,
    /// Reason and time of the first loss, until it is restored.
    why: Option<(String, Instant)>,
    /// Without the bytes of `traffic`.
    counters: ConnectionCounters,
    last_failure: Option<String>,
    last_error: Option<String>,
    traffic: Vec<Arc<Traffic>>,
}

/// The bytes that a channel sends and receives. Its worker alone adds to them.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    /// Counts sent bytes.
    #[inline]
    pub fn add_sent(&self, bytes: u64) {
        add(&self.sent, bytes);
    }

    /// Counts received bytes.
    #[inline]
    pub fn add_received(&self, bytes: u64) {
        add(&self.received, bytes);
    }

    fn count(&self, counters: &mut ConnectionCounters) {
        counters.sent_bytes += self.sent.load(Ordering::Relaxed);
        counters.received_bytes += self.received.load(Ordering::Relaxed);
    }
}

/// Adds to a counter of which the calling thread is the only writer.
#[inline]
fn add(counter: &AtomicU64, bytes: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
}

impl Observers {
    fn lock(&self) -> MutexGuard<'_, ObservedState> {
        lock(&self.0)
    }

    /// Sets the observer, and notifies it at once if a connection is lost.
    pub fn set(&self, observer: Arc<dyn DiskObserver>) {
        let mut state = self.lock();
        if let Some((why, _)) = &state.why {
            observer.connection_lost(why);
        }
        state.observer = Some(observer);
    }

    /// Reports that the storage may have another size.
    pub fn size_changed(&self) {
        if let Some(observer) = &self.lock().observer {
            observer.size_changed();
        }
    }

    /// Returns the counters of a new channel's bytes.
    pub fn traffic(&self) -> Arc<Traffic> {
        let mut state = self.lock();
        let ObservedState { counters, traffic, .. } = &mut *state;
        traffic.retain(|channel| {
            let is_open = Arc::strong_count(channel) > 1;
            if !is_open {
                channel.count(counters);
            }
            is_open
        });
        let channel = Arc::new(Traffic::default());
        traffic.push(Arc::clone(&channel));
        channel
    }

    /// Changes the counters, except those of bytes.
    pub fn count(&self, change: impl FnOnce(&mut ConnectionCounters)) {
        change(&mut self.lock().counters);
    }

    /// Counts a lost connection or a failed attempt to connect by `change`.
    pub fn failure(&self, why: &str, change: impl FnOnce(&mut ConnectionCounters)) {
        let mut state = self.lock();
        state.last_failure = Some(why.to_owned());
        change(&mut state.counters);
    }

    /// Counts an error of the storage.
    pub fn error(&self, what: &str) {
        let mut state = self.lock();
        state.last_error = Some(what.to_owned());
        state.counters.errors += 1;
    }

    /// Returns the statistics.
    pub fn stats(&self) -> ConnectionStats {
        let state = self.lock();
        let mut counters = state.counters;
        state.traffic.iter().for_each(|channel| channel.count(&mut counters));
        ConnectionStats {
            counters,
            unreachable: state.why.as_ref().map(|(_, since)| since.elapsed()),
            last_failure: state.last_failure.clone(),
            last_error: state.last_error.clone(),
        }
    }

    /// Records a lost connection, until the value is dropped.
    #[must_use = "the connection counts as lost until this is dropped"]
    pub fn connection_lost(self: &Arc<Self>, why: &str) -> LostConnection {
        let mut state = self.lock();
        state.lost += 1;
        if state.why.is_none() {
            state.why = Some((why.to_owned(), Instant::now()));
            if let Some(observer) = &state.observer {
                observer.connection_lost(why);
            }
        }
        drop(state);
        LostConnection(Arc::clone(self))
    }

    /// Records a new connection, which no longer counts as lost.
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

    /// Records its notifications.
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
    fn bytes_of_channels_that_are_gone_still_count() {
        let observers = Observers::default();
        let bytes = || {
            let ConnectionCounters { sent_bytes, received_bytes, .. } = observers.stats().counters;
            (sent_bytes, received_bytes)
        };
        let first = observers.traffic();
        first.add_sent(1);
        first.add_received(20);
        drop(first);
        assert_eq!(bytes(), (1, 20));
        let second = observers.traffic();
        second.add_sent(300);
        assert_eq!(bytes(), (301, 20));
        let _third = observers.traffic();
        assert_eq!(bytes(), (301, 20));
        assert_eq!(observers.lock().traffic.len(), 2);
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
