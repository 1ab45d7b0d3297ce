//! A worker without a thread: whoever holds it steps it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use mqblk_core::{DiskSlot, GuestQueue, Wake};
use mqblk_uring::{UringContext, UringOptions};

use crate::attached_disks::QueueDisk;
use crate::counters::WorkerStats;
use crate::engine::{AttachError, QueueOptions, attached};
use crate::errors::{DiskHealth, Resume};
use crate::mailbox::Mailbox;
use crate::worker::Worker;

/// A worker that is stepped step by step, on the thread that made it: for simulations, and for counting what a turn costs. Its
/// turns are those of a worker thread. It never sleeps, so queues are served without being kicked.
#[derive(Debug)]
pub struct SteppedWorker {
    worker: Worker,
    /// The worker's mailbox, which nobody writes to, must stay open.
    _mailbox: Mailbox,
}

/// Names a queue of a [`HandWorker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteppedQueue {
    slot: u16,
    generation: u32,
}

impl SteppedWorker {
    /// A worker without queues.
    ///
    /// # Errors
    /// When its io_uring cannot be made.
    pub fn new(context: UringOptions) -> std::io::Result<SteppedWorker> {
        let (mailbox, receiver) = Mailbox::new()?;
        Ok(SteppedWorker { worker: Worker::new(context, receiver)?, _mailbox: mailbox })
    }

    /// Gives it a queue, as [`Engine::attach`](crate::Engine::attach) does. The queue stays until it is drained, or
    /// the worker is dropped, which cuts it off.
    ///
    /// # Errors
    /// When the disk cannot be opened, or `make` fails.
    pub fn attach<Q>(
        &mut self,
        options: QueueOptions,
        make: impl FnOnce(&mut UringContext, &Arc<dyn Wake>) -> Result<Q, String>,
    ) -> Result<SteppedQueue, AttachError>
    where
        Q: GuestQueue<Context = UringContext> + Send + 'static,
        Q::Position: Send + 'static,
    {
        let (slot, generation) = attached(&mut self.worker, options, make, |_, _| {})?;
        Ok(SteppedQueue { slot, generation })
    }

    /// Stops pulling from a queue. It leaves with the turn in which the last of its requests ends.
    pub fn drain(&mut self, attached: SteppedQueue) {
        self.worker.drain(attached.slot, attached.generation, sync_channel(1).0);
    }

    /// Lets a queue's requests go to one more disk.
    ///
    /// # Errors
    /// When there is one in its slot, or the disk cannot be opened.
    pub fn open_disk(&mut self, attached: SteppedQueue, disk: &QueueDisk) -> Result<(), AttachError> {
        self.worker.open_disk(attached.slot, attached.generation, disk)
    }

    /// Lets no more of its requests go to a disk, which leaves with the turn in which the last of them ends; then something can
    /// be received, or the sender is gone.
    pub fn close_disk(&mut self, attached: SteppedQueue, disk: DiskSlot) -> Receiver<()> {
        let (done, left) = sync_channel(1);
        self.worker.close_disk(attached.slot, attached.generation, disk, done);
        left
    }

    /// Lets a stopped disk go on, as [`Engine::resume`](crate::Engine::resume) does.
    pub fn resume(&mut self, health: &Arc<DiskHealth>, how: Resume) -> Option<u64> {
        let parked = health.stats().parked;
        let outcome = health.go_on()?;
        self.worker.resume(health, how, outcome);
        Some(parked)
    }

    /// What the worker and its queues have counted.
    pub fn report(&self) -> WorkerStats {
        self.worker.stats(0)
    }

    /// Whether the queue has not left.
    pub fn serves(&mut self, attached: SteppedQueue) -> bool {
        self.worker.find(attached.slot, attached.generation).is_some()
    }

    /// One turn: pull, submit, reap, finish, publish, call. Whether anything happened.
    #[inline(never)] // what is counted is found by this name
    pub fn turn(&mut self) -> bool {
        self.worker.turn()
    }
}
