//! Changes at run time, and the takeover that excludes them: the other process has already read the configuration and
//! the state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::lock::RankedMutex;

/// Longest wait of a takeover for running changes.
const WAIT: Duration = Duration::from_secs(5);
const CHECK: Duration = Duration::from_millis(5);

const STOPS: &str = "the daemon stops";

/// The running changes.
#[derive(Debug)]
pub(crate) struct Changes(Arc<RankedMutex<Running>>);

impl Default for Changes {
    fn default() -> Changes {
        Changes(Arc::new(RankedMutex::leaf(Running::default())))
    }
}

#[derive(Debug, Default)]
struct Running {
    changes: usize,
    /// Lasting changes that have ended.
    ended: u64,
    is_alone: bool,
    /// The daemon stops.
    is_ended: bool,
}

/// A change that runs until this is dropped.
#[derive(Debug)]
pub struct Change {
    running: Arc<RankedMutex<Running>>,
    /// The next daemon has to know it.
    is_lasting: bool,
}

/// Excludes changes until it is dropped.
#[derive(Debug)]
pub(crate) struct Alone(Arc<RankedMutex<Running>>);

impl Changes {
    /// Begins a change. `is_lasting`: the next daemon has to know it.
    ///
    /// # Errors
    /// During a takeover.
    pub(crate) fn begin(&self, is_lasting: bool) -> Result<Change, String> {
        let mut running = self.0.lock();
        if running.is_alone {
            return Err(
                "found a takeover by another process, which has the configuration already: try again when it has ended"
                    .to_owned(),
            );
        }
        running.changes += 1;
        Ok(Change { running: Arc::clone(&self.0), is_lasting })
    }

    /// Returns true if there was a lasting change.
    pub(crate) fn has_any(&self) -> bool {
        self.0.lock().ended > 0
    }

    /// Refuses new takeovers. A running one ends at its next check; waits for that, unless `has_left`: another process
    /// serves all then.
    pub(crate) fn end(&self, timeout: Duration, has_left: impl Fn() -> bool) {
        let end = Instant::now() + timeout;
        self.0.lock().is_ended = true;
        while self.0.lock().is_alone && !has_left() && Instant::now() < end {
            std::thread::sleep(CHECK);
        }
    }

    /// Excludes changes.
    ///
    /// # Errors
    /// If the daemon stops, another takeover runs, or a change does not end.
    pub(crate) fn begin_alone(&self) -> Result<Alone, String> {
        let end = Instant::now() + WAIT;
        loop {
            let mut running = self.0.lock();
            match *running {
                Running { is_ended: true, .. } => return Err(STOPS.to_owned()),
                Running { is_alone: true, .. } => return Err("found another takeover, which has not ended".to_owned()),
                Running { changes: 0, .. } => {
                    running.is_alone = true;
                    return Ok(Alone(Arc::clone(&self.0)));
                }
                Running { changes, .. } if Instant::now() >= end => {
                    let seconds = WAIT.as_secs();
                    return Err(format!("found {changes} changes at run time that do not end within {seconds} s"));
                }
                _ => drop(running),
            }
            std::thread::sleep(CHECK);
        }
    }
}

impl Alone {
    /// Fails if the daemon stops.
    ///
    /// # Errors
    /// If it does.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.0.lock().is_ended { Err(STOPS.to_owned()) } else { Ok(()) }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        running.changes -= 1;
        running.ended += u64::from(self.is_lasting);
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.lock().is_alone = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_takeover_excludes_changes_and_waits_for_them() {
        let changes = Changes::default();
        let (first, second) = (changes.begin(true).unwrap(), changes.begin(false).unwrap());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| changes.begin_alone());
            drop((first, second));
            let alone = waiting.join().unwrap().unwrap();
            assert!(changes.begin(true).is_err() && changes.begin_alone().is_err());
            drop(alone);
        });
        assert!(changes.has_any() && !Changes::default().has_any());
        let passing = Changes::default();
        drop(passing.begin(false).unwrap());
        assert!(!passing.has_any(), "the next daemon need not know of it");
        drop(changes.begin(true).unwrap());
        let alone = changes.begin_alone().unwrap();
        alone.check().unwrap();
        std::thread::scope(|scope| {
            let ending = scope.spawn(|| changes.end(Duration::from_secs(60), || false));
            while alone.check().is_ok() {
                std::thread::sleep(CHECK);
            }
            drop(alone);
            ending.join().unwrap();
        });
        assert_eq!(changes.begin_alone().unwrap_err(), STOPS);
        // Not released: another process serves all.
        let left = Changes::default();
        std::mem::forget(left.begin_alone().unwrap());
        let begin = Instant::now();
        left.end(Duration::from_secs(3600), || begin.elapsed() > CHECK);
    }
}
