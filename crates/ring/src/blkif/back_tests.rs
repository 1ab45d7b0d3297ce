use std::sync::Arc;

use mqblk_core::{ArmResult, PublishResult, Sector512};
use mqblk_memory::{GuestAddress, GuestMemory, PAGE_BYTES, Region};

use super::*;
use crate::blkif::{BlkifRequest, BlkifSetupError, RequestBody, RwRequest, operation, status};

/// A frontend made of plain reads and writes.
struct Front {
    memory: GuestMemory,
    abi: Abi,
    size: u32,
}

impl Front {
    fn new(abi: Abi, pages: u32) -> Front {
        let region = Region::shared("ring", u64::from(pages * PAGE_BYTES), GuestAddress(0)).unwrap().0;
        let memory = GuestMemory::new(vec![Arc::new(region)]).unwrap();
        let front = Front { memory, abi, size: abi.entries(pages) };
        front.set(4, 1);
        front.set(12, 1);
        front
    }

    fn back(&self) -> BackRing {
        let pages = (self.memory.regions()[0].len() / u64::from(PAGE_BYTES)) as u32;
        BackRing::attach(BlkifRing::resolve(&self.memory, GuestAddress(0), pages, self.abi).unwrap())
    }

    fn set(&self, at: u64, value: u32) {
        self.memory.write(GuestAddress(at), &value.to_le_bytes()).unwrap();
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read(GuestAddress(at), &mut bytes).unwrap();
        bytes
    }

    fn entry(&self, index: u32) -> u64 {
        64 + u64::from(index % self.size * self.abi.entry_bytes())
    }

    fn put(&self, index: u32, id: u64) {
        let transfer = RwRequest { nr_segments: 0, sector: Sector512(0), segments: Default::default() };
        let request =
            BlkifRequest { id, operation: operation::FLUSH_DISKCACHE, handle: 0, body: RequestBody::Rw(transfer) };
        let raw = RawRequest::encode(self.abi, &request);
        self.memory.write(GuestAddress(self.entry(index)), &raw.bytes()[..self.abi.entry_bytes() as usize]).unwrap();
    }
}

#[test]
fn a_ring_goes_round_in_every_layout() {
    for (abi, pages) in [(Abi::X86_64, 1), (Abi::X86_32, 2), (Abi::Arm, 16)] {
        let front = Front::new(abi, pages);
        // Near the end of the indices, which wrap.
        let start = 0_u32.wrapping_sub(front.size / 2);
        front.set(0, start);
        front.set(8, start);
        let mut back = front.back();
        for round in 0..3 {
            let first = start.wrapping_add(round * front.size);
            for at in 0..front.size {
                front.put(first.wrapping_add(at), u64::from(at) << 33 | 5);
            }
            front.set(0, first.wrapping_add(front.size));
            assert_eq!(back.waiting(), Ok(front.size));
            let taken: Vec<_> = (0..front.size).map(|_| back.take().decode(abi).id).collect();
            assert_eq!(taken, (0..front.size).map(|at| u64::from(at) << 33 | 5).collect::<Vec<_>>());
            // Responses in another order than the requests.
            for id in taken.iter().rev() {
                back.put_response(*id, operation::READ, status::ERROR);
            }
            assert_eq!(front.get(8), first.to_le_bytes(), "not published yet");
            let want = if round == 0 { PublishResult::Wanted } else { PublishResult::Suppressed };
            assert_eq!(back.publish(), want, "the frontend requested one at index 1");
            assert_eq!(front.get(8), first.wrapping_add(front.size).to_le_bytes());
            let [.., operation, zero, low, high] = front.get::<12>(front.entry(first));
            assert_eq!((operation, zero, i16::from_le_bytes([low, high])), (operation::READ, 0, status::ERROR));
        }
    }
}

#[test]
fn responses_leak_nothing_in_their_padding() {
    for abi in Abi::ALL {
        let front = Front::new(abi, 1);
        front.memory.write(GuestAddress(front.entry(0)), &[0xee; 32]).unwrap();
        let mut back = front.back();
        front.set(0, 1);
        back.waiting().unwrap();
        back.take();
        back.put_response(0x0102_0304_0506_0708, 5, -2);
        let bytes = front.get::<16>(front.entry(0));
        assert_eq!(bytes[..12], [8, 7, 6, 5, 4, 3, 2, 1, 5, 0, 0xfe, 0xff], "{abi:?}");
        assert_eq!(bytes[12..], if abi == Abi::X86_32 { [0xee; 4] } else { [0; 4] }, "{abi:?}");
    }
}

#[test]
fn a_producer_that_jumps_is_refused() {
    let front = Front::new(Abi::X86_64, 1);
    let mut back = front.back();
    for (produced, want) in
        [(32, Ok(32)), (33, Err(BAD_REQ_PROD)), (u32::MAX, Err(BAD_REQ_PROD)), (1 << 31, Err(BAD_REQ_PROD)), (0, Ok(0))]
    {
        front.set(0, produced);
        assert_eq!(back.waiting(), want, "{produced}");
    }
    front.set(0, 8);
    assert_eq!(back.waiting(), Ok(8));
    for _ in 0..8 {
        back.take();
    }
    // Eight are taken without a response: no more than 24 others fit.
    front.set(0, 33);
    assert_eq!(back.waiting(), Err(BAD_REQ_PROD));
    front.set(0, 32);
    assert_eq!(back.waiting(), Ok(24));
    // Back behind what was taken.
    front.set(0, 7);
    assert_eq!(back.waiting(), Err(BAD_REQ_PROD));
}

#[test]
fn events_are_sent_at_the_requested_index() {
    let front = Front::new(Abi::X86_64, 1);
    let mut back = front.back();
    assert_eq!(back.arm(), ArmResult::Sleepable);
    assert_eq!(front.get(4), 1_u32.to_le_bytes(), "an event with the next request");
    front.set(0, 4);
    assert_eq!(back.arm(), ArmResult::WorkWaiting);
    assert_eq!(back.publish(), PublishResult::Nothing);
    for (rsp_event, want) in [
        (1, PublishResult::Wanted),
        (1, PublishResult::Suppressed),
        (4, PublishResult::Suppressed),
        (4, PublishResult::Wanted),
    ] {
        front.set(12, rsp_event);
        back.waiting().unwrap();
        back.take();
        back.put_response(0, 0, 0);
        assert_eq!(back.publish(), want, "an event at {rsp_event}");
    }
    assert_eq!(back.arm(), ArmResult::Sleepable);
    assert_eq!(front.get(4), 5_u32.to_le_bytes());
}

#[test]
fn a_ring_resumes_after_its_last_response() {
    let front = Front::new(Abi::X86_64, 1);
    front.put(7, 70);
    front.set(0, 9);
    front.set(8, 7);
    let mut back = front.back();
    assert_eq!((back.waiting(), back.take().decode(Abi::X86_64).id), (Ok(2), 70));
    assert_eq!(back.position(), RingPosition { req_cons: 8, rsp_prod: 7 });
}

#[test]
fn rings_without_memory_are_refused() {
    let memory = Front::new(Abi::X86_64, 2).memory;
    let resolve = |at, pages| BlkifRing::resolve(&memory, GuestAddress(at), pages, Abi::X86_64).err();
    assert_eq!(resolve(0, 2), None);
    for (at, pages, want) in [
        (0, 0, BlkifSetupError::Pages(0)),
        (0, 3, BlkifSetupError::Pages(3)),
        (0, 32, BlkifSetupError::Pages(32)),
        (0, 4, BlkifSetupError::Unmapped(4)),
        (4096, 2, BlkifSetupError::Unmapped(2)),
        (2, 1, BlkifSetupError::Unmapped(1)),
    ] {
        assert_eq!(resolve(at, pages), Some(want));
    }
}
