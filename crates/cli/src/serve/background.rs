//! `--background`: a successor that outlives the command that starts it.

use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use mqblk_admin::Client;
use serde_json::Value;

use crate::failure::{self, FAILED};

/// The option.
const OPTION: &str = "--background";
/// Interval of the checks that the successor serves.
const CHECK: Duration = Duration::from_millis(50);
/// Longest wait for an answer of the admin socket.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts this command again without the option, and waits until it has taken over from the daemon at `admin`, or has
/// ended.
pub(super) fn run(admin: &Path) -> ExitCode {
    match start(admin) {
        Ok(None) => ExitCode::SUCCESS,
        // It has logged the reason.
        Ok(Some(ended)) => ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED).into(),
        Err(error) => failure::report(&error, FAILED),
    }
}

fn start(admin: &Path) -> std::io::Result<Option<ExitStatus>> {
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != OPTION);
    let mut command = Command::new(std::env::current_exe()?);
    let mut successor = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    loop {
        if let Some(ended) = successor.try_wait()? {
            return Ok(Some(ended));
        }
        // The admin socket is the successor's once it serves all disks.
        let version = Client::connect_with(admin, ANSWER_TIMEOUT).and_then(|mut one| one.call("version", &Value::Null));
        if version.is_ok_and(|version| version["pid"].as_u64() == Some(successor.id().into())) {
            return Ok(None);
        }
        std::thread::sleep(CHECK);
    }
}
