//! Detects that the storage of a disk has another size than the guest's disk.
//!
//! Polls the size of each storage with a connected guest every second. Files are polled too: inotify reports a new file
//! size by the same event as a write, so each write of a guest would wake this thread. Of disks without a guest a few
//! are polled each second, so that ten thousand of them have no measurable cost. Storage that reports a new size itself
//! is checked at once. Lost connections that storage reports are logged here, and the number of failed requests after
//! the first one.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;
use mqblk_core::{ByteLen, DiskObserver, Resize};
use mqblk_engine::{AnyDisk, failure_count};

use crate::resize::GuestNotice;
use crate::state::{DaemonState, WatchedDisk};

/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait of a stop for a size query that hangs, such as one to a network file system whose server is down.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Number of disks without a guest that are polled in an interval.
const UNUSED_POLLS: usize = 64;

/// The events that wake the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
enum WatchEvent {
    Stop,
    SizeChanged(String),
    ConnectionLost(String, String),
    ConnectionRestored(String),
}

/// Maximum number of waiting events. Further ones are dropped: sizes are polled anyway.
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
            Watch::new(source, sender).run(&received, POLL_INTERVAL);
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

/// The disks to watch.
trait WatchedDisks {
    /// Returns numbers that stay the same as long as the result of [`watched_disks`](Self::watched_disks) does; `None`:
    /// query again.
    fn changes(&self) -> Option<Vec<u64>>;

    fn watched_disks(&self) -> Vec<WatchedDisk>;

    /// Adopts the size that was found.
    fn grow(&self, id: &str, found: ByteLen);

    /// Logs the failed requests, as far as that is due. Returns true if there is more to log later.
    fn log_failures(&self) -> bool;
}

impl WatchedDisks for DaemonState {
    fn changes(&self) -> Option<Vec<u64>> {
        self.device_changes()
    }

    fn watched_disks(&self) -> Vec<WatchedDisk> {
        DaemonState::watched_disks(self)
    }

    fn grow(&self, id: &str, found: ByteLen) {
        grow(self, id, found);
    }

    fn log_failures(&self) -> bool {
        DaemonState::log_failures(self, false)
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
    /// Change numbers of the lists below.
    changes: Option<Vec<u64>>,
    in_use: Vec<(String, Weak<AnyDisk>)>,
    unused: Vec<(String, Weak<AnyDisk>)>,
    /// The index in `unused` of the next poll.
    next_unused: usize,
    /// The number of failed requests in the log, and true if there is more to log.
    failures: (u64, bool),
}

impl<S: WatchedDisks> Watch<S> {
    fn new(source: Weak<S>, events: SyncSender<WatchEvent>) -> Watch<S> {
        Watch {
            source,
            events,
            observed: HashMap::new(),
            seen: HashMap::new(),
            changes: None,
            in_use: Vec::new(),
            unused: Vec::new(),
            next_unused: 0,
            failures: (0, true),
        }
    }

    fn run(mut self, received: &Receiver<WatchEvent>, interval: Duration) {
        let mut next_poll = Instant::now();
        loop {
            if Instant::now() >= next_poll {
                next_poll = Instant::now() + interval;
                let Some(source) = self.source.upgrade() else { return };
                self.log_failures(&*source);
                self.update(&*source);
                drop(source);
                self.poll();
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

    /// Logs the failed requests. Queries no disk as long as no request fails.
    fn log_failures(&mut self, source: &S) {
        let count = failure_count();
        let (told, has_more) = self.failures;
        if has_more || count != told {
            self.failures = (count, source.log_failures());
        }
    }

    /// Reads the lists of disks again, if they have changed.
    fn update(&mut self, source: &S) {
        let changes = source.changes();
        if changes.is_some() && changes == self.changes {
            return;
        }
        self.changes = changes;
        let disks = source.watched_disks();
        self.observe(&disks);
        let ids: HashSet<&str> = disks.iter().map(|watched| watched.id.as_str()).collect();
        self.seen.retain(|id, _| ids.contains(id.as_str()));
        (self.in_use, self.unused) = (Vec::new(), Vec::new());
        for WatchedDisk { id, disk, in_use } in disks {
            let list = if in_use { &mut self.in_use } else { &mut self.unused };
            // A removed disk is closed although it is listed here.
            list.push((id, Arc::downgrade(&disk)));
        }
    }

    /// Polls the size of the disks that guests use, and of the next of the others.
    fn poll(&mut self) {
        let mut due = self.in_use.clone();
        let count = self.unused.len().min(UNUSED_POLLS);
        due.extend(self.unused.iter().cycle().skip(self.next_unused).take(count).cloned());
        self.next_unused = (self.next_unused + count).checked_rem(self.unused.len()).unwrap_or(0);
        for (id, disk) in due {
            if let Some(disk) = disk.upgrade() {
                self.check(&id, disk, false);
            }
        }
    }

    /// Observes the disks that are new.
    fn observe(&mut self, disks: &[WatchedDisk]) {
        self.observed.retain(|_, disk| disk.strong_count() > 0);
        for WatchedDisk { id, disk, .. } in disks {
            let known = self.observed.get(id).is_some_and(|known| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(disk)));
            if !known {
                self.observed.insert(id.clone(), Arc::downgrade(disk));
                disk.observe(Arc::new(EventSender { id: id.clone(), events: self.events.clone() }));
            }
        }
    }

    /// Compares a disk's size with that of its storage. `reported`: by the storage itself, so that one check is enough.
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
    /// True if the size was handled, successfully or not.
    handled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeEvent {
    Nothing,
    Grown,
    Shrunk,
}

/// Returns the action for a size. Acts once for each size, and only if two polls in a row find it, so that a file that
/// is being extended or re-created is left alone.
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
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        fn changes(&self) -> Option<Vec<u64>> {
            Some(Vec::new())
        }

        fn watched_disks(&self) -> Vec<WatchedDisk> {
            vec![WatchedDisk { id: "a".to_owned(), disk: self.disk.clone(), in_use: true }]
        }

        fn grow(&self, id: &str, found: ByteLen) {
            self.grown.send((id.to_owned(), found)).unwrap();
        }

        fn log_failures(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_reported_size_is_adopted_without_a_second_poll() {
        let (grown, grows) = channel();
        let (events, received) = sync_channel(MAX_EVENTS);
        let source = Arc::new(OneDisk { disk: Arc::default(), grown });
        let watch = Watch::new(Arc::downgrade(&source), events.clone());
        // There is one poll, which alone has no effect.
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

    /// Disks that count the queries of their size.
    struct ManyDisks {
        disks: Vec<Arc<CountedDisk>>,
        in_use: usize,
        changes: Option<Vec<u64>>,
        listed: AtomicUsize,
    }

    struct CountedDisk(GrownDisk, AtomicUsize);

    impl Disk<UringContext> for CountedDisk {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }

        fn limits(&self) -> Limits {
            self.0.limits()
        }

        fn resolved(&self) -> Vec<(&'static str, String)> {
            self.0.resolved()
        }

        fn found_size(&self) -> Result<ByteLen, DiskError> {
            self.1.fetch_add(1, Ordering::Relaxed);
            Ok(self.geometry().size)
        }

        fn resize(&self, to: Option<ByteLen>) -> Result<ByteLen, DiskError> {
            self.0.resize(to)
        }

        fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
            self.0.open_channel(context)
        }
    }

    impl WatchedDisks for ManyDisks {
        fn changes(&self) -> Option<Vec<u64>> {
            self.changes.clone()
        }

        fn watched_disks(&self) -> Vec<WatchedDisk> {
            self.listed.fetch_add(1, Ordering::Relaxed);
            let disk = |(at, disk): (usize, &Arc<CountedDisk>)| {
                let disk = Arc::clone(disk) as Arc<AnyDisk>;
                WatchedDisk { id: at.to_string(), disk, in_use: at < self.in_use }
            };
            self.disks.iter().enumerate().map(disk).collect()
        }

        fn grow(&self, id: &str, _: ByteLen) {
            panic!("{id} has not grown");
        }

        fn log_failures(&self) -> bool {
            false
        }
    }

    #[test]
    fn disks_in_use_are_polled_each_time_and_the_others_in_turns() {
        const UNUSED: usize = 3 * UNUSED_POLLS;
        const IN_USE: usize = 2;
        for (changes, listed) in [(Some(vec![1]), 1), (None, 6)] {
            let disks = (0..IN_USE + UNUSED).map(|_| Arc::new(CountedDisk(GrownDisk::default(), AtomicUsize::new(0))));
            let source =
                Arc::new(ManyDisks { disks: disks.collect(), in_use: IN_USE, changes, listed: AtomicUsize::new(0) });
            let mut watch = Watch::new(Arc::downgrade(&source), sync_channel(MAX_EVENTS).0);
            for round in 1..=6 {
                watch.update(&*source);
                watch.poll();
                let polls: Vec<usize> = source.disks.iter().map(|disk| disk.1.load(Ordering::Relaxed)).collect();
                assert_eq!(polls[..IN_USE], [round; IN_USE]);
                let unused = &polls[IN_USE..];
                assert_eq!(unused.iter().sum::<usize>(), round * UNUSED_POLLS);
                // In turns: the same number for each, or one more.
                assert!(unused.iter().max().unwrap() - unused.iter().min().unwrap() <= 1, "{unused:?}");
            }
            assert_eq!(source.listed.load(Ordering::Relaxed), listed, "the lists are read when they may have changed");
        }
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
