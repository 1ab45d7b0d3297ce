//! What the disks of this crate's tests look like.

use mqblk_core::{BlockSize, ByteLen, DiscardLimits, Geometry, Limits};

pub(crate) const GEOMETRY: Geometry = Geometry {
    size: ByteLen(1 << 30),
    logical_block: BlockSize::B512,
    physical_block: BlockSize::B512,
    alignment_offset: 0,
    min_io: ByteLen::ZERO,
    opt_io: ByteLen::ZERO,
    read_only: false,
};

/// Of a disk that requests cost something.
pub(crate) const LIMITS: Limits = Limits {
    max_transfer: ByteLen(1 << 20),
    max_segments: 8,
    discard: Some(DiscardLimits { granularity: ByteLen(512), max_len: ByteLen(1 << 20) }),
    write_zeroes: Some(ByteLen(1 << 20)),
    volatile_cache: true,
    cost_per_request: true,
    uses_fixed_buffers: false,
};
