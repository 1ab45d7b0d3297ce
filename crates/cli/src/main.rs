//! The `mqblk` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    mqblk_cli::run(mqblk_daemon::interfaces::INTERFACES)
}
