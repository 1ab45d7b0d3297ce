//! The disks of a device, which may come and go while a VMM is connected.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mqblk_core::DiskSlot;
use mqblk_engine::{AttachError, QueueDisk};

/// Whoever has queues that use the disks: a session.
pub(crate) trait Holder: Send {
    /// Opens a disk for all of them.
    fn open(&mut self, disk: &QueueDisk) -> Result<(), AttachError>;
    /// Takes it from all of them, and waits until nothing of it is in flight.
    fn close(&mut self, slot: DiskSlot);
    /// Has them all see its new size.
    fn refresh(&mut self, slot: DiskSlot);
    /// Takes no more requests off any of them.
    fn begin_drain(&mut self);
    /// Waits until those that drain have nothing in flight, until `end` at most. Whether that is so.
    fn wait_drained(&mut self, end: Option<Instant>) -> bool;
    /// Leaves the requests in flight of those that drain unanswered.
    fn freeze(&mut self);
}

/// A session, as all but its own messages see it.
pub(crate) type SharedSession = Arc<Mutex<dyn Holder>>;

/// The list, for sessions to come, and the session of now.
///
/// Locks are taken in the order of the fields' use: `holder`, then the session, then `list`.
#[derive(Default)]
pub(crate) struct Disks {
    list: Mutex<Vec<QueueDisk>>,
    holder: Mutex<Option<SharedSession>>,
    /// Sessions whose connection has ended and whose requests have not: a disk is in use by them too.
    draining: Mutex<usize>,
    drained: Condvar,
}

impl Disks {
    pub(crate) fn new(list: Vec<QueueDisk>) -> Disks {
        Disks { list: Mutex::new(list), ..Disks::default() }
    }

    /// All of them, now.
    pub(crate) fn list(&self) -> Vec<QueueDisk> {
        lock(&self.list).clone()
    }

    /// A session begins, or ends.
    pub(crate) fn held_by(&self, holder: Option<SharedSession>) {
        *lock(&self.holder) = holder;
    }

    /// A session's connection has ended: it takes no more disks, and drains.
    pub(crate) fn drain_begins(&self) {
        *lock(&self.draining) += 1;
        *lock(&self.holder) = None;
    }

    /// It has nothing in flight any more.
    pub(crate) fn drain_ended(&self) {
        *lock(&self.draining) -= 1;
        self.drained.notify_all();
    }

    /// Whether sessions of earlier connections have requests in flight.
    pub(crate) fn is_draining(&self) -> bool {
        *lock(&self.draining) > 0
    }

    pub(crate) fn open(&self, disk: QueueDisk) -> Result<(), AttachError> {
        let holder = lock(&self.holder);
        // Held until the disk is in the list: a queue that starts in between would not have it.
        let mut session = holder.as_ref().map(|session| lock(session));
        if let Some(session) = &mut session
            && let Err(error) = session.open(&disk)
        {
            session.close(disk.slot);
            return Err(error);
        }
        lock(&self.list).push(disk);
        Ok(())
    }

    pub(crate) fn close(&self, slot: DiskSlot) {
        let holder = lock(&self.holder);
        let mut session = holder.as_ref().map(|session| lock(session));
        lock(&self.list).retain(|disk| disk.slot != slot);
        if let Some(session) = &mut session {
            session.close(slot);
        }
        drop(session);
        drop(holder);
        let draining = lock(&self.draining);
        drop(self.drained.wait_while(draining, |count| *count > 0));
    }

    pub(crate) fn refresh(&self, slot: DiskSlot) {
        if let Some(session) = &*lock(&self.holder) {
            lock(session).refresh(slot);
        }
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
