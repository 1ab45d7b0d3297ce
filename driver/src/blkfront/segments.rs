//! A request's data as segments: parts of granted pages, in the request itself or in pages of their own.

use std::sync::Arc;

use mqblk_core::{BlockSize, ByteLen, ByteOffset};
use mqblk_memory::{GrantRef, GuestAddress, GuestMemory, PAGE_BYTES, SharedArray};
use mqblk_ring::blkif::Segment;
use mqblk_ring::blkif::request::{MAX_INDIRECT_PAGES, MAX_SEGMENTS, SEGMENTS_PER_PAGE};

use crate::{DataSegment, SubmitError};

const PAGE: u64 = PAGE_BYTES as u64;

/// Most segments of a request.
pub(super) const MAX_REQUEST_SEGMENTS: u16 = (MAX_INDIRECT_PAGES * SEGMENTS_PER_PAGE) as u16;

/// Pages that requests with many segments have them in, so many for each id.
#[derive(Debug)]
pub(super) struct IndirectPages {
    /// Side by side for each id.
    pages: Vec<(SharedArray<u64>, GrantRef)>,
    per_id: usize,
}

impl IndirectPages {
    /// Pages that an id needs for requests of so many segments.
    pub(super) fn per_id(segments: u16) -> u32 {
        u32::from(segments).div_ceil(SEGMENTS_PER_PAGE as u32)
    }

    /// For ids with `per_id` pages each: of the pages of `memory`, which are granted as `refs`, as many ids as have all of theirs.
    pub(super) fn new(memory: &GuestMemory, refs: &[GrantRef], per_id: u32) -> IndirectPages {
        let slots = |page: usize| memory.shared_array(GuestAddress(page as u64 * PAGE), SEGMENTS_PER_PAGE);
        let pages = refs.iter().enumerate().map_while(|(page, gref)| Some((slots(page)?, *gref)));
        IndirectPages { pages: pages.collect(), per_id: per_id.max(1) as usize }
    }

    /// Ids that have pages.
    pub(super) fn ids(&self) -> u16 {
        (self.pages.len() / self.per_id).min(u16::MAX.into()) as u16
    }

    #[inline]
    fn set(&self, id: u16, index: u16, segment: Segment) {
        let page = usize::from(id) * self.per_id + usize::from(index) / SEGMENTS_PER_PAGE;
        self.pages[page].0.set(usize::from(index), u64::from_ne_bytes(segment.to_bytes()));
    }

    /// The pages of an id, of which a request with fewer segments does not need all.
    pub(super) fn grants(&self, id: u16) -> [GrantRef; MAX_INDIRECT_PAGES] {
        let mut grants = [GrantRef::default(); MAX_INDIRECT_PAGES];
        let own = self.pages[usize::from(id) * self.per_id..].iter().take(self.per_id);
        grants.iter_mut().zip(own).for_each(|(place, (_, gref))| *place = *gref);
        grants
    }
}

/// A request's segments. If they are more than a request holds, they are all in its id's pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestSegments {
    pub(super) count: u16,
    pub(super) first: [Segment; MAX_SEGMENTS],
}

/// What requests' segments are made of.
#[derive(Debug)]
pub(super) struct SegmentComposer {
    /// What each page of the data memory is granted as; the memory starts at address 0.
    refs: Arc<[GrantRef]>,
    indirect: Option<IndirectPages>,
    /// Most segments of a request.
    limit: u16,
}

impl SegmentComposer {
    /// Of the grants of the data memory. `most`: what the backend takes; only with `tables` more than fit in a request.
    pub(super) fn new(refs: Arc<[GrantRef]>, indirect: Option<IndirectPages>, most: u16) -> SegmentComposer {
        let held = if indirect.is_some() { MAX_REQUEST_SEGMENTS } else { MAX_SEGMENTS as u16 };
        SegmentComposer { refs, indirect, limit: most.min(held) }
    }

    /// Most segments of a request.
    pub(super) fn max_segments(&self) -> u16 {
        self.limit
    }

    pub(super) fn indirect_pages(&self) -> Option<&IndirectPages> {
        self.indirect.as_ref()
    }

    /// The segments of `pieces`, for request `id`.
    #[inline]
    pub(super) fn compose(
        &self,
        id: u16,
        pieces: impl IntoIterator<Item = DataSegment>,
    ) -> Result<RequestSegments, SubmitError> {
        let mut segments = RequestSegments { count: 0, first: [Segment::default(); MAX_SEGMENTS] };
        for piece in pieces {
            let (start, end) = self.check_bounds(piece)?;
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

    /// The segment of a piece that lies in one page; `None` for one that does not.
    #[inline]
    pub(super) fn single(&self, piece: DataSegment) -> Result<Option<Segment>, SubmitError> {
        let (start, end) = self.check_bounds(piece)?;
        let page = start / PAGE;
        if (end - 1) / PAGE != page {
            return Ok(None);
        }
        let sector = |byte: u64| ByteLen(byte - page * PAGE).sectors().0 as u8;
        let (first_sect, last_sect) = (sector(start), sector(end) - 1);
        Ok(Some(Segment { gref: self.refs[page as usize], first_sect, last_sect }))
    }

    /// The addresses of whole sectors that are granted.
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
            Some(place) => *place = segment,
            None => self.add_indirect(id, segments, segment),
        }
        segments.count += 1;
        Ok(())
    }

    /// One more than a request holds.
    fn add_indirect(&self, id: u16, segments: &RequestSegments, segment: Segment) {
        // Without tables `most` is what a request holds.
        let Some(tables) = &self.indirect else { return };
        if usize::from(segments.count) == MAX_SEGMENTS {
            (0..).zip(segments.first).for_each(|(index, segment)| tables.set(id, index, segment));
        }
        tables.set(id, segments.count, segment);
    }
}
