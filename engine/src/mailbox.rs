//! How a control thread talks to a worker: a bounded channel of messages and an eventfd that the worker's ring polls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_core::Wake;
use mqblk_uring::EventFd;

use crate::attach_error::WorkerGone;

/// A function to run on a worker's thread; `W` is the worker.
pub(crate) type Message<W> = Box<dyn FnOnce(&mut W) + Send>;

/// Messages that may wait. Further senders block; only control threads send.
const CAPACITY: usize = 64;

/// The worker's end.
pub(crate) struct MailboxReceiver<W> {
    pub(crate) messages: Receiver<Message<W>>,
    /// Signalled for messages and by wakers.
    pub(crate) eventfd: EventFd,
    woken: Arc<Mutex<Vec<Arc<Waker>>>>,
}

impl<W> MailboxReceiver<W> {
    /// Returns a waker for the queue of this slot and generation.
    pub(crate) fn waker(&self, slot: u16, generation: u32) -> Arc<Waker> {
        Arc::new(Waker { target: Mutex::new(self.target(slot, generation)), is_listed: AtomicBool::new(false) })
    }

    fn target(&self, slot: u16, generation: u32) -> WakeTarget {
        WakeTarget { slot, generation, list: Arc::clone(&self.woken), eventfd: self.eventfd.clone() }
    }

    /// Redirects a waker to a queue that has come to this worker. A wake before this may have reached the queue's former worker, which
    /// does not have it any more: the caller treats the queue as woken.
    pub(crate) fn redirect(&self, waker: &Waker, slot: u16, generation: u32) {
        *waker.target.lock().unwrap_or_else(PoisonError::into_inner) = self.target(slot, generation);
    }

    /// Moves the queues that were woken to `into`, by slot and generation.
    pub(crate) fn take_woken(&self, into: &mut Vec<(u16, u32)>) {
        let mut redirected = Vec::new();
        for waker in self.woken.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // From here on a wake lists the queue again. The queue's `woken` runs after this and must see what was done before each wake
            // that found it listed: the swap reads the value which that wake wrote.
            waker.is_listed.swap(false, Ordering::SeqCst);
            let target = waker.target.lock().unwrap_or_else(PoisonError::into_inner);
            if Arc::ptr_eq(&target.list, &self.woken) {
                into.push((target.slot, target.generation));
            } else {
                drop(target);
                redirected.push(waker);
            }
        }
        // Not while the list is locked: its new worker may forward a waker to this one at the same time.
        redirected.into_iter().for_each(|waker| WakerHandle(waker).wake());
    }
}

/// Where a wake goes: the queue's worker, and the queue there.
struct WakeTarget {
    slot: u16,
    generation: u32,
    list: Arc<Mutex<Vec<Arc<Waker>>>>,
    eventfd: EventFd,
}

/// Wakes one queue, also after it has moved to another worker.
pub(crate) struct Waker {
    target: Mutex<WakeTarget>,
    /// True while the waker is in a list.
    is_listed: AtomicBool,
}

/// The waker that a queue gets. The list holds the waker itself, so that a wake allocates nothing but the list's capacity.
pub(crate) struct WakerHandle(pub(crate) Arc<Waker>);

impl Wake for WakerHandle {
    fn wake(&self) {
        if !self.0.is_listed.swap(true, Ordering::SeqCst) {
            // The target is unlocked before the list is locked: `take_woken` locks them in the other order.
            let (list, eventfd) = {
                let target = self.0.target.lock().unwrap_or_else(PoisonError::into_inner);
                (Arc::clone(&target.list), target.eventfd.clone())
            };
            list.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&self.0));
            eventfd.signal();
        }
    }
}

/// The control thread's end.
#[derive(Debug)]
pub(crate) struct Mailbox<W> {
    sender: SyncSender<Message<W>>,
    eventfd: EventFd,
}

impl<W> Clone for Mailbox<W> {
    fn clone(&self) -> Mailbox<W> {
        Mailbox { sender: self.sender.clone(), eventfd: self.eventfd.clone() }
    }
}

impl<W: 'static> Mailbox<W> {
    /// Returns both ends of a mailbox.
    pub(crate) fn new() -> std::io::Result<(Mailbox<W>, MailboxReceiver<W>)> {
        let (sender, messages) = sync_channel(CAPACITY);
        let eventfd = EventFd::new()?;
        Ok((Mailbox { sender, eventfd: eventfd.clone() }, MailboxReceiver { messages, eventfd, woken: Arc::default() }))
    }

    /// Sends a message.
    pub(crate) fn send(&self, message: Message<W>) -> Result<(), WorkerGone> {
        self.sender.send(message).map_err(|_| WorkerGone)?;
        self.eventfd.signal();
        Ok(())
    }

    /// Sends a message; fails if the mailbox is full.
    pub(crate) fn try_send(&self, message: Message<W>) -> Result<(), WorkerGone> {
        self.sender.try_send(message).map_err(|_| WorkerGone)?;
        self.eventfd.signal();
        Ok(())
    }

    /// Runs `call` on the worker and waits for its result.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut W) -> R + Send + 'static,
    ) -> Result<R, WorkerGone> {
        let (result, wait) = sync_channel(1);
        self.send(Box::new(move |worker| {
            // The caller may be gone; nobody else waits for the result.
            let _ = result.send(call(worker));
        }))?;
        wait.recv().map_err(|_| WorkerGone)
    }
}
