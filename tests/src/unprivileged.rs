//! Tests of limits that do not bind root.

use std::process::Command;

use rustix::process::{Pid, Resource, Rlimit, geteuid, prlimit};

use crate::hostile::daemon::mqblk_binary;

/// A user without other processes.
const USER: &str = "54321";

/// Runs the test `name` of this program again as another user, if this one is root: the limit of threads does not bind
/// root (`RLIMIT_NPROC` in setrlimit(2)). Returns true in the test that goes on.
///
/// # Panics
/// When it fails there.
pub fn run_unprivileged(name: &str) -> bool {
    if !geteuid().is_root() {
        return true;
    }
    let mut command = Command::new("setpriv");
    command.args([&format!("--reuid={USER}"), &format!("--regid={USER}"), "--clear-groups"]);
    command.arg(std::env::current_exe().expect("this program's path")).args(["--exact", name, "--nocapture"]);
    let out = command.env("MQBLK", mqblk_binary()).output().expect("setpriv");
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("1 passed"), "as user {USER}: {text}");
    false
}

/// A process that gets no more threads until this is dropped.
pub struct NoThreads {
    pid: Pid,
    before: Rlimit,
}

impl NoThreads {
    /// Sets the limit of the process.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn of(pid: Pid) -> NoThreads {
        let none = Rlimit { current: Some(0), maximum: None };
        // The hard limit stays, so that the soft one can be raised again.
        let maximum = rustix::process::getrlimit(Resource::Nproc).maximum;
        let before = prlimit(Some(pid), Resource::Nproc, Rlimit { maximum, ..none }).expect("a lower limit");
        NoThreads { pid, before }
    }
}

impl Drop for NoThreads {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = prlimit(Some(self.pid), Resource::Nproc, self.before);
    }
}
