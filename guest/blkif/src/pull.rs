//! Pulls a batch of requests from the ring, in passes.
//!
//! All ring entries of the batch are prefetched, copied and recorded in the journal. Each request is validated and gets pages for its data;
//! requests that need no copy are admitted at once. One call fetches the indirect pages of all indirect requests, another copies the data
//! of all writes; then the remaining requests are admitted.

use std::collections::VecDeque;
use std::io;

use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Intake, Op};
use mqblk_memory::{
    Buffer, BufferPool, CopyDirection, GrantCopy, GrantStatus, GuestAddress, PageArena, PageSlot, PooledContext,
};
use mqblk_ring::blkif::request::{SEGMENT_BYTES, SEGMENTS_PER_PAGE};
use mqblk_ring::blkif::{BlkifRingError, IndirectRequest, RawRequest, RequestBody, Segment, operation, status};

use crate::journal::JournalSlot;
use crate::judge::{Asked, Kind, answered_operation, indirect_pages};
use crate::options::MAX_INDIRECT_SEGMENTS;
use crate::place::{PageUse, Place};
use crate::queue::{BlkifQueue, BlkifToken, coarse_milliseconds};
use crate::requests::{Entry, Step};

/// Maximum of requests of one pull. A larger batch would delay the guest's first response.
pub(crate) const BATCH: usize = 16;

/// The journal, which has as many slots as the ring has entries, is full.
const NO_ROOM: BlkifRingError = BlkifRingError("there are more requests without a response than the ring holds");

/// An indirect request of the batch whose segments are being fetched.
#[derive(Clone, Copy, Debug)]
struct Fetched {
    at: u16,
    indirect: IndirectRequest,
    /// Bit `n`: indirect page `n` was read through its mapping.
    read: u8,
}

/// Memory of one batch, reused for each.
pub(crate) struct Batch {
    raws: [RawRequest; BATCH],
    journal: [Option<JournalSlot>; BATCH],
    /// Table indices of writes whose data is not copied yet.
    staged: Vec<u16>,
    indirect: Vec<Fetched>,
    copies: Vec<GrantCopy>,
    /// Indirect pages are copied here: `scratch_stride` slots for each request of a batch.
    scratch: PageArena,
    scratch_stride: u32,
    /// Private copy of one indirect page.
    bytes: Vec<u8>,
}

impl Batch {
    /// Creates the memory of a batch. `segments`: maximum of segments of an indirect request.
    pub(crate) fn new(segments: u16) -> io::Result<Batch> {
        let pages = indirect_pages(segments);
        let data = usize::from(segments).max(1);
        Ok(Batch {
            raws: [RawRequest::default(); BATCH],
            journal: [None; BATCH],
            staged: Vec::with_capacity(BATCH),
            indirect: Vec::with_capacity(BATCH),
            copies: Vec::with_capacity(BATCH * data),
            scratch: PageArena::reserve((BATCH * pages) as u32)?,
            scratch_stride: pages as u32,
            bytes: vec![0; SEGMENTS_PER_PAGE * SEGMENT_BYTES],
        })
    }

    fn scratch_slot(&self, number: usize, page: usize) -> PageSlot {
        PageSlot(number as u32 * self.scratch_stride + page as u32)
    }
}

/// Requests that the previous backend process left without a response.
pub(crate) struct Replay(VecDeque<(JournalSlot, RawRequest)>);

impl Replay {
    pub(crate) fn new(requests: Vec<(JournalSlot, RawRequest)>) -> Replay {
        Replay(requests.into())
    }

    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.0.len()
    }
}

/// Returns the range of segments that indirect page `page` holds, of a request of `segments` segments.
#[inline]
fn segments_of(page: usize, segments: u16) -> std::ops::Range<usize> {
    let first = page * SEGMENTS_PER_PAGE;
    first..usize::from(segments).min(first + SEGMENTS_PER_PAGE)
}

/// Parses segments from a private copy.
#[inline]
fn parse(bytes: &[u8], pages: &mut [PageUse]) {
    for (bytes, page) in bytes.as_chunks::<SEGMENT_BYTES>().0.iter().zip(pages) {
        *page = PageUse::of(Segment::from_bytes(*bytes));
    }
}

impl<L: PooledContext> BlkifQueue<L> {
    /// Takes one batch of at most `most` requests. Returns how many were taken, and true if more wait that may be taken.
    #[inline]
    pub(crate) fn take_batch<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        into: &mut I,
        most: usize,
    ) -> Result<(usize, bool), BlkifRingError> {
        let limit = into.room().min(self.requests.room()).min(BATCH).min(most);
        let (count, more) = self.fetch(limit)?;
        if count == 0 {
            return Ok((0, more));
        }
        if self.pages.needs_tending() {
            self.now = coarse_milliseconds();
        }
        let size = self.vbd.size();
        for number in 0..count {
            let raw = &self.batch.raws[number];
            match self.rules.direct(raw.operation(), raw.nr_segments()) {
                Some(kind) => self.take_direct(pool, number, kind, size, into),
                None => self.take_other(number, size, into),
            }
        }
        if !self.batch.indirect.is_empty() {
            self.fetch_segments(pool, size, into);
        }
        if !self.batch.staged.is_empty() {
            self.copy_staged(pool, into);
        }
        Ok((count, more && self.barrier.is_none()))
    }

    /// Copies entries off the ring, up to a barrier. Returns how many, and true if more wait.
    #[inline]
    fn fetch(&mut self, most: usize) -> Result<(usize, bool), BlkifRingError> {
        if self.replay.left() > 0 {
            return Ok((self.fetch_replay(most), true));
        }
        let waiting = self.ring.waiting()? as usize;
        let mut count = waiting.min(most);
        for ahead in 0..count as u32 {
            self.ring.prefetch(ahead);
        }
        let raws = self.batch.raws[..count].iter_mut().zip(&mut self.batch.journal);
        for (number, (raw, slot)) in (1..).zip(raws) {
            self.ring.take_into(raw);
            if let Some(journal) = &mut self.journal {
                *slot = Some(journal.take(raw).ok_or(NO_ROOM)?);
            }
            if raw.operation() == operation::WRITE_BARRIER {
                count = number;
                break;
            }
        }
        if let Some(journal) = &mut self.journal {
            journal.consumed(self.ring.position().req_cons);
        }
        Ok((count, count < waiting))
    }

    /// Like [`fetch_requests`](Self::fetch_requests), for requests that the previous backend process left.
    #[cold]
    fn fetch_replay(&mut self, most: usize) -> usize {
        let mut count = 0;
        while count < most
            && let Some((slot, raw)) = self.replay.0.pop_front()
        {
            self.batch.raws[count] = raw;
            self.batch.journal[count] = Some(slot);
            count += 1;
            if raw.operation() == operation::WRITE_BARRIER {
                break;
            }
        }
        count
    }

    /// Starts a request with its segments in the ring entry.
    #[inline(always)]
    fn take_direct<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        number: usize,
        kind: Kind,
        size: ByteLen,
        into: &mut I,
    ) {
        let (raw, abi) = (&self.batch.raws[number], self.ring.abi());
        let (operation, segments) = (raw.operation(), raw.nr_segments().into());
        let entry =
            Entry { id: raw.id(abi), operation, segments, journal: self.batch.journal[number], ..of_kind(kind) };
        let at = self.requests.open(entry);
        let (entry, pages) = self.requests.with_pages(at);
        for (page, segment) in pages.iter_mut().zip(raw.segments(abi)) {
            *page = PageUse::of(segment);
        }
        match self.rules.extent(raw.sector(abi), pages, size) {
            Some(extent) => {
                (entry.start, entry.len) = extent;
                self.stage(pool, at, into);
            }
            None => self.refuse(at, into),
        }
    }

    /// [`prepare_data`](Self::prepare_data) outside the fast path, not inlined.
    #[inline(never)]
    fn stage_seldom<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, at: u16, into: &mut I) {
        self.stage(pool, at, into);
    }

    /// [`admit`](Self::admit) outside the fast path, not inlined.
    #[inline(never)]
    pub(crate) fn admit_seldom<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, at: u16, into: &mut I) {
        self.admit(pool, at, into);
    }

    /// Starts any other request: completes it, admits it, or queues the fetch of its segments.
    #[inline(never)]
    fn take_other<I: Intake<BlkifToken, Buffer>>(&mut self, number: usize, size: ByteLen, into: &mut I) {
        let journal = self.batch.journal[number];
        let request = self.batch.raws[number].decode(self.ring.abi());
        let operation = answered_operation(&request);
        let entry = Entry { id: request.id, operation, journal, ..Entry::NEW };
        match (self.rules.judge(&request, size), &request.body) {
            (Asked::Indirect(kind), RequestBody::Indirect(indirect)) => {
                self.counters.indirect_requests += 1;
                let Entry { step, barrier, .. } = of_kind(kind);
                let at = self.requests.open(Entry { segments: indirect.nr_segments, step, barrier, ..entry });
                self.batch.indirect.push(Fetched { at, indirect: *indirect, read: 0 });
            }
            (Asked::Flush, _) => {
                let at = self.requests.open(entry);
                into.admit(BlkifToken(at), DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
            }
            (Asked::EmptyBarrier, _) => {
                let at = self.requests.open(Entry { barrier: true, ..entry });
                self.begin_barrier(at);
            }
            (Asked::Discard { secure, start, len }, _) => {
                let at = self.requests.open(Entry { start, len, step: Step::Discard { secure }, ..entry });
                self.discard(at, into);
            }
            (Asked::Answer(status), _) => {
                self.respond(request.id, operation, status, journal);
                into.completed_locally(status == status::OKAY);
            }
            // Not reached: the parser returns `Indirect` only for an indirect request, and direct ones take the other path.
            (Asked::Direct(_) | Asked::Indirect(_), _) => {
                self.respond(request.id, operation, status::ERROR, journal);
                into.completed_locally(false);
            }
        }
    }

    /// Completes a malformed request, whose status is set already.
    #[cold]
    fn refuse<I: Intake<BlkifToken, Buffer>>(&mut self, at: u16, into: &mut I) {
        self.close_request(at);
        into.completed_locally(false);
    }

    /// Fetches the segments of indirect requests, each byte once: through mapped pages, and all others in one copy call.
    #[inline(never)]
    fn fetch_segments<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, size: ByteLen, into: &mut I) {
        let mut indirect = std::mem::take(&mut self.batch.indirect);
        self.batch.copies.clear();
        for (number, fetched) in indirect.iter_mut().enumerate() {
            let segments = self.requests.entry(fetched.at).segments;
            for page in 0..indirect_pages(segments) {
                let range = segments_of(page, segments);
                let bytes = &mut self.batch.bytes[..range.len() * SEGMENT_BYTES];
                let gref = fetched.indirect.pages[page];
                if self.pages.peek(gref, bytes, self.now, &mut self.counters) {
                    parse(bytes, &mut self.requests.with_pages(fetched.at).1[range]);
                    fetched.read |= 1 << page;
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
        self.pages.copy(&self.batch.scratch, &mut self.batch.copies, &mut self.counters);
        let mut copied = 0;
        for (number, fetched) in indirect.iter().enumerate() {
            if self.judge_segments(number, fetched, size, &mut copied) {
                self.stage_seldom(pool, fetched.at, into);
            } else {
                self.refuse(fetched.at, into);
            }
        }
        indirect.clear();
        self.batch.indirect = indirect;
    }

    /// Returns true if the segments of an indirect request were fetched and are valid.
    fn judge_segments(&mut self, number: usize, fetched: &Fetched, size: ByteLen, copied: &mut usize) -> bool {
        let (entry, pages) = self.requests.with_pages(fetched.at);
        let mut good = true;
        for page in 0..indirect_pages(entry.segments) {
            if fetched.read & 1 << page != 0 {
                continue;
            }
            let copy = &self.batch.copies[*copied];
            *copied += 1;
            let range = segments_of(page, entry.segments);
            let slot = self.batch.scratch_slot(number, page);
            let bytes = &mut self.batch.bytes[..range.len() * SEGMENT_BYTES];
            good &=
                copy.status == GrantStatus::OKAY && self.batch.scratch.memory().read(slot.address(0), bytes).is_some();
            parse(bytes, &mut pages[range]);
        }
        match self.rules.extent(fetched.indirect.sector, pages, size) {
            Some(extent) if good => {
                (entry.start, entry.len) = extent;
                true
            }
            _ => false,
        }
    }

    /// Gets pages for a request's data, and admits it unless its data is still to be copied.
    #[inline(always)]
    fn stage<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, at: u16, into: &mut I) {
        let (entry, pages) = self.requests.with_pages(at);
        let fill = entry.step == Step::Read;
        match self.pages.place(pages, fill, self.now, &mut self.counters) {
            Some(place) => {
                entry.place = place;
                if !fill && matches!(place, Place::Copy(_)) {
                    self.batch.staged.push(at);
                } else if entry.barrier {
                    self.begin_barrier(at);
                } else {
                    self.admit(pool, at, into);
                }
            }
            None => self.refuse(at, into),
        }
    }

    /// Copies the data of writes in one call, and admits them, except those whose copy failed.
    #[inline(never)]
    fn copy_staged<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) {
        self.batch.copies.clear();
        for at in &self.batch.staged {
            let (_, pages) = self.requests.with_pages(*at);
            self.batch.copies.extend(pages.iter().map(|page| page.copy(CopyDirection::FromGrant)));
        }
        self.pages.copy(&self.arena, &mut self.batch.copies, &mut self.counters);
        let mut copied = 0;
        for number in 0..self.batch.staged.len() {
            let at = self.batch.staged[number];
            let entry = self.requests.entry(at);
            let copies = &self.batch.copies[copied..copied + usize::from(entry.segments)];
            copied += copies.len();
            if copies.iter().any(|copy| copy.status != GrantStatus::OKAY) {
                self.refuse(at, into);
            } else if entry.barrier {
                self.begin_barrier(at);
            } else {
                self.admit_seldom(pool, at, into);
            }
        }
        self.batch.staged.clear();
    }

    /// Admits a request whose pages are prepared.
    #[inline(always)]
    fn admit<I: Intake<BlkifToken, Buffer>>(&mut self, pool: &mut BufferPool, at: u16, into: &mut I) {
        let fua = self.fua;
        let (entry, pages) = self.requests.with_pages(at);
        let op = match entry.step {
            Step::Read => Op::Read,
            Step::Write => Op::Write { fua },
            Step::WriteFlush => Op::Write { fua: false },
            Step::Discard { .. } => return self.discard(at, into),
            Step::Flush => {
                return into.admit(BlkifToken(at), DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
            }
        };
        let buffer = pool.take(self.lease);
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
fn of_kind(kind: Kind) -> Entry {
    let step = match kind {
        Kind::Read => Step::Read,
        Kind::Write => Step::Write,
        Kind::WriteFlush | Kind::Barrier => Step::WriteFlush,
    };
    Entry { step, barrier: kind == Kind::Barrier, ..Entry::NEW }
}
