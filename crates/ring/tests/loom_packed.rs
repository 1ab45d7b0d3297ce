//! No notification of a packed ring is lost, in any interleaving and with any reordering that the memory model allows.
//!
//! The code under test is `packed::suppression`, as used by rings in shared memory, with loom's cells and descriptor
//! flags. Both directions of a ring are this one protocol. A consumer that sleeps while descriptors wait for it is a
//! deadlock, which loom reports. The `should_panic` tests show that the model can fail: each omits one part of the
//! protocol.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::Notify;
use loom::sync::atomic::{AtomicU16, AtomicU32, fence};
use mqblk_ring::packed::Position;
use mqblk_ring::packed::suppression::{Move, Suppression};
use mqblk_ring::wakeup::RingCell;

/// Entries of the ring.
const SIZE: u16 = 2;

/// A cell of the model. Without `FENCED` the barriers of the code under test are no-ops.
#[derive(Debug)]
struct ModelCell<const FENCED: bool>(AtomicU32);

impl<const FENCED: bool> RingCell for ModelCell<FENCED> {
    type Value = u32;

    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    fn full_fence() {
        if FENCED {
            fence(Ordering::SeqCst);
        }
    }
}

/// The memory that both sides share.
struct ModelRing<const FENCED: bool> {
    suppression: ModelCell<FENCED>,
    /// Flags of the descriptors. They are made available, never used: a ring is as long as a scenario.
    flags: Vec<AtomicU16>,
    /// Content of the descriptors.
    entries: Vec<AtomicU16>,
    /// The eventfd: a signal persists until it is waited for.
    eventfd: Notify,
}

/// A scenario of the two sides.
#[derive(Clone, Copy)]
struct Scenario {
    event_idx: bool,
    /// Start of both sides.
    start: Position,
    /// Descriptors of each publish.
    batches: &'static [u16],
    /// True if it starts with notifications suppressed, as after polling.
    polled_before: bool,
    /// True if it re-checks after arming.
    rechecks: bool,
}

const SOUND: Scenario =
    Scenario { event_idx: true, start: Position::FIRST, batches: &[1, 1], polled_before: false, rechecks: true };

/// The second slot: the ring wraps.
const SECOND: Position = Position { slot: 1, wrap: false };

impl<const FENCED: bool> ModelRing<FENCED> {
    fn suppression(&self) -> Suppression<'_, ModelCell<FENCED>> {
        Suppression { cell: &self.suppression }
    }

    fn produce(&self, scenario: Scenario) {
        let mut at = scenario.start;
        for batch in scenario.batches {
            let first = at;
            for number in 0..*batch {
                let at = first.after(number, SIZE);
                self.entries[usize::from(at.slot)].store(7, Ordering::Relaxed);
                if number > 0 {
                    self.flags[usize::from(at.slot)].store(at.available_flags(), Ordering::Relaxed);
                }
            }
            at = first.after(*batch, SIZE);
            let moved = Move { end: at, slots: *batch, size: SIZE };
            let store = || self.flags[usize::from(first.slot)].store(first.available_flags(), Ordering::Release);
            if self.suppression().publish(&moved, scenario.event_idx, store) {
                self.eventfd.notify();
            }
        }
    }

    fn look(&self, at: Position) -> bool {
        at.is_available(self.flags[usize::from(at.slot)].load(Ordering::Acquire))
    }

    fn consume(&self, scenario: Scenario) {
        let total: u16 = scenario.batches.iter().sum();
        let mut next = scenario.start;
        let mut left = total;
        if scenario.polled_before {
            self.suppression().disarm();
        }
        loop {
            while left > 0 && self.look(next) {
                let entry = self.entries[usize::from(next.slot)].load(Ordering::Relaxed);
                assert_eq!(entry, 7, "a descriptor was seen before what it holds");
                next = next.after(1, SIZE);
                left -= 1;
            }
            if left == 0 {
                return;
            }
            let event = scenario.event_idx.then_some(next);
            let found = self.suppression().arm(event, || self.look(next));
            if !(found && scenario.rechecks) {
                self.eventfd.wait();
                self.suppression().disarm();
            }
        }
    }
}

fn run<const FENCED: bool>(scenario: Scenario) {
    // Every interleaving, as in `loom_wakeup`.
    loom::model::Builder::new().check(move || {
        // A slot that was not written in this lap has the flags of a used descriptor of the lap before.
        let old = |slot: u16| {
            let wrap = if slot >= scenario.start.slot { scenario.start.wrap } else { !scenario.start.wrap };
            AtomicU16::new(Position { slot, wrap: !wrap }.used_flags())
        };
        let ring = Arc::new(ModelRing::<FENCED> {
            suppression: ModelCell(AtomicU32::new(0)),
            flags: (0..SIZE).map(old).collect(),
            entries: (0..SIZE).map(|_| AtomicU16::new(0)).collect(),
            eventfd: Notify::new(),
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
    run::<true>(Scenario { polled_before: true, ..SOUND });
    run::<true>(Scenario { batches: &[2], ..SOUND });
}

#[test]
fn with_event_idx_where_the_ring_wraps() {
    run::<true>(Scenario { start: SECOND, polled_before: true, ..SOUND });
    run::<true>(Scenario { start: SECOND, batches: &[2], ..SOUND });
}

#[test]
fn without_event_idx() {
    run::<true>(Scenario { event_idx: false, ..SOUND });
    run::<true>(Scenario { event_idx: false, polled_before: true, start: SECOND, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn with_event_idx_the_fences_are_needed() {
    run::<false>(Scenario { polled_before: true, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_event_idx_the_fences_are_needed() {
    run::<false>(Scenario { event_idx: false, polled_before: true, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn with_event_idx_the_recheck_is_needed() {
    run::<true>(Scenario { rechecks: false, polled_before: true, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_event_idx_the_recheck_is_needed() {
    run::<true>(Scenario { rechecks: false, event_idx: false, polled_before: true, ..SOUND });
}
