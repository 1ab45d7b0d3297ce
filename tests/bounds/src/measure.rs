//! Measures the slowness of this machine by wall clock, so that the load of others counts.

use std::hint::black_box;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Seconds that [`cpu`] takes on the reference machine.
const CPU_SECONDS: f64 = 0.06;
/// Steps of that computation.
const STEPS: u64 = 30_000_000;
/// Most CPUs to measure.
const CPUS: usize = 8;

/// Seconds for a thread to be woken on the reference machine.
const WAKING_SECONDS: f64 = 10e-6;
/// Measured wake-ups, and the time after which the measurement ends early.
const WAKE_UPS: u32 = 1000;
const WAKING_AT_MOST: Duration = Duration::from_secs(1);

/// Returns the time of a computation on every CPU at once, relative to the reference machine.
pub(crate) fn cpu() -> f64 {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(CPUS);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for cpu in 0..cpus {
            scope.spawn(move || {
                let mut state = black_box(cpu as u64 + 1);
                // xorshift64: each step depends on the one before.
                for _ in 0..STEPS {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                }
                black_box(state);
            });
        }
    });
    start.elapsed().as_secs_f64() / CPU_SECONDS
}

/// Returns the time in which two threads wake each other, relative to the reference machine.
pub(crate) fn waking() -> f64 {
    let (to_other, from_here) = channel::<()>();
    let (to_here, from_other) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while from_here.recv().is_ok() {
                if to_here.send(()).is_err() {
                    return;
                }
            }
        });
        let start = Instant::now();
        let mut woken = 0;
        while woken < WAKE_UPS && start.elapsed() < WAKING_AT_MOST {
            // The other thread ends when this one has ended.
            if to_other.send(()).is_err() || from_other.recv().is_err() {
                break;
            }
            woken += 2;
        }
        drop(to_other);
        start.elapsed().as_secs_f64() / f64::from(woken.max(1)) / WAKING_SECONDS
    })
}
