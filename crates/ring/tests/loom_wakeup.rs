//! No notification is lost, in any interleaving and with any reordering that the memory model allows.
//!
//! The code under test is `wakeup::Direction`, as used by rings in shared memory, with loom's cells. Both directions of
//! a ring are this one protocol (driver to device: kicks; device to driver: calls), so one model proves both. Loom
//! treats SeqCst fences as such (its README); its other accesses are at most acquire and release, as here.
//!
//! A consumer that sleeps while entries wait for it is a deadlock, which loom reports. The `should_panic` tests show
//! that the model can fail: each omits one part of the protocol.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::Notify;
use loom::sync::atomic::{AtomicU16, fence};
use mqblk_ring::wakeup::{Direction, EventSuppression, RingCell};

/// A cell of the model. Without `FENCED` the barriers of the code under test are no-ops.
#[derive(Debug)]
struct ModelCell<const FENCED: bool>(AtomicU16);

impl<const FENCED: bool> ModelCell<FENCED> {
    fn new(value: u16) -> Self {
        ModelCell(AtomicU16::new(value.to_le()))
    }
}

impl<const FENCED: bool> RingCell for ModelCell<FENCED> {
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
struct ModelRing<const FENCED: bool> {
    index: ModelCell<FENCED>,
    event: ModelCell<FENCED>,
    flags: ModelCell<FENCED>,
    entries: Vec<AtomicU16>,
    /// The eventfd: a signal persists until it is waited for.
    eventfd: Notify,
}

/// The variants of [`EventSuppression`].
#[derive(Clone, Copy)]
enum SuppressionKind {
    EventIdx,
    XenEvent,
    Flag,
}

/// A scenario of the two sides.
#[derive(Clone, Copy)]
struct Scenario {
    suppression: SuppressionKind,
    /// Start of the index; near 65535 it wraps.
    start: u16,
    /// Entries of each publish.
    batches: &'static [u16],
    /// The consumer sleeps until this many more entries are available.
    wait_for: u16,
    /// True if it starts with notifications suppressed, as after polling.
    polled_before: bool,
    /// True if it re-checks the index after arming.
    rechecks: bool,
}

const SOUND: Scenario = Scenario {
    suppression: SuppressionKind::EventIdx,
    start: 0,
    batches: &[1, 1],
    wait_for: 1,
    polled_before: false,
    rechecks: true,
};

const SUPPRESSED: u16 = 1;

impl<const FENCED: bool> ModelRing<FENCED> {
    fn direction(&self, wish: SuppressionKind) -> Direction<'_, ModelCell<FENCED>> {
        let wish = match wish {
            SuppressionKind::EventIdx => EventSuppression::EventIdx(&self.event),
            SuppressionKind::XenEvent => EventSuppression::XenEvent(&self.event),
            SuppressionKind::Flag => EventSuppression::Flag { cell: &self.flags, suppressed: SUPPRESSED },
        };
        Direction { index: &self.index, suppression: wish }
    }

    fn produce(&self, scenario: Scenario) {
        let mut next = scenario.start;
        for batch in scenario.batches {
            let old = next;
            for _ in 0..*batch {
                let place = usize::from(next.wrapping_sub(scenario.start));
                self.entries[place].store(next.wrapping_add(1), Ordering::Relaxed);
                next = next.wrapping_add(1);
            }
            if self.direction(scenario.suppression).publish(old, next) {
                self.eventfd.notify();
            }
        }
    }

    fn consume(&self, scenario: Scenario) {
        let direction = self.direction(scenario.suppression);
        let end = scenario.start.wrapping_add(scenario.batches.iter().sum());
        let mut next = scenario.start;
        if scenario.polled_before {
            direction.disarm(Some(next.wrapping_sub(1)));
        }
        let mut seen = direction.load_index();
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
            let wait_for = scenario.wait_for.min(end.wrapping_sub(next));
            let found = direction.arm(next.wrapping_add(wait_for - 1));
            if scenario.rechecks {
                seen = found;
            }
            // Without EVENT_IDX the eventfd is signalled at the first entry, for any request.
            if seen.wrapping_sub(next) < wait_for {
                self.eventfd.wait();
                direction.disarm(Some(next.wrapping_sub(1)));
                seen = direction.load_index();
            }
        }
    }
}

fn run<const FENCED: bool>(scenario: Scenario) {
    // Every interleaving. In a build without optimisation this takes minutes; with LOOM_MAX_PREEMPTIONS=3 seconds, and
    // all broken variants still fail.
    let builder = loom::model::Builder::new();
    builder.check(move || {
        let total = scenario.batches.iter().sum::<u16>();
        let ring = Arc::new(ModelRing::<FENCED> {
            index: ModelCell::new(scenario.start),
            // A ring starts zeroed; an event index just behind the index requests nothing.
            event: ModelCell::new(match scenario.suppression {
                SuppressionKind::XenEvent => scenario.start,
                _ => scenario.start.wrapping_sub(1),
            }),
            flags: ModelCell::new(0),
            entries: (0..total).map(|_| AtomicU16::new(0)).collect(),
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
    run::<true>(Scenario { batches: &[2, 1], polled_before: true, ..SOUND });
}

#[test]
fn with_event_idx_where_the_index_wraps() {
    run::<true>(Scenario { start: 0xffff, polled_before: true, ..SOUND });
}

#[test]
fn with_event_idx_waiting_for_several() {
    run::<true>(Scenario { wait_for: 2, ..SOUND });
    run::<true>(Scenario { wait_for: 2, batches: &[1, 2], ..SOUND });
}

#[test]
fn in_a_xen_ring() {
    let xen = Scenario { suppression: SuppressionKind::XenEvent, ..SOUND };
    run::<true>(xen);
    run::<true>(Scenario { start: 0xffff, polled_before: true, ..xen });
    run::<true>(Scenario { wait_for: 2, batches: &[1, 2], ..xen });
}

#[test]
#[should_panic(expected = "deadlock")]
fn in_a_xen_ring_the_fences_are_needed() {
    run::<false>(Scenario { suppression: SuppressionKind::XenEvent, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn in_a_xen_ring_the_recheck_is_needed() {
    run::<true>(Scenario { rechecks: false, suppression: SuppressionKind::XenEvent, ..SOUND });
}

#[test]
fn without_event_idx() {
    run::<true>(Scenario { suppression: SuppressionKind::Flag, ..SOUND });
    run::<true>(Scenario {
        suppression: SuppressionKind::Flag,
        polled_before: true,
        batches: &[2, 1],
        start: 0xffff,
        ..SOUND
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn with_event_idx_the_fences_are_needed() {
    run::<false>(SOUND);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_event_idx_the_fences_are_needed() {
    run::<false>(Scenario { suppression: SuppressionKind::Flag, polled_before: true, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn with_event_idx_the_recheck_is_needed() {
    run::<true>(Scenario { rechecks: false, ..SOUND });
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_event_idx_the_recheck_is_needed() {
    run::<true>(Scenario { rechecks: false, suppression: SuppressionKind::Flag, polled_before: true, ..SOUND });
}
