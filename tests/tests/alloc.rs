//! No allocation per request: after a warm-up, a million requests through real rings do not call the allocator once in
//! any thread of the process, neither in the workers nor in the driver, which follows the same rule.
//!
//! One test runs all cases in sequence and without a test harness, because the allocator's counters are those of the
//! whole process.

use std::alloc::System;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, FinishedRequest, GuestQueue, Intake, Op,
    Outcome, PublishResult, PullEnd, Request, Sector512, Tag,
};
use mqblk_driver::virtio_blk::{
    BlkConnectOptions, BlkQueue, BlkQueueSet, BlkStatus, DataSegment, DescriptorLayout, SectorRange, SubmitError,
};
use mqblk_engine::{
    AnyDisk, DiskHealth, DiskLimits, ErrorPolicy, IoLimit, IoLimits, LimitKind, MergeMode, PlugOptions, PollPolicy,
    QueueDisk, QueueOptions, SteppedWorker, UringContext, UringOptions,
};
use mqblk_memory::{GuestAddress, GuestMemory, MemoryShare};
use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};
use mqblk_tests::in_process::{Plan, Rig, disk};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const QUEUES: u16 = 2;
const DEPTH: u16 = 32;
const BLOCK: u32 = 4096;
/// Data segments of the largest request.
const PIECES: u32 = 5;
/// Requests until tables that grow with the number in flight (such as lists of more than two segments) reach their
/// size.
const WARM_UP: u64 = 20_000;
const MILLION: u64 = 1_000_000;
/// Blocks of the disk in use.
const BLOCKS: u64 = 4096;

type Buffer = <UringContext as mqblk_core::IoContext>::Buffer;

/// Passes requests to another channel and allocates in one of `every` requests, which the test must detect.
struct AllocatingChannel {
    inner: AnyChannel,
    every: u64,
    count: u64,
    /// Merged requests.
    merged: Arc<AtomicU64>,
}

/// Wraps `inner` in an allocating channel.
fn allocating(inner: Arc<AnyDisk>, every: u64, merged: &Arc<AtomicU64>) -> Arc<AnyDisk> {
    let merged = Arc::clone(merged);
    let channel = move |inner| AllocatingChannel { inner, every, count: 0, merged: Arc::clone(&merged) };
    Arc::new(FilterDisk::new(inner, move |inner| Box::new(channel(inner)) as AnyChannel))
}

impl DiskChannel<UringContext> for AllocatingChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let merged = batch.iter().filter(|request| request.tag.queue() == u16::MAX).count();
        self.merged.fetch_add(merged as u64, Ordering::Relaxed);
        let taken = self.inner.submit(context, batch, finished);
        let before = self.count / self.every;
        self.count += taken as u64;
        if self.count / self.every != before {
            drop(black_box(Box::new(self.count)));
        }
        taken
    }
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        self.inner.reap(context, finished)
    }
    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        self.inner.cancel(context, tags, finished);
    }
    fn outstanding(&self) -> u32 {
        self.inner.outstanding()
    }
    fn close(&mut self, context: &mut UringContext) {
        self.inner.close(context);
    }
}

/// The mix of requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mix {
    /// The largest requests, all with several segments.
    Largest,
    /// All kinds.
    All,
    /// Sequential reads and writes, which are merged.
    Sequential,
}

/// Submits request `number`; its data is in `slot`'s part of the queue's memory.
fn submit(queue: &mut BlkQueue, mix: Mix, number: u64, slot: u32) -> Result<(), SubmitError> {
    let base = queue.data().0.0 + u64::from(slot * PIECES * BLOCK);
    let piece = |at: u32| DataSegment { address: GuestAddress(base + u64::from(at * BLOCK)), len: BLOCK };
    // A stride that is coprime to the disk's size visits all of it.
    let block = number * 1021 % (BLOCKS - u64::from(PIECES));
    let sector = |block: u64| Sector512(block * u64::from(BLOCK) / mqblk_core::units::SECTOR_BYTES);
    let ranges = [
        SectorRange { start: sector(block), sectors: 8, unmap: false },
        SectorRange { start: sector(block + 2), sectors: 16, unmap: false },
    ];
    match number % 100 {
        _ if mix == Mix::Sequential => {
            let block = number % BLOCKS;
            let write = number / BLOCKS % 2 == 1;
            if write { queue.write(slot, sector(block), piece(0)) } else { queue.read(slot, sector(block), piece(0)) }
        }
        _ if mix == Mix::Largest => queue.read_segments(slot, sector(block), (0..PIECES).map(piece)),
        0 => queue.flush(slot),
        1 => queue.discard(slot, &ranges),
        2 => queue.write_zeroes(slot, &ranges),
        3 => queue.get_id(slot, GuestAddress(base)),
        // Past the end of the disk: refused at admission.
        4 => queue.read(slot, Sector512(1 << 40), piece(0)),
        5..20 => queue.read_segments(slot, sector(block), (0..PIECES).map(piece)),
        20..35 => queue.write_segments(slot, sector(block), (0..PIECES).map(piece)),
        35..55 => queue.write(slot, sector(block), piece(0)),
        _ => queue.read(slot, sector(block), piece(0)),
    }
}

/// Sends `count` requests over all queues, up to [`DEPTH`] in flight on each, and waits for their completion.
fn run(set: &mut BlkQueueSet, free: &mut [Vec<u32>], mix: Mix, count: u64) {
    let (mut sent, mut completed) = (0, 0);
    while completed < count {
        let mut reaped = 0;
        for (queue, free) in set.queues_mut().iter_mut().zip(free.iter_mut()) {
            while sent < count && !free.is_empty() {
                let slot = free[free.len() - 1];
                match submit(queue, mix, sent, slot) {
                    Ok(()) => free.pop(),
                    Err(SubmitError::Full) => break,
                    Err(refused) => panic!("request {sent}: {refused}"),
                };
                sent += 1;
            }
            queue.publish().expect("a kick can be sent");
            queue.poll().expect("the device keeps to the protocol");
            while let Some(done) = queue.reap().expect("the device keeps to the protocol") {
                assert!(matches!(done.status, BlkStatus::Ok | BlkStatus::IoError), "{done:?}");
                free.push(done.user_data);
                reaped += 1;
            }
        }
        completed += reaped;
        if reaped == 0 {
            set.wait(1).expect("a call comes");
        }
    }
}

/// Returns the allocations and reallocations of the whole process during `requests` requests, half of them with direct
/// descriptors, half with indirect ones.
fn allocations(disk: &Arc<AnyDisk>, mix: Mix, requests: u64) -> usize {
    allocations_with(disk, &Arc::default(), false, mix, requests)
}

/// As [`allocations`], for a disk with limits, or with packed rings.
fn allocations_with(disk: &Arc<AnyDisk>, health: &Arc<DiskHealth>, packed: bool, mix: Mix, requests: u64) -> usize {
    let mut found = 0;
    for shape in [DescriptorLayout::Direct, DescriptorLayout::Indirect] {
        let merge = if mix == Mix::Sequential { MergeMode::On } else { MergeMode::Auto };
        let plug = PlugOptions { merge, ..PlugOptions::default() };
        let plan = Plan {
            disk: Arc::clone(disk),
            workers: 2,
            policy: PollPolicy::default().into(),
            plug,
            health: Arc::clone(health),
        };
        let choose = |options: &mut BlkConnectOptions| {
            options.queues = QUEUES;
            options.descriptors = shape;
            options.packed = packed;
            options.data_per_queue = mqblk_core::ByteLen(u64::from(u32::from(DEPTH) * PIECES * BLOCK));
        };
        let (rig, mut sets) = Rig::new(plan, choose);
        let [set] = sets.as_mut_slice() else { panic!("one thread owns all the queues") };
        let mut free = vec![(0..u32::from(DEPTH)).collect::<Vec<u32>>(); usize::from(QUEUES)];
        run(set, &mut free, Mix::Largest, WARM_UP / 2);
        run(set, &mut free, mix, WARM_UP / 2);
        wait_for_watch();
        let region = Region::new(ALLOCATOR);
        run(set, &mut free, mix, requests / 2);
        let change = region.change();
        found += change.allocations + change.reallocations;
        rig.stop(sets);
    }
    found
}

/// Waits until the server has checked that the connection's memory is shared: it does so once, in a thread that
/// allocates.
fn wait_for_watch() {
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
    let watches = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("this process's threads");
        tasks.filter_map(name).any(|name| name.starts_with("share-"))
    };
    while watches() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Fails unless one of several runs allocates nothing. Tables that grow with the number in flight may do so late on a
/// busy machine; allocations for requests happen in every run.
fn none(what: &str, run: impl FnMut() -> usize) {
    let tries: Vec<usize> = std::iter::repeat_with(run).take(3).take_while(|found| *found > 0).collect();
    assert!(tries.len() < 3, "{what}: found {tries:?} allocations in three runs, expected a run without");
}

/// One trial, on the main thread. The standard harness has a thread beside the test, which allocates when a test has
/// run for 60 s.
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
    let ram = disk("ram", &[("size", "16M")]);
    let leaky = allocating(Arc::clone(&ram), 10_000, &Arc::default());
    let noticed = allocations(&leaky, Mix::All, MILLION / 10);
    // Each of two workers allocates ten times, except at the end of the warm-up.
    assert!((5..=12).contains(&noticed), "found {noticed} allocations, expected those that were smuggled in");

    none("ram", || allocations(&ram, Mix::All, MILLION));
    none("null", || allocations(&disk("null", &[("size", "16M")]), Mix::All, MILLION));
    let latent = disk("null", &[("size", "16M"), ("latency-us", "20")]);
    none("null with a latency", || allocations(&latent, Mix::All, MILLION / 10));
    none("file in memory", || file("/dev/shm", Mix::All, MILLION));
    none("file in memory, merged requests", || file("/dev/shm", Mix::Sequential, MILLION));
    none("packed rings", || allocations_with(&latent, &Arc::default(), true, Mix::All, MILLION / 10));
    let limits = IoLimits::default()
        .with(LimitKind::Iops, IoLimit { rate: 100_000, burst: None })
        .with(LimitKind::BandwidthWrite, IoLimit { rate: 100 << 20, burst: None });
    let health = DiskHealth::with_limits("limited", ErrorPolicy::default(), DiskLimits::new(limits, None));
    let (health, null) = (Arc::new(health), disk("null", &[("size", "16M")]));
    none("null with limits", || allocations_with(&null, &health, false, Mix::All, MILLION / 10));
    assert!(health.limits().stats().throttled > 0, "the limits were not met");
    none("a queue of several disks", || many_disks(MILLION));
    // Each operation in flight has an iovec list. Their number depends on the storage, and lists are allocated when it
    // exceeds its maximum so far: not per request.
    let lists = file(env!("CARGO_TARGET_TMPDIR"), Mix::All, 20_000);
    assert!(lists <= 3 * usize::from(DEPTH * QUEUES), "file on disk: {lists} allocations");
}

/// A queue of several disks: it admits a given number of requests, to the disks in turn, some with two steps.
struct ManyDisks {
    share: MemoryShare,
    admitted: u64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    wanted: AtomicU64,
    completed: AtomicU64,
}

const DISKS: u16 = 8;
/// Requests in flight of that queue.
const MANY: u16 = 128;

impl ManyDisks {
    fn admit(&self, context: &mut UringContext, into: &mut impl Intake<u64, Buffer>, number: u64, step: u64) {
        let disk = DiskSlot((number % u64::from(DISKS)) as u16);
        // Half of them are sequential, so that some are merged.
        let block = if number.is_multiple_of(2) { number / 16 } else { number * 1021 } % BLOCKS;
        let (start, len) = (ByteOffset(block * u64::from(BLOCK)), ByteLen(u64::from(BLOCK)));
        let token = number << 1 | step;
        match number % 50 {
            0 => into.admit(token, disk, Op::Flush, ByteOffset(0), ByteLen::ZERO, None),
            1 => into.admit_parts(token, disk, Op::Discard { secure: false }, &[(start, len), (start, len)]),
            2 => into.admit(token, DiskSlot(DISKS), Op::Flush, ByteOffset(0), ByteLen::ZERO, None),
            kind => {
                let op = if kind % 3 == 0 && step == 0 { Op::Write { fua: false } } else { Op::Read };
                let buffer = context.buffers.take(self.share.lease());
                let at = number % u64::from(MANY) * u64::from(BLOCK);
                context.buffers.push(&buffer, GuestAddress(at), BLOCK, 64).expect("mapped");
                into.admit(token, disk, op, start, len, Some(buffer));
            }
        }
    }
}

impl GuestQueue for ManyDisks {
    type Token = u64;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        MANY
    }

    fn enter(&mut self, context: &mut UringContext) -> Result<(), String> {
        self.share.enter(context)
    }

    fn leave(&mut self, context: &mut UringContext) {
        self.share.leave(context);
    }

    fn pull<I: Intake<u64, Buffer>>(&mut self, context: &mut UringContext, into: &mut I) -> PullEnd {
        let most = 16.min(into.room());
        for taken in 0..most {
            if self.admitted == self.shared.wanted.load(Ordering::Relaxed) {
                return PullEnd::Empty { taken };
            }
            self.admit(context, into, self.admitted, 0);
            self.admitted += 1;
        }
        PullEnd::MoreWaiting { taken: most }
    }

    fn finish<I: Intake<u64, Buffer>>(
        &mut self,
        context: &mut UringContext,
        done: FinishedRequest<u64, Buffer>,
        into: &mut I,
    ) {
        let (number, step) = (done.token >> 1, done.token & 1);
        let expected = if number % 50 == 2 { done.outcome == Outcome::Aborted } else { done.outcome.is_done() };
        assert!(expected, "{number}: {:?}", done.outcome);
        if let Some(buffer) = done.buffer {
            context.buffers.release(buffer);
        }
        if number % 10 == 3 && step == 0 {
            self.admit(context, into, number, 1);
        } else {
            self.shared.completed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn abandon(&mut self, _: &mut UringContext, _: u64, _: Option<Buffer>) {}

    fn publish(&mut self) -> PublishResult {
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::WorkWaiting
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

/// Returns the allocations of a stepped worker for requests of a queue with several different disks.
fn many_disks(requests: u64) -> usize {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a temporary folder");
    let path = folder.path().join("disk");
    std::fs::File::create(&path).and_then(|file| file.set_len(16 << 20)).expect("the disk's file");
    let path = path.to_str().expect("plain text");
    let disks: Vec<QueueDisk> = (0..DISKS)
        .map(|slot| {
            let disk = match slot {
                0 => disk("file", &[("path", path)]),
                1 | 2 => disk("null", &[("size", "16M")]),
                3 => disk("null", &[("size", "16M"), ("latency-us", "5")]),
                _ => disk("ram", &[("size", "16M")]),
            };
            let merge = if slot % 2 == 0 { MergeMode::On } else { MergeMode::Auto };
            let depth = if slot == 4 { 3 } else { 0 };
            QueueDisk {
                slot: DiskSlot(slot),
                disk,
                plug: PlugOptions { merge, depth, ..PlugOptions::default() },
                health: Arc::default(),
            }
        })
        .collect();
    let options = QueueOptions {
        disks,
        kick: None,
        policy: PollPolicy::Busy.into(),
        paused: false,
        on_fault: Box::new(|fault| panic!("{fault:?}")),
    };
    let region = mqblk_memory::Region::shared("many", u64::from(MANY) * u64::from(BLOCK), GuestAddress(0));
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region.expect("memory").0)]).expect("one region"));
    let shared = Arc::<Shared>::default();
    let mut worker = SteppedWorker::new(UringOptions::default()).expect("the host has io_uring");
    let of_queue = Arc::clone(&shared);
    let share = MemoryShare::new(memory, MANY.into());
    let made = worker.attach(options, |_| Ok(ManyDisks { share, admitted: 0, shared: of_queue }));
    made.expect("attached");
    let mut serve = |until: u64| {
        shared.wanted.store(until, Ordering::Relaxed);
        while shared.completed.load(Ordering::Relaxed) < until {
            worker.turn();
        }
    };
    serve(10 * WARM_UP);
    let region = Region::new(ALLOCATOR);
    serve(10 * WARM_UP + requests);
    let change = region.change();
    let merges = worker.report().queues[0].1.counters.read_merges;
    assert!(merges > requests / 1000, "{merges} reads were merged");
    change.allocations + change.reallocations
}

/// Returns the allocations with a file in `folder`.
fn file(folder: &str, mix: Mix, requests: u64) -> usize {
    let folder = tempfile::tempdir_in(folder).expect("a temporary folder");
    let path = folder.path().join("disk");
    std::fs::File::create(&path).and_then(|file| file.set_len(16 << 20)).expect("the disk's file");
    let inner = disk("file", &[("path", path.to_str().expect("plain text"))]);
    let merged = Arc::<AtomicU64>::default();
    let file = allocating(inner, u64::MAX, &merged);
    let found = allocations(&file, mix, requests);
    let merged = merged.load(Ordering::Relaxed);
    assert!(mix != Mix::Sequential || merged > requests / 100, "only {merged} merged requests");
    found
}
