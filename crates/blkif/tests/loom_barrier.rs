//! Loom model of barriers between rings on several threads: every interleaving (with few preemptions) and every
//! reordering that the memory model allows.
//!
//! The code under test is `barrier::BarrierGate`, shared by the rings of a disk, with loom's mutex and atomics. The
//! model shows that a barrier starts only when no request runs on any ring and all earlier requests are done, visibly
//! to the barrier's own thread. A ring that sleeps although it has work is a deadlock, which loom reports. Models
//! without parts of the synchronisation show that the check can fail.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize as Unmodelled, Ordering};

use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::sync::{Mutex, Notify};
use mqblk_blkif::barrier::{BarrierAction, BarrierGate, BarrierSequence, RingGate, SharedSequence};
use mqblk_core::Wake;

/// Order of the flag and the wakeups of a change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UpdateOrder {
    /// The flag, then the wakers: the real order.
    FlagFirst,
    /// A woken ring may see the old flag.
    WakersFirst,
    /// The flag is never set.
    NoFlag,
}

const FLAG_FIRST: u8 = UpdateOrder::FlagFirst as u8;
const WAKERS_FIRST: u8 = UpdateOrder::WakersFirst as u8;
const NO_FLAG: u8 = UpdateOrder::NoFlag as u8;

struct ModelSequence<const ORDER: u8> {
    barrier_active: AtomicBool,
    sequence: Mutex<BarrierSequence>,
}

impl<const ORDER: u8> SharedSequence for ModelSequence<ORDER> {
    fn new(sequence: BarrierSequence) -> Self {
        ModelSequence { barrier_active: AtomicBool::new(false), sequence: Mutex::new(sequence) }
    }

    fn with_lock<R>(&self, change: impl FnOnce(&mut BarrierSequence) -> R) -> R {
        change(&mut self.sequence.lock().unwrap())
    }

    fn is_barrier_active(&self) -> bool {
        self.barrier_active.load(Ordering::Acquire)
    }

    fn set_barrier_active(&self, active: bool) {
        if ORDER != NO_FLAG {
            self.barrier_active.store(active, Ordering::Release);
        }
    }

    fn update<R>(&self, change: impl FnOnce(&mut BarrierSequence) -> R) -> R {
        self.with_lock(|sequence| {
            let was_active = sequence.has_active_barrier();
            let result = change(sequence);
            if ORDER == WAKERS_FIRST {
                sequence.send_wakeups();
            }
            if sequence.has_active_barrier() != was_active {
                self.set_barrier_active(!was_active);
            }
            sequence.send_wakeups();
            result
        })
    }
}

/// A request on a ring.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PutRequest {
    Write,
    Barrier,
}
use PutRequest::{Barrier, Write};

/// State of a ring that other threads read.
struct SharedRing {
    running: Unmodelled,
    /// Visible to the barrier's thread only if the gate orders both threads.
    done: AtomicUsize,
    /// The eventfd: a signal stays until it is waited for.
    event: Notify,
}

struct TestWaker(Arc<Vec<SharedRing>>, usize);

impl Wake for TestWaker {
    fn wake(&self) {
        self.0[self.1].event.notify();
    }
}

struct Disk {
    rings: Arc<Vec<SharedRing>>,
    /// Completed barriers.
    completed_barriers: Unmodelled,
}

/// A queue on its thread. The ring holds all requests from the start.
struct Ring<const ORDER: u8> {
    index: usize,
    /// Dropped explicitly: loom does not support the drop while it reports a failure.
    gate: ManuallyDrop<RingGate<ModelSequence<ORDER>>>,
    scripts: &'static [&'static [PutRequest]],
    next: usize,
    earlier: usize,
    running: usize,
    done: usize,
    barrier: bool,
    disk: Arc<Disk>,
}

/// Returns the number of writes before a ring's first barrier.
fn writes(script: &[PutRequest]) -> usize {
    script.iter().take_while(|put| **put == Write).count()
}

impl<const ORDER: u8> Ring<ORDER> {
    fn seen(&self) -> &SharedRing {
        &self.disk.rings[self.index]
    }

    /// Takes one request. Returns false if none may be taken.
    fn pull(&mut self) -> bool {
        let open = self.gate.is_open();
        let script = self.scripts[self.index];
        if self.barrier || self.next == script.len() || !(open || self.earlier > 0) {
            return false;
        }
        if !open {
            self.earlier -= 1;
        }
        self.next += 1;
        if script[self.next - 1] == Barrier {
            self.barrier = true;
            self.earlier = 0;
            self.gate.begin();
        } else {
            self.running += 1;
            self.seen().running.store(1, Ordering::Relaxed);
        }
        true
    }

    fn finish(&mut self) {
        if self.running > 0 {
            self.done += self.running;
            self.seen().done.store(self.done, Ordering::Relaxed);
            self.seen().running.store(0, Ordering::Relaxed);
            self.running = 0;
        }
    }

    /// Advances the barrier. Returns true if the ring must be checked again before it sleeps.
    fn advance(&mut self) -> bool {
        match self.gate.advance(self.earlier + self.running) {
            BarrierAction::Nothing => false,
            BarrierAction::TakeEarlier => {
                self.earlier = self.scripts[self.index].len() - self.next;
                true
            }
            BarrierAction::Submit => {
                for (ring, seen) in self.disk.rings.iter().enumerate() {
                    assert_eq!(seen.running.load(Ordering::Relaxed), 0, "ring {ring} runs beside a barrier");
                    let done = seen.done.load(Ordering::Relaxed);
                    assert!(done >= writes(self.scripts[ring]), "a barrier runs before an earlier request");
                }
                self.barrier = false;
                self.disk.completed_barriers.fetch_add(1, Ordering::Relaxed);
                self.gate.complete();
                true
            }
        }
    }

    /// Serves the ring until it is empty and, if it `stays`, until all barriers are completed; then closes it.
    fn serve(mut self, stays: bool) {
        let barriers = self.scripts.iter().flat_map(|script| script.iter()).filter(|put| **put == Barrier).count();
        loop {
            let mut again = self.pull();
            self.finish();
            again |= self.advance();
            let empty = self.next == self.scripts[self.index].len() && !self.barrier;
            if empty && (!stays || self.disk.completed_barriers.load(Ordering::Relaxed) == barriers) {
                drop(ManuallyDrop::into_inner(self.gate));
                return;
            }
            if !again {
                self.seen().event.wait();
            }
        }
    }
}

/// Maximum of preemptions of an interleaving: bugs of this kind need one or two. LOOM_MAX_PREEMPTIONS overrides it.
const PREEMPTIONS: usize = 3;

fn model<const ORDER: u8>(scripts: &'static [&'static [PutRequest]], stays: &'static [bool]) {
    let mut builder = loom::model::Builder::new();
    // One less for each additional thread: the state space grows with both.
    builder.preemption_bound.get_or_insert(PREEMPTIONS + 2 - scripts.len());
    builder.check(move || {
        let seen = || SharedRing { running: Unmodelled::new(0), done: AtomicUsize::new(0), event: Notify::new() };
        let rings: Arc<Vec<_>> = Arc::new(scripts.iter().map(|_| seen()).collect());
        let disk = Arc::new(Disk { rings: Arc::clone(&rings), completed_barriers: Unmodelled::new(0) });
        let gate = BarrierGate::<ModelSequence<ORDER>>::new(scripts.len() as u16);
        let open = |own: usize| Ring {
            index: own,
            gate: ManuallyDrop::new(gate.open_ring(Arc::new(TestWaker(Arc::clone(&rings), own)))),
            scripts,
            next: 0,
            earlier: 0,
            running: 0,
            done: 0,
            barrier: false,
            disk: Arc::clone(&disk),
        };
        let mut rings: Vec<_> = (0..scripts.len()).map(open).collect();
        let first = rings.remove(0);
        let serve = |ring: Ring<ORDER>| {
            let stays = stays[ring.index];
            loom::thread::spawn(move || ring.serve(stays))
        };
        let threads: Vec<_> = rings.into_iter().map(serve).collect();
        first.serve(stays[0]);
        threads.into_iter().for_each(|thread| thread.join().expect("a thread ends"));
        let barriers = scripts.iter().flat_map(|script| script.iter()).filter(|put| **put == Barrier).count();
        assert_eq!(disk.completed_barriers.load(Ordering::Relaxed), barriers);
    });
}

#[test]
fn a_barrier_waits_for_another_ring_s_requests() {
    model::<FLAG_FIRST>(&[&[Barrier], &[Write]], &[true, true]);
    model::<FLAG_FIRST>(&[&[Write, Barrier], &[Write, Write]], &[true, true]);
}

#[test]
fn later_requests_wait_for_the_barrier() {
    model::<FLAG_FIRST>(&[&[Barrier, Write], &[]], &[true, true]);
}

#[test]
fn barriers_of_two_rings_run_one_at_a_time() {
    model::<FLAG_FIRST>(&[&[Barrier], &[Barrier]], &[true, true]);
}

#[test]
fn a_ring_may_close_at_any_moment() {
    model::<FLAG_FIRST>(&[&[Barrier], &[Write]], &[false, false]);
    model::<FLAG_FIRST>(&[&[Barrier], &[Barrier]], &[false, false]);
}

#[test]
fn a_barrier_waits_for_all_other_rings() {
    model::<FLAG_FIRST>(&[&[Barrier], &[Write], &[]], &[false, false, true]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_flag_comes_before_the_wakers() {
    model::<WAKERS_FIRST>(&[&[Barrier], &[Write]], &[true, true]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_flag_is_needed() {
    model::<NO_FLAG>(&[&[Barrier], &[Write]], &[true, true]);
}
