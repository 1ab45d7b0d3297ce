//! Passing commands to the thread that owns their queue, and their ends back.
//!
//! A queue is put to and reaped by one thread. A submitter whose target is bound to another thread's queue hands the command
//! over: kernels take that queue's lock instead. A lock for each command on every queue would be paid by the many commands
//! that need none, and would let completions run on the submitter's processor, away from the one that owns the queue; here the
//! owner's own path has no lock and no shared line but one flag that it reads. A thread's box is locked for a push, or for the
//! exchange of two vectors; it is bounded by what all threads together may have outstanding, so a push never waits.
//!
//! Sleeping is the part where messages get lost, so it is a protocol of its own, [`Doze`], and `tests/loom_steering.rs` runs it
//! under every interleaving.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mqblk_memory::full_fence;

/// A flag that threads share; a model checker brings its own.
pub trait AtomicFlag {
    /// Down.
    fn unset() -> Self;
    /// Whether it is up.
    fn load(&self, order: Ordering) -> bool;
    /// Puts it up or down.
    fn store(&self, up: bool, order: Ordering);
    /// Puts it up or down, and returns what it was.
    fn swap(&self, up: bool, order: Ordering) -> bool;
    /// A full barrier.
    fn full_fence();
}

impl AtomicFlag for AtomicBool {
    fn unset() -> Self {
        AtomicBool::new(false)
    }
    #[inline]
    fn load(&self, order: Ordering) -> bool {
        self.load(order)
    }
    #[inline]
    fn store(&self, up: bool, order: Ordering) {
        self.store(up, order);
    }
    #[inline]
    fn swap(&self, up: bool, order: Ordering) -> bool {
        self.swap(up, order)
    }
    #[inline]
    fn full_fence() {
        full_fence();
    }
}

/// Who puts something into a box, and whether its owner must be woken for it.
///
/// The owner says that it sleeps, then looks; the others put, then look whether it sleeps. With a full barrier between the
/// two steps on both sides one of them sees the other.
#[derive(Debug)]
pub struct IdleWait<F = AtomicBool> {
    pending: F,
    sleeping: F,
}

impl<F: AtomicFlag> Default for IdleWait<F> {
    fn default() -> Self {
        IdleWait { pending: F::unset(), sleeping: F::unset() }
    }
}

impl<F: AtomicFlag> IdleWait<F> {
    /// Something was put in; called with the box locked.
    #[inline]
    pub fn set_pending(&self) {
        self.pending.store(true, Ordering::Release);
    }

    /// The box was emptied; called with the box locked.
    #[inline]
    pub fn clear_pending(&self) {
        self.pending.store(false, Ordering::Relaxed);
    }

    /// Whether something may be in the box.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// After a push, with the box unlocked: whether the owner sleeps and is to be woken. One of several gets to do it.
    #[inline]
    #[must_use = "an owner that sleeps does so until it is woken"]
    pub fn claim_wakeup(&self) -> bool {
        F::full_fence();
        self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::Relaxed)
    }

    /// The owner is about to sleep. Returns whether something is in the box: then it may not.
    #[inline]
    #[must_use = "who sleeps on a full box is not woken"]
    pub fn prepare_to_wait(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        F::full_fence();
        self.is_pending()
    }

    /// The owner is up again.
    #[inline]
    pub fn finish_wait(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}

/// What others leave for the thread that owns it.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Mailbox<M> {
    idle: IdleWait,
    messages: Mutex<Vec<M>>,
}

impl<M> Mailbox<M> {
    /// With room for some; it grows to the most that were ever in it at once, which the sender's limits bound.
    pub(crate) fn new(room: usize) -> Mailbox<M> {
        Mailbox { idle: IdleWait::default(), messages: Mutex::new(Vec::with_capacity(room)) }
    }

    fn messages(&self) -> MutexGuard<'_, Vec<M>> {
        // Nothing can panic between the steps of a push or an exchange.
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a message in. Returns whether the owner must be woken.
    #[inline]
    #[must_use = "an owner that sleeps does so until it is woken"]
    pub(crate) fn push(&self, message: M) -> bool {
        let mut messages = self.messages();
        messages.push(message);
        self.idle.set_pending();
        drop(messages);
        self.idle.claim_wakeup()
    }

    /// Moves all messages to `into`, which is empty.
    #[inline]
    pub(crate) fn drain_into(&self, into: &mut Vec<M>) {
        if self.idle.is_pending() {
            let mut messages = self.messages();
            std::mem::swap(&mut *messages, into);
            self.idle.clear_pending();
        }
    }

    /// For the owner's sleep.
    pub(crate) fn idle_wait(&self) -> &IdleWait {
        &self.idle
    }
}
