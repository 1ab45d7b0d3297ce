//! A small vhost-user server for tests, in this process.
//!
//! Written from the specifications, byte by byte. It shares no code with the driver except the mapping of memory, so
//! both are checked against the documents. A [`ModelDevice`] implements the device.

mod ring;
mod wire;

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use mqblk_memory::{GuestAddress, GuestMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longest wait for a message or a kick before the model checks everything again.
const TICK_MS: i64 = 20;

/// A descriptor: (address, length, device-writable).
pub(crate) type Descriptor = (u64, u32, bool);

/// How the model handles a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// Completed, with this many bytes written.
    Complete(u32),
    /// Completed with an id that is not in flight.
    CompleteWrongId(u32),
    /// Held; executed again at the next tick.
    Hold,
    /// The server closes the connection.
    Disconnect,
}

/// A request taken off a ring.
#[derive(Clone, Debug)]
pub(crate) struct ModelRequest {
    pub(crate) queue: usize,
    pub(crate) head: u16,
    pub(crate) descriptors: Vec<Descriptor>,
}

/// A device of the model.
pub(crate) trait ModelDevice: Send + Sync + 'static {
    /// Returns the number of rings.
    fn ring_count(&self) -> u16;
    /// Returns the offered virtio features.
    fn features(&self) -> u64;
    /// Returns the offered vhost-user protocol features.
    fn protocol_features(&self) -> u64;
    /// Returns the configuration space.
    fn config(&self) -> Vec<u8>;
    /// Handles a driver's write to the configuration space.
    fn write_config(&self, offset: u32, bytes: &[u8]);
    /// Observes all requests in flight before any of them is executed.
    fn observe_in_flight(&self, _memory: &GuestMemory, _requests: &[ModelRequest]) {}
    /// Executes a request.
    fn execute(&self, memory: &GuestMemory, request: &ModelRequest) -> RequestOutcome;
    /// Handles the end of a connection.
    fn closed(&self) {}
}

pub(crate) fn read<const N: usize>(memory: &GuestMemory, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    memory.read(GuestAddress(at), &mut bytes).expect("a mapped address");
    bytes
}

pub(crate) fn write(memory: &GuestMemory, at: u64, bytes: &[u8]) {
    memory.write(GuestAddress(at), bytes).expect("a mapped address");
}

/// The running server. Ends when dropped.
#[derive(Debug)]
pub(crate) struct ModelServer {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ModelServer {
    /// Serves `device` at `path`, one connection after the other.
    pub(crate) fn start(path: &Path, device: Arc<impl ModelDevice>) -> ModelServer {
        let listener = UnixListener::bind(path).expect("the model's socket");
        listener.set_nonblocking(true).expect("non-blocking listener");
        let stop = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Acquire) {
                let _ = wait_readable(&[&listener], TICK_MS);
                if let Ok((socket, _)) = listener.accept() {
                    serve(&*device, &socket, &ends);
                    device.closed();
                }
            }
        });
        ModelServer { path: path.to_owned(), stop, thread: Some(thread) }
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Waits until one of `fds` is readable, for at most `milliseconds`. Returns a flag for each.
fn wait_readable(fds: &[&dyn std::os::fd::AsFd], milliseconds: i64) -> Vec<bool> {
    let limit = Timespec { tv_sec: 0, tv_nsec: milliseconds * 1_000_000 };
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let _ = poll(&mut polled, Some(&limit));
    polled.iter().map(|fd| !fd.revents().is_empty()).collect()
}

/// Serves a connection until it is closed.
fn serve(device: &impl ModelDevice, socket: &UnixStream, stop: &AtomicBool) {
    let mut connection = wire::Connection::new(device, socket);
    while !stop.load(Ordering::Acquire) {
        let kicks: Vec<&File> = connection.rings.iter().filter_map(|ring| ring.kick.as_ref()).collect();
        let fds: Vec<&dyn std::os::fd::AsFd> =
            std::iter::once(socket as &dyn std::os::fd::AsFd).chain(kicks.iter().map(|kick| *kick as _)).collect();
        let ready = wait_readable(&fds, TICK_MS);
        for (kick, ready) in kicks.iter().zip(&ready[1..]) {
            if *ready {
                let _ = std::io::Read::read(&mut &**kick, &mut [0; 8]);
            }
        }
        if ready[0] && !connection.handle_message() {
            return;
        }
        if !connection.serve_rings() {
            return;
        }
    }
}
