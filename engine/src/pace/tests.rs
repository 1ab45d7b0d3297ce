//! The pace beside a simulated driver: one that makes requests available one by one, each for some time of its own, more while the worker takes
//! the ring's cache lines from it.

use super::*;

/// A driver with `depth` requests, and a worker that serves them at once. All times in nanoseconds.
struct Simulation {
    depth: u64,
    /// What the driver takes to make one request available.
    each: u64,
    /// What it takes besides, once for each look that took requests.
    stolen: u64,
    /// How long the worker takes for a turn, and a completion until the driver sees it.
    turn: u64,
    way: u64,
}

impl Simulation {
    /// Serves `requests`. Returns the time that it took.
    fn serve(&self, pace: &mut Pace, requests: u64) -> u64 {
        let mut now = pace.taken_at.0 + 1;
        // The driver's clock, and the requests that it may make available from which time on.
        let mut driver = now;
        let mut free: std::collections::VecDeque<u64> = vec![now; self.depth as usize].into();
        let mut ring = std::collections::VecDeque::new();
        let (begin, mut served) = (now, 0);
        while served < requests {
            // The driver runs until now.
            while let Some(from) = free.front().copied()
                && driver.max(from) + self.each <= now
            {
                free.pop_front();
                driver = driver.max(from) + self.each;
                ring.push_back(driver);
            }
            now += self.turn;
            if pace.holds(Ticks(now)) {
                continue;
            }
            let count = ring.len().min(16);
            if count == 0 {
                pace.found_nothing();
                continue;
            }
            ring.drain(..count);
            driver += self.stolen;
            served += count as u64;
            free.extend(std::iter::repeat_n(now + self.way, count));
            pace.took(count as u64, !ring.is_empty(), Ticks(now));
        }
        now - begin
    }

    /// Returns what the pace brings after it has learnt, beside none: a ratio of rates.
    fn gain(&self) -> f64 {
        const REQUESTS: u64 = 400_000;
        let mut pace = Pace::new();
        self.serve(&mut pace, REQUESTS);
        let with = self.serve(&mut pace, REQUESTS);
        let without = self.serve(&mut Pace { tuner: Tuner::new(&SHORT_BLOCKS, 1, 0), ..Pace::new() }, REQUESTS);
        without as f64 / with as f64
    }
}

const FAST: Simulation = Simulation { depth: 32, each: 200, stolen: 150, turn: 50, way: 150 };

#[test]
fn a_driver_that_is_the_bottleneck_is_looked_at_less_often() {
    let gain = FAST.gain();
    assert!(gain > 1.3, "{gain}");
}

#[test]
fn a_driver_that_waits_for_completions_is_not_made_to_wait_longer() {
    for depth in [1, 2, 4] {
        let gain = Simulation { depth, ..FAST }.gain();
        assert!(gain > 0.985, "depth {depth}: {gain}");
    }
}

#[test]
fn nothing_is_tried_on_a_slow_queue() {
    let mut pace = Pace::new();
    Simulation { depth: 1, way: 5000, ..FAST }.serve(&mut pace, 100_000);
    assert_eq!((pace.tuner.setting(), pace.hold_ns), (0, 0));
}

#[test]
fn a_hold_that_a_change_of_depth_makes_wrong_is_given_up() {
    let mut pace = Pace::new();
    FAST.serve(&mut pace, 400_000);
    assert!(pace.hold_ns() > 0);
    let shallow = Simulation { depth: 1, ..FAST };
    shallow.serve(&mut pace, 400_000);
    assert_eq!(pace.hold_ns(), 0);
}

#[test]
fn disturbed_blocks_are_not_counted() {
    let mut pace = Pace::new();
    let mut now = 0;
    for _ in 0..1000 {
        // A preemption in each block.
        for at in 0..BLOCK {
            now += if at == 7 { DISTURBED + 1 } else { 100 };
            pace.took(1, false, Ticks(now));
        }
    }
    assert_eq!((pace.tuner.setting(), pace.hold_ns), (0, 0));
}

#[test]
fn a_full_batch_and_an_empty_ring_need_no_hold() {
    let mut pace = Pace { hold_ns: 1000, ..Pace::new() };
    pace.took(3, false, Ticks(100));
    assert!(pace.holds(Ticks(1099)) && !pace.holds(Ticks(1100)));
    pace.took(16, true, Ticks(2000));
    assert!(!pace.holds(Ticks(2000)));
    pace.took(3, false, Ticks(3000));
    pace.found_nothing();
    assert!(!pace.holds(Ticks(3001)));
}
