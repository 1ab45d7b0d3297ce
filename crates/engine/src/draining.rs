//! A queue that is being detached from its worker, and a disk that is being closed for a queue.

use std::marker::PhantomData;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::attach_error::WorkerError;
use crate::mailbox::Mailbox;
use crate::worker::{Detached, LeftQueue, Worker};

/// Interval at which parked and throttled requests are abandoned: requests at the storage may be parked at any time.
const UNSERVED_CHECK: Duration = Duration::from_millis(20);

/// Interval at which the end of the wait is checked, and at which a wait for storage is reported.
const END_CHECK: Duration = Duration::from_millis(100);
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// A queue that takes no more requests and is detached when none is in flight. Dropping this does not stop the drain.
#[must_use = "the queue may be in use until `wait` returns it"]
pub struct Draining<P> {
    pub(crate) left: Receiver<LeftQueue>,
    pub(crate) mailbox: Mailbox<Worker>,
    pub(crate) slot: u16,
    pub(crate) generation: u32,
    /// True if parked and throttled requests are abandoned.
    pub(crate) abandons: bool,
    pub(crate) position: PhantomData<fn() -> P>,
}

impl<P: Send + 'static> Draining<P> {
    /// Waits until the queue is detached, at most for `time`. `None`: requests are still in flight.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn wait(&mut self, time: Duration) -> Result<Option<Detached<P>>, WorkerError> {
        let end = Instant::now() + time;
        loop {
            let mut rest = end.saturating_duration_since(Instant::now());
            if self.abandons {
                let (slot, generation) = (self.slot, self.generation);
                match self.mailbox.call(move |worker| worker.abandon_unserved(slot, generation)) {
                    // Its requests may still be in flight: `left` signals their end.
                    Ok(_) | Err(WorkerError::Unresponsive { .. }) => {}
                    Err(ended) => return Err(ended),
                }
                rest = rest.min(UNSERVED_CHECK);
            }
            match self.left.recv_timeout(rest) {
                Ok(leaving) => {
                    return leaving.detached().map(Some);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= end => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(WorkerError::Ended),
            }
        }
    }

    /// Lets the requests that wait for a limit pass, because the process ends or hands the queue to another one. They
    /// are a debt of the disk's own limits.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn pass_throttled(&self) -> Result<(), WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox.send(Box::new(move |worker| worker.pass_throttled(slot, generation)))
    }

    /// Waits until the queue is detached, or until the time that `end` returns, if any: requests do not wait for limits
    /// after that. `None`: requests are still in flight. Calls `waiting` every few seconds with the time waited so far.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn wait_until(
        &mut self,
        end: impl Fn() -> Option<Instant>,
        mut waiting: impl FnMut(Duration),
    ) -> Result<Option<Detached<P>>, WorkerError> {
        let since = Instant::now();
        let mut next_report = since + LOG_INTERVAL;
        let mut ends = false;
        loop {
            if !ends && end().is_some() {
                ends = true;
                self.pass_throttled()?;
            }
            if let Some(detached) = self.wait(END_CHECK)? {
                return Ok(Some(detached));
            }
            let now = Instant::now();
            if now >= next_report {
                next_report = now + LOG_INTERVAL;
                waiting(now - since);
            }
            if end().is_some_and(|end| now >= end) {
                return Ok(None);
            }
        }
    }

    /// Freezes the queue: nothing more is written to the guest's rings for it, and its requests are
    /// [abandoned](mqblk_core::GuestQueue::abandon) when the storage answers them. It is detached when it has answered
    /// all; requests that are blocked keep it until the process ends. For storage that hangs: whoever serves the ring
    /// next replays these requests. Returns the position; `None` if the queue is already detached.
    ///
    /// # Errors
    /// When the worker has ended, or does not respond: it freezes the queue when it does.
    pub fn freeze(&self) -> Result<Option<P>, WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        let position = self.mailbox.send_and_wait(move |worker| worker.freeze(slot, generation))?;
        Ok(position.and_then(|position| position.downcast().ok()).map(|position| *position))
    }
}

/// A disk that is being closed for a queue.
#[derive(Debug)]
#[must_use = "the queue may use the disk until `wait` returns true"]
pub struct ClosingDisk(pub(crate) Receiver<()>);

impl ClosingDisk {
    /// Waits until none of the queue's requests is in flight at the disk, at most for `time`. Returns false if there
    /// are any.
    pub fn wait(&self, time: Duration) -> bool {
        // A queue without this disk, and one that is detached, drop the sender.
        self.0.recv_timeout(time) != Err(RecvTimeoutError::Timeout)
    }
}

impl<P> std::fmt::Debug for Draining<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Draining").field("slot", &self.slot).finish_non_exhaustive()
    }
}
