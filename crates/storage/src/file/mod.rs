//! `storage=file`: a regular file or a block device of the host, through the worker's io_uring.
//!
//! The file is locked (an open-file-description lock) for writing, or for reading with `readonly`: a second daemon or
//! QEMU on the same image is refused, but several may read it (`lock.rs`). A mounted block device is refused for
//! writing.
//!
//! How requests are executed:
//! * Reads and writes transfer directly to or from guest memory. Only memory that direct I/O cannot use (less aligned
//!   than `statx` demands) goes through preallocated bounce slots, in slices. Without a free slot a request waits.
//! * With `aio=threads` all requests use plain system calls (`threads.rs`). io_uring would hand such requests to the
//!   ring's own threads, of which there are few for all disks of the worker: one that hangs would delay the others.
//! * In-memory files (tmpfs, ramfs) and cached pages (`direct=off`) are copied at once with `preadv2`/`pwritev2`;
//!   kernel threads copy long requests and those beyond 1 MiB in a turn (`inline.rs`), so that other disks do not wait
//!   for a copy. Requests that would wait for storage go through the ring.
//! * The first transfer to each MiB of a regular file is executed by a kernel thread from the start (`accessed.rs`):
//!   the file system may have to read the data's location from the storage first, and some do so within the submission,
//!   which would delay the worker's other disks.
//! * A flush is `fdatasync`, one at a time: flushes that arrive meanwhile share the next one (`threaded.rs`). A durable
//!   write is a write with `RWF_DSYNC`; durable zeroes are followed by `fdatasync`.
//! * Discard is `fallocate(PUNCH_HOLE)`; of a block device that cannot write zeroes without data `BLKDISCARD`, by
//!   threads of the disk's own (`discarding.rs`). Zeroes are `PUNCH_HOLE` (when space may be deallocated) or
//!   `ZERO_RANGE`; where the host has neither, zeroes are written.
//! * Secure discard is not supported.
//! * Short transfers are continued where they stopped; a transfer past the end of a file that has shrunk completes with
//!   [`OutOfRange`](mqblk_core::Outcome::OutOfRange).

mod accessed;
mod channel;
mod discarding;
mod format;
mod host;
#[cfg(feature = "qcow2")]
mod host_file;
mod inflight;
mod inline;
pub(crate) mod lock;
mod lock_users;
mod open;
mod open_file;
mod retry;
mod slices;
mod small_blocks;
mod threaded;
mod threads;

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use lock::set_sharing;
pub use lock_users::Sharing;
use mqblk_core::settings::Settings;
use mqblk_core::{
    ByteLen, DiscardLimits, Disk, DiskChannel, DiskError, Geometry, ImageAccess, ImageOpener, Limits, OpenImage,
};
use mqblk_uring::UringContext;
pub(crate) use open::KEYS;

use crate::admission;
use crate::blocking::BlockingThreads;
pub(crate) use channel::FileChannel;
use discarding::{DISCARD_THREADS, DiscardingChannel};
#[cfg(feature = "qcow2")]
pub(crate) use host_file::HostFile;
use lock::ImageLock;
use open_file::{FileKind, OpenFile};
use threads::FileCalls;

/// Maximum number of segments of one operation (UIO_MAXIOV).
pub(crate) const MAX_SEGMENTS: u32 = 1024;
/// Largest range of one discard. Punching a fragmented file takes the host about a second per 100 000 extents.
const MAX_DISCARD: ByteLen = ByteLen(1 << 30);
/// Largest range of zeroes: bounds how much one request writes where the host cannot zero without data.
const MAX_ZEROES: ByteLen = ByteLen(256 << 20);

/// Threads of a disk with `aio=threads`: its concurrent requests.
const THREADS: u32 = 16;

/// Opens a file or block device.
///
/// # Errors
/// When a setting does not fit the file, the file cannot be opened, or another process has locked it.
pub fn open(settings: &mut Settings, opener: &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let (open, lock) = open::open(settings, opener)?;
    let open = Arc::new(open);
    let start = |count| BlockingThreads::start(Box::new(FileCalls::new(Arc::clone(&open))), count);
    let count = if open.uses_threads { THREADS } else { DISCARD_THREADS };
    let threads = (open.uses_threads || open.threads_discard).then(|| start(count)).transpose();
    let what = || format!("threads for {}", open.path.display());
    let threads = threads.map_err(|source| DiskError::Os { what: what(), source })?;
    Ok(Arc::new(FileDisk { open, lock, threads }))
}

struct FileDisk {
    open: Arc<OpenFile>,
    lock: Arc<ImageLock>,
    /// For all requests with `aio=threads`, else for discards.
    threads: Option<BlockingThreads>,
}

impl Disk<UringContext> for FileDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.open.size.get(), ..self.open.geometry }
    }

    fn limits(&self) -> Limits {
        let granularity = self.open.discard.filter(|_| !self.open.geometry.read_only);
        Limits {
            max_transfer: admission::MAX_TRANSFER,
            max_segments: MAX_SEGMENTS,
            discard: granularity.map(|granularity| DiscardLimits { granularity, max_len: MAX_DISCARD }),
            write_zeroes: (!self.open.geometry.read_only).then_some(MAX_ZEROES),
            volatile_cache: true,
            cost_per_request: true,
            pins_memory: self.open.direct.is_some() && !self.open.uses_threads,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![
            ("path", self.open.path.display().to_string()),
            ("format", "raw".to_owned()),
            ("direct", admission::on_off(self.open.direct.is_some())),
            ("readonly", admission::on_off(self.open.geometry.read_only)),
            ("block-size", self.open.geometry.logical_block.bytes().to_string()),
            ("lock", self.lock.mode.name().to_owned()),
            ("aio", if self.open.uses_threads { "threads" } else { "io_uring" }.to_owned()),
            ("discard", if self.open.unmap { "unmap" } else { "ignore" }.to_owned()),
        ]
    }

    fn sync(&self) -> std::io::Result<()> {
        if self.open.geometry.read_only {
            return Ok(());
        }
        Ok(rustix::fs::fdatasync(&self.open.fd)?)
    }

    fn found_size(&self) -> Result<ByteLen, DiskError> {
        let what = || format!("querying the size of {}", self.open.path.display());
        let found = host::size(&self.open.fd, self.open.kind);
        found.map_err(|source| DiskError::Os { what: what(), source: source.into() })
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        let OpenFile { path, fd, kind, geometry, .. } = self.open.as_ref();
        let os = |what: &str| {
            let what = format!("{what} {}", path.display());
            move |source: rustix::io::Errno| DiskError::Os { what, source: source.into() }
        };
        let before = self.open.size.get();
        // The current size of a block device may be given explicitly.
        let size = match size {
            Some(size) if *kind == FileKind::BlockDevice && !geometry.read_only && self.found_size()? == size => None,
            size => size,
        };
        if let Some(size) = size {
            admission::check_resize(geometry, size)?;
            self.open.check_units(size)?;
            if *kind == FileKind::BlockDevice {
                let expected =
                    "no size: the host gives a block device its size; without one it is read again".to_owned();
                return Err(DiskError::Size { found: format!("{} bytes", size.0), expected });
            }
            // Channels must refuse requests beyond the new end before the file is truncated.
            self.open.size.set(before.min(size));
            if let Err(error) = rustix::fs::ftruncate(fd, size.0) {
                self.open.size.set(before);
                return Err(os("resizing")(error));
            }
        }
        let found = self.found_size()?;
        if found == ByteLen::ZERO || !found.is_aligned(geometry.logical_block) {
            let expected = format!("a multiple of block-size {} above 0", geometry.logical_block.bytes());
            return Err(DiskError::Size { found: format!("{} bytes in {}", found.0, path.display()), expected });
        }
        self.open.check_units(found)?;
        self.open.size.set(found);
        Ok(found)
    }

    fn activate(&self, timeout: Duration) -> Result<(), DiskError> {
        let OpenFile { fd, direct, .. } = self.open.as_ref();
        // If it has grown, `resize` sets the new size; its caller notifies guests.
        self.lock.acquire(timeout, || {
            if direct.is_none() {
                // The cached pages of this host may be older than another host's writes.
                let _ = rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::DontNeed);
            }
        })
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        let OpenFile { path, fd, geometry, direct, .. } = self.open.as_ref();
        let write = !geometry.read_only;
        let access =
            ImageAccess { write, direct: direct.is_some(), exclusive: write && self.lock.mode.claims_on_open() };
        let failed = |error: io::Error| format!("has no descriptor for another process: {error}");
        let file = fd.try_clone().map_err(failed)?;
        let mut images = vec![OpenImage { path: path.clone(), access, file, in_memory: false }];
        let claim = self.lock.claim().map_err(failed)?;
        images.extend(claim.map(|(access, file)| OpenImage { path: path.clone(), access, file, in_memory: false }));
        Ok(images)
    }

    fn raw_identity(&self) -> Option<String> {
        open::raw_identity(&self.open.fd, self.open.kind)
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        let what = || format!("flush of {} before its lock is released, which is kept", self.open.path.display());
        self.lock.release(|| self.sync()).map_err(|source| DiskError::Os { what: what(), source })
    }

    fn is_passed_on(&self) -> bool {
        self.lock.is_passed_on()
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let OpenFile { geometry, size, discard, uses_threads, .. } = self.open.as_ref();
        let threads = self.threads.as_ref();
        let threads = threads.map(|threads| threads.open_channel(*geometry, size, discard.is_some(), context));
        let what = || format!("bounce memory for {}", self.open.path.display());
        let mut of_file = || {
            let channel = FileChannel::new(Arc::clone(&self.open), size.get(), context);
            channel.map_err(|source| DiskError::Os { what: what(), source })
        };
        Ok(match threads {
            Some(threads) if *uses_threads => threads,
            Some(threads) => Box::new(DiscardingChannel::new(of_file()?, threads)),
            None => Box::new(of_file()?),
        })
    }
}

#[cfg(test)]
mod small_blocks_tests;
#[cfg(test)]
mod tests;
