//! An open file and its properties.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset, DiskError, Geometry};

use super::lock;
use super::small_blocks::SmallBlocks;
use crate::admission::DiskSize;

/// An open file and its properties. Shared by all channels; constant except for the size.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) path: PathBuf,
    pub(super) fd: Arc<OwnedFd>,
    /// The size in it is unused: see `size`.
    pub(super) geometry: Geometry,
    pub(super) size: Arc<DiskSize>,
    pub(super) kind: FileKind,
    /// Alignment for O_DIRECT; `None` when the page cache is used.
    pub(super) direct: Option<Alignment>,
    /// True if requests go through the disk's own threads.
    pub(super) uses_threads: bool,
    /// True with `discard=unmap`.
    pub(super) unmap: bool,
    /// Granularity of discards in bytes; `None` when they are not possible.
    pub(super) discard: Option<ByteLen>,
    /// True if they go through the disk's own threads, too.
    pub(super) threads_discard: bool,
    /// Set if logical blocks are smaller than the storage's unit of reads, writes and frees.
    pub(super) small_blocks: Option<SmallBlocks>,
    /// True if it holds the lock of its file while it is open.
    pub(super) locked: bool,
}

impl OpenFile {
    /// Checks that a size is a multiple of the unit: a write of the last unit must not extend the file.
    pub(super) fn check_units(&self, size: ByteLen) -> Result<(), DiskError> {
        match self.small_blocks.as_ref().filter(|_| self.direct.is_some()) {
            Some(blocks) if !blocks.is_whole(ByteOffset(0), size) => {
                let expected = format!("a multiple of {} bytes, the unit of its direct I/O", blocks.unit().0);
                Err(DiskError::Size { found: format!("{} bytes in {}", size.0, self.path.display()), expected })
            }
            _ => Ok(()),
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if self.locked {
            // A worker's ring may keep a file, and so the lock, briefly after it was unregistered.
            lock::unlock_closed(&self.fd);
        }
    }
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    /// A file on a file system with storage.
    Regular,
    /// A file on tmpfs or ramfs.
    InMemory,
    BlockDevice,
}

/// Alignment required by direct I/O. All are powers of two, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Of the start of each memory segment.
    pub(super) memory: u32,
    /// Of file offsets, and of the length of each memory segment.
    pub(super) offset: u32,
}
