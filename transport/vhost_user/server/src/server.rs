//! The control thread of one device.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mqblk_core::DiskSlot;
use mqblk_engine::{
    AttachError, Coalesce, Engine, EventFd, FixedBufferUse, Lane, PollPolicy, QueueDisk, QueueReport, Tally,
    WorkerReport,
};
use mqblk_virtio::VirtioDevice;
use rustix::event::{PollFd, PollFlags};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::disks::{Disks, Holder};
use crate::listen::{ListenSocket, SocketError};
use crate::requests::{ConfigNotice, Requests};
use crate::session::Session;

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
    /// The disks at the start.
    pub disks: Vec<QueueDisk>,
    /// The workers.
    pub engine: Arc<Engine>,
}

/// A device that listens. Stopped by [`stop`](Self::stop) or by dropping it.
pub struct Server {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
}

struct Shared {
    stop: AtomicBool,
    bell: EventFd,
    /// The connection being served, to be shut down at stop.
    connection: Mutex<Option<UnixStream>>,
    tally: Arc<Tally>,
    disks: Arc<Disks>,
    requests: Requests,
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
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            bell,
            connection: Mutex::new(None),
            tally: Arc::new(Tally::new(device.queues().into())),
            disks: Arc::new(Disks::new(disks)),
            requests: Requests::default(),
        });
        let (inner, name) = (Arc::clone(&shared), options.name.clone());
        let thread = std::thread::Builder::new()
            .name(format!("vhost-{name}"))
            .spawn(move || listen_until_stopped(listener, &device, &Arc::new(options), &inner))
            .map_err(refused)?;
        tracing::info!(disk = name, socket = %socket.display(), "listening");
        Ok(Server { shared, thread: Some(thread), socket })
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

    /// Ends the connection, drains its queues and removes the socket.
    pub fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.bell.signal();
        if let Some(stream) = &*self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner) {
            // It may be gone already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if thread.join().is_err() {
            tracing::error!(socket = %self.socket.display(), "the control thread had panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn listen_until_stopped<D: VirtioDevice<Lane>>(
    socket: ListenSocket,
    device: &Arc<D>,
    options: &Arc<ServerOptions>,
    shared: &Shared,
) {
    let listener = socket.listener();
    while !shared.stop.load(Ordering::SeqCst) {
        let mut ready =
            [PollFd::new(listener, PollFlags::IN), PollFd::from_borrowed_fd(shared.bell.as_fd(), PollFlags::IN)];
        if rustix::event::poll(&mut ready, None).is_err() || !ready[0].revents().contains(PollFlags::IN) {
            continue;
        }
        match listener.accept() {
            Ok((stream, _)) => serve(stream, device, options, shared),
            Err(error) => {
                tracing::warn!(disk = options.name, "accept: {error}");
                // Out of descriptors, most likely: the connection stays in the queue, so do not spin on it.
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
    }
}

/// Serves one connection until it ends.
fn serve<D: VirtioDevice<Lane>>(stream: UnixStream, device: &Arc<D>, options: &Arc<ServerOptions>, shared: &Shared) {
    let name = options.name.as_str();
    let ahead = match stream.try_clone().and_then(|clone| Ok((clone, stream.try_clone()?))) {
        Ok((clone, ahead)) => {
            *shared.connection.lock().unwrap_or_else(PoisonError::into_inner) = Some(clone);
            ahead
        }
        Err(error) => {
            tracing::warn!(disk = name, "connection refused: {error}");
            return;
        }
    };
    // A stop that came before the clone was in place has not shut it down.
    if shared.stop.load(Ordering::SeqCst) {
        return;
    }
    tracing::debug!(disk = name, "front-end connected");
    let (tally, disks) = (Arc::clone(&shared.tally), Arc::clone(&shared.disks));
    let session = Arc::new(Mutex::new(Session::new(Arc::clone(device), Arc::clone(options), tally, disks)));
    shared.disks.held_by(Some(Arc::clone(&session) as Arc<Mutex<dyn Holder>>));
    shared.requests.begin();
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
    let ended = loop {
        shared.requests.look_ahead(&ahead);
        // A panic in a message's handling is a bug, but it must cost only this connection.
        let handled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| handler.handle_request()));
        match handled {
            Ok(Ok(())) => {
                // Some messages are answered with an error that does not end the conversation.
                let complaint = session.lock().unwrap_or_else(PoisonError::into_inner).complaint();
                if let Some(why) = complaint {
                    tracing::warn!(disk = name, "front-end's message declined: {why}");
                }
            }
            Ok(Err(error)) => break Some(error),
            Err(_) => break None,
        }
    };
    drop(handler);
    shared.requests.end();
    shared.disks.held_by(None);
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    match (ended, session.complaint()) {
        (_, Some(why)) => tracing::warn!(disk = name, "front-end disconnected for its message: {why}"),
        (Some(error), None) if is_hang_up(&error) || shared.stop.load(Ordering::SeqCst) => {
            tracing::debug!(disk = name, "front-end left");
        }
        (Some(error), None) => tracing::warn!(disk = name, "front-end disconnected for its message: {error}"),
        (None, None) => tracing::error!(disk = name, "front-end disconnected: handling its message failed"),
    }
    if session.lost_memory() {
        tracing::warn!(disk = name, "the front-end cut off memory that it had shared");
    }
    session.stop();
    *shared.connection.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Whether the other side simply went away.
fn is_hang_up(error: &Error) -> bool {
    match error {
        Error::Disconnected => true,
        Error::SocketBroken(source) | Error::SocketError(source) => {
            matches!(source.kind(), std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe)
        }
        _ => false,
    }
}
