//! SIGINT, SIGTERM and SIGHUP: they end a benchmark early, with the results so far.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::BenchError;

/// Request to end early. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    /// The first signal; 0: none yet.
    first: Arc<AtomicI32>,
    count: Arc<AtomicU32>,
}

impl Interrupt {
    /// Makes SIGINT, SIGTERM and SIGHUP set this one until the process ends.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn on_signals(&self) -> Result<(), BenchError> {
        let failed = |error: std::io::Error| BenchError::failed("signals", error);
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(failed)?;
        let own = self.clone();
        let thread = std::thread::Builder::new().name("signals".into());
        thread.spawn(move || signals.forever().for_each(|signal| own.set(signal))).map_err(failed)?;
        Ok(())
    }

    /// Records `signal`.
    pub fn set(&self, signal: i32) {
        // The first one decides the exit code.
        let _ = self.first.compare_exchange(0, signal, Ordering::AcqRel, Ordering::Acquire);
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the first signal.
    pub fn signal(&self) -> Option<i32> {
        Some(self.first.load(Ordering::Acquire)).filter(|signal| *signal != 0)
    }

    /// Returns true after a second signal: waits for requests in flight end.
    pub fn is_urgent(&self) -> bool {
        self.count.load(Ordering::Acquire) > 1
    }

    /// Returns an error if there was a signal.
    ///
    /// # Errors
    /// [`BenchError::Interrupted`].
    pub fn check(&self) -> Result<(), BenchError> {
        self.signal().map_or(Ok(()), |signal| Err(BenchError::Interrupted(signal)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_counts_and_the_second_is_urgent() {
        let interrupt = Interrupt::default();
        assert!(interrupt.check().is_ok() && !interrupt.is_urgent());
        interrupt.clone().set(SIGTERM);
        assert!(matches!(interrupt.check(), Err(BenchError::Interrupted(SIGTERM))) && !interrupt.is_urgent());
        interrupt.set(SIGINT);
        assert_eq!((interrupt.signal(), interrupt.is_urgent()), (Some(SIGTERM), true));
    }
}
