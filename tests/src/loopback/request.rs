//! Valid and invalid requests.

use mqblk_core::Sector512;
use mqblk_memory::GrantRef;
use mqblk_ring::blkif::request::{MAX_INDIRECT_PAGES, MAX_SEGMENTS};
use mqblk_ring::blkif::{BlkifRequest, IndirectRequest, RequestBody, RwRequest, Segment, operation};

/// Sectors of a page.
pub const PAGE_SECTORS: u64 = super::pages::PAGE as u64 / mqblk_core::units::SECTOR_BYTES;

/// Returns a segment of a page.
pub fn segment(gref: GrantRef, first_sect: u8, last_sect: u8) -> Segment {
    Segment { gref, first_sect, last_sect }
}

/// Returns a segment of a whole page.
pub fn whole_page(gref: GrantRef) -> Segment {
    segment(gref, 0, PAGE_SECTORS as u8 - 1)
}

/// Returns a read, write, barrier or flush that claims `nr_segments` segments.
pub fn transfer_claiming(operation: u8, sector: u64, segments: &[Segment], nr_segments: u8) -> BlkifRequest {
    let mut all = [Segment::default(); MAX_SEGMENTS];
    all[..segments.len()].copy_from_slice(segments);
    let what = RequestBody::Rw(RwRequest { nr_segments, sector: Sector512(sector), segments: all });
    BlkifRequest { id: 0, operation, handle: 0, body: what }
}

/// Returns a read, write, barrier or flush of these segments.
///
/// # Panics
/// When they do not fit.
pub fn transfer(operation: u8, sector: u64, segments: &[Segment]) -> BlkifRequest {
    transfer_claiming(operation, sector, segments, segments.len() as u8)
}

/// Returns an indirect request for `inner` that claims `nr_segments` segments in these pages.
pub fn indirect(inner: u8, sector: u64, tables: &[GrantRef], nr_segments: u16) -> BlkifRequest {
    let mut pages = [GrantRef(0); MAX_INDIRECT_PAGES];
    pages[..tables.len()].copy_from_slice(tables);
    let what =
        RequestBody::Indirect(IndirectRequest { operation: inner, nr_segments, sector: Sector512(sector), pages });
    BlkifRequest { id: 0, operation: operation::INDIRECT, handle: 0, body: what }
}

/// Returns a discard.
pub fn discard(sector: u64, sectors: u64, flag: u8) -> BlkifRequest {
    let what = RequestBody::Discard { flag, sector: Sector512(sector), sectors };
    BlkifRequest { id: 0, operation: operation::DISCARD, handle: 0, body: what }
}

/// Returns the operation of the request's response: for an indirect request the inner one.
pub fn response_operation(request: &BlkifRequest) -> u8 {
    match request.body {
        RequestBody::Indirect(indirect) => indirect.operation,
        _ => request.operation,
    }
}

/// Returns the content of a page of indirect segments.
pub fn segment_table(segments: &[Segment]) -> Vec<u8> {
    segments.iter().flat_map(|segment| segment.to_bytes()).collect()
}

/// Returns a segment as words of memory.
pub fn segment_words(segment: Segment) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = segment.to_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}
