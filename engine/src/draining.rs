//! A queue on its way out.

use std::marker::PhantomData;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::counters::QueueStats;
use crate::engine::WorkerGone;
use crate::mailbox::Mailbox;
use crate::worker::Leaving;

/// A queue that was taken back.
#[derive(Clone, Debug)]
pub struct Detached<P> {
    /// Where a new owner resumes.
    pub position: P,
    /// What it counted.
    pub report: QueueStats,
}

/// How often parked requests are looked for: what is with the storage may fail, and park, at any time.
const LOOK: Duration = Duration::from_millis(20);

/// How often it is asked until when to wait, and how often it is told that a queue still waits for storage.
const LOOK_FOR_END: Duration = Duration::from_millis(100);
const REPORT: Duration = Duration::from_secs(5);

/// Takes out of a queue what is parked at stopped disks.
pub(crate) type DropParked = Box<dyn FnMut(&Mailbox) -> Result<(), WorkerGone> + Send>;

/// A queue that takes no more requests and leaves its worker when none is in flight. Dropping this does not keep it from leaving.
#[must_use = "the queue may be in use until `wait` says that it has left"]
pub struct Draining<P> {
    pub(crate) left: Receiver<Leaving>,
    pub(crate) mailbox: Mailbox,
    pub(crate) slot: u16,
    pub(crate) generation: u32,
    /// Where parked requests are left unanswered.
    pub(crate) drop_parked: Option<DropParked>,
    pub(crate) position: PhantomData<fn() -> P>,
}

impl<P: Send + 'static> Draining<P> {
    /// Waits until the queue has left, at most for `time`. `None`: requests are still in flight.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn wait(&mut self, time: Duration) -> Result<Option<Detached<P>>, WorkerGone> {
        let end = Instant::now() + time;
        loop {
            let mut rest = end.saturating_duration_since(Instant::now());
            if let Some(drop_parked) = &mut self.drop_parked {
                drop_parked(&self.mailbox)?;
                rest = rest.min(LOOK);
            }
            match self.left.recv_timeout(rest) {
                Ok(leaving) => {
                    return leaving.detached().map(Some);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= end => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(WorkerGone),
            }
        }
    }

    /// Waits until the queue has left, once `end` says until when then at most until that. `None`: requests are still in flight. `waiting` is
    /// told every few seconds how long that takes.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn wait_until(
        &mut self,
        end: impl Fn() -> Option<Instant>,
        mut waiting: impl FnMut(Duration),
    ) -> Result<Option<Detached<P>>, WorkerGone> {
        let since = Instant::now();
        let mut report = since + REPORT;
        loop {
            if let Some(left) = self.wait(LOOK_FOR_END)? {
                return Ok(Some(left));
            }
            let now = Instant::now();
            if now >= report {
                report = now + REPORT;
                waiting(now - since);
            }
            if end().is_some_and(|end| now >= end) {
                return Ok(None);
            }
        }
    }

    /// Leaves the requests in flight unanswered: whatever becomes of them, nothing more is written to the guest's rings for this
    /// queue. What it holds is kept until the process ends, which is when this is for: storage that hangs, and a queue that its
    /// next owner takes up with these requests. Nothing happens when the queue has left.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn freeze(self) -> Result<(), WorkerGone> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox.ask(move |worker| worker.freeze(slot, generation))
    }
}

impl<P> std::fmt::Debug for Draining<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Draining").field("slot", &self.slot).finish_non_exhaustive()
    }
}
