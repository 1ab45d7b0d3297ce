//! Disks for this crate's tests.

use mqblk_core::{BlockSize, ByteLen, DiscardLimits, Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_uring::UringContext;

pub(crate) const GEOMETRY: Geometry = Geometry {
    size: ByteLen(1 << 30),
    logical_block: BlockSize::B512,
    physical_block: BlockSize::B512,
    alignment_offset: 0,
    min_io: ByteLen::ZERO,
    opt_io: ByteLen::ZERO,
    read_only: false,
};

/// Limits of a disk with a cost per request.
pub(crate) const LIMITS: Limits = Limits {
    max_transfer: ByteLen(1 << 20),
    max_segments: 8,
    discard: Some(DiscardLimits { granularity: ByteLen(512), max_len: ByteLen(1 << 20) }),
    write_zeroes: Some(ByteLen(1 << 20)),
    volatile_cache: true,
    cost_per_request: true,
    pins_memory: false,
};

/// A disk whose requests are not merged, with channels that the function opens.
pub(crate) struct TrialDisk<F>(pub(crate) F);

impl<F> Disk<UringContext> for TrialDisk<F>
where
    F: Fn() -> Box<dyn DiskChannel<UringContext>> + Send + Sync,
{
    fn geometry(&self) -> Geometry {
        GEOMETRY
    }

    fn limits(&self) -> Limits {
        Limits { cost_per_request: false, ..LIMITS }
    }

    fn resize(&self, _: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        Ok(GEOMETRY.size)
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![]
    }

    fn open_channel(&self, _: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        Ok(self.0())
    }
}
