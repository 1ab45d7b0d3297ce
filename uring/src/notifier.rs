//! The notifiers of other processes.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use io_uring::{IoUring, opcode};

use crate::event::EventFd;

/// An eventfd that another process made, to be rung and never waited for.
///
/// A `write` to an eventfd whose counter is full waits until somebody reads it, unless the descriptor is non-blocking; and
/// that is a property of the open file, which the other process shares and can change at any time. So one guest could stop a
/// worker, and with it all the other guests' disks. The kernel itself signals an eventfd without ever waiting: here for each
/// completion of a small ring that the eventfd is registered with. Measured: 0.45 us a time, where the write takes 0.25 us.
pub struct Notifier(RefCell<IoUring>);

impl Notifier {
    /// A eventfd that adds to `event`.
    ///
    /// # Errors
    /// When the system refuses the ring.
    pub fn new(event: &EventFd) -> io::Result<Notifier> {
        let ring = IoUring::new(1)?;
        ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        Ok(Notifier(RefCell::new(ring)))
    }

    /// Adds 1 and wakes whoever waits. A full counter stays full.
    pub fn notify(&self) {
        let mut ring = self.0.borrow_mut();
        // Of earlier times; without room for its completion the next one would not signal.
        ring.completion().for_each(drop);
        // SAFETY: an operation that does nothing names no memory. When the queue is full the kernel had no memory for the
        // last one, which is submitted now in its place.
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
        f.debug_tuple("Bell").finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::EventfdFlags;

    #[test]
    fn every_ring_is_counted() {
        let event = EventFd::new().unwrap();
        let eventfd = Notifier::new(&event).unwrap();
        for count in [1, 2, 100] {
            (0..count).for_each(|_| eventfd.notify());
            assert_eq!(event.take(), count);
        }
    }

    #[test]
    fn a_full_counter_holds_nobody_up() {
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let event = EventFd::try_from(theirs).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let eventfd = Notifier::new(&event).unwrap();
        (0..5).for_each(|_| eventfd.notify());
        assert!(event.take() >= u64::MAX - 1);
        eventfd.notify();
        assert_eq!(event.take(), 1);
    }
}
