//! A disk on any storage whose calls block: a few threads make the calls instead of the workers.
//!
//! Implement [`BlockingStorage`] and give it to [`open`]. Requests wait in one queue for all workers; each thread takes
//! one, calls the storage with its own buffer, and completes it. The data is copied once between that buffer and guest
//! memory. Cost against the worker's own ring: a copy, and two wakeups of a thread unless other requests keep it busy.
//!
//! | contract | how it is kept |
//! |---|---|
//! | no method of a channel blocks on storage | requests are only queued; the queue's lock is never held during a call |
//! | back-pressure | a channel takes at most 1024 requests, and no more than the worker's in-flight table has room for |
//! | cancellation | a request that no thread has taken ends at once; one that a thread has taken ends with its call |
//! | drain | a thread completes its request, however long the call takes; guest memory stays mapped until then |
//! | flush | covers every write that was completed before the flush was submitted: each was returned from `write_at` |
//!
//! [`plain_file`] is the example: `storage=blocking`, a file by plain system calls, for tests.

mod channel;
mod plain_file;
mod pool;
mod storage;

use std::io;
use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;
use mqblk_core::{ByteLen, DiscardLimits, Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_uring::UringContext;

use crate::admission::{self, DiskSize};
use channel::BlockingChannel;
use pool::ThreadPool;

pub use plain_file::open as open_plain_file;
pub use storage::BlockingStorage;

/// Longest range that is zeroed by one request, to bound the time of a thread: zeroes may have to be written.
const MAX_ZEROES: ByteLen = ByteLen(32 << 20);

/// The threads of a disk whose calls may block, for a backend whose properties differ from those of [`open`].
pub(crate) struct BlockingThreads(ThreadPool);

impl BlockingThreads {
    /// Starts `count` threads that call `storage`.
    pub(crate) fn start(storage: Box<dyn BlockingStorage>, count: u32) -> io::Result<BlockingThreads> {
        ThreadPool::start(storage, count).map(BlockingThreads)
    }

    /// Opens a worker's channel. `discards`: the storage can discard.
    pub(crate) fn open_channel(
        &self,
        geometry: Geometry,
        size: &Arc<DiskSize>,
        discards: bool,
        context: &mut UringContext,
    ) -> Box<dyn DiskChannel<UringContext>> {
        Box::new(BlockingChannel::new(self.0.queue(), geometry, Arc::clone(size), discards, context))
    }
}

/// Options of a disk on blocking storage.
#[derive(Clone, Debug)]
pub struct BlockingOptions {
    /// Threads that call the storage, at least 1: its concurrent requests.
    pub threads: u32,
    /// The geometry. The storage's size replaces its size.
    pub geometry: Geometry,
    /// Limits of discard; `None`: not supported.
    pub discard: Option<DiscardLimits>,
    /// True if written data can be lost before a flush.
    pub volatile_cache: bool,
    /// The settings in force, for `--print-config`, without `threads`.
    pub resolved: Vec<(&'static str, String)>,
}

/// Opens a disk on `storage` and starts its threads.
///
/// # Errors
/// When the storage does not report its size, or the host refuses a thread.
pub fn open(
    storage: Box<dyn BlockingStorage>,
    options: BlockingOptions,
) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let os = |what: &str| {
        let what = what.to_owned();
        move |source| DiskError::Os { what, source }
    };
    let size = storage.size().map_err(os("size of the storage"))?;
    let pool = ThreadPool::start(storage, options.threads).map_err(os("threads for the storage"))?;
    Ok(Arc::new(BlockingDisk { options, size: Arc::new(DiskSize::new(size)), pool, resizing: Mutex::new(()) }))
}

struct BlockingDisk {
    options: BlockingOptions,
    size: Arc<DiskSize>,
    pool: ThreadPool,
    /// Serialises resizes.
    resizing: Mutex<()>,
}

impl Disk<UringContext> for BlockingDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.get(), ..self.options.geometry }
    }

    fn limits(&self) -> Limits {
        let writable = !self.options.geometry.read_only;
        Limits {
            max_transfer: admission::MAX_TRANSFER,
            max_segments: u32::from(u16::MAX),
            discard: self.options.discard.filter(|_| writable),
            write_zeroes: writable.then_some(MAX_ZEROES),
            volatile_cache: self.options.volatile_cache,
            cost_per_request: true,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        let mut all = self.options.resolved.clone();
        all.push(("threads", self.options.threads.to_string()));
        all
    }

    fn sync(&self) -> io::Result<()> {
        self.pool.storage().flush()
    }

    fn found_size(&self) -> Result<ByteLen, DiskError> {
        let size = self.pool.storage().size();
        size.map_err(|source| DiskError::Os { what: "size of the storage".to_owned(), source })
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        let _one = lock(&self.resizing);
        let size = match size {
            None => self.found_size()?,
            Some(size) => {
                admission::check_resize(&self.options.geometry, size)?;
                // Smaller first: no request is started beyond the new end.
                if size < self.size.get() {
                    self.size.set(size);
                }
                if let Err(error) = self.pool.storage().set_size(size) {
                    self.size.set(self.found_size()?);
                    let expected = format!("a size that the storage can have ({error})");
                    return Err(DiskError::Size { found: size.to_string(), expected });
                }
                size
            }
        };
        self.size.set(size);
        Ok(size)
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let (geometry, size) = (self.options.geometry, Arc::clone(&self.size));
        Ok(Box::new(BlockingChannel::new(self.pool.queue(), geometry, size, self.options.discard.is_some(), context)))
    }
}

#[cfg(test)]
mod tests;
