//! Moving a queue from one worker to another while its guest uses it.
//!
//! The queue is drained at its worker, taken off it as a [`QueueState`], and attached to another worker. The guest sees a pause as long as
//! its requests in flight. The queue keeps its ring position, its counters and its waker, which is redirected.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use mqblk_core::GuestQueue;
use mqblk_uring::{Kick, UringContext};

use crate::attach_error::{AttachError, WorkerError};
use crate::attached_disks::AttachedDisks;
use crate::engine::{Engine, QueueHandle};
use crate::mailbox::Waker;
use crate::plug::Merges;
use crate::poll_list::Phase;
use crate::queue_options::QueueDisk;
use crate::runner::{IdleQueue, QueueRunner};
use crate::worker::{AttachedQueue, DetachFn, LeavingQueue, OnBroken, Worker};

/// A queue that no worker serves: its position, its counters, its disks, its kick and its waker, and in `carried` what it takes from one
/// worker's context to another's, such as its guest memory. Dropping it ends the queue.
pub struct QueueState<Q, C> {
    idle: IdleQueue<Q>,
    carried: C,
    disks: Vec<QueueDisk>,
    kick: Option<Kick>,
    phase: Phase,
    on_broken: Option<OnBroken>,
    detach: DetachFn,
    waker: Arc<Waker>,
    merges: Merges,
}

impl<Q, C> std::fmt::Debug for QueueState<Q, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueState")
            .field("phase", &self.phase)
            .field("disks", &self.disks.len())
            .finish_non_exhaustive()
    }
}

impl<Q: GuestQueue, C> QueueState<Q, C> {
    /// Returns where a new owner resumes.
    pub fn position(&self) -> Q::Position {
        self.idle.queue.position()
    }
}

/// The result of taking a queue off its worker.
#[derive(Debug)]
pub enum Extracted<Q, C> {
    /// No worker serves it any more.
    Idle(Box<QueueState<Q, C>>),
    /// Requests were in flight for longer than the time-out, such as those parked at a stopped disk: its worker serves it on.
    Busy(QueueHandle<Q>),
}

/// The result of moving a queue.
#[derive(Debug)]
pub enum MoveResult<Q, C> {
    /// The other worker serves it.
    Moved(QueueHandle<Q>),
    /// Requests were in flight for longer than the time-out: its worker serves it on.
    Busy(QueueHandle<Q>),
    /// The other worker refused it: its former worker serves it again.
    Refused(QueueHandle<Q>, AttachError),
    /// Both workers refused it. Nobody serves it.
    Stranded(Box<QueueState<Q, C>>, AttachError),
}

impl<Q> std::fmt::Debug for QueueHandle<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueHandle").field("worker", &self.worker).field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl<Q> QueueHandle<Q>
where
    Q: GuestQueue<Context = UringContext> + Send + 'static,
    Q::Position: Send + 'static,
{
    /// Takes the queue off its worker when none of its requests is in flight. `leave` runs on the worker's thread: it releases what the
    /// queue has of the worker's context, and returns what the queue needs in another one.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn extract<C: Send + 'static>(
        self,
        timeout: Duration,
        leave: impl FnOnce(&mut Q, &mut UringContext) -> C + Send + 'static,
    ) -> Result<Extracted<Q, C>, WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        let (sender, receiver) = sync_channel(1);
        let take = move |leaving: LeavingQueue, context: &mut UringContext| {
            // The receiver waits until the move is cancelled.
            let _ = sender.send(Box::new(QueueState::new(leaving, |queue| leave(queue, context))));
        };
        self.mailbox.send(Box::new(move |worker| worker.begin_move(slot, generation, Box::new(take))))?;
        match receiver.recv_timeout(timeout) {
            Ok(state) => return Ok(Extracted::Idle(state)),
            Err(RecvTimeoutError::Disconnected) => return Err(WorkerError::Ended),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // Again until the worker has done it: before, nobody knows which worker the queue is at.
        loop {
            match self.mailbox.call(move |worker| worker.cancel_move(slot, generation)) {
                Err(WorkerError::Unresponsive { .. }) => {}
                cancelled => break cancelled?,
            }
        }
        // It may have left before the cancellation.
        Ok(match receiver.try_recv() {
            Ok(state) => Extracted::Idle(state),
            Err(_) => Extracted::Busy(self),
        })
    }

    /// Moves the queue to `worker` (modulo their number). `leave` is as for [`extract`](Self::extract), `enter` as for
    /// [`Engine::insert`].
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn move_to<C: Send + 'static>(
        self,
        engine: &Engine,
        worker: usize,
        timeout: Duration,
        leave: impl FnOnce(&mut Q, &mut UringContext) -> C + Send + 'static,
        enter: impl Fn(&mut Q, &mut UringContext, &C) -> Result<(), String> + Clone + Send + 'static,
    ) -> Result<MoveResult<Q, C>, WorkerError> {
        let former = self.worker as usize;
        let state = match self.extract(timeout, leave)? {
            Extracted::Idle(state) => state,
            Extracted::Busy(handle) => return Ok(MoveResult::Busy(handle)),
        };
        let (state, refused) = match engine.insert(worker, state, enter.clone())? {
            Ok(handle) => return Ok(MoveResult::Moved(handle)),
            Err(refused) => refused,
        };
        Ok(match engine.insert(former, state, enter)? {
            Ok(handle) => MoveResult::Refused(handle, refused),
            Err((state, _)) => MoveResult::Stranded(state, refused),
        })
    }
}

/// What [`Engine::insert`] returns: the queue's handle, or the queue and why the worker refused it.
pub type Inserted<Q, C> = Result<QueueHandle<Q>, (Box<QueueState<Q, C>>, AttachError)>;

impl Engine {
    /// Attaches a queue that was taken off a worker to worker `worker` (modulo their number). `enter` runs on the worker's thread: it takes
    /// what the queue needs of the worker's context. When it fails it has taken nothing.
    ///
    /// # Errors
    /// When the worker has ended; the queue has ended with it.
    pub fn insert<Q, C>(
        &self,
        worker: usize,
        state: Box<QueueState<Q, C>>,
        enter: impl FnOnce(&mut Q, &mut UringContext, &C) -> Result<(), String> + Send + 'static,
    ) -> Result<Inserted<Q, C>, WorkerError>
    where
        Q: GuestQueue<Context = UringContext> + Send + 'static,
        Q::Position: Send + 'static,
        C: Send + 'static,
    {
        let _attaching = self.worker_list().begin_attach();
        let (number, mailbox) = self.worker_list().mailbox(worker);
        let inserted = mailbox.call(move |worker| state.insert(worker, enter))?;
        Ok(inserted.map(|(slot, generation)| QueueHandle {
            mailbox,
            worker: number,
            slot,
            generation,
            _queue: PhantomData,
        }))
    }
}

impl<Q, C> QueueState<Q, C>
where
    Q: GuestQueue<Context = UringContext> + 'static,
{
    fn new(leaving: LeavingQueue, leave: impl FnOnce(&mut Q) -> C) -> QueueState<Q, C> {
        let LeavingQueue { runner, disks, kick, phase, on_broken, detach, waker, merges } = leaving;
        let runner = runner.into_any().downcast::<QueueRunner<Q>>();
        let mut idle = runner.expect("a queue keeps the type it was attached with").into_idle();
        let carried = leave(&mut idle.queue);
        QueueState { idle, carried, disks, kick, phase, on_broken, detach, waker, merges }
    }

    fn insert(
        mut self: Box<Self>,
        worker: &mut Worker,
        enter: impl FnOnce(&mut Q, &mut UringContext, &C) -> Result<(), String>,
    ) -> Result<(u16, u32), (Box<Self>, AttachError)> {
        if !worker.has_free_slot() {
            let why = "the worker serves as many queues as it can".to_owned();
            return Err((self, AttachError::Queue(why)));
        }
        let mut disks = AttachedDisks::default();
        let opened = self.disks.iter().try_for_each(|disk| disks.open(&mut worker.context, &mut worker.channels, disk));
        let entered = opened
            .and_then(|()| enter(&mut self.idle.queue, &mut worker.context, &self.carried).map_err(AttachError::Queue));
        if let Err(error) = entered {
            disks.close_all(&mut worker.context, &mut worker.channels);
            return Err((self, error));
        }
        let (slot, generation) = worker.free_slot();
        let QueueState { idle, kick, phase, on_broken, detach, waker, merges, .. } = *self;
        worker.channels.set_merges(slot, merges);
        worker.mailbox.redirect(&waker, slot, generation);
        let runner = Box::new(QueueRunner::from_idle(idle, worker.clock.now()));
        let (watch, dirty, frozen, on_drained) = (generation, false, false, None);
        let attached = AttachedQueue {
            runner,
            disks,
            kick,
            generation,
            watch,
            dirty,
            frozen,
            on_broken,
            detach,
            on_drained,
            waker,
        };
        worker.insert(slot, phase, attached);
        // A wake may have reached its former worker after it had left.
        worker.woken(slot, generation);
        Ok((slot, generation))
    }
}

#[cfg(test)]
mod tests;
