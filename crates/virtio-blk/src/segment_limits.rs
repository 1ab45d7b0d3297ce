//! Limits of guest memory in a request's data. Source: virtio 1.3 section 5.2.4 (`seg_max`, `size_max`).

use mqblk_memory::{Buffer, BufferPool};

/// Most segments of one request: the host's limit of one vectored transfer (UIO_MAXIOV).
const MAX_SEGMENTS: u16 = 1024;

/// Limits of a request's data, from the SEG_MAX and SIZE_MAX that the driver has accepted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentLimits {
    /// Most parts of guest memory.
    pub(crate) parts: u16,
    /// Most bytes of one part.
    pub(crate) size: u32,
}

impl SegmentLimits {
    /// Parts above SEG_MAX: a descriptor that spans two regions of guest memory has two parts. A driver uses a piece of
    /// memory once in a request, so at most one descriptor spans each boundary between regions, and requests meet few
    /// boundaries.
    const SPANNING: u16 = 8;

    /// Returns the limits of a driver that has accepted these; `None`: not accepted.
    pub(crate) fn new(seg_max: Option<u16>, size_max: Option<u32>) -> SegmentLimits {
        let parts = seg_max.map_or(MAX_SEGMENTS, |most| most.saturating_add(Self::SPANNING).min(MAX_SEGMENTS));
        SegmentLimits { parts, size: size_max.unwrap_or(u32::MAX) }
    }

    pub(crate) fn allow_sizes(self, pool: &BufferPool, buffer: &Buffer) -> bool {
        pool.segments(buffer).iter().all(|part| part.len() <= self.size)
    }
}
