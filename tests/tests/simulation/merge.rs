//! Plug and merge together with everything else: a stepped worker serves several queues of one disk that takes few requests at a time,
//! completes out of order and has bad sectors, while queues are drained and attached again. Exactly the requests with a bad sector fail,
//! all data is where it belongs, and every request completes once.
//!
//! `MQBLK_MERGE_SEEDS=from..to` runs other seeds than the usual ones.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use mqblk_core::settings::Settings;
use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, FinishedRequest, GuestQueue, Intake, Limits, Op,
    Outcome, PublishResult, PullEnd, Request, Tag,
};
use mqblk_engine::{
    AnyDisk, Coalesce, MergeMode, PlugOptions, PollPolicy, QueueDisk, QueueOptions, SteppedQueue, SteppedWorker,
    UringContext, UringOptions,
};
use mqblk_memory::{GuestAddress, GuestMemory, LeaseId, Region};
use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 1024;
const QUEUES: usize = 3;
const DEPTH: u16 = 64;
/// Guest memory of one request in flight.
const AREA: u64 = 32 * BLOCK;
const MOST_BLOCKS: u64 = 8;
/// The queue slot in a merged request's tag.
const MERGED: u16 = u16::MAX;

type Buffer = <UringContext as mqblk_core::IoContext>::Buffer;

/// Bad blocks: the first and their number, for each kind of request.
struct Bad {
    reads: Vec<(u64, u64)>,
    writes: Vec<(u64, u64)>,
    discards: Vec<(u64, u64)>,
    zeroes: Vec<(u64, u64)>,
}

impl Bad {
    fn of(&self, op: Op) -> &[(u64, u64)] {
        match op {
            Op::Read => &self.reads,
            Op::Write { .. } => &self.writes,
            Op::Discard { .. } => &self.discards,
            Op::WriteZeroes { .. } => &self.zeroes,
            Op::Flush => &[],
        }
    }
}

/// Counters of the storage.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    requests: u64,
    merged: u64,
    joined_failed: u64,
    refused: u64,
    longest: u64,
}

/// Offers another channel only a part of what it is offered.
struct StingyChannel {
    inner: AnyChannel,
    random: SmallRng,
    seen: Arc<Mutex<Seen>>,
}

impl StingyChannel {
    fn count_failures(&self, finished: &[Completion<Buffer>]) {
        let failed = finished.iter().filter(|done| done.tag.queue() == MERGED && !done.outcome.is_done()).count();
        self.seen.lock().unwrap().joined_failed += failed as u64;
    }
}

/// Wraps `inner` in a disk with a channel that takes few requests, and short write-zeroes.
fn stingy(inner: Arc<AnyDisk>, seed: u64, seen: &Arc<Mutex<Seen>>) -> Arc<AnyDisk> {
    let limits = Limits { write_zeroes: Some(ByteLen(10 * BLOCK)), ..inner.limits() };
    let seen = Arc::clone(seen);
    let channel = move |inner| StingyChannel { inner, random: SmallRng::seed_from_u64(seed), seen: Arc::clone(&seen) };
    Arc::new(FilterDisk { inner, limits, wrap_channel: move |inner| Box::new(channel(inner)) as AnyChannel })
}

impl DiskChannel<UringContext> for StingyChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        assert!(!batch.is_empty());
        let most = if self.random.random_ratio(1, 3) { self.random.random_range(0..=batch.len()) } else { batch.len() };
        let before = finished.len();
        let mut rest = batch.split_off(most);
        let offered: Vec<_> = batch.iter().map(|request| (request.tag.queue() == MERGED, request.len.0)).collect();
        let taken = self.inner.submit(context, batch, finished);
        batch.append(&mut rest);
        {
            let mut seen = self.seen.lock().unwrap();
            for (merged, len) in &offered[..taken] {
                seen.requests += 1;
                seen.merged += u64::from(*merged);
                seen.longest = seen.longest.max(*len);
            }
            seen.refused += batch.len() as u64;
        }
        self.count_failures(&finished[before..]);
        taken
    }
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        let count = self.inner.reap(context, finished);
        self.count_failures(&finished[before..]);
        count
    }
    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        self.inner.cancel(context, tags, finished);
    }
    fn outstanding(&self) -> u32 {
        self.inner.outstanding()
    }
    fn deadline(&self) -> Option<std::time::Instant> {
        self.inner.deadline()
    }
    fn close(&mut self, context: &mut UringContext) {
        assert_eq!(self.inner.outstanding(), 0, "a channel is drained before it is closed");
        self.inner.close(context);
    }
}

/// One guest request: some ranges, and for reads and writes one range and its memory.
#[derive(Clone, Debug)]
struct Ask {
    op: Op,
    /// First block and blocks.
    ranges: Vec<(u64, u64)>,
    /// Memory segments.
    pieces: Vec<(u64, u32)>,
    /// Its slot in the guest's memory.
    area: u64,
    data: Vec<u8>,
}

impl Ask {
    fn blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.ranges.iter().flat_map(|(first, count)| *first..first + count)
    }
    fn bytes(&self) -> std::ops::Range<usize> {
        let (first, count) = self.ranges[0];
        (first * BLOCK) as usize..((first + count) * BLOCK) as usize
    }
    fn fails(&self, bad: &Bad) -> bool {
        let hit = |block: u64| bad.of(self.op).iter().any(|(first, count)| (*first..first + count).contains(&block));
        self.blocks().any(hit)
    }
}

/// The guest's side of a queue, shared with the queue that the worker has.
struct Side {
    memory: Arc<GuestMemory>,
    waiting: VecDeque<Ask>,
    answered: Vec<(Ask, Outcome)>,
    /// Free slots of its memory.
    areas: Vec<u64>,
    taken: usize,
}

struct ScriptedQueue {
    side: Arc<Mutex<Side>>,
    lease: LeaseId,
    random: SmallRng,
    finished: Vec<(Ask, Outcome)>,
}

impl GuestQueue for ScriptedQueue {
    type Token = Ask;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        DEPTH
    }

    fn pull<I: Intake<Ask, Buffer>>(&mut self, context: &mut UringContext, into: &mut I) -> PullEnd {
        let mut side = self.side.lock().unwrap();
        let batch = self.random.random_range(1..=16_usize).min(into.room());
        for _ in 0..batch {
            let Some(ask) = side.waiting.pop_front() else { return PullEnd::Empty };
            side.taken += 1;
            let place = |(first, count): &(u64, u64)| (ByteOffset(first * BLOCK), ByteLen(count * BLOCK));
            match ask.op {
                Op::Read | Op::Write { .. } => {
                    let buffer = context.buffers.take(self.lease);
                    for (at, len) in &ask.pieces {
                        context.buffers.push(&buffer, GuestAddress(*at), *len, 64).expect("mapped");
                    }
                    let (start, len) = place(&ask.ranges[0]);
                    into.admit(ask.clone(), DiskSlot::FIRST, ask.op, start, len, Some(buffer));
                }
                Op::Flush => into.admit(ask, DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None),
                op => {
                    let parts: Vec<_> = ask.ranges.iter().map(place).collect();
                    into.admit_parts(ask, DiskSlot::FIRST, op, &parts);
                }
            }
        }
        if side.waiting.is_empty() { PullEnd::Empty } else { PullEnd::MoreWaiting }
    }

    fn finish<I: Intake<Ask, Buffer>>(
        &mut self,
        context: &mut UringContext,
        done: FinishedRequest<Ask, Buffer>,
        _into: &mut I,
    ) {
        assert_eq!(done.buffer.is_some(), done.token.op.has_data());
        if let Some(buffer) = done.buffer {
            // The request's own buffer, not a merged one.
            assert_eq!(context.buffers.len(&buffer).0, done.token.bytes().len() as u64);
            assert!(!context.buffers.is_merged(&buffer));
            context.buffers.release(buffer);
        }
        self.finished.push((done.token, done.outcome));
    }

    fn publish(&mut self) -> PublishResult {
        self.side.lock().unwrap().answered.append(&mut self.finished);
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::WorkWaiting
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

/// The model of the disk: its expected contents, and its requests in flight.
struct Model {
    bytes: Vec<u8>,
    readers: Vec<u32>,
    writer: Vec<bool>,
    /// Overlapping requests may be in flight together: then only outcomes are checked, not data.
    chaos: bool,
}

impl Model {
    /// Adds a request to those in flight. Returns false if it conflicts with one of them.
    fn enter(&mut self, ask: &Ask) -> bool {
        let modifies = ask.op.modifies();
        let free = |block: u64| !self.writer[block as usize] && (!modifies || self.readers[block as usize] == 0);
        if !self.chaos && !ask.blocks().all(free) {
            return false;
        }
        for block in ask.blocks() {
            match modifies {
                true => self.writer[block as usize] = true,
                false => self.readers[block as usize] += 1,
            }
        }
        true
    }

    /// Checks a completion.
    fn leave(&mut self, ask: &Ask, outcome: Outcome, memory: &GuestMemory, bad: &Bad, seed: u64) {
        assert_eq!(outcome.is_done(), !ask.fails(bad), "seed {seed}: {outcome:?} for {:?} {:?}", ask.op, ask.ranges);
        for block in ask.blocks() {
            match ask.op.modifies() {
                true => self.writer[block as usize] = false,
                false => self.readers[block as usize] -= 1,
            }
        }
        match (ask.op, outcome) {
            (Op::Read, Outcome::Done(len)) => {
                assert_eq!(len.0 as usize, ask.bytes().len(), "seed {seed}");
                let mut found = vec![];
                for (at, len) in &ask.pieces {
                    let mut piece = vec![0; *len as usize];
                    memory.read(GuestAddress(*at), &mut piece).expect("mapped");
                    found.extend(piece);
                }
                let wrong = found != self.bytes[ask.bytes()];
                assert!(self.chaos || !wrong, "seed {seed}: wrong data read at {:?}", ask.ranges);
            }
            (Op::Write { .. }, Outcome::Done(_)) => self.bytes[ask.bytes()].copy_from_slice(&ask.data),
            (Op::Discard { .. } | Op::WriteZeroes { .. }, _) => {
                // Ranges of one request are executed one by one: good ones succeed even if the request fails.
                for range in &ask.ranges {
                    let part = Ask { ranges: vec![*range], ..ask.clone() };
                    if !part.fails(bad) {
                        self.bytes[part.bytes()].fill(0);
                    }
                }
            }
            _ => {}
        }
    }
}

struct Simulation {
    seed: u64,
    random: SmallRng,
    worker: SteppedWorker,
    disk: Arc<AnyDisk>,
    sides: Vec<Arc<Mutex<Side>>>,
    attached: Vec<Option<SteppedQueue>>,
    model: Model,
    bad: Bad,
    seen: Arc<Mutex<Seen>>,
    submitted: u64,
    answered: u64,
}

fn ranges(random: &mut SmallRng) -> Vec<(u64, u64)> {
    (0..random.random_range(1..4)).map(|_| (random.random_range(0..BLOCKS - 4), random.random_range(1..4))).collect()
}

fn rules(ranges: &[(u64, u64)]) -> String {
    let rules: Vec<_> =
        ranges.iter().map(|(first, count)| format!("{}+{}:EIO", first * BLOCK, count * BLOCK)).collect();
    rules.join("/")
}

impl Simulation {
    fn new(seed: u64) -> Simulation {
        let mut random = SmallRng::seed_from_u64(seed);
        let [reads, writes, discards, zeroes] = std::array::from_fn(|_| ranges(&mut random));
        let bad = Bad { reads, writes, discards, zeroes };
        let mut settings = Settings::new("disk");
        let reorder = if random.random_bool(0.7) { random.random_range(1..20) } else { 0 };
        for (key, value) in [
            ("inner", "ram".to_owned()),
            ("size", (BLOCKS * BLOCK).to_string()),
            ("fail-read", rules(&bad.reads)),
            ("fail-write", rules(&bad.writes)),
            ("fail-discard", rules(&bad.discards)),
            ("fail-zeroes", rules(&bad.zeroes)),
            ("fault-reorder", reorder.to_string()),
            ("fault-seed", seed.to_string()),
        ] {
            settings.insert(key, &value).unwrap();
        }
        let inner = mqblk_storage::open("fault", &mut settings).unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let disk = stingy(inner, seed, &seen);
        let side = |_| {
            let region = Region::shared("guest", u64::from(DEPTH) * AREA, GuestAddress(0)).unwrap().0;
            let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
            let areas = (0..u64::from(DEPTH)).map(|at| at * AREA).collect();
            Arc::new(Mutex::new(Side { memory, waiting: VecDeque::new(), answered: vec![], areas, taken: 0 }))
        };
        let model = Model {
            bytes: vec![0; (BLOCKS * BLOCK) as usize],
            readers: vec![0; BLOCKS as usize],
            writer: vec![false; BLOCKS as usize],
            chaos: seed % 4 == 3,
        };
        let mut simulation = Simulation {
            seed,
            random,
            worker: SteppedWorker::new(UringOptions { submissions: 8, in_flight: 64, files: 1, buffers: 1 }).unwrap(),
            disk,
            sides: (0..QUEUES).map(side).collect(),
            attached: vec![None; QUEUES],
            model,
            bad,
            seen,
            submitted: 0,
            answered: 0,
        };
        for at in 0..QUEUES {
            simulation.attach(at);
        }
        simulation
    }

    fn attach(&mut self, at: usize) {
        let side = Arc::clone(&self.sides[at]);
        let options = QueueOptions {
            disks: vec![QueueDisk {
                slot: DiskSlot::FIRST,
                disk: Arc::clone(&self.disk),
                plug: PlugOptions {
                    merge: MergeMode::On,
                    merge_bytes: ByteLen(40 * BLOCK),
                    merge_segments: 24,
                    ..PlugOptions::default()
                },
                health: Arc::default(),
            }],
            kick: None,
            poll: PollPolicy::Busy,
            coalesce: Coalesce::default(),
            paused: false,
            on_broken: Box::new(|why| panic!("{why}")),
        };
        let random = SmallRng::seed_from_u64(self.random.random());
        let attached_queue = self.worker.attach(options, |context, _| {
            let lease = context.buffers.acquire_lease(Arc::clone(&side.lock().unwrap().memory), vec![]);
            Ok(ScriptedQueue { side, lease, random, finished: vec![] })
        });
        self.attached[at] = Some(attached_queue.unwrap());
    }

    /// Returns one guest request at `first`; `None` when the picked queues have no free slot.
    fn ask(&mut self, op: Op, first: u64, count: u64) -> Option<()> {
        let queue = self.random.random_range(0..QUEUES);
        let mut side = self.sides[queue].lock().unwrap();
        let area = side.areas.pop()?;
        let mut ask = Ask { op, ranges: vec![], pieces: vec![], area, data: vec![] };
        match op {
            Op::Flush => {}
            Op::Read | Op::Write { .. } => {
                ask.ranges.push((first, count));
                // In a few segments, with and without gaps between them; the whole request fits in its area.
                let (mut at, mut left) = (area, count);
                while left > 0 {
                    let run = self.random.random_range(1..=left);
                    ask.pieces.push((at, (run * BLOCK) as u32));
                    at += (run + self.random.random_range(0..3) / 2) * BLOCK;
                    left -= run;
                }
                ask.data = (0..count * BLOCK).map(|_| self.random.random()).collect();
                let mut from = 0;
                for (at, len) in &ask.pieces {
                    let to = from + *len as usize;
                    let fill = if op == Op::Read { vec![0xee; *len as usize] } else { ask.data[from..to].to_vec() };
                    side.memory.write(GuestAddress(*at), &fill).expect("mapped");
                    from = to;
                }
            }
            _ => {
                // Up to three ranges, some of which touch.
                let mut at = first;
                for _ in 0..self.random.random_range(1..=3) {
                    if at + count <= BLOCKS {
                        ask.ranges.push((at, count));
                    }
                    at += count + self.random.random_range(0..2) * 3;
                }
            }
        }
        if !self.model.enter(&ask) {
            side.areas.push(area);
            return None;
        }
        side.waiting.push_back(ask);
        self.submitted += 1;
        Some(())
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
        let mut at = self.random.random_range(0..BLOCKS - MOST_BLOCKS);
        for _ in 0..self.random.random_range(1..12) {
            let count = self.random.random_range(1..=MOST_BLOCKS);
            if at + count > BLOCKS {
                break;
            }
            self.ask(op, at, count);
            at += count;
        }
    }

    fn collect(&mut self) {
        for side in &self.sides {
            let mut side = side.lock().unwrap();
            for (ask, outcome) in std::mem::take(&mut side.answered) {
                self.model.leave(&ask, outcome, &side.memory, &self.bad, self.seed);
                side.areas.push(ask.area);
                self.answered += 1;
            }
        }
    }

    fn turn(&mut self) {
        self.worker.turn();
        self.collect();
        for at in 0..QUEUES {
            let Some(attached_queue) = self.attached[at] else { continue };
            if !self.worker.serves(attached_queue) {
                // It is detached: the requests that it pulled are complete, waiting ones are for the next queue.
                self.attached[at] = None;
                let side = self.sides[at].lock().unwrap();
                assert_eq!(side.areas.len() + side.waiting.len(), usize::from(DEPTH), "seed {}", self.seed);
            }
        }
    }

    fn run(&mut self) {
        for _ in 0..400 {
            for _ in 0..self.random.random_range(0..4) {
                self.publish();
            }
            for _ in 0..self.random.random_range(1..4) {
                self.turn();
            }
            let at = self.random.random_range(0..QUEUES);
            match self.attached[at] {
                None => self.attach(at),
                Some(attached_queue) if self.random.random_ratio(1, 20) => self.worker.drain(attached_queue),
                Some(_) => {}
            }
        }
        // All requests complete, however few are taken at once.
        for _ in 0..100_000 {
            if self.answered == self.submitted {
                break;
            }
            for at in 0..QUEUES {
                if self.attached[at].is_none() {
                    self.attach(at);
                }
            }
            self.turn();
        }
        assert_eq!(self.answered, self.submitted, "seed {}: requests were lost", self.seed);
        for at in 0..QUEUES {
            if let Some(attached_queue) = self.attached[at] {
                self.worker.drain(attached_queue);
                assert!(!self.worker.serves(attached_queue), "seed {}: nothing is in flight", self.seed);
            }
        }
    }
}

fn seeds() -> std::ops::Range<u64> {
    let given = std::env::var("MQBLK_MERGE_SEEDS").ok();
    let parsed = given.as_deref().map(|text| {
        let (from, to) = text.split_once("..").expect("MQBLK_MERGE_SEEDS: expected from..to");
        from.parse().expect("a number")..to.parse().expect("a number")
    });
    parsed.unwrap_or(0..48)
}

#[test]
fn only_requests_with_bad_sectors_fail_and_all_data_is_right() {
    let mut all = Seen::default();
    let mut submitted = 0;
    for seed in seeds() {
        let mut simulation = Simulation::new(seed);
        simulation.run();
        let seen = *simulation.seen.lock().unwrap();
        assert!(seen.longest <= 40 * BLOCK, "seed {seed}: {seen:?}");
        submitted += simulation.submitted;
        all.requests += seen.requests;
        all.merged += seen.merged;
        all.joined_failed += seen.joined_failed;
        all.refused += seen.refused;
    }
    // The simulation is not trivial.
    assert!(
        all.merged > submitted / 50 && all.joined_failed > submitted / 1000 && all.refused > submitted / 50,
        "{submitted}: {all:?}"
    );
}
