//! The bound of a stop: each of its steps has a bound of its own, and if one is exceeded nevertheless, the process ends
//! anyway. The same bounds a start that a signal ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use mqblk_core::lock::RankedMutex;
use mqblk_core::thread::spawn;

/// A running stop. Ends on drop.
#[derive(Debug)]
pub(crate) struct StopBound {
    step: Arc<RankedMutex<&'static str>>,
    /// Dropped: the stop has ended.
    _end: Sender<()>,
}

impl StopBound {
    /// Watches a stop: if it has not ended after `limit`, logs its step and calls `give_up`.
    pub(crate) fn start(limit: Duration, give_up: impl FnOnce() + Send + 'static) -> StopBound {
        let step = Arc::new(RankedMutex::leaf("its begin"));
        let (end, ended) = channel();
        let of_thread = Arc::clone(&step);
        let watch = move || {
            if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let (step, seconds) = (*of_thread.lock(), limit.as_secs());
                tracing::error!(
                    "the stop does not end within {seconds} s: it waits for {step}; the process ends without it"
                );
                give_up();
            }
        };
        if let Err(error) = spawn("stop-bound", watch) {
            tracing::warn!("the stop is not watched: {error}");
        }
        StopBound { step, _end: end }
    }

    /// Sets the next step of the stop.
    pub(crate) fn step(&self, step: &'static str) {
        *self.step.lock() = step;
    }
}

/// A running start. Ends on drop.
#[derive(Debug)]
pub(crate) struct StartBound {
    /// Dropped: the start has ended.
    _end: Sender<()>,
}

/// Interval of the checks for a signal during a start.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

impl StartBound {
    /// Watches a start: if it has not ended `limit` after `stop` was set, logs that and calls `give_up`.
    pub(crate) fn start(
        stop: &Arc<AtomicBool>,
        limit: Duration,
        give_up: impl FnOnce() + Send + 'static,
    ) -> StartBound {
        let (end, ended) = channel();
        let stop = Arc::clone(stop);
        let watch = move || {
            let runs = |time| ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
            while runs(SIGNAL_CHECK) {
                if stop.load(Ordering::SeqCst) {
                    if runs(limit) {
                        let seconds = limit.as_secs();
                        tracing::error!("the start does not end within {seconds} s of a signal: the process ends");
                        give_up();
                    }
                    return;
                }
            }
        };
        if let Err(error) = spawn("start-bound", watch) {
            tracing::warn!("the start is not watched: {error}");
        }
        StartBound { _end: end }
    }
}

/// Ends the process with status 1, without waiting for anything.
pub(crate) fn exit_now() {
    // Exit handlers may wait for storage too.
    let _ = spawn("stop-abort", || {
        std::thread::sleep(Duration::from_secs(5));
        std::process::abort();
    });
    std::process::exit(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_that_does_not_end_is_given_up_and_one_that_ends_is_not() {
        let (given_up, gave_up) = channel();
        let hangs = StopBound::start(Duration::from_millis(20), move || given_up.send(()).unwrap());
        hangs.step("storage");
        gave_up.recv_timeout(Duration::from_secs(60)).unwrap();
        let (given_up, gave_up) = channel::<()>();
        let ends = StopBound::start(Duration::from_secs(60), move || given_up.send(()).unwrap());
        drop(ends);
        // The thread ends, and drops the sender without a message.
        assert!(gave_up.recv_timeout(Duration::from_secs(60)).is_err());
        drop(hangs);
    }

    #[test]
    fn a_start_that_a_signal_does_not_end_is_given_up_and_others_are_not() {
        let (stop, limit) = (Arc::new(AtomicBool::new(false)), Duration::from_millis(20));
        let (given_up, gave_up) = channel();
        let hangs = StartBound::start(&stop, limit, move || given_up.send(()).unwrap());
        let (given_up, gave_up_early) = channel::<()>();
        let ends = StartBound::start(&stop, Duration::from_secs(60), move || given_up.send(()).unwrap());
        assert!(gave_up.recv_timeout(3 * SIGNAL_CHECK).is_err(), "without a signal");
        stop.store(true, Ordering::SeqCst);
        gave_up.recv_timeout(Duration::from_secs(60)).unwrap();
        drop(ends);
        // The thread ends, and drops the sender without a message.
        assert!(gave_up_early.recv_timeout(Duration::from_secs(60)).is_err());
        drop(hangs);
    }
}
