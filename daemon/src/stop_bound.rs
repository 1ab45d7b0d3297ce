//! A stop ends: each of its steps has a bound of its own, and if one is exceeded all the same, the process ends without it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use mqblk_core::lock::RankedMutex;
use mqblk_core::thread::spawn;

/// A stop that runs. Ends when it is dropped.
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

    /// Says what the stop does next.
    pub(crate) fn step(&self, step: &'static str) {
        *self.step.lock() = step;
    }
}

/// Ends the process with status 1, without waiting for anything.
pub(crate) fn exit_now() {
    // What runs at the exit may wait for storage, too.
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
}
