//! Detects that the storage of a disk has another size than the guest's disk.
//!
//! Polls the size of each storage every second, also of files: inotify reports a new file size by the same event as a write, so that
//! each write of a guest would wake this thread. Storage that reports a new size itself is checked at once. Lost connections that storage
//! reports are logged here, and how many requests failed after the first one.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;
use mqblk_core::{ByteLen, DiskObserver, Resize};
use mqblk_engine::AnyDisk;

use crate::resize::GuestNotice;
use crate::state::DaemonState;

/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long a stop waits for a size query that hangs, such as one to a network file system whose server is down.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A disk whose size is watched, with its id.
pub(crate) type WatchedDisk = (String, Arc<AnyDisk>);

/// What the thread is told.
#[derive(Clone, Debug, PartialEq, Eq)]
enum WatchEvent {
    Stop,
    SizeChanged(String),
    ConnectionLost(String, String),
    ConnectionRestored(String),
}

/// Events that may wait. Another one is dropped: sizes are polled anyway.
const MAX_EVENTS: usize = 1024;

/// The observer of a disk. It only passes events on, because storage reports them from any thread.
struct EventSender {
    id: String,
    events: SyncSender<WatchEvent>,
}

impl DiskObserver for EventSender {
    fn size_changed(&self) {
        let _ = self.events.try_send(WatchEvent::SizeChanged(self.id.clone()));
    }

    fn connection_lost(&self, why: &str) {
        let _ = self.events.try_send(WatchEvent::ConnectionLost(self.id.clone(), why.to_owned()));
    }

    fn connection_restored(&self) {
        let _ = self.events.try_send(WatchEvent::ConnectionRestored(self.id.clone()));
    }
}

/// The size watch thread. Dropping this stops it.
pub(crate) struct SizeWatch {
    events: SyncSender<WatchEvent>,
    ended: Receiver<()>,
}

impl SizeWatch {
    /// Starts to watch the disks of `source`.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub(crate) fn start(source: &Arc<DaemonState>) -> std::io::Result<SizeWatch> {
        let (events, received) = sync_channel(MAX_EVENTS);
        let (ending, ended) = channel();
        let (source, sender) = (Arc::downgrade(source), events.clone());
        spawn("size-watch", move || {
            let _ending: Sender<()> = ending;
            Watch { source, events: sender, observed: HashMap::new(), seen: HashMap::new() }
                .run(&received, POLL_INTERVAL);
        })?;
        Ok(SizeWatch { events, ended })
    }
}

impl Drop for SizeWatch {
    fn drop(&mut self) {
        let _ = self.events.try_send(WatchEvent::Stop);
        // The thread drops the sender when it ends.
        let _ = self.ended.recv_timeout(STOP_TIMEOUT);
    }
}

/// Whose disks are watched.
trait WatchedDisks {
    fn watched_disks(&self) -> Vec<WatchedDisk>;

    /// Adopts the size that was found.
    fn grow(&self, id: &str, found: ByteLen);

    /// Logs the requests that failed, as far as that is due.
    fn log_failures(&self);
}

impl WatchedDisks for DaemonState {
    fn watched_disks(&self) -> Vec<WatchedDisk> {
        DaemonState::watched_disks(self)
    }

    fn grow(&self, id: &str, found: ByteLen) {
        grow(self, id, found);
    }

    fn log_failures(&self) {
        DaemonState::log_failures(self, false);
    }
}

/// The thread's state.
struct Watch<S> {
    source: Weak<S>,
    /// For observers.
    events: SyncSender<WatchEvent>,
    /// Disks that have an observer, by id.
    observed: HashMap<String, Weak<AnyDisk>>,
    seen: HashMap<String, ObservedSize>,
}

impl<S: WatchedDisks> Watch<S> {
    fn run(mut self, received: &Receiver<WatchEvent>, interval: Duration) {
        let mut next_poll = Instant::now();
        loop {
            if Instant::now() >= next_poll {
                next_poll = Instant::now() + interval;
                let Some(source) = self.source.upgrade() else { return };
                let disks = source.watched_disks();
                source.log_failures();
                drop(source);
                self.observe(&disks);
                self.seen.retain(|id, _| disks.iter().any(|(other, _)| other == id));
                for (id, disk) in disks {
                    self.check(&id, disk, false);
                }
            }
            match received.recv_timeout(next_poll.saturating_duration_since(Instant::now())) {
                Ok(WatchEvent::SizeChanged(id)) => {
                    if let Some(disk) = self.observed.get(&id).and_then(Weak::upgrade) {
                        self.check(&id, disk, true);
                    }
                }
                Ok(WatchEvent::ConnectionLost(id, why)) => {
                    tracing::warn!(disk = id, "the connection to the storage is lost: {why}");
                }
                Ok(WatchEvent::ConnectionRestored(id)) => {
                    tracing::info!(disk = id, "the connection to the storage is restored");
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(WatchEvent::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Observes the disks that are new.
    fn observe(&mut self, disks: &[WatchedDisk]) {
        self.observed.retain(|_, disk| disk.strong_count() > 0);
        for (id, disk) in disks {
            let known = self.observed.get(id).is_some_and(|known| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(disk)));
            if !known {
                self.observed.insert(id.clone(), Arc::downgrade(disk));
                disk.observe(Arc::new(EventSender { id: id.clone(), events: self.events.clone() }));
            }
        }
    }

    /// Compares a disk's size with that of its storage. `reported`: by the storage itself, so that one look is enough.
    fn check(&mut self, id: &str, disk: Arc<AnyDisk>, reported: bool) {
        // The query may take long: no reference to the source is held meanwhile.
        let now = disk.geometry().size;
        let Ok(found) = disk.found_size() else { return };
        drop(disk);
        if reported && self.seen.get(id).is_none_or(|seen| seen.found != found) {
            self.seen.insert(id.to_owned(), ObservedSize { found, handled: false });
        }
        match check_size(&mut self.seen, id, now, found) {
            SizeEvent::Nothing => {}
            SizeEvent::Grown => {
                if let Some(source) = self.source.upgrade() {
                    source.grow(id, found);
                }
            }
            SizeEvent::Shrunk => {
                tracing::warn!(
                    disk = id,
                    found = %found,
                    expected = %now,
                    "the storage has become smaller than the guest's disk: requests past its end fail; make it as large \
                     again (truncate -s, lvextend), or have the guest see it by mqblk resize {id} --shrink"
                );
            }
        }
    }
}

/// The size found by the last poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ObservedSize {
    found: ByteLen,
    /// True if the size was handled, with or without success.
    handled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeEvent {
    Nothing,
    Grown,
    Shrunk,
}

/// Returns what to do about a size. Acts once for each size, and only when two polls in a row find it: a file that is being extended or
/// re-created is left alone.
fn check_size(seen: &mut HashMap<String, ObservedSize>, id: &str, now: ByteLen, found: ByteLen) -> SizeEvent {
    if found == now {
        seen.remove(id);
        return SizeEvent::Nothing;
    }
    match seen.get_mut(id) {
        Some(last) if last.found == found && last.handled => SizeEvent::Nothing,
        Some(last) if last.found == found => {
            last.handled = true;
            if found > now { SizeEvent::Grown } else { SizeEvent::Shrunk }
        }
        _ => {
            seen.insert(id.to_owned(), ObservedSize { found, handled: false });
            SizeEvent::Nothing
        }
    }
}

fn grow(source: &DaemonState, id: &str, found: ByteLen) {
    match source.resize(id, Resize::GROW) {
        Ok(changed) if changed.guest == GuestNotice::Unanswered => {
            tracing::warn!(disk = id, size = %found, "the storage has grown, and the VMM did not say that the guest knows");
        }
        Ok(changed) => {
            tracing::debug!(disk = id, size = %changed.resized.size, guest = changed.guest.word(), "the storage has grown");
        }
        Err(error) => tracing::warn!(disk = id, "the storage has grown, and the guest's disk cannot: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use mqblk_core::{BlockSize, Disk, DiskChannel, DiskError, Geometry, Limits};
    use mqblk_engine::UringContext;

    use super::*;

    /// A disk of 10 bytes on storage of 20.
    #[derive(Default)]
    struct GrownDisk {
        observer: Mutex<Option<Arc<dyn DiskObserver>>>,
    }

    impl Disk<UringContext> for GrownDisk {
        fn geometry(&self) -> Geometry {
            Geometry {
                size: ByteLen(10),
                logical_block: BlockSize::B512,
                physical_block: BlockSize::B512,
                alignment_offset: 0,
                min_io: ByteLen::ZERO,
                opt_io: ByteLen::ZERO,
                read_only: false,
            }
        }

        fn limits(&self) -> Limits {
            unreachable!("nobody asks")
        }

        fn resolved(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn found_size(&self) -> Result<ByteLen, DiskError> {
            Ok(ByteLen(20))
        }

        fn resize(&self, _: Option<ByteLen>) -> Result<ByteLen, DiskError> {
            unreachable!("nobody asks")
        }

        fn observe(&self, observer: Arc<dyn DiskObserver>) {
            *self.observer.lock().unwrap() = Some(observer);
        }

        fn open_channel(&self, _: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
            unreachable!("nobody asks")
        }
    }

    struct OneDisk {
        disk: Arc<GrownDisk>,
        grown: Sender<(String, ByteLen)>,
    }

    impl WatchedDisks for OneDisk {
        fn watched_disks(&self) -> Vec<WatchedDisk> {
            vec![("a".to_owned(), self.disk.clone())]
        }

        fn grow(&self, id: &str, found: ByteLen) {
            self.grown.send((id.to_owned(), found)).unwrap();
        }

        fn log_failures(&self) {}
    }

    #[test]
    fn a_reported_size_is_adopted_without_a_second_poll() {
        let (grown, grows) = channel();
        let (events, received) = sync_channel(MAX_EVENTS);
        let source = Arc::new(OneDisk { disk: Arc::default(), grown });
        let watch = Watch {
            source: Arc::downgrade(&source),
            events: events.clone(),
            observed: HashMap::new(),
            seen: HashMap::new(),
        };
        // There is one poll, which alone does nothing.
        let thread = std::thread::spawn(move || watch.run(&received, Duration::from_secs(3600)));
        let observer = loop {
            if let Some(observer) = source.disk.observer.lock().unwrap().clone() {
                break observer;
            }
            std::thread::yield_now();
        };
        observer.size_changed();
        assert_eq!(grows.recv_timeout(Duration::from_secs(20)), Ok(("a".to_owned(), ByteLen(20))));
        observer.size_changed();
        observer.connection_lost("reset");
        observer.connection_restored();
        events.send(WatchEvent::Stop).unwrap();
        thread.join().unwrap();
        assert!(grows.try_recv().is_err(), "each size is adopted once");
    }

    #[test]
    fn each_stable_size_is_handled_once() {
        let mut seen = HashMap::new();
        let mut at = |found: u64| check_size(&mut seen, "a", ByteLen(10), ByteLen(found));
        for (found, want) in [
            (10, SizeEvent::Nothing),
            (11, SizeEvent::Nothing),
            (12, SizeEvent::Nothing),
            (12, SizeEvent::Grown),
            // Handled once, even if that failed.
            (12, SizeEvent::Nothing),
            (13, SizeEvent::Nothing),
            (13, SizeEvent::Grown),
            (9, SizeEvent::Nothing),
            (9, SizeEvent::Shrunk),
            (9, SizeEvent::Nothing),
            (10, SizeEvent::Nothing),
            (9, SizeEvent::Nothing),
            (9, SizeEvent::Shrunk),
        ] {
            assert_eq!(at(found), want, "{found}");
        }
    }
}
