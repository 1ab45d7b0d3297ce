//! Checks of every backend before it starts a request, so that a request has the same outcome everywhere.

use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::units::in_range;
use mqblk_core::{BlockSize, ByteLen, ByteOffset, DiskError, Errno, Geometry, Op, Outcome, Request};

use crate::keys::{BLOCK_SIZE, SIZE};

/// The outcome of a request that no engine should have admitted.
pub(crate) const INVALID: Outcome = Outcome::Failed(Errno::INVAL);

/// The kernel's EFAULT: the outcome of a request whose guest memory was lost.
pub(crate) const FAULT: Outcome = Outcome::Failed(Errno::FAULT);

/// The maximum data transfer that backends report. It is the kernel's bound for one system call (`MAX_RW_COUNT`, just
/// below 2 GiB) rounded down to a power of two; longer requests work too.
pub(crate) const MAX_TRANSFER: ByteLen = ByteLen(1 << 30);

/// Returns the outcome of a request that is invalid for a disk of this geometry, or that is a no-op. `None`: proceed.
///
/// Order of the checks: modification of a read-only disk, unsupported operation (secure discard), range, alignment to
/// the logical block, missing buffer.
#[inline]
pub(crate) fn check_request<B>(geometry: &Geometry, request: &Request<B>) -> Option<Outcome> {
    if is_valid_transfer(geometry, request) { None } else { check_any_request(geometry, request) }
}

/// Returns true for a read or a write that [`check_request`] lets proceed: most requests.
#[inline]
pub(crate) fn is_valid_transfer<B>(geometry: &Geometry, request: &Request<B>) -> bool {
    let Request { start, len, op, .. } = *request;
    op.has_data()
        && !(geometry.read_only && op.modifies())
        && in_range(start, len, geometry.size)
        && ByteOffset(start.0 | len.0).is_aligned(geometry.logical_block)
        && len != ByteLen::ZERO
        && request.buffer.is_some()
}

/// As [`check_request`], one check after the other.
#[inline(never)]
fn check_any_request<B>(geometry: &Geometry, request: &Request<B>) -> Option<Outcome> {
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
    Ok(settings.word(&BLOCK_SIZE)?.map(|word| match word {
        "512" => BlockSize::B512,
        _ => BlockSize::B4096,
    }))
}

/// Takes `size`, which must be a multiple of the block size above 0.
pub(crate) fn size(settings: &mut Settings, block: BlockSize) -> Result<ByteLen, SettingError> {
    match settings.size(&SIZE)? {
        None => Err(settings.error(&SIZE, "nothing", "the disk's size in bytes such as 64M or 10G")),
        Some(size) if size == ByteLen::ZERO || !size.is_aligned(block) => {
            let expected = format!("a multiple of block-size {} above 0", block.bytes());
            Err(settings.error(&SIZE, format!("{} bytes", size.0), expected))
        }
        Some(size) => Ok(size),
    }
}

/// A disk's size, which may change while it is open.
#[derive(Debug)]
pub(crate) struct DiskSize(AtomicU64);

impl DiskSize {
    pub(crate) fn new(size: ByteLen) -> DiskSize {
        DiskSize(AtomicU64::new(size.0))
    }

    /// Returns the current size. Nothing else is published with it.
    #[inline]
    pub(crate) fn get(&self) -> ByteLen {
        ByteLen(self.0.load(Ordering::Relaxed))
    }

    pub(crate) fn set(&self, size: ByteLen) {
        self.0.store(size.0, Ordering::Relaxed);
    }
}

/// Checks a new size for a disk of this geometry: a multiple of the block size above 0, and not for a read-only disk.
pub(crate) fn check_resize(geometry: &Geometry, size: ByteLen) -> Result<(), DiskError> {
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

/// Returns the geometry of a backend without a device below it.
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

/// Formats a switch as `on` or `off`, as settings do.
pub(crate) fn on_off(switch: bool) -> String {
    if switch { "on" } else { "off" }.to_owned()
}
