//! The vhost-user server under test, a child process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, bail, ensure};
use mqblk_admin::StatQuery;
use mqblk_admin::model::{ControllerStat, DiskStat};
use mqblk_test_bounds::Bound;
use rustix::process::Signal;
use tempfile::TempDir;

use super::cache::repository;
use super::controller::ControllerConfig;
use super::process::{self, Process};
use super::queue_log::{StoppedQueue, stopped_queues};

/// Timeout for the server to listen, to log, and to exit.
const SERVER_TIMEOUT: Bound = Bound::seconds(30);

/// Our server's admin socket.
const ADMIN_SOCKET: &str = "admin.sock";

/// A program that serves disks over vhost-user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonProgram {
    /// Our own `mqblk serve`.
    Mqblk,
    /// QEMU's, to validate the tests. It has no serial, and logs no counters.
    QemuStorageDaemon,
}

impl DaemonProgram {
    /// Returns the program named by `MQBLK_TEST_SERVER` (`mqblk` or `qemu-storage-daemon`), else ours.
    ///
    /// # Errors
    /// A bad value of the variable.
    pub fn from_environment() -> Result<Self> {
        match std::env::var("MQBLK_TEST_SERVER").ok().as_deref() {
            None | Some("mqblk") => Ok(Self::Mqblk),
            Some("qemu-storage-daemon") => Ok(Self::QemuStorageDaemon),
            Some(other) => bail!("MQBLK_TEST_SERVER is '{other}', expected mqblk or qemu-storage-daemon"),
        }
    }
}

/// Configuration of a disk that a [`VhostUserDaemon`] serves.
#[derive(Debug, Clone)]
pub struct DaemonDisk {
    id: String,
    path: PathBuf,
    /// Settings of storage other than a file.
    storage: Option<String>,
    queues: u16,
    options: Vec<(String, String)>,
}

impl DaemonDisk {
    /// Configures the file or block device at `path`, with `queues` virtqueues.
    #[must_use]
    pub fn new(id: &str, path: &Path, queues: u16) -> Self {
        Self { id: id.to_owned(), path: path.to_path_buf(), storage: None, queues, options: Vec::new() }
    }

    /// Configures a disk on other storage than a file, by the settings of its backend.
    #[must_use]
    pub fn on_storage(id: &str, settings: &str, queues: u16) -> Self {
        let mut disk = DaemonDisk::new(id, Path::new(""), queues);
        disk.storage = Some(settings.to_owned());
        disk
    }

    /// Adds a `key=value` of `mqblk serve --disk`.
    #[must_use]
    pub fn option(mut self, key: &str, value: &str) -> Self {
        self.options.push((key.to_owned(), value.to_owned()));
        self
    }

    fn for_mqblk(&self, socket: &Path) -> Vec<OsString> {
        let storage = match &self.storage {
            Some(settings) => settings.clone(),
            None => format!("path={}", self.path.display()),
        };
        let mut text = format!("id={},{storage},socket={},queues={}", self.id, socket.display(), self.queues);
        for (key, value) in &self.options {
            text.push_str(&format!(",{key}={value}"));
        }
        vec!["--disk".into(), text.into()]
    }

    fn for_qemu(&self, socket: &Path) -> Result<Vec<OsString>> {
        let (id, path, socket) = (&self.id, self.path.display(), socket.display());
        let driver = if self.path.starts_with("/dev/") { "host_device" } else { "file" };
        let mut node = match &self.storage {
            None => format!("driver={driver},node-name=file-{id},filename={path},discard=unmap"),
            Some(settings) => {
                let size = settings.strip_prefix("storage=null,size=");
                let size = size.with_context(|| format!("qemu-storage-daemon serves no '{settings}' here"))?;
                format!("driver=null-co,node-name=file-{id},size={size},read-zeroes=off")
            }
        };
        let mut export = format!(
            "type=vhost-user-blk,id=export-{id},node-name=file-{id},addr.type=unix,addr.path={socket},num-queues={},\
             iothread=io-{id}",
            self.queues
        );
        let mut writable = true;
        for (key, value) in &self.options {
            match (key.as_str(), value.as_str()) {
                ("readonly", "on") => {
                    node.push_str(",read-only=on");
                    writable = false;
                }
                ("aio", value) => node.push_str(&format!(",aio={value}")),
                ("direct", value) => node.push_str(&format!(",cache.direct={value}")),
                ("block-size", value) => export.push_str(&format!(",logical-block-size={value}")),
                _ => bail!("qemu-storage-daemon knows no '{key}={value}'"),
            }
        }
        export.push_str(if writable { ",writable=on" } else { ",writable=off" });
        let thread = format!("iothread,id=io-{id}");
        Ok(["--object", &thread, "--blockdev", &node, "--export", &export].map(OsString::from).into())
    }
}

/// A running server; killed when dropped.
#[derive(Debug)]
pub struct VhostUserDaemon {
    program: DaemonProgram,
    process: Process,
    arguments: Vec<OsString>,
    sockets: Vec<PathBuf>,
    folder: TempDir,
}

impl VhostUserDaemon {
    /// Starts the server named by the environment ([`DaemonProgram::from_environment`]) and waits until it listens.
    ///
    /// # Errors
    /// As [`VhostUserDaemon::start_server`].
    pub fn start(disks: &[DaemonDisk]) -> Result<Self> {
        Self::start_server(DaemonProgram::from_environment()?, disks)
    }

    /// Starts a server with these disks and waits until it listens on every socket.
    ///
    /// # Errors
    /// When the program is missing, refuses an option, ends, or does not listen in time.
    pub fn start_server(server: DaemonProgram, disks: &[DaemonDisk]) -> Result<Self> {
        Self::serve(server, disks, &[], &[])
    }

    /// Starts our server with these disks and process options, such as `--drain-timeout-s 2`. It is in the sandbox
    /// unless they say otherwise.
    ///
    /// # Errors
    /// As [`VhostUserDaemon::start_server`].
    pub fn start_with(disks: &[DaemonDisk], options: &[&str]) -> Result<Self> {
        Self::serve(DaemonProgram::Mqblk, disks, &[], options)
    }

    /// Starts our server with these controllers and waits until it listens on every socket.
    ///
    /// # Errors
    /// As [`VhostUserDaemon::start_server`].
    pub fn start_controllers(controllers: &[ControllerConfig]) -> Result<Self> {
        Self::serve(DaemonProgram::Mqblk, &[], controllers, &[])
    }

    /// Starts our server with these disks and controllers and waits until it listens on every socket.
    ///
    /// # Errors
    /// As [`VhostUserDaemon::start_server`].
    pub fn start_all(disks: &[DaemonDisk], controllers: &[ControllerConfig]) -> Result<Self> {
        Self::serve(DaemonProgram::Mqblk, disks, controllers, &[])
    }

    fn serve(
        server: DaemonProgram,
        disks: &[DaemonDisk],
        controllers: &[ControllerConfig],
        options: &[&str],
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("mqblk-serve-").tempdir()?;
        let socket = |id: &str| folder.path().join(format!("{id}.sock"));
        let mut arguments: Vec<OsString> = Vec::new();
        match server {
            DaemonProgram::Mqblk => {
                arguments.extend(["serve".into(), "--admin".into(), folder.path().join(ADMIN_SOCKET).into()]);
                if !options.contains(&"--sandbox") {
                    // As in the systemd unit. The directory of all images of these tests is allowed for added LUNs.
                    arguments.extend(["--sandbox".into(), "on".into(), "--sandbox-allow".into()]);
                    arguments.push(repository().join("target").into());
                }
                arguments.extend(options.iter().map(OsString::from));
                disks.iter().for_each(|disk| arguments.extend(disk.for_mqblk(&socket(&disk.id))));
                for controller in controllers {
                    arguments.extend(controller.for_mqblk(&socket(&controller.id)).into_iter().map(OsString::from));
                }
            }
            DaemonProgram::QemuStorageDaemon => {
                for disk in disks {
                    arguments.extend(disk.for_qemu(&socket(&disk.id))?);
                }
            }
        }
        let ids = disks.iter().map(|disk| &disk.id).chain(controllers.iter().map(|controller| &controller.id));
        let sockets = ids.map(|id| socket(id)).collect();
        let process = launch(server, &arguments, folder.path())?;
        let mut daemon = Self { program: server, process, arguments, sockets, folder };
        daemon.wait_listening()?;
        Ok(daemon)
    }

    fn wait_listening(&mut self) -> Result<()> {
        // Waits without connecting: a server with one client at a time would take the connection for the VMM.
        let sockets = self.sockets.clone();
        self.process.until("its sockets", SERVER_TIMEOUT, || sockets.iter().all(|socket| socket.exists()))?;
        if self.program == DaemonProgram::Mqblk {
            // The admin socket is created last; an earlier verb does not find it.
            let has_admin = self.arguments.iter().any(|argument| argument == "--admin");
            let admin = has_admin.then(|| self.folder.path().join(ADMIN_SOCKET));
            self.wait_log("a log line with every socket", |log| {
                sockets.iter().chain(&admin).all(|socket| log.contains(&socket.display().to_string()))
            })?;
        }
        Ok(())
    }

    /// Kills the server with SIGKILL and starts it again with the same arguments and a new log.
    ///
    /// # Errors
    /// As [`VhostUserDaemon::start_server`].
    pub fn crash_and_restart(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process = launch(self.program, &self.arguments, self.folder.path())?;
        self.wait_listening()
    }

    /// Ends the server by SIGTERM, with requests of its guests in flight, and starts it again with the same arguments
    /// and a new log.
    ///
    /// # Errors
    /// When it exits with another code than 0, and as [`VhostUserDaemon::start_server`].
    pub fn stop_and_restart(&mut self) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(SERVER_TIMEOUT)?;
        ensure!(status.success(), "the vhost-user server ended with {status}:\n{}", self.log());
        self.process = launch(self.program, &self.arguments, self.folder.path())?;
        self.wait_listening()
    }

    /// Makes another server take over, with the same arguments and a new log, and waits for the end of this one.
    ///
    /// # Errors
    /// When one of them ends with another code than 0, or the takeover does not end.
    pub fn take_over(&mut self) -> Result<()> {
        let mut arguments = self.arguments.clone();
        arguments.extend(["--takeover".into(), self.folder.path().join(ADMIN_SOCKET).into()]);
        let successor = launch(self.program, &arguments, self.folder.path())?;
        let mut old = std::mem::replace(&mut self.process, successor);
        let ended = old.wait(SERVER_TIMEOUT).with_context(|| format!("the successor's log:\n{}", self.log()))?;
        ensure!(ended.success(), "the old vhost-user server ended with {ended}");
        self.wait_log("the end of the takeover", |log| log.contains("taken over version"))
    }

    /// Runs `mqblk VERB ... --socket ADMIN MORE`, which must succeed. Returns its output.
    ///
    /// # Errors
    /// When it fails, with its output.
    pub fn run_verb(&self, verb: &[&str], more: &[&str]) -> Result<String> {
        let mut command = Command::new(mqblk_binary()?);
        command.args(verb).arg("--socket").arg(self.folder.path().join(ADMIN_SOCKET)).args(more);
        let output = command.output().context("cannot run mqblk")?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        ensure!(
            output.status.success(),
            "mqblk {verb:?} {more:?}: {}\n{}{}\nthe server's log:\n{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr),
            self.log()
        );
        Ok(text(&output.stdout))
    }

    /// Returns the socket of a disk.
    #[must_use]
    pub fn socket(&self, id: &str) -> PathBuf {
        self.folder.path().join(format!("{id}.sock"))
    }

    /// Returns our server's statistics of a disk, with its queues.
    ///
    /// # Errors
    /// When it does not respond, or has no such disk.
    pub fn disk_stat(&self, id: &str) -> Result<DiskStat> {
        let mut client = mqblk_admin::Client::connect(&self.folder.path().join(ADMIN_SOCKET))?;
        let stat = client.stat(&StatQuery { queues: true, ..StatQuery::default() })?;
        stat.disks
            .into_iter()
            .find(|disk| disk.id == id)
            .with_context(|| format!("no disk {id} in the server's figures"))
    }

    /// Returns our server's statistics of a controller, with its queues.
    ///
    /// # Errors
    /// When it does not respond, or has no such controller.
    pub fn controller_stat(&self, id: &str) -> Result<ControllerStat> {
        let mut client = mqblk_admin::Client::connect(&self.folder.path().join(ADMIN_SOCKET))?;
        let stat = client.stat(&StatQuery { queues: true, ..StatQuery::default() })?;
        let found = stat.controllers.into_iter().find(|controller| controller.id == id);
        found.with_context(|| format!("no controller {id} in the server's figures"))
    }

    /// Returns its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns its program.
    #[must_use]
    pub fn server(&self) -> DaemonProgram {
        self.program
    }

    /// Returns the log so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.process.output()
    }

    /// Waits until the log satisfies `wanted`.
    ///
    /// # Errors
    /// When it does not in time, or the server ends.
    pub fn wait_log(&mut self, what: &str, wanted: impl Fn(&str) -> bool) -> Result<()> {
        let log = self.folder.path().join("log");
        let read = || std::fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        self.process.until(what, SERVER_TIMEOUT, || wanted(&read()))
    }

    /// Checks that the server runs.
    ///
    /// # Errors
    /// When it has ended, with its output.
    pub fn must_run(&mut self) -> Result<()> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the vhost-user server ended: {status}\n{}", self.log()),
        }
    }

    /// Ends the server by SIGTERM. It must exit with 0 and remove the sockets. Returns the log.
    ///
    /// # Errors
    /// When it stays, exits with another code, or leaves a socket.
    pub fn stop(mut self) -> Result<StoppedDaemon> {
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(SERVER_TIMEOUT)?;
        let log = self.log();
        ensure!(status.success(), "the vhost-user server ended with {status}:\n{log}");
        for entry in std::fs::read_dir(self.folder.path())? {
            let name = entry?.file_name();
            ensure!(!name.to_string_lossy().ends_with(".sock"), "{} was not removed", name.display());
        }
        Ok(StoppedDaemon { log, program: self.program })
    }
}

/// The log of a server that has exited.
#[derive(Debug)]
pub struct StoppedDaemon {
    log: String,
    program: DaemonProgram,
}

impl StoppedDaemon {
    /// Returns its program.
    #[must_use]
    pub fn server(&self) -> DaemonProgram {
        self.program
    }

    /// Returns the log.
    #[must_use]
    pub fn log(&self) -> &str {
        &self.log
    }

    /// Returns the sum of a counter over all starts of a queue.
    ///
    /// # Errors
    /// When the log has no line of that queue, or no such counter. QEMU's server logs none.
    pub fn queue_counter(&self, disk: &str, queue: u16, name: &str) -> Result<u64> {
        ensure!(self.program == DaemonProgram::Mqblk, "{:?} logs no counters", self.program);
        let all = stopped_queues(&self.log);
        let of_queue: Vec<&StoppedQueue> = all.iter().filter(|it| it.disk == disk && it.queue == queue).collect();
        ensure!(!of_queue.is_empty(), "no 'queue stopped' line of disk {disk} queue {queue} in:\n{}", self.log);
        of_queue.iter().map(|it| it.counter(name)).sum()
    }
}

fn launch(server: DaemonProgram, arguments: &[OsString], folder: &Path) -> Result<Process> {
    let mut command = match server {
        DaemonProgram::Mqblk => process::command(mqblk_binary()?),
        DaemonProgram::QemuStorageDaemon => process::command("qemu-storage-daemon"),
    };
    // Our server logs the counters of each queue that stops.
    command.args(arguments).env("RUST_LOG", "info,mqblk_vhost_user_server::vring=debug");
    Process::start("the vhost-user server", command, &folder.join("log"))
}

/// Returns `MQBLK`, else the workspace's own release build, rebuilt if out of date.
pub(crate) fn mqblk_binary() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(path) = std::env::var_os("MQBLK") {
        return Ok(PathBuf::from(path));
    }
    BUILT.get_or_init(|| build_mqblk().map_err(|error| format!("{error:#}"))).clone().map_err(|text| anyhow!(text))
}

fn build_mqblk() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--release", "-p", "mqblk", "-p", "mqblk-bench", "--message-format=json-render-diagnostics"])
        .current_dir(repository())
        .output()
        .context("cannot run cargo; set MQBLK to the mqblk binary")?;
    ensure!(output.status.success(), "cargo build -p mqblk failed:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "mqblk")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("cargo build -p mqblk made no program named mqblk")
}
