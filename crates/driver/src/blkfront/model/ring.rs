//! The backend side of a ring.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use mqblk_core::{ArmResult, PublishResult, Sector512};
use mqblk_memory::{
    CopyDirection, DomainId, GrantAccess, GrantCopy, GrantRef, GrantStatus, GuestAddress, PageArena, PageSlot,
};
use mqblk_ring::blkif::request::{SEGMENT_BYTES, SEGMENTS_PER_PAGE};
use mqblk_ring::blkif::{
    Abi, BackRing, BlkifRequest, BlkifRing, IndirectRequest, RawRequest, RequestBody, RwRequest, Segment, operation,
    status,
};
use mqblk_xen::{EventPort, Port, Xen};

use super::{BlkbackFault, ModelState};

pub(super) struct ModelRing {
    back: BackRing,
    port: EventPort,
    grants: Box<dyn GrantAccess>,
    /// The ring's pages, and behind them one page for copies.
    arena: PageArena,
    pages: u32,
    /// Requests that are never completed.
    stalled: Vec<RawRequest>,
    /// Its indices violate the protocol.
    is_broken: bool,
}

impl ModelRing {
    pub(super) fn connect(xen: &dyn Xen, front: DomainId, refs: &[GrantRef], port: Port, abi: Abi) -> ModelRing {
        let pages = refs.len() as u32;
        let arena = PageArena::reserve(pages + 1).expect("addresses");
        let mut grants = xen.grants(front).expect("grants of the frontend");
        grants.map(&arena, PageSlot(0), refs, true).expect("a ring that can be mapped");
        let ring = BlkifRing::resolve(arena.memory(), GuestAddress(0), pages, abi).expect("a ring");
        let port = xen.bind_interdomain(front, port).expect("an event channel");
        ModelRing { back: BackRing::attach(ring), port, grants, arena, pages, stalled: vec![], is_broken: false }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.port.descriptor.as_fd()
    }

    /// Serves all available requests. A ring whose indices violate the protocol is not served any more; the others are.
    pub(super) fn serve(&mut self, shared: &ModelState, index: usize) {
        self.port.channel.take();
        while !self.is_broken {
            let Ok(waiting) = self.back.waiting() else {
                self.is_broken = true;
                return;
            };
            for _ in 0..waiting {
                let raw = self.back.take();
                let count = shared.requests.fetch_add(1, Ordering::Relaxed);
                shared.per_queue[index].fetch_add(1, Ordering::Relaxed);
                match shared.behaviour.fault {
                    BlkbackFault::StallAfter(after) if count >= after => self.stalled.push(raw),
                    _ => self.complete(shared, &raw.decode(self.back.abi()), count),
                }
            }
            if self.back.publish() == PublishResult::Wanted {
                self.port.channel.notify();
            }
            if self.back.arm() == ArmResult::Sleepable {
                self.port.channel.unmask();
                // An event that came while the channel was masked is delivered again.
                return;
            }
        }
    }

    fn complete(&mut self, shared: &ModelState, request: &BlkifRequest, count: u64) {
        let (mut response_op, mut status) = self.execute(shared, request, count);
        let mut id = request.id;
        match shared.behaviour.fault {
            BlkbackFault::FailFrom(from) if count >= from => status = status::ERROR,
            BlkbackFault::WrongIdAt(at) if count == at => id ^= 1,
            BlkbackFault::DuplicateAt(at) if count == at => self.back.put_response(id, response_op, status),
            BlkbackFault::WrongOperationAt(at) if count == at => response_op ^= 4,
            BlkbackFault::WrongStatusAt(at) if count == at => status = 7,
            _ => {}
        }
        self.back.put_response(id, response_op, status);
    }

    /// Executes a request. Returns the response's operation and status.
    fn execute(&mut self, shared: &ModelState, request: &BlkifRequest, count: u64) -> (u8, i16) {
        match &request.body {
            RequestBody::Rw(RwRequest { nr_segments, sector, segments }) => {
                let segments = &segments[..usize::from(*nr_segments).min(segments.len())];
                let done = self.transfer(shared, request.operation, *sector, segments, count);
                (request.operation, done)
            }
            RequestBody::Indirect(IndirectRequest { operation, nr_segments, sector, pages }) => {
                shared.indirect.fetch_add(1, Ordering::Relaxed);
                let segments = self.segments(*nr_segments, pages);
                (*operation, self.transfer(shared, *operation, *sector, &segments, count))
            }
            RequestBody::Discard { sector, sectors, .. } => {
                let mut disk = shared.disk();
                let start = sector.to_offset().map_or(usize::MAX, |offset| offset.0 as usize);
                let len = Sector512(*sectors).to_len().map_or(usize::MAX, |len| len.0 as usize);
                match start.checked_add(len).and_then(|end| disk.get_mut(start..end)) {
                    Some(part) => part.fill(0),
                    None => return (operation::DISCARD, status::ERROR),
                }
                (operation::DISCARD, status::OKAY)
            }
            RequestBody::Unknown => (request.operation, status::NOT_SUPPORTED),
        }
    }

    fn segments(&mut self, count: u16, pages: &[GrantRef]) -> Vec<Segment> {
        let mut found = vec![];
        for (gref, left) in pages.iter().zip((0..usize::from(count)).step_by(SEGMENTS_PER_PAGE)) {
            let count = (usize::from(count) - left).min(SEGMENTS_PER_PAGE);
            let mut bytes = vec![0; count * SEGMENT_BYTES];
            assert!(self.copy(*gref, 0, &mut bytes, CopyDirection::FromGrant), "a page of segments");
            found
                .extend(bytes.chunks_exact(SEGMENT_BYTES).map(|s| Segment::from_bytes(s.try_into().expect("8 bytes"))));
        }
        found
    }

    fn transfer(&mut self, shared: &ModelState, op: u8, sector: Sector512, segments: &[Segment], count: u64) -> i16 {
        if op == operation::FLUSH_DISKCACHE {
            shared.flushes.fetch_add(1, Ordering::Relaxed);
        }
        if op != operation::READ && shared.behaviour.read_only {
            return status::ERROR;
        }
        let mut at = sector.to_offset().map_or(usize::MAX, |offset| offset.0 as usize);
        for Segment { gref, first_sect, last_sect } in segments {
            let bytes = |sectors: u8| Sector512(sectors.into()).to_len().map_or(0, |len| len.0 as usize);
            let len = bytes((last_sect + 1).saturating_sub(*first_sect));
            let mut disk = shared.disk();
            let Some(part) = at.checked_add(len).and_then(|end| disk.get_mut(at..end)) else { return status::ERROR };
            let direction = if op == operation::READ { CopyDirection::ToGrant } else { CopyDirection::FromGrant };
            let mut data = part.to_vec();
            if !self.copy(*gref, bytes(*first_sect) as u16, &mut data, direction) {
                return status::ERROR;
            }
            if op != operation::READ {
                data[0] ^= u8::from(matches!(shared.behaviour.fault, BlkbackFault::CorruptFrom(from) if count >= from));
                part.copy_from_slice(&data);
            }
            at += len;
        }
        status::OKAY
    }

    /// Copies between a granted page and `data`, through the arena's last page.
    fn copy(&mut self, gref: GrantRef, offset: u16, data: &mut [u8], direction: CopyDirection) -> bool {
        let slot = PageSlot(self.pages);
        let memory = self.arena.memory();
        if direction == CopyDirection::ToGrant {
            memory.write(slot.address(0), data).expect("the arena's own page");
        }
        let len = u16::try_from(data.len()).expect("at most a page");
        let status = GrantStatus::GENERAL_ERROR;
        let mut copies = [GrantCopy { gref, offset, len, slot, slot_offset: 0, direction, status }];
        let done = self.grants.copy(&self.arena, &mut copies).is_ok() && copies[0].status == GrantStatus::OKAY;
        if direction == CopyDirection::FromGrant {
            self.arena.memory().read(slot.address(0), data).expect("the arena's own page");
        }
        done
    }
}

impl Drop for ModelRing {
    fn drop(&mut self) {
        let _ = self.grants.unmap(&self.arena, PageSlot(0));
    }
}
