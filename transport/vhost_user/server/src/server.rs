//! The control thread of one device.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::DiskSlot;
use mqblk_engine::{
    AttachError, Coalesce, Engine, EventFd, FixedBufferUse, Lane, PollPolicy, QueueDisk, QueueReport, Tally,
    WorkerReport,
};
use mqblk_virtio::VirtioDevice;

use crate::control::Control;
use crate::device_state::HostState;
use crate::disks::{Disks, SharedSession};
use crate::gate::StartGate;
use crate::listen::{ListenSocket, SocketError};
use crate::requests::{ConfigNotice, Requests};

/// What a device needs to be served.
pub struct ServerOptions {
    /// The disk's name, for logs.
    pub name: String,
    /// Where to listen.
    pub socket: PathBuf,
    /// Permission bits of the socket.
    pub socket_mode: u32,
    /// The worker of each queue; queues past its end are spread round-robin.
    pub queue_map: Vec<usize>,
    /// How long queues are polled.
    pub poll: PollPolicy,
    /// How calls are put off.
    pub coalesce: Coalesce,
    /// Whether guest memory is registered with the workers' rings.
    pub fixed: FixedBufferUse,
    /// How long a stop waits for storage. What is in flight after that stays unanswered: it is done again by whoever serves the
    /// queues next, if the VMM keeps an in-flight region.
    pub drain_timeout: Duration,
    /// The disks at the start.
    pub disks: Vec<QueueDisk>,
    /// The workers.
    pub engine: Arc<Engine>,
    /// What travels with the device's state when a guest is migrated, besides what the device knows.
    pub host_state: Option<Arc<dyn HostState>>,
}

/// A device that listens. Stopped by [`stop`](Self::stop) or by dropping it.
pub struct Server {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
    drain_timeout: Duration,
}

/// What the control thread and the rest of the process share.
pub(crate) struct Shared {
    pub(crate) gate: Arc<StartGate>,
    pub(crate) bell: EventFd,
    /// The connection being served.
    pub(crate) connection: Mutex<Option<Connected>>,
    /// Sessions whose connection has ended, while they have requests in flight.
    pub(crate) draining: Mutex<Vec<SharedSession>>,
    /// The server has stopped: the control thread ends.
    pub(crate) stopped: AtomicBool,
    /// Until when a stop waits.
    end: Mutex<Option<Instant>>,
    pub(crate) tally: Arc<Tally>,
    pub(crate) disks: Arc<Disks>,
    pub(crate) requests: Requests,
}

/// A connection and what was set up over it.
#[derive(Clone)]
pub(crate) struct Connected {
    pub(crate) stream: Arc<UnixStream>,
    pub(crate) session: SharedSession,
}

impl Shared {
    /// When a stop gives up waiting for storage; `None` before a stop.
    pub(crate) fn end(&self) -> Option<Instant> {
        *lock(&self.end)
    }
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Listens, and serves one VMM after the other on a thread of its own.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn start<D: VirtioDevice<Lane>>(device: Arc<D>, mut options: ServerOptions) -> Result<Server, SocketError> {
        let disks = std::mem::take(&mut options.disks);
        if options.fixed == FixedBufferUse::Auto && !disks.iter().any(|disk| disk.disk.limits().pins_memory) {
            options.fixed = FixedBufferUse::Off;
        }
        let socket = options.socket.clone();
        let listener = ListenSocket::bind(&socket, options.socket_mode)?;
        let refused = |source| SocketError::Os { path: socket.clone(), source };
        let bell = EventFd::new().map_err(refused)?;
        let disks = Arc::new(Disks::new(disks));
        let shared = Arc::new(Shared {
            gate: Arc::new(StartGate::new(Arc::clone(&disks))),
            bell,
            connection: Mutex::default(),
            draining: Mutex::default(),
            stopped: AtomicBool::new(false),
            end: Mutex::default(),
            tally: Arc::new(Tally::new(device.queues().into())),
            disks,
            requests: Requests::default(),
        });
        let (inner, name, drain_timeout) = (Arc::clone(&shared), options.name.clone(), options.drain_timeout);
        let thread = std::thread::Builder::new()
            .name(format!("vhost-{name}"))
            .spawn(move || Control::new(listener, device, Arc::new(options), inner).run())
            .map_err(refused)?;
        tracing::info!(disk = name, socket = %socket.display(), "listening");
        Ok(Server { shared, thread: Some(thread), socket, drain_timeout })
    }

    /// What each queue of the device has counted since the server started, whatever guests came and went, by what the workers
    /// said ([`Engine::reports`]). `None` when they were asked while a queue came or went: ask them again.
    pub fn report(&self, workers: &[WorkerReport]) -> Option<Vec<QueueReport>> {
        self.shared.tally.report(workers)
    }

    /// Gives the device one more disk, also the queues that are being served. Its slot is free.
    ///
    /// # Errors
    /// When it cannot be opened on a worker; then no queue has it.
    pub fn open_disk(&self, disk: QueueDisk) -> Result<(), AttachError> {
        self.shared.tally.forget(disk.slot);
        self.shared.disks.open(disk)
    }

    /// Takes a disk away. Waits until nothing of it is in flight.
    pub fn close_disk(&self, slot: DiskSlot) {
        self.shared.disks.close(slot);
    }

    /// Has the queues see a disk's new size.
    pub fn refresh_disk(&self, slot: DiskSlot) {
        self.shared.disks.refresh(slot);
    }

    /// Tells the front-end that the device's configuration has changed, and waits at most `patience` for its answer.
    pub fn config_changed(&self, patience: Duration) -> ConfigNotice {
        self.shared.requests.config_changed(patience)
    }

    /// Whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.requests.is_connected()
    }

    /// Whether the front-end keeps the region in which requests in flight outlive this process. `None` when none has started a queue.
    pub fn in_flight_region(&self) -> Option<bool> {
        self.shared.gate.tracked()
    }

    /// Takes no more requests off any queue. [`stop`](Self::stop) waits for those in flight, from now on for the drain's time at
    /// most: so several servers drain at once.
    pub fn begin_stop(&self) {
        self.shared.gate.stop();
        lock(&self.shared.end).get_or_insert_with(|| Instant::now() + self.drain_timeout);
        let connected = lock(&self.shared.connection).clone();
        if let Some(Connected { session, .. }) = connected {
            lock(&session).begin_drain();
        }
    }

    /// Drains the queues, publishes and calls for what was answered, and only then ends the connection: a VMM takes what it finds
    /// in the rings at that moment for all that will ever be answered. Removes the socket.
    pub fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.begin_stop();
        let end = self.shared.end();
        for session in lock(&self.shared.draining).clone() {
            finish(&session, end);
        }
        let connected = lock(&self.shared.connection).clone();
        if let Some(Connected { session, .. }) = &connected {
            // Queues may have started between the look above and the stop.
            lock(session).begin_drain();
            finish(session, end);
        }
        self.shared.stopped.store(true, Ordering::SeqCst);
        if let Some(Connected { stream, .. }) = connected {
            // It may be gone already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        self.shared.bell.signal();
        if thread.join().is_err() {
            tracing::error!(socket = %self.socket.display(), "the control thread had panicked");
        }
    }
}

/// Waits for a draining session's requests until `end`, and leaves those that remain.
fn finish(session: &SharedSession, end: Option<Instant>) {
    let mut session = lock(session);
    if !session.wait_drained(end) {
        session.freeze();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
