//! A daemon with an admin socket, as a person starts it.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Only a test that fails takes it.
pub const LONG: Duration = Duration::from_secs(60);

pub fn mqblk(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mqblk"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Exit code, standard output, standard error.
pub fn output(args: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = mqblk(args).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Serves null disks `a` with two queues and `b` with one. Killed if the test does not stop it.
pub struct Daemon {
    child: Child,
    pub folder: TempDir,
}

impl Daemon {
    pub fn start(more: &[&str]) -> Daemon {
        Daemon::start_in(tempfile::tempdir().unwrap(), more)
    }

    pub fn start_in(folder: TempDir, more: &[&str]) -> Daemon {
        let at = folder.path().display();
        let (first, second) = (
            format!("storage=null,size=1G,id=a,queues=2,socket={at}/a.sock"),
            format!("storage=null,size=1G,id=b,queues=1,socket={at}/b.sock,merge=off"),
        );
        let admin = format!("{at}/admin.sock");
        let mut command = mqblk(&["serve", "--workers", "2", "--admin", &admin, "--disk", &first, "--disk", &second]);
        let child = command.args(more).stderr(Stdio::null()).spawn().unwrap();
        let mut daemon = Daemon { child, folder };
        let until = Instant::now() + LONG;
        // It is made last.
        while UnixStream::connect(daemon.admin()).is_err() {
            assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon ended");
            assert!(Instant::now() < until, "no admin socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        daemon
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn admin(&self) -> PathBuf {
        self.path().join("admin.sock")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end and returns its exit code and the folder.
    pub fn ended(mut self) -> (Option<i32>, TempDir) {
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
