//! Moving a queue from one worker to another while its guest uses it.
//!
//! The queue is drained at its worker, taken off it as a [`QueueState`], and attached to another worker. The guest sees
//! a pause as long as its requests in flight. The queue keeps its ring position, its counters and its waker, which is
//! redirected.

use std::marker::PhantomData;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use mqblk_core::GuestQueue;
use mqblk_uring::UringContext;

use crate::attach_error::{AttachError, WorkerError};
use crate::engine::{Engine, QueueHandle};
use crate::runner::{IdleQueue, QueueRunner};
use crate::worker::{AttachedQueue, LeavingQueue, MovingParts, Worker};

/// A queue that no worker serves: its position, its counters, its disks, its kick and its waker. Dropping it ends the
/// queue.
pub struct QueueState<Q> {
    idle: IdleQueue<Q>,
    parts: MovingParts,
}

impl<Q> std::fmt::Debug for QueueState<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueState")
            .field("phase", &self.parts.phase)
            .field("disks", &self.parts.disks.len())
            .finish_non_exhaustive()
    }
}

impl<Q: GuestQueue> QueueState<Q> {
    /// Returns the position at which a new owner resumes.
    pub fn position(&self) -> Q::Position {
        self.idle.queue.position()
    }
}

/// The result of moving a queue.
#[derive(Debug)]
pub enum MoveResult<Q> {
    /// The other worker serves it.
    Moved(QueueHandle<Q>),
    /// Requests (for example parked ones) were in flight for longer than the time-out: its worker continues to serve
    /// it.
    Busy(QueueHandle<Q>),
    /// The other worker refused it: its former worker serves it again.
    Refused(QueueHandle<Q>, AttachError),
    /// Both workers refused it. No worker serves it.
    Stranded(Box<QueueState<Q>>, AttachError),
}

impl<Q> std::fmt::Debug for QueueHandle<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueHandle").field("worker", &self.worker).field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl<Q> QueueHandle<Q>
where
    Q: GuestQueue<Context = UringContext>,
{
    /// Takes the queue off its worker and its context when none of its requests is in flight. Returns the handle if
    /// requests were in flight for longer than `timeout`.
    fn extract(self, timeout: Duration) -> Result<Result<Box<QueueState<Q>>, Self>, WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        let (sender, receiver) = sync_channel(1);
        self.mailbox.send(Box::new(move |worker| worker.begin_move(slot, generation, sender)))?;
        match receiver.recv_timeout(timeout) {
            Ok(left) => return Ok(Ok(QueueState::new(left))),
            Err(RecvTimeoutError::Disconnected) => return Err(WorkerError::Ended),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // Repeated until the worker has run it: before, the queue's worker is unknown.
        loop {
            match self.mailbox.call(move |worker| worker.cancel_move(slot, generation)) {
                Err(WorkerError::Unresponsive { .. }) => {}
                cancelled => break cancelled?,
            }
        }
        // It may have left before the cancellation.
        Ok(receiver.try_recv().map(QueueState::new).map_err(|_| self))
    }

    /// Moves the queue to `worker` (modulo their number), unless its requests in flight take longer than `timeout`.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn move_to(self, engine: &Engine, worker: usize, timeout: Duration) -> Result<MoveResult<Q>, WorkerError> {
        let former = self.worker as usize;
        let state = match self.extract(timeout)? {
            Ok(state) => state,
            Err(handle) => return Ok(MoveResult::Busy(handle)),
        };
        let (state, refused) = match engine.insert(worker, state)? {
            Ok(handle) => return Ok(MoveResult::Moved(handle)),
            Err(refused) => refused,
        };
        Ok(match engine.insert(former, state)? {
            Ok(handle) => MoveResult::Refused(handle, refused),
            Err((state, _)) => MoveResult::Stranded(state, refused),
        })
    }
}

/// The handle of a queue, or the queue and why the worker refused it.
type Inserted<Q> = Result<QueueHandle<Q>, (Box<QueueState<Q>>, AttachError)>;

impl Engine {
    /// Attaches a queue that was taken off a worker to worker `worker` (modulo their number), whose context it enters.
    /// When the worker has ended, the queue has ended with it.
    fn insert<Q>(&self, worker: usize, state: Box<QueueState<Q>>) -> Result<Inserted<Q>, WorkerError>
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let _attaching = self.worker_list().begin_attach();
        let (number, mailbox) = self.worker_list().mailbox(worker);
        let inserted = mailbox.call(move |worker| state.insert(worker))?;
        Ok(inserted.map(|(slot, generation)| QueueHandle {
            mailbox,
            worker: number,
            slot,
            generation,
            _queue: PhantomData,
        }))
    }
}

impl<Q> QueueState<Q>
where
    Q: GuestQueue<Context = UringContext>,
{
    fn new(left: LeavingQueue) -> Box<QueueState<Q>> {
        let idle = left.idle.downcast::<IdleQueue<Q>>().expect("a queue keeps the type it was attached with");
        Box::new(QueueState { idle: *idle, parts: left.parts })
    }

    fn insert(mut self: Box<Self>, worker: &mut Worker) -> Result<(u16, u32), (Box<Self>, AttachError)> {
        let QueueState { idle, parts } = &mut *self;
        let admitted = worker.admit(&parts.disks, |worker, _, _| idle.queue.enter(&mut worker.context));
        let (slot, generation, disks, ()) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => return Err((self, error)),
        };
        let QueueState { idle, parts: MovingParts { kick, phase, waker, merges, .. } } = *self;
        worker.channels.set_merges(slot, merges);
        worker.mailbox.redirect(&waker, slot, generation);
        let runner = Box::new(QueueRunner::from_idle(idle, worker.clock.now()));
        worker.insert(slot, phase, AttachedQueue::new(runner, disks, kick, generation, waker));
        // A wake may have reached its former worker after it had left.
        worker.woken(slot, generation);
        Ok((slot, generation))
    }
}

#[cfg(test)]
mod tests;
