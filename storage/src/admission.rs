//! What every backend checks before it touches anything: the same request gets the same answer everywhere.

use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::units::in_range;
use mqblk_core::{BlockSize, ByteLen, DiskError, Errno, Geometry, Op, Outcome, Request};

/// The kernel's EINVAL: the answer to a request that no engine should have let through.
pub(crate) const INVALID: Outcome = Outcome::Failed(Errno(22));

/// The longest data transfer that backends name as their limit. It is the kernel's own bound for one system call
/// (`MAX_RW_COUNT`, just below 2 GiB) rounded down to a power of two; longer requests work all the same.
pub(crate) const MAX_TRANSFER: ByteLen = ByteLen(1 << 30);

/// The answer to a request that cannot be carried out on a disk like this, or that needs nothing done. `None`: go on.
///
/// Order: what modifies a read-only disk, then what cannot be done anywhere (secure discard), then the range, then the
/// alignment to the logical block, then a missing buffer.
#[inline]
pub(crate) fn judge<B>(geometry: &Geometry, request: &Request<B>) -> Option<Outcome> {
    let Request { start, len, op, .. } = *request;
    match op {
        Op::Flush => return None,
        Op::Discard { secure: true } if !geometry.read_only => return Some(Outcome::Unsupported),
        _ if geometry.read_only && op.modifies() => return Some(Outcome::ReadOnly),
        _ => {}
    }
    if !in_range(start, len, geometry.size) {
        return Some(Outcome::OutOfRange);
    }
    let block = geometry.logical_block;
    if !start.is_aligned(block) || !len.is_aligned(block) {
        return Some(INVALID);
    }
    if len == ByteLen::ZERO {
        return Some(Outcome::Done(len));
    }
    if op.has_data() && request.buffer.is_none() {
        return Some(INVALID);
    }
    None
}

/// Takes `block-size`.
pub(crate) fn block_size(settings: &mut Settings) -> Result<Option<BlockSize>, SettingError> {
    Ok(settings.choice("block-size", &["512", "4096"])?.map(|word| match word {
        "512" => BlockSize::B512,
        _ => BlockSize::B4096,
    }))
}

/// Takes `size`, which must be one block or more and whole blocks.
pub(crate) fn size(settings: &mut Settings, block: BlockSize) -> Result<ByteLen, SettingError> {
    match settings.size("size")? {
        None => Err(settings.error("size", "nothing", "the disk's size in bytes such as 64M or 10G")),
        Some(size) if size == ByteLen::ZERO || !size.is_aligned(block) => {
            let expected = format!("a multiple of block-size {} above 0", block.bytes());
            Err(settings.error("size", format!("{} bytes", size.0), expected))
        }
        Some(size) => Ok(size),
    }
}

/// A disk's size, which may change while it is open.
#[derive(Debug)]
pub(crate) struct Size(AtomicU64);

impl Size {
    pub(crate) fn new(size: ByteLen) -> Size {
        Size(AtomicU64::new(size.0))
    }

    /// The present one. Nothing else is published with it.
    #[inline]
    pub(crate) fn get(&self) -> ByteLen {
        ByteLen(self.0.load(Ordering::Relaxed))
    }

    pub(crate) fn set(&self, size: ByteLen) {
        self.0.store(size.0, Ordering::Relaxed);
    }
}

/// Whether a disk of this geometry can have a size: whole blocks, at least one, and nobody may write a read-only disk.
pub(crate) fn can_be(geometry: &Geometry, size: ByteLen) -> Result<(), DiskError> {
    let block = geometry.logical_block;
    if size == ByteLen::ZERO || !size.is_aligned(block) {
        let expected = format!("a multiple of block-size {} above 0", block.bytes());
        return Err(DiskError::Size { found: format!("{} bytes", size.0), expected });
    }
    if geometry.read_only {
        let expected = "no change of a disk with readonly=on".to_owned();
        return Err(DiskError::Size { found: format!("{} bytes", size.0), expected });
    }
    Ok(())
}

/// What a backend without a device below it looks like.
pub(crate) fn plain_geometry(size: ByteLen, block: BlockSize, read_only: bool) -> Geometry {
    Geometry {
        size,
        logical_block: block,
        physical_block: block,
        alignment_offset: 0,
        min_io: ByteLen::ZERO,
        opt_io: ByteLen::ZERO,
        read_only,
    }
}

/// `on` or `off`, as settings write it.
pub(crate) fn on_off(switch: bool) -> String {
    if switch { "on" } else { "off" }.to_owned()
}
