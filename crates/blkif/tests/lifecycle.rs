//! Lifecycle of a queue: events, broken rings, resume, replay, and several rings.

mod rig;

use std::sync::atomic::Ordering;

use mqblk_blkif::journal::Journal;
use mqblk_blkif::{ResolvedGrantMode, Vbd};
use mqblk_core::{ArmResult, GuestQueue, PublishResult, PullEnd};
use mqblk_memory::create_memfd;
use mqblk_ring::blkif::{Abi, RingPosition, operation as o, status};
use rig::backend::TestBackend;
use rig::domain::Domain;
use rig::front::{Front, direct, segment};
use rig::{MODES, options, rig};

fn grant_pages(domain: &Domain, count: u32) {
    (1..=count).for_each(|page| domain.grant(page, page, true));
}

#[test]
fn events_are_requested_late_and_unmasked_once() {
    let (domain, mut front, mut back) = rig(options(ResolvedGrantMode::Copy));
    grant_pages(&domain, 1);
    let count = |back: &TestBackend| {
        let channel = &back.channel;
        [&channel.taken, &channel.unmasked, &channel.sent].map(|count| count.load(Ordering::Relaxed))
    };
    let one = [segment(1, 0, 7)];
    assert!(front.send(&direct(1, o::READ, 0, &one)), "a fresh ring wants an event");
    assert_eq!(back.queue.arm(), ArmResult::WorkWaiting, "the request was there before");
    back.turn();
    assert_eq!(count(&back), [0, 1, 1], "the channel starts masked; the frontend has requested an event");
    assert_eq!(back.queue.arm(), ArmResult::Sleepable);
    assert_eq!(count(&back), [0, 1, 1], "no event since: the channel is not masked");
    assert!(front.send(&direct(2, o::READ, 0, &one)), "an event");
    back.queue.disarm();
    assert_eq!(count(&back)[0], 1);
    back.turn();
    assert!(!front.send(&direct(3, o::READ, 0, &one)), "while it is polled no event is requested");
    back.turn();
    assert_eq!(count(&back)[1], 1, "and the channel stays masked");
    assert_eq!(back.queue.arm(), ArmResult::Sleepable);
    assert_eq!(count(&back)[1], 2);
    let counters = back.queue.grant_counters();
    assert_eq!((counters.events_received, counters.events_sent), (1, count(&back)[2]));
    // The frontend requests no event for the next two.
    front.responses();
    assert_eq!(front.ring.arm(3), Ok(0));
    for id in 4..=6 {
        front.send(&direct(id, o::READ, 0, &one));
        back.pull();
        back.finish(0);
        assert_eq!(back.publish(), if id == 6 { PublishResult::Wanted } else { PublishResult::Suppressed });
    }
    assert_eq!(back.publish(), PublishResult::Nothing);
}

#[test]
fn a_ring_with_a_bad_index_is_broken_and_its_requests_still_complete() {
    for (index, broken) in [(33, true), (34, true), (u32::MAX, true), (1 << 31, true), (32, false), (1, false)] {
        for mode in MODES {
            let (domain, mut front, mut back) = rig(options(mode));
            grant_pages(&domain, 1);
            front.send(&direct(1, o::READ, 0, &[segment(1, 0, 7)]));
            back.pull();
            front.ring.publish_index(index);
            let pulled = back.pull();
            assert_eq!(matches!(pulled, PullEnd::Broken(_)), broken, "{index}: {pulled:?}");
            while !back.intake.pending.is_empty() {
                back.finish(0);
            }
            back.publish();
            back.close();
            assert_eq!((domain.mapped(), back.queue.grant_counters().mapped_pages), (0, 0));
        }
    }
}

#[test]
fn a_new_queue_resumes_at_the_old_position() {
    let (domain, mut front, mut back) = rig(options(ResolvedGrantMode::Copy));
    grant_pages(&domain, 1);
    for id in 0..50 {
        front.send(&direct(id, o::READ, 0, &[segment(1, 0, 7)]));
        back.turn();
        assert_eq!(front.responses().len(), 1);
    }
    let position = back.queue.position();
    assert_eq!(position, RingPosition { req_cons: 50, rsp_prod: 50 });
    back.close();
    let mut back = TestBackend::resumed(&back.vbd, &domain, &front, position, None, vec![]);
    front.send(&direct(51, o::WRITE, 0, &[segment(1, 0, 7)]));
    back.run();
    assert_eq!(front.responses(), [(51, o::WRITE, status::OKAY)]);
    back.close();
}

#[test]
fn replayed_requests_come_first_and_are_validated_again() {
    for (mode, abi) in MODES.into_iter().flat_map(|mode| Abi::ALL.map(|abi| (mode, abi))) {
        let mut options = options(mode);
        options.abi = abi;
        let (domain, vbd) = (Domain::new(64), Vbd::new(options));
        grant_pages(&domain, 40);
        let mut front = Front::new(&domain, abi, 1);
        let file = create_memfd("journal", Journal::file_len(32)).unwrap();
        let journal = Journal::create(&file, 32, 7, RingPosition::default()).unwrap();
        let mut back = TestBackend::resumed(&vbd, &domain, &front, RingPosition::default(), Some(journal), vec![]);
        for id in 0..20 {
            front.put(&direct(id, o::WRITE, id * 8, &[segment(id as u32 + 1, 0, 7)]));
        }
        let _ = front.ring.publish();
        back.pull_all();
        // Out of order: responses overwrite requests.
        for at in [7, 3, 3, 10] {
            back.finish(at);
        }
        back.publish();
        let answered: Vec<u64> = front.responses().into_iter().map(|(id, ..)| id).collect();
        assert_eq!(answered.len(), 4);
        // The process is killed, which ends its mappings. A grant ends before the next process starts.
        front.put(&direct(20, o::WRITE, 160, &[segment(21, 0, 7)]));
        let _ = front.ring.publish();
        let gone = (0..20).find(|id| !answered.contains(id)).unwrap();
        drop(back);
        let (journal, recovery) =
            Journal::resume(&file, 32, 7, front.back_end(RingPosition::default()).published()).unwrap();
        let replayed: Vec<u64> = recovery.replay.iter().map(|(_, raw)| raw.decode(abi).id).collect();
        let open: Vec<u64> = (0..20).filter(|id| !answered.contains(id)).collect();
        assert_eq!(replayed, open);
        let mut next_options = mqblk_blkif::VbdOptions::clone(vbd.options());
        next_options.rings = 1;
        let vbd = Vbd::new(next_options);
        let _ = domain.end(gone as u32 + 1);
        let mut back = TestBackend::resumed(&vbd, &domain, &front, recovery.position, Some(journal), recovery.replay);
        assert_eq!(back.queue.arm(), ArmResult::WorkWaiting, "without an event");
        back.run();
        let mut found = front.responses();
        found.sort_unstable();
        let expected = |id: u64| (id, o::WRITE, if id == gone { status::ERROR } else { status::OKAY });
        assert_eq!(found, open.iter().copied().chain([20]).map(expected).collect::<Vec<_>>());
        back.close();
        // All requests have responses: nothing to replay.
        let (_, recovery) = Journal::resume(&file, 32, 7, front.back_end(RingPosition::default()).published()).unwrap();
        assert!(recovery.replay.is_empty());
        assert_eq!(recovery.position, RingPosition { req_cons: 21, rsp_prod: 21 });
    }
}

#[test]
fn a_full_ring_of_the_largest_requests() {
    for mode in MODES {
        let mut options = options(mode);
        options.max_indirect_segments = 64;
        options.persistent_max = 500;
        let (domain, vbd) = (Domain::new(700), Vbd::new(options));
        grant_pages(&domain, 600);
        let mut front = Front::new(&domain, Abi::X86_64, 16);
        let mut back = TestBackend::new(&vbd, &domain, &front);
        assert_eq!(back.queue.depth(), 512);
        let segments: Vec<_> = (1..=64).map(|gref| segment(gref * 7 % 530 + 1, 0, 7)).collect();
        for round in 0..3 {
            for id in 0..512 {
                front.write_segments(&segments, &[(600, 600)]);
                front.put(&rig::front::indirect(id, o::WRITE, 0, 64, &[600]));
            }
            let _ = front.ring.publish();
            back.pull_all();
            assert_eq!(back.intake.pending.len(), 512, "{mode:?} round {round}");
            while let pending @ 1.. = back.intake.pending.len() {
                back.finish(pending / 2);
            }
            back.publish();
            assert!(front.statuses().into_values().all(|status| status == status::OKAY));
        }
        back.close();
        assert_eq!((domain.mapped(), vbd.options().budget.used()), (0, 0));
    }
}

#[test]
fn a_barrier_orders_all_rings_and_does_not_wait_for_closed_ones() {
    for mode in MODES {
        let mut options = options(mode);
        options.rings = 3;
        let (domain, vbd) = (Domain::new(64), Vbd::new(options));
        grant_pages(&domain, 8);
        let mut rings: Vec<(Front, TestBackend)> = (0..3)
            .map(|_| {
                let front = Front::new(&domain, Abi::X86_64, 1);
                let back = TestBackend::new(&vbd, &domain, &front);
                (front, back)
            })
            .collect();
        let one = |gref| [segment(gref, 0, 7)];
        // Ring 0 has a write in flight, ring 1 a write that is not taken yet, ring 2 the barrier.
        rings[0].0.send(&direct(1, o::WRITE, 0, &one(1)));
        rings[0].1.pull_all();
        rings[1].0.send(&direct(2, o::WRITE, 8, &one(2)));
        rings[2].0.send(&direct(3, o::WRITE_BARRIER, 16, &one(3)));
        rings[2].1.pull_all();
        for (_, back) in &mut rings {
            assert_eq!(back.pull(), PullEnd::Empty { taken: 0 });
            assert!(back.handle_wakeup());
        }
        // Ring 1 took its earlier write; later requests wait.
        assert_eq!(rings[1].1.intake.pending.len(), 1, "{mode:?}");
        rings[1].0.send(&direct(4, o::WRITE, 24, &one(4)));
        assert_eq!(rings[1].1.pull(), PullEnd::Empty { taken: 0 });
        assert_eq!(rings[1].1.queue.arm(), ArmResult::Sleepable);
        rings[1].1.finish(0);
        rings[1].1.publish();
        rings[1].1.handle_wakeup();
        assert_eq!(rings[2].1.queue.blocked(), 1, "ring 0 is not done");
        // Ring 0 closes: its write is completed, and the barrier does not wait for it any more.
        rings[0].1.finish(0);
        rings[0].1.publish();
        rings[0].1.close();
        rings[2].1.handle_wakeup();
        assert_eq!((rings[2].1.queue.blocked(), rings[2].1.intake.pending.len()), (0, 1), "{mode:?}");
        rings[2].1.finish(0);
        rings[2].1.finish(0);
        rings[2].1.publish();
        assert_eq!(rings[2].0.responses(), [(3, o::WRITE_BARRIER, status::OKAY)]);
        rings[1].1.run();
        assert_eq!(rings[1].0.statuses().len(), 2);
        for (_, back) in &mut rings[1..] {
            back.close();
        }
        assert_eq!(domain.mapped(), 0);
    }
}

#[test]
fn a_barrier_waits_until_earlier_responses_are_visible() {
    let mut options = options(ResolvedGrantMode::Copy);
    options.rings = 2;
    let (domain, vbd) = (Domain::new(64), Vbd::new(options));
    let ring = || {
        let front = Front::new(&domain, Abi::X86_64, 1);
        let back = TestBackend::new(&vbd, &domain, &front);
        (front, back)
    };
    let ((mut front, mut back), (mut other_front, mut other)) = (ring(), ring());
    // A malformed request, which the other ring completes when it takes it.
    other_front.send(&direct(1, o::READ, 0, &[]));
    front.send(&direct(2, o::WRITE_BARRIER, 0, &[]));
    back.pull_all();
    other.queue.woken(&mut other.context, &mut other.intake, true).unwrap();
    while back.handle_wakeup() {}
    assert_eq!((other.intake.bad, back.queue.blocked()), (1, 1));
    other.publish();
    other.handle_wakeup();
    while back.handle_wakeup() {}
    assert_eq!((back.queue.blocked(), back.intake.pending.len()), (0, 1));
    back.run();
    other.run();
    assert_eq!(front.responses(), [(2, o::WRITE_BARRIER, status::OKAY)]);
    assert_eq!(other_front.responses(), [(1, o::READ, status::ERROR)]);
    back.close();
    other.close();
}

#[test]
fn a_barrier_waits_for_unopened_rings_unless_they_are_skipped() {
    let domain = Domain::new(16);
    let vbd = Vbd::new(mqblk_blkif::VbdOptions { rings: 2, ..options(ResolvedGrantMode::Copy) });
    let mut front = Front::new(&domain, Abi::X86_64, 1);
    let mut back = TestBackend::new(&vbd, &domain, &front);
    front.send(&direct(1, o::WRITE_BARRIER, 0, &[]));
    back.run();
    assert_eq!((front.responses(), back.queue.blocked()), (vec![], 1), "the other ring may have requests to replay");
    vbd.skip_unopened_rings();
    back.run();
    assert_eq!((front.responses(), back.queue.blocked()), (vec![(1, o::WRITE_BARRIER, status::OKAY)], 0));
    back.close();
}
