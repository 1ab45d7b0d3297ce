//! The cost of sleeping instead of polling: 20 us on one machine, 100 us and more on another. Measured once, before the
//! workers start.
//!
//! It is two round trips between threads that both sleep. One passes when a worker sleeps and a waiting guest wakes it.
//! The other is the guest's loss: it is not served meanwhile, so that its own thread sleeps too. The threads have a CPU
//! each: on a common one a wake-up is a switch of threads, a third of the cost of waking a CPU.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::cpu::pin_thread;

/// Accepted results, in nanoseconds: the host may be busy during the measurement, or a virtual machine's CPUs all
/// awake.
const BELIEVED: RangeInclusive<u64> = 10_000..=100_000;

/// Measured round trips, the sleep of the threads before each, so that their CPUs halt, and the time after which the
/// measurement ends early.
const ROUND_TRIPS: usize = 16;
const ASLEEP: Duration = Duration::from_micros(100);
const AT_MOST: Duration = Duration::from_millis(20);

static SLEEP_NS: OnceLock<u64> = OnceLock::new();

/// Measures it once.
pub(crate) fn measure() {
    SLEEP_NS.get_or_init(|| {
        let ns = round_trip_ns().map_or(0, |ns| 2 * ns).clamp(*BELIEVED.start(), *BELIEVED.end());
        tracing::debug!(us = ns / 1000, "what sleeping and being woken costs");
        ns
    });
}

/// Returns the measured cost, in nanoseconds; the lowest accepted one without a measurement.
pub(crate) fn get() -> u64 {
    SLEEP_NS.get().copied().unwrap_or(*BELIEVED.start())
}

/// Returns the median time in which a sleeping thread is woken and wakes the one that waits for it. `None`: no thread
/// could be started.
fn round_trip_ns() -> Option<u64> {
    let (wake, woken) = sync_channel::<()>(1);
    let (answer, answered) = sync_channel::<()>(1);
    let [here, there] = two_cpus();
    let other = move || {
        // A thread that cannot be pinned measures where it is.
        let _ = there.map(pin_thread);
        while woken.recv().is_ok() && answer.send(()).is_ok() {}
    };
    let measuring = move || {
        let _ = here.map(pin_thread);
        let start = Instant::now();
        let mut times = Vec::with_capacity(ROUND_TRIPS);
        while times.len() < ROUND_TRIPS && start.elapsed() < AT_MOST {
            std::thread::sleep(ASLEEP);
            let sent = Instant::now();
            let (true, true) = (wake.send(()).is_ok(), answered.recv().is_ok()) else { break };
            times.push(sent.elapsed().as_nanos() as u64);
        }
        times
    };
    let other = spawn("sleep-cost", other).ok()?;
    // Without this thread `wake` is dropped, which ends the other one.
    let times = spawn("sleep-cost", measuring).ok().and_then(|measuring| measuring.join().ok());
    let _ = other.join();
    let mut times = times?;
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// Returns two of the process's CPUs; `None`: it has one, or they are unknown.
fn two_cpus() -> [Option<usize>; 2] {
    let allowed = sched_getaffinity(None).unwrap_or_default();
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    match (cpus.next(), cpus.next()) {
        (Some(one), Some(other)) => [Some(one), Some(other)],
        _ => [None; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_kept_and_bounded() {
        let start = Instant::now();
        assert!(round_trip_ns().is_some_and(|ns| ns > 0 && Duration::from_nanos(ns) <= start.elapsed()));
        measure();
        let first = get();
        measure();
        assert!(BELIEVED.contains(&first) && get() == first, "{first}");
    }
}
