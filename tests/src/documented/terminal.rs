//! A terminal in a sandbox that runs a block.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use mqblk_test_bounds::Bound;
use rustix::process::{Pid, Signal, kill_process_group};

use super::sandbox::Sandbox;

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A running block.
pub(super) struct Terminal {
    child: Child,
    output: PathBuf,
}

impl Terminal {
    /// Starts the script of this name in terminal `number` of the sandbox.
    pub(super) fn open(sandbox: &Sandbox, number: usize, script: &str, guest: &str) -> Result<Terminal> {
        let output = sandbox.outside(&format!("/media/output-{number}"));
        let file = File::create(&output)?;
        let mut command = sandbox.bash(script, guest);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Ok(Terminal { child: command.spawn().context("cannot run setpriv (package util-linux)")?, output })
    }

    /// Returns its output so far.
    pub(super) fn output(&self) -> String {
        fs::read(&self.output).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Returns its exit status, if it has ended.
    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits for its end. Fails after `limit`.
    pub(super) fn wait(&mut self, limit: Bound) -> Result<ExitStatus> {
        let mut deadline = limit.begin();
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if deadline.has_passed() {
                bail!("found no end after {limit}, expected one");
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until `ready`. Fails after `limit` or when it ends.
    pub(super) fn until(&mut self, limit: Bound, mut ready: impl FnMut(&str) -> bool) -> Result<()> {
        let mut deadline = limit.begin();
        while !ready(&self.output()) {
            if let Some(status) = self.ended()? {
                bail!("found its end ({status}), expected it to run until Ctrl-C");
            }
            if deadline.has_passed() {
                bail!("found it not ready after {limit}");
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Presses Ctrl-C, unless the command has just ended: then [`wait`](Self::wait) returns its status.
    pub(super) fn interrupt(&self) -> Result<()> {
        let id = self.child.id();
        // The terminal's session is that of the only child of the process that entered the namespaces.
        let file = format!("/proc/{id}/task/{id}/children");
        let children = fs::read_to_string(&file).with_context(|| file.clone())?;
        let Some(leader) = children.split_whitespace().next() else { return Ok(()) };
        let leader: i32 = leader.parse()?;
        let group = Pid::from_raw(leader).context("a process has no number 0")?;
        kill_process_group(group, Signal::INT).context("cannot press Ctrl-C")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Commands in it end with its sandbox.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
