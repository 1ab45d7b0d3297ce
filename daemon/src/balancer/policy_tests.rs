use super::*;

/// What both workers complete per second: with worker 1's queues at home, and lent to worker 0.
#[derive(Clone, Copy)]
struct Load {
    home: (u64, u64),
    lent: u64,
    /// Worker 1, and worker 0, share their CPU with others.
    hindered: (bool, bool),
}

const NOBODY: Load = Load { home: (0, 0), lent: 0, hindered: (true, false) };
/// A client that polls on worker 1's CPU.
const SHARED: Load = Load { home: (900_000, 100_000), lent: 3_000_000, hindered: (true, false) };

/// Two workers and their queues.
struct World {
    policy: Policy,
    now: Duration,
    samples: [WorkerSample; 2],
    is_lent: bool,
    /// Moves fail.
    is_stuck: bool,
    moves: Vec<Move>,
    /// How often the thread woke.
    steps: usize,
}

const LEND: Move = Move::Lend { from: 1, to: 0 };
const RETURN: Move = Move::Return { from: 1, to: 0 };

impl World {
    fn new() -> World {
        World {
            policy: Policy::default(),
            now: Duration::from_secs(1),
            samples: Default::default(),
            is_lent: false,
            is_stuck: false,
            moves: Vec::new(),
            steps: 0,
        }
    }

    /// Serves for so long, from a signal on. Returns for how much of it the queues were lent, in percent; ends early when the thread waits
    /// for a signal.
    fn serve(&mut self, load: Load, length: Duration) -> u64 {
        let (end, began) = (self.now + length, self.now);
        let mut lent = Duration::ZERO;
        self.samples[0].is_hindered = load.hindered.1;
        self.samples[1].is_hindered = load.hindered.0;
        while self.now < end {
            self.steps += 1;
            let (action, pause) = self.policy.step(self.now, &self.samples);
            if let Some(moving) = action {
                self.moves.push(moving);
                if !self.is_stuck {
                    assert_eq!(self.is_lent, moving == RETURN, "only what is away comes home");
                    self.is_lent = moving == LEND;
                }
                self.policy.moved(moving, self.now, !self.is_stuck);
            }
            let Pause::For(length) = pause else { break };
            assert!(length >= Duration::from_millis(1), "it never spins");
            let ms = length.as_millis() as u64;
            if self.is_lent {
                lent += length;
                self.samples[0].completions += load.lent * ms / 1000;
            } else {
                self.samples[0].completions += load.home.0 * ms / 1000;
                self.samples[1].completions += load.home.1 * ms / 1000;
            }
            self.now += length;
        }
        (lent.as_millis() * 100 / (self.now - began).as_millis().max(1)) as u64
    }
}

const MINUTE: Duration = Duration::from_secs(60);
/// From a signal until a loan has been found good.
const TO_LEND: Duration = Duration::from_secs(7);

#[test]
fn a_worker_whose_cpu_others_want_lends_its_queues_where_that_is_better() {
    let mut world = World::new();
    world.serve(SHARED, TO_LEND);
    assert_eq!((world.moves.as_slice(), world.is_lent), (&[LEND][..], true));
    assert_eq!(world.policy.loans()[&1].rates.0, 1_000_000);
    // Home is tried rarer and rarer.
    assert!(world.serve(SHARED, 60 * MINUTE) > 97);
    assert!(world.moves.len() < 50, "{}", world.moves.len());
    // The queues come home when that is as good, and stay there while nobody wants the CPU.
    let both = Load { home: (2_000_000, 2_000_000), lent: 3_000_000, hindered: (false, false) };
    world.serve(both, 6 * MINUTE);
    assert!(!world.is_lent && world.policy.loans().is_empty());
    let moves = world.moves.len();
    world.serve(both, MINUTE);
    assert_eq!(world.moves.len(), moves);
}

#[test]
fn what_is_not_a_tenth_better_is_undone_and_tried_rarer_and_rarer() {
    for lent in [100_000, 950_000, 1_000_000, 1_090_000] {
        let mut world = World::new();
        let load = Load { lent, ..SHARED };
        assert!(world.serve(load, 60 * MINUTE) < 3, "{lent}");
        assert!(!world.is_lent && world.policy.loans().is_empty());
        let trials = world.moves.iter().filter(|moving| **moving == LEND).count();
        assert!((5..20).contains(&trials), "{trials}");
    }
}

#[test]
fn fewer_workers_are_tried_where_others_want_all_cpus() {
    let mut world = World::new();
    assert!(world.serve(Load { hindered: (true, true), ..SHARED }, 60 * MINUTE) > 90);
    let mut world = World::new();
    assert!(world.serve(Load { hindered: (true, true), lent: 700_000, ..SHARED }, 60 * MINUTE) < 3);
}

#[test]
fn a_bad_result_ends_a_trial_early() {
    let mut world = World::new();
    world.serve(Load { lent: 700_000, ..SHARED }, TICK + COUNTING + FIRST_SLICE + 2 * SLICE);
    assert_eq!(world.moves, [LEND, RETURN]);
}

#[test]
fn nothing_is_tried_without_need() {
    for load in [NOBODY, Load { hindered: (false, false), ..SHARED }, Load { home: (900_000, 0), ..SHARED }] {
        let mut world = World::new();
        world.serve(load, MINUTE);
        assert_eq!(world.moves, []);
    }
}

#[test]
fn the_thread_sleeps_when_nothing_is_served_and_queues_are_home_again() {
    let mut world = World::new();
    world.serve(SHARED, MINUTE);
    assert!(world.is_lent);
    let (steps, began) = (world.steps, world.now);
    world.serve(NOBODY, 60 * MINUTE);
    assert!(!world.is_lent && world.policy.loans().is_empty());
    assert!(world.steps - steps < 20 && world.now - began < MINUTE / 6);
}

#[test]
fn queues_that_cannot_move_are_tried_rarely_and_lent_ones_are_not_forgotten() {
    let mut world = World { is_stuck: true, ..World::new() };
    world.serve(SHARED, 60 * MINUTE);
    assert!(world.moves.len() < 20 && world.moves.iter().all(|moving| *moving == LEND));
    let mut world = World::new();
    world.serve(SHARED, TO_LEND);
    world.is_stuck = true;
    world.serve(NOBODY, 3 * TICK);
    assert_eq!(world.policy.loans().len(), 1, "they are still away");
    world.is_stuck = false;
    world.serve(NOBODY, 2 * MINUTE);
    assert!(!world.is_lent && world.policy.loans().is_empty());
}

#[test]
fn a_worker_that_is_gone_is_forgotten() {
    let mut world = World::new();
    world.serve(SHARED, TO_LEND);
    assert_eq!(world.policy.loans().len(), 1);
    let one = [world.samples[0]];
    assert_eq!(world.policy.step(world.now, &one).0, None);
    assert!(world.policy.loans().is_empty());
    let mut world = World::new();
    world.serve(SHARED, TICK + COUNTING / 2);
    assert_eq!(world.policy.step(world.now, &one).0, None, "in mid-trial");
}

#[test]
fn of_several_the_one_that_has_least_to_do_gets_the_queues() {
    let mut policy = Policy::default();
    let mut samples = [WorkerSample::default(); 4];
    samples[2].is_hindered = true;
    let mut now = Duration::from_secs(1);
    let mut lent = Vec::new();
    for _ in 0..3 {
        let (action, pause) = policy.step(now, &samples);
        lent.extend(action);
        let Pause::For(length) = pause else { panic!("{now:?}") };
        now += length;
        for (sample, more) in samples.iter_mut().zip([500, 20, 90, 60]) {
            sample.completions += more;
        }
    }
    assert_eq!(lent, [Move::Lend { from: 2, to: 1 }]);
}
