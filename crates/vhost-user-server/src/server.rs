//! Starts and stops a device.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::{BudgetUse, DiskSlot, TenantBudget};
use mqblk_engine::{
    AttachError, FixedBufferUse, QueueDisk, QueueId, QueueMove, QueuePolicy, QueueSettings, QueueStats, StatsRegistry,
    UringContext, WorkerStats,
};
use mqblk_virtio::VirtioDevice;

use crate::backend_channel::{BackendChannel, ConfigChangeResult};
use crate::control::{DeviceControl, DevicePlace, IdleDevice};
use crate::disks::{DeviceDisks, SharedSession, lock_session};
use crate::event_loop::EventLoop;
use crate::gate::StartGate;
use crate::hand_over::StandbyMessage;
use crate::listen::{ListenSocket, SocketError, SocketFile};
use crate::options::ServerOptions;
use crate::shared::{Shared, SharedConnection};

/// A device that listens on its socket. Stopped by [`stop`](Self::stop) or on drop.
pub struct Server {
    pub(crate) shared: Arc<Shared>,
    pub(crate) control: Arc<dyn DeviceControl>,
    /// While in standby.
    pub(crate) standby: RankedMutex<Option<Standby>>,
    listener: Weak<UnixListener>,
    /// The file of the socket; removed if this process has made it.
    pub(crate) file: Arc<SocketFile>,
    /// True if [`stop`](Self::stop) has been called.
    has_stopped: AtomicBool,
    socket: PathBuf,
    pub(crate) drain_timeout: Duration,
    budget: Arc<TenantBudget>,
}

/// A device in standby.
pub(crate) enum Standby {
    /// It has no connection yet, and no control thread.
    Empty,
    /// The channel to its control thread.
    Thread(Sender<StandbyMessage>),
}

/// A connected frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// Its process id, 0 if unknown.
    pub pid: i32,
    /// Time since it connected.
    pub connected: Duration,
    /// The features that the driver has accepted; 0 before.
    pub features: u64,
    /// Queues that are started.
    pub queues: usize,
}

impl Server {
    /// Listens, and serves one frontend after the other. There is a control thread while there is a frontend; a thread
    /// of the process waits for the frontends of all devices.
    ///
    /// # Errors
    /// When the socket or that thread cannot be created.
    pub fn start<D: VirtioDevice<UringContext>>(
        device: Arc<D>,
        mut options: ServerOptions,
    ) -> Result<Server, SocketError> {
        let disks = std::mem::take(&mut options.disks);
        if options.fixed_buffers == FixedBufferUse::Auto && !disks.iter().any(|disk| disk.disk.limits().pins_memory) {
            options.fixed_buffers = FixedBufferUse::Off;
        }
        let socket = options.socket.clone();
        let listener = ListenSocket::bind(&socket, &options.socket_access)?;
        let os_error = |source| SocketError::of_system(&socket, source);
        let events = EventLoop::of_this_process().map_err(os_error)?;
        // Another process that has the socket may be faster: an accept must not block the devices of others.
        listener.listener().set_nonblocking(true).map_err(os_error)?;
        let map = std::mem::take(&mut options.queue_map).into_iter();
        let further = map.len()..device.num_queues().into();
        let queues = QueueSettings { map: map.chain(further).collect(), policy: options.policy };
        let disks = Arc::new(DeviceDisks::new(disks, queues));
        let shared = Arc::new(Shared {
            gate: Arc::new(StartGate::new(Arc::clone(&disks))),
            connection: RankedMutex::leaf(None),
            draining: RankedMutex::leaf(Vec::new()),
            stopped: AtomicBool::new(false),
            stop_deadline: RankedMutex::leaf(None),
            stats: Arc::new(StatsRegistry::new(device.num_queues().into())),
            disks,
            backend_channel: BackendChannel::default(),
            stands_by: AtomicBool::new(options.standby),
            hold: RankedMutex::leaf(None),
        });
        let (listens, file) = (listener.downgrade(), Arc::clone(listener.file()));
        let budget = Arc::clone(&options.sharing.budget);
        let (name, drain_timeout, stands_by) = (options.name.clone(), options.drain_timeout, options.standby);
        let control = DevicePlace::new();
        let registration = events.register(listener.shared(), Arc::clone(&control) as _).map_err(os_error)?;
        let idle = IdleDevice::new(listener, registration, device, Arc::new(options), Arc::clone(&shared));
        control.begin(idle, stands_by).map_err(os_error)?;
        if !stands_by {
            tracing::info!(disk = name, socket = %socket.display(), "listening");
        }
        let standby = RankedMutex::new(LockRank::Standby, stands_by.then_some(Standby::Empty));
        let has_stopped = AtomicBool::new(false);
        Ok(Server { shared, control, standby, listener: listens, file, has_stopped, socket, drain_timeout, budget })
    }

    /// Returns the path of the socket, a duplicate of its listener, for another process, and true if this process has
    /// made its file. `None` once the server has stopped.
    pub fn listener(&self) -> Option<(PathBuf, OwnedFd, bool)> {
        let listener = self.listener.upgrade()?.try_clone().ok()?;
        Some((self.socket.clone(), listener.into(), self.file.is_own()))
    }

    /// Returns the statistics of each queue since the server started, over all connections. `workers` are the workers'
    /// ([`Engine::stats`](mqblk_engine::Engine::stats)). `None` if a queue was attached or detached after they were
    /// read: read them again.
    pub fn stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        self.shared.stats.report(workers)
    }

    /// Adds a disk to the device and opens it on the running queues. Its slot is free.
    ///
    /// # Errors
    /// When it cannot be opened on a worker; then no queue has it.
    pub fn open_disk(&self, disk: QueueDisk) -> Result<(), AttachError> {
        self.shared.stats.forget(disk.slot);
        self.shared.disks.open(disk)
    }

    /// Removes a disk. Waits until it has no request in flight.
    pub fn close_disk(&self, slot: DiskSlot) {
        self.shared.disks.close(slot);
    }

    /// Updates a disk's size in the queues.
    pub fn refresh_disk(&self, slot: DiskSlot) {
        self.shared.disks.refresh(slot);
    }

    /// Moves a queue to another worker (modulo their number) while its guest uses it. The guest sees a pause as long as
    /// the queue's requests in flight. It stays if these take longer than `timeout`, for example those parked at a
    /// stopped disk. Otherwise it starts at the other worker from now on, also when it is set up again.
    ///
    /// # Errors
    /// When the other worker refuses the queue, which is served by its former one again.
    pub fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        self.shared.disks.move_queue(queue, worker, timeout)
    }

    /// Returns the settings of its queues.
    pub fn queue_settings(&self) -> QueueSettings {
        self.shared.disks.queues().get()
    }

    /// Returns the queues that are served now, each by its number.
    pub fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        self.shared.stats.attached_queues()
    }

    /// Changes the polling of the request queues, and the coalescing of their calls: of running and of future ones.
    ///
    /// # Errors
    /// When a worker has ended, or does not respond: it uses the new ones when it does. The others use them already.
    /// When a message of the frontend waits for storage: nothing is changed.
    pub fn set_policy(&self, policy: QueuePolicy) -> Result<(), String> {
        self.shared.disks.set_policy(policy)
    }

    /// Notifies the frontend that the device's configuration has changed, and waits at most `timeout` for its reply.
    pub fn config_changed(&self, timeout: Duration) -> ConfigChangeResult {
        self.shared.backend_channel.config_changed(timeout)
    }

    /// Returns the frontends' use of their budget.
    pub fn budget(&self) -> BudgetUse {
        self.budget.report()
    }

    /// Returns true if a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.backend_channel.is_connected()
    }

    /// Returns the connected frontend.
    pub fn frontend(&self) -> Option<Frontend> {
        let connection = self.shared.connection.lock();
        let SharedConnection { frontend, since, features, .. } = connection.as_ref()?;
        Some(Frontend {
            pid: *frontend,
            connected: since.elapsed(),
            features: features.load(Ordering::Relaxed),
            queues: self.shared.stats.attached_count(),
        })
    }

    /// Returns true if the frontend keeps an in-flight region. `None` before the first queue of the connection starts.
    pub fn has_inflight_region(&self) -> Option<bool> {
        self.shared.gate.tracked()
    }

    /// Starts to drain all queues and starts the drain timeout. [`stop`](Self::stop) waits for the requests in flight.
    /// Several servers can drain at once.
    pub fn begin_stop(&self) {
        self.shared.gate.stop();
        self.shared.stop_deadline.lock().get_or_insert_with(|| Instant::now() + self.drain_timeout);
        let connected = self.shared.connection.lock().clone();
        if let Some(SharedConnection { session, .. }) = connected {
            lock_session(&session).begin_end();
        }
    }

    /// Drains the queues, publishes completions and signals the calls, and only then closes the connection: a frontend
    /// takes the used rings at that moment as final. Removes the socket.
    pub fn stop(&self) {
        if self.has_stopped.swap(true, Ordering::SeqCst) {
            return;
        }
        self.begin_stop();
        let end = self.shared.stop_deadline();
        // Not in the loop's head: the lock would be held in its body.
        let draining = self.shared.draining.lock().clone();
        for session in draining {
            lock_session(&session).begin_end();
            drain_or_freeze(&session, end);
        }
        let connected = self.shared.connection.lock().clone();
        if let Some(SharedConnection { session, .. }) = &connected {
            // Queues may have started after `begin_stop` read the connection.
            lock_session(session).begin_end();
            drain_or_freeze(session, end);
        }
        self.shared.stopped.store(true, Ordering::SeqCst);
        if let Some(SharedConnection { stream, .. }) = connected
            // The file of another process is unchanged.
            && !self.shared.stands_by.load(Ordering::SeqCst)
        {
            // The connection may be closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if !self.control.stop() {
            tracing::error!(socket = %self.socket.display(), "the control thread had panicked");
        }
    }
}

/// Waits until `end` for a draining session, and freezes the requests that remain.
fn drain_or_freeze(session: &SharedSession, end: Option<Instant>) {
    let mut session = lock_session(session);
    if !session.wait_drained(end) {
        session.freeze();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
