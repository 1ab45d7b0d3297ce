//! The disks of a device, which can be added and removed while a frontend is connected.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use mqblk_core::DiskSlot;
use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex};
use mqblk_engine::{
    AttachError, ClosingDisk, QueueDisk, QueueMove, QueuePolicy, QueueSettings, SharedQueueSettings, WorkerError,
};

/// Longest wait of the close of an unused disk for a worker.
const UNUSED_CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait of a change of settings for the session.
const SETTING_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of the checks while a disk that is in use is closed.
const CLOSE_CHECK: Duration = Duration::from_secs(1);

/// The queues of a session, as other threads control them.
pub(crate) trait SessionQueues: Send {
    /// Opens a disk on all queues.
    fn open_disk(&mut self, disk: &QueueDisk) -> Result<(), AttachError>;
    /// Begins to close a disk on all queues.
    fn begin_close_disk(&mut self, slot: DiskSlot) -> Vec<ClosingDisk>;
    /// Ends the closing of a disk: no queue has a request in flight there.
    fn end_close_disk(&mut self, slot: DiskSlot);
    /// Updates a disk's size on all queues.
    fn refresh_disk(&mut self, slot: DiskSlot);
    /// Moves a queue to another worker, unless its requests in flight take longer.
    fn move_queue(&mut self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String>;
    /// Changes the polling and the coalescing of the request queues.
    fn set_policy(&mut self, policy: QueuePolicy) -> Result<(), WorkerError>;
    /// Starts to drain all queues.
    fn begin_drain(&mut self);
    /// As [`begin_drain`](Self::begin_drain), if another process or none serves the queues next: their requests do not
    /// wait for limits.
    fn begin_end(&mut self);
    /// Waits until the draining queues have no request in flight, until `end` at most. Returns true if none is left.
    fn wait_drained(&mut self, end: Option<Instant>) -> bool;
    /// Stops waiting for the draining queues: their requests in flight never complete.
    fn freeze(&mut self);
    /// As [`freeze`](Self::freeze), if the in-flight region has the requests of all queues.
    fn freeze_recorded(&mut self) -> Result<(), String>;
    /// Returns the positions of the drained queues, for another process.
    fn save_drained(&mut self) -> Result<String, String>;
    /// Starts the drained queues again. Returns false if the frontend must connect again.
    fn resume(&mut self) -> bool;
}

/// A session as threads other than its control thread see it.
///
/// The crate `vhost` locks it too, so it is a mutex of the standard library: [`lock_session`].
pub(crate) type SharedSession = Arc<Mutex<dyn SessionQueues>>;

/// Locks a session.
pub(crate) fn lock_session<T: ?Sized>(session: &Mutex<T>) -> RankedGuard<'_, T> {
    LockRank::Session.lock(session)
}

/// Locks the current session, if there is one. `None`: it is busy until `deadline`.
fn lock_current(
    current: Option<&SharedSession>,
    deadline: Instant,
) -> Option<Option<RankedGuard<'_, dyn SessionQueues + 'static>>> {
    match current {
        Some(session) => LockRank::Session.lock_until(session, deadline).map(Some),
        None => Some(None),
    }
}

/// The disks of a device, the settings of its queues, and the session that uses them.
pub(crate) struct DeviceDisks {
    list: RankedMutex<Vec<QueueDisk>>,
    session: RankedMutex<Option<SharedSession>>,
    /// Disconnected sessions with requests in flight: they still use the disks.
    draining_sessions: RankedMutex<usize>,
    drained: Condvar,
    queues: SharedQueueSettings,
}

impl DeviceDisks {
    pub(crate) fn new(list: Vec<QueueDisk>, queues: QueueSettings) -> DeviceDisks {
        let queues = SharedQueueSettings::new(queues);
        DeviceDisks {
            list: RankedMutex::leaf(list),
            session: RankedMutex::new(LockRank::DeviceSession, None),
            draining_sessions: RankedMutex::leaf(0),
            drained: Condvar::new(),
            queues,
        }
    }

    /// Returns the settings of its queues.
    pub(crate) fn queues(&self) -> &SharedQueueSettings {
        &self.queues
    }

    /// Returns the current disks.
    pub(crate) fn list(&self) -> Vec<QueueDisk> {
        self.list.lock().clone()
    }

    /// Sets the current session.
    pub(crate) fn set_session(&self, session: Option<SharedSession>) {
        *self.session.lock() = session;
    }

    /// Detaches the current session, which has disconnected and drains: it gets no further disks.
    pub(crate) fn begin_drain(&self) {
        *self.draining_sessions.lock() += 1;
        *self.session.lock() = None;
    }

    /// Ends a drain: the session has no request in flight.
    pub(crate) fn end_drain(&self) {
        *self.draining_sessions.lock() -= 1;
        self.drained.notify_all();
    }

    /// Returns true while sessions of earlier connections have requests in flight.
    pub(crate) fn is_draining(&self) -> bool {
        *self.draining_sessions.lock() > 0
    }

    pub(crate) fn open(&self, disk: QueueDisk) -> Result<(), AttachError> {
        let current = self.session.lock();
        // Locked until the disk is in the list: a queue that starts in between would not have it.
        let mut session = current.as_ref().map(|session| lock_session(session));
        if let Some(session) = &mut session
            && let Err(error) = session.open_disk(&disk)
        {
            let closing = session.begin_close_disk(disk.slot);
            // The slot was free, so that there is no request to wait for.
            closing.iter().for_each(|disk| _ = disk.wait(UNUSED_CLOSE_TIMEOUT));
            session.end_close_disk(disk.slot);
            return Err(error);
        }
        self.list.lock().push(disk);
        Ok(())
    }

    pub(crate) fn close(&self, slot: DiskSlot) {
        let current = self.session.lock();
        // Locked until the disk is off the list: a queue that starts in between would have it.
        let mut session = current.as_ref().map(|session| lock_session(session));
        self.list.lock().retain(|disk| disk.slot != slot);
        let closing = session.as_mut().map_or_else(Vec::new, |session| session.begin_close_disk(slot));
        drop(session);
        let left = current.clone();
        drop(current);
        // Without a lock: storage may take any time, and the frontend's messages must be answered.
        closing.iter().for_each(|disk| while !disk.wait(CLOSE_CHECK) {});
        left.iter().for_each(|session| lock_session(session).end_close_disk(slot));
        let draining = self.draining_sessions.lock();
        drop(draining.wait_while(&self.drained, |count| *count > 0));
    }

    pub(crate) fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        let deadline = Instant::now() + timeout;
        let Some(current) = self.session.lock_until(deadline) else { return Ok(QueueMove::Busy) };
        // Locked until the worker is recorded: a queue that starts in between would begin at the previous one. A
        // message of the frontend that waits for storage also holds the session.
        let Some(mut session) = lock_current(current.as_ref(), deadline) else { return Ok(QueueMove::Busy) };
        let timeout = deadline.saturating_duration_since(Instant::now());
        let moved =
            session.as_mut().map_or(Ok(QueueMove::AtStart), |session| session.move_queue(queue, worker, timeout))?;
        if moved != QueueMove::Busy {
            self.queues.set_worker(queue, worker);
        }
        Ok(moved)
    }

    pub(crate) fn set_policy(&self, policy: QueuePolicy) -> Result<(), String> {
        let busy = || {
            let seconds = SETTING_TIMEOUT.as_secs();
            format!("a message of its frontend waits for storage for more than {seconds} s; try again")
        };
        let deadline = Instant::now() + SETTING_TIMEOUT;
        // Locked, as while a queue moves.
        let current = self.session.lock_until(deadline).ok_or_else(busy)?;
        let mut session = lock_current(current.as_ref(), deadline).ok_or_else(busy)?;
        self.queues.set_policy(policy);
        let set = session.as_mut().map_or(Ok(()), |session| session.set_policy(policy));
        set.map_err(|error| error.to_string())
    }

    pub(crate) fn refresh(&self, slot: DiskSlot) {
        if let Some(session) = &*self.session.lock() {
            lock_session(session).refresh_disk(slot);
        }
    }
}
