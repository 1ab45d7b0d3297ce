//! How a worker tells those who place queues that it gets little done where it is: others want its CPU, or wake it all the time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Raised by a worker that is hindered, and waited for by one thread.
#[derive(Debug, Default)]
pub struct HindranceSignal {
    is_raised: AtomicBool,
    is_ended: Mutex<bool>,
    changed: Condvar,
}

/// Why a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalWait {
    /// A worker is hindered.
    Raised,
    /// The time is over.
    TimedOut,
    /// There will be no signal any more.
    Ended,
}

impl HindranceSignal {
    /// Called by a worker. Wakes the thread that waits only if the signal is not raised yet.
    pub(crate) fn raise(&self) {
        if !self.is_raised.swap(true, Ordering::SeqCst) {
            // The thread that waits has either seen it or waits: it checks while this is locked.
            drop(self.is_ended.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }

    /// Ends all waits, also later ones.
    pub fn end(&self) {
        *self.is_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for a worker's signal, also one from before the call.
    pub fn wait(&self) -> SignalWait {
        let mut is_ended = self.is_ended.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if *is_ended {
                return SignalWait::Ended;
            }
            if self.is_raised.swap(false, Ordering::SeqCst) {
                return SignalWait::Raised;
            }
            is_ended = self.changed.wait(is_ended).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for so long, whatever workers signal. Signals from before its end are forgotten.
    pub fn pause(&self, length: Duration) -> SignalWait {
        let deadline = Instant::now() + length;
        let mut is_ended = self.is_ended.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if *is_ended {
                return SignalWait::Ended;
            }
            if left.is_zero() {
                self.is_raised.store(false, Ordering::SeqCst);
                return SignalWait::TimedOut;
            }
            (is_ended, _) = self.changed.wait_timeout(is_ended, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Only a failing test waits that long.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_signal_is_seen_once_and_a_pause_forgets_it() {
        let signal = Arc::new(HindranceSignal::default());
        signal.raise();
        signal.raise();
        assert_eq!(signal.wait(), SignalWait::Raised);
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| signal.wait());
            signal.raise();
            assert_eq!(waits.join().unwrap(), SignalWait::Raised);
            signal.raise();
            assert_eq!(signal.pause(Duration::from_millis(1)), SignalWait::TimedOut);
            let waits = threads.spawn(|| signal.wait());
            let pauses = threads.spawn(|| signal.pause(LONG));
            signal.end();
            assert_eq!((waits.join().unwrap(), pauses.join().unwrap()), (SignalWait::Ended, SignalWait::Ended));
        });
        assert_eq!(signal.wait(), SignalWait::Ended);
    }
}
