//! An end of an event channel.
//!
//! Each direction has a word in the machine's shared info with two bits, as Xen has for each port, and an eventfd that
//! the receiver polls:
//!
//! * `notify` sets *pending*; if it was clear and the port is not masked, it signals the eventfd. Events sent before
//!   the pending one is taken are merged with it, and a masked port costs its receiver nothing.
//! * `take` empties the eventfd and, if an event is pending, sets *masked* and clears *pending*: the descriptor is not
//!   readable any more.
//! * `unmask` clears *masked*; if an event is pending it signals the eventfd of its own end: the event is delivered.
//!
//! No event is lost: each step is one atomic operation on one word, so all steps are ordered. A `notify` that finds
//! *pending* set follows one that has signalled or will signal, or precedes an `unmask` that sees the bit; one that
//! finds *masked* set precedes the `unmask` that sees *pending*. After `take` the receiver sees everything written
//! before every event that it took. If a sender is killed between the bit and the signal, the machine signals when it
//! closes the sender's port.
//!
//! Spurious events are possible: when the receiver takes an event while its sender is between the bit and the signal,
//! the descriptor becomes readable later, also while masked, with nothing pending. A real channel has spurious events
//! too, and `take` clears them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use mqblk_core::EventChannel;

use super::hypercall::{Hypercall, HypercallSocket, hypercall};
use super::shared_memory::{CacheLine, event_word};
use mqblk_xen::Port;

/// Makes an eventfd readable.
pub(super) fn signal(event: &impl AsFd) {
    // Fails only when the counter is full: then the eventfd is readable.
    let _ = rustix::io::retry_on_intr(|| rustix::io::write(event, &1u64.to_ne_bytes()));
}

/// The local end. Dropping it closes the port.
#[derive(Debug)]
pub(super) struct SimulatedPort {
    pub connection: Arc<Mutex<HypercallSocket>>,
    pub port: Port,
    /// Events to the remote end.
    pub outgoing: CacheLine,
    pub remote_event: OwnedFd,
    /// Events to the local end.
    pub incoming: CacheLine,
    pub local_event: OwnedFd,
}

impl EventChannel for SimulatedPort {
    fn notify(&self) {
        self.outgoing.add(event_word::SENT, 1);
        if self.outgoing.word(event_word::STATE).fetch_or(event_word::PENDING, Ordering::SeqCst) == 0 {
            // Both ends add to this word: the receiver when it unmasks.
            self.outgoing.word(event_word::DELIVERED).fetch_add(1, Ordering::Relaxed);
            signal(&self.remote_event);
        }
    }

    fn take(&self) {
        let mut count = [0; 8];
        // The eventfd before the bit: in the other order an event in between would lose its signal and keep its bit.
        // The read fails only if the eventfd is not signalled.
        let _ = rustix::io::retry_on_intr(|| rustix::io::read(&self.local_event, &mut count));
        let state = self.incoming.word(event_word::STATE);
        if state.load(Ordering::SeqCst) & event_word::PENDING != 0 {
            state.swap(event_word::MASKED, Ordering::SeqCst);
        }
    }

    fn unmask(&self) {
        let state = self.incoming.word(event_word::STATE);
        if state.load(Ordering::SeqCst) & event_word::MASKED == 0 {
            return;
        }
        if state.fetch_and(!event_word::MASKED, Ordering::SeqCst) & event_word::PENDING != 0 {
            self.incoming.word(event_word::DELIVERED).fetch_add(1, Ordering::Relaxed);
            signal(&self.local_event);
        }
    }
}

impl Drop for SimulatedPort {
    fn drop(&mut self) {
        let closed = hypercall(&self.connection, &Hypercall::ClosePort { port: self.port }, |_, _| Ok(()));
        if let Err(error) = closed
            && error.kind() != io::ErrorKind::ConnectionAborted
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            tracing::debug!(port = self.port.0, %error, "closing a port");
        }
    }
}
