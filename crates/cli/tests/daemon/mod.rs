//! A daemon with an admin socket, run as a process.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use mqblk_test_bounds::Bound;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Returns a time that only a failing test waits for.
pub(crate) fn long() -> Duration {
    Bound::seconds(60).time()
}

pub(crate) fn mqblk(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mqblk"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs `mqblk` and returns its exit code, standard output and standard error.
pub(crate) fn output(args: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = mqblk(args).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A daemon with null disks `a` of two queues and `b` of one. Killed if the test does not stop it.
pub(crate) struct Daemon {
    child: Child,
    pub folder: TempDir,
}

impl Daemon {
    pub(crate) fn start(more: &[&str]) -> Daemon {
        Daemon::start_in(tempfile::tempdir().unwrap(), more)
    }

    pub(crate) fn start_in(folder: TempDir, more: &[&str]) -> Daemon {
        let at = folder.path().display();
        let (first, second) = (
            format!("storage=null,size=1G,id=a,queues=2,socket={at}/a.sock"),
            format!("storage=null,size=1G,id=b,queues=1,socket={at}/b.sock,merge=off"),
        );
        let admin = format!("{at}/admin.sock");
        let mut command = mqblk(&["serve", "--workers", "2", "--admin", &admin, "--disk", &first, "--disk", &second]);
        let child = command.args(more).stderr(Stdio::null()).spawn().unwrap();
        let mut daemon = Daemon { child, folder };
        let deadline = Instant::now() + long();
        // The admin socket is created last.
        while UnixStream::connect(daemon.admin()).is_err() {
            assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon ended");
            assert!(Instant::now() < deadline, "no admin socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        daemon
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn admin(&self) -> PathBuf {
        self.path().join("admin.sock")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the process to end and returns its exit code and the directory.
    pub(crate) fn ended(mut self) -> (Option<i32>, TempDir) {
        let code = self.child.wait().unwrap().code();
        let folder = std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap());
        (code, folder)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
