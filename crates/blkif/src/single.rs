//! The usual request in one step each way: a read or write of one segment, in a page that is mapped persistently. All
//! other requests take [`pull`](crate::pull), from its beginning.

use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Intake, Op};
use mqblk_memory::{Buffer, BufferPool, PooledContext};
use mqblk_ring::blkif::status;

use crate::journal::JournalSlot;
use crate::page_backing::{PageBacking, RequestPage};
use crate::parse::TransferType;
use crate::queue::{BlkifQueue, BlkifToken};
use crate::request_table::{InflightRequest, RequestStep};

/// A usual request, checked.
struct Single {
    id: u64,
    operation: u8,
    step: RequestStep,
    op: Op,
    start: ByteOffset,
    len: ByteLen,
    page: RequestPage,
}

impl<L: PooledContext> BlkifQueue<L> {
    /// Admits request `number` of the batch, if it is a usual one. Returns false, and does nothing, for any other.
    #[inline(always)] // it has one caller
    pub(crate) fn start_single<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        number: usize,
        kind: TransferType,
        size: ByteLen,
        into: &mut I,
    ) -> bool {
        let Some(single) = self.parse_single(number, kind, size) else { return false };
        let Some(buffer) = self.take_single(pool, &single) else { return false };
        self.admit_single(&single, self.batch.entries.journal_slots[number], buffer, into);
        true
    }

    #[inline(always)] // else it would travel through memory
    fn parse_single(&mut self, number: usize, kind: TransferType, size: ByteLen) -> Option<Single> {
        let (step, op) = match kind {
            TransferType::Read => (RequestStep::Read, Op::Read),
            TransferType::Write => (RequestStep::Write, Op::Write { fua: self.parser.write_through() }),
            TransferType::WriteFlush | TransferType::Barrier => return None,
        };
        let raw = &self.batch.entries.raws[number];
        if raw.nr_segments() != 1 {
            return None;
        }
        let (id, sector, segment) = raw.single(self.ring.ring().abi());
        let operation = raw.operation();
        let mut page = RequestPage::from_segment(segment);
        let (start, len) = self.parser.transfer_range(sector, &[page], size)?;
        page.slot = self.pages.find_mapped(page.gref)?;
        Some(Single { id, operation, step, op, start, len, page })
    }

    #[inline(always)] // as above
    fn take_single(&mut self, pool: &mut BufferPool, single: &Single) -> Option<Buffer> {
        pool.access(self.share.lease()).take_segment((single.page.address(), single.len.0 as u32), false)
    }

    #[inline(always)] // as above
    fn admit_single<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        single: &Single,
        journal_slot: Option<JournalSlot>,
        buffer: Buffer,
        into: &mut I,
    ) {
        let &Single { id, operation, step, op, start, len, page } = single;
        self.pages.use_mapped(page.slot);
        let request = InflightRequest {
            id,
            start,
            len,
            backing: PageBacking::Persistent,
            segment_count: 1,
            journal_slot,
            status: status::OKAY,
            operation,
            step,
            barrier: false,
            is_single: true,
        };
        let at = self.requests.insert_single(request, page);
        into.admit(BlkifToken(at), DiskSlot::FIRST, op, start, len, Some(buffer));
    }

    /// Puts the response to a successful usual request, whose buffer is released. Returns false, and does nothing, for
    /// any other request.
    #[inline(always)] // it has one caller
    pub(crate) fn complete_single(&mut self, at: u16) -> bool {
        let (request, page) = self.requests.single(at);
        let InflightRequest { id, operation, journal_slot, is_single, .. } = *request;
        if !is_single {
            return false;
        }
        self.pages.release_mapped(page.slot);
        self.requests.remove(at);
        self.ring.put_response(id, operation, status::OKAY, journal_slot);
        true
    }
}
