//! Persistent grants, pages mapped for a request, and the limits of mapped pages.

mod rig;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_blkif::{GrantBudget, PoolScope, ResolvedGrantMode, Vbd, VbdOptions};
use mqblk_ring::blkif::{Segment, operation as o, status};
use rig::backend::TestBackend;
use rig::domain::Domain;
use rig::front::{Front, direct, segment};
use rig::{PAGE, options, rig};

fn persistent(max: u32) -> VbdOptions {
    VbdOptions { persistent_max: max, ..options(ResolvedGrantMode::Persistent) }
}

fn grant_pages(domain: &Domain, count: u32) {
    (1..=count).for_each(|page| domain.grant(page, page, true));
}

/// A read of one page by one grant; its status.
fn read(front: &mut Front, back: &mut TestBackend, gref: u32) -> i16 {
    front.send(&direct(u64::from(gref), o::READ, 0, &[segment(gref, 0, 7)]));
    back.run();
    let responses = front.responses();
    assert_eq!(responses.len(), 1);
    responses[0].2
}

/// Sleeps longer than the interval of reclaim scans.
fn wait_reclaim_interval() {
    std::thread::sleep(Duration::from_millis(120));
}

#[test]
fn a_page_is_mapped_once() {
    let (domain, mut front, mut back) = rig(persistent(100));
    grant_pages(&domain, 3);
    for _ in 0..10 {
        for gref in 1..=3 {
            assert_eq!(read(&mut front, &mut back, gref), status::OKAY);
        }
    }
    let counters = back.queue.grant_counters();
    assert_eq!((counters.maps, counters.persistent_misses, counters.persistent_hits), (3, 3, 27));
    assert_eq!((counters.copies, counters.unmaps, counters.mapped_pages), (0, 0, 3));
    assert_eq!(domain.mapped_grants(), [1, 2, 3]);
    back.close();
    assert_eq!(
        (domain.mapped(), back.queue.grant_counters().mapped_pages, back.vbd.options().budget.used()),
        (0, 0, 0)
    );
}

#[test]
fn a_page_in_two_requests_at_once_is_mapped_once() {
    let (domain, mut front, mut back) = rig(persistent(1));
    grant_pages(&domain, 2);
    back.write_disk(0, &[1; 4096]);
    back.write_disk(8, &[2; 4096]);
    front.send(&direct(1, o::READ, 0, &[segment(1, 0, 3), segment(1, 4, 7)]));
    front.send(&direct(2, o::WRITE, 64, &[segment(1, 0, 7)]));
    back.pull_all();
    assert_eq!((back.intake.pending.len(), domain.mapped()), (2, 1));
    // The only slot is in use while either is in flight: other pages are copied, and it stays mapped.
    front.send(&direct(3, o::READ, 8, &[segment(2, 0, 7)]));
    back.pull_all();
    back.finish(2);
    back.publish();
    wait_reclaim_interval();
    back.finish(0);
    back.publish();
    assert_eq!(domain.mapped_grants(), [1], "in use");
    back.finish(0);
    back.publish();
    assert_eq!(front.statuses().into_values().collect::<Vec<_>>(), [status::OKAY; 3]);
    assert_eq!((domain.read(1, 0, PAGE), domain.read(2, 0, PAGE)), (vec![1; 4096], vec![2; 4096]));
    assert_eq!(back.read_disk(64, 8), [1; 4096], "the write came after the read");
    let counters = back.queue.grant_counters();
    assert_eq!((counters.maps, counters.over_cap, counters.copies), (1, 1, 1));
    back.close();
}

#[test]
fn over_the_cap_the_least_recently_used_are_unmapped() {
    let (domain, mut front, mut back) = rig(persistent(40));
    grant_pages(&domain, 42);
    for gref in 1..=40 {
        assert_eq!(read(&mut front, &mut back, gref), status::OKAY);
        if gref == 20 {
            // The clock is coarse.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert_eq!(read(&mut front, &mut back, 41), status::OKAY);
    let counters = back.queue.grant_counters();
    assert_eq!((counters.mapped_pages, counters.copies, counters.over_cap, counters.persistent_purged), (40, 1, 1, 0));
    wait_reclaim_interval();
    assert_eq!(read(&mut front, &mut back, 30), status::OKAY);
    let unmapped = domain.table().unmapped.clone();
    assert_eq!(unmapped.len(), 2, "five percent");
    assert!(unmapped.iter().all(|gref| *gref <= 20), "{unmapped:?}: of the older half");
    assert_eq!(read(&mut front, &mut back, 41), status::OKAY);
    assert_eq!(read(&mut front, &mut back, unmapped[0]), status::OKAY);
    let counters = back.queue.grant_counters();
    assert_eq!((counters.mapped_pages, counters.copies, counters.persistent_purged), (40, 1, 2));
    back.close();
    assert_eq!(domain.mapped(), 0);
}

#[test]
fn idle_grants_are_unmapped_even_by_a_sleeping_ring() {
    let mut options = persistent(1000);
    options.persistent_idle = Duration::from_millis(150);
    let (domain, mut front, mut back) = rig(options);
    grant_pages(&domain, 300);
    for gref in 1..=300 {
        assert_eq!(read(&mut front, &mut back, gref), status::OKAY);
    }
    // One is in flight all the time.
    front.send(&direct(1, o::READ, 0, &[segment(7, 0, 7)]));
    back.pull_all();
    let start = Instant::now();
    while domain.mapped() > 1 {
        assert!(start.elapsed() < Duration::from_secs(20), "{} pages are still mapped", domain.mapped());
        std::thread::sleep(Duration::from_millis(20));
        back.vbd.reclaim();
        while back.handle_wakeup() {}
    }
    assert_eq!(domain.mapped_grants(), [7]);
    back.finish(0);
    back.publish();
    assert_eq!(front.statuses()[&1], status::OKAY);
    assert_eq!(back.queue.grant_counters().persistent_purged, 299);
    back.close();
    assert_eq!(domain.mapped(), 0);
}

#[test]
fn over_the_host_s_budget_pages_are_copied_and_nothing_fails() {
    let budget = GrantBudget::new(10, mqblk_core::MappingBudget::of_process());
    for mode in [ResolvedGrantMode::Persistent, ResolvedGrantMode::PersistentBounce, ResolvedGrantMode::Map] {
        let disk = || {
            let mut options = options(mode);
            options.budget = Arc::clone(&budget);
            rig(options)
        };
        let mut disks = [disk(), disk()];
        for (domain, ..) in &disks {
            grant_pages(domain, 16);
        }
        let segments: Vec<Segment> = (1..=8).map(|gref| segment(gref, 0, 7)).collect();
        for (number, (_, front, back)) in (1..).zip(&mut disks) {
            back.write_disk(0, &[number; 8 * 4096]);
            front.send(&direct(1, o::READ, 0, &segments));
            back.pull_all();
        }
        assert!(budget.used() <= 10 && budget.used() >= 8);
        for (number, (domain, front, back)) in (1..).zip(&mut disks) {
            back.finish(0);
            back.publish();
            assert_eq!(front.responses(), [(1, o::READ, status::OKAY)]);
            assert_eq!(domain.read(8, 0, PAGE), vec![number; 4096]);
        }
        let copied: u64 = disks.iter().map(|(.., back)| back.queue.grant_counters().copies).sum();
        let refused: u64 = disks.iter().map(|(.., back)| back.queue.grant_counters().over_budget).sum();
        assert_eq!((copied, refused), (8, 1), "{mode:?}");
        for (domain, _, back) in &mut disks {
            back.close();
            assert_eq!(domain.mapped(), 0);
        }
        assert_eq!(budget.used(), 0);
    }
}

#[test]
fn pages_that_cannot_be_mapped_are_copied() {
    for mode in [ResolvedGrantMode::Persistent, ResolvedGrantMode::PersistentBounce, ResolvedGrantMode::Map] {
        let (domain, mut front, mut back) = rig(options(mode));
        grant_pages(&domain, 3);
        back.write_disk(0, &[3; 12288]);
        domain.change(2, |grant| grant.no_map = true);
        let segments = [segment(1, 0, 7), segment(2, 0, 7), segment(3, 0, 7)];
        front.send(&direct(1, o::READ, 0, &segments));
        front.send(&direct(2, o::WRITE, 64, &segments));
        back.run();
        assert_eq!(front.statuses().into_values().collect::<Vec<_>>(), [status::OKAY; 2]);
        assert_eq!(domain.read(2, 0, PAGE), vec![3; 4096]);
        let counters = back.queue.grant_counters();
        assert_eq!((counters.copies, counters.map_errors), (6, 2), "{mode:?}");
        assert_eq!(counters.mapped_pages, if mode == ResolvedGrantMode::Map { 0 } else { 1 }, "{mode:?}");
        back.close();
        assert_eq!((domain.mapped(), back.vbd.options().budget.used()), (0, 0));
    }
}

#[test]
fn a_page_mapped_for_a_request_is_unmapped_before_the_response() {
    let (domain, mut front, mut back) = rig(options(ResolvedGrantMode::Map));
    grant_pages(&domain, 4);
    domain.grant(9, 1, false);
    front.send(&direct(1, o::WRITE, 0, &[segment(9, 0, 7), segment(2, 0, 7)]));
    front.send(&direct(2, o::READ, 0, &[segment(1, 0, 7), segment(2, 0, 7), segment(1, 0, 7)]));
    back.pull_all();
    assert_eq!(domain.mapped_grants(), [1, 1, 2, 2, 9], "a write needs no right to write to the page");
    back.finish(0);
    assert_eq!(domain.mapped(), 5);
    assert!(front.responses().is_empty());
    back.publish();
    assert_eq!(front.responses().len(), 1);
    assert!(domain.end(9), "the domain may reuse the page");
    back.finish(0);
    back.publish();
    assert_eq!(domain.mapped(), 0);
    let counters = back.queue.grant_counters();
    assert_eq!((counters.maps, counters.map_calls, counters.unmaps, counters.unmap_calls), (5, 2, 5, 2));
    assert_eq!((counters.copies, counters.mapped_pages, counters.buffer_pages), (0, 0, 0));
    back.close();
}

#[test]
fn transfers_that_pin_memory_never_see_a_mapped_page() {
    let (domain, mut front, mut back) =
        rig(VbdOptions { persistent_max: 4, ..options(ResolvedGrantMode::PersistentBounce) });
    grant_pages(&domain, 6);
    domain.fill(1, 0x11);
    domain.fill(5, 0x55);
    back.write_disk(8, &[8; 4096]);
    front.send(&direct(1, o::WRITE, 0, &[segment(1, 2, 4)]));
    front.send(&direct(2, o::READ, 8, &[segment(2, 0, 1), segment(3, 3, 7), segment(2, 5, 5)]));
    // No slots are free for its pages.
    front.send(&direct(3, o::WRITE, 64, &[segment(4, 0, 7), segment(5, 0, 7), segment(6, 0, 0)]));
    back.pull_all();
    // A write's data is the content of the pages when the request was taken.
    domain.fill(1, 0xee);
    assert_eq!(domain.mapped_grants(), [1, 2, 3, 4]);
    (0..3).for_each(|_| back.finish(0));
    assert_eq!(domain.read(3, 3 * 512, 5 * 512), [8; 5 * 512], "a read's data is copied before its response");
    back.publish();
    assert_eq!(front.statuses().into_values().collect::<Vec<_>>(), [status::OKAY; 3]);
    assert_eq!(back.read_disk(0, 3), [0x11; 3 * 512]);
    assert_eq!(back.read_disk(72, 8), [0x55; 4096]);
    assert_eq!(domain.read(2, 1024, 512), vec![0; 512], "nothing but the segments is written to");
    assert_eq!(domain.read(2, 5 * 512, 512), vec![8; 512]);
    let counters = back.queue.grant_counters();
    assert_eq!((counters.maps, counters.copies, counters.over_cap), (4, 3, 1));
    back.close();
    assert_eq!((domain.mapped(), back.vbd.options().budget.used()), (0, 0));
}

#[test]
fn a_page_that_a_transfer_may_pin_is_not_mapped_for_a_request() {
    let mut options = options(ResolvedGrantMode::Map);
    options.limits.pins_memory = true;
    let (domain, mut front, mut back) = rig(options);
    grant_pages(&domain, 2);
    front.send(&direct(1, o::WRITE, 0, &[segment(1, 0, 7)]));
    front.send(&direct(2, o::READ, 0, &[segment(2, 0, 7)]));
    back.pull_all();
    assert_eq!(domain.mapped(), 0);
    back.finish(0);
    back.finish(0);
    back.publish();
    assert_eq!(front.responses().len(), 2);
    let counters = back.queue.grant_counters();
    assert_eq!((counters.maps, counters.copies), (0, 2));
    back.close();
}

#[test]
fn a_slot_whose_unmap_failed_is_not_used_again() {
    for mode in [ResolvedGrantMode::Persistent, ResolvedGrantMode::PersistentBounce, ResolvedGrantMode::Map] {
        let mut options = options(mode);
        options.persistent_max = 1;
        options.persistent_idle = Duration::from_millis(1);
        let (domain, mut front, mut back) = rig(options);
        grant_pages(&domain, 3);
        domain.table().fail_unmaps = 1;
        assert_eq!(read(&mut front, &mut back, 1), status::OKAY);
        if mode != ResolvedGrantMode::Map {
            wait_reclaim_interval();
            back.vbd.reclaim();
            back.handle_wakeup();
        }
        let counters = back.queue.grant_counters();
        assert_eq!((counters.stuck_pages, counters.mapped_pages), (1, 1), "{mode:?}");
        for gref in [2, 3, 1, 2] {
            assert_eq!(read(&mut front, &mut back, gref), status::OKAY, "{mode:?}");
        }
        assert_eq!(domain.mapped_grants(), [1], "{mode:?}");
        back.close();
        let counters = back.queue.grant_counters();
        assert_eq!(
            (counters.stuck_pages, counters.mapped_pages, back.vbd.options().budget.used()),
            (1, 1, 1),
            "the counters report it"
        );
        drop(back);
    }
}

#[test]
fn a_burst_s_memory_is_released() {
    let (domain, mut front, mut back) = rig(options(ResolvedGrantMode::Copy));
    grant_pages(&domain, 257);
    let segments: Vec<Segment> = (1..=256).map(|gref| segment(gref, 0, 7)).collect();
    for id in 0..16 {
        front.send_indirect(id, o::READ, 0, &segments, &[(257, 257)]);
    }
    back.run();
    assert_eq!(front.responses().len(), 16);
    assert_eq!(back.queue.grant_counters().buffer_pages, 16 * 256);
    let start = Instant::now();
    while back.queue.grant_counters().buffer_pages > 1024 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(read(&mut front, &mut back, 1), status::OKAY);
    }
    front.send_indirect(1, o::WRITE, 0, &segments, &[(257, 257)]);
    back.run();
    assert_eq!(front.responses(), [(1, o::WRITE, status::OKAY)]);
    back.close();
}

#[test]
fn segments_are_read_once() {
    // The frontend rewrites its segments after they were fetched.
    for mode in rig::MODES {
        let (domain, mut front, mut back) = rig(options(mode));
        grant_pages(&domain, 8);
        back.write_disk(0, &[5; 8192]);
        front.send_indirect(1, o::READ, 0, &[segment(1, 0, 7), segment(2, 0, 7)], &[(3, 3)]);
        back.pull_all();
        front.write_segments(&[segment(4, 0, 255), segment(u32::MAX, 9, 3)], &[(3, 3)]);
        back.finish(0);
        back.publish();
        assert_eq!(front.responses(), [(1, o::READ, status::OKAY)], "{mode:?}");
        assert_eq!((domain.read(2, 0, PAGE), domain.read(4, 0, PAGE)), (vec![5; 4096], vec![0; 4096]));
        back.close();
    }
}

#[test]
fn an_indirect_request_in_mapped_pages_costs_no_calls() {
    let (domain, mut front, mut back) = rig(persistent(100));
    grant_pages(&domain, 40);
    let segments: Vec<Segment> = (1..=32).map(|gref| segment(gref, 0, 7)).collect();
    for _ in 0..3 {
        front.send_indirect(1, o::WRITE, 0, &segments, &[(40, 40)]);
        back.run();
        assert_eq!(front.responses(), [(1, o::WRITE, status::OKAY)]);
    }
    let counters = back.queue.grant_counters();
    assert_eq!((counters.copy_calls, counters.maps, counters.persistent_hits), (0, 33, 66));
    assert_eq!(counters.indirect_requests, 3);
    back.close();
}

#[test]
fn rings_that_share_their_pages_use_each_other_s_mappings() {
    for mode in rig::MODES {
        let mut options = options(mode);
        (options.pool, options.rings) = (PoolScope::Shared, 3);
        let (domain, vbd) = (Domain::new(64), Vbd::new(options));
        grant_pages(&domain, 20);
        let mut rings: VecDeque<(Front, TestBackend)> = (0..3)
            .map(|_| {
                let front = Front::new(&domain, vbd.options().abi, 1);
                let back = TestBackend::new(&vbd, &domain, &front);
                (front, back)
            })
            .collect();
        for (front, back) in &mut rings {
            back.write_disk(0, &[9; 4096]);
            for gref in 1..=20 {
                domain.fill(gref, 0);
                assert_eq!(read(front, back, gref), status::OKAY, "{mode:?}");
                assert_eq!(domain.read(gref, 0, PAGE), vec![9; 4096]);
            }
        }
        let maps = domain.table().maps;
        let expected = match mode {
            ResolvedGrantMode::Persistent | ResolvedGrantMode::PersistentBounce => 20,
            ResolvedGrantMode::Map => 60,
            ResolvedGrantMode::Copy => 0,
        };
        assert_eq!(maps, expected, "{mode:?}");
        while let Some((_, mut back)) = rings.pop_front() {
            back.close();
            let left = if mode.is_persistent() && !rings.is_empty() { 20 } else { 0 };
            assert_eq!((domain.mapped(), vbd.options().budget.used()), (left, left as u64), "{mode:?}");
        }
    }
}

#[test]
fn a_dropped_queue_releases_its_budget() {
    let (domain, mut front, mut back) = rig(persistent(100));
    grant_pages(&domain, 5);
    (1..=5).for_each(|gref| assert_eq!(read(&mut front, &mut back, gref), status::OKAY));
    let budget = Arc::clone(&back.vbd.options().budget);
    assert_eq!(budget.used(), 5);
    drop(back);
    assert_eq!(budget.used(), 0);
}
