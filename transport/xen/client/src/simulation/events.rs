//! An end of an event channel.
//!
//! Each direction has a word on the machine's board with two bits, as Xen has for each port, and an eventfd that the receiver
//! watches:
//!
//! * `notify` sets *pending*; if it was clear and the port is not masked, it rings the eventfd. Events that come before the one
//!   before was taken are the same event, and a masked port costs its receiver nothing.
//! * `take` empties the eventfd and, if an event has come, sets *masked* and clears *pending*: the descriptor is not readable any more.
//! * `unmask` clears *masked*; if an event has come meanwhile it rings the eventfd of its own end: the event is delivered now.
//!
//! Why none is lost: each step is one atomic operation on one word, so they have an order. A `notify` that finds *pending* set
//! stands behind one that has rung, or will, or behind an `unmask` that will see the bit; one that finds *masked* set stands
//! before the `unmask` that will see *pending*. What the receiver looks at after `take` contains what was written before every
//! event that `take` took. A sender that is killed between the bit and the bell is made good by the machine when it sees the
//! connection end.
//!
//! What can be too much: a sender may be between the bit and the bell when the receiver takes its event. Then the bell rings for
//! an event that was taken: the descriptor becomes readable, also while masked, with nothing to take. The same as a spurious
//! event of a real channel, and `take` ends it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use mqblk_core::EventChannel;

use super::table::{Line, lane};
use super::wire::{Ask, Packets};
use crate::Port;

/// Makes an eventfd readable.
pub(super) fn ring(event: &impl AsFd) {
    // It fails only when the counter is full: then it is readable.
    let _ = rustix::io::retry_on_intr(|| rustix::io::write(event, &1u64.to_ne_bytes()));
}

/// Our end. The port is closed when this is dropped.
#[derive(Debug)]
pub(super) struct Channel {
    pub connection: Arc<Mutex<Packets>>,
    pub port: Port,
    /// To the other end.
    pub outgoing: Line,
    pub theirs: OwnedFd,
    /// To us.
    pub incoming: Line,
    pub ours: OwnedFd,
}

impl EventChannel for Channel {
    fn notify(&self) {
        self.outgoing.add(lane::SENT, 1);
        if self.outgoing.word(lane::STATE).fetch_or(lane::PENDING, Ordering::SeqCst) == 0 {
            // Both ends count here: the other one when it unmasks.
            self.outgoing.word(lane::DELIVERED).fetch_add(1, Ordering::Relaxed);
            ring(&self.theirs);
        }
    }

    fn take(&self) {
        let mut count = [0; 8];
        // First the bell, then the bit: the other way round, the bell of an event that comes in between would be emptied and its bit
        // left. It fails only when the bell has not been rung.
        let _ = rustix::io::retry_on_intr(|| rustix::io::read(&self.ours, &mut count));
        let state = self.incoming.word(lane::STATE);
        if state.load(Ordering::SeqCst) & lane::PENDING != 0 {
            state.swap(lane::MASKED, Ordering::SeqCst);
        }
    }

    fn unmask(&self) {
        let state = self.incoming.word(lane::STATE);
        if state.load(Ordering::SeqCst) & lane::MASKED == 0 {
            return;
        }
        if state.fetch_and(!lane::MASKED, Ordering::SeqCst) & lane::PENDING != 0 {
            self.incoming.word(lane::DELIVERED).fetch_add(1, Ordering::Relaxed);
            ring(&self.ours);
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let closed = super::ask(&self.connection, &Ask::Close { port: self.port }, |_, _| Ok(()));
        if let Err(error) = closed
            && error.kind() != io::ErrorKind::ConnectionAborted
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            tracing::debug!(port = self.port.0, %error, "closing a port");
        }
    }
}
