//! Starts workers, attaches queues to them and detaches them.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;
use mqblk_core::thread_role::{ThreadRole, enter};
use mqblk_core::{DiskSlot, GuestQueue, Wake};
use mqblk_uring::{Kick, UringContext, UringOptions};

use crate::attach_error::{AttachError, WorkerError};
use crate::counters::{QueueId, WorkerStats};
use crate::draining::{ClosingDisk, Draining};
use crate::mailbox::Mailbox;
use crate::queue_options::{QueueDisk, QueueOptions};
use crate::runner::QueueRunner;
use crate::worker::{LeftQueue, Worker};

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

struct WorkerThread {
    mailbox: Mailbox<Worker>,
    thread: Option<JoinHandle<()>>,
}

/// How long the workers have to end, and how often that is checked. One that waits in a system call or a page fault is left behind.
const END_TIMEOUT: Duration = Duration::from_secs(5);
const END_CHECK: Duration = Duration::from_millis(1);

/// The worker threads.
pub struct Engine {
    workers: Vec<WorkerThread>,
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
    /// When a thread or its io_uring cannot be created; the text says which.
    pub fn start(options: &EngineOptions) -> std::io::Result<Engine> {
        let mut engine = Engine { workers: Vec::new() };
        for number in 0..options.workers.max(1) {
            let cpu = (!options.pin.is_empty()).then(|| options.pin[number % options.pin.len()]);
            engine.workers.push(spawn_worker(number, cpu, options.context)?);
        }
        Ok(engine)
    }

    /// Returns the number of worker threads.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Attaches a queue to worker `worker` (modulo their number). `make` builds it on the worker's thread, with the worker's context and
    /// the queue's waker. `leave` releases what `make` took of the context, when the queue is detached.
    ///
    /// # Errors
    /// When the disk cannot be opened on the worker, `make` fails, or the worker has ended.
    pub fn attach<Q>(
        &self,
        worker: usize,
        options: QueueOptions,
        make: impl FnOnce(&mut UringContext, &Arc<dyn Wake>) -> Result<Q, String> + Send + 'static,
        leave: impl FnOnce(&mut Q, &mut UringContext) + Send + 'static,
    ) -> Result<QueueHandle<Q>, AttachError>
    where
        Q: GuestQueue<Context = UringContext> + Send + 'static,
        Q::Position: Send + 'static,
    {
        let worker = worker % self.workers.len();
        let mailbox = self.workers[worker].mailbox.clone();
        let number = worker as u32;
        let slot_and_generation = mailbox.call(move |worker| worker.attach_queue(options, make, leave))?;
        let (slot, generation) = slot_and_generation?;
        Ok(QueueHandle { mailbox, worker: number, slot, generation, _queue: PhantomData })
    }

    /// Returns the number and the mailbox of worker `worker` (modulo their number).
    pub(crate) fn mailbox(&self, worker: usize) -> (u32, &Mailbox<Worker>) {
        let number = worker % self.workers.len();
        (number as u32, &self.workers[number].mailbox)
    }

    /// Returns the workers' mailboxes.
    pub(crate) fn mailboxes(&self) -> impl Iterator<Item = &Mailbox<Worker>> {
        self.workers.iter().map(|worker| &worker.mailbox)
    }

    /// Has all workers use the limits that disks and groups have now. When it returns, all do.
    ///
    /// # Errors
    /// When a worker has ended, or does not respond: it uses them when it does. The others use them already.
    pub fn limits_changed(&self) -> Result<(), WorkerError> {
        let reload = |mailbox: &Mailbox<Worker>| mailbox.begin_send(|worker| worker.channels.reload_limits());
        // All are told before the first is waited for.
        let sent: Vec<_> = self.mailboxes().map(reload).collect();
        sent.into_iter().try_for_each(|sent| sent?.wait())
    }

    /// Returns the statistics of all workers and their queues, each read between two turns of its worker.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn stats(&self) -> Result<Vec<WorkerStats>, WorkerError> {
        // All are asked before the first is waited for.
        let asked: Vec<_> = (0..)
            .zip(self.mailboxes())
            .map(|(number, mailbox)| mailbox.begin_call(move |worker| worker.stats(number)))
            .collect();
        asked.into_iter().map(|call| call?.wait()).collect()
    }
}

impl<Q> QueueHandle<Q>
where
    Q: GuestQueue<Context = UringContext> + 'static,
    Q::Position: Send + 'static,
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

    /// Returns the queue's slot and generation at its worker.
    pub(crate) fn slot_and_generation(&self) -> (u16, u32) {
        (self.slot, self.generation)
    }

    /// Returns its worker's mailbox.
    pub(crate) fn mailbox(&self) -> &Mailbox<Worker> {
        &self.mailbox
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

    /// Takes no more requests off the queue and detaches it when none is in flight: then neither the daemon nor the kernel accesses the
    /// guest's memory for it. Completions are published, and the guest is called for them, before. Requests parked at a stopped disk fail;
    /// [`drain_unanswered`](Self::drain_unanswered) drops them instead.
    ///
    /// # Errors
    /// When the worker has ended.
    pub fn drain(self) -> Result<Draining<Q::Position>, WorkerError> {
        let (slot, generation) = (self.slot, self.generation);
        let (done, left) = sync_channel::<LeftQueue>(1);
        self.mailbox.send(Box::new(move |worker| worker.drain(slot, generation, done)))?;
        let (mailbox, drop_parked) = (self.mailbox, None);
        Ok(Draining { left, mailbox, slot, generation, drop_parked, position: PhantomData })
    }
}

/// Starts one worker thread and waits until its io_uring is set up.
fn spawn_worker(number: usize, cpu: Option<usize>, context: UringOptions) -> std::io::Result<WorkerThread> {
    let (mailbox, receiver) = Mailbox::new(number as u32)?;
    let (ready, started) = sync_channel(1);
    let thread = spawn(format!("worker-{number}"), move || {
        let made = pin(cpu).and_then(|()| enter(ThreadRole::Worker)).and_then(|()| Worker::new(context, receiver));
        let mut worker = match made {
            Ok(worker) => worker,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let _ = ready.send(Ok(()));
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.run()));
        if ran.is_err() {
            // A bug in the daemon. Its queues would hang for ever; a daemon that died is restarted and resumes.
            tracing::error!(worker = number, "a worker thread panicked: the process ends");
            std::process::abort();
        }
    })?;
    match started.recv() {
        Ok(Ok(())) => Ok(WorkerThread { mailbox, thread: Some(thread) }),
        Ok(Err(error)) => Err(std::io::Error::new(error.kind(), format!("worker {number}: {error}"))),
        Err(_) => Err(std::io::Error::other(format!("worker {number} ended while starting"))),
    }
}

fn pin(cpu: Option<usize>) -> std::io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("no CPU {cpu}")));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|error| std::io::Error::new(error.kind(), format!("pinning to CPU {cpu}: {error}")))
}

impl Drop for Engine {
    /// Stops the workers. Queues that are still attached are cut off: their contexts cancel what is in flight.
    fn drop(&mut self) {
        for worker in &self.workers {
            let _ = worker.mailbox.send(Box::new(Worker::stop));
        }
        let deadline = Instant::now() + END_TIMEOUT;
        for (number, worker) in self.workers.iter_mut().enumerate() {
            let Some(thread) = worker.thread.take() else { continue };
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(END_CHECK);
            }
            if thread.is_finished() {
                let _ = thread.join();
            } else {
                tracing::error!(worker = number, "a worker does not end: it waits for storage or memory");
            }
        }
    }
}
