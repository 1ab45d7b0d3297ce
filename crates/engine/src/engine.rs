//! Starts workers, attaches queues to them and detaches them.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use mqblk_core::{DiskSlot, GuestQueue, Wake};
use mqblk_uring::{Kick, UringContext, UringOptions};

use crate::attach_error::{AttachError, WorkerError};
use crate::counters::{QueueId, WorkerStats};
use crate::draining::{ClosingDisk, Draining};
use crate::mailbox::Mailbox;
use crate::options::QueuePolicy;
use crate::queue_options::{QueueDisk, QueueOptions};
use crate::runner::QueueRunner;
use crate::worker::{LeftQueue, Worker};
use crate::workers::{RemoveWorkerError, WorkerList};

/// The number of workers, their CPUs and their sizes.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Worker threads, at least 1.
    pub workers: usize,
    /// CPU numbers; worker `n` is pinned to entry `n` modulo the list's length. Empty: not pinned.
    pub pin: Vec<usize>,
    /// Sizes of each worker's tables.
    pub context: UringOptions,
}

/// The worker threads.
pub struct Engine {
    workers: Arc<WorkerList>,
    context: UringOptions,
}

/// A handle to a queue that a worker serves.
///
/// Dropping the handle does not stop the queue; [`drain`](Self::drain) does.
pub struct QueueHandle<Q> {
    pub(crate) mailbox: Mailbox<Worker>,
    pub(crate) worker: u32,
    pub(crate) slot: u16,
    pub(crate) generation: u32,
    pub(crate) _queue: PhantomData<fn(Q)>,
}

impl Engine {
    /// Starts the workers.
    ///
    /// # Errors
    /// When a thread or its io_uring cannot be created; the text names it.
    pub fn start(options: &EngineOptions) -> std::io::Result<Engine> {
        let engine = Engine { workers: Arc::default(), context: options.context };
        for number in 0..options.workers.max(1) {
            let cpu = (!options.pin.is_empty()).then(|| options.pin[number % options.pin.len()]);
            engine.add_worker(cpu)?;
        }
        Ok(engine)
    }

    /// Returns the number of worker threads.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Returns the CPU that each worker is pinned to.
    pub fn cpus(&self) -> Vec<Option<usize>> {
        self.workers.cpus()
    }

    /// Starts one more worker, pinned to `cpu` if given. Returns its number.
    ///
    /// # Errors
    /// When a thread or its io_uring cannot be created, or it cannot be pinned; the text names it.
    pub fn add_worker(&self, cpu: Option<usize>) -> std::io::Result<usize> {
        self.workers.add(cpu, self.context)
    }

    /// Ends the last worker, which serves no queue. Returns its number.
    ///
    /// # Errors
    /// When it serves one, is the only one, or does not respond: it continues then.
    pub fn remove_last_worker(&self) -> Result<usize, RemoveWorkerError> {
        self.workers.remove_last()
    }

    /// Attaches a queue to worker `worker` (modulo their number). `make` builds it on the worker's thread, with the
    /// queue's waker; then it [enters](GuestQueue::enter) the worker's context.
    ///
    /// # Errors
    /// When the disk cannot be opened on the worker, `make` or the queue's entry fails, or the worker has ended.
    pub fn attach<Q>(
        &self,
        worker: usize,
        options: QueueOptions,
        make: impl FnOnce(&Arc<dyn Wake>) -> Result<Q, String> + Send + 'static,
    ) -> Result<QueueHandle<Q>, AttachError>
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let _attaching = self.workers.begin_attach();
        let (number, mailbox) = self.workers.mailbox(worker);
        let slot_and_generation = mailbox.call(move |worker| worker.attach_queue(options, make))?;
        let (slot, generation) = slot_and_generation?;
        Ok(QueueHandle { mailbox, worker: number, slot, generation, _queue: PhantomData })
    }

    /// Returns the workers.
    pub(crate) fn worker_list(&self) -> &Arc<WorkerList> {
        &self.workers
    }

    /// Returns the workers' mailboxes.
    pub(crate) fn mailboxes(&self) -> Vec<Mailbox<Worker>> {
        self.workers.mailboxes()
    }

    /// Makes all workers use the current limits of disks and groups, and the disks' [plug
    /// options](crate::DiskHealth::set_plug). All workers use them when this returns.
    ///
    /// # Errors
    /// When a worker has ended, or does not respond: it uses them when it does. The others use them already.
    pub fn disks_changed(&self) -> Result<(), WorkerError> {
        let reload = |mailbox: &Mailbox<Worker>| mailbox.begin_send(|worker| worker.channels.reload_settings());
        // All are notified before waiting for the first.
        let sent: Vec<_> = self.mailboxes().iter().map(reload).collect();
        sent.into_iter().try_for_each(|sent| sent?.wait())
    }

    /// Returns the statistics of all workers and their queues, each read between two turns of its worker.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn stats(&self) -> Result<Vec<WorkerStats>, WorkerError> {
        let mut stats = self.ask_all(Worker::stats)?;
        stats.iter_mut().for_each(|stats| stats.queues.sort_unstable_by_key(|(id, _)| *id));
        Ok(stats)
    }

    /// Queries each worker, with its number. All are queried before waiting for the first.
    fn ask_all<R: Send + 'static>(&self, ask: fn(&Worker, u32) -> R) -> Result<Vec<R>, WorkerError> {
        let begin = |(number, mailbox): (u32, &Mailbox<Worker>)| mailbox.begin_call(move |worker| ask(worker, number));
        let asked: Vec<_> = (0..).zip(&self.mailboxes()).map(begin).collect();
        asked.into_iter().map(|call| call?.wait()).collect()
    }
}

impl<Q> QueueHandle<Q>
where
    Q: GuestQueue<Context = UringContext>,
{
    /// Runs `visit` on the queue, on its worker's thread, between two turns.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn visit<R: Send + 'static>(
        &self,
        visit: impl FnOnce(&mut Q, &mut UringContext) -> R + Send + 'static,
    ) -> Result<R, WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox
            .call(move |worker| {
                let (attached, context) = worker.find(slot, generation)?;
                let runner = attached.runner.as_any().downcast_mut::<QueueRunner<Q>>()?;
                Some(visit(&mut runner.queue, context))
            })?
            .ok_or(WorkerError::Ended)
    }

    /// Returns the queue's identity in [`Engine::stats`].
    pub fn id(&self) -> QueueId {
        QueueId { worker: self.worker, generation: self.generation }
    }

    /// Starts or stops pulling from the queue. Requests in flight complete as usual.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn set_enabled(&self, enabled: bool) -> Result<(), WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox.call(move |worker| worker.set_enabled(slot, generation, enabled))
    }

    /// Changes how the queue is polled, and how its calls are deferred. A queue without a kick stays polled.
    ///
    /// # Errors
    /// When the worker has ended, or does not respond: it uses the new ones when it does.
    pub fn set_policy(&self, policy: QueuePolicy) -> Result<(), WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox.send_and_wait(move |worker| worker.set_policy(slot, generation, policy))
    }

    /// Replaces the queue's kick descriptor.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn set_kick(&self, kick: Option<Kick>) -> Result<(), WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox.call(move |worker| worker.set_kick(slot, generation, kick))
    }

    /// Opens one more disk for the queue's requests.
    ///
    /// # Errors
    /// When its slot is taken, the disk cannot be opened on the queue's worker, or the worker has ended.
    pub fn open_disk(&self, disk: QueueDisk) -> Result<(), AttachError> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox.call(move |worker| worker.open_disk(slot, generation, &disk))?
    }

    /// Begins to close a disk for the queue. New requests for it end with [`Outcome::Aborted`](mqblk_core::Outcome).
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn begin_close_disk(&self, disk: DiskSlot) -> Result<ClosingDisk, WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        let (done, left) = sync_channel(1);
        self.mailbox.send(Box::new(move |worker| worker.close_disk(slot, generation, disk, done)))?;
        Ok(ClosingDisk(left))
    }

    /// Makes the queue use a disk's new size.
    ///
    /// # Errors
    /// When the worker has ended, or does not respond: the queue uses the new size when it does.
    pub fn refresh_disk(&self, disk: DiskSlot) -> Result<(), WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        self.mailbox.send_and_wait(move |worker| worker.refresh_disk(slot, generation, disk))
    }

    /// Takes no more requests off the queue and detaches it when none is in flight: then neither the daemon nor the
    /// kernel accesses the guest's memory for it. Completions are published, and the guest is called for them, before.
    /// Requests parked at a stopped disk fail. Throttled ones are served as their limit allows
    /// ([`Draining::pass_throttled`] does not wait for it); [`drain_unanswered`](Self::drain_unanswered) abandons both
    /// instead.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn drain(self) -> Result<Draining<Q::Position>, WorkerError> {
        self.begin_drain(false)
    }

    /// Drains as [`drain`](Self::drain) does, but [abandons](GuestQueue::abandon) parked and throttled requests instead
    /// of failing them or waiting. For an interface that records its requests in flight, and a next daemon that replays
    /// them.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn drain_unanswered(self) -> Result<Draining<Q::Position>, WorkerError> {
        self.begin_drain(true)
    }

    fn begin_drain(self, abandons: bool) -> Result<Draining<Q::Position>, WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        let (done, left) = sync_channel::<LeftQueue>(1);
        self.mailbox.send(Box::new(move |worker| match abandons {
            true => worker.drain_keeping_parked(slot, generation, done),
            false => worker.drain(slot, generation, done),
        }))?;
        Ok(Draining { left, mailbox: self.mailbox, slot, generation, abandons, position: PhantomData })
    }
}
