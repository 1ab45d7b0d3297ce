//! Ring entries of Xen's block protocol in its three layouts. The oracle has its own copy of the fields' offsets in
//! Xen's `public/io/blkif.h`. An entry stored by a guest of that layout is decoded to its meaning, and encoded to the
//! same bytes.

use arbitrary::{Result, Unstructured};
use mqblk_core::Sector512;
use mqblk_memory::GrantRef;
use mqblk_ring::blkif::request::{MAX_INDIRECT_PAGES, MAX_SEGMENTS};
use mqblk_ring::blkif::{Abi, BlkifRequest, IndirectRequest, RawRequest, RequestBody, RwRequest, Segment};

fn put(bytes: &mut [u8; 112], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn segment(u: &mut Unstructured<'_>) -> Result<Segment> {
    Ok(Segment { gref: GrantRef(u.arbitrary()?), first_sect: u.arbitrary()?, last_sect: u.arbitrary()? })
}

/// Returns a request and its bytes in this layout. Bytes outside of fields are `padding`.
fn entry(u: &mut Unstructured<'_>, abi: Abi, padding: u8) -> Result<(BlkifRequest, [u8; 112])> {
    // 64-bit fields are aligned to 4 in the layout of 32-bit x86, else to 8.
    let (id_at, sector_at, rest_at) = if matches!(abi, Abi::X86_32) { (4, 12, 20) } else { (8, 16, 24) };
    let (id, sector, handle): (u64, u64, u16) = (u.arbitrary()?, u.arbitrary()?, u.arbitrary()?);
    let operation = *u.choose(&[0, 1, 2, 3, 5, 6, 4, 7, 200])?;
    let mut bytes = [padding; 112];
    bytes[0] = operation;
    put(&mut bytes, id_at, &id.to_le_bytes());
    if !matches!(operation, 0..=3 | 5 | 6) {
        return Ok((BlkifRequest { id, operation, handle: 0, body: RequestBody::Unknown }, bytes));
    }
    put(&mut bytes, sector_at, &sector.to_le_bytes());
    let sector = Sector512(sector);
    let second: u8 = u.arbitrary()?;
    let body = match operation {
        5 => {
            let sectors: u64 = u.arbitrary()?;
            put(&mut bytes, 2, &handle.to_le_bytes());
            put(&mut bytes, rest_at, &sectors.to_le_bytes());
            bytes[1] = second;
            RequestBody::Discard { flag: second, sector, sectors }
        }
        6 => {
            let nr_segments: u16 = u.arbitrary()?;
            let mut pages = [GrantRef(0); MAX_INDIRECT_PAGES];
            bytes[1] = second;
            put(&mut bytes, 2, &nr_segments.to_le_bytes());
            put(&mut bytes, rest_at, &handle.to_le_bytes());
            for (at, page) in pages.iter_mut().enumerate() {
                *page = GrantRef(u.arbitrary()?);
                put(&mut bytes, rest_at + 4 + at * 4, &page.0.to_le_bytes());
            }
            RequestBody::Indirect(IndirectRequest { operation: second, nr_segments, sector, pages })
        }
        _ => {
            let nr_segments = if u.ratio(1, 8)? { second } else { second % 12 };
            let mut segments = [Segment::default(); MAX_SEGMENTS];
            bytes[1] = nr_segments;
            put(&mut bytes, 2, &handle.to_le_bytes());
            for (at, place) in segments.iter_mut().enumerate().take(nr_segments.into()) {
                *place = segment(u)?;
                let from = rest_at + at * 8;
                put(&mut bytes, from, &place.gref.0.to_le_bytes());
                put(&mut bytes, from + 4, &[place.first_sect, place.last_sect]);
            }
            RequestBody::Rw(RwRequest { nr_segments, sector, segments })
        }
    };
    Ok((BlkifRequest { id, operation, handle, body }, bytes))
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    loop {
        for abi in Abi::ALL {
            let padding = u.arbitrary()?;
            let (request, bytes) = entry(u, abi, padding)?;
            let found = RawRequest::from_bytes(bytes).decode(abi);
            assert_eq!(found, request, "decoded by {abi:?}");
            let encoded = RawRequest::encode(abi, &request);
            assert_eq!(encoded.decode(abi), request, "encoded and decoded by {abi:?}");
            if padding == 0 {
                assert_eq!(encoded.bytes(), &bytes, "encoded by {abi:?}");
            }
        }
        if u.is_empty() {
            return Ok(());
        }
    }
}

/// Runs the target.
///
/// # Panics
/// When an entry is not decoded or encoded by its layout.
pub fn target(data: &[u8]) {
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
