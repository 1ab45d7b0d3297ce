//! The queue against a backend's ring, with an eventfd for an event channel.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mqblk_core::{ByteLen, EventChannel, Sector512};
use mqblk_memory::{GrantRef, GuestAddress, GuestMemory, PAGE_BYTES, Region};
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_ring::blkif::{
    Abi, BackRing, BlkifRequest, BlkifRing, FrontRing, IndirectRequest, RequestBody, RwRequest, Segment, operation,
    status,
};
use rustix::event::{EventfdFlags, eventfd};

use super::queue::QueueParts;
use super::segments::{IndirectPages, SegmentComposer};
use super::*;
use crate::setup::DataArea;
use crate::{DataSegment, DeviceError, SubmitError};

const PAGE: u64 = PAGE_BYTES as u64;
/// Number of data pages, and of indirect pages.
const PAGES: u64 = 64;

/// An event channel whose state the test can check.
#[derive(Debug)]
struct Channel {
    event: OwnedFd,
    notified: Arc<AtomicBool>,
    masked: Arc<AtomicBool>,
}

impl EventChannel for Channel {
    fn notify(&self) {
        self.notified.store(true, Ordering::SeqCst);
    }
    fn take(&self) {
        assert!(!self.masked.swap(true, Ordering::SeqCst), "an event came while masked");
        rustix::io::read(&self.event, &mut [0; 8]).unwrap();
    }
    fn unmask(&self) {
        assert!(self.masked.swap(false, Ordering::SeqCst), "unmasked twice");
    }
}

struct Rig {
    queue: BlkfrontQueue,
    back: BackRing,
    event: OwnedFd,
    notified: Arc<AtomicBool>,
    segments: Arc<GuestMemory>,
}

fn memory(pages: u64) -> Arc<GuestMemory> {
    let region = Region::shared("t", pages * PAGE, GuestAddress(0)).unwrap().0;
    Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
}

fn grants(first: u32, count: u64) -> Vec<GrantRef> {
    (first..first + count as u32).map(GrantRef).collect()
}

/// Returns a queue with a ring of one page. Its data pages have grants from 100 on, its indirect pages from 900 on.
fn rig(abi: Abi, depth: u16, max_segments: u16) -> Rig {
    let (ring, data, segments) = (memory(1), memory(PAGES), memory(PAGES));
    let resolve = || BlkifRing::resolve(&ring, GuestAddress(0), 1, abi).unwrap();
    let front = FrontRing::init(resolve());
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (notified, masked) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
    let channel = Channel { event: event.try_clone().unwrap(), notified: Arc::clone(&notified), masked };
    let indirect = (max_segments > MAX_SEGMENTS as u16)
        .then(|| IndirectPages::new(&segments, &grants(900, PAGES), IndirectPages::per_id(max_segments)));
    let queue = BlkfrontQueue::new(QueueParts {
        ring: front,
        channel: Box::new(channel),
        handle: 0xca00,
        depth,
        composer: SegmentComposer::new(grants(100, PAGES).into(), indirect, max_segments),
        memory: data,
        data: DataArea { start: GuestAddress(0), len: ByteLen(PAGES * PAGE) },
        guards: vec![],
    });
    Rig { queue, back: BackRing::attach(resolve()), event, notified, segments }
}

impl Rig {
    /// Returns the next request that the backend takes.
    fn request(&mut self) -> BlkifRequest {
        self.queue.publish();
        assert!(self.back.waiting().unwrap() > 0);
        let abi = self.back.abi();
        self.back.take().decode(abi)
    }

    fn respond(&mut self, id: u64, operation: u8, status: i16) {
        self.back.put_response(id, operation, status);
        let _ = self.back.publish();
    }

    fn reap(&mut self) -> Result<Option<BlkfrontCompletion>, DeviceError> {
        self.queue.poll()?;
        self.queue.reap()
    }
}

fn data_segment(address: u64, len: u32) -> DataSegment {
    DataSegment { address: GuestAddress(address), len }
}

fn segment(gref: u32, first_sect: u8, last_sect: u8) -> Segment {
    Segment { gref: GrantRef(gref), first_sect, last_sect }
}

fn of_transfer(request: &BlkifRequest) -> (RwRequest, &[Segment]) {
    let RequestBody::Rw(transfer) = &request.body else { panic!("{request:?}") };
    (*transfer, &transfer.segments[..transfer.nr_segments.into()])
}

#[test]
fn requests_are_encoded() {
    for abi in Abi::ALL {
        let mut rig = rig(abi, 32, 11);
        rig.queue.read(7, Sector512(80), data_segment(3 * PAGE, 4096)).unwrap();
        let request = rig.request();
        assert_eq!((request.operation, request.handle), (operation::READ, 0xca00));
        assert_eq!(
            (of_transfer(&request).0.sector, of_transfer(&request).1),
            (Sector512(80), &[segment(103, 0, 7)][..])
        );
        rig.respond(request.id, operation::READ, status::OKAY);
        assert_eq!(rig.reap().unwrap(), Some(BlkfrontCompletion { user_data: 7, status: BlkfrontStatus::Ok }));

        // From the last sector of a page, over a whole one, to the first three of the next; then some others.
        let data = [data_segment(5 * PAGE - 512, 512 + 4096 + 3 * 512), data_segment(512, 1024)];
        rig.queue.write_segments(8, Sector512(1), data).unwrap();
        let request = rig.request();
        let expected = [segment(104, 7, 7), segment(105, 0, 7), segment(106, 0, 2), segment(100, 1, 2)];
        assert_eq!((request.operation, of_transfer(&request).1), (operation::WRITE, &expected[..]));
        rig.respond(request.id, operation::WRITE, status::ERROR);
        assert_eq!(rig.reap().unwrap(), Some(BlkfrontCompletion { user_data: 8, status: BlkfrontStatus::IoError }));

        rig.queue.flush(9).unwrap();
        let request = rig.request();
        assert_eq!((request.operation, of_transfer(&request).1), (operation::FLUSH_DISKCACHE, &[][..]));
        rig.respond(request.id, operation::FLUSH_DISKCACHE, status::NOT_SUPPORTED);
        assert_eq!(rig.reap().unwrap(), Some(BlkfrontCompletion { user_data: 9, status: BlkfrontStatus::Unsupported }));

        rig.queue.barrier(10, Sector512(4), [data_segment(0, 512)]).unwrap();
        let request = rig.request();
        assert_eq!((request.operation, of_transfer(&request).1), (operation::WRITE_BARRIER, &[segment(100, 0, 0)][..]));
        rig.queue.discard(11, Sector512(5), 1 << 40, true).unwrap();
        let discard = rig.request();
        assert_eq!(discard.body, RequestBody::Discard { flag: 1, sector: Sector512(5), sectors: 1 << 40 });
        rig.respond(discard.id, operation::DISCARD, status::OKAY);
        rig.respond(request.id, operation::WRITE_BARRIER, status::OKAY);
        assert_eq!(rig.reap().unwrap().unwrap().user_data, 11);
        assert_eq!(rig.reap().unwrap().unwrap().user_data, 10);
        assert_eq!(rig.reap().unwrap(), None);
    }
}

#[test]
fn many_segments_are_in_the_ids_indirect_pages() {
    for abi in Abi::ALL {
        let mut rig = rig(abi, 8, 32);
        assert_eq!(rig.queue.max_segments(), 32);
        rig.queue.read(1, Sector512(0), data_segment(0, 11 * 4096)).unwrap();
        assert_eq!(of_transfer(&rig.request()).1.len(), 11, "still in the request");
        let len = 31 * 4096;
        rig.queue.read(2, Sector512(16), data_segment(PAGE - 512, len)).unwrap();
        let request = rig.request();
        let RequestBody::Indirect(IndirectRequest { operation, nr_segments, sector, pages }) = request.body else {
            panic!("{request:?}")
        };
        assert_eq!((request.operation, operation, nr_segments, sector), (6, operation::READ, 32, Sector512(16)));
        assert_eq!(pages[0], GrantRef(901), "of the second id");
        let entry = |index: u64| {
            let mut bytes = [0; 8];
            rig.segments.read(GuestAddress(PAGE + index * 8), &mut bytes).unwrap();
            Segment::from_bytes(bytes)
        };
        assert_eq!(entry(0), segment(100, 7, 7));
        (1..31).for_each(|index| assert_eq!(entry(index), segment(100 + index as u32, 0, 7)));
        assert_eq!(entry(31), segment(131, 0, 6));
        // The response has the operation inside the indirect request.
        rig.respond(request.id, operation::READ, status::OKAY);
        assert_eq!(rig.reap().unwrap(), Some(BlkfrontCompletion { user_data: 2, status: BlkfrontStatus::Ok }));
        assert_eq!(
            rig.queue.read(3, Sector512(0), data_segment(512, 32 * 4096)),
            Err(SubmitError::TooManySegments(32))
        );
        assert_eq!(
            rig.queue.barrier(3, Sector512(0), [data_segment(0, 12 * 4096)]),
            Err(SubmitError::TooManySegments(11))
        );
    }
}

#[test]
fn an_id_has_enough_indirect_pages() {
    let mut rig = rig(Abi::X86_64, 32, 1025);
    // 64 pages, three for each id.
    let submitted =
        (0..40).take_while(|user_data| rig.queue.read(*user_data, Sector512(0), data_segment(0, 512)).is_ok()).count();
    assert_eq!(submitted, 21);
    let sectors = (0..1025).map(|at| data_segment(at % 500 * 512, 512));
    assert_eq!(rig.queue.write_segments(0, Sector512(0), sectors.clone()), Err(SubmitError::Full));
    let first = rig.request();
    rig.respond(first.id, operation::READ, status::OKAY);
    rig.reap().unwrap();
    rig.queue.write_segments(50, Sector512(0), sectors).unwrap();
    for _ in 1..21 {
        rig.request();
    }
    let RequestBody::Indirect(IndirectRequest { nr_segments, pages, .. }) = rig.request().body else {
        panic!("indirect")
    };
    assert_eq!((nr_segments, &pages[..4]), (1025, &[900, 901, 902, 0].map(GrantRef)[..]));
    let mut bytes = [0; 8];
    rig.segments.read(GuestAddress(2 * PAGE), &mut bytes).unwrap();
    assert_eq!(Segment::from_bytes(bytes), segment(100 + 24 / 8, 0, 0), "the last one, sector 24");
}

#[test]
fn invalid_data_is_rejected() {
    let mut rig = rig(Abi::X86_64, 32, 11);
    for (address, len) in [(1, 512), (0, 511), (PAGES * PAGE, 512), (PAGES * PAGE - 512, 1024), (u64::MAX - 511, 512)] {
        let found = rig.queue.read(0, Sector512(0), data_segment(address, len));
        assert_eq!(found, Err(SubmitError::NotGranted { address, len }));
    }
    assert_eq!(rig.queue.read(0, Sector512(0), data_segment(0, 0)), Err(SubmitError::Empty));
    assert_eq!(rig.queue.read_segments(0, Sector512(0), []), Err(SubmitError::Empty));
    assert_eq!(rig.queue.write(0, Sector512(0), data_segment(512, 11 * 4096)), Err(SubmitError::TooManySegments(11)));
    assert_eq!((rig.queue.in_flight(), rig.queue.unpublished()), (0, 0));
}

#[test]
fn a_full_ring_rejects_requests_and_ids_are_reused_last_first() {
    for (depth, capacity) in [(5, 5), (32, 32), (1000, 32)] {
        let mut rig = rig(Abi::X86_64, depth, 11);
        let submitted = (0..100)
            .take_while(|user_data| rig.queue.read(*user_data, Sector512(0), data_segment(0, 512)).is_ok())
            .count();
        assert_eq!(submitted, capacity);
        assert_eq!(rig.queue.flush(0), Err(SubmitError::Full));
        let ids: Vec<u64> = (0..capacity).map(|_| rig.request().id).collect();
        for id in [ids[3], ids[1]] {
            rig.respond(id, operation::READ, status::OKAY);
        }
        assert_eq!(rig.queue.poll().unwrap(), 2);
        let users = [(); 2].map(|()| rig.queue.reap().unwrap().unwrap().user_data);
        assert_eq!(users, [3, 1]);
        rig.queue.flush(0).unwrap();
        assert_eq!(rig.request().id, ids[1]);
    }
}

#[test]
fn each_invalid_response_disables_the_queue_and_is_reported() {
    type FaultCase<'a> = (&'a dyn Fn(&mut Rig, u64), &'a str);
    let wrong: [FaultCase<'_>; 6] = [
        (
            &|rig, id| {
                rig.back.put_response(id, 0, 0);
                rig.respond(id, 0, 0);
            },
            "the backend violates the protocol: it claims more responses than there are requests",
        ),
        (&|rig, _| rig.respond(32, 0, 0), "response: found id 32, expected one below 32"),
        (&|rig, _| rig.respond(u64::MAX, 0, 0), "response: found id 18446744073709551615, expected one below 32"),
        (&|rig, id| rig.respond(id + 1, 0, 0), "response: found id 1, expected that of a request in flight"),
        (&|rig, id| rig.respond(id, 6, 0), "response to request 0: found operation 6, expected 0"),
        (&|rig, id| rig.respond(id, 0, -3), "response to request 0: found status -3, expected 0, -1 or -2"),
    ];
    for (inject, expected) in wrong {
        let mut rig = rig(Abi::X86_64, 32, 11);
        rig.queue.read(0, Sector512(0), data_segment(0, 512)).unwrap();
        let id = rig.request().id;
        inject(&mut rig, id);
        let found = rig.reap().unwrap_err();
        assert_eq!(found.to_string(), expected);
        // The queue stays disabled.
        assert_eq!((rig.queue.poll(), rig.queue.reap()), (Err(found), Err(found)));
        assert_eq!(rig.queue.flush(1), Err(SubmitError::Disabled));
        assert!(rig.queue.arm(1).is_err());
    }
}

#[test]
fn a_duplicate_response_is_detected() {
    let mut rig = rig(Abi::X86_64, 32, 11);
    for user_data in 0..2 {
        rig.queue.read(user_data, Sector512(0), data_segment(0, 512)).unwrap();
    }
    let id = rig.request().id;
    rig.respond(id, operation::READ, status::OKAY);
    rig.respond(id, operation::READ, status::OKAY);
    assert_eq!(rig.reap().unwrap().unwrap().user_data, 0);
    assert_eq!(rig.reap(), Err(ResponseError::NotOutstanding(id).into()));
}

#[test]
fn a_thread_sleeps_until_enough_responses_came() {
    let Rig { mut back, event, notified, queue, .. } = rig(Abi::X86_64, 32, 11);
    let mut set = BlkfrontQueueSet::new(vec![(queue, event.try_clone().unwrap())]).unwrap();
    set.wait(1).unwrap();
    let waker = set.waker().unwrap();
    for round in 0..50 {
        for user_data in 0..8 {
            set.queues_mut()[0].read(user_data, Sector512(0), data_segment(0, 512)).unwrap();
        }
        set.queues_mut()[0].publish();
        assert!(round != 0 || notified.load(Ordering::SeqCst), "the backend of a fresh ring sleeps");
        let (back, event) = (&mut back, &event);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while back.waiting().unwrap() > 0 {
                    let id = back.take().decode(Abi::X86_64).id;
                    back.put_response(id, operation::READ, status::OKAY);
                    if back.publish() == mqblk_core::PublishResult::Wanted {
                        rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
                    }
                }
            });
            let queue = |set: &mut BlkfrontQueueSet| set.queues_mut()[0].poll().unwrap();
            while queue(&mut set) < 8 {
                set.wait(8).unwrap();
            }
        });
        while set.queues_mut()[0].reap().unwrap().is_some() {}
        assert_eq!(set.queues_mut()[0].in_flight(), 0);
    }
    assert!(set.calls() <= 50, "{} events", set.calls());
    set.queues_mut()[0].flush(0).unwrap();
    waker.wake();
    set.wait(1).unwrap();
}
