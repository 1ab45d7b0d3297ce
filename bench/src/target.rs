//! The server of a run: one that runs already, or one that is started for the run.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use mqblk_core::ByteLen;
use mqblk_driver::virtio_blk::{Device, DriverError, Options, ShapeChoice};
use rustix::process::{Pid, Signal, kill_process};

use crate::BenchError;
use crate::args::Descriptors;
use crate::plan::{Combination, Merge, Place, Plan, Target};

/// How long a server may take to listen, and to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one try to connect to a starting server takes before it is seen whether it still runs.
const TRY: Duration = Duration::from_millis(200);

/// I/Os that are larger may be several pieces.
const LARGE: ByteLen = ByteLen(64 << 10);

/// A server process of ours.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// Its socket's folder; removed with it.
    _folder: tempfile::TempDir,
    socket: PathBuf,
    admin: PathBuf,
}

/// What is served, and how.
#[derive(Debug)]
struct Serving<'a> {
    spec: &'a str,
    poll: Option<&'a str>,
    merge: Option<Merge>,
    queues: u16,
}

impl Serving<'_> {
    /// The argument of `--disk`.
    fn argument(&self, socket: &Path) -> String {
        // The key-value form writes a comma in a value twice.
        let path = socket.display().to_string().replace(',', ",,");
        let mut disk = format!("{},socket={path},queues={}", self.spec, self.queues);
        for (key, value) in [("poll", self.poll), ("merge", self.merge.map(Merge::name))] {
            if let Some(value) = value {
                disk.push_str(&format!(",{key}={value}"));
            }
        }
        disk
    }
}

impl Server {
    /// Starts `mqblk serve` (this executable).
    fn spawn(plan: &Plan, serving: &Serving<'_>) -> Result<Server, BenchError> {
        let failed = |what: &str, error: std::io::Error| BenchError::Failed(format!("{what}: {error}"));
        let folder = tempfile::Builder::new().prefix("mqblk-bench.").tempdir();
        let folder = folder.map_err(|error| failed("folder for the server's socket", error))?;
        let socket = folder.path().join("disk.sock");
        let program = std::env::current_exe().map_err(|error| failed("path of this program", error))?;
        let mut command = Command::new(&program);
        command.args(["--log", "warn", "serve", "--disk", &serving.argument(&socket)]).stdin(Stdio::null());
        let admin = folder.path().join("admin.sock");
        command.arg("--admin").arg(&admin);
        if let Some(cpus) = &plan.server_cpus {
            command.args(["--pin", cpus]);
            command.args(["--workers", &cpus.split(',').count().to_string()]);
        }
        let child = command.spawn().map_err(|error| failed(&program.display().to_string(), error))?;
        Ok(Server { child, _folder: folder, socket, admin })
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
        match self.end() {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(BenchError::Failed(format!("the server ended with {status}"))),
            Ok(None) => Err(BenchError::Failed(format!("the server does not end within {PATIENCE:?}"))),
            Err(error) => Err(BenchError::Failed(format!("waiting for the server: {error}"))),
        }
    }

    /// Asks the server to end. `None` when it does not in time.
    fn end(&mut self) -> std::io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + PATIENCE;
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

impl Drop for Server {
    fn drop(&mut self) {
        // Gently, also after a failure: a killed server's io_uring may hold the disk's lock for a while.
        if !matches!(self.end(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A device to load, and its server if that is ours.
#[derive(Debug)]
pub struct Session {
    /// The device.
    pub device: Device,
    /// The server that was started for it.
    pub server: Option<Server>,
}

impl Session {
    /// Starts the server if need be, and connects.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when the server has fewer queues or refuses its options, else [`BenchError::Failed`].
    pub fn open(plan: &Plan, combination: &Combination, target: &Target) -> Result<Session, BenchError> {
        match &target.place {
            Place::Socket(path) => {
                let device = Device::connect(&options(plan, combination, path, PATIENCE / 10)).map_err(judge)?;
                Ok(Session { device, server: None })
            }
            Place::Disk { spec, poll, merge } => {
                let serving = Serving { spec, poll: poll.as_deref(), merge: *merge, queues: combination.queues };
                let mut server = Server::spawn(plan, &serving)?;
                let options = options(plan, combination, &server.socket, TRY);
                let deadline = Instant::now() + PATIENCE;
                loop {
                    match Device::connect(&options) {
                        Ok(device) => return Ok(Session { device, server: Some(server) }),
                        Err(error) if Instant::now() >= deadline => return Err(judge(error)),
                        Err(error) => still_runs(&mut server, error)?,
                    }
                }
            }
        }
    }
}

/// A failed try to connect: worth another if the server still runs and had not listened yet.
fn still_runs(server: &mut Server, error: DriverError) -> Result<(), BenchError> {
    match server.child.try_wait() {
        Ok(Some(status)) if status.code() == Some(2) => {
            Err(BenchError::Usage("--disk: the server does not take it (its message is above)".into()))
        }
        Ok(Some(status)) => {
            let how = status.signal().map_or_else(|| status.to_string(), |signal| format!("signal {signal}"));
            Err(BenchError::Failed(format!("the server ended with {how} before it listened")))
        }
        _ if starting(&error) => Ok(()),
        _ => Err(judge(error)),
    }
}

fn starting(error: &DriverError) -> bool {
    matches!(error, DriverError::Client(mqblk_vhost_user_client::ClientError::Connect { .. }))
}

fn judge(error: DriverError) -> BenchError {
    match error {
        DriverError::Option { field, found, expected } => BenchError::option(field, found, expected),
        other => BenchError::Failed(other.to_string()),
    }
}

fn options(plan: &Plan, combination: &Combination, socket: &Path, patience: Duration) -> Options {
    let depth = combination.depth_per_queue();
    Options {
        queues: combination.queues,
        queue_size: plan.queue_size,
        // The plan has checked it against the queue size.
        depth: depth as u16,
        threads: combination.threads(),
        data_per_queue: ByteLen(u64::from(depth) * combination.bs.0),
        shape: match plan.descriptors {
            // A table for each costs nothing beside so much data, and a disk that takes it in small pieces only does not fill
            // the ring with them.
            Descriptors::Auto if combination.bs > LARGE => ShapeChoice::Indirect,
            Descriptors::Auto => ShapeChoice::Auto,
            Descriptors::Direct => ShapeChoice::Direct,
            Descriptors::Indirect => ShapeChoice::Indirect,
        },
        poison_status: plan.verify.is_some(),
        patience,
        ..Options::new(socket)
    }
}
