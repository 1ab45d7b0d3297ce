//! Random requests, mostly valid, several in flight, against an oracle: valid requests succeed with the right bytes,
//! others fail with the right status; no other bytes change, and none after the response; no grant stays mapped.

mod rig;

use std::collections::HashSet;

use mqblk_blkif::{GrantBudget, GrantCounters, ResolvedGrantMode};
use mqblk_core::{Errno, Outcome};
use mqblk_memory::GrantStatus;
use mqblk_ring::blkif::{Abi, BlkifRequest, Segment, operation as o, status};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rig::backend::TestBackend;
use rig::domain::Domain;
use rig::front::{Front, direct, discard, indirect, segment};
use rig::{MODES, PAGE, SECTOR, options, rig};

/// Areas: each has pages and sectors of its own, and at most one request in flight.
const AREAS: u64 = 8;
/// Data pages of an area; the next page is its indirect page.
const PAGES: u32 = 40;
/// Sectors of an area.
const SECTORS: u64 = rig::SECTORS / AREAS;
/// Grant types. A grant's number is its page times this, plus its type.
const GRANT_TYPES: u32 = 6;
/// A valid grant.
const GOOD: u32 = 0;
const READ_ONLY: u32 = 1;
const NO_COPY: u32 = 2;
const NO_MAP: u32 = 3;
const MISSING: u32 = 4;
const GOOD_SECOND: u32 = 5;

struct Sent {
    request: BlkifRequest,
    segments: Vec<Segment>,
    /// Grant of the indirect page.
    indirect_gref: Option<u32>,
    sector: u64,
    /// Data of the segments, in order.
    data: Vec<u8>,
    /// Content of the area's pages when the request was sent.
    pages_before: Vec<Vec<u8>>,
    fails: bool,
}

fn page_of(gref: u32) -> u32 {
    gref / GRANT_TYPES
}

fn is_accessible(gref: u32, fill: bool) -> bool {
    match gref % GRANT_TYPES {
        GOOD | NO_MAP | GOOD_SECOND => true,
        READ_ONLY => !fill,
        _ => false,
    }
}

/// The oracle: returns true if a transfer must succeed, by wide arithmetic on the request.
fn succeeds(sent: &Sent, fill: bool, max_segments: usize) -> bool {
    let parts = |segment: &Segment| segment.first_sect <= segment.last_sect && segment.last_sect <= 7;
    let count: u128 =
        sent.segments.iter().map(|part| (u128::from(part.last_sect) + 1).saturating_sub(part.first_sect.into())).sum();
    !sent.segments.is_empty()
        && sent.segments.len() <= max_segments
        && sent.segments.iter().all(parts)
        && u128::from(sent.sector) + count <= u128::from(rig::SECTORS)
        && sent.segments.iter().all(|part| is_accessible(part.gref.0, fill))
        && sent.indirect_gref.is_none_or(|gref| is_accessible(gref, false))
}

struct PropertyFixture {
    domain: std::sync::Arc<Domain>,
    front: Front,
    back: TestBackend,
    random: SmallRng,
    /// Request in flight, by area.
    sent: Vec<Option<Sent>>,
    mode: ResolvedGrantMode,
    disk: Vec<u8>,
}

impl PropertyFixture {
    fn first_page(area: u64) -> u32 {
        area as u32 * (PAGES + 1)
    }

    fn snapshot(&self, area: u64) -> Vec<Vec<u8>> {
        (0..PAGES).map(|page| self.domain.read(PropertyFixture::first_page(area) + page, 0, PAGE)).collect()
    }

    fn segments(&mut self, area: u64, most: usize) -> Vec<Segment> {
        let count = self.random.random_range(1..=most);
        // A page in two segments would be written in an undefined order.
        let pages = rand::seq::index::sample(&mut self.random, PAGES as usize, count);
        pages
            .into_iter()
            .map(|page| {
                let kind = match self.random.random_range(0..100) {
                    0..40 => GOOD,
                    40..90 => GOOD_SECOND,
                    90 => READ_ONLY,
                    91 => NO_COPY,
                    92..98 => NO_MAP,
                    _ => MISSING,
                };
                let (first, last) = match self.random.random_range(0..100) {
                    0 => (self.random.random(), self.random.random()),
                    1..40 => {
                        let first = self.random.random_range(0..8);
                        (first, self.random.random_range(first..8))
                    }
                    _ => (0, 7),
                };
                segment((PropertyFixture::first_page(area) + page as u32) * GRANT_TYPES + kind, first, last)
            })
            .collect()
    }

    /// Returns a start sector: in the area's sectors, or (rarely) out of range.
    fn sector(&mut self, area: u64, sectors: u64) -> u64 {
        match self.random.random_range(0..50) {
            0 => u64::MAX - self.random.random_range(0..400),
            1 => self.random.random_range(rig::SECTORS - 8..1 << 60).max(rig::SECTORS - sectors.min(7)),
            _ => area * SECTORS + self.random.random_range(0..=SECTORS - sectors),
        }
    }

    fn send(&mut self, area: u64) {
        let kind = self.random.random_range(0..100);
        let large = (70..92).contains(&kind);
        let mut segments = self.segments(area, if large { PAGES as usize } else { 11 });
        let mut bytes = 0;
        for part in &segments {
            bytes += u64::from(part.last_sect).saturating_sub(part.first_sect.into()) + 1;
        }
        let mut sector = self.sector(area, bytes.min(SECTORS));
        let mut table = None;
        let first = PropertyFixture::first_page(area);
        let write = self.random.random();
        let op = if write { o::WRITE } else { o::READ };
        let request = match kind {
            0..60 => direct(area, op, sector, &segments),
            60..65 => direct(area, o::FLUSH_DISKCACHE, sector, &segments),
            65..70 => direct(area, o::WRITE_BARRIER, sector, &segments),
            70..92 => {
                let kind = if self.random.random_range(0..30) == 0 { MISSING } else { GOOD };
                let gref = (first + PAGES) * GRANT_TYPES + kind;
                self.front.write_segments(&segments, &[(gref, first + PAGES)]);
                table = Some(gref);
                indirect(area, op, sector, segments.len() as u16, &[gref])
            }
            92..95 => {
                segments.clear();
                direct(area, o::FLUSH_DISKCACHE, sector, &[])
            }
            95..98 => {
                segments.clear();
                let sectors = self.random.random_range(0..200);
                sector = self.sector(area, sectors);
                discard(area, 0, sector, sectors)
            }
            _ => {
                segments.clear();
                direct(area, op, sector, &[])
            }
        };
        for page in 0..PAGES {
            let byte = self.random.random();
            self.domain.fill(first + page, byte);
        }
        let data = segments.iter().flat_map(|part| self.part(part)).collect();
        let before = self.snapshot(area);
        let fails = self.random.random_range(0..20) == 0;
        self.front.put(&request);
        self.sent[area as usize] =
            Some(Sent { request, segments, indirect_gref: table, sector, data, pages_before: before, fails });
    }

    fn part(&self, part: &Segment) -> Vec<u8> {
        if part.first_sect > part.last_sect || part.last_sect > 7 {
            return vec![];
        }
        let sectors = u64::from(part.last_sect - part.first_sect) + 1;
        self.domain.read(page_of(part.gref.0), u64::from(part.first_sect) * SECTOR, sectors * SECTOR)
    }

    /// Checks a response.
    fn check(&mut self, (area, operation, found): (u64, u8, i16)) {
        let sent = self.sent[area as usize].take().expect("it was outstanding");
        let what = format!("{:?} {:?}: {:?}", self.mode, self.front.ring.abi(), sent.request);
        let (operation_sent, max_segments) = match &sent.request.body {
            mqblk_ring::blkif::RequestBody::Indirect(indirect) => (indirect.operation, 256),
            _ => (sent.request.operation, 11),
        };
        assert_eq!(operation, operation_sent, "{what}");
        let fill = operation_sent == o::READ;
        let at = (sent.sector.min(rig::SECTORS) * SECTOR) as usize;
        let expected = match &sent.request.body {
            mqblk_ring::blkif::RequestBody::Discard { sectors, .. } => {
                let inside = u128::from(sent.sector) + u128::from(*sectors) <= u128::from(rig::SECTORS);
                if inside && !sent.fails {
                    self.disk[at..at + (sectors * SECTOR) as usize].fill(0);
                }
                inside && !(sent.fails && *sectors > 0)
            }
            _ if operation_sent == o::FLUSH_DISKCACHE && sent.segments.is_empty() => !sent.fails,
            _ => succeeds(&sent, fill, max_segments) && !sent.fails,
        };
        assert_eq!(found, if expected { status::OKAY } else { status::ERROR }, "{what}");
        let after = self.snapshot(area);
        if fill && expected {
            let bytes: Vec<u8> = sent.segments.iter().flat_map(|part| self.part(part)).collect();
            assert!(bytes == self.disk[at..at + bytes.len()], "{what}: wrong bytes");
        } else if !fill && expected && !sent.segments.is_empty() {
            self.disk[at..at + sent.data.len()].copy_from_slice(&sent.data);
        }
        // No bytes outside a read's segments have changed.
        let mut writable = vec![vec![false; PAGE as usize]; PAGES as usize];
        for part in sent.segments.iter().filter(|part| fill && part.last_sect <= 7 && part.first_sect <= part.last_sect)
        {
            let page = page_of(part.gref.0) - PropertyFixture::first_page(area);
            let range = u64::from(part.first_sect) * SECTOR..(u64::from(part.last_sect) + 1) * SECTOR;
            writable[page as usize][range.start as usize..range.end as usize].fill(true);
        }
        for ((before, after), writable) in sent.pages_before.iter().zip(&after).zip(&writable) {
            let same =
                before.iter().zip(after).zip(writable).all(|((before, after), writable)| *writable || before == after);
            assert!(same, "{what}: bytes outside the segments have changed");
        }
        if self.mode == ResolvedGrantMode::Map {
            let mapped: HashSet<u32> = self.domain.mapped_grants().into_iter().collect();
            assert!(sent.segments.iter().all(|part| !mapped.contains(&part.gref.0)), "{what}: still mapped");
        }
        // Later writes to the pages are detected when the next request is sent.
        let first = PropertyFixture::first_page(area);
        (0..PAGES).for_each(|page| self.domain.fill(first + page, 0xa5));
    }

    /// Executes one random event.
    fn step(&mut self) {
        match self.random.random_range(0..8) {
            0..3 => {
                let area = self.random.random_range(0..AREAS);
                if self.sent[area as usize].is_none() {
                    let first = PropertyFixture::first_page(area);
                    let untouched =
                        (0..PAGES).all(|page| self.domain.read(first + page, 0, PAGE).iter().all(|byte| *byte == 0xa5));
                    assert!(untouched, "a page was written to after its response");
                    self.send(area);
                    let _ = self.front.ring.publish();
                }
            }
            3 => {
                self.back.pull();
            }
            4..6 => self.finish(),
            6 => {
                self.back.publish();
            }
            _ => {
                self.back.handle_wakeup();
            }
        }
        for response in self.front.responses() {
            self.check(response);
        }
    }

    /// Completes one pending disk request.
    fn finish(&mut self) {
        let pending = self.back.intake.pending.len();
        if pending == 0 {
            return;
        }
        let at = self.random.random_range(0..pending);
        let request = &self.back.intake.pending[at];
        // A request fails by its area; a flush only if a single request without data is in flight.
        let area = request.start.0 / (SECTORS * SECTOR);
        let alone = self.sent.iter().flatten().filter(|sent| sent.segments.is_empty()).count() == 1;
        let fails = match request.op {
            mqblk_core::Op::Flush => {
                // A flush has no area: all flushes in flight fail or none.
                let flushes = |sent: &&Sent| matches!(sent.request.operation, o::FLUSH_DISKCACHE | o::WRITE_BARRIER);
                self.sent.iter().flatten().filter(flushes).all(|sent| sent.fails) && alone
            }
            _ => self.sent[area as usize].as_ref().is_some_and(|sent| sent.fails),
        };
        if !fails && request.op == mqblk_core::Op::Flush {
            for sent in self.sent.iter_mut().flatten() {
                if sent.request.operation == o::FLUSH_DISKCACHE && sent.segments.is_empty() {
                    sent.fails = false;
                }
            }
        }
        if fails {
            self.back.outcomes.push_back(Outcome::Failed(Errno(5)));
        }
        self.back.finish(at);
    }
}

fn run_random(seed: u64, mode: ResolvedGrantMode, abi: Abi) -> GrantCounters {
    let mut options = options(mode);
    options.abi = abi;
    // Small limits, so that all paths are taken.
    options.persistent_max = if seed.is_multiple_of(2) { 100 } else { 200 };
    options.budget = GrantBudget::new(150, mqblk_core::MappingBudget::of_process());
    let (domain, front, back) = rig(options);
    for page in 0..AREAS as u32 * (PAGES + 1) {
        domain.fill(page, 0xa5);
        for kind in [GOOD, READ_ONLY, NO_COPY, NO_MAP, GOOD_SECOND] {
            let gref = page * GRANT_TYPES + kind;
            domain.grant(gref, page, kind != READ_ONLY);
            domain.change(gref, |grant| {
                grant.no_map = [NO_COPY, NO_MAP].contains(&kind);
                grant.copy_status = (kind == NO_COPY).then_some(GrantStatus::GENERAL_ERROR);
            });
        }
    }
    let random = SmallRng::seed_from_u64(seed);
    let disk = vec![0; (rig::SECTORS * SECTOR) as usize];
    let sent = (0..AREAS).map(|_| None).collect();
    let mut world = PropertyFixture { domain, front, back, random, sent, mode, disk };
    world.back.recording = true;
    for _ in 0..400 {
        world.step();
    }
    let outstanding = |world: &PropertyFixture| world.sent.iter().flatten().count();
    for _ in 0..1000 {
        if outstanding(&world) == 0 {
            break;
        }
        world.back.pull();
        world.finish();
        world.back.publish();
        world.back.handle_wakeup();
        for response in world.front.responses() {
            world.check(response);
        }
    }
    assert_eq!(outstanding(&world), 0, "every request has a response");
    assert!(world.back.read_disk(0, rig::SECTORS) == world.disk, "the disk holds what was written");
    world.back.close();
    let counters = world.back.queue.grant_counters();
    assert_eq!((world.domain.mapped(), counters.mapped_pages, counters.stuck_pages), (0, 0, 0));
    assert_eq!(counters.maps, counters.unmaps);
    counters
}

#[test]
fn random_requests_take_all_paths() {
    let mut sum = GrantCounters::default();
    for seed in 0..4 {
        for mode in MODES {
            sum.add(&run_random(seed, mode, Abi::Arm));
        }
    }
    let GrantCounters { copy_errors, map_errors, over_cap, over_budget, persistent_hits, barriers, .. } = sum;
    let paths =
        [copy_errors, map_errors, over_cap, over_budget, persistent_hits, barriers, sum.copies, sum.indirect_requests];
    assert!(paths.iter().all(|times| *times > 10), "{sum:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_request_completes_as_the_oracle_says(seed: u64) {
        for mode in MODES {
            for abi in [Abi::X86_64, Abi::X86_32] {
                run_random(seed, mode, abi);
            }
        }
    }
}
