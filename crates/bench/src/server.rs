//! The server of a run: a running one, or one that is started for the run.

use std::any::Any;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use mqblk_driver::DriverError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::BenchError;
use crate::connector::{Connector, PreparedServer};
use crate::device::ServerMonitor;
use crate::plan::Case;

/// Limit for the start, and for the end, of a server.
const SERVER_TIMEOUT: Duration = Duration::from_secs(10);
/// Duration of an attempt to connect; after it the started server is checked to run.
const CONNECT_TRY: Duration = Duration::from_millis(200);

/// A started server.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    /// Its admin socket.
    pub admin: PathBuf,
    /// Kept for the interface until the process has ended.
    _resources: Box<dyn Any>,
    /// Folder of its sockets; removed with it.
    _folder: tempfile::TempDir,
}

impl ServerProcess {
    /// Starts `mqblk serve`. Returns it and its device's address.
    fn spawn<C: Connector>(connector: &C, case: &Case<'_>) -> Result<(ServerProcess, C::Endpoint), BenchError> {
        let folder = tempfile::Builder::new().prefix("mqblk-bench.").tempdir();
        let folder = folder.map_err(|error| BenchError::failed("folder for the server's socket", error))?;
        let PreparedServer { endpoint, arguments, environment, is_simulated, resources } =
            connector.prepare_server(case, folder.path())?;
        let program = match is_simulated {
            true => std::env::current_exe().map_err(|error| BenchError::failed("path of this program", error))?,
            false => program()?,
        };
        let mut command = Command::new(&program);
        command.args(["--log", "warn", "serve"]).args(arguments).stdin(Stdio::null());
        command.envs(environment);
        // A terminal's Ctrl-C must not reach the server: the benchmark ends it after the requests in flight.
        command.process_group(0);
        let admin = folder.path().join("admin.sock");
        command.arg("--admin").arg(&admin);
        if !case.plan.server_cpus.is_empty() {
            let cpus: Vec<String> = case.plan.server_cpus.iter().map(u16::to_string).collect();
            command.args(["--pin", &cpus.join(","), "--workers", &cpus.len().to_string()]);
        }
        if let Some(workers) = case.target.workers {
            command.args(["--workers", &workers.to_string()]);
        }
        let child = command.spawn().map_err(|error| BenchError::failed(program.display(), error))?;
        Ok((ServerProcess { child, admin, _resources: resources, _folder: folder }, endpoint))
    }

    /// Returns its process.
    pub(crate) fn pid(&self) -> i32 {
        Pid::from_child(&self.child).as_raw_nonzero().get()
    }

    /// Returns a monitor for its end.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn monitor(&self) -> std::io::Result<ServerMonitor> {
        // Not waited for yet: the number is still that of this process.
        let process = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        Ok(Box::new(move |limit| {
            let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            // It is readable when the process has ended.
            poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0)
        }))
    }

    /// Terminates the server, and waits for its end.
    ///
    /// # Errors
    /// When it does not end in time, or with an error.
    pub(crate) fn stop(mut self) -> Result<(), BenchError> {
        match self.terminate() {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(BenchError::Failed(format!("the server ended with {status}"))),
            Ok(None) => Err(BenchError::Failed(format!("the server does not end within {SERVER_TIMEOUT:?}"))),
            Err(error) => Err(BenchError::failed("waiting for the server", error)),
        }
    }

    /// Sends SIGTERM and waits. `None` when the server does not end in time.
    fn terminate(&mut self) -> std::io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + SERVER_TIMEOUT;
        let mut signalled = false;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if !signalled {
                // Not waited for yet: the number is still that of this process.
                kill_process(Pid::from_child(&self.child), Signal::TERM)?;
                signalled = true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(None)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Also after a failure: a killed server's io_uring may hold the disk's lock for a while.
        if !matches!(self.terminate(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Returns the program that serves disks.
fn program() -> Result<PathBuf, BenchError> {
    let expected = "it: install the package mqblk, or measure a server that runs (--socket)";
    let missing = || BenchError::option("disk", "no program mqblk beside this one or in PATH", expected);
    mqblk_cli::program::find("mqblk").ok_or_else(missing)
}

/// A device to load, and its server if that was started for it.
#[derive(Debug)]
pub(crate) struct Session<D> {
    pub device: D,
    /// The server that was started for it.
    pub server: Option<ServerProcess>,
}

impl<D> Session<D> {
    /// Connects to the target; starts its server first if it has none.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when the server has fewer queues or refuses its options, else [`BenchError::Failed`].
    pub(crate) fn open<C: Connector<Device = D>>(connector: &C, case: &Case<'_>) -> Result<Session<D>, BenchError> {
        if case.target.spec().is_none() {
            let endpoint = connector.endpoint(&case.target.source)?;
            let device = connector.connect(case, &endpoint, SERVER_TIMEOUT / 10).map_err(connect_error)?;
            return Ok(Session { device, server: None });
        }
        let (mut server, endpoint) = ServerProcess::spawn(connector, case)?;
        let deadline = Instant::now() + SERVER_TIMEOUT;
        loop {
            match connector.connect(case, &endpoint, CONNECT_TRY) {
                Ok(device) => return Ok(Session { device, server: Some(server) }),
                Err(error) if Instant::now() >= deadline => return Err(connect_error(error)),
                Err(error) => check_running(&mut server, error)?,
            }
        }
    }
}

/// Checks that a failed attempt to connect may be repeated: the server runs, and does not listen yet.
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
        other => other.into(),
    }
}
