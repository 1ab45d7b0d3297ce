//! The threads that call the storage, and their queue of requests.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::lock::lock;
use mqblk_core::thread::spawn;
use mqblk_core::thread_role::{ThreadRole, enter};
use mqblk_core::{ByteLen, ByteOffset, Op, Tag};
use mqblk_uring::RemoteIo;

use super::storage::BlockingStorage;

/// Most bytes of a call to the storage, and size of a thread's buffer; longer requests take several calls.
const BOUNCE_LEN: usize = 1 << 20;
/// Alignment of a thread's buffer in bytes: a page, enough for direct I/O on any storage.
const BOUNCE_ALIGN: usize = 4096;
/// Longest wait of a closing disk for a call that hangs. Its thread ends when the call returns.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EOPNOTSUPP: i32 = 95;
const ECANCELED: i32 = 125;

/// A request that waits for a thread.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    /// The channel that submitted it.
    pub(super) channel: u64,
    pub(super) tag: Tag,
    pub(super) op: Op,
    pub(super) start: ByteOffset,
    pub(super) len: ByteLen,
    pub(super) io: RemoteIo,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<QueuedRequest>,
    /// Threads that wait for requests.
    idle: usize,
    closed: bool,
}

/// Requests of all channels, first come first served.
#[derive(Debug, Default)]
pub(super) struct RequestQueue {
    state: Mutex<QueueState>,
    available: Condvar,
    channels: AtomicU64,
}

impl RequestQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    /// Returns a number for a channel.
    pub(super) fn channel_number(&self) -> u64 {
        self.channels.fetch_add(1, Ordering::Relaxed)
    }

    /// Queues a batch and wakes the threads that it needs.
    pub(super) fn submit(&self, batch: &mut Vec<QueuedRequest>) {
        let count = batch.len();
        let mut state = self.lock();
        state.waiting.extend(batch.drain(..));
        let wake = count.min(state.idle);
        drop(state);
        (0..wake).for_each(|_| self.available.notify_one());
    }

    /// Ends a channel's requests of these tags, which are in order, that no thread has taken.
    pub(super) fn cancel(&self, channel: u64, tags: &[Tag]) {
        let mut cancelled = Vec::new();
        let mut state = self.lock();
        for request in std::mem::take(&mut state.waiting) {
            if request.channel == channel && tags.binary_search(&request.tag).is_ok() {
                cancelled.push(request);
            } else {
                state.waiting.push_back(request);
            }
        }
        drop(state);
        cancelled.into_iter().for_each(|request| request.io.complete(-ECANCELED));
    }

    /// Returns the next request; `None` when the queue is closed and empty.
    fn take(&self) -> Option<QueuedRequest> {
        let mut state = self.lock();
        loop {
            if let Some(request) = state.waiting.pop_front() {
                return Some(request);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            state = self.available.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// The threads. Dropping this ends them.
pub(super) struct ThreadPool {
    queue: Arc<RequestQueue>,
    storage: Arc<dyn BlockingStorage>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    pub(super) fn start(storage: Box<dyn BlockingStorage>, threads: u32) -> io::Result<ThreadPool> {
        let mut pool = ThreadPool { queue: Arc::default(), storage: storage.into(), threads: Vec::new() };
        for number in 0..threads.max(1) {
            let (queue, storage) = (Arc::clone(&pool.queue), Arc::clone(&pool.storage));
            let (entered, result) = sync_channel(1);
            pool.threads.push(spawn(format!("storage-{number}"), move || {
                let may_serve = enter(ThreadRole::Storage);
                let serves = may_serve.is_ok();
                let _ = entered.send(may_serve);
                if serves {
                    serve(&queue, storage);
                }
            })?);
            result.recv().unwrap_or_else(|_| Err(io::Error::other("a storage thread ended while starting")))?;
        }
        Ok(pool)
    }

    pub(super) fn queue(&self) -> Arc<RequestQueue> {
        Arc::clone(&self.queue)
    }

    pub(super) fn storage(&self) -> &dyn BlockingStorage {
        self.storage.as_ref()
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.available.notify_all();
        let deadline = Instant::now() + STOP_TIMEOUT;
        while !self.threads.iter().all(JoinHandle::is_finished) {
            if Instant::now() >= deadline {
                tracing::warn!("a call to storage does not return: its thread is left behind");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn serve(queue: &RequestQueue, storage: Arc<dyn BlockingStorage>) {
    let mut bounce = Vec::new();
    while let Some(request) = queue.take() {
        // A panic of the storage fails the request, not the daemon.
        let done = catch_unwind(AssertUnwindSafe(|| perform(storage.as_ref(), &request, &mut bounce)));
        let result = match done {
            Ok(Ok(())) => 0,
            Ok(Err(error)) => -errno(&error),
            Err(_) => {
                tracing::error!(op = ?request.op, start = request.start.0, "the storage panicked");
                -EIO
            }
        };
        request.io.complete(result);
    }
}

fn perform(storage: &dyn BlockingStorage, request: &QueuedRequest, bounce: &mut Vec<u8>) -> io::Result<()> {
    let QueuedRequest { op, start, len, io, .. } = request;
    match *op {
        Op::Read | Op::Write { .. } => transfer(storage, request, bounce)?,
        Op::Flush => storage.flush()?,
        Op::Discard { .. } => storage.discard(*start, *len)?,
        Op::WriteZeroes { may_unmap, .. } => storage.write_zeroes(*start, *len, may_unmap)?,
    }
    debug_assert!(op.has_data() || io.is_empty());
    match *op {
        Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. } => storage.flush(),
        _ => Ok(()),
    }
}

/// Carries out a read or a write in calls of at most [`BOUNCE_LEN`] bytes.
fn transfer(storage: &dyn BlockingStorage, request: &QueuedRequest, bounce: &mut Vec<u8>) -> io::Result<()> {
    let short = || io::Error::from_raw_os_error(EINVAL);
    let mut done = 0;
    while done < request.len.0 {
        let run = (request.len.0 - done).min(BOUNCE_LEN as u64) as usize;
        if bounce.len() < run + BOUNCE_ALIGN {
            bounce.resize(run.next_power_of_two() + BOUNCE_ALIGN, 0);
        }
        let from = bounce.as_ptr().align_offset(BOUNCE_ALIGN);
        let (bytes, at) = (&mut bounce[from..from + run], ByteOffset(request.start.0 + done));
        if request.op == Op::Read {
            storage.read_at(bytes, at)?;
            request.io.copy_in(done, bytes).then_some(()).ok_or_else(short)?;
        } else {
            request.io.copy_out(done, bytes).then_some(()).ok_or_else(short)?;
            storage.write_at(bytes, at)?;
        }
        done += run as u64;
    }
    Ok(())
}

/// Returns the errno of an error.
fn errno(error: &io::Error) -> i32 {
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) if errno > 0 => errno,
        (_, io::ErrorKind::Unsupported) => EOPNOTSUPP,
        (_, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => ENOSPC,
        (_, io::ErrorKind::ReadOnlyFilesystem) => EROFS,
        (_, io::ErrorKind::InvalidInput) => EINVAL,
        _ => EIO,
    }
}
