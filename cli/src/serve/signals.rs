//! How the daemon is told to stop.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// The signals that stop the daemon, from when this is made on.
pub struct StopSignals(Signals);

impl StopSignals {
    /// Takes over SIGTERM, SIGINT and SIGHUP. The first SIGTERM or SIGINT is for [`StopSignals::wait`]; a second ends the process at
    /// once, with the shell's exit code for that signal. SIGHUP, which a closing terminal sends and people send to have a configuration
    /// read again, ends nothing: guests would lose their disks.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn install() -> io::Result<StopSignals> {
        // A write past RLIMIT_FSIZE must fail that request (EFBIG), not end the daemon, which is the signal's default.
        flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
        let seen = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // In this order: the first signal finds the flag down, then raises it.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&seen))?;
            flag::register(signal, Arc::clone(&seen))?;
        }
        Ok(StopSignals(Signals::new([SIGTERM, SIGINT, SIGHUP])?))
    }

    /// Waits for the first signal that stops the daemon, and returns its name.
    pub fn wait(&mut self) -> &'static str {
        for signal in self.0.forever() {
            match signal {
                SIGTERM => return "SIGTERM",
                SIGHUP => tracing::info!(
                    "SIGHUP: nothing is read again and all disks are served on; LUNs and sizes are changed by mqblk lun and mqblk \
                     resize, other settings need a restart"
                ),
                _ => break,
            }
        }
        "SIGINT"
    }
}
