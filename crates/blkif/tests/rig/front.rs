//! A frontend that puts arbitrary requests on its ring.

use std::collections::HashMap;
use std::sync::Arc;

use mqblk_core::Sector512;
use mqblk_memory::{GrantRef, GuestAddress, GuestMemory, Region};
use mqblk_ring::blkif::request::{MAX_INDIRECT_PAGES, MAX_SEGMENTS, SEGMENT_BYTES, SEGMENTS_PER_PAGE};
use mqblk_ring::blkif::{
    Abi, BackRing, BlkifRequest, BlkifRing, FrontRing, IndirectRequest, RawRequest, RequestBody, RingPosition,
    RwRequest, Segment, operation,
};

use super::PAGE;
use super::domain::Domain;

/// The frontend of one ring.
pub(crate) struct Front {
    pub ring: FrontRing,
    memory: Arc<GuestMemory>,
    pages: u32,
    abi: Abi,
    domain: Arc<Domain>,
}

/// A segment of whole sectors.
pub(crate) fn segment(gref: u32, first: u8, last: u8) -> Segment {
    Segment { gref: GrantRef(gref), first_sect: first, last_sect: last }
}

/// A request with its segments in the ring entry.
pub(crate) fn direct(id: u64, operation: u8, sector: u64, segments: &[Segment]) -> BlkifRequest {
    let mut all = [Segment::default(); MAX_SEGMENTS];
    let count = segments.len().min(MAX_SEGMENTS);
    all[..count].copy_from_slice(&segments[..count]);
    let transfer = RwRequest { nr_segments: segments.len() as u8, sector: Sector512(sector), segments: all };
    BlkifRequest { id, operation, handle: 7, body: RequestBody::Rw(transfer) }
}

pub(crate) fn discard(id: u64, flag: u8, sector: u64, sectors: u64) -> BlkifRequest {
    let what = RequestBody::Discard { flag, sector: Sector512(sector), sectors };
    BlkifRequest { id, operation: operation::DISCARD, handle: 0, body: what }
}

pub(crate) fn indirect(id: u64, inner: u8, sector: u64, count: u16, grefs: &[u32]) -> BlkifRequest {
    let mut pages = [GrantRef(0); MAX_INDIRECT_PAGES];
    for (page, gref) in pages.iter_mut().zip(grefs) {
        *page = GrantRef(*gref);
    }
    let indirect = IndirectRequest { operation: inner, nr_segments: count, sector: Sector512(sector), pages };
    BlkifRequest { id, operation: operation::INDIRECT, handle: 0, body: RequestBody::Indirect(indirect) }
}

impl Front {
    pub(crate) fn new(domain: &Arc<Domain>, abi: Abi, pages: u32) -> Front {
        let (region, _) = Region::shared("ring", u64::from(pages) * PAGE, GuestAddress(0)).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        let ring = BlkifRing::resolve(&memory, GuestAddress(0), pages, abi).unwrap();
        Front { ring: FrontRing::init(ring), memory, pages, abi, domain: Arc::clone(domain) }
    }

    /// Returns the backend's end of the ring.
    pub(crate) fn back_end(&self, position: RingPosition) -> BackRing {
        let ring = BlkifRing::resolve(&self.memory, GuestAddress(0), self.pages, self.abi).unwrap();
        BackRing::new(ring, position)
    }

    /// Returns the ring's memory.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; (u64::from(self.pages) * PAGE) as usize];
        self.memory.read(GuestAddress(0), &mut bytes).unwrap();
        bytes
    }

    /// Puts a request on the ring.
    pub(crate) fn put(&mut self, request: &BlkifRequest) {
        assert!(self.ring.put(&RawRequest::encode(self.abi, request)), "the ring is not full");
    }

    /// Puts a request on the ring and publishes it. Returns true if the backend has requested an event.
    pub(crate) fn send(&mut self, request: &BlkifRequest) -> bool {
        self.put(request);
        self.ring.publish()
    }

    /// Writes segments to indirect pages, given as grant and page, and sends an indirect request for them.
    pub(crate) fn send_indirect(
        &mut self,
        id: u64,
        inner: u8,
        sector: u64,
        segments: &[Segment],
        grefs: &[(u32, u32)],
    ) -> bool {
        self.write_segments(segments, grefs);
        let refs: Vec<u32> = grefs.iter().map(|(gref, _)| *gref).collect();
        self.send(&indirect(id, inner, sector, segments.len() as u16, &refs))
    }

    /// Writes segments to indirect pages, given as grant and page.
    pub(crate) fn write_segments(&self, segments: &[Segment], grefs: &[(u32, u32)]) {
        for (chunk, (_, page)) in segments.chunks(SEGMENTS_PER_PAGE).zip(grefs) {
            for (at, segment) in (0..).zip(chunk) {
                self.domain.write(*page, at * SEGMENT_BYTES as u64, &segment.to_bytes());
            }
        }
    }

    /// Takes all responses: id, operation and status.
    pub(crate) fn responses(&mut self) -> Vec<(u64, u8, i16)> {
        self.ring.poll_responses().expect("the backend follows the protocol");
        std::iter::from_fn(|| self.ring.take())
            .map(|response| (response.id, response.operation, response.status))
            .collect()
    }

    /// Takes all responses: status by id.
    pub(crate) fn statuses(&mut self) -> HashMap<u64, i16> {
        self.responses().into_iter().map(|(id, _, status)| (id, status)).collect()
    }
}
