//! One slow disk beside seven fast ones on a worker: the fast ones are served in each turn as if it were not there.
//!
//! The worker is stepped by hand, so nothing depends on time. All the disks need room in the worker's context for what they have in
//! flight, as files do. The slow one ends nothing, ever, until the end; the fast ones end everything a turn later.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, Disk, DiskChannel, DiskError, DiskSlot, FinishedRequest, Geometry,
    GuestQueue, Intake, Limits, Op, Outcome, PublishResult, PullEnd, Request, Tag, Wake,
};
use mqblk_uring::{ClientId, EventFd, UringContext, UringOptions};

use crate::options::{Coalesce, MergeMode, PlugOptions};
use crate::runner::Buffer;
use crate::trial::{GEOMETRY, LIMITS};
use crate::{PollPolicy, QueueDisk, QueueOptions, SteppedQueue, SteppedWorker};

const FAST: u16 = 7;
const SLOW: DiskSlot = DiskSlot(FAST);
const BLOCK: u64 = 4096;
/// Operations that the context can have in flight.
const LANE: u32 = 256;
/// Requests in flight on each fast disk.
const DEPTH: usize = 4;
/// Requests for the slow disk.
const BURDEN: usize = 4000;
const TURNS: usize = 500;

/// What one queue is to ask, and what was answered.
#[derive(Default)]
struct Side {
    waiting: VecDeque<(DiskSlot, Op, u64, u64)>,
    answered: Vec<(DiskSlot, Outcome)>,
}

struct ScriptedQueue(Arc<Mutex<Side>>, Vec<(DiskSlot, Outcome)>);

impl GuestQueue for ScriptedQueue {
    type Token = DiskSlot;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        8192
    }

    fn pull<I: Intake<DiskSlot, Buffer>>(&mut self, _: &mut UringContext, into: &mut I) -> PullEnd {
        let mut side = self.0.lock().unwrap();
        for _ in 0..16.min(into.room()) {
            let Some((disk, op, block, len)) = side.waiting.pop_front() else { return PullEnd::Empty };
            into.admit(disk, disk, op, ByteOffset(block * BLOCK), ByteLen(len), None);
        }
        if side.waiting.is_empty() { PullEnd::Empty } else { PullEnd::MoreWaiting }
    }

    fn finish<I: Intake<DiskSlot, Buffer>>(
        &mut self,
        _: &mut UringContext,
        done: FinishedRequest<DiskSlot, Buffer>,
        _: &mut I,
    ) {
        self.1.push((done.token, done.outcome));
    }

    fn woken<I: Intake<DiskSlot, Buffer>>(
        &mut self,
        _: &mut UringContext,
        into: &mut I,
        _: bool,
    ) -> Result<(), &'static str> {
        into.cancel(&mut |disk| *disk == SLOW);
        Ok(())
    }

    fn publish(&mut self) -> PublishResult {
        self.0.lock().unwrap().answered.append(&mut self.1);
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::WorkWaiting
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

/// What a channel was offered at most.
#[derive(Debug, Default)]
struct Offered {
    requests: AtomicU64,
    /// Of all of them.
    bytes: AtomicU64,
    /// Of one request.
    longest: AtomicU64,
    outstanding: AtomicU64,
}

/// Has one operation of the context in flight for each request: a watch that nobody signals.
struct LaneChannel {
    owner: ClientId,
    event: EventFd,
    slow: bool,
    taken: Vec<Option<Request<Buffer>>>,
    offered: Arc<Offered>,
}

impl DiskChannel<UringContext> for LaneChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let lengths = || batch.iter().map(|request| request.len.0);
        let (bytes, longest) = (lengths().sum(), lengths().max().unwrap_or(0));
        self.offered.longest.fetch_max(longest, Ordering::Relaxed);
        self.offered.requests.fetch_max(batch.len() as u64, Ordering::Relaxed);
        self.offered.bytes.fetch_max(bytes, Ordering::Relaxed);
        let count = batch.len().min(context.room());
        for request in batch.drain(..count) {
            let place = self.taken.iter().position(Option::is_none).unwrap_or(self.taken.len());
            if place == self.taken.len() {
                self.taken.push(None);
            }
            self.taken[place] = Some(request);
            context.watch(self.owner, place as u64, &self.event).expect("there is room");
        }
        self.offered.outstanding.fetch_max(self.outstanding().into(), Ordering::Relaxed);
        count
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        while let Some(end) = context.next(self.owner) {
            let request = self.taken[end.cookie as usize].take().expect("it was taken");
            let outcome = if self.slow { Outcome::Aborted } else { Outcome::Done(request.len) };
            finished.push(Completion { outcome, tag: request.tag, buffer: request.buffer });
        }
        if !self.slow {
            let running: Vec<_> = self.taken.iter().map(Option::is_some).collect();
            context.cancel_picked(self.owner, |place| running[place as usize]);
        }
        finished.len() - before
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], _: &mut Vec<Completion<Buffer>>) {
        let chosen = |place: u64| {
            self.taken[place as usize].as_ref().is_some_and(|request| tags.binary_search(&request.tag).is_ok())
        };
        context.cancel_picked(self.owner, chosen);
    }

    fn outstanding(&self) -> u32 {
        self.taken.iter().flatten().count() as u32
    }

    fn close(&mut self, context: &mut UringContext) {
        assert_eq!(self.outstanding(), 0);
        context.remove_client(self.owner);
    }
}

struct LaneDisk {
    slow: bool,
    offered: Arc<Offered>,
}

impl Disk<UringContext> for LaneDisk {
    fn geometry(&self) -> Geometry {
        GEOMETRY
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn resize(&self, _: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        Ok(GEOMETRY.size)
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![]
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let event = EventFd::new().expect("an eventfd");
        let offered = Arc::clone(&self.offered);
        Ok(Box::new(LaneChannel { owner: context.add_client(), event, slow: self.slow, taken: vec![], offered }))
    }
}

/// A worker with the fast disks and the slow one, and queues of all of them. The second is for the fast ones.
struct Bench {
    worker: SteppedWorker,
    sides: Vec<Arc<Mutex<Side>>>,
    wakers: Vec<Arc<dyn Wake>>,
    queues: Vec<SteppedQueue>,
    fast: Arc<Offered>,
    slow: Arc<Offered>,
    /// Blocks that the fast ones were asked for.
    next: u64,
}

impl Bench {
    fn new(plug: PlugOptions, queues: usize, in_flight: u32) -> Bench {
        let context = UringOptions { submissions: 64, in_flight, files: 1, buffers: 1 };
        let mut worker = SteppedWorker::new(context).expect("the host has io_uring");
        let (fast, slow) = (Arc::<Offered>::default(), Arc::<Offered>::default());
        let disk = |slow_one: bool| {
            Arc::new(LaneDisk { slow: slow_one, offered: Arc::clone(if slow_one { &slow } else { &fast }) })
        };
        let disks: Vec<QueueDisk> = (0..=FAST)
            .map(|slot| QueueDisk { slot: DiskSlot(slot), disk: disk(slot == SLOW.0), plug, health: Arc::default() })
            .collect();
        let sides: Vec<Arc<Mutex<Side>>> = (0..queues).map(|_| Arc::default()).collect();
        let mut wakers = vec![];
        let attach = |side: &Arc<Mutex<Side>>| {
            let options = QueueOptions {
                disks: disks.clone(),
                kick: None,
                poll: PollPolicy::Busy,
                coalesce: Coalesce::default(),
                paused: false,
                on_broken: Box::new(|why| panic!("{why}")),
            };
            let made = worker.attach(options, |_, waker| {
                wakers.push(Arc::clone(waker));
                Ok(ScriptedQueue(Arc::clone(side), vec![]))
            });
            made.expect("attached")
        };
        let queues = sides.iter().map(attach).collect();
        Bench { worker, sides, wakers, queues, fast, slow, next: 0 }
    }

    /// Keeps the fast disks at their depth for many turns. How many requests of each ended in each turn.
    fn serve(&mut self) -> Vec<[usize; FAST as usize]> {
        let ask = |side: &mut Side, disk: DiskSlot, next: &mut u64| {
            *next += 7; // nothing touches
            side.waiting.push_back((disk, DISCARD, *next % 10_000, BLOCK));
        };
        for disk in (0..FAST).map(DiskSlot) {
            for _ in 0..DEPTH {
                ask(&mut self.sides[1].lock().unwrap(), disk, &mut self.next);
            }
        }
        let mut turns = vec![];
        for _ in 0..TURNS {
            self.worker.turn();
            let mut ended = [0; FAST as usize];
            let mut side = self.sides[1].lock().unwrap();
            for (disk, outcome) in std::mem::take(&mut side.answered) {
                assert!(outcome.is_done(), "{disk:?}: {outcome:?}");
                ended[usize::from(disk.0)] += 1;
                ask(&mut side, disk, &mut self.next);
            }
            turns.push(ended);
        }
        turns
    }

    /// Thousands of requests for the slow disk, on the other queue.
    fn burden(&mut self, stride: u64) {
        let requests = (0..BURDEN as u64).map(|at| (SLOW, DISCARD, at * stride, BLOCK));
        self.sides[0].lock().unwrap().waiting.extend(requests);
    }
}

const DISCARD: Op = Op::Discard { secure: false };

fn plug(merge: MergeMode) -> PlugOptions {
    PlugOptions { merge, ..PlugOptions::default() }
}

#[test]
fn fast_disks_do_not_notice_a_slow_one() {
    for merge in [MergeMode::Off, MergeMode::On] {
        let mut alone = Bench::new(plug(merge), 2, LANE);
        let mut burdened = Bench::new(plug(merge), 2, LANE);
        burdened.burden(3);
        let (without, with) = (alone.serve(), burdened.serve());
        let served: usize = without.iter().flatten().sum();
        assert!(served > TURNS * usize::from(FAST), "{merge:?}: {served} requests in {TURNS} turns");
        let differ = without.iter().zip(&with).position(|(without, with)| without != with);
        assert_eq!(differ, None, "{merge:?}: the first turn that is another one");
        // It has its share of the context, and the rest of its requests waits.
        assert_eq!(burdened.slow.outstanding.load(Ordering::Relaxed), u64::from(LANE / 4), "{merge:?}");
        let report = burdened.worker.report();
        let disks = &report.queues[0].1.disks;
        assert_eq!((disks[7].slot, disks[7].in_flight), (SLOW, BURDEN as u32), "{merge:?}");
        assert_eq!(report.queues[1].1.disks[0].others, with.iter().map(|ended| ended[0] as u64).sum::<u64>());
        // Given up, all of it ends.
        burdened.wakers[0].wake();
        for _ in 0..4 {
            burdened.worker.turn();
        }
        let answered = std::mem::take(&mut burdened.sides[0].lock().unwrap().answered);
        assert_eq!(answered, vec![(SLOW, Outcome::Aborted); BURDEN], "{merge:?}");
        burdened.worker.drain(burdened.queues[0]);
        assert!(!burdened.worker.serves(burdened.queues[0]));
    }
}

#[test]
fn a_turn_is_shared_while_several_are_busy_and_merging_sees_the_whole_plug() {
    // Nothing touches: each is offered by itself. Eight queues fill the plug faster than it is offered.
    let of = |len: u64| move |at: u64| (SLOW, Op::Write { fua: false }, at * 100 % 200_000, len);
    for (len, requests, bytes) in [(BLOCK, 64, 64 * BLOCK), (32 * BLOCK, 8, 1 << 20)] {
        let mut bench = Bench::new(plug(MergeMode::Off), 9, 4096);
        for side in [0, 2, 3, 4, 5, 6, 7, 8] {
            bench.sides[side].lock().unwrap().waiting.extend((0..BURDEN as u64).map(of(len)));
        }
        bench.serve();
        let most = |of: &AtomicU64| of.load(Ordering::Relaxed);
        assert_eq!((most(&bench.slow.requests), most(&bench.slow.bytes)), (requests, bytes), "{len} bytes each");
        let outstanding = most(&bench.slow.outstanding);
        assert!((4096 / 4 - 64..=4096 / 4).contains(&outstanding), "{outstanding}");
    }
    // All of it touches: long requests are made of it however little is offered at once.
    let mut bench = Bench::new(PlugOptions { depth: 1, ..plug(MergeMode::On) }, 2, LANE);
    bench.burden(1);
    bench.serve();
    assert_eq!(bench.slow.outstanding.load(Ordering::Relaxed), 1);
    assert!(bench.slow.longest.load(Ordering::Relaxed) >= 16 * BLOCK, "{:?}", bench.slow);
    assert!(bench.fast.outstanding.load(Ordering::Relaxed) <= 1, "{:?}", bench.fast);
}
