//! The daemon's end: starts the broker, and opens images through it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mqblk_core::lock::{LockRank, RankedMutex, assert_may_wait};
use mqblk_core::thread::spawn;
use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};

use super::wire::{self, Request};
use crate::config_error::ConfigError;

/// The subcommand of this program that runs the broker.
pub const SUBCOMMAND: &str = "broker";
/// This program, also after its file was replaced by a newer version.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// Longest wait for an image once the daemon serves: storage that hangs must not hold up others without a limit.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
const ENDED: &str = "the broker, which opens images for the sandbox, has ended; restart the daemon to open others";

/// Errors of the broker's start.
#[derive(Debug, thiserror::Error)]
pub enum BrokerStartError {
    /// It could not be started.
    #[error("sandbox: broker: {0} (--sandbox=off serves without it)")]
    Start(#[source] io::Error),
    /// A path to allow cannot be found.
    #[error("sandbox: {path:?}: {why}, expected a path that exists ({key})")]
    Path {
        /// The path.
        path: PathBuf,
        /// The reason.
        why: ImageOpenError,
        /// The key that names it.
        key: &'static str,
    },
    /// It could not give up its rights.
    #[error("sandbox: broker: cannot be restricted: {0} (--sandbox=off serves without it)")]
    Seal(ImageOpenError),
}

impl From<BrokerStartError> for ConfigError {
    fn from(error: BrokerStartError) -> ConfigError {
        ConfigError::Host(Box::new(error))
    }
}

/// The broker of this daemon. It ends when this is dropped.
#[derive(Debug)]
pub struct Broker {
    connection: RankedMutex<Connection>,
    process: Arc<BrokerProcess>,
    tcp: RankedMutex<TcpPorts>,
}

#[derive(Debug)]
struct Connection {
    /// The number of the last request.
    number: u32,
    /// Longest wait for an answer; `None` before the daemon serves.
    timeout: Option<Duration>,
}

/// The broker's process and the socket to it.
#[derive(Debug)]
struct BrokerProcess {
    socket: OwnedFd,
    child: RankedMutex<Option<Child>>,
    /// The daemon ends it.
    stopping: AtomicBool,
}

impl Broker {
    /// Starts a process of this program as the broker.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn start() -> Result<Broker, BrokerStartError> {
        let (socket, theirs) = socket_pair().map_err(BrokerStartError::Start)?;
        let mut command = Command::new(THIS_PROGRAM);
        command.arg0("mqblk").arg(SUBCOMMAND).env_clear().current_dir("/");
        // The broker writes its reason to end to the daemon's standard error.
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
        let child = command.spawn().map_err(BrokerStartError::Start)?;
        Ok(Broker::over(socket, Some(child)))
    }

    /// Creates the daemon's end of a broker at the other end of `socket`.
    pub(super) fn over(socket: OwnedFd, child: Option<Child>) -> Broker {
        let process = BrokerProcess { socket, child: RankedMutex::leaf(child), stopping: AtomicBool::new(false) };
        let connection = RankedMutex::new(LockRank::Broker, Connection { number: 0, timeout: None });
        Broker { connection, process: Arc::new(process), tcp: RankedMutex::leaf(TcpPorts::default()) }
    }

    /// Returns the TCP ports that storage connects to. Allows no more from now on.
    pub fn seal_tcp(&self) -> Vec<u16> {
        let mut tcp = self.tcp.lock();
        tcp.sealed = true;
        tcp.ports.clone()
    }

    /// Allows a file, or the images beneath a folder, until the [seal](Self::seal). `key` is the key that names it.
    ///
    /// # Errors
    /// If the path cannot be found.
    pub fn allow(&self, path: &Path, key: &'static str) -> Result<(), BrokerStartError> {
        self.add_rule(path, key, Request::Allow)
    }

    fn add_rule(
        &self,
        path: &Path,
        key: &'static str,
        rule: impl FnOnce(PathBuf) -> Request,
    ) -> Result<(), BrokerStartError> {
        let asked = std::path::absolute(path).map_err(ImageOpenError::from);
        let allowed = asked.and_then(|path| self.request(&rule(path)));
        allowed.map(drop).map_err(|why| BrokerStartError::Path { path: path.to_owned(), why, key })
    }

    /// Remembers the configuration file's path, until the [seal](Self::seal).
    ///
    /// # Errors
    /// If its folder cannot be found.
    pub fn allow_config(&self, path: &Path) -> Result<(), BrokerStartError> {
        self.add_rule(path, "config", Request::AllowConfig)
    }

    /// Opens the configuration file for reading.
    ///
    /// # Errors
    /// If there is none, or the host refuses.
    pub fn open_config(&self) -> Result<File, ImageOpenError> {
        self.open_file(&Request::OpenConfig)
    }

    fn open_file(&self, request: &Request) -> Result<File, ImageOpenError> {
        let (file, _) = self.request(request)?;
        let none = || io::Error::new(io::ErrorKind::InvalidData, "the broker has sent no descriptor");
        Ok(file.ok_or_else(none)?.into())
    }

    /// Makes the broker give up all rights but opening allowed images and those that it has opened. Returns the extent
    /// of its file restrictions, in words.
    ///
    /// # Errors
    /// If the broker cannot.
    pub fn seal(&self) -> Result<String, BrokerStartError> {
        let (_, files) = self.request(&Request::Seal).map_err(BrokerStartError::Seal)?;
        self.connection.lock().timeout = Some(OPEN_TIMEOUT);
        Ok(files)
    }

    /// Starts a thread that logs if the broker ends before the daemon.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn watch(&self) -> io::Result<()> {
        let process = Arc::clone(&self.process);
        spawn("broker-watch", move || process.log_end()).map(drop)
    }

    /// Sends a request and waits for the answer.
    fn request(&self, request: &Request) -> wire::Answer {
        assert_may_wait("the broker");
        let mut connection = self.connection.lock();
        connection.number = connection.number.wrapping_add(1);
        let number = connection.number;
        let ended = || ImageOpenError::Refused(ENDED.to_owned());
        let deadline = connection.timeout.map(|timeout| Instant::now() + timeout);
        let socket = self.process.socket.as_fd();
        match wire::send(socket, &request.encode(number)?, None) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(hangs()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(ended()),
            Err(error) => return Err(error.into()),
        }
        loop {
            if !self.process.wait(PollFlags::IN, deadline)? {
                return Err(hangs());
            }
            match wire::receive_response(socket)? {
                None => return Err(ended()),
                Some((answered, answer)) if answered == number => return answer,
                // The answer to a request that was given up.
                Some(_) => {}
            }
        }
    }
}

/// The error of an image that takes too long.
fn hangs() -> ImageOpenError {
    ImageOpenError::Refused(format!(
        "the broker has not opened it for {} s: the storage hangs, or that of another image that is being opened",
        OPEN_TIMEOUT.as_secs()
    ))
}

/// The TCP ports that the sandbox lets storage connect to.
#[derive(Debug, Default)]
struct TcpPorts {
    ports: Vec<u16>,
    /// No more are allowed.
    sealed: bool,
}

impl ImageOpener for Broker {
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        self.open_file(&Request::Open(std::path::absolute(path)?, access))
    }

    fn use_tcp(&self, port: u16) -> Result<(), ImageOpenError> {
        let mut tcp = self.tcp.lock();
        if tcp.sealed {
            return tcp.check(port);
        }
        tcp.ports.push(port);
        Ok(())
    }
}

impl TcpPorts {
    fn check(&self, port: u16) -> Result<(), ImageOpenError> {
        if self.ports.contains(&port) {
            return Ok(());
        }
        let why = format!("the sandbox connects to the TCP ports of the configuration's disks only, not to {port}");
        Err(ImageOpenError::Refused(why))
    }
}

/// Opens images as the sealed [`Broker`] will, for disks named by a file that the daemon itself writes. An attacker who
/// took over an earlier daemon may have written that file: it can name no more than the operator has allowed.
#[derive(Debug)]
pub struct AllowedImages(pub Arc<Broker>);

impl ImageOpener for AllowedImages {
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        self.0.open_file(&Request::OpenAllowed(std::path::absolute(path)?, access))
    }

    fn use_tcp(&self, port: u16) -> Result<(), ImageOpenError> {
        self.0.tcp.lock().check(port)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.process.stopping.store(true, Ordering::Relaxed);
        // Ends the broker, and the thread that watches it.
        let _ = rustix::net::shutdown(&self.process.socket, Shutdown::Both);
    }
}

impl BrokerProcess {
    /// Waits for an event or the end. Returns false if `deadline` passes first.
    fn wait(&self, events: PollFlags, deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.map(Timespec::try_from).transpose().map_err(|_| io::ErrorKind::InvalidInput)?;
            match rustix::event::poll(&mut [PollFd::new(&self.socket, events)], left.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn log_end(&self) {
        // A closed end is also reported without requested events.
        if let Err(error) = self.wait(PollFlags::empty(), None) {
            tracing::warn!("sandbox: the broker is not watched: {error}");
            return;
        }
        let child = self.child.lock().take();
        let status = child.and_then(|mut child| child.wait().ok());
        if !self.stopping.load(Ordering::Relaxed) {
            let status = status.map_or_else(|| "no status".to_owned(), |status| status.to_string());
            tracing::error!("sandbox: {ENDED}; those that are served go on ({status})");
        }
    }
}

/// Returns both ends of a socket that preserves message boundaries.
pub(super) fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}
