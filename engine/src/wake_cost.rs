//! What it costs on this host to wake a thread that sleeps.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;

/// Wakeups that are measured.
const ROUNDS: usize = 21;

/// How long the thread sleeps before each: long enough for its CPU to become idle, as that of a worker that waits.
const SLEEP: Duration = Duration::from_micros(150);

/// Between what the measured cost is taken seriously, in nanoseconds. A busy host would have any.
const LEAST: u64 = 3_000;
const MOST: u64 = 30_000;

/// What is used where nothing was measured.
const UNKNOWN: u64 = 5_000;

static COST: OnceLock<u64> = OnceLock::new();

/// Measures the cost, the first time that it is called in a process: some milliseconds.
///
/// # Errors
/// When the host has no thread.
pub(crate) fn measure() -> io::Result<()> {
    if COST.get().is_some() {
        return Ok(());
    }
    let (wake, woken) = channel::<Instant>();
    let (report, reports) = channel::<Duration>();
    let sleeper = spawn("wake-cost", move || sleep_and_report(&woken, &report))?;
    let mut costs: Vec<Duration> = (0..ROUNDS).filter_map(|_| wake_once(&wake, &reports)).collect();
    drop(wake);
    let _ended = sleeper.join();
    costs.sort_unstable();
    let median = costs.get(costs.len() / 2).map_or(UNKNOWN, |cost| cost.as_nanos() as u64);
    COST.get_or_init(|| median.clamp(LEAST, MOST));
    Ok(())
}

fn sleep_and_report(woken: &Receiver<Instant>, report: &Sender<Duration>) {
    while let Ok(at) = woken.recv() {
        if report.send(at.elapsed()).is_err() {
            return;
        }
    }
}

fn wake_once(wake: &Sender<Instant>, reports: &Receiver<Duration>) -> Option<Duration> {
    std::thread::sleep(SLEEP);
    wake.send(Instant::now()).ok()?;
    reports.recv().ok()
}

/// Returns the cost in nanoseconds: as measured, or a usual one.
pub(crate) fn ns() -> u64 {
    COST.get().copied().unwrap_or(UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_is_measured_once_and_bounded() {
        measure().expect("a thread");
        let cost = ns();
        assert!((LEAST..=MOST).contains(&cost), "{cost}");
        measure().expect("nothing to do");
        assert_eq!(ns(), cost);
    }
}
