//! Hands commands over to the thread that owns their queue, and completions back.
//!
//! A queue is submitted to and reaped by one thread. A submitter whose target is bound to another thread's queue hands
//! the command over. Kernels take that queue's lock instead. A lock would cost every command, although few need it, and
//! would move completions to the submitter's processor. Here the owner's own path has no lock, and reads one shared
//! flag. A mailbox is locked for a push, or for the exchange of two vectors. Its size is bounded by what all threads
//! together may have outstanding, so a push never waits.
//!
//! [`IdleWait`] is the protocol that prevents lost wakeups. `tests/loom_steering.rs` checks it under all interleavings.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use mqblk_core::lock::lock;
use mqblk_memory::full_fence;

/// An atomic flag. A model checker has its own implementation.
pub trait AtomicFlag {
    /// Returns a flag that is not set.
    fn unset() -> Self;
    /// Returns true if the flag is set.
    fn load(&self, order: Ordering) -> bool;
    /// Sets or clears the flag.
    fn store(&self, value: bool, order: Ordering);
    /// Sets or clears the flag, and returns the previous value.
    fn swap(&self, value: bool, order: Ordering) -> bool;
    /// Issues a full memory barrier.
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
    fn store(&self, value: bool, order: Ordering) {
        self.store(value, order);
    }
    #[inline]
    fn swap(&self, value: bool, order: Ordering) -> bool {
        self.swap(value, order)
    }
    #[inline]
    fn full_fence() {
        full_fence();
    }
}

/// Decides whether the owner of a mailbox may sleep, and which sender wakes it.
///
/// The owner sets `sleeping`, then checks `pending`. A sender sets `pending`, then checks `sleeping`. Both have a full
/// barrier between the two steps, so at least one observes the other.
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
    /// Marks the mailbox as not empty. Called with the mailbox locked.
    #[inline]
    pub fn set_pending(&self) {
        self.pending.store(true, Ordering::Release);
    }

    /// Marks the mailbox as empty. Called with the mailbox locked.
    #[inline]
    pub fn clear_pending(&self) {
        self.pending.store(false, Ordering::Relaxed);
    }

    /// Returns true if the mailbox may have messages.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Returns true if the owner sleeps and the caller must wake it; only one of several senders gets true. Called
    /// after a push, with the mailbox unlocked.
    #[inline]
    #[must_use = "a sleeping owner must be woken"]
    pub fn claim_wakeup(&self) -> bool {
        F::full_fence();
        self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::Relaxed)
    }

    /// Announces that the owner is going to sleep. Returns true if messages are pending: the owner must not sleep then.
    #[inline]
    #[must_use = "an owner that sleeps with messages pending is not woken"]
    pub fn prepare_to_wait(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        F::full_fence();
        self.is_pending()
    }

    /// Ends the owner's sleep.
    #[inline]
    pub fn finish_wait(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}

/// Messages of other threads to the owner.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Mailbox<M> {
    idle: IdleWait,
    messages: Mutex<Vec<M>>,
}

impl<M> Mailbox<M> {
    /// Creates a mailbox with space for `capacity` messages. It grows as needed; the senders' limits bound it.
    pub(crate) fn new(capacity: usize) -> Mailbox<M> {
        Mailbox { idle: IdleWait::default(), messages: Mutex::new(Vec::with_capacity(capacity)) }
    }

    fn messages(&self) -> MutexGuard<'_, Vec<M>> {
        // A push or an exchange cannot panic halfway.
        lock(&self.messages)
    }

    /// Adds a message. Returns true if the caller must wake the owner.
    #[inline]
    #[must_use = "a sleeping owner must be woken"]
    pub(crate) fn push(&self, message: M) -> bool {
        let mut messages = self.messages();
        messages.push(message);
        self.idle.set_pending();
        drop(messages);
        self.idle.claim_wakeup()
    }

    /// Moves all messages to `into`, which must be empty.
    #[inline]
    pub(crate) fn drain_into(&self, into: &mut Vec<M>) {
        if self.idle.is_pending() {
            let mut messages = self.messages();
            std::mem::swap(&mut *messages, into);
            self.idle.clear_pending();
        }
    }

    /// Returns the owner's sleep protocol.
    pub(crate) fn idle_wait(&self) -> &IdleWait {
        &self.idle
    }
}
