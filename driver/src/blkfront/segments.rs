//! A request's data as segments: parts of granted pages, in the request itself or in pages of their own.

use std::sync::Arc;

use mqblk_core::{BlockSize, ByteLen, ByteOffset};
use mqblk_memory::{GrantRef, GuestAddress, GuestMemory, PAGE_BYTES, SharedArray};
use mqblk_ring::blkif::Segment;
use mqblk_ring::blkif::request::{MAX_INDIRECT_PAGES, MAX_SEGMENTS, SEGMENTS_PER_PAGE};

use crate::{Piece, Refused};

const PAGE: u64 = PAGE_BYTES as u64;

/// Most segments of a request.
pub(super) const MOST: u16 = (MAX_INDIRECT_PAGES * SEGMENTS_PER_PAGE) as u16;

/// Pages that requests with many segments have them in, so many for each id.
#[derive(Debug)]
pub(super) struct Tables {
    /// Side by side for each id.
    pages: Vec<(SharedArray<u64>, GrantRef)>,
    per_id: usize,
}

impl Tables {
    /// Pages that an id needs for requests of so many segments.
    pub(super) fn per_id(segments: u16) -> u32 {
        u32::from(segments).div_ceil(SEGMENTS_PER_PAGE as u32)
    }

    /// For ids with `per_id` pages each: of the pages of `memory`, which are granted as `refs`, as many ids as have all of theirs.
    pub(super) fn new(memory: &GuestMemory, refs: &[GrantRef], per_id: u32) -> Tables {
        let slots = |page: usize| memory.shared_array(GuestAddress(page as u64 * PAGE), SEGMENTS_PER_PAGE);
        let pages = refs.iter().enumerate().map_while(|(page, gref)| Some((slots(page)?, *gref)));
        Tables { pages: pages.collect(), per_id: per_id.max(1) as usize }
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
pub(super) struct Segments {
    pub(super) count: u16,
    pub(super) first: [Segment; MAX_SEGMENTS],
}

/// What requests' segments are made of.
#[derive(Debug)]
pub(super) struct Composer {
    /// What each page of the data memory is granted as; the memory starts at address 0.
    refs: Arc<[GrantRef]>,
    tables: Option<Tables>,
    /// Most segments of a request.
    most: u16,
}

impl Composer {
    /// Of the grants of the data memory. `most`: what the back-end takes; only with `tables` more than fit in a request.
    pub(super) fn new(refs: Arc<[GrantRef]>, tables: Option<Tables>, most: u16) -> Composer {
        let held = if tables.is_some() { MOST } else { MAX_SEGMENTS as u16 };
        Composer { refs, tables, most: most.min(held) }
    }

    /// Most segments of a request.
    pub(super) fn most(&self) -> u16 {
        self.most
    }

    pub(super) fn tables(&self) -> Option<&Tables> {
        self.tables.as_ref()
    }

    /// The segments of `pieces`, for request `id`.
    #[inline]
    pub(super) fn compose(&self, id: u16, pieces: impl IntoIterator<Item = Piece>) -> Result<Segments, Refused> {
        let mut segments = Segments { count: 0, first: [Segment::default(); MAX_SEGMENTS] };
        for piece in pieces {
            let (start, end) = self.bounds(piece)?;
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
    pub(super) fn one(&self, piece: Piece) -> Result<Option<Segment>, Refused> {
        let (start, end) = self.bounds(piece)?;
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
    fn bounds(&self, Piece { address, len }: Piece) -> Result<(u64, u64), Refused> {
        let end = address.0.checked_add(len.into()).filter(|end| *end <= self.refs.len() as u64 * PAGE);
        let aligned = ByteOffset(address.0 | u64::from(len)).is_aligned(BlockSize::B512);
        match end {
            _ if len == 0 => Err(Refused::Empty),
            Some(end) if aligned => Ok((address.0, end)),
            _ => Err(Refused::NotGranted { address: address.0, len }),
        }
    }

    #[inline]
    fn add(&self, id: u16, segments: &mut Segments, segment: Segment) -> Result<(), Refused> {
        let index = segments.count;
        if index >= self.most {
            return Err(Refused::TooManyPieces(self.most));
        }
        match segments.first.get_mut(usize::from(index)) {
            Some(place) => *place = segment,
            None => self.spill(id, segments, segment),
        }
        segments.count += 1;
        Ok(())
    }

    /// One more than a request holds.
    fn spill(&self, id: u16, segments: &Segments, segment: Segment) {
        // Without tables `most` is what a request holds.
        let Some(tables) = &self.tables else { return };
        if usize::from(segments.count) == MAX_SEGMENTS {
            (0..).zip(segments.first).for_each(|(index, segment)| tables.set(id, index, segment));
        }
        tables.set(id, segments.count, segment);
    }
}
