//! Signals to eventfds of other processes.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use io_uring::{IoUring, opcode};

use crate::event::EventFd;
use crate::maker::{RingUse, make};

/// A notifier for an eventfd of another process. It never blocks.
///
/// A `write` to an eventfd whose counter is full blocks until the counter is read, unless the descriptor is
/// non-blocking. That is a property of the open file, which the other process shares and can change at any time. So one
/// guest could stop a worker, and with it all the other guests' disks. The kernel itself signals an eventfd without
/// blocking: here for each completion of a small ring with which the eventfd is registered. Measured: 0.45 us for a
/// signal, 0.25 us for the write.
pub struct Notifier(RefCell<IoUring>);

impl Notifier {
    /// Returns a notifier that signals `event`.
    ///
    /// # Errors
    /// When the kernel refuses the ring.
    pub fn new(event: &EventFd) -> io::Result<Notifier> {
        let ring = make(RingUse::Signals)?.ring;
        ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        Ok(Notifier(RefCell::new(ring)))
    }

    /// Adds 1 to the counter and wakes the waiters. A full counter stays full.
    pub fn notify(&self) {
        let mut ring = self.0.borrow_mut();
        // Completions of earlier signals: without free entries for its completion the next operation would not signal.
        ring.completion().for_each(drop);
        // SAFETY: a no-op refers to no memory. When the queue is full, the kernel had no memory for the last no-op,
        // which is submitted now instead.
        let _ = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        let _ = ring.submit();
    }
}

impl mqblk_core::Call for Notifier {
    #[inline]
    fn call(&self) {
        self.notify();
    }
}

impl std::fmt::Debug for Notifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Notifier").finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::EventfdFlags;

    #[test]
    fn every_signal_is_counted() {
        let event = EventFd::new().unwrap();
        let notifier = Notifier::new(&event).unwrap();
        for count in [1, 2, 100] {
            (0..count).for_each(|_| notifier.notify());
            assert_eq!(event.take(), count);
        }
    }

    #[test]
    fn a_full_counter_does_not_block() {
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let event = EventFd::try_from(theirs).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let notifier = Notifier::new(&event).unwrap();
        (0..5).for_each(|_| notifier.notify());
        assert!(event.take() >= u64::MAX - 1);
        notifier.notify();
        assert_eq!(event.take(), 1);
    }
}
