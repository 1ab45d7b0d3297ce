//! Queues that are attached to their worker.

use std::sync::Arc;

use mqblk_core::{GuestQueue, Wake};
use mqblk_uring::UringContext;

use super::{AttachedQueue, Worker};
use crate::attach_error::AttachError;
use crate::attached_disks::AttachedDisks;
use crate::mailbox::WakerHandle;
use crate::poll_list::Phase;
use crate::queue_options::QueueOptions;
use crate::runner::{AnyQueue, QueueRunner, RunnerOptions};

impl Worker {
    /// Opens a queue's disks, makes the queue with the worker's context and its waker, and serves it. Returns its slot and generation.
    /// `leave` releases what `make` took of the context, when the queue is detached.
    pub(crate) fn attach_queue<Q>(
        &mut self,
        options: QueueOptions,
        make: impl FnOnce(&mut UringContext, &Arc<dyn Wake>) -> Result<Q, String>,
        leave: impl FnOnce(&mut Q, &mut UringContext) + Send + 'static,
    ) -> Result<(u16, u32), AttachError>
    where
        Q: GuestQueue<Context = UringContext> + Send + 'static,
        Q::Position: Send + 'static,
    {
        if !self.has_free_slot() {
            return Err(AttachError::Queue("the worker serves as many queues as it can".to_owned()));
        }
        let mut disks = AttachedDisks::default();
        for disk in &options.disks {
            if let Err(error) = disks.open(&mut self.context, &mut self.channels, disk) {
                disks.close_all(&mut self.context, &mut self.channels);
                return Err(error);
            }
        }
        let (slot, generation) = self.free_slot();
        let waker = self.mailbox.waker(slot, generation);
        let handle: Arc<dyn Wake> = Arc::new(WakerHandle(Arc::clone(&waker)));
        let queue = match make(&mut self.context, &handle) {
            Ok(queue) => queue,
            Err(why) => {
                disks.close_all(&mut self.context, &mut self.channels);
                return Err(AttachError::Queue(why));
            }
        };
        let now = self.clock.now();
        let settings = RunnerOptions { poll: options.poll, coalesce: options.coalesce };
        let mut runner = Box::new(QueueRunner::new(queue, settings, now));
        options.disks.iter().for_each(|disk| runner.opened(disk.slot));
        let phase = if options.paused { Phase::Paused } else { Phase::Running };
        let attached = AttachedQueue {
            runner,
            disks,
            kick: options.kick,
            generation,
            watch: generation,
            dirty: false,
            frozen: false,
            on_broken: Some(options.on_broken),
            detach: Box::new(move |queue, context| {
                let mut runner =
                    queue.into_any().downcast::<QueueRunner<Q>>().expect("a queue keeps the type it was attached with");
                leave(&mut runner.queue, context);
                Box::new(runner.queue.position())
            }),
            on_drained: None,
            waker,
        };
        self.insert(slot, phase, attached);
        Ok((slot, generation))
    }
}
