//! Random requests against a model of the disk.

use std::ops::Range;
use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::worker::MEMORY;
use super::{TestRequest, TestTarget, TestWorker};

/// Each request's own area of guest memory, guard bytes included.
const AREA: u64 = 1 << 20;
/// Longest request: longer than any bounce slot.
const LONGEST: u64 = 300 << 10;
/// Content of guest memory that must not be written.
const GUARD: u8 = 0xa5;
const ROUNDS: u32 = 60;

/// The known content of the disk.
struct DiskModel {
    bytes: Vec<u8>,
    /// Blocks that were discarded: they hold their old content or zeroes.
    discarded: Vec<bool>,
    block: u64,
    /// The part of the disk that this model covers.
    range: Range<u64>,
}

impl DiskModel {
    fn blocks(&self, start: u64, len: u64) -> Range<usize> {
        ((start - self.range.start) / self.block) as usize..((start + len - self.range.start) / self.block) as usize
    }

    fn set(&mut self, start: u64, data: &[u8]) {
        let at = (start - self.range.start) as usize;
        self.bytes[at..at + data.len()].copy_from_slice(data);
        let blocks = self.blocks(start, data.len() as u64);
        self.discarded[blocks].fill(false);
    }

    /// Compares the data that was read, and updates discarded blocks.
    fn check(&mut self, start: u64, found: &[u8], context: &str) {
        for index in self.blocks(start, found.len() as u64) {
            let at = index * self.block as usize;
            let from = at - (start - self.range.start) as usize;
            let got = &found[from..from + self.block as usize];
            let held = &mut self.bytes[at..at + self.block as usize];
            if got != held {
                let discarded = self.discarded[index] && got.iter().all(|byte| *byte == 0);
                let first = got.iter().zip(held.iter()).position(|(a, b)| a != b);
                assert!(discarded, "{context}: wrong data in the block at {at}, from byte {first:?} of it");
                held.fill(0);
            }
            self.discarded[index] = false;
        }
    }
}

/// Splits `len` bytes into segments inside a memory area, in order, with gaps.
fn pieces(random: &mut SmallRng, area: u64, len: u64, max: u32) -> Vec<(u64, u32)> {
    let align = [1, 1, 2, 8, 512, 512, 4096][random.random_range(0..7)];
    let count = if random.random_bool(0.5) { 1 } else { random.random_range(1..=max.min(40)) };
    let mut cuts: Vec<u64> = (1..count).map(|_| random.random_range(0..=len / align) * align).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts.dedup();
    let mut address = area + random.random_range(0..64) * align;
    let mut segments = Vec::new();
    for cut in cuts.windows(2) {
        let run = cut[1] - cut[0];
        segments.push((address, run as u32));
        address = (address + run).next_multiple_of(align) + random.random_range(0..4) * align;
    }
    segments
}

/// Returns disjoint ranges inside `range`.
fn disjoint(random: &mut SmallRng, range: &Range<u64>, block: u64, count: usize) -> Vec<(u64, u64)> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    for _ in 0..count {
        let blocks = if random.random_bool(0.8) { random.random_range(1..=16) } else { LONGEST / block };
        let len = random.random_range(1..=blocks) * block;
        let start = range.start + random.random_range(0..=(range.end - range.start - len) / block) * block;
        if found.iter().all(|(other, size)| start + len <= *other || other + size <= start) {
            found.push((start, len));
        }
    }
    found
}

/// Verifies one part of the disk against a model for many rounds of concurrent requests.
fn rounds(trial: &TestTarget<'_>, disk: &dyn Disk<UringContext>, range: Range<u64>, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let fixed = if random.random_bool(0.5) { FixedBufferUse::Auto } else { FixedBufferUse::Off };
    let mut worker = TestWorker::new(disk, 64, fixed);
    let block = u64::from(disk.geometry().logical_block.bytes());
    let limits = disk.limits();
    let size = range.end - range.start;
    let mut model = DiskModel {
        bytes: vec![0; size as usize],
        discarded: vec![false; (size / block) as usize],
        block,
        range: range.clone(),
    };
    for start in range.clone().step_by(AREA as usize) {
        let len = AREA.min(range.end - start);
        let mut data = vec![0; len as usize];
        random.fill(&mut data[..]);
        worker.write_memory(0, &data);
        assert_eq!(
            worker.run_one(TestRequest::with_data(Op::Write { fua: false }, start, len, 0)),
            Outcome::Done(ByteLen(len))
        );
        model.set(start, &data);
    }
    for round in 0..ROUNDS {
        let mut requests = Vec::new();
        for (at, (start, len)) in disjoint(&mut random, &range, block, (MEMORY / AREA) as usize).into_iter().enumerate()
        {
            let op = match random.random_range(0..10) {
                0..4 => Op::Read,
                4..7 => Op::Write { fua: random.random_bool(0.2) },
                7 => Op::WriteZeroes { may_unmap: random.random_bool(0.5), fua: random.random_bool(0.2) },
                8 if limits.discard.is_some() => Op::Discard { secure: false },
                _ => Op::Flush,
            };
            requests.push(match op {
                Op::Flush => TestRequest::without_data(op, 0, 0),
                op if op.has_data() => {
                    let area = at as u64 * AREA;
                    let segments = pieces(&mut random, area, len, limits.max_segments);
                    worker.write_memory(area, &vec![GUARD; AREA as usize]);
                    if op != Op::Read {
                        for (address, run) in &segments {
                            let mut data = vec![0; *run as usize];
                            random.fill(&mut data[..]);
                            worker.write_memory(*address, &data);
                        }
                    }
                    TestRequest { op, start, len, segments: Some(segments) }
                }
                op => TestRequest::without_data(op, start, len),
            });
        }
        let results = worker.run(&requests);
        for (at, (request, result)) in requests.iter().zip(results).enumerate() {
            let context = format!("{trial:?}, seed {seed}, round {round}: {request:?}");
            let moved = if request.op.has_data() { request.len } else { 0 };
            assert_eq!(result.outcome, Outcome::Done(ByteLen(moved)), "{context}");
            if trial.keeps_data {
                update_model(&worker, &mut model, request, at as u64 * AREA, &context);
            }
        }
    }
    worker.close();
}

/// Updates the model with a request that succeeded, and compares the data of a read.
fn update_model(worker: &TestWorker, model: &mut DiskModel, request: &TestRequest, area: u64, context: &str) {
    match request.op {
        Op::Flush => {}
        Op::Discard { .. } => {
            let blocks = model.blocks(request.start, request.len);
            model.discarded[blocks].fill(true);
        }
        Op::WriteZeroes { .. } => model.set(request.start, &vec![0; request.len as usize]),
        Op::Read | Op::Write { .. } => {
            let Some(segments) = &request.segments else { return };
            let mut memory = worker.read_memory(area, AREA as usize);
            let mut data = Vec::with_capacity(request.len as usize);
            for (address, len) in segments {
                let at = (address - area) as usize;
                data.extend_from_slice(&memory[at..at + *len as usize]);
                memory[at..at + *len as usize].fill(GUARD);
            }
            assert!(memory == vec![GUARD; AREA as usize], "{context}: memory outside the buffer was touched");
            match request.op {
                Op::Read => model.check(request.start, &data, context),
                _ => model.set(request.start, &data),
            }
        }
    }
}

pub(super) fn one_worker(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    rounds(trial, disk.as_ref(), 0..disk.geometry().size.0, trial.seed);
}

/// Two threads with a channel each, on halves of the disk.
pub(super) fn two_workers(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let size = disk.geometry().size.0;
    let block = u64::from(disk.geometry().logical_block.bytes());
    let middle = size / 2 - size / 2 % block;
    std::thread::scope(|scope| {
        for (half, seed) in [(0..middle, trial.seed ^ 1), (middle..size, trial.seed ^ 2)] {
            scope.spawn(move || rounds(trial, disk.as_ref(), half, seed));
        }
    });
}
