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
pub trait Flag {
    /// Down.
    fn down() -> Self;
    /// Whether it is up.
    fn load(&self, order: Ordering) -> bool;
    /// Puts it up or down.
    fn store(&self, up: bool, order: Ordering);
    /// Puts it up or down, and returns what it was.
    fn swap(&self, up: bool, order: Ordering) -> bool;
    /// A full barrier.
    fn full_fence();
}

impl Flag for AtomicBool {
    fn down() -> Self {
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
pub struct Doze<F = AtomicBool> {
    waiting: F,
    asleep: F,
}

impl<F: Flag> Default for Doze<F> {
    fn default() -> Self {
        Doze { waiting: F::down(), asleep: F::down() }
    }
}

impl<F: Flag> Doze<F> {
    /// Something was put in; called with the box locked.
    #[inline]
    pub fn filled(&self) {
        self.waiting.store(true, Ordering::Release);
    }

    /// The box was emptied; called with the box locked.
    #[inline]
    pub fn emptied(&self) {
        self.waiting.store(false, Ordering::Relaxed);
    }

    /// Whether something may be in the box.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// After a push, with the box unlocked: whether the owner sleeps and is to be woken. One of several gets to do it.
    #[inline]
    #[must_use = "an owner that sleeps does so until it is woken"]
    pub fn must_wake(&self) -> bool {
        F::full_fence();
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed)
    }

    /// The owner is about to sleep. Returns whether something is in the box: then it may not.
    #[inline]
    #[must_use = "who sleeps on a full box is not woken"]
    pub fn lie_down(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        F::full_fence();
        self.is_waiting()
    }

    /// The owner is up again.
    #[inline]
    pub fn get_up(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}

/// What others leave for the thread that owns it.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Inbox<M> {
    doze: Doze,
    messages: Mutex<Vec<M>>,
}

impl<M> Inbox<M> {
    /// With room for some; it grows to the most that were ever in it at once, which the sender's limits bound.
    pub(crate) fn new(room: usize) -> Inbox<M> {
        Inbox { doze: Doze::default(), messages: Mutex::new(Vec::with_capacity(room)) }
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
        self.doze.filled();
        drop(messages);
        self.doze.must_wake()
    }

    /// Moves all messages to `into`, which is empty.
    #[inline]
    pub(crate) fn take(&self, into: &mut Vec<M>) {
        if self.doze.is_waiting() {
            let mut messages = self.messages();
            std::mem::swap(&mut *messages, into);
            self.doze.emptied();
        }
    }

    /// For the owner's sleep.
    pub(crate) fn doze(&self) -> &Doze {
        &self.doze
    }
}
