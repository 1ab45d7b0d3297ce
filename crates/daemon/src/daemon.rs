//! The running daemon.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::thread::spawn;
use mqblk_engine::{Engine, EngineOptions, UringOptions, Watchdog};
use mqblk_vhost_user_server::{ListenSocket, SocketError};

use crate::admin;
use crate::config::ServeConfig;
use crate::contract::KeptContracts;
use crate::flush::flush_all;
use crate::interface::{HostContext, StartFailure};
use crate::listeners::ProcessListeners;
use crate::metrics::{MetricsEndpoint, MetricsSocket, MetricsStartError};
use crate::names::UniqueNames;
use crate::out::{OutDisk, OutDisks};
use crate::process::AdminConfig;
use crate::retries::Retries;
use crate::sandbox::{self, SandboxError};
use crate::saved_changes::KeptChanges;
use crate::service_notifier::ServiceNotifier;
use crate::service_reports::Reporting;
use crate::state::{AppliedChange, DaemonControl, DaemonState};
use crate::state_file::StateFile;
use crate::stop_bound::{StartBound, StopBound, exit_now};
use crate::takeover::TakeoverError;
use crate::watch::SizeWatch;

/// Errors of the daemon's start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The worker threads could not be started.
    #[error("workers: {0}")]
    Workers(#[source] io::Error),
    /// The size watch thread could not be started.
    #[error("size watch: {0}")]
    Watch(#[source] io::Error),
    /// The thread that retries disks that are out could not be started.
    #[error("disk retry: {0}")]
    Retries(#[source] io::Error),
    /// The state file could not be locked or written.
    #[error(
        "serve: state: found {path:?}: {source}, expected a file that this daemon alone can write, in an existing folder"
    )]
    State {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The admin socket could not be created.
    #[error("serve: admin: {0}")]
    Admin(#[source] SocketError),
    /// Metrics could not be served.
    #[error("serve: metrics: {0}")]
    Metrics(#[from] MetricsStartError),
    /// The sandbox could not be set up.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The previous daemon does not hand over.
    #[error(transparent)]
    Takeover(#[from] TakeoverError),
    /// A guest interface could not be served.
    #[error(transparent)]
    Interface(#[from] StartFailure),
}

/// Bound of a stop: drain timeouts (two of a takeover, the queues, the flush, and one more), and slack for its other
/// steps.
const STOP_DRAINS: u32 = 5;
const STOP_SLACK: Duration = Duration::from_secs(30);

/// Longest time of a start after a signal that ends it.
const START_GRACE: Duration = Duration::from_secs(10);

/// The permission to connect to a socket, for users other than its owner and group.
const OTHERS_WRITE: u32 = 0o002;

/// A running daemon: serves all disks and controllers until [`Daemon::stop`].
pub struct Daemon {
    admin: Option<AdminSocket>,
    metrics: Option<MetricsEndpoint>,
    state: Arc<DaemonState>,
    watchdog: Option<Watchdog>,
    watch: SizeWatch,
    retries: Option<Retries>,
    drain_timeout: Duration,
    /// Set by a signal that ends the program.
    stop: Arc<AtomicBool>,
}

impl Daemon {
    /// Starts to serve. Undoes all of it on an error.
    ///
    /// # Errors
    /// If the host refuses a resource.
    pub fn start(config: ServeConfig) -> Result<Daemon, StartError> {
        // Before the sandbox, which allows no TCP socket.
        let predecessor = config.predecessor;
        let bind = |config| MetricsSocket::take_or_bind(config, predecessor.as_ref());
        let metrics = config.metrics.as_ref().map(bind).transpose()?;
        let config = ServeConfig { predecessor: None, ..config };
        let stop = Arc::clone(&config.stop);
        // After the sandbox, which begins with one thread.
        sandbox::enter(&config)?;
        let _bound = StartBound::start(&stop, START_GRACE, exit_now);
        let options = EngineOptions {
            workers: config.workers.into(),
            pin: config.pin.iter().flatten().map(|cpu| usize::from(*cpu)).collect(),
            context: UringOptions::default(),
        };
        let engine = Arc::new(Engine::start(&options).map_err(StartError::Workers)?);
        let mut names = UniqueNames::default();
        for (noun, id) in config.interfaces.iter().flat_map(|interface| &interface.ids) {
            names.insert(&("id", id.clone()), &format!("{noun} {id:?}"));
        }
        let watchdog = config.hang_warning.map(|age| engine.watch(age)).transpose().map_err(StartError::Workers)?;
        let drain_timeout = config.drain_timeout;
        let state = config.state.map(|saved| {
            let path = saved.path().to_owned();
            let handed = predecessor.as_ref().and_then(|one| one.take_state_lock(&path));
            let opened = match handed {
                Some(lock) => StateFile::open_handed(saved, lock),
                None => StateFile::open(saved),
            };
            opened.map(Arc::new).map_err(|source| StartError::State { path, source })
        });
        let stands_by = Arc::new(AtomicBool::new(predecessor.is_some()));
        let limit_groups = config.storages.limit_groups();
        config.out.iter().for_each(OutDisk::log);
        let out = OutDisks::new(config.out);
        let state = state.transpose()?;
        let kept = Arc::new(KeptChanges::new(config.saved, state.clone()));
        let contracts = Arc::new(KeptContracts::new(config.contracts, config.storages.raw_images(), state.clone()));
        let host = HostContext {
            engine: Arc::clone(&engine),
            drain_timeout,
            names: Arc::new(RankedMutex::new(LockRank::Names, names)),
            placement: Arc::new(RankedMutex::new(LockRank::Placement, config.placement)),
            state,
            kept: Arc::clone(&kept),
            contracts: Arc::clone(&contracts),
            storages: config.storages,
            out: Arc::clone(&out),
            stands_by: Arc::clone(&stands_by),
        };
        let file = host.state.clone();
        let interfaces = config.interfaces.into_iter().map(|interface| (interface.start)(&host));
        let interfaces = interfaces.collect::<Result<Vec<_>, _>>()?;
        let placement = Arc::clone(&host.placement);
        drop(host);
        let (table, log, given, end) = (config.table, config.log, config.given, config.end);
        let (source, broker) = (config.source, config.broker);
        let control = DaemonControl {
            table,
            log,
            file,
            given,
            source,
            broker,
            limit_groups,
            placement,
            kept,
            contracts,
            out,
            drain_timeout,
            end,
        };
        let state = Arc::new(DaemonState::new(engine, interfaces, control));
        // Before the takeover of guests, so that their queues start with the settings.
        state.restore_live();
        if let Some(predecessor) = &predecessor {
            predecessor.take_over(&state, &stop)?;
            stands_by.store(false, Ordering::SeqCst);
            // For interfaces that began only now.
            state.restore_live();
            state.state_file().iter().for_each(|file| file.begin());
        }
        let start = |admin: &AdminConfig| {
            let takes_file = predecessor.as_ref().is_some_and(|one| one.leaves_admin(&admin.socket));
            AdminSocket::start(admin, takes_file, &state)
        };
        let admin = config.admin.as_ref().map(start).transpose().map_err(StartError::Admin)?;
        if let Some(socket) = &metrics {
            state.listeners().metrics = Some(socket.handed().map_err(StartError::Watch)?);
        }
        let metrics = metrics.map(|socket| MetricsEndpoint::start(socket, &state)).transpose()?;
        let watch = SizeWatch::start(&state).map_err(StartError::Watch)?;
        let retries = Retries::start(&state).map_err(StartError::Retries)?;
        let daemon = Daemon { admin, metrics, state, watchdog, watch, retries, drain_timeout, stop };
        for interface in daemon.state.interfaces() {
            interface.publish()?;
        }
        if let Some(predecessor) = &predecessor {
            predecessor.end();
        }
        Ok(daemon)
    }

    /// Leaves everything to the process that has taken over. This process ends next: once the devices that it leaves
    /// one by one have nothing in flight here, after the drain timeout, or at a signal.
    pub fn leave(mut self) {
        let _bound = StopBound::start(self.drain_timeout.saturating_mul(2) + STOP_SLACK, exit_now);
        let end = Instant::now() + self.drain_timeout;
        // From now on clients reach the other process.
        if let Some(admin) = self.admin.take() {
            admin.leave();
        }
        if let Some(metrics) = self.metrics.take() {
            metrics.leave();
        }
        let is_over = || Instant::now() >= end || self.stop.load(Ordering::SeqCst);
        for device in self.state.interfaces().iter().flat_map(|interface| interface.wait_left(&is_over)) {
            tracing::warn!(
                device,
                "storage has not answered its requests: this process ends, and the other one serves it when the kernel has ended them"
            );
        }
        // Not dropped, which would remove sockets and flush disks of the other process.
        std::mem::forget(self);
    }

    /// Reads the configuration again and applies changes as far as possible. Runs on a thread of its own, as it may
    /// wait for storage. Logs the result, and notifies the service manager at the begin and the end.
    pub fn reload(&self, notifier: &Arc<ServiceNotifier>) {
        notifier.reloading();
        let (state, of_thread) = (Arc::downgrade(&self.state), Arc::clone(notifier));
        let reload = move || {
            let Some(state) = state.upgrade() else { return };
            match state.apply_config(None, true) {
                Ok(changes) if changes.is_empty() => {
                    tracing::info!("the configuration was read again: nothing has changed")
                }
                Ok(changes) => changes.iter().for_each(log_change),
                Err(error) => tracing::error!("the configuration was read again, and nothing is changed: {error}"),
            }
            of_thread.ready();
        };
        if let Err(error) = spawn("reload", reload) {
            tracing::error!("the configuration is not read again: {error}");
            notifier.ready();
        }
    }

    /// Reports to the service manager until the result is dropped: the status, and signs of life while all workers
    /// respond.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn report_to(&self, notifier: &Arc<ServiceNotifier>) -> io::Result<Reporting> {
        Reporting::start(notifier, &self.state)
    }

    /// Drains requests in flight, flushes and closes the disks, and removes the sockets.
    ///
    /// # Errors
    /// If the storage of a disk or a logical unit cannot be flushed, or does not complete in time. The others are
    /// flushed nevertheless.
    pub fn stop(self) -> io::Result<()> {
        let bound = StopBound::start(self.drain_timeout.saturating_mul(STOP_DRAINS) + STOP_SLACK, exit_now);
        bound.step("a takeover");
        self.state.end_hand_over();
        if self.state.is_handed_over() {
            drop(bound);
            self.leave();
            return Ok(());
        }
        // No change at run time starts after this.
        *self.state.listeners() = ProcessListeners::default();
        bound.step("the admin socket");
        drop(self.admin);
        bound.step("the metrics");
        drop(self.metrics);
        bound.step("the size watch");
        drop(self.watch);
        drop(self.retries);
        bound.step("the queues");
        let deadline = Instant::now() + self.drain_timeout;
        // In parallel: each takes as long as its storage.
        self.state.interfaces().iter().for_each(|interface| interface.begin_stop());
        let disks = self.state.flush_targets();
        self.state.interfaces().iter().for_each(|interface| interface.stop(deadline));
        self.state.log_failures(true);
        bound.step("the workers");
        // The last reference, unless a verb still waits for storage.
        drop(self.state);
        drop(self.watchdog);
        bound.step("the flush of all disks");
        flush_all(disks, self.drain_timeout)
    }
}

fn log_change(AppliedChange { change, result }: &AppliedChange) {
    match result {
        Some(Ok(())) => tracing::info!("the configuration was read again: {change}: done"),
        Some(Err(error)) => tracing::error!("the configuration was read again: {change}: {error}"),
        None => tracing::warn!("the configuration was read again: {change}"),
    }
}

/// The admin socket, served until this is dropped.
struct AdminSocket {
    server: mqblk_admin::Server,
    /// Dropped after the server.
    socket: ListenSocket,
}

impl AdminSocket {
    /// Ends the server, and leaves the socket to another process.
    fn leave(self) {
        drop(self.server);
        std::mem::forget(self.socket);
    }

    /// `takes_file`: takes over the file of another process, which has made it.
    fn start(config: &AdminConfig, takes_file: bool, state: &Arc<DaemonState>) -> Result<AdminSocket, SocketError> {
        let socket = ListenSocket::bind(&config.socket, &config.permissions.access())?;
        if takes_file {
            socket.own_file();
        }
        let os = |source| SocketError::Os { path: config.socket.clone(), source };
        let handed = socket.listener().try_clone().map_err(os)?.into();
        state.listeners().admin = Some((config.socket.clone(), handed, socket.owns_file()));
        let listener = socket.listener().try_clone();
        let server = listener
            .and_then(|listener| mqblk_admin::Server::start(listener, admin::verbs(state), Default::default()))
            .map_err(|error| SocketError::Os { path: config.socket.clone(), source: error })?;
        let path = config.socket.display();
        tracing::info!(socket = %path, "admin socket");
        if config.permissions.mode.bits() & OTHERS_WRITE != 0 {
            let mode = config.permissions.mode.to_string();
            tracing::warn!(
                socket = %path,
                mode,
                "every user of the host may connect to the admin socket, and so change what the state and the daemon's images hold, which are its \
                 owner's alone (admin-mode)"
            );
        }
        Ok(AdminSocket { server, socket })
    }
}
