//! A worker without a thread: its owner runs its turns one by one.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use mqblk_core::{DiskSlot, GuestQueue, Wake};
use mqblk_uring::{UringContext, UringOptions};

use crate::attach_error::AttachError;
use crate::counters::WorkerStats;
use crate::errors::DiskHealth;
use crate::mailbox::Mailbox;
use crate::poll_list::IdleDecision;
use crate::queue_options::{QueueDisk, QueueOptions};
use crate::resume::Resume;
use crate::worker::Worker;

/// A worker whose turns are run one by one, on the thread that created it: for simulations, and for measuring the cost
/// of a turn. Its turns are the same as a worker thread's. It never sleeps; queues are served without kicks until
/// [`arm`](Self::arm) arms them.
#[derive(Debug)]
pub struct SteppedWorker {
    worker: Worker,
    /// Keeps the worker's mailbox open; nobody sends to it.
    _mailbox: Mailbox<Worker>,
}

/// A queue of a [`SteppedWorker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteppedQueue {
    slot: u16,
    generation: u32,
}

impl SteppedWorker {
    /// Returns a worker without queues.
    ///
    /// # Errors
    /// When its io_uring cannot be set up.
    pub fn new(context: UringOptions) -> std::io::Result<SteppedWorker> {
        let (mailbox, receiver) = Mailbox::new(0)?;
        Ok(SteppedWorker { worker: Worker::new(context, receiver)?, _mailbox: mailbox })
    }

    /// Attaches a queue, as [`Engine::attach`](crate::Engine::attach) does. The queue stays until it is drained, or the
    /// worker is dropped, which cuts it off.
    ///
    /// # Errors
    /// When the disk cannot be opened, or `make` or the queue's entry fails.
    pub fn attach<Q>(
        &mut self,
        options: QueueOptions,
        make: impl FnOnce(&Arc<dyn Wake>) -> Result<Q, String>,
    ) -> Result<SteppedQueue, AttachError>
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let (slot, generation) = self.worker.attach_queue(options, make)?;
        Ok(SteppedQueue { slot, generation })
    }

    /// Arms the queues whose poll window has closed, as a worker thread does after an idle turn. Returns true if the
    /// thread would sleep now, until a kick, a message or a completion.
    pub fn arm(&mut self) -> bool {
        matches!(self.worker.poll_or_arm(), IdleDecision::Sleep)
    }

    /// Drains a queue: it is detached in the turn in which the last of its requests completes.
    pub fn drain(&mut self, queue: SteppedQueue) {
        self.worker.drain(queue.slot, queue.generation, sync_channel(1).0);
    }

    /// Opens one more disk for a queue's requests.
    ///
    /// # Errors
    /// When its slot is taken, or the disk cannot be opened.
    pub fn open_disk(&mut self, queue: SteppedQueue, disk: &QueueDisk) -> Result<(), AttachError> {
        self.worker.open_disk(queue.slot, queue.generation, disk)
    }

    /// Closes a disk for a queue: it takes no more requests and is closed in the turn in which the last of them
    /// completes. Then a message can be received, or the sender is gone.
    pub fn close_disk(&mut self, queue: SteppedQueue, disk: DiskSlot) -> Receiver<()> {
        let (done, left) = sync_channel(1);
        self.worker.close_disk(queue.slot, queue.generation, disk, done);
        left
    }

    /// Resumes a stopped disk, as [`Engine::resume`](crate::Engine::resume) does. Returns the number of parked
    /// requests.
    pub fn resume(&mut self, health: &Arc<DiskHealth>, how: Resume) -> Option<u64> {
        let parked = health.stats().parked;
        let outcome = health.clear_stop()?;
        self.worker.resume(health, how, outcome);
        Some(parked)
    }

    /// Uses the current limits of disks and groups, as workers do after
    /// [`Engine::disks_changed`](crate::Engine::disks_changed).
    pub fn disks_changed(&mut self) {
        self.worker.channels.reload_settings();
    }

    /// Returns the longest sleep of the worker by its disks' deadlines; `None`: unlimited.
    pub fn sleep_time(&mut self) -> Option<Duration> {
        self.worker.channels.begin_sleep();
        let deadline = self.worker.channels.deadline();
        deadline.map(|due| due.saturating_duration_since(Instant::now()))
    }

    /// Returns the statistics of the worker and its queues.
    pub fn report(&self) -> WorkerStats {
        self.worker.stats(0)
    }

    /// Returns true if the queue is still attached.
    pub fn serves(&mut self, queue: SteppedQueue) -> bool {
        self.worker.find(queue.slot, queue.generation).is_some()
    }

    /// Runs one turn: pull, submit, reap, finish, publish, call. Returns true if anything happened.
    #[inline(never)] // tests/budget counts the instructions of the function with this name
    pub fn turn(&mut self) -> bool {
        self.worker.turn()
    }
}
