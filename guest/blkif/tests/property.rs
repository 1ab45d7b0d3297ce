//! Random requests, most of them good, some in flight at once, against an oracle: what is in range and granted succeeds with the right
//! bytes, what is not fails the right way; nothing is touched that is not asked for, nor after its answer; no grant stays mapped.

mod rig;

use std::collections::HashSet;

use mqblk_blkif::{GrantBudget, GrantCounters, Mode};
use mqblk_core::{Errno, Outcome};
use mqblk_memory::GrantStatus;
use mqblk_ring::blkif::{Abi, BlkifRequest, Segment, operation as o, status};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rig::back::Back;
use rig::domain::Domain;
use rig::front::{Front, direct, discard, indirect, segment};
use rig::{MODES, PAGE, SECTOR, options, rig};

/// Requests in flight at once. Each has pages and sectors of its own.
const LANES: u64 = 8;
/// Data pages of a lane; the next one is for segments.
const PAGES: u32 = 40;
/// Sectors of a lane.
const SECTORS: u64 = rig::SECTORS / LANES;
/// What a grant's number is made of: its page, and what is wrong with it.
const KINDS: u32 = 6;
/// A grant of which `KINDS` times the page is the number.
const GOOD: u32 = 0;
const READ_ONLY: u32 = 1;
const NO_COPY: u32 = 2;
const NO_MAP: u32 = 3;
const MISSING: u32 = 4;
const GOOD_TOO: u32 = 5;

struct Sent {
    request: BlkifRequest,
    segments: Vec<Segment>,
    /// The page of segments has this grant.
    table: Option<u32>,
    sector: u64,
    /// What the data was, in order.
    data: Vec<u8>,
    /// The pages of the lane as they were.
    before: Vec<Vec<u8>>,
    fails: bool,
}

fn page_of(gref: u32) -> u32 {
    gref / KINDS
}

fn good(gref: u32, fill: bool) -> bool {
    match gref % KINDS {
        GOOD | NO_MAP | GOOD_TOO => true,
        READ_ONLY => !fill,
        _ => false,
    }
}

/// The oracle: whether a transfer of this kind succeeds, by wide arithmetic on what was said.
fn succeeds(sent: &Sent, fill: bool, most: usize) -> bool {
    let parts = |segment: &Segment| segment.first_sect <= segment.last_sect && segment.last_sect <= 7;
    let count: u128 =
        sent.segments.iter().map(|part| (u128::from(part.last_sect) + 1).saturating_sub(part.first_sect.into())).sum();
    !sent.segments.is_empty()
        && sent.segments.len() <= most
        && sent.segments.iter().all(parts)
        && u128::from(sent.sector) + count <= u128::from(rig::SECTORS)
        && sent.segments.iter().all(|part| good(part.gref.0, fill))
        && sent.table.is_none_or(|gref| good(gref, false))
}

struct World {
    domain: std::sync::Arc<Domain>,
    front: Front,
    back: Back,
    random: SmallRng,
    /// By lane.
    sent: Vec<Option<Sent>>,
    mode: Mode,
    disk: Vec<u8>,
}

impl World {
    fn first_page(lane: u64) -> u32 {
        lane as u32 * (PAGES + 1)
    }

    fn snapshot(&self, lane: u64) -> Vec<Vec<u8>> {
        (0..PAGES).map(|page| self.domain.read(World::first_page(lane) + page, 0, PAGE)).collect()
    }

    fn segments(&mut self, lane: u64, most: usize) -> Vec<Segment> {
        let count = self.random.random_range(1..=most);
        // A page in two segments would get bytes in an order that nobody promises.
        let pages = rand::seq::index::sample(&mut self.random, PAGES as usize, count);
        pages
            .into_iter()
            .map(|page| {
                let kind = match self.random.random_range(0..100) {
                    0..40 => GOOD,
                    40..90 => GOOD_TOO,
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
                segment((World::first_page(lane) + page as u32) * KINDS + kind, first, last)
            })
            .collect()
    }

    /// Where on the disk: in the lane's part, or (seldom) where nothing is.
    fn sector(&mut self, lane: u64, sectors: u64) -> u64 {
        match self.random.random_range(0..50) {
            0 => u64::MAX - self.random.random_range(0..400),
            1 => self.random.random_range(rig::SECTORS - 8..1 << 60).max(rig::SECTORS - sectors.min(7)),
            _ => lane * SECTORS + self.random.random_range(0..=SECTORS - sectors),
        }
    }

    fn send(&mut self, lane: u64) {
        let kind = self.random.random_range(0..100);
        let large = (70..92).contains(&kind);
        let mut segments = self.segments(lane, if large { PAGES as usize } else { 11 });
        let mut bytes = 0;
        for part in &segments {
            bytes += u64::from(part.last_sect).saturating_sub(part.first_sect.into()) + 1;
        }
        let mut sector = self.sector(lane, bytes.min(SECTORS));
        let mut table = None;
        let first = World::first_page(lane);
        let write = self.random.random();
        let op = if write { o::WRITE } else { o::READ };
        let request = match kind {
            0..60 => direct(lane, op, sector, &segments),
            60..65 => direct(lane, o::FLUSH_DISKCACHE, sector, &segments),
            65..70 => direct(lane, o::WRITE_BARRIER, sector, &segments),
            70..92 => {
                let kind = if self.random.random_range(0..30) == 0 { MISSING } else { GOOD };
                let gref = (first + PAGES) * KINDS + kind;
                self.front.write_segments(&segments, &[(gref, first + PAGES)]);
                table = Some(gref);
                indirect(lane, op, sector, segments.len() as u16, &[gref])
            }
            92..95 => {
                segments.clear();
                direct(lane, o::FLUSH_DISKCACHE, sector, &[])
            }
            95..98 => {
                segments.clear();
                let sectors = self.random.random_range(0..200);
                sector = self.sector(lane, sectors);
                discard(lane, 0, sector, sectors)
            }
            _ => {
                segments.clear();
                direct(lane, op, sector, &[])
            }
        };
        for page in 0..PAGES {
            let byte = self.random.random();
            self.domain.fill(first + page, byte);
        }
        let data = segments.iter().flat_map(|part| self.part(part)).collect();
        let before = self.snapshot(lane);
        let fails = self.random.random_range(0..20) == 0;
        self.front.put(&request);
        self.sent[lane as usize] = Some(Sent { request, segments, table, sector, data, before, fails });
    }

    fn part(&self, part: &Segment) -> Vec<u8> {
        if part.first_sect > part.last_sect || part.last_sect > 7 {
            return vec![];
        }
        let sectors = u64::from(part.last_sect - part.first_sect) + 1;
        self.domain.read(page_of(part.gref.0), u64::from(part.first_sect) * SECTOR, sectors * SECTOR)
    }

    /// Judges an answer.
    fn judge(&mut self, (lane, operation, found): (u64, u8, i16)) {
        let sent = self.sent[lane as usize].take().expect("it was outstanding");
        let what = format!("{:?} {:?}: {:?}", self.mode, self.front.ring.abi(), sent.request);
        let (asked, most) = match &sent.request.body {
            mqblk_ring::blkif::RequestBody::Indirect(indirect) => (indirect.operation, 256),
            _ => (sent.request.operation, 11),
        };
        assert_eq!(operation, asked, "{what}");
        let fill = asked == o::READ;
        let at = (sent.sector.min(rig::SECTORS) * SECTOR) as usize;
        let expected = match &sent.request.body {
            mqblk_ring::blkif::RequestBody::Discard { sectors, .. } => {
                let inside = u128::from(sent.sector) + u128::from(*sectors) <= u128::from(rig::SECTORS);
                if inside && !sent.fails {
                    self.disk[at..at + (sectors * SECTOR) as usize].fill(0);
                }
                inside && !(sent.fails && *sectors > 0)
            }
            _ if asked == o::FLUSH_DISKCACHE && sent.segments.is_empty() => !sent.fails,
            _ => succeeds(&sent, fill, most) && !sent.fails,
        };
        assert_eq!(found, if expected { status::OKAY } else { status::ERROR }, "{what}");
        let after = self.snapshot(lane);
        if fill && expected {
            let bytes: Vec<u8> = sent.segments.iter().flat_map(|part| self.part(part)).collect();
            assert!(bytes == self.disk[at..at + bytes.len()], "{what}: wrong bytes");
        } else if !fill && expected && !sent.segments.is_empty() {
            self.disk[at..at + sent.data.len()].copy_from_slice(&sent.data);
        }
        // Outside what a read may write nothing has changed.
        let mut may = vec![vec![false; PAGE as usize]; PAGES as usize];
        for part in sent.segments.iter().filter(|part| fill && part.last_sect <= 7 && part.first_sect <= part.last_sect)
        {
            let page = page_of(part.gref.0) - World::first_page(lane);
            let range = u64::from(part.first_sect) * SECTOR..(u64::from(part.last_sect) + 1) * SECTOR;
            may[page as usize][range.start as usize..range.end as usize].fill(true);
        }
        for ((before, after), may) in sent.before.iter().zip(&after).zip(&may) {
            let same = before.iter().zip(after).zip(may).all(|((before, after), may)| *may || before == after);
            assert!(same, "{what}: bytes outside the segments have changed");
        }
        if self.mode == Mode::Map {
            let mapped: HashSet<u32> = self.domain.mapped_grants().into_iter().collect();
            assert!(sent.segments.iter().all(|part| !mapped.contains(&part.gref.0)), "{what}: still mapped");
        }
        // What is written to the pages from here on is seen by the next request's look.
        let first = World::first_page(lane);
        (0..PAGES).for_each(|page| self.domain.fill(first + page, 0xa5));
    }

    /// One of the things that happen, at random.
    fn step(&mut self) {
        match self.random.random_range(0..8) {
            0..3 => {
                let lane = self.random.random_range(0..LANES);
                if self.sent[lane as usize].is_none() {
                    let first = World::first_page(lane);
                    let untouched =
                        (0..PAGES).all(|page| self.domain.read(first + page, 0, PAGE).iter().all(|byte| *byte == 0xa5));
                    assert!(untouched, "a page was written to after its answer");
                    self.send(lane);
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
                self.back.read_mail();
            }
        }
        for answer in self.front.responses() {
            self.judge(answer);
        }
    }

    /// Ends one of the requests that are with the disk, or a step of it.
    fn finish(&mut self) {
        let pending = self.back.door.pending.len();
        if pending == 0 {
            return;
        }
        let at = self.random.random_range(0..pending);
        let asked = &self.back.door.pending[at];
        // A disk that fails in the lane's part: flushes fail by the one request that has no other step.
        let lane = asked.start.0 / (SECTORS * SECTOR);
        let alone = self.sent.iter().flatten().filter(|sent| sent.segments.is_empty()).count() == 1;
        let fails = match asked.op {
            mqblk_core::Op::Flush => {
                // Whose it is cannot be told: all flushes in flight fail or none.
                let flushes = |sent: &&Sent| matches!(sent.request.operation, o::FLUSH_DISKCACHE | o::WRITE_BARRIER);
                self.sent.iter().flatten().filter(flushes).all(|sent| sent.fails) && alone
            }
            _ => self.sent[lane as usize].as_ref().is_some_and(|sent| sent.fails),
        };
        if !fails && asked.op == mqblk_core::Op::Flush {
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

fn play(seed: u64, mode: Mode, abi: Abi) -> GrantCounters {
    let mut options = options(mode);
    options.abi = abi;
    // Little room, so that all ways are taken.
    options.persistent_max = if seed.is_multiple_of(2) { 100 } else { 200 };
    options.budget = GrantBudget::new(150);
    let (domain, front, back) = rig(options);
    for page in 0..LANES as u32 * (PAGES + 1) {
        domain.fill(page, 0xa5);
        for kind in [GOOD, READ_ONLY, NO_COPY, NO_MAP, GOOD_TOO] {
            let gref = page * KINDS + kind;
            domain.grant(gref, page, kind != READ_ONLY);
            domain.change(gref, |grant| {
                grant.no_map = [NO_COPY, NO_MAP].contains(&kind);
                grant.copy_status = (kind == NO_COPY).then_some(GrantStatus::GENERAL_ERROR);
            });
        }
    }
    let random = SmallRng::seed_from_u64(seed);
    let disk = vec![0; (rig::SECTORS * SECTOR) as usize];
    let sent = (0..LANES).map(|_| None).collect();
    let mut world = World { domain, front, back, random, sent, mode, disk };
    world.back.noting = true;
    for _ in 0..400 {
        world.step();
    }
    let outstanding = |world: &World| world.sent.iter().flatten().count();
    for _ in 0..1000 {
        if outstanding(&world) == 0 {
            break;
        }
        world.back.pull();
        world.finish();
        world.back.publish();
        world.back.read_mail();
        for answer in world.front.responses() {
            world.judge(answer);
        }
    }
    assert_eq!(outstanding(&world), 0, "every request is answered");
    assert!(world.back.read_disk(0, rig::SECTORS) == world.disk, "the disk holds what was written");
    world.back.close();
    let counters = world.back.queue.grant_counters();
    assert_eq!((world.domain.mapped(), counters.held, counters.stuck), (0, 0, 0));
    assert_eq!(counters.maps, counters.unmaps);
    counters
}

#[test]
fn random_requests_take_all_ways() {
    let mut sum = GrantCounters::default();
    for seed in 0..4 {
        for mode in MODES {
            sum.add(&play(seed, mode, Abi::Arm));
        }
    }
    let GrantCounters { copy_errors, map_errors, over_cap, over_budget, persistent_hits, barriers, .. } = sum;
    let ways =
        [copy_errors, map_errors, over_cap, over_budget, persistent_hits, barriers, sum.copies, sum.indirect_requests];
    assert!(ways.iter().all(|times| *times > 10), "{sum:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_request_ends_as_it_has_to(seed: u64) {
        for mode in MODES {
            for abi in [Abi::X86_64, Abi::X86_32] {
                play(seed, mode, abi);
            }
        }
    }
}
