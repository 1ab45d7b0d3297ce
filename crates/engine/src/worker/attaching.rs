//! Queues that come to their worker: new ones, and those of other workers.

use std::sync::Arc;

use mqblk_core::{GuestQueue, Wake};
use mqblk_uring::UringContext;

use super::{AttachedQueue, Worker};
use crate::attach_error::AttachError;
use crate::attached_disks::AttachedDisks;
use crate::mailbox::WakerHandle;
use crate::poll_list::Phase;
use crate::queue_options::{QueueDisk, QueueOptions};
use crate::runner::{AnyQueue, QueueRunner};

impl Worker {
    /// Opens a queue's disks, makes the queue with its waker, and serves it. Returns its slot and generation.
    pub(crate) fn attach_queue<Q>(
        &mut self,
        options: QueueOptions,
        make: impl FnOnce(&Arc<dyn Wake>) -> Result<Q, String>,
    ) -> Result<(u16, u32), AttachError>
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let (slot, generation, disks, (queue, waker)) = self.admit(&options.disks, |worker, slot, generation| {
            let waker = worker.mailbox.waker(slot, generation);
            let handle: Arc<dyn Wake> = Arc::new(WakerHandle(Arc::clone(&waker)));
            let mut queue = make(&handle)?;
            queue.enter(&mut worker.context).inspect_err(|_| queue.close())?;
            Ok((queue, waker))
        })?;
        let now = self.clock.now();
        let mut runner = Box::new(QueueRunner::new(queue, options.policy, options.on_fault, now));
        options.disks.iter().for_each(|disk| runner.opened(disk.slot));
        let phase = if options.paused { Phase::Paused } else { Phase::Running };
        let attached = AttachedQueue::new(runner, disks, options.kick, generation, waker);
        self.insert(slot, phase, attached);
        Ok((slot, generation))
    }

    /// Opens the disks of a queue that comes to this worker, then calls `enter` with the slot and the generation of the
    /// queue, which takes the queue's resources of the context. When one of these fails, no disk stays open.
    pub(crate) fn admit<R>(
        &mut self,
        disks: &[QueueDisk],
        enter: impl FnOnce(&mut Worker, u16, u32) -> Result<R, String>,
    ) -> Result<(u16, u32, AttachedDisks, R), AttachError> {
        if !self.has_free_slot() {
            return Err(AttachError::Queue("the worker serves as many queues as it can".to_owned()));
        }
        let mut open = AttachedDisks::default();
        let opened = disks.iter().try_for_each(|disk| open.open(&mut self.context, &mut self.channels, disk));
        let (slot, generation) = self.free_slot();
        match opened.and_then(|()| enter(self, slot, generation).map_err(AttachError::Queue)) {
            Ok(entered) => Ok((slot, generation, open, entered)),
            Err(error) => {
                open.close_all(&mut self.context, &mut self.channels);
                Err(error)
            }
        }
    }
}
