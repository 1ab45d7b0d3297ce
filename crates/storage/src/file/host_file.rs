//! A file of an image of another format, for that format's backend.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::{BlockSize, ByteLen};
use mqblk_uring::UringContext;

use super::channel::FileChannel;
use super::open_file::{FileKind, OpenFile};
use super::{host, lock};
use crate::admission::{self, DiskSize};

/// The size of a file whose end is irrelevant here.
const UNBOUNDED: ByteLen = ByteLen(1 << 62);

/// A file of an image of another format. The format's backend maps data to offsets of the file. Uses the host's page
/// cache; the backend opens and locks it.
#[derive(Debug)]
pub(crate) struct HostFile(Arc<OpenFile>);

impl HostFile {
    /// Takes an open file. `None`: its file system does not support RWF_NOWAIT, so a worker should not use it.
    ///
    /// # Errors
    /// When the host does not report its type, or refuses a descriptor.
    pub(crate) fn new(path: &Path, file: &File, read_only: bool) -> io::Result<Option<HostFile>> {
        let Ok(kind) = host::file_kind(file)? else { return Ok(None) };
        if kind == FileKind::Regular && !host::has_nowait(file) {
            return Ok(None);
        }
        Ok(Some(HostFile(Arc::new(OpenFile {
            path: path.to_owned(),
            fd: Arc::new(file.try_clone()?.into()),
            geometry: admission::plain_geometry(UNBOUNDED, BlockSize::B512, read_only),
            size: Arc::new(DiskSize::new(UNBOUNDED)),
            kind,
            direct: None,
            uses_threads: false,
            unmap: false,
            discard: None,
            threads_discard: false,
            small_blocks: None,
            locked: false,
        }))))
    }

    /// Returns its current length.
    ///
    /// # Errors
    /// When the host does not report it.
    pub(crate) fn len(&self) -> io::Result<ByteLen> {
        Ok(host::size(&self.0.fd, self.0.kind)?)
    }

    /// Releases the locks of its owner.
    pub(crate) fn unlock(&self) {
        lock::unlock_closed(&self.0.fd);
    }

    /// Opens a worker's channel, for reads and writes.
    ///
    /// # Errors
    /// When the host refuses memory, or does not report the file's length.
    pub(crate) fn open_channel(&self, context: &mut UringContext) -> io::Result<FileChannel> {
        FileChannel::new(Arc::clone(&self.0), self.len()?, context)
    }
}
