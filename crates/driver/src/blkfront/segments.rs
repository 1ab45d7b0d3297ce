//! Composes a request's blkif segments: parts of granted pages, in the request itself or in indirect pages.

use std::sync::Arc;

use mqblk_core::{BlockSize, ByteLen, ByteOffset};
use mqblk_memory::{GrantRef, GuestAddress, GuestMemory, PAGE_BYTES, SharedArray};
use mqblk_ring::blkif::Segment;
use mqblk_ring::blkif::request::{MAX_INDIRECT_PAGES, MAX_SEGMENTS, SEGMENTS_PER_PAGE};

use crate::{DataSegment, SubmitError};

const PAGE: u64 = PAGE_BYTES as u64;

/// Largest number of segments of a request.
pub(super) const MAX_REQUEST_SEGMENTS: u16 = (MAX_INDIRECT_PAGES * SEGMENTS_PER_PAGE) as u16;

/// The pages of indirect segments, `per_id` for each request id.
#[derive(Debug)]
pub(super) struct IndirectPages {
    /// Those of an id are adjacent.
    pages: Vec<(SharedArray<u64>, GrantRef)>,
    per_id: usize,
}

impl IndirectPages {
    /// Returns the number of pages that an id needs for `segments` segments.
    pub(super) fn per_id(segments: u16) -> u32 {
        u32::from(segments).div_ceil(SEGMENTS_PER_PAGE as u32)
    }

    /// Divides the pages of `memory`, which are granted as `refs`, among ids: `per_id` for each.
    pub(super) fn new(memory: &GuestMemory, refs: &[GrantRef], per_id: u32) -> IndirectPages {
        let slots = |page: usize| memory.shared_array(GuestAddress(page as u64 * PAGE), SEGMENTS_PER_PAGE);
        let pages = refs.iter().enumerate().map_while(|(page, gref)| Some((slots(page)?, *gref)));
        IndirectPages { pages: pages.collect(), per_id: per_id.max(1) as usize }
    }

    /// Returns the number of ids that have pages.
    pub(super) fn ids(&self) -> u16 {
        (self.pages.len() / self.per_id).min(u16::MAX.into()) as u16
    }

    #[inline]
    fn set(&self, id: u16, index: u16, segment: Segment) {
        let page = usize::from(id) * self.per_id + usize::from(index) / SEGMENTS_PER_PAGE;
        self.pages[page].0.set(usize::from(index), u64::from_ne_bytes(segment.to_bytes()));
    }

    /// Returns the pages of an id. A request with fewer segments does not use all of them.
    pub(super) fn grants(&self, id: u16) -> [GrantRef; MAX_INDIRECT_PAGES] {
        let mut grants = [GrantRef::default(); MAX_INDIRECT_PAGES];
        let own = self.pages[usize::from(id) * self.per_id..].iter().take(self.per_id);
        grants.iter_mut().zip(own).for_each(|(slot, (_, gref))| *slot = *gref);
        grants
    }
}

/// A request's segments. If they do not fit in the request, all of them are in the indirect pages of its id.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestSegments {
    pub(super) count: u16,
    pub(super) first: [Segment; MAX_SEGMENTS],
}

/// Composes the segments of requests.
#[derive(Debug)]
pub(super) struct SegmentComposer {
    /// The grant of each page of the data memory, which starts at address 0.
    refs: Arc<[GrantRef]>,
    indirect: Option<IndirectPages>,
    /// Largest number of segments of a request.
    limit: u16,
}

impl SegmentComposer {
    /// `refs`: grants of the data memory. `max_segments`: the backend's limit; without `indirect` at most what fits in
    /// a request.
    pub(super) fn new(refs: Arc<[GrantRef]>, indirect: Option<IndirectPages>, max_segments: u16) -> SegmentComposer {
        let capacity = if indirect.is_some() { MAX_REQUEST_SEGMENTS } else { MAX_SEGMENTS as u16 };
        SegmentComposer { refs, indirect, limit: max_segments.min(capacity) }
    }

    /// Largest number of segments of a request.
    pub(super) fn max_segments(&self) -> u16 {
        self.limit
    }

    pub(super) fn indirect_pages(&self) -> Option<&IndirectPages> {
        self.indirect.as_ref()
    }

    /// Returns the segments of `data`, for request `id`.
    #[inline]
    pub(super) fn compose(
        &self,
        id: u16,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<RequestSegments, SubmitError> {
        let mut segments = RequestSegments { count: 0, first: [Segment::default(); MAX_SEGMENTS] };
        for part in data {
            let (start, end) = self.check_bounds(part)?;
            let mut at = start;
            while at < end {
                let page = at / PAGE;
                let stop = end.min((page + 1) * PAGE);
                let gref = self.refs[page as usize];
                let sector = |byte: u64| ByteLen(byte - page * PAGE).sectors().0 as u8;
                self.add(id, &mut segments, Segment { gref, first_sect: sector(at), last_sect: sector(stop) - 1 })?;
                at = stop;
            }
        }
        Ok(segments)
    }

    /// Returns the blkif segment of a data segment in one page. `None` if it crosses a page boundary.
    #[inline]
    pub(super) fn single(&self, data: DataSegment) -> Result<Option<Segment>, SubmitError> {
        let (start, end) = self.check_bounds(data)?;
        let page = start / PAGE;
        if (end - 1) / PAGE != page {
            return Ok(None);
        }
        let sector = |byte: u64| ByteLen(byte - page * PAGE).sectors().0 as u8;
        let (first_sect, last_sect) = (sector(start), sector(end) - 1);
        Ok(Some(Segment { gref: self.refs[page as usize], first_sect, last_sect }))
    }

    /// Returns the start and end address. The data must consist of whole sectors in granted memory.
    #[inline]
    fn check_bounds(&self, DataSegment { address, len }: DataSegment) -> Result<(u64, u64), SubmitError> {
        let end = address.0.checked_add(len.into()).filter(|end| *end <= self.refs.len() as u64 * PAGE);
        let aligned = ByteOffset(address.0 | u64::from(len)).is_aligned(BlockSize::B512);
        match end {
            _ if len == 0 => Err(SubmitError::Empty),
            Some(end) if aligned => Ok((address.0, end)),
            _ => Err(SubmitError::NotGranted { address: address.0, len }),
        }
    }

    #[inline]
    fn add(&self, id: u16, segments: &mut RequestSegments, segment: Segment) -> Result<(), SubmitError> {
        let index = segments.count;
        if index >= self.limit {
            return Err(SubmitError::TooManySegments(self.limit));
        }
        match segments.first.get_mut(usize::from(index)) {
            Some(slot) => *slot = segment,
            None => self.add_indirect(id, segments, segment),
        }
        segments.count += 1;
        Ok(())
    }

    /// Adds a segment to the indirect pages.
    fn add_indirect(&self, id: u16, segments: &RequestSegments, segment: Segment) {
        // Without indirect pages the limit is what fits in a request.
        let Some(indirect) = &self.indirect else { return };
        if usize::from(segments.count) == MAX_SEGMENTS {
            (0..).zip(segments.first).for_each(|(index, segment)| indirect.set(id, index, segment));
        }
        indirect.set(id, segments.count, segment);
    }
}
