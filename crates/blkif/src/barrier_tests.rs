//! Model of rings that follow the gate, in every or in many interleavings: earlier requests are executed before a
//! barrier, none runs concurrently with it, and every request completes, also if rings open, close or sleep meanwhile.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;

#[derive(Default)]
struct TestWaker(AtomicBool);

impl Wake for TestWaker {
    fn wake(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A request, identified by its position among all requests of all rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PutRequest {
    time: u32,
    barrier: bool,
}

/// State of a ring's barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnBarrier {
    Waiting(PutRequest),
    Running(PutRequest),
    /// Completed, response not published.
    Completed,
}

/// A queue, reduced to the gate's effects.
struct RingModel {
    gate: Option<RingGate>,
    waker: Arc<TestWaker>,
    waiting: VecDeque<PutRequest>,
    /// Number of waiting requests that come before the active barrier.
    earlier: usize,
    running: Vec<PutRequest>,
    unpublished: usize,
    own_barrier: Option<OwnBarrier>,
}

struct GateModel {
    gate: BarrierGate,
    rings: Vec<RingModel>,
    /// Number of requests put so far: the time of the next.
    time: u32,
    /// Completed barriers.
    completed_barriers: u32,
}

const BATCH: usize = 2;

impl GateModel {
    fn new(expected: u16) -> GateModel {
        GateModel { gate: BarrierGate::new(expected), rings: vec![], time: 0, completed_barriers: 0 }
    }

    fn open(&mut self) -> usize {
        let waker = Arc::new(TestWaker::default());
        let gate = Some(self.gate.open_ring(Arc::clone(&waker) as Arc<dyn Wake>));
        let waiting = VecDeque::new();
        self.rings.push(RingModel {
            gate,
            waker,
            waiting,
            earlier: 0,
            running: vec![],
            unpublished: 0,
            own_barrier: None,
        });
        self.rings.len() - 1
    }

    fn put(&mut self, ring: usize, barrier: bool) {
        self.rings[ring].waiting.push_back(PutRequest { time: self.time, barrier });
        self.time += 1;
    }

    /// Completes one of the running requests, if there is one.
    fn complete(&mut self, ring: usize, which: usize) {
        let ring = &mut self.rings[ring];
        if let Some(OwnBarrier::Running(_)) = ring.own_barrier {
            ring.own_barrier = Some(OwnBarrier::Completed);
        } else if !ring.running.is_empty() {
            let which = which % ring.running.len();
            ring.running.swap_remove(which);
            ring.unpublished += 1;
        }
    }

    /// Returns true if a turn of the ring has work: it is woken, has responses to publish, or requests that it may
    /// take.
    fn has_work(&self, at: usize) -> bool {
        let ring = &self.rings[at];
        let Some(gate) = &ring.gate else { return false };
        let may_take = ring.own_barrier.is_none() && (gate.is_open() || ring.earlier > 0);
        ring.waker.0.load(Ordering::SeqCst)
            || ring.unpublished > 0
            || ring.own_barrier == Some(OwnBarrier::Completed)
            || (may_take && !ring.waiting.is_empty())
    }

    fn turn(&mut self, at: usize) {
        if self.rings[at].waker.0.swap(false, Ordering::SeqCst) {
            self.advance(at);
        }
        self.pull(at);
        let ring = &mut self.rings[at];
        ring.unpublished = 0;
        if ring.own_barrier == Some(OwnBarrier::Completed) {
            ring.own_barrier = None;
            ring.gate.as_mut().expect("an open ring").complete();
            self.completed_barriers += 1;
        }
        self.advance(at);
    }

    fn pull(&mut self, at: usize) {
        let ring = &mut self.rings[at];
        let gate = ring.gate.as_mut().expect("an open ring");
        for _ in 0..BATCH {
            let open = gate.is_open();
            if ring.own_barrier.is_some() || !(open || ring.earlier > 0) {
                return;
            }
            let Some(put) = ring.waiting.pop_front() else { return };
            if !open {
                ring.earlier -= 1;
            }
            if put.barrier {
                ring.own_barrier = Some(OwnBarrier::Waiting(put));
                ring.earlier = 0;
                gate.begin();
            } else {
                ring.running.push(put);
            }
        }
    }

    fn advance(&mut self, at: usize) {
        loop {
            let ring = &mut self.rings[at];
            let in_flight = ring.earlier + ring.running.len() + ring.unpublished;
            match ring.gate.as_mut().expect("an open ring").advance(in_flight) {
                BarrierAction::Nothing => return,
                BarrierAction::TakeEarlier => {
                    assert_eq!(ring.own_barrier, None);
                    ring.earlier = ring.waiting.len();
                }
                BarrierAction::Submit => {
                    if let Some(OwnBarrier::Waiting(put)) = ring.own_barrier {
                        ring.own_barrier = Some(OwnBarrier::Running(put));
                        self.check_exclusive(at, put);
                    }
                    return;
                }
            }
        }
    }

    /// Checks the other rings when a barrier starts.
    fn check_exclusive(&self, at: usize, barrier: PutRequest) {
        for (other, ring) in self.rings.iter().enumerate().filter(|(_, ring)| ring.gate.is_some()) {
            assert!(ring.running.is_empty() && ring.unpublished == 0, "ring {other} runs {:?}", ring.running);
            assert!(
                other == at || !matches!(ring.own_barrier, Some(OwnBarrier::Running(_) | OwnBarrier::Completed)),
                "two barriers"
            );
            // Requests behind a barrier of their ring come after it.
            if ring.own_barrier.is_none() {
                let earlier = ring.waiting.iter().find(|put| put.time < barrier.time);
                assert!(earlier.is_none(), "{earlier:?} of ring {other} comes before {barrier:?}");
            }
        }
    }

    /// Closes the ring, with nothing in flight.
    fn close(&mut self, at: usize) {
        let ring = &mut self.rings[at];
        (ring.waiting, ring.earlier, ring.unpublished, ring.own_barrier) = (VecDeque::new(), 0, 0, None);
        ring.running.clear();
        ring.gate = None;
    }

    /// Runs until no ring has work: then every request is completed.
    fn finish(&mut self) {
        let mut bound = 100_000;
        loop {
            let mut happened = false;
            for at in 0..self.rings.len() {
                if self.has_work(at) {
                    self.turn(at);
                    happened = true;
                }
                let ring = &self.rings[at];
                if !ring.running.is_empty() || matches!(ring.own_barrier, Some(OwnBarrier::Running(_))) {
                    self.complete(at, 0);
                    happened = true;
                }
            }
            if !happened {
                break;
            }
            bound -= 1;
            assert!(bound > 0, "rings keep each other busy");
        }
        for (at, ring) in self.rings.iter().enumerate().filter(|(_, ring)| ring.gate.is_some()) {
            let left = (&ring.waiting, ring.own_barrier, ring.earlier);
            assert!(left == (&VecDeque::new(), None, 0), "ring {at} sleeps with {left:?}");
            assert!(ring.gate.as_ref().is_some_and(RingGate::is_open), "the gate is closed");
        }
    }
}

/// Enumerates all sequences of choices, one per run.
#[derive(Default)]
struct ChoiceEnumerator {
    /// The choices of this run, each with its number of options.
    trail: Vec<(usize, usize)>,
    at: usize,
}

impl ChoiceEnumerator {
    fn choose(&mut self, options: usize) -> usize {
        if self.at == self.trail.len() {
            self.trail.push((0, options));
        }
        let (choice, known) = self.trail[self.at];
        assert_eq!(known, options, "the same choices lead to the same state");
        self.at += 1;
        choice
    }

    /// Prepares the next run. Returns false after the last.
    fn next(&mut self) -> bool {
        self.at = 0;
        while let Some((choice, options)) = self.trail.pop() {
            if choice + 1 < options {
                self.trail.push((choice + 1, options));
                return true;
            }
        }
        false
    }
}

/// Runs all orders of `steps` steps of rings that get these requests (`true`: a barrier) before or between the steps.
fn every_order(rings: &[&[bool]], steps: usize, closes: bool) -> u32 {
    let mut chooser = ChoiceEnumerator::default();
    let mut runs = 0;
    loop {
        let mut world = GateModel::new(rings.len() as u16);
        let mut to_put: Vec<VecDeque<bool>> = rings.iter().map(|ring| ring.iter().copied().collect()).collect();
        let mut may_close = closes;
        rings.iter().for_each(|_| _ = world.open());
        for _ in 0..steps {
            let mut steps: Vec<(u8, usize)> = vec![];
            for (at, left) in to_put.iter().enumerate() {
                let ring = &world.rings[at];
                let possible = [
                    !left.is_empty() && ring.gate.is_some(),
                    world.has_work(at),
                    !ring.running.is_empty() || matches!(ring.own_barrier, Some(OwnBarrier::Running(_))),
                    may_close && ring.gate.is_some(),
                ];
                steps.extend((0..4).filter(|kind| possible[usize::from(*kind)]).map(|kind| (kind, at)));
            }
            if steps.is_empty() {
                break;
            }
            let (kind, at) = steps[chooser.choose(steps.len())];
            match kind {
                0 => {
                    let barrier = to_put[at].pop_front().expect("as just seen");
                    world.put(at, barrier);
                }
                1 => world.turn(at),
                2 => world.complete(at, 0),
                _ => {
                    world.close(at);
                    may_close = false;
                }
            }
        }
        for (at, left) in to_put.iter_mut().enumerate() {
            if world.rings[at].gate.is_some() {
                left.drain(..).for_each(|barrier| world.put(at, barrier));
            }
        }
        world.finish();
        runs += 1;
        if !chooser.next() {
            return runs;
        }
    }
}

#[test]
fn barriers_hold_in_every_order_of_steps() {
    let runs = [
        every_order(&[&[false, true], &[false, false]], 11, false),
        every_order(&[&[true], &[true]], 14, false),
        every_order(&[&[false, true, false], &[true]], 12, false),
        every_order(&[&[true], &[false], &[false]], 10, false),
        every_order(&[&[true], &[true], &[false]], 10, false),
    ];
    assert!(runs.iter().all(|runs| *runs > 300), "{runs:?}");
}

#[test]
fn barriers_hold_whichever_ring_closes_when() {
    let runs = [
        every_order(&[&[true], &[false, false]], 10, true),
        every_order(&[&[true], &[true]], 10, true),
        every_order(&[&[true], &[true], &[false]], 8, true),
    ];
    assert!(runs.iter().all(|runs| *runs > 300), "{runs:?}");
}

#[test]
fn barriers_hold_in_long_random_runs() {
    for seed in 0..300 {
        let mut random = SmallRng::seed_from_u64(seed);
        let expected = random.random_range(1..=4);
        let mut world = GateModel::new(expected);
        let (mut opened, barriers) = (0, random.random_range(2..20));
        for _ in 0..2000 {
            let late = opened >= expected;
            if opened == 0 || (!late && random.random_ratio(1, 8)) || (late && random.random_ratio(1, 300)) {
                world.open();
                opened += 1;
            }
            let at = random.random_range(0..world.rings.len());
            if world.rings[at].gate.is_none() {
                continue;
            }
            match random.random_range(0..100) {
                0..30 => {
                    let barrier = random.random_ratio(1, barriers);
                    world.put(at, barrier);
                }
                30..65 if world.has_work(at) => world.turn(at),
                // A turn without work.
                65..70 => world.turn(at),
                70..99 => world.complete(at, random.random_range(0..100)),
                99 if random.random_ratio(1, 6) => world.close(at),
                _ => {}
            }
        }
        (opened..expected).for_each(|_| _ = world.open());
        world.finish();
        assert!(world.completed_barriers > 0, "seed {seed}");
    }
}

#[test]
fn a_ring_that_will_not_open_is_not_waited_for() {
    let mut world = GateModel::new(2);
    let ring = world.open();
    world.put(ring, true);
    world.turn(ring);
    world.turn(ring);
    assert!(matches!(world.rings[ring].own_barrier, Some(OwnBarrier::Waiting(_))), "the other ring may have requests");
    world.gate.skip_unopened_rings();
    world.finish();
    assert_eq!(world.completed_barriers, 1);
}

#[test]
fn earlier_requests_of_another_ring_are_executed_before_the_barrier() {
    let mut world = GateModel::new(2);
    let (one, other) = (world.open(), world.open());
    world.put(other, false);
    world.put(one, true);
    world.turn(one);
    // Not before the other ring has taken its request, and not while it runs.
    for _ in 0..2 {
        world.turn(one);
        assert!(matches!(world.rings[one].own_barrier, Some(OwnBarrier::Waiting(_))));
        world.turn(other);
        assert_eq!(world.rings[other].running.len(), 1);
    }
    world.put(other, false);
    world.turn(other);
    assert_eq!(world.rings[other].running.len(), 1, "this came after the barrier");
    world.complete(other, 0);
    world.turn(one);
    assert!(matches!(world.rings[one].own_barrier, Some(OwnBarrier::Waiting(_))), "its response is not visible");
    world.turn(other);
    assert!(world.has_work(one), "the last report wakes the barrier's ring");
    world.turn(one);
    assert!(matches!(world.rings[one].own_barrier, Some(OwnBarrier::Running(_))));
    assert!(!world.has_work(other));
    world.finish();
}
