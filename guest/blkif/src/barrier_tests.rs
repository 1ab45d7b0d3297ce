//! Model of rings that follow the gate, in every or in many interleavings: earlier requests are executed before a barrier, none runs
//! concurrently with it, and every request completes, whichever rings open, close or sleep meanwhile.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;

#[derive(Default)]
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A request, identified by its position among all that were put on any ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Put {
    time: u32,
    barrier: bool,
}

/// State of a ring's barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Own {
    Waits(Put),
    Runs(Put),
    /// Completed, response not published.
    Answered,
}

/// A queue, reduced to what the gate affects.
struct Ring {
    gate: Option<RingGate>,
    bell: Arc<Bell>,
    waiting: VecDeque<Put>,
    /// Number of waiting requests that come before the active barrier.
    earlier: usize,
    running: Vec<Put>,
    unpublished: usize,
    own: Option<Own>,
}

struct World {
    gate: Gate,
    rings: Vec<Ring>,
    /// Number of requests put so far: the time of the next.
    time: u32,
    /// Completed barriers.
    passed: u32,
}

const BATCH: usize = 2;

impl World {
    fn new(expected: u16) -> World {
        World { gate: Gate::new(expected), rings: vec![], time: 0, passed: 0 }
    }

    fn open(&mut self) -> usize {
        let bell = Arc::new(Bell::default());
        let gate = Some(self.gate.open_ring(Arc::clone(&bell) as Arc<dyn Wake>));
        let waiting = VecDeque::new();
        self.rings.push(Ring { gate, bell, waiting, earlier: 0, running: vec![], unpublished: 0, own: None });
        self.rings.len() - 1
    }

    fn put(&mut self, ring: usize, barrier: bool) {
        self.rings[ring].waiting.push_back(Put { time: self.time, barrier });
        self.time += 1;
    }

    /// Completes one of the running requests, if there is one.
    fn complete(&mut self, ring: usize, which: usize) {
        let ring = &mut self.rings[ring];
        if let Some(Own::Runs(_)) = ring.own {
            ring.own = Some(Own::Answered);
        } else if !ring.running.is_empty() {
            let which = which % ring.running.len();
            ring.running.swap_remove(which);
            ring.unpublished += 1;
        }
    }

    /// Returns true if a turn of the ring has work: it is woken, has responses to publish, or requests that it may take.
    fn is_awake(&self, at: usize) -> bool {
        let ring = &self.rings[at];
        let Some(gate) = &ring.gate else { return false };
        let may_take = ring.own.is_none() && (gate.may_take() || ring.earlier > 0);
        ring.bell.0.load(Ordering::SeqCst)
            || ring.unpublished > 0
            || ring.own == Some(Own::Answered)
            || (may_take && !ring.waiting.is_empty())
    }

    fn turn(&mut self, at: usize) {
        if self.rings[at].bell.0.swap(false, Ordering::SeqCst) {
            self.settle(at);
        }
        self.pull(at);
        let ring = &mut self.rings[at];
        ring.unpublished = 0;
        if ring.own == Some(Own::Answered) {
            ring.own = None;
            ring.gate.as_mut().expect("an open ring").end();
            self.passed += 1;
        }
        self.settle(at);
    }

    fn pull(&mut self, at: usize) {
        let ring = &mut self.rings[at];
        let gate = ring.gate.as_mut().expect("an open ring");
        for _ in 0..BATCH {
            let open = gate.may_take();
            if ring.own.is_some() || !(open || ring.earlier > 0) {
                return;
            }
            let Some(put) = ring.waiting.pop_front() else { return };
            if !open {
                ring.earlier -= 1;
            }
            if put.barrier {
                ring.own = Some(Own::Waits(put));
                ring.earlier = 0;
                gate.begin();
            } else {
                ring.running.push(put);
            }
        }
    }

    fn settle(&mut self, at: usize) {
        loop {
            let ring = &mut self.rings[at];
            let in_flight = ring.earlier + ring.running.len() + ring.unpublished;
            match ring.gate.as_mut().expect("an open ring").settle(in_flight) {
                Step::Nothing => return,
                Step::TakeEarlier => {
                    assert_eq!(ring.own, None);
                    ring.earlier = ring.waiting.len();
                }
                Step::Go => {
                    if let Some(Own::Waits(put)) = ring.own {
                        ring.own = Some(Own::Runs(put));
                        self.check_alone(at, put);
                    }
                    return;
                }
            }
        }
    }

    /// Checks the other rings when a barrier starts.
    fn check_alone(&self, at: usize, barrier: Put) {
        for (other, ring) in self.rings.iter().enumerate().filter(|(_, ring)| ring.gate.is_some()) {
            assert!(ring.running.is_empty() && ring.unpublished == 0, "ring {other} runs {:?}", ring.running);
            assert!(other == at || !matches!(ring.own, Some(Own::Runs(_) | Own::Answered)), "two barriers");
            // Requests behind a barrier of their ring come after it.
            if ring.own.is_none() {
                let earlier = ring.waiting.iter().find(|put| put.time < barrier.time);
                assert!(earlier.is_none(), "{earlier:?} of ring {other} comes before {barrier:?}");
            }
        }
    }

    /// Closes the ring, with nothing in flight.
    fn close(&mut self, at: usize) {
        let ring = &mut self.rings[at];
        (ring.waiting, ring.earlier, ring.unpublished, ring.own) = (VecDeque::new(), 0, 0, None);
        ring.running.clear();
        ring.gate = None;
    }

    /// Runs until no ring has work: then every request is completed.
    fn finish(&mut self) {
        let mut bound = 100_000;
        loop {
            let mut happened = false;
            for at in 0..self.rings.len() {
                if self.is_awake(at) {
                    self.turn(at);
                    happened = true;
                }
                let ring = &self.rings[at];
                if !ring.running.is_empty() || matches!(ring.own, Some(Own::Runs(_))) {
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
            let left = (&ring.waiting, ring.own, ring.earlier);
            assert!(left == (&VecDeque::new(), None, 0), "ring {at} sleeps with {left:?}");
            assert!(ring.gate.as_ref().is_some_and(RingGate::may_take), "the gate is closed");
        }
    }
}

/// Enumerates all sequences of choices, one per run.
#[derive(Default)]
struct Chooser {
    /// The choices of this run, each with its number of options.
    trail: Vec<(usize, usize)>,
    at: usize,
}

impl Chooser {
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
    let mut chooser = Chooser::default();
    let mut runs = 0;
    loop {
        let mut world = World::new(rings.len() as u16);
        let mut to_put: Vec<VecDeque<bool>> = rings.iter().map(|ring| ring.iter().copied().collect()).collect();
        let mut may_close = closes;
        rings.iter().for_each(|_| _ = world.open());
        for _ in 0..steps {
            let mut steps: Vec<(u8, usize)> = vec![];
            for (at, left) in to_put.iter().enumerate() {
                let ring = &world.rings[at];
                let possible = [
                    !left.is_empty() && ring.gate.is_some(),
                    world.is_awake(at),
                    !ring.running.is_empty() || matches!(ring.own, Some(Own::Runs(_))),
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
        let mut world = World::new(expected);
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
                30..65 if world.is_awake(at) => world.turn(at),
                // A turn without work.
                65..70 => world.turn(at),
                70..99 => world.complete(at, random.random_range(0..100)),
                99 if random.random_ratio(1, 6) => world.close(at),
                _ => {}
            }
        }
        (opened..expected).for_each(|_| _ = world.open());
        world.finish();
        assert!(world.passed > 0, "seed {seed}");
    }
}

#[test]
fn a_ring_that_will_not_open_is_not_waited_for() {
    let mut world = World::new(2);
    let ring = world.open();
    world.put(ring, true);
    world.turn(ring);
    world.turn(ring);
    assert!(matches!(world.rings[ring].own, Some(Own::Waits(_))), "the other ring may have requests");
    world.gate.forget_absent();
    world.finish();
    assert_eq!(world.passed, 1);
}

#[test]
fn earlier_requests_of_another_ring_are_executed_before_the_barrier() {
    let mut world = World::new(2);
    let (one, other) = (world.open(), world.open());
    world.put(other, false);
    world.put(one, true);
    world.turn(one);
    // Not before the other ring has taken its request, and not while it runs.
    for _ in 0..2 {
        world.turn(one);
        assert!(matches!(world.rings[one].own, Some(Own::Waits(_))));
        world.turn(other);
        assert_eq!(world.rings[other].running.len(), 1);
    }
    world.put(other, false);
    world.turn(other);
    assert_eq!(world.rings[other].running.len(), 1, "this came after the barrier");
    world.complete(other, 0);
    world.turn(one);
    assert!(matches!(world.rings[one].own, Some(Own::Waits(_))), "its response is not visible");
    world.turn(other);
    assert!(world.is_awake(one), "the last report wakes the barrier's ring");
    world.turn(one);
    assert!(matches!(world.rings[one].own, Some(Own::Runs(_))));
    assert!(!world.is_awake(other));
    world.finish();
}
