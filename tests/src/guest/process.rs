//! A child process with its stderr in a file, killed when dropped.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use mqblk_test_bounds::Bound;
use rustix::process::{Pid, Signal, kill_process};

/// Poll interval for the end of a child, and for a socket.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns a command whose process the kernel kills when its parent thread ends, so that a killed test run leaves no
/// virtual machine.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Returns a [`command`] that is killed `limit` after its start, even if the test hangs.
pub(crate) fn limited_command(program: impl AsRef<OsStr>, limit: Bound) -> Command {
    let mut command = command("timeout");
    // The program dies with `timeout`, the child that a test kills.
    command.args([
        "--foreground",
        "--signal=KILL",
        &limit.time().as_secs().to_string(),
        "setpriv",
        "--pdeathsig",
        "KILL",
        "--",
    ]);
    command.arg(program);
    command
}

/// A running child.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    stderr: PathBuf,
}

impl Process {
    /// Starts `command` with both its outputs in the file `stderr`.
    pub(crate) fn start(name: &str, mut command: Command, stderr: &Path) -> Result<Self> {
        let file = File::create(stderr).with_context(|| format!("cannot create {}", stderr.display()))?;
        let child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn().with_context(|| {
            format!("cannot start {name} (by {}, package util-linux)", command.get_program().display())
        })?;
        Ok(Self { name: name.to_owned(), child, stderr: stderr.to_path_buf() })
    }

    /// Returns its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the output so far.
    pub(crate) fn output(&self) -> String {
        std::fs::read(&self.stderr).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Returns the exit status, if the child has ended.
    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Sends a signal to the child.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.child.id())?;
        let pid = Pid::from_raw(id).context("a child has no process id 0")?;
        kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Waits for the end of the child.
    pub(crate) fn wait(&mut self, within: Bound) -> Result<ExitStatus> {
        let mut deadline = within.begin();
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if deadline.has_passed() {
                bail!("{} did not end within {within}; its output:\n{}", self.name, self.output());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until `ready` returns true. Fails if the child ends before.
    pub(crate) fn until(&mut self, what: &str, within: Bound, mut ready: impl FnMut() -> bool) -> Result<()> {
        let mut deadline = within.begin();
        while !ready() {
            if let Some(status) = self.try_wait()? {
                bail!("{} ended ({status}) before {what}; its output:\n{}", self.name, self.output());
            }
            if deadline.has_passed() {
                bail!("{}: no {what} within {within}; its output:\n{}", self.name, self.output());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends the child with SIGKILL and reaps it.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill().with_context(|| format!("cannot kill {}", self.name))?;
        self.child.wait().with_context(|| format!("cannot reap {}", self.name))?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Reaps a child that has already ended.
        let _ = self.kill();
    }
}
