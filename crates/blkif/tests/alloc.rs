//! No allocation per request: after warm-up, mixed requests in each grant mode do not call the allocator.
//!
//! A single test runs all modes in sequence and without a test harness, because the allocator counts for the whole
//! process.

mod rig;

use std::alloc::System;
use std::hint::black_box;
use std::io;

use mqblk_blkif::{ResolvedGrantMode, Vbd};
use mqblk_memory::{GrantAccess, GrantCopy, GrantRef, GrantStatus, PageArena, PageSlot};
use mqblk_ring::blkif::{BlkifRequest, RawRequest, RingPosition, Segment, operation as o};
use rig::backend::TestBackend;
use rig::domain::Domain;
use rig::front::{Front, direct, discard, indirect, segment};
use rig::{MODES, SECTORS, options};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const WARM_UP: u64 = 20_000;
const REQUESTS: u64 = 1_000_000;
const PAGES: u32 = 300;

/// Grant access without pages: all calls succeed except for grant 0, and slots keep their content.
struct NullGrants {
    /// Allocates once in this many copy calls, which the test must detect.
    inject_every: Option<u64>,
    calls: u64,
}

/// Grants of indirect pages whose segments are in ascending and in descending order of grants: in one of the two no
/// mapped pages are adjacent, depending on the order in which persistent grants were mapped.
const FORWARDS: u32 = 1001;
const BACKWARDS: u32 = 1003;

fn write_segment(arena: &PageArena, gref: GrantRef, slot: PageSlot, at: u32) {
    let page = if gref.0 == BACKWARDS { 256 - at } else { at + 1 };
    arena.memory().write(slot.address(at * 8), &segment(page, 0, 7).to_bytes()).unwrap();
}

impl GrantAccess for NullGrants {
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        self.calls += 1;
        if self.inject_every.is_some_and(|every| self.calls.is_multiple_of(every)) {
            drop(black_box(Box::new(self.calls)));
        }
        for copy in copies {
            let known = copy.gref != GrantRef(0);
            copy.status = if known { GrantStatus::OKAY } else { GrantStatus::BAD_REF };
            // Indirect pages: every grant above 1000 has the same segments.
            if known && copy.slot_offset == 0 && copy.gref.0 > 1000 {
                for at in 0..copy.len / 8 {
                    write_segment(arena, copy.gref, copy.slot, at.into());
                }
            }
        }
        Ok(())
    }

    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], _: bool) -> io::Result<()> {
        if refs.contains(&GrantRef(0)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if refs[0].0 > 1000 {
            (0..256).for_each(|at| write_segment(arena, refs[0], first, at));
        }
        Ok(())
    }

    fn unmap(&mut self, _: &PageArena, _: PageSlot) -> io::Result<()> {
        Ok(())
    }
}

/// Returns request `number` of the mix.
fn request(number: u64, segments: &mut [Segment; 11]) -> BlkifRequest {
    let sector = number * 1021 % (SECTORS - 2048);
    let gref = (number % u64::from(PAGES - 11)) as u32 + 1;
    for (segment, gref) in segments.iter_mut().zip(gref..) {
        segment.gref.0 = gref;
    }
    match number % 100 {
        0 => direct(number, o::FLUSH_DISKCACHE, 0, &[]),
        1 => direct(number, o::FLUSH_DISKCACHE, sector, &segments[..2]),
        2 => direct(number, o::WRITE_BARRIER, sector, &segments[..1]),
        3 => discard(number, 0, sector, 500),
        // Malformed: past the end, no such grant, no such operation.
        4 => direct(number, o::READ, SECTORS, &segments[..1]),
        5 => direct(number, o::WRITE, sector, &[segment(0, 0, 7)]),
        6 => direct(number, 9, sector, &[]),
        7 => indirect(number, o::READ, sector, 256, &[FORWARDS]),
        8 => indirect(number, o::WRITE, sector, 200, &[1002]),
        9..30 => direct(number, o::READ, sector, &segments[..]),
        30..50 => direct(number, o::WRITE, sector, &segments[..3]),
        50..70 => direct(number, o::WRITE, sector, &segments[..1]),
        _ => direct(number, o::READ, sector, &segments[..1]),
    }
}

/// The mix of requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mix {
    /// The largest requests, so that segment lists reach their full capacity.
    Largest,
    All,
}

/// Sends `count` requests, a full ring at a time, and completes them.
fn run(front: &mut Front, back: &mut TestBackend, mix: Mix, count: u64) {
    let mut segments = [segment(1, 0, 7); 11];
    let (mut sent, mut completed) = (0, 0);
    while completed < count {
        while sent < count {
            let request = match mix {
                Mix::Largest => {
                    let order = if sent < count / 2 { BACKWARDS } else { FORWARDS };
                    indirect(sent, o::READ, 0, 256, &[order])
                }
                Mix::All => request(sent, &mut segments),
            };
            let raw = RawRequest::encode(front.ring.abi(), &request);
            if !front.ring.put(&raw) {
                break;
            }
            sent += 1;
        }
        let _ = front.ring.publish();
        back.turn();
        front.ring.poll_responses().unwrap();
        while front.ring.take().is_some() {
            completed += 1;
        }
    }
}

/// Returns the allocations and reallocations during `requests` requests.
fn allocations(mode: ResolvedGrantMode, requests: u64, smuggle: Option<u64>) -> usize {
    let mut options = options(mode);
    // Fewer than there are grants, so that some are unmapped and mapped again.
    options.persistent_max = PAGES - 20;
    let (domain, vbd) = (Domain::new(1), Vbd::new(options));
    let mut front = Front::new(&domain, vbd.options().abi, 1);
    let grants = Box::new(NullGrants { inject_every: smuggle, calls: 0 });
    let mut back = TestBackend::with_grants(&vbd, grants, &front, RingPosition::default(), None, vec![]);
    back.recording = false;
    run(&mut front, &mut back, Mix::Largest, WARM_UP / 10);
    run(&mut front, &mut back, Mix::All, WARM_UP);
    let region = Region::new(ALLOCATOR);
    run(&mut front, &mut back, Mix::All, requests);
    let change = region.change();
    back.close();
    change.allocations + change.reallocations
}

/// One trial, on the main thread. The standard harness has a thread of its own beside the test, which allocates after a
/// test has run for 60 s.
fn main() -> std::process::ExitCode {
    let mut arguments = libtest_mimic::Arguments::from_args();
    arguments.test_threads = Some(1);
    let trial = libtest_mimic::Trial::test("a_million_requests_allocate_nothing", || {
        a_million_requests_allocate_nothing();
        Ok(())
    });
    libtest_mimic::run(&arguments, vec![trial]).exit_code()
}

fn a_million_requests_allocate_nothing() {
    assert!(allocations(ResolvedGrantMode::Copy, WARM_UP, Some(100)) > 5, "injected allocations are detected");
    for mode in MODES {
        assert_eq!(allocations(mode, REQUESTS, None), 0, "{mode:?}");
    }
}
