//! Tables of a ring's registered files and buffers.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_memory::{GuestMemory, LeaseId};

/// A file of a ring's operations.
#[derive(Debug)]
pub enum RingFile {
    /// Registered: no reference counting per operation.
    Fixed(u32),
    /// Named by descriptor because the table was full or missing: a little slower.
    Plain(Arc<OwnedFd>),
}

impl RingFile {
    /// Returns the descriptor that an operation must keep open.
    #[inline]
    pub(crate) fn keep(&self) -> Option<Arc<OwnedFd>> {
        match self {
            RingFile::Fixed(_) => None,
            RingFile::Plain(fd) => Some(Arc::clone(fd)),
        }
    }
}

/// A file that several queues of a worker keep open.
#[derive(Debug)]
pub(crate) struct KeptFile {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) registered: RingFile,
    pub(crate) users: usize,
}

/// A lease that several queues of a worker use.
#[derive(Debug)]
pub(crate) struct SharedLease {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) lease: LeaseId,
    pub(crate) users: usize,
}

/// The tables of registered files and buffers.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) free_files: Vec<u32>,
    /// True for each registered buffer index in use. Empty when the table could not be registered.
    pub(crate) buffers: Vec<bool>,
    /// Files that stay open for as long as the ring has operations in flight.
    pub(crate) kept: Vec<KeptFile>,
    /// Leases that were retired while requests were in flight, with their buffer indices.
    pub(crate) leaving: Vec<(LeaseId, Vec<u16>)>,
    /// Leases by memory table: the queues of a guest share one.
    pub(crate) shared: Vec<SharedLease>,
    /// Buffer indices of live leases.
    pub(crate) held: Vec<(LeaseId, Vec<u16>)>,
}

impl Tables {
    /// Takes `count` consecutive free buffer indices and returns the first.
    pub(crate) fn take_run(&mut self, count: usize) -> Option<u16> {
        let start = (0..=self.buffers.len().checked_sub(count)?)
            .find(|start| self.buffers[*start..start + count].iter().all(|used| !used))?;
        self.buffers[start..start + count].fill(true);
        u16::try_from(start).ok()
    }
}

/// Adds the memlock limit, and the `expected` minimum, to an error for lack of locked memory.
pub(crate) fn with_memlock(error: io::Error, expected: &str) -> io::Error {
    match rustix::process::getrlimit(rustix::process::Resource::Memlock).current {
        Some(limit) if error.raw_os_error() == Some(libc::ENOMEM) => io::Error::new(
            error.kind(),
            format!(
                "{error}: memlock limit: found {} KiB, expected at least {expected} (ulimit -l, LimitMEMLOCK=)",
                limit >> 10
            ),
        ),
        _ => error,
    }
}
