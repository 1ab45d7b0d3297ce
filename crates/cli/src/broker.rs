//! `mqblk broker`: the process that opens images for a daemon in the sandbox. `mqblk serve` starts it.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::failure::{self, FAILED};

/// Serves until the daemon has ended.
pub(crate) fn run() -> ExitCode {
    // Terminals and systemd send these to both processes. They are for the daemon, which drains first.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        if let Err(error) = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))) {
            return failure::report(&error, FAILED);
        }
    }
    match mqblk_daemon::broker::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error, FAILED),
    }
}
