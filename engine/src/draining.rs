//! A queue on its way out.

use std::marker::PhantomData;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use crate::counters::QueueReport;
use crate::engine::WorkerGone;
use crate::mailbox::Mailbox;
use crate::worker::Leaving;

/// A queue that was taken back.
#[derive(Clone, Debug)]
pub struct Detached<P> {
    /// Where a new owner resumes.
    pub position: P,
    /// What it counted.
    pub report: QueueReport,
}

/// A queue that takes no more requests and leaves its worker when none is in flight. Dropping this does not keep it from leaving.
#[derive(Debug)]
#[must_use = "the queue may be in use until `wait` says that it has left"]
pub struct Draining<P> {
    pub(crate) left: Receiver<Leaving>,
    pub(crate) mailbox: Mailbox,
    pub(crate) slot: u16,
    pub(crate) generation: u32,
    pub(crate) position: PhantomData<fn() -> P>,
}

impl<P: Send + 'static> Draining<P> {
    /// Waits until the queue has left, at most for `time`. `None`: requests are still in flight.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn wait(&mut self, time: Duration) -> Result<Option<Detached<P>>, WorkerGone> {
        match self.left.recv_timeout(time) {
            Ok(leaving) => {
                let position = leaving.position.downcast::<P>().map_err(|_| WorkerGone)?;
                Ok(Some(Detached { position: *position, report: leaving.report }))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(WorkerGone),
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
