//! Cancellation together with everything else: a stepped worker serves queues of several disks that merge, take few requests at a time,
//! complete late, out of order or with errors, and are opened and closed; and at random times the queues cancel some of the requests in
//! flight. Whatever happens:
//!
//! * every request finishes exactly once, with its own buffer, and no buffer is leaked;
//! * only requests that were chosen, or that were for a disk being closed, are aborted;
//! * a block holds the data last written to it, or that of a request that was aborted or failed.
//!
//! A second run has disks that stop when a request fails, or repeat it: then only requests fail that were resumed with `report`, and
//! nothing is parked in the end.
//!
//! `MQBLK_CANCEL_SEEDS=from..to` runs other seeds than the usual ones.

mod channel;

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use self::channel::StingyChannel;
use mqblk_core::settings::Settings;
use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, FinishedRequest, GuestQueue, Intake, Op,
    Outcome, PublishResult, PullEnd, Request, Tag, Wake,
};
use mqblk_engine::{
    AnyDisk, Coalesce, DiskHealth, ErrorPolicy, MergeMode, OnError, OnNoSpace, PlugOptions, PollPolicy, QueueDisk,
    QueueOptions, Resume, SteppedQueue, SteppedWorker, UringContext, UringOptions,
};
use mqblk_memory::{GuestAddress, GuestMemory, LeaseId, Region};
use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 512;
const DISKS: u16 = 4;
const QUEUES: usize = 3;
const DEPTH: u16 = 64;
const MOST_BLOCKS: u64 = 8;
/// Guest memory of one request in flight.
const AREA: u64 = MOST_BLOCKS * BLOCK;
const PATIENCE: Duration = Duration::from_secs(60);
/// The queue slot in a merged request's tag.
const MERGED: u16 = u16::MAX;

type Buffer = <UringContext as mqblk_core::IoContext>::Buffer;

/// A guest request.
#[derive(Clone, Debug)]
struct Ask {
    id: u64,
    disk: u16,
    op: Op,
    first: u64,
    blocks: u64,
    area: u64,
    /// The data that it writes in each block.
    mark: u64,
    /// A write that is read back in a second step.
    read_back: bool,
    second_step: bool,
    /// It was cancelled.
    chosen: bool,
    /// Its disk was being closed.
    homeless: bool,
}

/// The requests to cancel.
#[derive(Clone, Copy, Debug)]
enum Order {
    OfDisk(u16),
    One(u64),
    Share(u64),
    All,
}

impl Order {
    fn matches(self, ask: &Ask) -> bool {
        match self {
            Order::OfDisk(disk) => ask.disk == disk,
            Order::One(id) => ask.id == id,
            Order::Share(of) => ask.id.is_multiple_of(of),
            Order::All => true,
        }
    }
}

/// A queue's guest.
struct Side {
    memory: Arc<GuestMemory>,
    waiting: VecDeque<Ask>,
    completed: Vec<(Ask, Outcome)>,
    areas: Vec<u64>,
    orders: Vec<Order>,
    /// Disks that are being closed, or are not open.
    away: [bool; DISKS as usize],
    /// Requests up to this one for a stopped disk may have been aborted when it was closed.
    taken: [u64; DISKS as usize],
    /// Nothing is in flight: no buffer may be in use.
    audit: bool,
    audited: u32,
}

struct ScriptedQueue {
    side: Arc<Mutex<Side>>,
    lease: LeaseId,
    random: SmallRng,
    finished: Vec<(Ask, Outcome)>,
}

impl ScriptedQueue {
    fn take(&mut self, context: &mut UringContext, into: &mut impl Intake<Ask, Buffer>, most: usize) -> PullEnd {
        for _ in 0..most.min(into.room()) {
            let mut side = self.side.lock().unwrap();
            let Some(mut ask) = side.waiting.pop_front() else { return PullEnd::Empty };
            ask.homeless = side.away[usize::from(ask.disk)];
            drop(side);
            self.admit(context, into, ask);
        }
        if self.side.lock().unwrap().waiting.is_empty() { PullEnd::Empty } else { PullEnd::MoreWaiting }
    }

    fn admit(&mut self, context: &mut UringContext, into: &mut impl Intake<Ask, Buffer>, ask: Ask) {
        let (disk, op) = (DiskSlot(ask.disk), if ask.second_step { Op::Read } else { ask.op });
        let (start, len) = (ByteOffset(ask.first * BLOCK), ByteLen(ask.blocks * BLOCK));
        match op {
            Op::Flush => into.admit(ask, disk, op, ByteOffset(0), ByteLen::ZERO, None),
            op if op.has_data() => {
                let buffer = context.buffers.take(self.lease);
                context.buffers.push(&buffer, GuestAddress(ask.area), len.0 as u32, 64).expect("mapped");
                into.admit(ask, disk, op, start, len, Some(buffer));
            }
            op if ask.blocks > 1 => {
                // As two ranges.
                let half = ByteLen(ask.blocks / 2 * BLOCK);
                let parts = [(start, half), (ByteOffset(start.0 + half.0), ByteLen(len.0 - half.0))];
                into.admit_parts(ask, disk, op, &parts);
            }
            op => into.admit_parts(ask, disk, op, &[(start, len)]),
        }
    }

    fn cancel(into: &mut impl Intake<Ask, Buffer>, order: Order) {
        into.cancel(&mut |ask| {
            let chosen = order.matches(ask);
            ask.chosen |= chosen;
            chosen
        });
    }
}

impl GuestQueue for ScriptedQueue {
    type Token = Ask;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        DEPTH
    }

    fn pull<I: Intake<Ask, Buffer>>(&mut self, context: &mut UringContext, into: &mut I) -> PullEnd {
        let most = self.random.random_range(1..=16);
        let pulled = self.take(context, into, most);
        if self.random.random_ratio(1, 40) {
            Self::cancel(into, Order::Share(self.random.random_range(2..6)));
        }
        pulled
    }

    fn finish<I: Intake<Ask, Buffer>>(
        &mut self,
        context: &mut UringContext,
        done: FinishedRequest<Ask, Buffer>,
        into: &mut I,
    ) {
        let FinishedRequest { token: mut ask, outcome, buffer } = done;
        let has_buffer = ask.op.has_data();
        assert_eq!(buffer.is_some(), has_buffer, "{ask:?}");
        if let Some(buffer) = buffer {
            assert!(
                !context.buffers.is_merged(&buffer) && context.buffers.len(&buffer).0 == ask.blocks * BLOCK,
                "{ask:?}"
            );
            context.buffers.release(buffer);
        }
        if self.random.random_ratio(1, 200) {
            Self::cancel(into, Order::Share(self.random.random_range(2..6)));
        }
        if ask.read_back && !ask.second_step && outcome.is_done() {
            ask.second_step = true;
            let away = self.side.lock().unwrap().away[usize::from(ask.disk)];
            ask.homeless |= away;
            self.admit(context, into, ask);
            return;
        }
        self.finished.push((ask, outcome));
    }

    fn woken<I: Intake<Ask, Buffer>>(
        &mut self,
        context: &mut UringContext,
        into: &mut I,
        running: bool,
    ) -> Result<(), &'static str> {
        assert!(self.finished.is_empty(), "all that was finished before has been published");
        if running && self.random.random_bool(0.5) {
            self.take(context, into, usize::MAX);
        }
        let orders = std::mem::take(&mut self.side.lock().unwrap().orders);
        orders.into_iter().for_each(|order| Self::cancel(into, order));
        let mut side = self.side.lock().unwrap();
        if std::mem::take(&mut side.audit) {
            assert_eq!(context.buffers.buffers_in_use(self.lease), 0, "buffers were left behind");
            side.audited += 1;
        }
        Ok(())
    }

    fn publish(&mut self) -> PublishResult {
        self.side.lock().unwrap().completed.append(&mut self.finished);
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::WorkWaiting
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

/// Counters of the storage.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    merged: u64,
    joined_aborted: u64,
    cancels: u64,
    refused: u64,
}

/// The model of a disk: the possible contents of each block, and its requests in flight.
struct Model {
    may_hold: Vec<Vec<u64>>,
    readers: Vec<u32>,
    writer: Vec<bool>,
}

impl Model {
    fn new() -> Model {
        let blocks = BLOCKS as usize;
        Model { may_hold: vec![vec![0]; blocks], readers: vec![0; blocks], writer: vec![false; blocks] }
    }

    /// Adds a request to those in flight. Returns false if it conflicts with one of them.
    fn enter(&mut self, ask: &Ask) -> bool {
        let modifies = ask.op.modifies();
        let blocks = ask.first as usize..(ask.first + ask.blocks) as usize;
        if blocks.clone().any(|block| self.writer[block] || (modifies && self.readers[block] > 0)) {
            return false;
        }
        for block in blocks {
            self.writer[block] |= modifies;
            self.readers[block] += u32::from(!modifies);
        }
        true
    }

    /// Updates the model by a completed request; data that was read must be possible.
    fn leave(&mut self, ask: &Ask, outcome: Outcome, memory: &GuestMemory, context: &str) {
        for at in 0..ask.blocks {
            let block = (ask.first + at) as usize;
            let modifies = ask.op.modifies();
            self.writer[block] &= !modifies;
            self.readers[block] -= u32::from(!modifies);
            let may_hold = &mut self.may_hold[block];
            let written = if ask.op.has_data() { ask.mark } else { 0 };
            // The second step comes only after the write is complete.
            if modifies && (outcome.is_done() || ask.second_step) {
                *may_hold = vec![written];
            } else if modifies && !may_hold.contains(&written) {
                may_hold.push(written);
            }
            if (ask.op == Op::Read || ask.second_step) && outcome.is_done() {
                let mut bytes = [0; BLOCK as usize];
                memory.read(GuestAddress(ask.area + at * BLOCK), &mut bytes).expect("mapped");
                let found = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!(bytes.chunks(8).all(|word| word == found.to_le_bytes()), "{context}: torn in a block");
                assert!(may_hold.contains(&found), "{context}: block {block} holds {found}, expected of {may_hold:?}");
                *may_hold = vec![found];
            }
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    submitted: u64,
    completed: u64,
    aborted: u64,
    chosen_but_done: u64,
    failed: u64,
    homeless: u64,
    /// For disks that stop: resumes with replay and with report, and retries.
    replays: u64,
    reports: u64,
    retries: u64,
    parked: u64,
}

struct Simulation {
    seed: u64,
    /// Disks stop, or retry.
    stops: bool,
    /// Requests up to this one, for each disk, may have been failed by a resume with `report`.
    reported: [u64; DISKS as usize],
    random: SmallRng,
    worker: SteppedWorker,
    disks: Vec<QueueDisk>,
    sides: Vec<Arc<Mutex<Side>>>,
    wakers: Vec<Arc<dyn Wake>>,
    attached: Vec<SteppedQueue>,
    models: Vec<Model>,
    /// Disks that are being closed.
    leaving: Vec<(usize, u16, Receiver<()>)>,
    seen: Arc<Mutex<Seen>>,
    counts: Counts,
    _folder: tempfile::TempDir,
}

/// Opens disks with different behaviour.
fn open(
    seed: u64,
    stops: bool,
    random: &mut SmallRng,
    folder: &std::path::Path,
    seen: &Arc<Mutex<Seen>>,
) -> Vec<QueueDisk> {
    // A permanent failure cannot be repeated with success, and retry delays grow.
    let bad = if stops { "8K+4K:EIO*5/60K+4K:ENOSPC*20" } else { "8K+4K:EIO" };
    let bad_read = if stops { "100K+2K:EIO*5" } else { "100K+2K:EIO" };
    let size = (BLOCKS * BLOCK).to_string();
    let path = folder.join("disk");
    std::fs::File::create(&path).and_then(|file| file.set_len(BLOCKS * BLOCK)).unwrap();
    let path = path.to_str().unwrap().to_owned();
    let kinds: [Vec<(&str, &str)>; DISKS as usize] = [
        vec![("inner", "ram"), ("size", &size), ("fault-reorder", "12")],
        vec![("inner", "ram"), ("size", &size), ("fault-latency-us", "150"), ("fault-jitter-us", "300")],
        vec![("inner", "file"), ("path", &path), ("block-size", "512")],
        vec![("inner", "ram"), ("size", &size), ("fail-write", bad), ("fail-read", bad_read), ("fault-torn", "10")],
    ];
    (0..)
        .zip(kinds)
        .map(|(slot, settings)| {
            let mut all = Settings::new("disk");
            settings.iter().for_each(|(key, value)| all.insert(key, value).unwrap());
            all.insert("fault-seed", &(seed ^ u64::from(slot)).to_string()).unwrap();
            // Requests go directly to the file's own channel.
            let kind = if slot == 2 { "file" } else { "fault" };
            let mut own = Settings::new("disk");
            settings.iter().filter(|(key, _)| *key != "inner").for_each(|(key, value)| own.insert(key, value).unwrap());
            let inner: Arc<AnyDisk> =
                mqblk_storage::open(kind, if slot == 2 { &mut own } else { &mut all }).expect("it opens");
            let seen = Arc::clone(seen);
            let channel = move |inner| {
                let random = SmallRng::seed_from_u64(seed + u64::from(slot));
                Box::new(StingyChannel { inner, random, seen: Arc::clone(&seen) }) as AnyChannel
            };
            let merge = if random.random_ratio(2, 3) { MergeMode::On } else { MergeMode::Off };
            let depth = if random.random_bool(0.5) { 0 } else { random.random_range(1..12) };
            let plug = PlugOptions { merge, depth, ..PlugOptions::default() };
            QueueDisk {
                slot: DiskSlot(slot),
                disk: Arc::new(FilterDisk::new(inner, channel)),
                plug,
                health: Arc::new(DiskHealth::new(
                    slot.to_string(),
                    if stops { policy(random) } else { ErrorPolicy::default() },
                )),
            }
        })
        .collect()
}

fn policy(random: &mut SmallRng) -> ErrorPolicy {
    let on_error = if random.random_ratio(2, 3) { OnError::Stop } else { OnError::Retry(Duration::from_secs(3600)) };
    ErrorPolicy { on_error, on_enospc: OnNoSpace::Stop }
}

impl Simulation {
    fn new(seed: u64, stops: bool) -> Simulation {
        let mut random = SmallRng::seed_from_u64(seed);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let seen = Arc::<Mutex<Seen>>::default();
        let disks = open(seed, stops, &mut random, folder.path(), &seen);
        let side = |_| {
            let region = Region::shared("guest", u64::from(DEPTH) * AREA, GuestAddress(0)).unwrap().0;
            Arc::new(Mutex::new(Side {
                memory: Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()),
                waiting: VecDeque::new(),
                completed: vec![],
                areas: (0..u64::from(DEPTH)).map(|at| at * AREA).collect(),
                orders: vec![],
                away: [false; DISKS as usize],
                taken: [0; DISKS as usize],
                audit: false,
                audited: 0,
            }))
        };
        let context = UringOptions { submissions: 8, in_flight: 64, files: 4, buffers: 1 };
        let mut simulation = Simulation {
            seed,
            stops,
            reported: [0; DISKS as usize],
            random,
            worker: SteppedWorker::new(context).unwrap(),
            disks,
            sides: (0..QUEUES).map(side).collect(),
            wakers: vec![],
            attached: vec![],
            models: (0..DISKS).map(|_| Model::new()).collect(),
            leaving: vec![],
            seen,
            counts: Counts::default(),
            _folder: folder,
        };
        for at in 0..QUEUES {
            simulation.attach(at);
        }
        simulation
    }

    fn attach(&mut self, at: usize) {
        let side = Arc::clone(&self.sides[at]);
        let options = QueueOptions {
            disks: self.disks.clone(),
            kick: None,
            poll: PollPolicy::Busy,
            coalesce: Coalesce::default(),
            paused: false,
            on_broken: Box::new(|why| panic!("{why}")),
        };
        let random = SmallRng::seed_from_u64(self.random.random());
        let wakers = &mut self.wakers;
        let attached_queue = self.worker.attach(options, |context, waker| {
            wakers.push(Arc::clone(waker));
            let lease = context.buffers.acquire_lease(Arc::clone(&side.lock().unwrap().memory), vec![]);
            Ok(ScriptedQueue { side, lease, random, finished: vec![] })
        });
        self.attached.push(attached_queue.unwrap());
    }

    fn ask(&mut self, queue: usize, disk: u16, op: Op, first: u64, blocks: u64) {
        let mut side = self.sides[queue].lock().unwrap();
        let Some(area) = side.areas.pop() else { return };
        let (id, read_back) =
            (self.counts.submitted + 1, op.has_data() && op != Op::Read && self.random.random_bool(0.2));
        let blocks = if op == Op::Flush { 0 } else { blocks };
        let ask = Ask {
            id,
            disk,
            op,
            first,
            blocks,
            area,
            mark: id,
            read_back,
            second_step: false,
            chosen: false,
            homeless: false,
        };
        if !self.models[usize::from(disk)].enter(&ask) {
            side.areas.push(area);
            return;
        }
        let fill = if op == Op::Read { u64::MAX } else { ask.mark };
        let bytes = fill.to_le_bytes().repeat((blocks * BLOCK / 8) as usize);
        side.memory.write(GuestAddress(area), &bytes).expect("mapped");
        side.waiting.push_back(ask);
        self.counts.submitted += 1;
    }

    /// Submits a few sequential requests for one disk, from one queue or several.
    fn publish(&mut self) {
        let op = match self.random.random_range(0..12) {
            0..4 => Op::Read,
            4..9 => Op::Write { fua: self.random.random_bool(0.1) },
            9 => Op::WriteZeroes { may_unmap: self.random.random_bool(0.5), fua: false },
            10 => Op::WriteZeroes { may_unmap: false, fua: true },
            _ => Op::Flush,
        };
        let disk = self.random.random_range(0..DISKS);
        let mut at = self.random.random_range(0..BLOCKS - MOST_BLOCKS);
        for _ in 0..self.random.random_range(1..12) {
            let blocks = self.random.random_range(1..=MOST_BLOCKS);
            if at + blocks > BLOCKS {
                break;
            }
            let queue = self.random.random_range(0..QUEUES);
            self.ask(queue, disk, op, at, blocks);
            at += blocks;
        }
    }

    fn collect(&mut self) {
        for side in &self.sides {
            let mut side = side.lock().unwrap();
            for (ask, outcome) in std::mem::take(&mut side.completed) {
                let context = format!("seed {}: {outcome:?} for {ask:?}", self.seed);
                let counts = &mut self.counts;
                match outcome {
                    Outcome::Done(_) => counts.chosen_but_done += u64::from(ask.chosen),
                    Outcome::Aborted => {
                        let taken = self.stops && ask.id <= side.taken[usize::from(ask.disk)];
                        assert!(ask.chosen || ask.homeless || taken, "{context}: nobody chose it");
                        counts.aborted += u64::from(ask.chosen);
                        counts.homeless += u64::from(!ask.chosen);
                    }
                    Outcome::Failed(_) | Outcome::NoSpace => {
                        assert_eq!(ask.disk, 3, "{context}: the others do not fail");
                        let taken = ask.id <= side.taken[3];
                        let excused = ask.chosen || ask.homeless || taken || ask.id <= self.reported[3];
                        assert!(!self.stops || excused, "{context}: it was to be parked");
                        counts.failed += 1;
                    }
                    _ => panic!("{context}"),
                }
                counts.completed += 1;
                self.models[usize::from(ask.disk)].leave(&ask, outcome, &side.memory, &context);
                side.areas.push(ask.area);
            }
        }
    }

    fn turn(&mut self) {
        let happened = self.worker.turn();
        self.collect();
        let (worker, attached, disks, sides) = (&mut self.worker, &self.attached, &self.disks, &self.sides);
        self.leaving.retain(|(queue, slot, left)| match left.try_recv() {
            Err(TryRecvError::Empty) => true,
            Err(TryRecvError::Disconnected) => panic!("it was there"),
            Ok(()) => {
                worker.open_disk(attached[*queue], &disks[usize::from(*slot)]).expect("its slot is free");
                sides[*queue].lock().unwrap().away[usize::from(*slot)] = false;
                false
            }
        });
        if !happened {
            // Late completions are late by the clock.
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn disturb(&mut self) {
        let queue = self.random.random_range(0..QUEUES);
        if self.random.random_ratio(1, 4) {
            let order = match self.random.random_range(0..4) {
                0 => Order::OfDisk(self.random.random_range(0..DISKS)),
                1 => Order::One(self.counts.submitted.saturating_sub(self.random.random_range(0..32))),
                2 => Order::Share(self.random.random_range(1..5)),
                _ => Order::All,
            };
            self.sides[queue].lock().unwrap().orders.push(order);
            self.wakers[queue].wake();
        }
        let disk = self.random.random_range(0..DISKS);
        let away = self.sides[queue].lock().unwrap().away[usize::from(disk)];
        if !away && self.random.random_ratio(1, 30) {
            let mut side = self.sides[queue].lock().unwrap();
            side.away[usize::from(disk)] = true;
            side.taken[usize::from(disk)] = self.counts.submitted;
            drop(side);
            let left = self.worker.close_disk(self.attached[queue], DiskSlot(disk));
            self.leaving.push((queue, disk, left));
        }
    }

    /// Resumes stopped disks, mostly with replay.
    fn resume(&mut self, one_in: u32) {
        for at in 0..usize::from(DISKS) {
            let health = Arc::clone(&self.disks[at].health);
            if !health.is_stopped() || !self.random.random_ratio(1, one_in) {
                continue;
            }
            let report = one_in > 1 && self.random.random_ratio(1, 8);
            if report {
                self.reported[at] = self.counts.submitted;
            }
            let how = if report { Resume::Report } else { Resume::Replay };
            self.counts.parked += self.worker.resume(&health, how).expect("it is stopped");
            self.counts.reports += u64::from(report);
            self.counts.replays += u64::from(!report);
        }
    }

    fn run(&mut self) {
        for _ in 0..500 {
            for _ in 0..self.random.random_range(0..4) {
                self.publish();
            }
            self.disturb();
            self.resume(6);
            for _ in 0..self.random.random_range(1..4) {
                self.turn();
            }
        }
        let give_up = Instant::now() + PATIENCE;
        while self.counts.completed < self.counts.submitted || !self.leaving.is_empty() {
            assert!(Instant::now() < give_up, "seed {}: requests were lost: {:?}", self.seed, self.counts);
            self.resume(1);
            self.turn();
        }
        for at in 0..QUEUES {
            self.sides[at].lock().unwrap().audit = true;
            self.wakers[at].wake();
        }
        // The wakes arrive with the context's next turn.
        for _ in 0..3 {
            self.turn();
        }
        for disk in &self.disks {
            let report = disk.health.stats();
            assert_eq!(report.parked, 0, "seed {}: {report:?}", self.seed);
            self.counts.retries += report.retries;
        }
        for at in 0..QUEUES {
            assert_eq!(self.sides[at].lock().unwrap().audited, 1);
            self.worker.drain(self.attached[at]);
            assert!(!self.worker.serves(self.attached[at]), "seed {}: nothing is in flight", self.seed);
        }
    }
}

fn seeds() -> std::ops::Range<u64> {
    let given = std::env::var("MQBLK_CANCEL_SEEDS").ok();
    let parsed = given.as_deref().map(|text| {
        let (from, to) = text.split_once("..").expect("MQBLK_CANCEL_SEEDS: expected from..to");
        from.parse().expect("a number")..to.parse().expect("a number")
    });
    parsed.unwrap_or(0..32)
}

#[test]
fn a_cancelled_request_finishes_once_and_affects_no_other() {
    let (mut all, mut counts) = (Seen::default(), Counts::default());
    for seed in seeds() {
        let mut simulation = Simulation::new(seed, false);
        simulation.run();
        let seen = *simulation.seen.lock().unwrap();
        all.merged += seen.merged;
        all.joined_aborted += seen.joined_aborted;
        all.cancels += seen.cancels;
        all.refused += seen.refused;
        let of = simulation.counts;
        counts.submitted += of.submitted;
        counts.aborted += of.aborted;
        counts.chosen_but_done += of.chosen_but_done;
        counts.failed += of.failed;
        counts.homeless += of.homeless;
    }
    // The simulation is not trivial.
    let least = counts.submitted / 500;
    let met = [counts.aborted, counts.chosen_but_done, counts.failed, all.merged, all.cancels, all.refused];
    assert!(met.iter().all(|met| *met > least), "{counts:?} {all:?}");
    assert!(all.joined_aborted > 0 && counts.homeless > 0, "{counts:?} {all:?}");
}

#[test]
fn disks_that_stop_lose_nothing_and_complete_nothing_twice() {
    let mut counts = Counts::default();
    for seed in seeds() {
        let mut simulation = Simulation::new(seed, true);
        simulation.run();
        let of = simulation.counts;
        counts.submitted += of.submitted;
        counts.aborted += of.aborted;
        counts.failed += of.failed;
        counts.replays += of.replays;
        counts.reports += of.reports;
        counts.retries += of.retries;
        counts.parked += of.parked;
    }
    let met = [counts.aborted, counts.failed, counts.replays, counts.reports, counts.retries];
    assert!(met.iter().all(|met| *met > 0) && counts.parked > counts.replays, "{counts:?}");
}
