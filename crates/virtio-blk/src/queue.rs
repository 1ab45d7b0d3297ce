//! A virtio-blk request queue.

use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::sync::Arc;

use mqblk_core::{ArmResult, Call, DiskSlot, FinishedRequest, GuestQueue, Intake, Outcome, PublishResult, PullEnd};
use mqblk_memory::{Buffer, BufferPool, DirtyLog, GuestMemory, LeaseAccess, MemoryShare};
use mqblk_ring::virtqueue::{
    ChainBatch, ChainHead, DeviceRing, MappedRing, RingLog, RingState, UsualChains, VirtqueueError,
};
use mqblk_virtio::{GuestContext, QueueResources, VirtioQueue};

use crate::config::MAX_RANGES;
use crate::device::VirtioBlk;
use crate::request::{BlkStatus, ParsedRequest, Ranges, RequestChain, Transfer};

/// State of an admitted request for its completion.
#[derive(Debug)]
pub struct BlkToken {
    head: u16,
    /// Bytes written to the guest if the request succeeds: the status byte at least.
    written: NonZeroU32,
    /// Buffer of the status byte, if the disk request has no buffer.
    buffer: Option<Buffer>,
}

/// One virtqueue of a [`VirtioBlk`].
pub struct BlkQueue<L> {
    device: Arc<VirtioBlk>,
    ring: DeviceRing,
    share: MemoryShare,
    call: Option<Box<dyn Call>>,
    ranges: Ranges,
    /// The current batch; reused.
    batch: ChainBatch,
    _context: PhantomData<fn(L)>,
}

impl<L: GuestContext> BlkQueue<L> {
    pub(crate) fn new(device: Arc<VirtioBlk>, parts: QueueResources) -> Self {
        let ranges = Ranges::with_capacity(MAX_RANGES as usize);
        let QueueResources { ring, share, call, .. } = parts;
        BlkQueue { device, ring, share, call, ranges, batch: ChainBatch::default(), _context: PhantomData }
    }

    fn complete_chain(&mut self, pool: &mut BufferPool, head: u16, buffer: Buffer, status: BlkStatus, written: u32) {
        pool.write_status(&buffer, status.0);
        pool.release(buffer);
        self.ring.put_used(head, if status == BlkStatus::OK { written } else { 1 });
    }

    /// Parses one chain of any layout, and admits or completes it.
    #[inline(never)]
    fn process_any_chain<I: Intake<BlkToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        chain_head: &ChainHead,
        into: &mut I,
    ) -> Result<(), VirtqueueError> {
        let mut chain = RequestChain::new(pool.take(self.share.lease()));
        if let Err(error) = chain.read(&self.ring, pool, self.share.lease(), chain_head) {
            pool.release(chain.buffer);
            return Err(error);
        }
        let (head, written) = (chain_head.index, chain.written());
        match chain.parse(&self.device, self.device.is_write_through(), pool, &mut self.ranges) {
            ParsedRequest::Disk { op, start, len } if op.has_data() => {
                into.admit(
                    BlkToken { head, written, buffer: None },
                    DiskSlot::FIRST,
                    op,
                    start,
                    len,
                    Some(chain.buffer),
                );
            }
            ParsedRequest::Disk { op, start, len } => {
                let token = BlkToken { head, written: NonZeroU32::MIN, buffer: Some(chain.buffer) };
                into.admit(token, DiskSlot::FIRST, op, start, len, None);
            }
            ParsedRequest::Ranges { op, count } => {
                let token = BlkToken { head, written: NonZeroU32::MIN, buffer: Some(chain.buffer) };
                into.admit_parts(token, DiskSlot::FIRST, op, &self.ranges[..count]);
            }
            ParsedRequest::GetId => {
                let id = self.device.device_id();
                let len = pool.len(&chain.buffer).0.min(id.len() as u64) as usize;
                let copied = pool.copy_in(&chain.buffer, 0, &id[..len]);
                let status = if copied { BlkStatus::OK } else { BlkStatus::IOERR };
                self.complete_chain(pool, head, chain.buffer, status, len as u32 + 1);
                if copied { into.completed_locally() } else { into.malformed("no memory for the ID") }
            }
            ParsedRequest::Nothing => {
                self.complete_chain(pool, head, chain.buffer, BlkStatus::OK, written.get());
                into.completed_locally();
            }
            ParsedRequest::Refused(status, why) => {
                self.complete_chain(pool, head, chain.buffer, status, 1);
                into.malformed(why);
            }
            ParsedRequest::NoStatusByte => {
                pool.release(chain.buffer);
                self.ring.put_used(head, 0);
                into.malformed("no status byte");
            }
        }
        Ok(())
    }
}

/// Admits a transfer. `None` if the chain is anything else.
#[inline(always)] // for each of a batch
fn admit_transfer<I: Intake<BlkToken, Buffer>>(
    ring: &impl UsualChains,
    head: &ChainHead,
    access: &mut LeaseAccess<'_>,
    device: &VirtioBlk,
    into: &mut I,
) -> Option<()> {
    let Transfer { op, start, len, buffer, written } = Transfer::read(ring, head, access, device)?;
    let token = BlkToken { head: head.index, written, buffer: None };
    into.admit(token, DiskSlot::FIRST, op, start, len, Some(buffer));
    Some(())
}

/// Admits transfers, up to the first chain that is anything else. Returns how many.
#[inline]
fn admit_transfers<I: Intake<BlkToken, Buffer>>(
    ring: &impl UsualChains,
    heads: &[ChainHead],
    mut access: LeaseAccess<'_>,
    device: &VirtioBlk,
    into: &mut I,
) -> usize {
    let mut left = heads;
    while let [head, others @ ..] = left
        && admit_transfer(ring, head, &mut access, device, into).is_some()
    {
        left = others;
    }
    heads.len() - left.len()
}

impl<L: GuestContext> GuestQueue for BlkQueue<L> {
    type Token = BlkToken;
    type Position = RingState;
    type Context = L;

    fn depth(&self) -> u16 {
        self.ring.size()
    }

    fn enter(&mut self, context: &mut L) -> Result<(), String> {
        self.share.enter(context)
    }

    fn leave(&mut self, context: &mut L) {
        self.share.leave(context);
    }

    #[inline(always)] // the engine calls it in one place
    fn pull<I>(&mut self, context: &mut L, into: &mut I) -> PullEnd
    where
        I: Intake<BlkToken, Buffer>,
    {
        let pool = context.pool();
        let (count, more) = match self.batch.fetch(&mut self.ring, pool, self.share.lease(), into.room()) {
            Ok(fetched) => fetched,
            Err(error) => return PullEnd::Broken(error.0),
        };
        let mut at = 0;
        while at < count {
            let heads = &self.batch.heads[at..count];
            let device = &self.device;
            at += match &self.ring {
                DeviceRing::Split(ring) => admit_transfers(ring, heads, pool.access(self.share.lease()), device, into),
                DeviceRing::Packed(ring) => admit_transfers(ring, heads, pool.access(self.share.lease()), device, into),
            };
            if at < count {
                let head = self.batch.heads[at];
                if let Err(error) = self.process_any_chain(pool, &head, into) {
                    return PullEnd::Broken(error.0);
                }
                at += 1;
            }
        }
        PullEnd::of(count, more)
    }

    #[inline(always)] // the engine calls it in one place
    fn finish<I>(&mut self, context: &mut L, finished: FinishedRequest<BlkToken, Buffer>, _into: &mut I)
    where
        I: Intake<BlkToken, Buffer>,
    {
        let BlkToken { head, written, buffer } = finished.token;
        let status = match finished.outcome {
            Outcome::Done(_) => BlkStatus::OK,
            Outcome::Unsupported => BlkStatus::UNSUPP,
            _ => BlkStatus::IOERR,
        };
        if let Some(buffer) = finished.buffer.or(buffer) {
            context.pool().release_with_status(buffer, status.0);
            self.ring.put_used(head, if status == BlkStatus::OK { written.get() } else { 1 });
        }
    }

    #[inline]
    fn publish(&mut self) -> PublishResult {
        self.ring.publish()
    }

    fn notify(&mut self) {
        if let Some(call) = &self.call {
            call.call();
        }
    }

    fn arm(&mut self) -> ArmResult {
        self.ring.arm()
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }

    fn abandon(&mut self, context: &mut L, token: BlkToken, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer.or(token.buffer) {
            context.pool().release(buffer);
        }
    }

    fn position(&self) -> RingState {
        self.ring.state()
    }
}

impl<L: GuestContext> VirtioQueue<L> for BlkQueue<L> {
    fn set_call(&mut self, call: Option<Box<dyn Call>>) {
        self.call = call;
    }

    fn relocate(&mut self, context: &mut L, ring: MappedRing, memory: Arc<GuestMemory>) -> Result<(), String> {
        self.share.relocate(context, memory)?;
        self.ring.relocate(ring);
        Ok(())
    }

    fn set_log(&mut self, context: &mut L, ring: Option<RingLog>, log: Option<Arc<DirtyLog>>) {
        self.share.set_log(context, log);
        self.ring.set_log(ring);
    }
}
