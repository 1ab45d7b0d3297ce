//! No notification is lost, in any interleaving and with any reordering that the memory model allows.
//!
//! The code under test is `wakeup::Direction`, the same that rings in shared memory use: here its cells are loom's. Both directions of a
//! ring are this one protocol (driver to device: kicks; device to driver: calls), so one model proves both. Loom treats SeqCst fences as
//! such (its README); its other accesses are at most acquire and release, as here.
//!
//! A consumer that sleeps while entries wait for it is a deadlock, which loom reports. The `should_panic` tests show that the model can
//! fail: they leave out the parts of the protocol, one at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::Notify;
use loom::sync::atomic::{AtomicU16, fence};
use mqblk_ring::wakeup::{Cell, Direction, Wish};

/// A cell of the model. Without `FENCED` the barriers of the code under test are no-ops.
#[derive(Debug)]
struct ModelCell<const FENCED: bool>(AtomicU16);

impl<const FENCED: bool> ModelCell<FENCED> {
    fn new(value: u16) -> Self {
        ModelCell(AtomicU16::new(value.to_le()))
    }
}

impl<const FENCED: bool> Cell for ModelCell<FENCED> {
    type Value = u16;

    fn load(&self, order: Ordering) -> u16 {
        self.0.load(order)
    }

    fn store(&self, value: u16, order: Ordering) {
        self.0.store(value, order);
    }

    fn full_fence() {
        if FENCED {
            fence(Ordering::SeqCst);
        }
    }
}

/// The memory that both sides share.
struct Ring<const FENCED: bool> {
    index: ModelCell<FENCED>,
    event: ModelCell<FENCED>,
    flags: ModelCell<FENCED>,
    entries: Vec<AtomicU16>,
    /// The eventfd: a signal persists until it is waited for.
    bell: Notify,
}

/// The variants of [`EventSuppression`].
#[derive(Clone, Copy)]
enum Kind {
    Event,
    Reached,
    Flag,
}

/// A scenario: what the two sides do.
#[derive(Clone, Copy)]
struct Trial {
    wish: Kind,
    /// Start of the index; near 65535 it wraps.
    start: u16,
    /// Entries of each publish.
    batches: &'static [u16],
    /// The consumer sleeps until this many more entries are available.
    wants: u16,
    /// It starts with notifications suppressed, as after polling.
    polled_before: bool,
    /// It re-checks the index after arming.
    looks_again: bool,
}

const SOUND: Trial =
    Trial { wish: Kind::Event, start: 0, batches: &[1, 1], wants: 1, polled_before: false, looks_again: true };

const QUIET: u16 = 1;

impl<const FENCED: bool> Ring<FENCED> {
    fn direction(&self, wish: Kind) -> Direction<'_, ModelCell<FENCED>> {
        let wish = match wish {
            Kind::Event => Wish::Event(&self.event),
            Kind::Reached => Wish::Reached(&self.event),
            Kind::Flag => Wish::Flag { cell: &self.flags, quiet: QUIET },
        };
        Direction { index: &self.index, wish }
    }

    fn produce(&self, scenario: Trial) {
        let mut next = scenario.start;
        for batch in scenario.batches {
            let old = next;
            for _ in 0..*batch {
                let place = usize::from(next.wrapping_sub(scenario.start));
                self.entries[place].store(next.wrapping_add(1), Ordering::Relaxed);
                next = next.wrapping_add(1);
            }
            if self.direction(scenario.wish).publish(old, next) {
                self.bell.notify();
            }
        }
    }

    fn consume(&self, scenario: Trial) {
        let direction = self.direction(scenario.wish);
        let end = scenario.start.wrapping_add(scenario.batches.iter().sum());
        let mut next = scenario.start;
        if scenario.polled_before {
            direction.disarm(Some(next.wrapping_sub(1)));
        }
        let mut seen = direction.look();
        loop {
            while next != seen {
                let place = usize::from(next.wrapping_sub(scenario.start));
                let entry = self.entries[place].load(Ordering::Relaxed);
                assert_eq!(entry, next.wrapping_add(1), "an index was seen before its entry");
                next = next.wrapping_add(1);
            }
            if next == end {
                return;
            }
            let wait_for = scenario.wants.min(end.wrapping_sub(next));
            let found = direction.arm(next.wrapping_add(wait_for - 1));
            if scenario.looks_again {
                seen = found;
            }
            // Without EVENT_IDX the eventfd is signalled at the first entry, whatever was requested.
            if seen.wrapping_sub(next) < wait_for {
                self.bell.wait();
                direction.disarm(Some(next.wrapping_sub(1)));
                seen = direction.look();
            }
        }
    }
}

fn run<const FENCED: bool>(scenario: Trial) {
    // Every interleaving. In a build without optimisation that takes minutes; LOOM_MAX_PREEMPTIONS=3 makes it seconds, and
    // still shows all the broken variants.
    let builder = loom::model::Builder::new();
    builder.check(move || {
        let total = scenario.batches.iter().sum::<u16>();
        let ring = Arc::new(Ring::<FENCED> {
            index: ModelCell::new(scenario.start),
            // A ring starts zeroed; an event index just behind the index requests nothing.
            event: ModelCell::new(match scenario.wish {
                Kind::Reached => scenario.start,
                _ => scenario.start.wrapping_sub(1),
            }),
            flags: ModelCell::new(0),
            entries: (0..total).map(|_| AtomicU16::new(0)).collect(),
            bell: Notify::new(),
        });
        let producer = Arc::clone(&ring);
        let thread = loom::thread::spawn(move || producer.produce(scenario));
        ring.consume(scenario);
        thread.join().expect("the producer ended");
    });
}

#[test]
fn with_event_idx() {
    run::<true>(SOUND);
    run::<true>(Trial { batches: &[2, 1], polled_before: true, ..SOUND });
}

#[test]
fn with_event_idx_where_the_index_wraps() {
    run::<true>(Trial { start: 0xffff, polled_before: true, ..SOUND });
}

#[test]
fn with_event_idx_waiting_for_several() {
    run::<true>(Trial { wants: 2, ..SOUND });
    run::<true>(Trial { wants: 2, batches: &[1, 2], ..SOUND });
}

#[test]
fn in_a_xen_ring() {
    let xen = Trial { wish: Kind::Reached, ..SOUND };
    run::<true>(xen);
    run::<true>(Trial { start: 0xffff, polled_before: true, ..xen });
    run::<true>(Trial { wants: 2, batches: &[1, 2], ..xen });
}

#[test]
#[should_panic(expected = "deadlock")]
fn in_a_xen_ring_the_fences_are_needed() {
    run::<false>(Trial { wish: Kind::Reached, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn in_a_xen_ring_the_recheck_is_needed() {
    run::<true>(Trial { looks_again: false, wish: Kind::Reached, ..SOUND });
}

#[test]
fn without_event_idx() {
    run::<true>(Trial { wish: Kind::Flag, ..SOUND });
    run::<true>(Trial { wish: Kind::Flag, polled_before: true, batches: &[2, 1], start: 0xffff, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn with_event_idx_the_fences_are_needed() {
    run::<false>(SOUND);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_event_idx_the_fences_are_needed() {
    run::<false>(Trial { wish: Kind::Flag, polled_before: true, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn with_event_idx_the_recheck_is_needed() {
    run::<true>(Trial { looks_again: false, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_event_idx_the_recheck_is_needed() {
    run::<true>(Trial { looks_again: false, wish: Kind::Flag, polled_before: true, ..SOUND });
}
