//! Every form of request, valid and malformed, in all layouts and grant modes.

mod rig;

use mqblk_blkif::{ResolvedGrantMode, VbdOptions};
use mqblk_core::{BlockSize, Errno, Op, Outcome};
use mqblk_memory::GrantStatus;
use mqblk_ring::blkif::{Abi, BlkifRequest, Segment, operation as o, status};
use rig::front::{direct, discard, indirect, segment};
use rig::{MODES, PAGE, SECTOR, SECTORS, options, rig};

/// Content of a sector of the disk, or of a page to write.
fn pattern(sector: u64, salt: u8) -> Vec<u8> {
    (0..SECTOR).map(|at| (sector as u8).wrapping_mul(31) ^ (at as u8) ^ salt).collect()
}

fn patterns(sector: u64, sectors: u64, salt: u8) -> Vec<u8> {
    (sector..sector + sectors).flat_map(|sector| pattern(sector, salt)).collect()
}

fn for_each_mode(mut test: impl FnMut(VbdOptions, String)) {
    for mode in MODES {
        for abi in Abi::ALL {
            let options = VbdOptions { abi, ..options(mode) };
            test(options, format!("{} {}", mode.word(), abi.protocol()));
        }
    }
}

/// Grants pages 1.. as grants 1.., and read-only as grants 1001.. .
fn grant_pages(domain: &rig::domain::Domain, count: u32) {
    for page in 1..=count {
        domain.grant(page, page, true);
        domain.grant(1000 + page, page, false);
    }
}

/// Several segment lists: whole pages, parts of pages, one sector.
fn segment_lists() -> Vec<Vec<Segment>> {
    let whole = |count: u32| (1..=count).map(|gref| segment(gref, 0, 7)).collect::<Vec<_>>();
    vec![
        whole(1),
        whole(2),
        whole(11),
        vec![segment(3, 2, 2)],
        vec![segment(1, 7, 7), segment(2, 0, 7), segment(9, 0, 0)],
        vec![segment(4, 3, 5), segment(5, 0, 1), segment(6, 6, 7)],
        // The same page twice, different sectors.
        vec![segment(4, 0, 1), segment(4, 4, 6)],
    ]
}

fn sectors(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.last_sect - segment.first_sect) + 1).sum()
}

/// The bytes in the segments, in order.
fn gather(domain: &rig::domain::Domain, segments: &[Segment]) -> Vec<u8> {
    let part = |segment: &Segment| {
        domain.read(segment.gref.0 % 1000, u64::from(segment.first_sect) * SECTOR, sectors(&[*segment]) * SECTOR)
    };
    segments.iter().flat_map(part).collect()
}

fn scatter(domain: &rig::domain::Domain, segments: &[Segment], bytes: &[u8]) {
    let mut at = 0;
    for segment in segments {
        let len = (sectors(&[*segment]) * SECTOR) as usize;
        domain.write(segment.gref.0 % 1000, u64::from(segment.first_sect) * SECTOR, &bytes[at..at + len]);
        at += len;
    }
}

#[test]
fn reads_bring_the_right_bytes_and_nothing_else() {
    for_each_mode(|options, what| {
        let stays_mapped = options.persistent;
        let (domain, mut front, mut back) = rig(options);
        grant_pages(&domain, 300);
        back.write_disk(0, &patterns(0, SECTORS, 0));
        for (id, segments) in (1..).zip(segment_lists()) {
            (1..=11).for_each(|page| domain.fill(page, 0xee));
            let sector = id * 100 + 3;
            front.send(&direct(id, o::READ, sector, &segments));
            back.run();
            assert_eq!(front.responses(), [(id, o::READ, status::OKAY)], "{what}");
            assert_eq!(gather(&domain, &segments), patterns(sector, sectors(&segments), 0), "{what}");
            let touched: usize =
                (1..=11).flat_map(|page| domain.read(page, 0, PAGE)).filter(|byte| *byte == 0xee).count();
            let outside = 11 * PAGE - sectors(&segments) * SECTOR;
            assert!(touched as u64 >= outside, "{what}: bytes outside the segments were written");
            assert!(stays_mapped || domain.mapped() == 0, "{what}");
        }
        for count in [1_u16, 12, 255, 256] {
            let segments: Vec<Segment> = (1..=count.into()).map(|gref| segment(gref, 0, 7)).collect();
            front.send_indirect(9, o::READ, 5, &segments, &[(300, 300)]);
            back.run();
            assert_eq!(front.responses(), [(9, o::READ, status::OKAY)], "{what}: the inner operation");
            assert_eq!(gather(&domain, &segments), patterns(5, u64::from(count) * 8, 0), "{what} {count}");
        }
        back.close();
        assert_eq!((domain.mapped(), back.queue.grant_counters().mapped_pages), (0, 0), "{what}");
        assert_eq!(back.vbd.options().budget.used(), 0);
    });
}

#[test]
fn writes_store_the_right_bytes_at_the_right_place() {
    for_each_mode(|options, what| {
        let persistent = options.persistent;
        let (domain, mut front, mut back) = rig(options);
        grant_pages(&domain, 300);
        // A persistent grant is mapped for both directions; others may be read-only for a write.
        let add = if persistent { 0 } else { 1000 };
        for (id, mut segments) in (1..).zip(segment_lists()) {
            let sector = id * 100 + 3;
            scatter(&domain, &segments, &patterns(sector, sectors(&segments), 7));
            // A page in two segments holds the last data: read it back.
            let bytes = gather(&domain, &segments);
            segments.iter_mut().for_each(|segment| segment.gref.0 += add);
            front.send(&direct(id, o::WRITE, sector, &segments));
            back.run();
            assert_eq!(front.responses(), [(id, o::WRITE, status::OKAY)], "{what}");
            assert_eq!(back.read_disk(sector, sectors(&segments)), bytes, "{what}");
        }
        for count in [1_u16, 11, 200, 256] {
            let segments: Vec<Segment> = (1..=count.into()).map(|gref| segment(gref + add, 0, 7)).collect();
            let bytes = patterns(u64::from(count), u64::from(count) * 8, 9);
            scatter(&domain, &segments, &bytes);
            front.send_indirect(9, o::WRITE, 77, &segments, &[(300 + add, 300)]);
            back.run();
            assert_eq!(front.responses(), [(9, o::WRITE, status::OKAY)], "{what}");
            assert!(back.read_disk(77, u64::from(count) * 8) == bytes, "{what} {count}");
        }
        let transfers = &back.operations.transfers;
        assert!(transfers.iter().all(|(op, ..)| *op == Op::Write { fua: false }), "{what}");
        if !persistent {
            assert_eq!(transfers.last().unwrap().3, 1, "{what}: adjacent whole pages are one buffer segment");
        }
        back.close();
        assert_eq!(domain.mapped(), 0, "{what}");
    });
}

#[test]
fn an_indirect_request_of_several_pages_of_segments() {
    for mode in MODES {
        let mut options = options(mode);
        options.max_indirect_segments = 1024;
        let (domain, mut front, mut back) = rig(options);
        grant_pages(&domain, 602);
        back.write_disk(0, &patterns(0, SECTORS, 0));
        let segments: Vec<Segment> = (1..=600).map(|gref| segment(gref % 400 + 1, 1, 6)).collect();
        front.send_indirect(1, o::READ, 8, &segments, &[(601, 601), (602, 602)]);
        back.run();
        assert_eq!(front.responses(), [(1, o::READ, status::OKAY)]);
        let last = segments.last().unwrap();
        assert_eq!(gather(&domain, &[*last]), patterns(8 + 599 * 6, 6, 0), "{mode:?}");
        // The second indirect page has no grant.
        front.send_indirect(2, o::READ, 8, &segments, &[(601, 601), (999, 602)]);
        back.run();
        assert_eq!(front.responses(), [(2, o::READ, status::ERROR)], "{mode:?}");
        back.close();
        assert_eq!(domain.mapped(), 0);
    }
}

#[test]
fn flushes_and_barriers_with_and_without_data() {
    for_each_mode(|options, what| {
        let (domain, mut front, mut back) = rig(options);
        grant_pages(&domain, 4);
        let data = [segment(1, 0, 7), segment(2, 0, 0)];
        scatter(&domain, &data, &patterns(0, 9, 1));
        front.send(&direct(1, o::FLUSH_DISKCACHE, 0, &[]));
        back.run();
        front.send(&direct(2, o::FLUSH_DISKCACHE, 50, &data));
        back.run();
        front.send(&direct(3, o::WRITE_BARRIER, 0, &[]));
        back.run();
        front.send(&direct(4, o::WRITE_BARRIER, 70, &data));
        back.run();
        let expected = [(1, o::FLUSH_DISKCACHE), (2, o::FLUSH_DISKCACHE), (3, o::WRITE_BARRIER), (4, o::WRITE_BARRIER)];
        assert_eq!(front.responses(), expected.map(|(id, op)| (id, op, status::OKAY)), "{what}");
        assert_eq!((back.operations.flushes, back.operations.transfers.len()), (4, 2), "{what}");
        for sector in [50, 70] {
            assert_eq!(back.read_disk(sector, 9), patterns(0, 9, 1), "{what}");
        }
        assert_eq!(back.queue.grant_counters().barriers, 2);
        // A write that fails is not flushed.
        back.outcomes.push_back(Outcome::Failed(Errno(5)));
        front.send(&direct(5, o::FLUSH_DISKCACHE, 50, &data));
        back.run();
        assert_eq!(front.responses(), [(5, o::FLUSH_DISKCACHE, status::ERROR)], "{what}");
        assert_eq!(back.operations.flushes, 4, "{what}");
        back.close();
        assert_eq!(domain.mapped(), 0, "{what}");
    });
}

#[test]
fn a_barrier_waits_and_blocks_later_requests() {
    for mode in MODES {
        let (domain, mut front, mut back) = rig(options(mode));
        grant_pages(&domain, 4);
        let data = [segment(1, 0, 7)];
        front.put(&direct(1, o::WRITE, 0, &data));
        front.put(&direct(2, o::WRITE_BARRIER, 8, &data));
        front.put(&direct(3, o::READ, 16, &data));
        let _ = front.ring.publish();
        back.pull_all();
        back.handle_wakeup();
        assert_eq!(back.intake.pending.len(), 1, "the barrier waits for the write");
        assert_eq!(mqblk_core::GuestQueue::blocked(&back.queue), 1);
        assert_eq!(
            mqblk_core::GuestQueue::arm(&mut back.queue),
            mqblk_core::ArmResult::Sleepable,
            "no spinning meanwhile"
        );
        back.finish(0);
        back.handle_wakeup();
        assert!(back.intake.pending.is_empty(), "the write's response is not visible yet");
        back.publish();
        assert_eq!(front.statuses().len(), 1);
        back.handle_wakeup();
        assert_eq!(back.intake.pending.len(), 1);
        back.pull_all();
        back.finish(0);
        assert_eq!(back.intake.pending[0].op, Op::Flush, "and nothing else");
        back.pull_all();
        back.finish(0);
        back.pull_all();
        assert!(back.intake.pending.is_empty(), "the barrier's response is not visible yet");
        back.publish();
        // The queue is armed: its waker makes it continue.
        back.handle_wakeup();
        assert_eq!(back.intake.pending.len(), 1, "the read");
        back.finish(0);
        back.publish();
        assert_eq!(front.statuses().len(), 2);
        let unmasked = back.channel.unmasked.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(unmasked, 1, "the event channel is unmasked when it continues");
        assert!(front.send(&direct(4, o::READ, 0, &data)), "and an event is requested");
        back.run();
        back.close();
        assert_eq!(domain.mapped(), 0);
    }
}

#[test]
fn discards_are_split_to_the_storage_s_limit() {
    for_each_mode(|options, what| {
        let (_, mut front, mut back) = rig(options);
        front.send(&discard(1, 0, 8, 16));
        back.run();
        front.send(&discard(2, 1, 0, 300));
        back.run();
        front.send(&discard(3, 0, SECTORS, 0));
        back.run();
        let statuses: Vec<i16> = front.responses().into_iter().map(|(_, _, status)| status).collect();
        assert_eq!(statuses, [status::OKAY; 3], "{what}");
        let most = 64 << 10;
        let expected = [
            (false, 8 * SECTOR, 16 * SECTOR),
            (true, 0, most),
            (true, most, most),
            (true, 2 * most, 300 * SECTOR - 2 * most),
        ];
        assert_eq!(back.operations.discards, expected, "{what}");
        // The second part fails: no third.
        back.outcomes.extend([Outcome::Done(mqblk_core::ByteLen(most)), Outcome::NoSpace]);
        front.send(&discard(4, 0, 0, 300));
        back.run();
        assert_eq!(front.responses(), [(4, o::DISCARD, status::ERROR)], "{what}");
        assert_eq!(back.operations.discards.len(), 4);
        back.close();
    });
}

/// A change of the options, a request, and its expected status.
type MalformedCase = (fn(&mut VbdOptions), BlkifRequest, i16);

fn malformed_cases() -> Vec<MalformedCase> {
    let none: fn(&mut VbdOptions) = |_| {};
    let read_only: fn(&mut VbdOptions) = |options| options.geometry.read_only = true;
    let large_blocks: fn(&mut VbdOptions) = |options| options.geometry.logical_block = BlockSize::B4096;
    let one = [segment(1, 0, 7)];
    let (error, unsupported) = (status::ERROR, status::NOT_SUPPORTED);
    let with_count = |count: u8| {
        let mut request = direct(1, o::READ, 0, &one);
        if let mqblk_ring::blkif::RequestBody::Rw(transfer) = &mut request.body {
            transfer.nr_segments = count;
        }
        request
    };
    let named = |operation: u8| BlkifRequest {
        operation,
        ..BlkifRequest { body: mqblk_ring::blkif::RequestBody::Unknown, ..direct(1, 0, 0, &[]) }
    };
    vec![
        // Numbers of segments.
        (none, direct(1, o::READ, 0, &[]), error),
        (none, direct(1, o::WRITE, 0, &[]), error),
        (none, with_count(12), error),
        (none, with_count(255), error),
        // Segments.
        (none, direct(1, o::READ, 0, &[segment(1, 0, 8)]), error),
        (none, direct(1, o::READ, 0, &[segment(1, 8, 8)]), error),
        (none, direct(1, o::READ, 0, &[segment(1, 255, 255)]), error),
        (none, direct(1, o::READ, 0, &[segment(1, 3, 2)]), error),
        (none, direct(1, o::WRITE, 0, &[segment(1, 0, 7), segment(2, 7, 0)]), error),
        // Ranges.
        (none, direct(1, o::READ, SECTORS - 7, &one), error),
        (none, direct(1, o::WRITE, SECTORS, &one), error),
        (none, direct(1, o::READ, u64::MAX, &one), error),
        (none, direct(1, o::READ, 1 << 55, &one), error),
        (none, direct(1, o::READ, (1 << 55) - 1, &one), error),
        (none, direct(1, o::FLUSH_DISKCACHE, SECTORS, &one), error),
        (none, direct(1, o::WRITE_BARRIER, SECTORS, &one), error),
        // Blocks.
        (large_blocks, direct(1, o::READ, 4, &one), error),
        (large_blocks, direct(1, o::READ, 8, &[segment(1, 0, 3), segment(2, 4, 7)]), error),
        (large_blocks, discard(1, 0, 4, 8), error),
        (large_blocks, discard(1, 0, 8, 4), error),
        // Grants.
        (none, direct(1, o::READ, 0, &[segment(500, 0, 7)]), error),
        (none, direct(1, o::WRITE, 0, &[segment(1, 0, 7), segment(500, 0, 7)]), error),
        (none, direct(1, o::READ, 0, &[segment(1001, 0, 7)]), error),
        (none, direct(1, o::READ, 0, &[segment(u32::MAX, 0, 7)]), error),
        // Not permitted.
        (read_only, direct(1, o::WRITE, 0, &one), error),
        (read_only, direct(1, o::WRITE_BARRIER, 0, &one), error),
        (read_only, direct(1, o::WRITE_BARRIER, 0, &[]), error),
        (read_only, direct(1, o::FLUSH_DISKCACHE, 0, &one), error),
        (read_only, discard(1, 0, 0, 8), error),
        (read_only, indirect(1, o::WRITE, 0, 1, &[3]), error),
        // Not offered.
        (|options| options.flush = false, direct(1, o::FLUSH_DISKCACHE, 0, &[]), unsupported),
        (|options| options.barrier = false, direct(1, o::WRITE_BARRIER, 0, &one), unsupported),
        (|options| options.discard = false, discard(1, 0, 0, 8), unsupported),
        (|options| options.limits.discard = None, discard(1, 0, 0, 8), unsupported),
        (|options| options.max_indirect_segments = 0, indirect(1, o::READ, 0, 1, &[3]), unsupported),
        // Discards.
        (none, discard(1, 0, 0, SECTORS + 1), error),
        (none, discard(1, 0, 8, u64::MAX), error),
        (none, discard(1, 0, u64::MAX, 8), error),
        (none, discard(1, 0, 8, 1 << 55), error),
        (none, discard(1, 0, SECTORS + 1, 0), error),
        // Indirect ones. Page 3 holds segments.
        (none, indirect(1, o::READ, 0, 0, &[3]), error),
        (none, indirect(1, o::READ, 0, 257, &[3]), error),
        (none, indirect(1, o::READ, 0, u16::MAX, &[3]), error),
        (none, indirect(1, o::WRITE_BARRIER, 0, 1, &[3]), error),
        (none, indirect(1, o::FLUSH_DISKCACHE, 0, 1, &[3]), error),
        (none, indirect(1, o::INDIRECT, 0, 1, &[3]), error),
        (none, indirect(1, o::READ, 0, 1, &[500]), error),
        (none, indirect(1, o::READ, SECTORS - 7, 1, &[3]), error),
        (none, indirect(1, o::READ, u64::MAX - 1, 2, &[3]), error),
        (none, indirect(1, o::READ, 0, 3, &[3]), error),
        (none, indirect(1, o::WRITE, 0, 4, &[3]), error),
        // Unknown operations.
        (none, named(4), unsupported),
        (none, named(7), unsupported),
        (none, named(255), unsupported),
    ]
}

#[test]
fn malformed_requests_are_refused_without_effect() {
    for (number, (change, request, expected)) in malformed_cases().into_iter().enumerate() {
        for_each_mode(|mut options, what| {
            let what = format!("{what}, form {number}: {request:?}");
            change(&mut options);
            let (domain, mut front, mut back) = rig(options);
            grant_pages(&domain, 3);
            domain.fill(1, 0xaa);
            domain.fill(2, 0xbb);
            // Two valid segments, one with last before first, one without a grant.
            front.write_segments(&[segment(1, 0, 7), segment(2, 0, 7), segment(1, 5, 4)], &[(3, 3)]);
            domain.write(3, 24, &segment(501, 0, 7).to_bytes());
            front.send(&request);
            back.run();
            let operation = match &request.body {
                mqblk_ring::blkif::RequestBody::Indirect(indirect) => indirect.operation,
                _ => request.operation,
            };
            assert_eq!(front.responses(), [(1, operation, expected)], "{what}");
            let wrote = back.operations.transfers.iter().any(|(op, ..)| op.modifies());
            assert!(!wrote && back.operations.flushes == 0 && back.operations.discards.is_empty(), "{what}");
            assert!(back.read_disk(0, SECTORS).iter().all(|byte| *byte == 0), "{what}");
            assert!(domain.read(1, 0, PAGE).iter().all(|byte| *byte == 0xaa), "{what}");
            // The ring continues.
            back.intake.bad = 0;
            front.send(&direct(2, o::READ, 0, &[segment(2, 0, 7)]));
            back.run();
            let read = back.vbd.options().geometry.logical_block;
            assert_eq!(front.responses(), [(2, o::READ, status::OKAY)], "{what}, blocks of {}", read.bytes());
            back.close();
            assert_eq!((domain.mapped(), back.queue.grant_counters().mapped_pages), (0, 0), "{what}");
        });
    }
}

#[test]
fn malformed_requests_are_counted() {
    let (domain, mut front, mut back) = rig(options(ResolvedGrantMode::Copy));
    grant_pages(&domain, 2);
    front.send(&direct(1, o::READ, 0, &[segment(1, 3, 2)]));
    front.send(&direct(2, o::WRITE, 0, &[segment(77, 0, 0)]));
    front.send(&direct(3, o::READ, 0, &[segment(1, 0, 0)]));
    front.send(&discard(4, 0, 0, 0));
    back.run();
    assert_eq!((back.intake.bad, back.intake.good), (2, 1));
    assert_eq!(front.statuses().values().filter(|status| **status == status::ERROR).count(), 2);
    let counters = back.queue.grant_counters();
    assert_eq!((counters.copy_errors, counters.copies), (1, 2));
}

#[test]
fn the_disk_s_failures_are_reported() {
    for mode in MODES {
        let (domain, mut front, mut back) = rig(options(mode));
        grant_pages(&domain, 2);
        domain.fill(1, 0x77);
        let one = [segment(1, 0, 7)];
        for (outcome, request, expected) in [
            (Outcome::Failed(Errno(5)), direct(1, o::READ, 0, &one), status::ERROR),
            (Outcome::Unsupported, direct(1, o::READ, 0, &one), status::ERROR),
            (Outcome::OutOfRange, direct(1, o::WRITE, 0, &one), status::ERROR),
            (Outcome::NoSpace, direct(1, o::WRITE, 0, &one), status::ERROR),
            (Outcome::ReadOnly, direct(1, o::WRITE, 0, &one), status::ERROR),
            (Outcome::Aborted, direct(1, o::WRITE, 0, &one), status::ERROR),
            (Outcome::Unsupported, discard(1, 0, 0, 8), status::NOT_SUPPORTED),
            (Outcome::Unsupported, direct(1, o::FLUSH_DISKCACHE, 0, &[]), status::NOT_SUPPORTED),
            (Outcome::Unsupported, direct(1, o::WRITE_BARRIER, 0, &[]), status::NOT_SUPPORTED),
            (Outcome::Failed(Errno(5)), direct(1, o::WRITE_BARRIER, 0, &one), status::ERROR),
        ] {
            back.outcomes.push_back(outcome);
            front.send(&request);
            back.run();
            let found: Vec<i16> = front.responses().into_iter().map(|(_, _, status)| status).collect();
            assert_eq!(found, [expected], "{mode:?} {outcome:?}");
        }
        assert!(domain.read(1, 0, PAGE).iter().all(|byte| *byte == 0x77), "{mode:?}: a failed read changes no page");
        front.send(&direct(2, o::READ, 0, &one));
        back.run();
        assert_eq!(front.responses(), [(2, o::READ, status::OKAY)], "{mode:?}: the gate is open again");
        back.close();
        assert_eq!(domain.mapped(), 0);
    }
}

#[test]
fn grants_that_fail_in_the_middle_fail_their_request_only() {
    let (domain, mut front, mut back) = rig(options(ResolvedGrantMode::Copy));
    grant_pages(&domain, 8);
    back.write_disk(0, &patterns(0, 64, 0));
    domain.change(2, |grant| grant.copy_status = Some(GrantStatus(-9)));
    for id in 1..=4_u32 {
        front.put(&direct(u64::from(id), o::READ, 0, &[segment(id, 0, 7), segment(id + 4, 0, 7)]));
        front.put(&direct(
            u64::from(id) + 10,
            o::WRITE,
            100 * u64::from(id),
            &[segment(id, 0, 7), segment(id + 4, 0, 7)],
        ));
    }
    let _ = front.ring.publish();
    back.pull_all();
    assert_eq!(back.intake.pending.len(), 7, "a write was refused");
    assert_eq!(domain.table().copy_calls, 1, "all writes in one call");
    while !back.intake.pending.is_empty() {
        back.finish(0);
    }
    back.publish();
    assert_eq!(domain.table().copy_calls, 2, "all reads in another");
    for (id, status) in front.statuses() {
        let expected = if [2, 12].contains(&id) { status::ERROR } else { status::OKAY };
        assert_eq!(status, expected, "{id}");
    }
    // The whole call fails.
    domain.table().fail_copy_calls = 2;
    front.send(&direct(1, o::READ, 0, &[segment(1, 0, 7)]));
    front.send(&direct(2, o::WRITE, 0, &[segment(1, 0, 7)]));
    back.run();
    assert_eq!(front.statuses().into_values().collect::<Vec<_>>(), [status::ERROR; 2]);
    back.close();
}

#[test]
fn write_through_writes_are_durable() {
    let mut options = options(ResolvedGrantMode::Copy);
    options.write_through = true;
    let (domain, mut front, mut back) = rig(options);
    grant_pages(&domain, 1);
    front.send(&direct(1, o::WRITE, 0, &[segment(1, 0, 7)]));
    back.run();
    assert_eq!(back.operations.transfers[0].0, Op::Write { fua: true });
}

#[test]
fn requests_are_validated_against_a_new_size() {
    let (domain, mut front, mut back) = rig(options(ResolvedGrantMode::Copy));
    grant_pages(&domain, 1);
    back.vbd.set_size(mqblk_core::ByteLen(8 * SECTOR));
    front.send(&direct(1, o::READ, 8, &[segment(1, 0, 0)]));
    front.send(&direct(2, o::READ, 7, &[segment(1, 0, 0)]));
    back.run();
    assert_eq!(front.responses(), [(1, o::READ, status::ERROR), (2, o::READ, status::OKAY)]);
}
