//! Memory of the batch that is being pulled.

use std::io;

use mqblk_memory::{GrantCopy, PageArena, PageSlot};
use mqblk_ring::blkif::IndirectRequest;
use mqblk_ring::blkif::request::{SEGMENT_BYTES, SEGMENTS_PER_PAGE};

use crate::parse::indirect_pages;
use crate::ring_side::{BATCH, RingEntries};

/// An indirect request of the batch whose segments are being fetched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndirectFetch {
    pub(crate) index: u16,
    pub(crate) request: IndirectRequest,
    /// Bit `n`: indirect page `n` was read through its mapping.
    pub(crate) read_pages: u8,
}

/// Memory of one batch, reused for each.
pub(crate) struct Batch {
    pub(crate) entries: RingEntries,
    /// Table indices of writes whose data is not copied yet.
    pub(crate) pending_writes: Vec<u16>,
    pub(crate) indirect: Vec<IndirectFetch>,
    pub(crate) copies: Vec<GrantCopy>,
    /// Indirect pages are copied here: `scratch_stride` slots for each request of a batch.
    pub(crate) scratch: PageArena,
    scratch_stride: u32,
    /// Private copy of one indirect page.
    pub(crate) segment_bytes: Vec<u8>,
}

impl Batch {
    /// Creates the memory of a batch. `segments`: maximum of segments of an indirect request.
    pub(crate) fn new(segments: u16) -> io::Result<Batch> {
        let pages = indirect_pages(segments);
        let data = usize::from(segments).max(1);
        Ok(Batch {
            entries: RingEntries::new(),
            pending_writes: Vec::with_capacity(BATCH),
            indirect: Vec::with_capacity(BATCH),
            copies: Vec::with_capacity(BATCH * data),
            scratch: PageArena::reserve((BATCH * pages) as u32)?,
            scratch_stride: pages as u32,
            segment_bytes: vec![0; SEGMENTS_PER_PAGE * SEGMENT_BYTES],
        })
    }

    pub(crate) fn scratch_slot(&self, number: usize, page: usize) -> PageSlot {
        PageSlot(number as u32 * self.scratch_stride + page as u32)
    }
}
