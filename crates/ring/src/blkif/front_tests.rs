use std::sync::Arc;

use mqblk_core::{ArmResult, PublishResult, Sector512};
use mqblk_memory::{GrantRef, GuestAddress, GuestMemory, PAGE_BYTES, Region};
use proptest::prelude::*;

use super::*;
use crate::blkif::request::MAX_SEGMENTS;
use crate::blkif::{BackRing, BlkifRequest, RequestBody, RwRequest, Segment, operation};

fn ends(abi: Abi, pages: u32) -> (FrontRing, BackRing) {
    let region = Region::shared("ring", u64::from(pages * PAGE_BYTES), GuestAddress(0)).unwrap().0;
    let memory = GuestMemory::new(vec![Arc::new(region)]).unwrap();
    let ring = || BlkifRing::resolve(&memory, GuestAddress(0), pages, abi).unwrap();
    let front = FrontRing::init(ring());
    (front, BackRing::attach(ring()))
}

fn request(abi: Abi, id: u64) -> RawRequest {
    RawRequest::encode(abi, &BlkifRequest { id, operation: 9, handle: 0, body: RequestBody::Unknown })
}

proptest! {
    /// Both ends, in any order of steps, against a list of the requests without a response.
    #[test]
    fn every_request_has_one_response(
        steps in proptest::collection::vec((0..6_u8, 1..40_u32), 1..200),
        abi in proptest::sample::select(Abi::ALL.to_vec()),
    ) {
        let (mut front, mut back) = ends(abi, 1);
        let (mut next, mut published, mut responded, mut seen) = (0_u64, 0, 0, 0);
        let mut taken: Vec<u64> = vec![];
        for (step, count) in steps {
            match step {
                0 => for _ in 0..count {
                    let fits = next - seen < 32;
                    prop_assert_eq!(front.put(&request(abi, next)), fits);
                    next += u64::from(fits);
                },
                1 => {
                    let _ = front.publish();
                    published = next;
                }
                2 => {
                    let waiting = back.waiting().unwrap();
                    prop_assert_eq!(u64::from(waiting), published - responded - taken.len() as u64);
                    for _ in 0..waiting.min(count) {
                        taken.push(back.take().decode(abi).id);
                    }
                }
                3 => for _ in 0..count.min(taken.len() as u32) {
                    let id = taken.remove(count as usize % taken.len());
                    back.put_response(id, 9, -2);
                    responded += 1;
                },
                4 => {
                    let nothing = back.position().rsp_prod == back.published();
                    prop_assert_eq!(back.publish() == PublishResult::Nothing, nothing);
                }
                _ => {
                    let ready = front.poll_responses().unwrap();
                    for _ in 0..ready {
                        let response = front.take().unwrap();
                        prop_assert_eq!((response.operation, response.status), (9, -2));
                        prop_assert!(response.id < published);
                        seen += 1;
                    }
                    prop_assert_eq!(front.take(), None);
                    prop_assert_eq!(u64::from(front.in_flight()), next - seen);
                }
            }
        }
    }
}

#[test]
fn put_transfer_matches_encode() {
    for abi in Abi::ALL {
        let (mut front, mut back) = ends(abi, 1);
        for count in [1, 0, 2, 11, 1, 12, 3] {
            let segment =
                |at: u32| Segment { gref: GrantRef(0x8000_0001 + at), first_sect: at as u8 % 8, last_sect: 7 };
            let list: Vec<Segment> = (0..count).map(segment).collect();
            let (id, sector) = (u64::MAX - 5, Sector512(0x1234_5678_9abc_def0));
            assert!(front.put_rw(id, operation::WRITE, 0xca10, sector, &list));
            let mut segments = [Segment::default(); MAX_SEGMENTS];
            segments.iter_mut().zip(&list).for_each(|(place, segment)| *place = *segment);
            let transfer = RwRequest { nr_segments: count.min(11) as u8, sector, segments };
            let expected =
                BlkifRequest { id, operation: operation::WRITE, handle: 0xca10, body: RequestBody::Rw(transfer) };
            assert!(front.put(&RawRequest::encode(abi, &expected)));
            let _ = front.publish();
            assert_eq!(back.waiting().unwrap(), 2);
            for _ in 0..2 {
                assert_eq!(back.take().decode(abi), expected, "{abi:?}, {count} segments");
                back.put_response(id, operation::WRITE, 0);
            }
            let _ = back.publish();
            assert_eq!(front.poll_responses(), Ok(2));
            while front.take().is_some() {}
        }
        while front.put_rw(0, 0, 0, Sector512(0), &[]) {}
        assert_eq!(front.in_flight(), 32);
    }
}

#[test]
fn both_ends_are_notified_when_they_request_it() {
    let (mut front, mut back) = ends(Abi::X86_64, 1);
    assert!(front.put(&request(Abi::X86_64, 1)));
    assert!(front.publish(), "the first request of a fresh ring");
    back.waiting().unwrap();
    back.take();
    assert!(front.put(&request(Abi::X86_64, 2)));
    assert!(!front.publish(), "it is polling");
    back.waiting().unwrap();
    back.take();
    assert_eq!(back.arm(), ArmResult::Sleepable);
    assert!(front.put(&request(Abi::X86_64, 3)));
    assert!(front.publish());
    assert_eq!(front.arm(2), Ok(0));
    back.put_response(1, 9, 0);
    assert_eq!(back.publish(), PublishResult::Suppressed, "two are requested");
    back.put_response(2, 9, 0);
    assert_eq!(back.publish(), PublishResult::Wanted);
    assert_eq!(front.poll_responses(), Ok(2));
}

#[test]
fn a_backend_that_claims_too_many_responses_is_detected() {
    let (mut front, mut back) = ends(Abi::X86_32, 1);
    assert!(front.put(&request(Abi::X86_32, 1)));
    let _ = front.publish();
    for _ in 0..2 {
        back.put_response(1, 9, 0);
    }
    let _ = back.publish();
    assert_eq!(front.poll_responses(), Err(BAD_RSP_PROD));
}
