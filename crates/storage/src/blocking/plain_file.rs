//! `storage=blocking`: a file by plain system calls on threads. For tests, and the example of a backend on blocking
//! storage.
//!
//! It is not offered to users: for file systems that cannot wait asynchronously, io_uring uses the kernel's own
//! threads, which cost less.
//!
//! | setting | default | meaning |
//! |---|---|---|
//! | `path` | needed | a file |
//! | `threads` | 4 | calls at once, 1 to 64 |
//! | `block-size` | 512 | 512 or 4096 |
//! | `readonly` | off | |

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_core::{BlockSize, ByteLen, ByteOffset, DiscardLimits, Disk, DiskError, ImageAccess, ImageOpener};
use mqblk_uring::UringContext;
use rustix::fs::FallocateFlags;

use super::{BlockingOptions, BlockingStorage};
use crate::admission;
use crate::keys::{PATH, READONLY, THREADS};

/// Longest range of one discard.
const MAX_DISCARD: ByteLen = ByteLen(1 << 30);

/// Opens a file.
///
/// # Errors
/// When a setting does not fit, or the host refuses.
pub fn open(settings: &mut Settings, opener: &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let Some(path) = settings.text(&PATH) else {
        return Err(settings.error(&PATH, "nothing", "a file").into());
    };
    let threads = settings.number(&THREADS)?.unwrap_or(4) as u32;
    let block = admission::block_size(settings)?.unwrap_or(BlockSize::B512);
    let read_only = settings.switch_or_default(&READONLY)?;
    let file = opener.open(Path::new(&path), ImageAccess { write: !read_only, ..ImageAccess::default() });
    let file = file.map_err(|error| DiskError::Os { what: path.clone(), source: error.into() })?;
    let granularity = ByteLen(u64::from(block.bytes()));
    let resolved =
        vec![("path", path), ("block-size", block.bytes().to_string()), ("readonly", admission::on_off(read_only))];
    let options = BlockingOptions {
        threads,
        geometry: admission::plain_geometry(ByteLen::ZERO, block, read_only),
        discard: Some(DiscardLimits { granularity, max_len: MAX_DISCARD }),
        volatile_cache: true,
        resolved,
    };
    super::open(Box::new(PlainFile(file)), options)
}

struct PlainFile(File);

impl BlockingStorage for PlainFile {
    fn size(&self) -> io::Result<ByteLen> {
        Ok(ByteLen(self.0.metadata()?.len()))
    }

    fn read_at(&self, bytes: &mut [u8], at: ByteOffset) -> io::Result<()> {
        self.0.read_exact_at(bytes, at.0)
    }

    fn write_at(&self, bytes: &[u8], at: ByteOffset) -> io::Result<()> {
        self.0.write_all_at(bytes, at.0)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn discard(&self, at: ByteOffset, len: ByteLen) -> io::Result<()> {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.0, punch, at.0, len.0)?)
    }

    fn set_size(&self, size: ByteLen) -> io::Result<()> {
        self.0.set_len(size.0)
    }
}
