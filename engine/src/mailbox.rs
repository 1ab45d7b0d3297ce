//! How a control thread talks to a worker: a bounded box of messages and an eventfd that the worker's ring watches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_core::Wake;
use mqblk_uring::EventFd;

use crate::engine::WorkerGone;
use crate::worker::Worker;

/// Something to do on a worker's thread.
pub(crate) type Message = Box<dyn FnOnce(&mut Worker) + Send>;

/// Letters that may wait: senders block past it, which only control threads do.
const ROOM: usize = 64;

/// The worker's end.
pub(crate) struct MailboxReceiver {
    pub(crate) messages: Receiver<Message>,
    /// Rings for messages and for wakers.
    pub(crate) eventfd: EventFd,
    rung: Arc<Mutex<Vec<Arc<Waker>>>>,
}

impl MailboxReceiver {
    /// A waker for the queue of this slot and generation.
    pub(crate) fn waker(&self, slot: u16, generation: u32) -> Arc<Waker> {
        let (eventfd, list) = (self.eventfd.clone(), Arc::clone(&self.rung));
        Arc::new(Waker { slot, generation, rung: AtomicBool::new(false), list, eventfd })
    }

    /// The queues whose wakers rang, by slot and generation, added to `into`.
    pub(crate) fn take_rung(&self, into: &mut Vec<(u16, u32)>) {
        for waker in self.rung.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // From here on a ring counts anew: the queue is woken after this, and sees what was done before each ring that
            // counted as this one. For that it must read what they wrote here.
            waker.rung.swap(false, Ordering::SeqCst);
            into.push((waker.slot, waker.generation));
        }
    }
}

/// Rings for one queue.
pub(crate) struct Waker {
    slot: u16,
    generation: u32,
    /// It is in the list.
    rung: AtomicBool,
    list: Arc<Mutex<Vec<Arc<Waker>>>>,
    eventfd: EventFd,
}

/// What a queue is given: the list holds the waker itself, so that a ring allocates at most the list's room.
pub(crate) struct WakerHandle(pub(crate) Arc<Waker>);

impl Wake for WakerHandle {
    fn wake(&self) {
        if !self.0.rung.swap(true, Ordering::SeqCst) {
            self.0.list.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&self.0));
            self.0.eventfd.signal();
        }
    }
}

/// The control side.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox {
    sender: SyncSender<Message>,
    eventfd: EventFd,
}

impl Mailbox {
    /// A mailbox and its worker's end.
    pub(crate) fn new() -> std::io::Result<(Mailbox, MailboxReceiver)> {
        let (sender, messages) = sync_channel(ROOM);
        let eventfd = EventFd::new()?;
        Ok((Mailbox { sender, eventfd: eventfd.clone() }, MailboxReceiver { messages, eventfd, rung: Arc::default() }))
    }

    /// Sends a message.
    pub(crate) fn send(&self, message: Message) -> Result<(), WorkerGone> {
        self.sender.send(message).map_err(|_| WorkerGone)?;
        self.eventfd.signal();
        Ok(())
    }

    /// Sends a message if there is room for it.
    pub(crate) fn try_send(&self, message: Message) -> Result<(), WorkerGone> {
        self.sender.try_send(message).map_err(|_| WorkerGone)?;
        self.eventfd.signal();
        Ok(())
    }

    /// Has `ask` done on the worker and waits for its answer.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Result<R, WorkerGone> {
        let (answer, wait) = sync_channel(1);
        self.send(Box::new(move |worker| {
            // The asker may have gone away; nobody else wants the answer.
            let _ = answer.send(ask(worker));
        }))?;
        wait.recv().map_err(|_| WorkerGone)
    }
}
