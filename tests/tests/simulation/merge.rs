//! Plug and merge together with everything else. A stepped worker serves several queues of one disk that takes few
//! requests at a time, completes out of order and has bad sectors, while queues are drained and reattached. Exactly the
//! requests with a bad sector fail, all data is where it belongs, and every request completes once.
//!
//! `MQBLK_MERGE_SEEDS=600` runs more seeds, `MQBLK_MERGE_SEED=7` one.

use std::sync::Arc;

use mqblk_core::{ByteLen, Limits, Op, Outcome};
use mqblk_engine::{AnyDisk, MergeMode, PlugOptions, SteppedWorker, UringOptions};
use mqblk_tests::crash::oracle::WriteOutcome;
use mqblk_tests::load_queues::SectorRange;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::harness::disk_model::{DiskModel, sectors};
use crate::harness::scripted_guest::{GuestRequest, MOST_SECTORS, ScriptedGuest};
use crate::harness::seeds::{Simulation, counters, run_seeds};
use crate::harness::storage::{ChannelCounts, Stinginess, open_disk, queue_disk};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 1024;
const QUEUES: usize = 3;
/// Longest merged request.
const LONGEST: ByteLen = ByteLen(40 * BLOCK);

/// Bad blocks, for each kind of request.
struct BadBlocks {
    reads: Vec<SectorRange>,
    writes: Vec<SectorRange>,
    discards: Vec<SectorRange>,
    zeroes: Vec<SectorRange>,
}

impl BadBlocks {
    fn new(random: &mut SmallRng) -> BadBlocks {
        let [reads, writes, discards, zeroes] = std::array::from_fn(|_| {
            let range = |_| (random.random_range(0..BLOCKS - 4), random.random_range(1..4));
            (0..3).map(range).collect()
        });
        BadBlocks { reads, writes, discards, zeroes }
    }

    fn of(&self, op: Op) -> &[SectorRange] {
        match op {
            Op::Read => &self.reads,
            Op::Write { .. } => &self.writes,
            Op::Discard { .. } => &self.discards,
            Op::WriteZeroes { .. } => &self.zeroes,
            Op::Flush => &[],
        }
    }

    fn fail(&self, op: Op, ranges: &[SectorRange]) -> bool {
        sectors(ranges).any(|block| sectors(self.of(op)).any(|bad| bad == block))
    }

    /// Returns the fault disk's rules for this kind of requests.
    fn rules(&self, op: Op) -> String {
        let rule = |(first, count): &SectorRange| format!("{}+{}:EIO", first * BLOCK, u64::from(*count) * BLOCK);
        self.of(op).iter().map(rule).collect::<Vec<_>>().join("/")
    }

    fn disk(&self, random: &mut SmallRng, seed: u64) -> Arc<AnyDisk> {
        let reorder = if random.random_bool(0.7) { random.random_range(1..20) } else { 0 };
        let write_zeroes = Op::WriteZeroes { may_unmap: false, fua: false };
        open_disk(
            "fault",
            &[
                ("inner", "ram"),
                ("size", &(BLOCKS * BLOCK).to_string()),
                ("fail-read", &self.rules(Op::Read)),
                ("fail-write", &self.rules(Op::Write { fua: false })),
                ("fail-discard", &self.rules(Op::Discard { secure: false })),
                ("fail-zeroes", &self.rules(write_zeroes)),
                ("fault-reorder", &reorder.to_string()),
                ("fault-seed", &seed.to_string()),
            ],
        )
    }
}

counters! { struct Counts { submitted, completed } }

struct Merging {
    random: SmallRng,
    worker: SteppedWorker,
    disk: Arc<AnyDisk>,
    guests: Vec<ScriptedGuest>,
    model: DiskModel,
    bad: BadBlocks,
    stinginess: Stinginess,
    counts: Counts,
}

impl Merging {
    fn new(seed: u64) -> Merging {
        let mut random = SmallRng::seed_from_u64(seed);
        let bad = BadBlocks::new(&mut random);
        let inner = bad.disk(&mut random, seed);
        let stinginess = Stinginess::new(seed);
        let limits = Limits { write_zeroes: Some(ByteLen(10 * BLOCK)), ..inner.limits() };
        let mut simulation = Merging {
            random,
            worker: SteppedWorker::new(UringOptions { submissions: 8, in_flight: 64, files: 1, buffers: 1 }).unwrap(),
            disk: stinginess.disk(inner, limits, LONGEST),
            guests: (0..QUEUES).map(|_| ScriptedGuest::new()).collect(),
            // Sometimes with overlapping requests.
            model: DiskModel::new(BLOCKS, seed % 4 == 3),
            bad,
            stinginess,
            counts: Counts::default(),
        };
        (0..QUEUES).for_each(|at| simulation.attach(at));
        simulation
    }

    fn attach(&mut self, at: usize) {
        let plug =
            PlugOptions { merge: MergeMode::On, merge_bytes: LONGEST, merge_segments: 24, ..PlugOptions::default() };
        let random = SmallRng::seed_from_u64(self.random.random());
        self.guests[at].attach(&mut self.worker, vec![queue_disk(0, &self.disk, plug)], random, false);
    }

    fn send(&mut self, op: Op, first: u64, count: u32) {
        let mut ranges = vec![];
        match op {
            Op::Flush => {}
            op if op.has_data() => ranges.push((first, count)),
            _ => {
                // Up to three ranges, some of which touch.
                let mut at = first;
                for _ in 0..self.random.random_range(1..=3) {
                    if at + u64::from(count) <= BLOCKS {
                        ranges.push((at, count));
                    }
                    at += u64::from(count) + self.random.random_range(0..2) * 3;
                }
            }
        }
        let guest = &self.guests[self.random.random_range(0..QUEUES)];
        let request = GuestRequest::new(self.counts.submitted + 1, 0, op, ranges);
        self.counts.submitted += u64::from(guest.send(request, &mut self.model, &mut self.random));
    }

    /// Submits a few sequential requests, or one anywhere.
    fn publish(&mut self) {
        let op = match self.random.random_range(0..20) {
            0..7 => Op::Read,
            7..13 => Op::Write { fua: false },
            13 => Op::Write { fua: true },
            14..16 => Op::Discard { secure: false },
            16 => Op::WriteZeroes { may_unmap: false, fua: false },
            17 => Op::WriteZeroes { may_unmap: true, fua: true },
            _ => Op::Flush,
        };
        let mut at = self.random.random_range(0..BLOCKS - u64::from(MOST_SECTORS));
        for _ in 0..self.random.random_range(1..12) {
            let count = self.random.random_range(1..=MOST_SECTORS);
            if at + u64::from(count) > BLOCKS {
                break;
            }
            self.send(op, at, count);
            at += u64::from(count);
        }
    }

    fn complete(&mut self, request: &GuestRequest, outcome: Outcome, data: &[u8]) {
        let GuestRequest { id, op, ref ranges, .. } = *request;
        let context = || format!("{outcome:?} for {request:?}");
        assert_eq!(outcome.is_done(), !self.bad.fail(op, ranges), "{}", context());
        self.counts.completed += 1;
        if !op.modifies() {
            if let (Op::Read, Outcome::Done(len)) = (op, outcome) {
                assert_eq!(len.0 as usize, data.len(), "{}", context());
            }
            return self.model.complete_read(id, ranges, outcome.is_done().then_some(data));
        }
        // Ranges of one request are executed one by one: good ones succeed even if the request fails.
        for range in ranges {
            let refused = self.bad.fail(op, &[*range]);
            let outcome = if refused { WriteOutcome::Refused } else { WriteOutcome::Completed };
            self.model.complete_write(id, &[*range], outcome);
        }
    }

    fn turn(&mut self) {
        self.worker.turn();
        for at in 0..QUEUES {
            for (request, outcome) in self.guests[at].take_completed() {
                let data = self.guests[at].data(&request);
                self.complete(&request, outcome, &data);
            }
            self.guests[at].notice_detached(&mut self.worker);
        }
    }
}

impl Simulation for Merging {
    type Counts = (Counts, ChannelCounts);
    const STEPS: u32 = 400;

    fn step(&mut self) {
        for _ in 0..self.random.random_range(0..4) {
            self.publish();
        }
        for _ in 0..self.random.random_range(1..4) {
            self.turn();
        }
        let at = self.random.random_range(0..QUEUES);
        match self.guests[at].queue() {
            None => self.attach(at),
            Some(queue) if self.random.random_ratio(1, 20) => self.worker.drain(queue),
            Some(_) => {}
        }
    }

    fn settle(&mut self) {
        for at in 0..QUEUES {
            if self.guests[at].queue().is_none() {
                self.attach(at);
            }
        }
        self.turn();
    }

    fn in_flight(&self) -> usize {
        (self.counts.submitted - self.counts.completed) as usize
    }

    fn finish(mut self) -> Self::Counts {
        for queue in self.guests.iter().filter_map(ScriptedGuest::queue) {
            self.worker.drain(queue);
            assert!(!self.worker.serves(queue), "nothing is in flight");
        }
        (self.counts, self.stinginess.counts())
    }
}

#[test]
fn only_requests_with_bad_sectors_fail_and_all_data_is_right() {
    let Some((counts, all)) = run_seeds("MERGE", 0..48, |seed| Merging::new(seed).run()) else { return };
    // The simulation is not trivial.
    let submitted = counts.submitted;
    assert!(
        all.merged > submitted / 50 && all.merged_failed > submitted / 1000 && all.refused > submitted / 50,
        "{submitted}: {all:?}"
    );
}
