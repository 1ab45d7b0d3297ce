//! Locks of control state, taken in one order.
//!
//! A [`RankedMutex`] has a [`LockRank`]. A thread takes locks in ascending rank only, so that no two threads can wait
//! for each other. Ranks above [`LockRank::FIRST_SHORT`] are *short*: nothing that may take long is done under them,
//! and they are not held across a call that queries all guest interfaces ([`assert_unlocked`]). Those below serialize
//! one slow operation each, of one device or one file.
//!
//! Builds with debug assertions check both on every thread, and abort the process with both names if a lock is taken
//! out of order. Release builds check nothing. The order and its reasons: `docs/design/0026-locks.md`.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Interval of the attempts of [`RankedMutex::lock_until`].
const TRY_INTERVAL: Duration = Duration::from_millis(1);

/// The locks of control state, in the order in which a thread takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LockRank {
    /// A controller's guest arrives with its LUNs. Slow: their storage.
    IncomingLuns,
    /// A disk or logical unit is being resized, or mapped. Slow: its storage, and a frontend's reply.
    Resize,
    /// A device receives what another process hands over. Slow: its control thread.
    Standby,
    /// The session that a device's queues belong to. Slow: held with the session.
    DeviceSession,
    /// A session. Slow: a frontend's message that waits for storage.
    Session,
    /// Waiting for a frontend's reply. Slow.
    FrontendExchange,
    /// Attached rings of a Xen disk. Slow: a worker that gives one up.
    XenRings,
    /// Statistics of workers, which several threads share. Slow: the workers.
    SharedStats,
    /// A storage backend is being resized, opened or handed over. Slow.
    Storage,
    /// Writes of a section of the state file, in the order of its changes. Slow: the file.
    SavedSection,
    /// Writing the state file. Slow.
    StateFile,
    /// A request to the broker. Slow: the file that it opens.
    Broker,
    /// Running verbs that exclude others.
    ExclusiveVerbs,
    /// The configuration that the daemon has.
    Configuration,
    /// Ids and sockets that are claimed.
    Names,
    /// The virtio-blk disks.
    DiskTable,
    /// The LUNs of all controllers.
    LunTable,
    /// The controllers.
    Controllers,
    /// Settings that were changed at run time.
    KeptChanges,
    /// The workers of all queues.
    Placement,
    /// The thread of all listening sockets, which is started once.
    EventLoop,
    /// The event loop's watches.
    WatchedDevices,
    /// The thread that serves a device.
    DeviceThread,
    /// No lock is taken under it.
    Leaf,
}

/// Locks a mutex, also after a panic of a thread that held it. Such a panic ends one connection or request, and no
/// mutex guards half-changed data then.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LockRank {
    /// The first rank under which nothing waits.
    pub const FIRST_SHORT: LockRank = LockRank::ExclusiveVerbs;

    #[cfg(any(test, debug_assertions))]
    fn is_short(self) -> bool {
        self >= LockRank::FIRST_SHORT
    }

    /// Locks a mutex of this rank that another crate locks too, so it is not ranked itself.
    pub fn lock<T: ?Sized>(self, mutex: &Mutex<T>) -> RankedGuard<'_, T> {
        let held = self.enter();
        RankedGuard { guard: lock(mutex), held }
    }

    /// As [`lock`](Self::lock), unless another thread holds the mutex until `deadline`.
    pub fn lock_until<T: ?Sized>(self, mutex: &Mutex<T>, deadline: Instant) -> Option<RankedGuard<'_, T>> {
        let held = self.enter();
        loop {
            let guard = match mutex.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(TRY_INTERVAL);
                    continue;
                }
                Err(TryLockError::WouldBlock) => return None,
            };
            return Some(RankedGuard { guard, held });
        }
    }

    /// Records that a lock of this rank is held until the result is dropped, while another crate locks it.
    pub fn enter(self) -> HeldRank {
        check::acquire(self);
        HeldRank { rank: self, _of_this_thread: std::marker::PhantomData }
    }
}

/// A rank that the thread holds, until it is dropped.
#[derive(Debug)]
pub struct HeldRank {
    rank: LockRank,
    _of_this_thread: std::marker::PhantomData<*const ()>,
}

impl Drop for HeldRank {
    fn drop(&mut self) {
        check::release(self.rank);
    }
}

/// A mutex with a rank. A panic of a thread that holds it does not poison it.
#[derive(Debug)]
pub struct RankedMutex<T: ?Sized> {
    rank: LockRank,
    mutex: Mutex<T>,
}

impl<T> RankedMutex<T> {
    /// Creates a mutex.
    pub const fn new(rank: LockRank, value: T) -> RankedMutex<T> {
        RankedMutex { rank, mutex: Mutex::new(value) }
    }

    /// Creates a mutex under which no lock is taken.
    pub const fn leaf(value: T) -> RankedMutex<T> {
        RankedMutex::new(LockRank::Leaf, value)
    }
}

impl<T: ?Sized> RankedMutex<T> {
    /// Locks the mutex.
    pub fn lock(&self) -> RankedGuard<'_, T> {
        self.rank.lock(&self.mutex)
    }

    /// Locks the mutex unless another thread holds it until `deadline`.
    pub fn lock_until(&self, deadline: Instant) -> Option<RankedGuard<'_, T>> {
        self.rank.lock_until(&self.mutex, deadline)
    }
}

/// A locked [`RankedMutex`].
#[derive(Debug)]
pub struct RankedGuard<'a, T: ?Sized> {
    guard: MutexGuard<'a, T>,
    held: HeldRank,
}

impl<'a, T> RankedGuard<'a, T> {
    /// Releases the mutex until `condvar` is notified, for `timeout` at most, and locks it again.
    pub fn wait_timeout(self, condvar: &Condvar, timeout: Duration) -> RankedGuard<'a, T> {
        let RankedGuard { guard, held } = self;
        check::wait(Some(held.rank), "a condition");
        let (guard, _) = condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner);
        RankedGuard { guard, held }
    }

    /// Releases the mutex while `condition` is true, and locks it again. `condvar` is notified when it may have
    /// changed.
    pub fn wait_while(self, condvar: &Condvar, condition: impl FnMut(&mut T) -> bool) -> RankedGuard<'a, T> {
        let RankedGuard { guard, held } = self;
        check::wait(Some(held.rank), "a condition");
        let guard = condvar.wait_while(guard, condition).unwrap_or_else(PoisonError::into_inner);
        RankedGuard { guard, held }
    }
}

impl<T: ?Sized> std::ops::Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: ?Sized> std::ops::DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Checks that the thread, which is about to wait for `what` (storage, a worker, another process), holds no short lock.
pub fn assert_may_wait(what: &'static str) {
    check::wait(None, what);
}

/// Checks that the thread, which is about to query all guest interfaces, holds no lock.
pub fn assert_unlocked() {
    check::unlocked();
}

#[cfg(debug_assertions)]
mod check {
    use std::cell::RefCell;

    use super::LockRank;

    thread_local! {
        static HELD: RefCell<Vec<LockRank>> = const { RefCell::new(Vec::new()) };
    }

    fn with_held(check: impl FnOnce(&mut Vec<LockRank>) -> Result<(), String>) {
        // Locks of destructors that run after the thread's own are not checked.
        let checked = HELD.try_with(|held| check(&mut held.borrow_mut()));
        if let Ok(Err(wrong)) = checked {
            abort(&wrong);
        }
    }

    /// Ends the process: a panic of a thread might go unnoticed.
    fn abort(wrong: &str) -> ! {
        let thread = std::thread::current().name().unwrap_or("unnamed").to_owned();
        let calls = std::backtrace::Backtrace::force_capture();
        // The log may have taken the lock.
        #[allow(clippy::print_stderr)]
        {
            eprintln!("lock order: thread {thread:?} {wrong}\n{calls}");
        }
        std::process::abort()
    }

    pub(super) fn acquire(rank: LockRank) {
        with_held(|held| {
            super::may_acquire(held, rank)?;
            held.push(rank);
            Ok(())
        });
    }

    pub(super) fn release(rank: LockRank) {
        with_held(|held| {
            // Guards need not be dropped in the order of their locks.
            if let Some(at) = held.iter().rposition(|other| *other == rank) {
                held.remove(at);
            }
            Ok(())
        });
    }

    pub(super) fn wait(own: Option<LockRank>, what: &str) {
        with_held(|held| super::may_wait(held, own, what));
    }

    pub(super) fn unlocked() {
        with_held(|held| super::may_ask_all(held));
    }
}

#[cfg(not(debug_assertions))]
mod check {
    use super::LockRank;

    pub(super) fn acquire(_: LockRank) {}
    pub(super) fn release(_: LockRank) {}
    pub(super) fn wait(_: Option<LockRank>, _: &str) {}
    pub(super) fn unlocked() {}
}

#[cfg(any(test, debug_assertions))]
fn may_acquire(held: &[LockRank], rank: LockRank) -> Result<(), String> {
    match held.iter().max() {
        Some(last) if *last >= rank => Err(format!("holds {last:?} and takes {rank:?}, which comes before it")),
        _ => Ok(()),
    }
}

#[cfg(any(test, debug_assertions))]
fn may_wait(held: &[LockRank], own: Option<LockRank>, what: &str) -> Result<(), String> {
    match held.iter().find(|rank| rank.is_short() && Some(**rank) != own) {
        Some(rank) => Err(format!("holds {rank:?} and waits for {what}")),
        None => Ok(()),
    }
}

#[cfg(any(test, debug_assertions))]
fn may_ask_all(held: &[LockRank]) -> Result<(), String> {
    match held.first() {
        Some(rank) => Err(format!("holds {rank:?} and asks all guest interfaces")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_ascending_rank() {
        assert_eq!(may_acquire(&[], LockRank::Leaf), Ok(()));
        assert_eq!(may_acquire(&[LockRank::Names], LockRank::LunTable), Ok(()));
        let wrong = may_acquire(&[LockRank::Resize, LockRank::LunTable], LockRank::Names).unwrap_err();
        assert_eq!(wrong, "holds LunTable and takes Names, which comes before it");
        assert!(may_acquire(&[LockRank::Leaf], LockRank::Leaf).is_err(), "two of a rank have no order");
    }

    #[test]
    fn nothing_waits_under_a_short_lock_and_nothing_asks_all_under_any() {
        assert_eq!(may_wait(&[LockRank::Resize, LockRank::Broker], None, "storage"), Ok(()));
        let wrong = may_wait(&[LockRank::Resize, LockRank::Names], None, "storage").unwrap_err();
        assert_eq!(wrong, "holds Names and waits for storage");
        assert_eq!(may_wait(&[LockRank::LunTable], Some(LockRank::LunTable), "a condition"), Ok(()));
        assert!(may_wait(&[LockRank::Names, LockRank::LunTable], Some(LockRank::LunTable), "a condition").is_err());
        assert!(may_ask_all(&[LockRank::Resize]).is_err() && may_ask_all(&[]).is_ok());
    }

    #[test]
    fn a_mutex_is_released_in_any_order_and_outlives_a_panic() {
        let (names, table) = (RankedMutex::new(LockRank::Names, 1), RankedMutex::new(LockRank::LunTable, 2));
        let (first, second) = (names.lock(), table.lock());
        drop(first);
        // While only the table is held.
        let leaf = RankedMutex::leaf(());
        drop((leaf.lock(), second));
        *names.lock() += 1;
        let panicked = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _guard = names.lock();
                    panic!("under the lock");
                })
                .join()
        });
        assert!(panicked.is_err());
        assert_eq!(*names.lock(), 2);
    }

    #[test]
    fn a_lock_is_given_up_at_its_deadline() {
        let mutex = RankedMutex::leaf(());
        let guard = mutex.lock();
        std::thread::scope(|scope| {
            assert!(scope.spawn(|| mutex.lock_until(Instant::now()).is_none()).join().unwrap());
            let waits = scope.spawn(|| mutex.lock_until(Instant::now() + Duration::from_secs(60)).is_some());
            drop(guard);
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn a_condition_is_waited_for() {
        let (mutex, changed) = (RankedMutex::new(LockRank::LunTable, false), Condvar::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                *mutex.lock() = true;
                changed.notify_all();
            });
            assert!(*mutex.lock().wait_while(&changed, |done| !*done));
        });
        assert!(*mutex.lock().wait_timeout(&changed, Duration::from_millis(1)));
    }
}
