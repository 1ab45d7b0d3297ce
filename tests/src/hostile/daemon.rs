//! The `mqblk` binary as a child process, with its disks in a temporary directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;

use mqblk_admin::model::DiskStat;
use mqblk_admin::{Client, StatQuery};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::socket::{VhostUserSocket, message};
use super::usage::ProcessUsage;
use super::wait_for;
use crate::log_end::print_if_failed;

/// Name of the admin socket in the folder.
const ADMIN_SOCKET: &str = "admin.sock";

/// A daemon. Killed when dropped, if [`stop`](Self::stop) was not called.
#[derive(Debug)]
pub struct HostileDaemon {
    child: Child,
    folder: TempDir,
    ids: Vec<String>,
}

/// Resources of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostileDaemonResources {
    /// Open file descriptors.
    pub fds: usize,
    /// Mappings of files shared by frontends.
    pub shared_maps: usize,
}

impl HostileDaemonResources {
    /// Returns true if the daemon holds no more than `expected`.
    fn is_within(self, expected: HostileDaemonResources) -> bool {
        self.fds <= expected.fds && self.shared_maps <= expected.shared_maps
    }
}

impl HostileDaemon {
    /// Serves disks, each given by its id and its other keys. `IMAGE` is a file of 1 MiB, all zero.
    ///
    /// # Panics
    /// When the daemon does not start.
    pub fn start(workers: usize, disks: &[(&str, &str)]) -> HostileDaemon {
        HostileDaemon::start_with(workers, disks, &[])
    }

    /// As [`start`](Self::start), with more arguments of `mqblk serve`. The daemon is in the sandbox unless they say
    /// otherwise.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_with(workers: usize, disks: &[(&str, &str)], arguments: &[&str]) -> HostileDaemon {
        HostileDaemon::start_with_variables(workers, disks, arguments, &[])
    }

    /// As [`start_with`](Self::start_with), with environment variables.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_with_variables(
        workers: usize,
        disks: &[(&str, &str)],
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> HostileDaemon {
        let log = |path: &Path| File::create(path).expect("a log file").into();
        HostileDaemon::start_logging(workers, disks, arguments, variables, log)
    }

    /// As [`start`](Self::start), with standard error on a pipe that nobody reads: there is no [`log`](Self::log).
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_unread(workers: usize, disks: &[(&str, &str)]) -> HostileDaemon {
        HostileDaemon::start_logging(workers, disks, &[], &[], |_| Stdio::piped())
    }

    fn start_logging(
        workers: usize,
        disks: &[(&str, &str)],
        arguments: &[&str],
        variables: &[(&str, &str)],
        log: impl FnOnce(&Path) -> Stdio,
    ) -> HostileDaemon {
        let folder = tempfile::tempdir().expect("a folder");
        let log = log(&folder.path().join("log"));
        // A simulated Xen host.
        let has_xen = arguments.contains(&"--xen");
        let mut command = Command::new(if has_xen { mqblk_bench_binary() } else { mqblk_binary() });
        command.args(["serve", "--workers", &workers.to_string()]).args(arguments);
        if !arguments.contains(&"--sandbox") {
            command.args(["--sandbox", "on"]);
        }
        let given = arguments.iter().position(|word| *word == "--admin").map(|at| PathBuf::from(arguments[at + 1]));
        let admin = given.clone().unwrap_or_else(|| folder.path().join(ADMIN_SOCKET));
        if given.is_none() {
            command.arg("--admin").arg(&admin);
        }
        command.env_remove("RUST_LOG").envs(variables.iter().copied()).stdin(Stdio::null());
        for (id, settings) in disks {
            let image = folder.path().join(format!("{id}.img"));
            if settings.contains("IMAGE") {
                File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image");
            }
            let settings = settings.replace("IMAGE", &image.display().to_string());
            command.args(["--disk", &format!("id={id},socket={}/{id}.sock,{settings}", folder.path().display())]);
        }
        let child = command.stdout(Stdio::null()).stderr(log).spawn().expect("the daemon");
        let ids = disks.iter().map(|(id, _)| (*id).to_owned()).collect();
        let mut daemon = HostileDaemon { child, folder, ids };
        for (id, _) in disks {
            let socket = daemon.socket(id);
            wait_for("the daemon's sockets", || {
                assert!(daemon.child.try_wait().expect("wait").is_none(), "the daemon ended:\n{}", daemon.log());
                socket.exists().then_some(())
            });
            daemon.wait_for_session_end(id);
        }
        // Created after the sockets of the disks.
        wait_for("the admin socket", || {
            assert!(daemon.child.try_wait().expect("wait").is_none(), "the daemon ended:\n{}", daemon.log());
            Client::connect(&admin).ok()
        });
        daemon
    }

    /// Returns a disk's socket.
    pub fn socket(&self, id: &str) -> PathBuf {
        self.folder.path().join(format!("{id}.sock"))
    }

    /// Returns a disk's statistics. Not for a daemon started with the caller's own admin socket.
    ///
    /// # Panics
    /// When the daemon does not respond.
    pub fn stat(&self, id: &str) -> DiskStat {
        let query = StatQuery { disk: Some(id.to_owned()), ..StatQuery::default() };
        let mut client = Client::connect(&self.folder.path().join(ADMIN_SOCKET)).expect("the admin socket");
        client.stat(&query).expect("the daemon responds").disks.remove(0)
    }

    /// Returns the directory of the sockets.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns its log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Returns the logged warnings and errors of a disk.
    pub fn warnings(&self, id: &str) -> Vec<String> {
        let about = [format!("disk=\"{id}\""), format!("disk={id}")];
        let of_disk = |line: &str| about.iter().any(|about| line.split(' ').any(|word| word == about));
        let bad = |line: &str| line.contains(" WARN ") || line.contains("ERROR ");
        self.log().lines().filter(|line| bad(line) && of_disk(line)).map(str::to_owned).collect()
    }

    /// Waits until the previous session has ended. The daemon serves one session at a time.
    ///
    /// # Panics
    /// When a new session gets no reply.
    pub fn wait_for_session_end(&self, id: &str) {
        assert_ne!(VhostUserSocket::connect(&self.socket(id)).request_u64(message::GET_FEATURES), 0);
    }

    /// Returns its current resources.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn resources(&self) -> HostileDaemonResources {
        let ProcessUsage { fds, shared_maps, .. } = ProcessUsage::of(self.child.id());
        HostileDaemonResources { fds, shared_maps }
    }

    /// Returns the number of threads whose name begins with `name`, without kernel threads: these come and go.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn thread_count(&self, name: &str) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the daemon's threads");
        let named =
            |path: PathBuf| std::fs::read_to_string(path.join("comm")).is_ok_and(|found| found.starts_with(name));
        tasks.flatten().filter(|task| named(task.path())).count()
    }

    /// Returns its resources once they are stable.
    pub fn stable_resources(&self) -> HostileDaemonResources {
        let mut last = self.resources();
        wait_for("the daemon's rest", || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            let before = std::mem::replace(&mut last, self.resources());
            (before == last).then_some(last)
        })
    }

    /// Waits until the daemon holds no more than `expected`.
    ///
    /// # Panics
    /// On timeout.
    pub fn wait_for_resources(&self, expected: HostileDaemonResources, after: &str) {
        let mut last = expected;
        let mut until = super::TIMEOUT.begin();
        while !until.has_passed() {
            last = self.resources();
            if last.is_within(expected) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        panic!("after {after}: the daemon holds {last:?}, expected at most {expected:?}");
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Checks that the daemon still runs.
    ///
    /// # Panics
    /// When it does not.
    pub fn assert_alive(&mut self, after: &str) {
        if let Some(status) = self.child.try_wait().expect("wait") {
            panic!("after {after}: the daemon ended with {status}:\n{}", self.log());
        }
    }

    /// Sends SIGTERM.
    ///
    /// # Panics
    /// When the daemon does not run.
    pub fn begin_stop(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("SIGTERM");
    }

    /// Waits until the daemon has ended.
    ///
    /// # Panics
    /// On timeout.
    pub fn wait_end(&mut self) -> ExitStatus {
        wait_for("the daemon's end", || self.child.try_wait().expect("wait"))
    }

    /// Stops the daemon with SIGTERM, and checks its exit.
    ///
    /// # Panics
    /// When it does not end, or fails.
    pub fn stop(self) {
        self.stop_and_log();
    }

    /// As [`stop`](Self::stop). Returns its whole log.
    ///
    /// # Panics
    /// As [`stop`](Self::stop).
    pub fn stop_and_log(mut self) -> String {
        self.begin_stop();
        let status = self.wait_end();
        assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
        for id in &self.ids {
            assert!(!self.socket(id).exists(), "the socket of {id} was left behind");
        }
        self.log()
    }
}

impl Drop for HostileDaemon {
    fn drop(&mut self) {
        print_if_failed(|| self.log());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns `MQBLK`, else the workspace's own build in this test's profile, rebuilt if out of date.
pub fn mqblk_binary() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(path) = std::env::var_os("MQBLK") {
        return PathBuf::from(path);
    }
    BUILT.get_or_init(build).clone()
}

/// Returns `mqblk-bench`, beside [`mqblk_binary`]. It has the commands of `mqblk`, with simulated Xen hosts.
pub fn mqblk_bench_binary() -> PathBuf {
    mqblk_binary().with_file_name("mqblk-bench")
}

fn build() -> PathBuf {
    // A test program is target/PROFILE/deps/NAME.
    let this = std::env::current_exe().expect("this program's path");
    let profile = this.ancestors().nth(2).expect("a profile's folder");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // The directory of the profile "dev" has another name.
    let name = if profile.ends_with("debug") { "dev".as_ref() } else { profile.file_name().expect("a profile's name") };
    let mut command = Command::new(cargo);
    command.args(["build", "-p", "mqblk", "-p", "mqblk-bench", "--profile"]).arg(name);
    command.arg("--target-dir").arg(profile.parent().expect("a target folder"));
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null()).output();
    let output = output.expect("cargo cannot be run; set MQBLK to the mqblk binary");
    assert!(output.status.success(), "cargo build -p mqblk:\n{}", String::from_utf8_lossy(&output.stderr));
    profile.join("mqblk")
}
