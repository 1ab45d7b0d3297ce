//! A private copy of a ring entry, and its decoding by the frontend's ABI.

use mqblk_core::Sector512;
use mqblk_memory::GrantRef;

use super::abi::Abi;

/// Operations of requests. Source: `BLKIF_OP_*`.
pub mod operation {
    /// BLKIF_OP_READ.
    pub const READ: u8 = 0;
    /// BLKIF_OP_WRITE.
    pub const WRITE: u8 = 1;
    /// BLKIF_OP_WRITE_BARRIER.
    pub const WRITE_BARRIER: u8 = 2;
    /// BLKIF_OP_FLUSH_DISKCACHE.
    pub const FLUSH_DISKCACHE: u8 = 3;
    /// BLKIF_OP_DISCARD.
    pub const DISCARD: u8 = 5;
    /// BLKIF_OP_INDIRECT.
    pub const INDIRECT: u8 = 6;
}

/// Status of responses. Source: `BLKIF_RSP_*`.
pub mod status {
    /// BLKIF_RSP_OKAY.
    pub const OKAY: i16 = 0;
    /// BLKIF_RSP_ERROR.
    pub const ERROR: i16 = -1;
    /// BLKIF_RSP_EOPNOTSUPP.
    pub const NOT_SUPPORTED: i16 = -2;
}

/// Most inline segments of a request: BLKIF_MAX_SEGMENTS_PER_REQUEST.
pub const MAX_SEGMENTS: usize = 11;
/// Most pages of segments of an indirect request: BLKIF_MAX_INDIRECT_PAGES_PER_REQUEST.
pub const MAX_INDIRECT_PAGES: usize = 8;
/// Segments in one indirect page.
pub const SEGMENTS_PER_PAGE: usize = 512;
/// Bytes of a segment.
pub const SEGMENT_BYTES: usize = 8;
/// BLKIF_DISCARD_SECURE, a flag of a discard.
pub const DISCARD_SECURE: u8 = 1;

const BYTES: usize = 112;

/// A copy of a ring entry. Copied once; nothing else of the entry is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RawRequest([u8; BYTES]);

/// A segment of a request's data: whole sectors of a granted page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// The page.
    pub gref: GrantRef,
    /// First sector in it.
    pub first_sect: u8,
    /// Last sector in it; a page has 8.
    pub last_sect: u8,
}

impl Segment {
    /// Decodes a segment of an entry or an indirect page; the same in all ABIs.
    #[inline]
    pub fn from_bytes(bytes: [u8; SEGMENT_BYTES]) -> Segment {
        let gref = GrantRef(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        Segment { gref, first_sect: bytes[4], last_sect: bytes[5] }
    }

    /// Encodes the segment for an entry or an indirect page.
    #[inline]
    pub fn to_bytes(self) -> [u8; SEGMENT_BYTES] {
        let [a, b, c, d] = self.gref.0.to_le_bytes();
        [a, b, c, d, self.first_sect, self.last_sect, 0, 0]
    }
}

/// A request with inline segments (`struct blkif_request_rw`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RwRequest {
    /// As the frontend reports; may exceed the maximum.
    pub nr_segments: u8,
    /// Start on the disk.
    pub sector: Sector512,
    /// The segments; those after `nr_segments` are undefined.
    pub segments: [Segment; MAX_SEGMENTS],
}

/// A request whose segments are in granted pages (`struct blkif_request_indirect`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectRequest {
    /// The inner operation.
    pub operation: u8,
    /// As the frontend reports; may exceed the maximum.
    pub nr_segments: u16,
    /// Start on the disk.
    pub sector: Sector512,
    /// The pages; those beyond `nr_segments` are undefined.
    pub pages: [GrantRef; MAX_INDIRECT_PAGES],
}

/// The operation-specific part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestBody {
    /// READ, WRITE, WRITE_BARRIER or FLUSH_DISKCACHE.
    Rw(RwRequest),
    /// DISCARD.
    Discard {
        /// [`DISCARD_SECURE`].
        flag: u8,
        /// Start on the disk.
        sector: Sector512,
        /// Length.
        sectors: u64,
    },
    /// INDIRECT.
    Indirect(IndirectRequest),
    /// An unknown operation.
    Unknown,
}

/// A decoded request, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkifRequest {
    /// Id; copied into the response.
    pub id: u64,
    /// One of [`operation`], or an unknown value.
    pub operation: u8,
    /// A virtual device, for frontends with several; unused today.
    pub handle: u16,
    /// The operation-specific part.
    pub body: RequestBody,
}

/// Offsets of the fields of a request; 64-bit fields move by 4 where they are not aligned to 8.
struct FieldOffsets {
    id: usize,
    /// Of transfers, discards and indirect ones.
    sector: usize,
    segments: usize,
    discard_sectors: usize,
    indirect_handle: usize,
    indirect_pages: usize,
}

const WIDE: FieldOffsets =
    FieldOffsets { id: 8, sector: 16, segments: 24, discard_sectors: 24, indirect_handle: 24, indirect_pages: 28 };
const NARROW: FieldOffsets =
    FieldOffsets { id: 4, sector: 12, segments: 20, discard_sectors: 20, indirect_handle: 20, indirect_pages: 24 };

impl FieldOffsets {
    const fn of(abi: Abi) -> &'static FieldOffsets {
        if abi.aligns_u64_to_8() { &WIDE } else { &NARROW }
    }
}

impl RawRequest {
    /// Stores words at the start.
    #[inline]
    pub(super) fn put_words<const N: usize, const WORD: usize>(&mut self, words: [[u8; WORD]; N]) {
        for (place, word) in self.0.as_chunks_mut::<WORD>().0.iter_mut().zip(words) {
            *place = word;
        }
    }

    /// Stores word `at`.
    #[inline]
    pub(super) fn put_word<const WORD: usize>(&mut self, at: usize, word: [u8; WORD]) {
        self.0.as_chunks_mut::<WORD>().0[at] = word;
    }

    /// Returns the used bytes of the entry, according to its first bytes.
    #[inline]
    pub(super) fn length(&self, abi: Abi) -> usize {
        let at = FieldOffsets::of(abi);
        match self.0[0] {
            operation::READ..=operation::FLUSH_DISKCACHE => {
                at.segments + usize::from(self.nr_segments()).min(MAX_SEGMENTS) * SEGMENT_BYTES
            }
            operation::INDIRECT => at.indirect_pages + MAX_INDIRECT_PAGES * size_of::<u32>(),
            operation::DISCARD => at.discard_sectors + size_of::<u64>(),
            _ => at.id + size_of::<u64>(),
        }
    }

    /// Returns the operation: one of [`operation`], or an unknown value.
    #[inline]
    pub fn operation(&self) -> u8 {
        self.0[0]
    }

    /// Returns the id for the response.
    #[inline]
    pub fn id(&self, abi: Abi) -> u64 {
        self.u64_at(FieldOffsets::of(abi).id)
    }

    /// Returns the start of a read or write.
    #[inline]
    pub fn sector(&self, abi: Abi) -> Sector512 {
        Sector512(self.u64_at(FieldOffsets::of(abi).sector))
    }

    /// Returns the number of inline segments, as the frontend reports.
    #[inline]
    pub fn nr_segments(&self) -> u8 {
        self.0[1]
    }

    /// Returns the inline segments, at most [`MAX_SEGMENTS`].
    #[inline]
    pub fn segments(&self, abi: Abi) -> impl Iterator<Item = Segment> {
        let from = FieldOffsets::of(abi).segments;
        let all = &self.0[from..from + MAX_SEGMENTS * SEGMENT_BYTES];
        let count = usize::from(self.nr_segments());
        all.as_chunks::<SEGMENT_BYTES>().0.iter().take(count).map(|bytes| Segment::from_bytes(*bytes))
    }

    /// Returns the id, the start and the first segment of a read or write: all fields of one with a single segment.
    /// Each is loaded from words that the copy stored: words of other sizes would wait for those stores.
    #[inline(always)] // else they would travel through memory
    pub fn single(&self, abi: Abi) -> (u64, Sector512, Segment) {
        let halves = |at| u64::from(self.u32_at(at)) | u64::from(self.u32_at(at + 4)) << 32;
        let (id, sector, segment) = match abi.aligns_u64_to_8() {
            true => (self.u64_at(WIDE.id), self.u64_at(WIDE.sector), self.u64_at(WIDE.segments)),
            false => (halves(NARROW.id), halves(NARROW.sector), halves(NARROW.segments)),
        };
        (id, Sector512(sector), Segment::from_bytes(segment.to_le_bytes()))
    }

    #[inline]
    pub(super) fn to_wide(self) -> [u64; 14] {
        let mut words = [0; 14];
        for (word, place) in words.iter_mut().zip(self.0.chunks_exact(8)) {
            *word = u64::from_ne_bytes(place.try_into().expect("8 bytes"));
        }
        words
    }

    #[inline]
    pub(super) fn to_narrow(self) -> [u32; 27] {
        let mut words = [0; 27];
        for (word, place) in words.iter_mut().zip(self.0.chunks_exact(4)) {
            *word = u32::from_ne_bytes(place.try_into().expect("4 bytes"));
        }
        words
    }

    /// Returns the bytes, for storing them.
    #[inline]
    pub fn bytes(&self) -> &[u8; BYTES] {
        &self.0
    }

    /// Restores a request from stored bytes.
    #[inline]
    pub fn from_bytes(bytes: [u8; BYTES]) -> RawRequest {
        RawRequest(bytes)
    }

    #[inline]
    fn u16_at(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    #[inline]
    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().expect("4 bytes"))
    }

    #[inline]
    fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().expect("8 bytes"))
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Decodes the entry by the frontend's ABI.
    #[inline]
    pub fn decode(&self, abi: Abi) -> BlkifRequest {
        let at = FieldOffsets::of(abi);
        let (operation, id, sector) = (self.operation(), self.id(abi), self.sector(abi));
        let (handle, what) = match operation {
            operation::READ..=operation::FLUSH_DISKCACHE => {
                let mut segments = [Segment::default(); MAX_SEGMENTS];
                for (place, segment) in segments.iter_mut().zip(self.segments(abi)) {
                    *place = segment;
                }
                let nr_segments = self.nr_segments();
                (self.u16_at(2), RequestBody::Rw(RwRequest { nr_segments, sector, segments }))
            }
            operation::DISCARD => (
                self.u16_at(2),
                RequestBody::Discard { flag: self.0[1], sector, sectors: self.u64_at(at.discard_sectors) },
            ),
            operation::INDIRECT => {
                let pages = std::array::from_fn(|index| GrantRef(self.u32_at(at.indirect_pages + index * 4)));
                let indirect = IndirectRequest { operation: self.0[1], nr_segments: self.u16_at(2), sector, pages };
                (self.u16_at(at.indirect_handle), RequestBody::Indirect(indirect))
            }
            _ => (0, RequestBody::Unknown),
        };
        BlkifRequest { id, operation, handle, body: what }
    }

    /// Encodes a request by the frontend's ABI.
    pub fn encode(abi: Abi, request: &BlkifRequest) -> RawRequest {
        let at = FieldOffsets::of(abi);
        let mut raw = RawRequest([0; BYTES]);
        raw.0[0] = request.operation;
        raw.put(at.id, &request.id.to_le_bytes());
        let sector_at = |raw: &mut RawRequest, sector: Sector512| raw.put(at.sector, &sector.0.to_le_bytes());
        match &request.body {
            RequestBody::Rw(transfer) => {
                raw.0[1] = transfer.nr_segments;
                raw.put(2, &request.handle.to_le_bytes());
                sector_at(&mut raw, transfer.sector);
                for (index, segment) in transfer.segments.iter().enumerate().take(transfer.nr_segments.into()) {
                    raw.put(at.segments + index * SEGMENT_BYTES, &segment.to_bytes());
                }
            }
            RequestBody::Discard { flag, sector, sectors } => {
                raw.0[1] = *flag;
                raw.put(2, &request.handle.to_le_bytes());
                sector_at(&mut raw, *sector);
                raw.put(at.discard_sectors, &sectors.to_le_bytes());
            }
            RequestBody::Indirect(indirect) => {
                raw.0[1] = indirect.operation;
                raw.put(2, &indirect.nr_segments.to_le_bytes());
                sector_at(&mut raw, indirect.sector);
                raw.put(at.indirect_handle, &request.handle.to_le_bytes());
                for (index, page) in indirect.pages.iter().enumerate() {
                    raw.put(at.indirect_pages + index * 4, &page.0.to_le_bytes());
                }
            }
            RequestBody::Unknown => {}
        }
        raw
    }
}

impl Default for RawRequest {
    /// All zero.
    fn default() -> RawRequest {
        RawRequest([0; BYTES])
    }
}

impl std::fmt::Debug for RawRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry whose byte `n` is `n`.
    fn counted(operation: u8) -> RawRequest {
        let mut bytes: [u8; BYTES] = std::array::from_fn(|at| at as u8);
        bytes[0] = operation;
        RawRequest(bytes)
    }

    fn counted_u64(from: u8) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|at| from + at as u8))
    }

    /// The field offsets of Xen's `public/io/blkif.h`, as compilers lay them out.
    #[test]
    fn fields_are_where_compilers_put_them() {
        for (abi, id, sector, rest) in [(Abi::X86_64, 8, 16, 24), (Abi::Arm, 8, 16, 24), (Abi::X86_32, 4, 12, 20)] {
            let write = counted(operation::WRITE).decode(abi);
            assert_eq!((write.id, write.handle), (counted_u64(id), 0x0302), "{abi:?}");
            let RequestBody::Rw(transfer) = write.body else { panic!("a transfer") };
            assert_eq!((transfer.nr_segments, transfer.sector), (1, Sector512(counted_u64(sector))));
            assert_eq!((transfer.segments[0].first_sect, transfer.segments[0].last_sect), (rest + 4, rest + 5));
            assert_eq!(transfer.segments[0].gref.0 as u8, rest);
            let discard = counted(operation::DISCARD).decode(abi);
            let sector = Sector512(counted_u64(sector));
            assert_eq!(discard.body, RequestBody::Discard { flag: 1, sector, sectors: counted_u64(rest) });
            let indirect = counted(operation::INDIRECT).decode(abi);
            assert_eq!(indirect.handle, u16::from_le_bytes([rest, rest + 1]));
            let RequestBody::Indirect(indirect) = indirect.body else { panic!("indirect") };
            assert_eq!((indirect.operation, indirect.nr_segments, indirect.sector), (1, 0x0302, sector));
            assert_eq!(indirect.pages.map(|page| page.0 as u8), std::array::from_fn(|at| rest + 4 + 4 * at as u8));
            let other = counted(9).decode(abi);
            assert_eq!((other.id, other.body), (counted_u64(id), RequestBody::Unknown));
        }
    }

    #[test]
    fn a_single_segment_is_that_of_the_decoded_request() {
        for abi in Abi::ALL {
            let raw = counted(operation::WRITE);
            let BlkifRequest { id, body: RequestBody::Rw(transfer), .. } = raw.decode(abi) else {
                panic!("a transfer")
            };
            assert_eq!(raw.single(abi), (id, transfer.sector, transfer.segments[0]), "{abi:?}");
        }
    }

    #[test]
    fn encode_and_decode_are_inverse() {
        for abi in Abi::ALL {
            for op in [0, 1, 2, 3, 5, 6] {
                let mut raw = counted(op);
                raw.0[1] = 11;
                let request = raw.decode(abi);
                assert_eq!(RawRequest::encode(abi, &request).decode(abi), request);
            }
        }
    }

    #[test]
    fn bytes_behind_the_length_are_unused() {
        for abi in Abi::ALL {
            for op in 0..=9 {
                for count in [0, 1, 5, 11, 12, 255] {
                    let mut raw = counted(op);
                    raw.0[1] = count;
                    let mut other = raw;
                    let len = raw.length(abi);
                    other.0[len..].fill(0xff);
                    assert_eq!(raw.decode(abi), other.decode(abi), "{abi:?} {op} {count}");
                    other.0[len - 1] ^= 1;
                    // The padding at the end of a segment and the bytes beside the handle are unused.
                    assert!(
                        raw.decode(abi) != other.decode(abi) || (op < 4 && count > 0),
                        "{abi:?} {op} {count}: {len}"
                    );
                }
            }
        }
    }

    #[test]
    fn no_number_of_segments_reaches_past_the_entry() {
        for abi in Abi::ALL {
            for count in [0, 10, 11, 12, 255] {
                let mut raw = counted(operation::READ);
                raw.0[1] = count;
                let RequestBody::Rw(transfer) = raw.decode(abi).body else { panic!("a transfer") };
                let known = transfer.segments.iter().filter(|segment| segment.last_sect != 0).count();
                assert_eq!(known, usize::from(count).min(MAX_SEGMENTS));
            }
        }
    }
}
