//! Pulls a batch of requests from the ring, in passes.
//!
//! All ring entries of the batch are prefetched, copied and recorded in the journal. Each request is validated and gets
//! pages for its data; requests that need no copy are admitted at once. One call fetches the indirect pages of all
//! indirect requests, another copies the data of all writes; then the remaining requests are admitted.

use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Intake, Op};
use mqblk_memory::{Buffer, BufferPool, CopyDirection, GrantCopy, GrantStatus, GuestAddress, PooledContext};
use mqblk_ring::blkif::request::{SEGMENT_BYTES, SEGMENTS_PER_PAGE};
use mqblk_ring::blkif::{BlkifRingError, RequestBody, Segment, status};

use crate::batch::IndirectFetch;
use crate::options::MAX_INDIRECT_SEGMENTS;
use crate::page_backing::{PageBacking, RequestPage};
use crate::parse::{ParsedRequest, TransferType, WRONG_RANGE, indirect_pages, response_operation};
use crate::queue::{BlkifQueue, BlkifToken};
use crate::request_table::{InflightRequest, RequestStep};
use crate::ring_side::BATCH;

/// Returns the range of segments that indirect page `page` holds, of a request of `segments` segments.
#[inline]
fn segment_range(page: usize, segments: u16) -> std::ops::Range<usize> {
    let first = page * SEGMENTS_PER_PAGE;
    first..usize::from(segments).min(first + SEGMENTS_PER_PAGE)
}

/// Parses segments from a private copy.
#[inline]
fn parse_segments(bytes: &[u8], pages: &mut [RequestPage]) {
    for (bytes, page) in bytes.as_chunks::<SEGMENT_BYTES>().0.iter().zip(pages) {
        *page = RequestPage::from_segment(Segment::from_bytes(*bytes));
    }
}

/// Reason why a request is malformed.
const UNGRANTED: &str = "a page that is not granted, or not for this access";

impl<L: PooledContext> BlkifQueue<L> {
    /// Takes one batch of at most `most` requests. Returns the number of taken requests, and true if more may be taken.
    #[inline]
    pub(crate) fn pull_batch<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        into: &mut I,
        most: usize,
    ) -> Result<(usize, bool), BlkifRingError> {
        let limit = into.room().min(self.requests.free_entries()).min(BATCH).min(most);
        let (count, more) = self.ring.fetch(&mut self.batch.entries, limit)?;
        if count == 0 {
            return Ok((0, more));
        }
        self.pages.begin_batch();
        let size = self.disk_size();
        let finds_mapped = self.pages.finds_mapped();
        for number in 0..count {
            match self.direct_transfer(number) {
                Some(kind) if finds_mapped && self.start_single(pool, number, kind, size, into) => {}
                Some(kind) => self.start_direct(pool, number, kind, size, into),
                None => self.start_other(number, size, into),
            }
        }
        if !self.batch.indirect.is_empty() {
            self.fetch_segments(pool, size, into);
        }
        if !self.batch.pending_writes.is_empty() {
            self.copy_pending_writes(pool, into);
        }
        Ok((count, more && self.barrier.waiting() == 0))
    }

    /// Returns the type of request `number` of the batch, if it is a transfer with its segments in the ring entry.
    #[inline(always)] // as its caller
    pub(crate) fn direct_transfer(&self, number: usize) -> Option<TransferType> {
        let raw = &self.batch.entries.raws[number];
        self.parser.direct_transfer(raw.operation(), raw.nr_segments())
    }

    /// Starts a request with its segments in the ring entry.
    #[inline(never)] // 11 instructions of a request that is started in one step
    fn start_direct<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        number: usize,
        kind: TransferType,
        size: ByteLen,
        into: &mut I,
    ) {
        let (raw, abi) = (&self.batch.entries.raws[number], self.ring.ring().abi());
        let (operation, segments) = (raw.operation(), raw.nr_segments().into());
        let entry = InflightRequest {
            id: raw.id(abi),
            operation,
            segment_count: segments,
            journal_slot: self.batch.entries.journal_slots[number],
            ..new_entry(kind)
        };
        let at = self.requests.insert(entry);
        let (entry, pages) = self.requests.with_pages(at);
        for (page, segment) in pages.iter_mut().zip(raw.segments(abi)) {
            *page = RequestPage::from_segment(segment);
        }
        match self.parser.transfer_range(raw.sector(abi), pages, size) {
            Some(extent) => {
                (entry.start, entry.len) = extent;
                self.prepare_data(pool, at, into);
            }
            None => self.complete_malformed(at, WRONG_RANGE, into),
        }
    }

    /// Starts any other request: completes it, admits it, or queues the fetch of its segments.
    #[inline(never)]
    fn start_other<I: Intake<BlkifToken, Buffer>>(&mut self, number: usize, size: ByteLen, into: &mut I) {
        let journal = self.batch.entries.journal_slots[number];
        let request = self.batch.entries.raws[number].decode(self.ring.ring().abi());
        let operation = response_operation(&request);
        let entry = InflightRequest { id: request.id, operation, journal_slot: journal, ..InflightRequest::NEW };
        match (self.parser.parse(&request, size), &request.body) {
            (ParsedRequest::Indirect(kind), RequestBody::Indirect(indirect)) => {
                self.counters.indirect_requests += 1;
                let InflightRequest { step, barrier, .. } = new_entry(kind);
                let at = self.requests.insert(InflightRequest {
                    segment_count: indirect.nr_segments,
                    step,
                    barrier,
                    ..entry
                });
                self.batch.indirect.push(IndirectFetch { index: at, request: *indirect, read_pages: 0 });
            }
            (ParsedRequest::Flush, _) => {
                let at = self.requests.insert(entry);
                into.admit(BlkifToken(at), DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
            }
            (ParsedRequest::EmptyBarrier, _) => {
                let at = self.requests.insert(InflightRequest { barrier: true, ..entry });
                self.barrier.begin(at);
            }
            (ParsedRequest::Discard { secure, start, len }, _) => {
                let at = self.requests.insert(InflightRequest {
                    start,
                    len,
                    step: RequestStep::Discard { secure },
                    ..entry
                });
                self.submit_discard(at, into);
            }
            (ParsedRequest::Nothing, _) => {
                self.ring.put_response(request.id, operation, status::OKAY, journal);
                into.completed_locally();
            }
            (ParsedRequest::Refused(status, why), _) => {
                self.ring.put_response(request.id, operation, status, journal);
                into.malformed(why);
            }
            // Not reached: the parser returns `Indirect` only for an indirect request, and direct ones take the other
            // path.
            (ParsedRequest::Direct(_) | ParsedRequest::Indirect(_), _) => {
                self.ring.put_response(request.id, operation, status::ERROR, journal);
                into.malformed("an entry of two types");
            }
        }
    }

    /// Completes a malformed request, whose status is set already.
    fn complete_malformed<I: Intake<BlkifToken, Buffer>>(&mut self, at: u16, why: &'static str, into: &mut I) {
        self.complete_request(at);
        into.malformed(why);
    }

    /// Fetches the segments of indirect requests, each byte once: through mapped pages, and all others in one copy
    /// call.
    #[inline(never)]
    fn fetch_segments<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, size: ByteLen, into: &mut I) {
        let mut indirect = std::mem::take(&mut self.batch.indirect);
        self.batch.copies.clear();
        for (number, fetched) in indirect.iter_mut().enumerate() {
            let segments = self.requests.get_mut(fetched.index).segment_count;
            for page in 0..indirect_pages(segments) {
                let range = segment_range(page, segments);
                let bytes = &mut self.batch.segment_bytes[..range.len() * SEGMENT_BYTES];
                let gref = fetched.request.pages[page];
                if self.pages.read_persistent(gref, bytes) {
                    parse_segments(bytes, &mut self.requests.with_pages(fetched.index).1[range]);
                    fetched.read_pages |= 1 << page;
                    continue;
                }
                let len = bytes.len() as u16;
                self.batch.copies.push(GrantCopy {
                    gref,
                    offset: 0,
                    len,
                    slot: self.batch.scratch_slot(number, page),
                    slot_offset: 0,
                    direction: CopyDirection::FromGrant,
                    status: GrantStatus::GENERAL_ERROR,
                });
            }
        }
        self.pages.copy(&self.batch.scratch, &mut self.batch.copies);
        let mut copied = 0;
        for (number, fetched) in indirect.iter().enumerate() {
            if self.validate_segments(number, fetched, size, &mut copied) {
                self.prepare_data(pool, fetched.index, into);
            } else {
                self.complete_malformed(
                    fetched.index,
                    "indirect segments that are no parts of whole blocks of granted pages",
                    into,
                );
            }
        }
        indirect.clear();
        self.batch.indirect = indirect;
    }

    /// Returns true if the segments of an indirect request were fetched and are valid.
    fn validate_segments(&mut self, number: usize, fetched: &IndirectFetch, size: ByteLen, copied: &mut usize) -> bool {
        let (entry, pages) = self.requests.with_pages(fetched.index);
        let mut good = true;
        for page in 0..indirect_pages(entry.segment_count) {
            if fetched.read_pages & 1 << page != 0 {
                continue;
            }
            let copy = &self.batch.copies[*copied];
            *copied += 1;
            let range = segment_range(page, entry.segment_count);
            let slot = self.batch.scratch_slot(number, page);
            let bytes = &mut self.batch.segment_bytes[..range.len() * SEGMENT_BYTES];
            good &=
                copy.status == GrantStatus::OKAY && self.batch.scratch.memory().read(slot.address(0), bytes).is_some();
            parse_segments(bytes, &mut pages[range]);
        }
        match self.parser.transfer_range(fetched.request.sector, pages, size) {
            Some(extent) if good => {
                (entry.start, entry.len) = extent;
                true
            }
            _ => false,
        }
    }

    /// Gets pages for a request's data, and admits it unless its data is still to be copied.
    #[inline(always)] // as admit
    fn prepare_data<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, at: u16, into: &mut I) {
        let (entry, pages) = self.requests.with_pages(at);
        let fill = entry.step == RequestStep::Read;
        match self.pages.prepare(pages, fill) {
            Some(backing) => {
                entry.backing = backing;
                if !fill && matches!(backing, PageBacking::Copy(_)) {
                    self.batch.pending_writes.push(at);
                } else if entry.barrier {
                    self.barrier.begin(at);
                } else {
                    self.admit(pool, at, into);
                }
            }
            None => self.complete_malformed(at, UNGRANTED, into),
        }
    }

    /// Copies the data of writes in one call, and admits them, except those whose copy failed.
    #[inline(never)]
    fn copy_pending_writes<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) {
        self.batch.copies.clear();
        for at in &self.batch.pending_writes {
            let (_, pages) = self.requests.with_pages(*at);
            self.batch.copies.extend(pages.iter().map(|page| page.grant_copy(CopyDirection::FromGrant)));
        }
        self.pages.copy_data(&mut self.batch.copies);
        let mut copied = 0;
        for number in 0..self.batch.pending_writes.len() {
            let at = self.batch.pending_writes[number];
            let entry = self.requests.get_mut(at);
            let copies = &self.batch.copies[copied..copied + usize::from(entry.segment_count)];
            copied += copies.len();
            if copies.iter().any(|copy| copy.status != GrantStatus::OKAY) {
                self.complete_malformed(at, UNGRANTED, into);
            } else if entry.barrier {
                self.barrier.begin(at);
            } else {
                self.admit(pool, at, into);
            }
        }
        self.batch.pending_writes.clear();
    }

    /// Admits a request whose pages are prepared.
    #[inline(always)] // 60 instructions of a copied or mapped request, with prepare_data
    pub(crate) fn admit<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, at: u16, into: &mut I) {
        let fua = self.parser.write_through();
        let (entry, pages) = self.requests.with_pages(at);
        let op = match entry.step {
            RequestStep::Read => Op::Read,
            RequestStep::Write => Op::Write { fua },
            RequestStep::WriteFlush => Op::Write { fua: false },
            RequestStep::Discard { .. } => return self.submit_discard(at, into),
            RequestStep::Flush => {
                return into.admit(BlkifToken(at), DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
            }
        };
        let buffer = pool.take(self.share.lease());
        let mut good = true;
        let mut push = |from: GuestAddress, len: u32| {
            good &= pool.push(&buffer, from, len, MAX_INDIRECT_SEGMENTS).is_ok();
        };
        // Adjacent pages merge into one segment.
        let (mut from, mut len) = (pages[0].address(), pages[0].len());
        for page in &pages[1..] {
            let address = page.address();
            if address.0 == from.0 + u64::from(len) {
                len += page.len();
            } else {
                push(from, len);
                (from, len) = (address, page.len());
            }
        }
        push(from, len);
        debug_assert!(good, "slots lie in the arena, and there are no more buffer segments than pages");
        into.admit(BlkifToken(at), DiskSlot::FIRST, op, entry.start, entry.len, Some(buffer));
    }
}

/// Returns the table entry of a request with data.
#[inline]
fn new_entry(kind: TransferType) -> InflightRequest {
    let step = match kind {
        TransferType::Read => RequestStep::Read,
        TransferType::Write => RequestStep::Write,
        TransferType::WriteFlush | TransferType::Barrier => RequestStep::WriteFlush,
    };
    InflightRequest { step, barrier: kind == TransferType::Barrier, ..InflightRequest::NEW }
}
