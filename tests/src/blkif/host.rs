//! A simulated Xen with the daemon as its backend. The machine is in the test's process, so it outlives the daemon.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use mqblk_driver::blkfront::BlkfrontOptions;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_memory::DomainId;
use mqblk_xen::Xen;
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::{self, XenbusState, keys};
use mqblk_xen_simulation::connect_dom0;
use mqblk_xen_simulation::{Machine, connect};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::hostile::daemon::mqblk_bench_binary;
use crate::hostile::{TIMEOUT, wait_for};
use crate::log_end::print_if_failed;

/// Device type in xenstore.
pub(super) const DEVICE_TYPE: &str = "mqblk";

/// Resources of the daemon in its process and in the simulated machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedHostResources {
    /// Open file descriptors.
    pub fds: usize,
    /// Threads.
    pub threads: usize,
    /// Mapped pages of guests.
    pub mappings: u64,
    /// Open event channel ports, of all domains.
    pub ports: u64,
}

impl SimulatedHostResources {
    /// Returns true if the daemon holds no more than `expected`.
    fn is_within(self, expected: SimulatedHostResources) -> bool {
        self.fds <= expected.fds
            && self.threads <= expected.threads
            && self.mappings <= expected.mappings
            && self.ports <= expected.ports
    }
}

/// A simulated machine and a daemon. The daemon is killed on drop, unless [`stop`](Self::stop) was called.
pub struct SimulatedHost {
    /// The machine.
    pub machine: Machine,
    folder: TempDir,
    arguments: Vec<String>,
    daemon: Option<Child>,
    /// The daemon was signalled to stop.
    stop_requested: bool,
}

impl SimulatedHost {
    /// Creates a machine with domains 1 and 2, and starts a daemon with these arguments of `mqblk serve`. `FOLDER` in
    /// them is a directory of the test.
    ///
    /// # Panics
    /// When the daemon does not start.
    pub fn start(arguments: &[&str]) -> SimulatedHost {
        let mut host = SimulatedHost::prepare();
        host.spawn_with(arguments);
        host
    }

    /// As [`start`](Self::start), without starting the daemon: [`spawn_with`](Self::spawn_with) does.
    ///
    /// # Panics
    /// When the machine cannot be created.
    pub fn prepare() -> SimulatedHost {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("xen")).expect("a folder");
        let machine = Machine::start(&folder.path().join("xen")).expect("a machine");
        for id in [1, 2] {
            machine.create_domain(DomainId(id)).expect("a domain");
        }
        SimulatedHost { machine, folder, arguments: Vec::new(), daemon: None, stop_requested: false }
    }

    /// Starts a daemon with these arguments, instead of the previous ones if there are any.
    ///
    /// # Panics
    /// When it does not start.
    pub fn spawn_with(&mut self, arguments: &[&str]) {
        let place = self.folder.path().display().to_string();
        self.arguments = arguments.iter().map(|argument| argument.replace("FOLDER", &place)).collect();
        self.spawn();
    }

    /// Returns the directory of the test.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Creates an image of this size in bytes, all zero.
    ///
    /// # Panics
    /// When the disk is full.
    pub fn create_image(&self, name: &str, size: u64) -> PathBuf {
        let path = self.folder.path().join(name);
        File::create(&path).and_then(|file| file.set_len(size)).expect("an image");
        path
    }

    /// Starts the daemon, also again, and waits until it serves.
    ///
    /// # Panics
    /// When it does not.
    pub fn spawn(&mut self) {
        let before = self.log().matches("xen backend").count();
        self.daemon = Some(self.command(&self.arguments).spawn().expect("the daemon"));
        self.stop_requested = false;
        wait_for("the daemon", || {
            self.assert_alive("its start");
            (self.log().matches("xen backend").count() > before).then_some(())
        });
    }

    /// Starts a daemon with these arguments that takes over from the running one through its admin socket `admin` in
    /// the folder. Does not wait. The running one stays the host's daemon.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn_successor(&self, arguments: &[&str]) -> Child {
        let place = self.folder.path().display().to_string();
        let mut arguments: Vec<String> = arguments.iter().map(|argument| argument.replace("FOLDER", &place)).collect();
        arguments.extend(["--takeover".to_owned(), format!("{place}/admin")]);
        self.command(&arguments).spawn().expect("the daemon")
    }

    /// Makes a process the host's daemon. Returns the previous one.
    ///
    /// # Panics
    /// When there was none.
    pub fn replace_daemon(&mut self, successor: Child) -> Child {
        self.stop_requested = false;
        self.daemon.replace(successor).expect("a daemon")
    }

    /// Takes the daemon's process: the host then has none.
    ///
    /// # Panics
    /// When there is none.
    pub fn take_daemon(&mut self) -> Child {
        self.daemon.take().expect("a daemon")
    }

    /// Kills the daemon, which may just end by itself.
    pub fn kill_now(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }

    fn command(&self, arguments: &[String]) -> Command {
        let log = File::options().create(true).append(true).open(self.log_path()).expect("a log file");
        let mut command = Command::new(mqblk_bench_binary());
        command.args(["serve", "--xen"]).arg(self.folder.path().join("xen"));
        command.arg("--xen-state").arg(self.folder.path().join("state"));
        command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command
    }

    /// Makes a new daemon take over through the admin socket `admin` in the folder, and waits for the end of the old
    /// one.
    ///
    /// # Panics
    /// When one of them fails.
    pub fn take_over(&mut self) {
        let admin = self.folder.path().join("admin").display().to_string();
        let before = self.arguments.clone();
        self.arguments.extend(["--takeover".to_owned(), admin]);
        let mut old = self.daemon.take().expect("a daemon");
        self.spawn();
        self.arguments = before;
        let status = wait_for("the old daemon's end", || old.try_wait().expect("wait"));
        assert!(status.success(), "{status}:\n{}", self.log());
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Returns the log of all daemons started so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Returns the warnings and errors in the log.
    pub fn warnings(&self) -> Vec<String> {
        let bad = |line: &&str| line.contains(" WARN ") || line.contains("ERROR ");
        self.log().lines().filter(bad).map(str::to_owned).collect()
    }

    /// Returns the number of existing journals.
    pub fn journal_count(&self) -> usize {
        let journal = |entry: &std::io::Result<std::fs::DirEntry>| {
            entry.as_ref().is_ok_and(|entry| !entry.file_name().to_string_lossy().ends_with(".lock"))
        };
        std::fs::read_dir(self.folder.path().join("state")).map_or(0, |entries| entries.filter(journal).count())
    }

    /// Kills the daemon with SIGKILL.
    ///
    /// # Panics
    /// When it had ended before.
    pub fn kill(&mut self) {
        let mut daemon = self.daemon.take().expect("a daemon");
        kill_process(Pid::from_child(&daemon), Signal::KILL).expect("SIGKILL");
        let status = daemon.wait().expect("its end");
        let killed = std::os::unix::process::ExitStatusExt::signal(&status) == Some(9);
        assert!(killed || self.stop_requested && status.success(), "{status}:\n{}", self.log());
    }

    /// Returns the daemon's process.
    ///
    /// # Panics
    /// When there is none.
    pub fn pid(&self) -> Pid {
        Pid::from_child(self.daemon.as_ref().expect("a daemon"))
    }

    /// Sends SIGTERM to the daemon, without waiting.
    ///
    /// # Panics
    /// When there is none.
    pub fn request_stop(&mut self) {
        kill_process(self.pid(), Signal::TERM).expect("SIGTERM");
        self.stop_requested = true;
    }

    /// Stops the daemon with SIGTERM, and checks its exit.
    ///
    /// # Panics
    /// When it does not end, or fails.
    pub fn stop(&mut self) {
        let mut daemon = self.daemon.take().expect("a daemon");
        kill_process(Pid::from_child(&daemon), Signal::TERM).expect("SIGTERM");
        let status = wait_for("the daemon's end", || daemon.try_wait().expect("wait"));
        assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
    }

    /// Checks that the daemon still runs.
    ///
    /// # Panics
    /// When it does not.
    pub fn assert_alive(&mut self, after: &str) {
        let status = self.daemon.as_mut().expect("a daemon").try_wait().expect("wait");
        assert!(status.is_none(), "after {after}: the daemon ended with {status:?}:\n{}", self.log());
    }

    /// Returns its current resources.
    ///
    /// # Panics
    /// When it has exited.
    pub fn resources(&self) -> SimulatedHostResources {
        let proc = PathBuf::from(format!("/proc/{}", self.daemon.as_ref().expect("a daemon").id()));
        let count = |what: &str| std::fs::read_dir(proc.join(what)).expect("the daemon").count();
        let counters = self.machine.stats();
        let (mappings, ports) = (counters.live_mappings, counters.open_ports);
        SimulatedHostResources { fds: count("fd"), threads: count("task"), mappings, ports }
    }

    /// Waits until the daemon holds no more than `expected`.
    ///
    /// # Panics
    /// On timeout.
    pub fn wait_for_resources(&self, expected: SimulatedHostResources, after: &str) {
        let mut until = TIMEOUT.begin();
        let mut last = self.resources();
        while !last.is_within(expected) && !until.has_passed() {
            std::thread::sleep(std::time::Duration::from_millis(5));
            last = self.resources();
        }
        assert!(
            last.is_within(expected),
            "after {after}: found {last:?}, expected at most {expected:?}:\n{}",
            self.log()
        );
    }

    /// Returns its resources once they are stable.
    pub fn stable_resources(&self) -> SimulatedHostResources {
        let mut last = self.resources();
        wait_for("the daemon's rest", || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            let before = std::mem::replace(&mut last, self.resources());
            (before == last).then_some(last)
        })
    }

    /// Returns the Xen interface of a domain.
    ///
    /// # Panics
    /// When there is no such domain.
    pub fn domain(&self, id: u16) -> Arc<dyn Xen> {
        let folder = self.folder.path().join("xen");
        match id {
            0 => connect_dom0(&folder),
            _ => connect(&folder, DomainId(id)),
        }
        .expect("a domain")
    }

    /// Returns the toolstack's xenstore connection.
    pub fn store(&self) -> Xenstore {
        self.domain(0).store().expect("xenstore")
    }

    /// Creates a device for domain `front` as the toolstack.
    ///
    /// # Panics
    /// When xenstore refuses.
    pub fn create_device(&self, front: u16, vdev: &str, params: &str) -> Vbd {
        let devid = vbd::parse_vdev(vdev).expect("a device's name");
        let params = params.replace("FOLDER", &self.folder.path().display().to_string());
        let device = Vbd::new(DEVICE_TYPE, DomainId(front), devid, &params);
        device.create(&mut self.store()).expect("both directories");
        device
    }

    /// Returns the options with which a frontend connects to a device.
    pub fn frontend_options(&self, device: &Vbd) -> BlkfrontOptions {
        let mut options = BlkfrontOptions::new(self.domain(device.frontend.0), device.devid);
        (options.connect_timeout, options.reply_timeout) = (TIMEOUT.time(), TIMEOUT.time());
        options
    }

    /// Returns the backend's state in xenstore.
    pub fn backend_state(&self, store: &mut Xenstore, device: &Vbd) -> Option<XenbusState> {
        let state = store.read(&format!("{}/{}", device.backend_path(), keys::STATE)).expect("xenstore");
        state.map(|state| XenbusState::parse(Some(&state)))
    }

    /// Waits for a state of the backend.
    ///
    /// # Panics
    /// On timeout.
    pub fn wait_for_backend_state(&self, device: &Vbd, state: XenbusState) {
        let mut store = self.store();
        let mut until = TIMEOUT.begin();
        loop {
            let found = self.backend_state(&mut store, device);
            if found == Some(state) {
                return;
            }
            assert!(!until.has_passed(), "found {found:?}, expected {state:?}:\n{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Returns the backend's error node.
    pub fn backend_error(&self, device: &Vbd) -> Option<String> {
        let path = vbd::backend_error_path(device.backend, &device.type_name, device.frontend, device.devid);
        self.store().read(&path).expect("xenstore")
    }

    /// Runs `mqblk xen` with these arguments, from the program with simulated machines.
    ///
    /// # Panics
    /// When it cannot be run.
    pub fn run_mqblk_xen(&self, action: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(mqblk_bench_binary());
        command.args(["xen", action, "--xen"]).arg(self.folder.path().join("xen")).args(arguments);
        command.env_remove("RUST_LOG").stdin(Stdio::null()).output().expect("mqblk")
    }
}

impl Drop for SimulatedHost {
    fn drop(&mut self) {
        print_if_failed(|| self.log());
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
