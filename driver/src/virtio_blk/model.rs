//! A small vhost-user-blk server in this process, for tests.
//!
//! Written from the specifications, byte by byte, and sharing nothing with the driver but the mapping of memory: what the
//! two agree on, the documents said. It keeps its disk in memory and can be told to misbehave.

mod ring;
mod wire;

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How the model behaves.
#[derive(Clone, Debug)]
pub struct Behaviour {
    /// Bytes of the disk.
    pub size: usize,
    /// Queues offered.
    pub queues: u16,
    /// Feature bits not to offer.
    pub without: u64,
    /// VIRTIO_BLK_F_RO.
    pub read_only: bool,
    /// VIRTIO_BLK_F_SIZE_MAX, with this value.
    pub size_max: Option<u32>,
    /// What to do wrong.
    pub fault: Fault,
}

/// What the model does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Closes the connection when this many requests have come.
    LeaveAfter(u64),
    /// Stops answering requests when this many have come.
    StallAfter(u64),
    /// Flips a bit of every write from this one on before it is stored.
    CorruptFrom(u64),
    /// Answers with VIRTIO_BLK_S_IOERR from this request on.
    FailFrom(u64),
    /// Answers without writing the status byte from this request on.
    SilentFrom(u64),
    /// Answers with an id that is not in flight.
    WrongIdAt(u64),
}

impl Default for Behaviour {
    fn default() -> Self {
        Behaviour { size: 1 << 20, queues: 4, without: 0, read_only: false, size_max: None, fault: Fault::None }
    }
}

/// What the connections share.
#[derive(Debug)]
struct Shared {
    behaviour: Behaviour,
    disk: Mutex<Vec<u8>>,
    requests: AtomicU64,
    per_queue: Vec<AtomicU64>,
    flushes: AtomicU64,
    writeback: AtomicBool,
    stop: AtomicBool,
}

/// The running server. Ends when dropped.
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Model {
    /// Serves at `path`, one connection after the other.
    ///
    /// # Panics
    /// When the socket cannot be made: it is for tests.
    pub fn start(path: &Path, behaviour: Behaviour) -> Model {
        let listener = UnixListener::bind(path).expect("the model's socket");
        listener.set_nonblocking(true).expect("non-blocking listener");
        let shared = Arc::new(Shared {
            disk: Mutex::new(vec![0; behaviour.size]),
            per_queue: (0..behaviour.queues).map(|_| AtomicU64::new(0)).collect(),
            behaviour,
            requests: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            writeback: AtomicBool::new(true),
            stop: AtomicBool::new(false),
        });
        let inner = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !inner.stop.load(Ordering::Acquire) {
                let _ = wait(&[&listener], 20);
                if let Ok((socket, _)) = listener.accept() {
                    serve(&inner, &socket);
                }
            }
        });
        Model { path: path.to_owned(), shared, thread: Some(thread) }
    }

    /// The disk's content.
    pub fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        self.shared.disk()
    }

    /// Requests that queue `index` has brought.
    pub fn requests(&self, index: usize) -> u64 {
        self.shared.per_queue[index].load(Ordering::Relaxed)
    }

    /// Flushes answered.
    pub fn flushes(&self) -> u64 {
        self.shared.flushes.load(Ordering::Relaxed)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Shared {
    fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until one of `fds` can be read, at most `milliseconds`. Which: a bit for each.
fn wait(fds: &[&dyn std::os::fd::AsFd], milliseconds: i64) -> u64 {
    let limit = Timespec { tv_sec: 0, tv_nsec: milliseconds * 1_000_000 };
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let _ = poll(&mut polled, Some(&limit));
    polled.iter().enumerate().fold(0, |bits, (at, fd)| bits | u64::from(!fd.revents().is_empty()) << at)
}

/// Serves one connection to its end.
fn serve(shared: &Shared, socket: &UnixStream) {
    let mut connection = wire::Connection::new(shared, socket);
    while !shared.stop.load(Ordering::Acquire) {
        let kicks: Vec<&File> = connection.rings.iter().filter_map(|ring| ring.kick.as_ref()).collect();
        let fds: Vec<&dyn std::os::fd::AsFd> =
            std::iter::once(socket as &dyn std::os::fd::AsFd).chain(kicks.iter().map(|kick| *kick as _)).collect();
        let ready = wait(&fds, 20);
        for (at, kick) in kicks.iter().enumerate() {
            if ready & 2 << at != 0 {
                let _ = std::io::Read::read(&mut &**kick, &mut [0; 8]);
            }
        }
        if ready & 1 != 0 && !connection.message() {
            return;
        }
        if !connection.run_rings() {
            return;
        }
    }
}
