//! The server of a run: one that runs already, or one that is started for the run.

mod xen;

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use mqblk_driver::DriverError;
use mqblk_xen::simulation::Machine;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::BenchError;
use crate::args::xen::{GrantMode, GrantPool};
use crate::interface::{Device, Endpoint, Interface, ServerMonitor};
use crate::plan::{Combination, MergeMode, Plan, Target, TargetSource};

/// The controller of a server that is started.
const CONTROLLER: &str = "bench";

/// How long a server may take to listen, and to end.
const SERVER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long one try to connect to a starting server takes before it is seen whether it still runs.
const CONNECT_TRY: Duration = Duration::from_millis(200);

/// Settings of a controller; all others are those of each of its logical units.
const CONTROLLER_KEYS: [&str; 10] = [
    "poll",
    "poll_queue",
    "queue-size",
    "queue_size",
    "queue-map",
    "socket-mode",
    "fixed-buffers",
    "coalesce-us",
    "coalesce-max",
    "cmd-per-lun",
];

/// A server process of ours.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    endpoint: Endpoint,
    admin: PathBuf,
    /// What it leaves in xenstore, removed after it has ended.
    _device: Option<xen::XenstoreDirectories>,
    /// Where it keeps what a server after it would need.
    _state: Option<tempfile::TempDir>,
    /// The machine that both are on; it ends after the server.
    _machine: Option<Machine>,
    /// Its sockets' folder; removed with it.
    _folder: tempfile::TempDir,
}

/// Becomes readable when a process has ended.
#[derive(Debug)]
struct ProcessMonitor(OwnedFd);

impl ServerMonitor for ProcessMonitor {
    fn wait_gone(&self, limit: Duration) -> bool {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut polled, Some(&limit)).is_ok_and(|ready| ready > 0)
    }
}

/// What there is before a server is started.
struct PreparedServer {
    endpoint: Endpoint,
    arguments: Vec<String>,
    device: Option<xen::XenstoreDirectories>,
    state: Option<tempfile::TempDir>,
    machine: Option<Machine>,
}

/// What is served, and how.
#[derive(Debug)]
struct ServedDisk<'a> {
    spec: &'a str,
    poll: Option<&'a str>,
    merge: Option<MergeMode>,
    grants: Option<GrantMode>,
    pool: Option<GrantPool>,
    combination: &'a Combination,
}

/// The pairs of `KEY=VALUE,...`, in which a comma of a value is written twice.
pub fn split_pairs(spec: &str) -> Vec<&str> {
    let mut pairs = vec![];
    let (mut start, mut at) = (0, 0);
    let bytes = spec.as_bytes();
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b',', Some(b',')) => at += 1,
            (b',', _) => {
                pairs.push(&spec[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    pairs.push(&spec[start..]);
    pairs
}

impl ServedDisk<'_> {
    /// The arguments of `mqblk serve` for a server at a socket.
    fn arguments(&self, interface: Interface, socket: &Path) -> Vec<String> {
        let path = socket.display().to_string().replace(',', ",,");
        match interface {
            Interface::VirtioScsi => self.controller(socket),
            // The key-value form writes a comma in a value twice.
            _ => vec!["--disk".into(), self.disk(&format!("socket={path}"))],
        }
    }

    /// `--controller` and a `--lun` for each logical unit.
    fn controller(&self, socket: &Path) -> Vec<String> {
        let Combination { queues, targets, luns, .. } = *self.combination;
        let path = socket.display().to_string().replace(',', ",,");
        let key = |pair: &&str| CONTROLLER_KEYS.contains(&pair.split('=').next().unwrap_or_default());
        let (own, units): (Vec<&str>, Vec<&str>) = split_pairs(self.spec).into_iter().partition(key);
        let mut controller = format!("id={CONTROLLER},socket={path},queues={queues}");
        let poll = self.poll.map(|poll| format!("poll={poll}"));
        own.into_iter().chain(poll.as_deref()).for_each(|pair| controller.push_str(&format!(",{pair}")));
        let mut arguments = vec!["--controller".to_owned(), controller];
        for (target, lun) in (0..targets).flat_map(|target| (0..luns).map(move |lun| (target, lun))) {
            let mut unit = format!("controller={CONTROLLER},target={target},lun={lun}");
            if !units.iter().any(|pair| pair.starts_with("id=")) {
                unit.push_str(&format!(",id=t{target}l{lun}"));
            }
            for pair in &units {
                let pair = pair.replace("{t}", &target.to_string()).replace("{l}", &lun.to_string());
                unit.push_str(&format!(",{pair}"));
            }
            if let Some(merge) = self.merge {
                unit.push_str(&format!(",merge={}", merge.name()));
            }
            arguments.extend(["--lun".to_owned(), unit]);
        }
        arguments
    }

    /// The argument of `--disk`. `place`: the keys that say where it is served.
    fn disk(&self, place: &str) -> String {
        let mut disk = format!("{},{place},queues={}", self.spec, self.combination.queues);
        let own = [
            ("poll", self.poll),
            ("merge", self.merge.map(MergeMode::name)),
            ("grants", self.grants.map(GrantMode::name)),
            ("grants-pool", self.pool.map(GrantPool::name)),
        ];
        for (key, value) in own {
            if let Some(value) = value {
                disk.push_str(&format!(",{key}={value}"));
            }
        }
        disk
    }
}

impl ServerProcess {
    /// Starts `mqblk serve` (this executable).
    fn spawn(plan: &Plan, serving: &ServedDisk<'_>) -> Result<ServerProcess, BenchError> {
        let failed = |what: &str, error: std::io::Error| BenchError::Failed(format!("{what}: {error}"));
        let folder = tempfile::Builder::new().prefix("mqblk-bench.").tempdir();
        let folder = folder.map_err(|error| failed("folder for the server's socket", error))?;
        let PreparedServer { endpoint, arguments, device, state, machine } = match plan.interface {
            Interface::Xen => xen::prepare(&plan.xen, serving, folder.path())?,
            interface => {
                let socket = folder.path().join("disk.sock");
                let arguments = serving.arguments(interface, &socket);
                PreparedServer {
                    endpoint: Endpoint::Socket(socket),
                    arguments,
                    device: None,
                    state: None,
                    machine: None,
                }
            }
        };
        let program = std::env::current_exe().map_err(|error| failed("path of this program", error))?;
        let mut command = Command::new(&program);
        command.args(["--log", "warn", "serve"]).args(arguments).stdin(Stdio::null());
        if serving.pool.is_some() {
            // `grants-pool` is a key for measurements only.
            command.env("MQBLK_TEST_KEYS", "1");
        }
        let admin = folder.path().join("admin.sock");
        command.arg("--admin").arg(&admin);
        if let Some(cpus) = &plan.server_cpus {
            command.args(["--pin", cpus]);
            command.args(["--workers", &cpus.split(',').count().to_string()]);
        }
        let child = command.spawn().map_err(|error| failed(&program.display().to_string(), error))?;
        Ok(ServerProcess { child, endpoint, admin, _device: device, _state: state, _machine: machine, _folder: folder })
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        Pid::from_child(&self.child).as_raw_nonzero().get()
    }

    /// Something to see its end with.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn monitor(&self) -> std::io::Result<Box<dyn ServerMonitor>> {
        // It has not been waited for, so the process is still this one.
        let process = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        Ok(Box::new(ProcessMonitor(process)))
    }

    /// Its admin socket.
    pub fn admin(&self) -> PathBuf {
        self.admin.clone()
    }

    /// Asks the server to end, and waits for that.
    ///
    /// # Errors
    /// When it does not end in time, or not well.
    pub fn stop(mut self) -> Result<(), BenchError> {
        match self.terminate() {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(BenchError::Failed(format!("the server ended with {status}"))),
            Ok(None) => Err(BenchError::Failed(format!("the server does not end within {SERVER_TIMEOUT:?}"))),
            Err(error) => Err(BenchError::Failed(format!("waiting for the server: {error}"))),
        }
    }

    /// Asks the server to end. `None` when it does not in time.
    fn terminate(&mut self) -> std::io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + SERVER_TIMEOUT;
        let mut asked = false;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if !asked {
                // It has not been waited for, so the process is still this one.
                kill_process(Pid::from_child(&self.child), Signal::TERM)?;
                asked = true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(None)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Gently, also after a failure: a killed server's io_uring may hold the disk's lock for a while.
        if !matches!(self.terminate(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A device to load, and its server if that is ours.
#[derive(Debug)]
pub struct Session<D> {
    /// The device.
    pub device: D,
    /// The server that was started for it.
    pub server: Option<ServerProcess>,
}

impl<D: Device> Session<D> {
    /// Starts the server if need be, and connects.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when the server has fewer queues or refuses its options, else [`BenchError::Failed`].
    pub fn open(plan: &Plan, combination: &Combination, target: &Target) -> Result<Session<D>, BenchError> {
        match &target.source {
            TargetSource::Socket(path) => Session::connect_running(plan, combination, &Endpoint::Socket(path.clone())),
            TargetSource::Device(vdev) => {
                let endpoint = xen::endpoint(plan.xen.place.as_ref(), vdev.number)?;
                Session::connect_running(plan, combination, &endpoint)
            }
            TargetSource::Disk { spec, poll, merge, grants, pool } => {
                let (poll, merge, grants, pool) = (poll.as_deref(), *merge, *grants, *pool);
                let serving = ServedDisk { spec, poll, merge, grants, pool, combination };
                let mut server = ServerProcess::spawn(plan, &serving)?;
                let deadline = Instant::now() + SERVER_TIMEOUT;
                loop {
                    match D::connect(plan, combination, &server.endpoint, CONNECT_TRY) {
                        Ok(device) => return Ok(Session { device, server: Some(server) }),
                        Err(error) if Instant::now() >= deadline => return Err(connect_error(error)),
                        Err(error) => check_running(&mut server, error)?,
                    }
                }
            }
        }
    }
}

impl<D: Device> Session<D> {
    /// Of a server that runs already.
    fn connect_running(plan: &Plan, combination: &Combination, endpoint: &Endpoint) -> Result<Session<D>, BenchError> {
        let device = D::connect(plan, combination, endpoint, SERVER_TIMEOUT / 10).map_err(connect_error)?;
        Ok(Session { device, server: None })
    }
}

/// A failed try to connect: worth another if the server still runs and had not listened yet.
fn check_running(server: &mut ServerProcess, error: DriverError) -> Result<(), BenchError> {
    match server.child.try_wait() {
        Ok(Some(status)) if status.code() == Some(2) => {
            Err(BenchError::Usage("--disk: the server does not take it (its message is above)".into()))
        }
        Ok(Some(status)) => {
            let how = status.signal().map_or_else(|| status.to_string(), |signal| format!("signal {signal}"));
            Err(BenchError::Failed(format!("the server ended with {how} before it listened")))
        }
        _ if is_starting(&error) => Ok(()),
        _ => Err(connect_error(error)),
    }
}

fn is_starting(error: &DriverError) -> bool {
    use mqblk_vhost_user_client::ClientError::Connect;
    matches!(error, DriverError::Client(Connect { .. }) | DriverError::NoDevice(_))
}

fn connect_error(error: DriverError) -> BenchError {
    match error {
        DriverError::Option { field: field @ ("queues" | "threads" | "ring order"), found, expected } => {
            BenchError::option(&field.replace(' ', "-"), found, expected)
        }
        other => BenchError::Failed(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::args;

    #[test]
    fn a_disks_settings_are_dealt_to_controller_and_units() {
        let line =
            "--interface virtio-scsi --disk path=/d,,{t}/{l}.img,poll=off,direct=off --targets 2 --luns 2 --queues 3";
        let plan = Plan::new(&args(line).unwrap()).unwrap();
        let TargetSource::Disk { spec, .. } = &plan.targets[0].source else { panic!("a disk") };
        let combination = &plan.combinations[0];
        let serving =
            ServedDisk { spec, poll: None, merge: Some(MergeMode::Off), grants: None, pool: None, combination };
        let unit = |t: u16, l: u16| {
            format!("controller=bench,target={t},lun={l},id=t{t}l{l},path=/d,,{t}/{l}.img,direct=off,merge=off")
        };
        let expected = [
            "--controller".to_owned(),
            "id=bench,socket=/s,,1,queues=3,poll=off".into(),
            "--lun".into(),
            unit(0, 0),
            "--lun".into(),
            unit(0, 1),
            "--lun".into(),
            unit(1, 0),
            "--lun".into(),
            unit(1, 1),
        ];
        assert_eq!(serving.arguments(Interface::VirtioScsi, Path::new("/s,1")), expected);
        let disk = serving.arguments(Interface::VirtioBlk, Path::new("/s"));
        assert_eq!(disk[1], "path=/d,,{t}/{l}.img,poll=off,direct=off,socket=/s,queues=3,merge=off");
        assert_eq!(split_pairs("a=1,,2,b=,,,c"), ["a=1,,2", "b=,,", "c"]);
    }
}
