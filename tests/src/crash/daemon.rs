//! The `mqblk` binary over vhost-user, as a child process that is restarted. Its sockets, images and log remain.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::load::DISK_SECTORS;
use super::oracle::SECTOR;
use super::rig::Backend;
use crate::hostile::daemon::mqblk_binary;
use crate::hostile::wait_for;
use crate::log_end::{log_end, print_if_failed};

/// A daemon. Killed when dropped.
#[derive(Debug)]
pub struct RestartableDaemon {
    folder: TempDir,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl RestartableDaemon {
    /// Starts `mqblk serve` with these arguments. `FOLDER` in them is a directory of the test, with a new image of each
    /// of these names.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(arguments: &[String], images: &[&str]) -> RestartableDaemon {
        let mut daemon = RestartableDaemon::prepare(arguments, images);
        daemon.spawn();
        daemon
    }

    /// Starts a daemon with two workers, these arguments, and disks with an image `ID.img` each, by their ids. It has
    /// an admin socket, and so outlives a disk that is out: the kernel lets go of a killed daemon's files late while it
    /// closes the io_urings of many processes.
    ///
    /// # Panics
    /// When it cannot be started.
    pub(super) fn of_disks<'a>(
        more: &[&str],
        disks: impl Iterator<Item = String>,
        ids: impl Iterator<Item = &'a str>,
    ) -> RestartableDaemon {
        let own = ["--workers", "2", "--admin", "FOLDER/admin"].iter().chain(more).map(|one| (*one).to_owned());
        let images: Vec<String> = ids.map(|id| format!("{id}.img")).collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        RestartableDaemon::start(&own.chain(disks).collect::<Vec<_>>(), &images)
    }

    /// As [`start`](Self::start), without starting the daemon: [`spawn`](Self::spawn) does.
    ///
    /// # Panics
    /// When the images cannot be made.
    pub fn prepare(arguments: &[String], images: &[&str]) -> RestartableDaemon {
        let folder = tempfile::tempdir().expect("a folder");
        for image in images {
            let file = File::create(folder.path().join(image));
            file.and_then(|file| file.set_len(DISK_SECTORS * SECTOR as u64)).expect("an image");
        }
        let place = folder.path().display().to_string();
        let arguments = arguments.iter().map(|argument| argument.replace("FOLDER", &place)).collect();
        RestartableDaemon { folder, arguments, child: None }
    }

    /// Returns the directory of its sockets and images.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Returns the log of all daemons started so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Starts the daemon again, without waiting for its sockets.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn(&mut self) {
        self.child = Some(self.spawn_with(&self.arguments, &[]));
    }

    fn spawn_with(&self, arguments: &[String], more: &[&str]) -> Child {
        let log = File::options().create(true).append(true).open(self.log_path()).expect("a log file");
        let mut command = Command::new(mqblk_binary());
        command.arg("serve").args(arguments).args(more).env_remove("RUST_LOG");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().expect("the daemon")
    }

    /// Starts a daemon that takes over from this one through the admin socket `admin` in its folder. `arguments`
    /// replace this one's, if given.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn_successor(&self, arguments: Option<&[String]>) -> Child {
        let admin = self.folder.path().join("admin").display().to_string();
        self.spawn_with(arguments.unwrap_or(&self.arguments), &["--takeover", &admin])
    }

    /// Makes a new daemon take over, and waits for the end of the old one.
    ///
    /// # Panics
    /// When one of them fails.
    pub fn take_over(&mut self) {
        let successor = self.spawn_successor(None);
        self.wait_taken_over(successor);
    }

    /// Makes a new daemon with these arguments take over.
    ///
    /// # Panics
    /// As [`take_over`](Self::take_over).
    pub fn take_over_with(&mut self, arguments: &[String]) {
        let successor = self.spawn_successor(Some(arguments));
        self.wait_taken_over(successor);
    }

    fn wait_taken_over(&mut self, mut successor: Child) {
        let mut old = self.child.take().expect("a daemon");
        let status = wait_for("the old daemon's end", || {
            let ended = successor.try_wait().expect("wait");
            assert!(ended.is_none(), "the new daemon ended with {ended:?}:\n{}", log_end(&self.log()));
            old.try_wait().expect("wait")
        });
        self.child = Some(successor);
        assert!(status.success(), "the old daemon ended with {status}:\n{}", log_end(&self.log()));
    }

    /// Replaces a text in the arguments of the daemons started from now on.
    ///
    /// # Panics
    /// When the arguments do not contain it.
    pub fn replace_in_arguments(&mut self, before: &str, after: &str) {
        assert!(self.arguments.iter().any(|argument| argument.contains(before)), "no {before:?}");
        self.arguments.iter_mut().for_each(|argument| *argument = argument.replace(before, after));
    }

    /// Returns the arguments of `mqblk serve`.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("a signal");
    }

    /// Returns its process.
    ///
    /// # Panics
    /// When there is none.
    pub fn pid(&self) -> Pid {
        Pid::from_child(self.child.as_ref().expect("a daemon"))
    }

    /// Checks that it still runs.
    ///
    /// # Panics
    /// When it does not.
    pub fn assert_alive(&mut self) {
        let status = self.child.as_mut().expect("a daemon").try_wait().expect("wait");
        assert!(status.is_none(), "the daemon ended with {status:?}:\n{}", log_end(&self.log()));
    }

    /// Kills the daemon with SIGKILL.
    ///
    /// # Panics
    /// When it had exited by itself, other than after SIGTERM.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        let status = self.child.take().expect("a daemon").wait().expect("its end");
        let killed = std::os::unix::process::ExitStatusExt::signal(&status) == Some(9);
        assert!(killed || status.success(), "the daemon ended with {status}:\n{}", log_end(&self.log()));
    }

    /// Sends SIGTERM, without waiting.
    pub fn request_stop(&self) {
        self.signal(Signal::TERM);
    }

    /// Stops the daemon with SIGTERM, and checks its exit.
    ///
    /// # Panics
    /// When it does not end, or fails.
    pub fn stop(&mut self) {
        self.request_stop();
        let mut child = self.child.take().expect("a daemon");
        let status = wait_for("the daemon's end", || child.try_wait().expect("wait"));
        assert!(status.success(), "the daemon ended with {status}:\n{}", log_end(&self.log()));
    }
}

impl Backend for RestartableDaemon {
    fn kill(&mut self) {
        self.kill();
    }
    fn pid(&self) -> Pid {
        self.pid()
    }
    fn stop(&mut self) {
        self.stop();
    }
    fn request_stop(&mut self) {
        RestartableDaemon::request_stop(self);
    }
    fn spawn(&mut self) {
        self.spawn();
    }
    fn log(&self) -> String {
        self.log()
    }
    fn folder(&self) -> &Path {
        self.folder()
    }
}

impl Drop for RestartableDaemon {
    fn drop(&mut self) {
        print_if_failed(|| self.log());
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
