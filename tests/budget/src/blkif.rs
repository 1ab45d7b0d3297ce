//! The blkif variant: a frontend that reads a page per request through grants. Grant operations cost nothing: only the
//! backend is counted.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mqblk_blkif::{BlkifQueue, GrantBudget, GrantMode, PoolScope, ResolvedGrantMode, RingParts, Vbd, VbdOptions};
use mqblk_core::{DiskSlot, EventChannel, Limits, Sector512};
use mqblk_engine::{PlugOptions, PollPolicy, QueueDisk, QueueOptions, SteppedWorker, UringOptions};
use mqblk_memory::{
    GrantAccess, GrantCopy, GrantRef, GrantStatus, GuestAddress, GuestMemory, PageArena, PageSlot, Region,
};
use mqblk_ring::blkif::{
    Abi, BackRing, BlkifRequest, BlkifRing, FrontRing, RawRequest, RequestBody, RingPosition, RwRequest, Segment,
    operation,
};

use super::{BLOCK, Failure, null};

/// 256 entries.
const RING_PAGES: u32 = 8;

/// Grant operations that do nothing and succeed.
struct NullGrants;

impl GrantAccess for NullGrants {
    fn copy(&mut self, _: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        for copy in copies {
            copy.status = GrantStatus::OKAY;
        }
        Ok(())
    }

    fn map(&mut self, _: &PageArena, _: PageSlot, _: &[GrantRef], _: bool) -> io::Result<()> {
        Ok(())
    }

    fn unmap(&mut self, _: &PageArena, _: PageSlot) -> io::Result<()> {
        Ok(())
    }
}

/// An event channel that does nothing: the frontend polls.
struct NoEvents;

impl EventChannel for NoEvents {
    fn notify(&self) {}
    fn take(&self) {}
    fn unmask(&self) {}
}

/// Serves `requests` reads, `batch` at a time.
pub(crate) fn serve(requests: u32, batch: u32, mode: ResolvedGrantMode) -> Result<(), Failure> {
    let (region, _) = Region::shared("ring", u64::from(RING_PAGES * mqblk_memory::PAGE_BYTES), GuestAddress(0))?;
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)])?);
    let ring = || BlkifRing::resolve(&memory, GuestAddress(0), RING_PAGES, Abi::X86_64);
    let mut front = FrontRing::init(ring()?);
    let disk = null()?;
    let vbd = Vbd::new(VbdOptions {
        geometry: disk.geometry(),
        limits: Limits { pins_memory: mode == ResolvedGrantMode::PersistentBounce, ..disk.limits() },
        abi: Abi::X86_64,
        persistent: mode.is_persistent(),
        max_indirect_segments: mqblk_blkif::DEFAULT_INDIRECT_SEGMENTS,
        discard: true,
        discard_secure: false,
        barrier: true,
        flush: true,
        write_through: false,
        mode: match mode {
            ResolvedGrantMode::Copy => GrantMode::Copy,
            ResolvedGrantMode::Map => GrantMode::Map,
            ResolvedGrantMode::Persistent | ResolvedGrantMode::PersistentBounce => GrantMode::Persistent,
        },
        pages_may_be_pinned: false,
        pool: PoolScope::PerRing,
        budget: GrantBudget::new(1 << 20, mqblk_core::MappingBudget::of_process()),
        persistent_max: mqblk_blkif::DEFAULT_PERSISTENT_MAX,
        // Without a scan of idle pages by the clock, every 100 ms: the count must not depend on time.
        persistent_idle: Duration::ZERO,
        rings: 1,
    });
    let mut worker = SteppedWorker::new(UringOptions::default())?;
    let options = QueueOptions {
        disks: vec![QueueDisk { slot: DiskSlot::FIRST, disk, plug: PlugOptions::default(), health: Arc::default() }],
        kick: None,
        policy: PollPolicy::Busy.into(),
        paused: false,
        on_fault: Box::new(|fault| panic!("{fault:?}")),
    };
    let back = BackRing::new(ring()?, RingPosition::default());
    worker.attach(options, |waker| {
        let parts = RingParts {
            ring: back,
            grants: Box::new(NullGrants),
            channel: Box::new(NoEvents),
            waker: Arc::clone(waker),
            journal: None,
            replay: vec![],
            fence: None,
            guard: None,
        };
        BlkifQueue::open(vbd, parts).map_err(|error| error.to_string())
    })?;
    for round in 0..requests / batch {
        for number in 0..batch {
            let slot = (round * batch + number) % front.size();
            if !front.put(&read(slot)) {
                return Err("the ring is full".into());
            }
        }
        let _polled = front.publish();
        while front.poll_responses()? < batch {
            worker.turn();
        }
        while let Some(response) = front.take() {
            if response.status != mqblk_ring::blkif::status::OKAY {
                return Err(format!("request {}: found status {}", response.id, response.status).into());
            }
        }
    }
    Ok(())
}

/// Encodes a read of a whole page.
fn read(slot: u32) -> RawRequest {
    let mut segments = [Segment::default(); 11];
    segments[0] = Segment { gref: GrantRef(slot + 8), first_sect: 0, last_sect: 7 };
    let sector = Sector512(u64::from(slot) * mqblk_core::ByteLen(BLOCK.into()).sectors().0);
    let what = RequestBody::Rw(RwRequest { nr_segments: 1, sector, segments });
    RawRequest::encode(
        Abi::X86_64,
        &BlkifRequest { id: slot.into(), operation: operation::READ, handle: 0, body: what },
    )
}
