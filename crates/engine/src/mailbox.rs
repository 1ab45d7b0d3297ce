//! Messages of control threads to a worker: a channel, and an eventfd that the worker's ring polls.
//!
//! The channel has no bound, because some messages (a drain) must not be lost while the worker does not respond. Its
//! length is bounded nevertheless: each control thread waits for its reply, and sends few messages before it gives up.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use mqblk_core::Wake;
use mqblk_core::lock::lock;
use mqblk_uring::EventFd;

use crate::attach_error::{UNRESPONSIVE_AFTER, WorkerError};

/// A function to run on a worker's thread; `W` is the worker.
pub(crate) type Message<W> = Box<dyn FnOnce(&mut W) + Send>;

/// The worker's end.
pub(crate) struct MailboxReceiver<W> {
    pub(crate) messages: Receiver<Message<W>>,
    /// Signalled for messages and by wakers.
    pub(crate) eventfd: EventFd,
    woken: Arc<WokenList>,
}

/// The woken queues. It ends with its worker: it holds the wakers, which devices keep too, but they do not hold it.
#[derive(Default)]
struct WokenList(Mutex<Vec<Arc<Waker>>>);

impl WokenList {
    /// Empties the list. Calls `here` with this worker's queues, by slot and generation.
    fn take(&self, mut here: impl FnMut(u16, u32)) {
        let mut redirected = Vec::new();
        for waker in lock(&self.0).drain(..) {
            // From here on a wake lists the queue again. The queue's `woken` runs after this and must see the effects
            // before each wake that found it listed: the swap reads the value that the wake wrote.
            waker.is_listed.swap(false, Ordering::SeqCst);
            let target = lock(&waker.target);
            if std::ptr::eq(target.list.as_ptr(), self) {
                here(target.slot, target.generation);
            } else {
                drop(target);
                redirected.push(waker);
            }
        }
        // Not while the list is locked: its new worker may forward a waker to this one at the same time.
        redirected.into_iter().for_each(|waker| WakerHandle(waker).wake());
    }
}

impl Drop for WokenList {
    fn drop(&mut self) {
        // A waker that stayed listed would never be listed again, not even by the worker that its queue has moved to.
        self.take(|_, _| {});
    }
}

impl<W> MailboxReceiver<W> {
    /// Returns a waker for the queue of this slot and generation.
    pub(crate) fn waker(&self, slot: u16, generation: u32) -> Arc<Waker> {
        Arc::new(Waker { target: Mutex::new(self.target(slot, generation)), is_listed: AtomicBool::new(false) })
    }

    fn target(&self, slot: u16, generation: u32) -> WakeTarget {
        WakeTarget { slot, generation, list: Arc::downgrade(&self.woken), eventfd: self.eventfd.clone() }
    }

    /// Redirects a waker to a queue that has come to this worker. A wake before this may have reached the queue's
    /// former worker, which no longer has it: the caller treats the queue as woken.
    pub(crate) fn redirect(&self, waker: &Waker, slot: u16, generation: u32) {
        *lock(&waker.target) = self.target(slot, generation);
    }

    /// Moves the woken queues to `into`, by slot and generation.
    pub(crate) fn take_woken(&self, into: &mut Vec<(u16, u32)>) {
        self.woken.take(|slot, generation| into.push((slot, generation)));
    }
}

/// The target of a wake: the queue's worker, and the queue there.
struct WakeTarget {
    slot: u16,
    generation: u32,
    /// The worker may have ended.
    list: Weak<WokenList>,
    eventfd: EventFd,
}

/// Wakes one queue, also after it has moved to another worker.
pub(crate) struct Waker {
    target: Mutex<WakeTarget>,
    /// True while the waker is in a list.
    is_listed: AtomicBool,
}

/// A queue's waker. The list holds the waker itself, so that a wake allocates nothing but the list's capacity.
pub(crate) struct WakerHandle(pub(crate) Arc<Waker>);

impl Wake for WakerHandle {
    fn wake(&self) {
        while !self.0.is_listed.swap(true, Ordering::SeqCst) {
            // The target is unlocked before the list is locked: `WokenList::take` locks them in the other order.
            let (target, eventfd) = {
                let target = lock(&self.0.target);
                (Weak::clone(&target.list), target.eventfd.clone())
            };
            if let Some(list) = target.upgrade() {
                lock(&list.0).push(Arc::clone(&self.0));
                eventfd.signal();
                return;
            }
            // The worker has ended. If the queue has moved meanwhile, a wake that found it listed relies on this one:
            // the swap reads the value that the wake wrote.
            self.0.is_listed.swap(false, Ordering::SeqCst);
            if Weak::ptr_eq(&target, &lock(&self.0.target).list) {
                return;
            }
        }
    }
}

/// The control thread's end.
#[derive(Debug)]
pub(crate) struct Mailbox<W> {
    worker: u32,
    /// Distinguishes workers that have had this number.
    id: u64,
    sender: Sender<Message<W>>,
    eventfd: EventFd,
}

impl<W> Clone for Mailbox<W> {
    fn clone(&self) -> Mailbox<W> {
        Mailbox { worker: self.worker, id: self.id, sender: self.sender.clone(), eventfd: self.eventfd.clone() }
    }
}

/// States of a call: not run; run; abandoned by its caller.
const WAITING: u8 = 0;
const TAKEN: u8 = 1;
const CANCELLED: u8 = 2;

impl<W: 'static> Mailbox<W> {
    /// Returns both ends of the mailbox of worker `worker`.
    pub(crate) fn new(worker: u32) -> std::io::Result<(Mailbox<W>, MailboxReceiver<W>)> {
        let (sender, messages) = channel();
        let eventfd = EventFd::new()?;
        let receiver = MailboxReceiver { messages, eventfd: eventfd.clone(), woken: Arc::default() };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok((Mailbox { worker, id, sender, eventfd }, receiver))
    }

    /// Returns true if it is the mailbox of the same worker.
    pub(crate) fn is_same(&self, other: &Mailbox<W>) -> bool {
        self.id == other.id
    }

    /// Sends a message, which the worker runs even if it does not respond for now.
    pub(crate) fn send(&self, message: Message<W>) -> Result<(), WorkerError> {
        self.sender.send(message).map_err(|_| WorkerError::Ended)?;
        self.eventfd.signal();
        Ok(())
    }

    /// As [`send`](Self::send), and waits until the worker has run `message`.
    ///
    /// # Errors
    /// When the worker has ended, or has not replied in time. It runs the message later.
    pub(crate) fn send_and_wait<R: Send + 'static>(
        &self,
        message: impl FnOnce(&mut W) -> R + Send + 'static,
    ) -> Result<R, WorkerError> {
        self.begin_send(message)?.wait()
    }

    /// As [`send`](Self::send), and returns a handle to wait until the worker has run `message`; several workers can be
    /// sent to at once.
    ///
    /// # Errors
    /// When the worker has ended.
    pub(crate) fn begin_send<R: Send + 'static>(
        &self,
        message: impl FnOnce(&mut W) -> R + Send + 'static,
    ) -> Result<Sent<R>, WorkerError> {
        let (result, wait) = sync_channel(1);
        // The caller may be gone; nobody else waits for the result.
        self.send(Box::new(move |worker| _ = result.send(message(worker))))?;
        Ok(Sent { worker: self.worker, deadline: Instant::now() + UNRESPONSIVE_AFTER, wait })
    }

    /// Runs `call` on the worker and waits for its result.
    ///
    /// # Errors
    /// When the worker has ended, or has not replied in time. It does not run the call then.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut W) -> R + Send + 'static,
    ) -> Result<R, WorkerError> {
        self.begin_call(call)?.wait()
    }

    /// Begins a call; several workers can be called at once.
    ///
    /// # Errors
    /// When the worker has ended.
    pub(crate) fn begin_call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut W) -> R + Send + 'static,
    ) -> Result<Call<R>, WorkerError> {
        let (result, wait) = sync_channel(1);
        let state = Arc::new(AtomicU8::new(WAITING));
        let taken = Arc::clone(&state);
        self.send(Box::new(move |worker| {
            if taken.compare_exchange(WAITING, TAKEN, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                let _ = result.send(call(worker));
            }
        }))?;
        Ok(Call { worker: self.worker, deadline: Instant::now() + UNRESPONSIVE_AFTER, wait, state })
    }
}

/// A message that a worker will run.
pub(crate) struct Sent<R> {
    worker: u32,
    deadline: Instant,
    wait: Receiver<R>,
}

impl<R> Sent<R> {
    /// Waits until the worker has run it.
    ///
    /// # Errors
    /// When the worker has ended, or has not replied in time. It runs the message later.
    pub(crate) fn wait(self) -> Result<R, WorkerError> {
        let rest = self.deadline.saturating_duration_since(Instant::now());
        mqblk_core::lock::assert_may_wait("a worker");
        self.wait.recv_timeout(rest).map_err(|error| unavailable(self.worker, error))
    }
}

/// A call that a worker has not replied to.
pub(crate) struct Call<R> {
    worker: u32,
    deadline: Instant,
    wait: Receiver<R>,
    state: Arc<AtomicU8>,
}

impl<R> Call<R> {
    /// Waits for the result.
    ///
    /// # Errors
    /// When the worker has ended, or has not replied in time. It does not run the call then.
    pub(crate) fn wait(self) -> Result<R, WorkerError> {
        mqblk_core::lock::assert_may_wait("a worker");
        match self.wait.recv_timeout(self.deadline.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout)
                if self.state.compare_exchange(WAITING, CANCELLED, Ordering::SeqCst, Ordering::SeqCst).is_err() =>
            {
                // The worker runs it at this moment. No call waits for storage.
                self.wait.recv().map_err(|_| WorkerError::Ended)
            }
            outcome => outcome.map_err(|error| unavailable(self.worker, error)),
        }
    }
}

fn unavailable(worker: u32, error: RecvTimeoutError) -> WorkerError {
    match error {
        RecvTimeoutError::Timeout => WorkerError::Unresponsive { worker },
        RecvTimeoutError::Disconnected => WorkerError::Ended,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    /// Runs the sent messages, as a worker does between two turns.
    fn run_all(receiver: &MailboxReceiver<Vec<u8>>, worker: &mut Vec<u8>) {
        receiver.messages.try_iter().for_each(|message| message(worker));
    }

    #[test]
    fn a_call_that_timed_out_is_never_run_and_what_was_sent_is() {
        let (mailbox, receiver) = Mailbox::<Vec<u8>>::new(3).unwrap();
        let mut call = mailbox.begin_call(|worker| worker.push(1)).unwrap();
        call.deadline = Instant::now() + SHORT;
        assert_eq!(call.wait(), Err(WorkerError::Unresponsive { worker: 3 }));
        mailbox.send(Box::new(|worker| worker.push(2))).unwrap();
        let mut worker = Vec::new();
        run_all(&receiver, &mut worker);
        assert_eq!(worker, [2]);
    }

    #[test]
    fn a_call_that_has_begun_is_waited_for() {
        let (mailbox, receiver) = Mailbox::<Vec<u8>>::new(0).unwrap();
        let caller = std::thread::spawn(move || {
            let slow = |worker: &mut Vec<u8>| {
                std::thread::sleep(SHORT * 5);
                worker.push(1);
                worker.len()
            };
            let mut call = mailbox.begin_call(slow).unwrap();
            call.deadline = Instant::now() + SHORT;
            call.wait()
        });
        let mut worker = Vec::new();
        // The message may come a moment after the caller has given up on a busy machine; then it must not have run.
        receiver.messages.recv().unwrap()(&mut worker);
        let outcome = caller.join().unwrap();
        assert_eq!(outcome.ok(), (!worker.is_empty()).then_some(1));
        drop(receiver);
    }

    /// Returns the woken queues that the worker learns of.
    fn woken(receiver: &MailboxReceiver<Vec<u8>>) -> Vec<(u16, u32)> {
        let mut queues = Vec::new();
        receiver.take_woken(&mut queues);
        queues
    }

    #[test]
    fn a_worker_that_ends_with_queues_that_were_woken_leaves_nothing_behind() {
        let (_mailbox, receiver) = Mailbox::<Vec<u8>>::new(0).unwrap();
        let wakers = [receiver.waker(0, 1), receiver.waker(1, 1)];
        WakerHandle(Arc::clone(&wakers[0])).wake();
        let list = Arc::downgrade(&receiver.woken);
        drop(receiver);
        wakers.iter().for_each(|waker| WakerHandle(Arc::clone(waker)).wake());
        assert_eq!(list.strong_count(), 0);
        assert_eq!(wakers.map(|waker| Arc::strong_count(&waker)), [1, 1]);
    }

    #[test]
    fn a_queue_that_was_woken_at_a_worker_that_has_ended_is_woken_at_the_next_one() {
        // Woken before its worker ends, afterwards, and both.
        for (before, after) in [(true, false), (false, true), (true, true)] {
            let (_mailbox, former) = Mailbox::<Vec<u8>>::new(0).unwrap();
            let (_mailbox, next) = Mailbox::<Vec<u8>>::new(1).unwrap();
            let waker = former.waker(3, 1);
            let wake = || WakerHandle(Arc::clone(&waker)).wake();
            (0..u32::from(before)).for_each(|_| wake());
            drop(former);
            (0..u32::from(after)).for_each(|_| wake());
            next.redirect(&waker, 5, 2);
            assert_eq!(woken(&next), [], "the caller of `redirect` treats it as woken");
            wake();
            wake();
            assert_eq!(woken(&next), [(5, 2)]);
        }
    }

    #[test]
    fn a_worker_that_ends_forwards_the_wakes_of_queues_that_have_left() {
        let (_mailbox, former) = Mailbox::<Vec<u8>>::new(0).unwrap();
        let (_mailbox, next) = Mailbox::<Vec<u8>>::new(1).unwrap();
        let waker = former.waker(3, 1);
        WakerHandle(Arc::clone(&waker)).wake();
        next.redirect(&waker, 5, 2);
        // It is listed still.
        WakerHandle(Arc::clone(&waker)).wake();
        assert_eq!(woken(&next), []);
        drop(former);
        assert_eq!(woken(&next), [(5, 2)]);
    }

    #[test]
    fn a_worker_that_has_ended_is_said_to_have() {
        let (mailbox, receiver) = Mailbox::<Vec<u8>>::new(0).unwrap();
        drop(receiver);
        assert_eq!(mailbox.call(|worker| worker.len()), Err(WorkerError::Ended));
        assert_eq!(mailbox.send_and_wait(|worker| worker.len()), Err(WorkerError::Ended));
    }
}
