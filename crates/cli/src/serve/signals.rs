//! The signals that stop the daemon, and the one that makes it reload its configuration.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// Handlers of the signals that stop the daemon, installed on creation.
pub(super) struct StopSignals {
    signals: Signals,
    /// True once a signal that ends the daemon has arrived.
    seen: Arc<AtomicBool>,
}

impl StopSignals {
    /// Installs handlers for SIGTERM, SIGINT and SIGHUP. [`StopSignals::wait`] returns at the first SIGTERM or SIGINT;
    /// a second one ends the process at once, with the shell's exit code for that signal.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(super) fn install() -> io::Result<StopSignals> {
        // A write past RLIMIT_FSIZE must fail that request (EFBIG). By default SIGXFSZ would end the daemon.
        flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
        let seen = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // The order matters: the first signal finds the flag clear, then sets it.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&seen))?;
            flag::register(signal, Arc::clone(&seen))?;
        }
        Ok(StopSignals { signals: Signals::new([SIGTERM, SIGINT, SIGHUP])?, seen })
    }

    /// Returns a function that ends a wait without a signal.
    pub(super) fn ender(&self) -> Arc<dyn Fn() + Send + Sync> {
        let handle = self.signals.handle();
        Arc::new(move || handle.close())
    }

    /// Returns a flag that is set when a signal that stops the daemon has arrived, also while no thread waits for it.
    pub(super) fn seen(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.seen)
    }

    /// Waits for the first signal that stops the daemon, and returns its name. Returns `None` if the wait was ended
    /// without one. Calls `reload` at each SIGHUP, also if it comes from a closing terminal.
    pub(super) fn wait(&mut self, reload: impl Fn()) -> Option<&'static str> {
        for signal in self.signals.forever() {
            match signal {
                SIGTERM => return Some("SIGTERM"),
                SIGHUP => reload(),
                _ => return Some("SIGINT"),
            }
        }
        None
    }
}
