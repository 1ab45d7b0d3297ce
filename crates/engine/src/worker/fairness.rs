//! One slow disk beside seven fast ones on a worker: the fast ones are served in each turn as without it.
//!
//! The worker is stepped, so nothing depends on time. Each request in flight takes an operation of the worker's
//! context, as with files. The slow disk completes nothing until the end; the fast ones complete everything a turn
//! later.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, Disk, DiskChannel, DiskError, DiskSlot, FinishedRequest, Geometry,
    GuestQueue, Intake, Limits, Op, Outcome, PublishResult, PullEnd, Request, Tag, Wake,
};
use mqblk_uring::{ClientId, EventFd, UringContext, UringOptions};

use crate::options::{MergeMode, PlugOptions};
use crate::request::Buffer;
use crate::trial::{GEOMETRY, LIMITS};
use crate::{PollPolicy, QueueDisk, QueueOptions, SteppedQueue, SteppedWorker};

const FAST: u16 = 7;
const SLOW: DiskSlot = DiskSlot(FAST);
const BLOCK: u64 = 4096;
/// Operations that the context can have in flight.
const CONTEXT_OPS: u32 = 256;
/// Requests in flight on each fast disk.
const DEPTH: usize = 4;
/// Requests for the slow disk.
const SLOW_REQUESTS: usize = 4000;
const TURNS: usize = 500;

/// The guest of one queue: its requests and their completions.
#[derive(Default)]
struct GuestSide {
    waiting: VecDeque<(DiskSlot, Op, u64, u64)>,
    completed: Vec<(DiskSlot, Outcome)>,
}

struct ScriptedQueue(Arc<Mutex<GuestSide>>, Vec<(DiskSlot, Outcome)>);

impl GuestQueue for ScriptedQueue {
    type Token = DiskSlot;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        8192
    }

    fn enter(&mut self, _: &mut UringContext) -> Result<(), String> {
        Ok(())
    }

    fn leave(&mut self, _: &mut UringContext) {}

    fn pull<I: Intake<DiskSlot, Buffer>>(&mut self, _: &mut UringContext, into: &mut I) -> PullEnd {
        let mut guest = self.0.lock().unwrap();
        let mut taken = 0;
        for _ in 0..16.min(into.room()) {
            let Some((disk, op, block, len)) = guest.waiting.pop_front() else { break };
            taken += 1;
            into.admit(disk, disk, op, ByteOffset(block * BLOCK), ByteLen(len), None);
        }
        PullEnd::of(taken, !guest.waiting.is_empty())
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

    fn abandon(&mut self, _: &mut UringContext, _: DiskSlot, _: Option<Buffer>) {}

    fn publish(&mut self) -> PublishResult {
        self.0.lock().unwrap().completed.append(&mut self.1);
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::WorkWaiting
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

/// The maxima of the offers to a channel.
#[derive(Debug, Default)]
struct Offered {
    requests: AtomicU64,
    /// Bytes of an offer.
    bytes: AtomicU64,
    /// Bytes of one request.
    longest: AtomicU64,
    outstanding: AtomicU64,
}

/// A channel with one operation of the context in flight for each request: a watch of an eventfd that is never
/// signalled.
struct ContextChannel {
    client: ClientId,
    event: EventFd,
    slow: bool,
    taken: Vec<Option<Request<Buffer>>>,
    offered: Arc<Offered>,
}

impl DiskChannel<UringContext> for ContextChannel {
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
            let index = self.taken.iter().position(Option::is_none).unwrap_or(self.taken.len());
            if index == self.taken.len() {
                self.taken.push(None);
            }
            self.taken[index] = Some(request);
            context.watch(self.client, index as u64, &self.event).expect("there is room");
        }
        self.offered.outstanding.fetch_max(self.outstanding().into(), Ordering::Relaxed);
        count
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        while let Some(end) = context.next(self.client) {
            let request = self.taken[end.cookie as usize].take().expect("it was taken");
            let outcome = if self.slow { Outcome::Aborted } else { Outcome::Done(request.len) };
            finished.push(Completion { outcome, tag: request.tag, buffer: request.buffer });
        }
        if !self.slow {
            let running: Vec<_> = self.taken.iter().map(Option::is_some).collect();
            context.cancel_picked(self.client, |index| running[index as usize]);
        }
        finished.len() - before
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], _: &mut Vec<Completion<Buffer>>) {
        let chosen = |index: u64| {
            self.taken[index as usize].as_ref().is_some_and(|request| tags.binary_search(&request.tag).is_ok())
        };
        context.cancel_picked(self.client, chosen);
    }

    fn outstanding(&self) -> u32 {
        self.taken.iter().flatten().count() as u32
    }

    fn close(&mut self, context: &mut UringContext) {
        assert_eq!(self.outstanding(), 0);
        context.remove_client(self.client);
    }
}

struct ContextDisk {
    slow: bool,
    offered: Arc<Offered>,
}

impl Disk<UringContext> for ContextDisk {
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
        Ok(Box::new(ContextChannel { client: context.add_client(), event, slow: self.slow, taken: vec![], offered }))
    }
}

/// A worker with the fast disks and the slow one, and queues of all of them. The second queue is for the fast disks.
struct Fixture {
    worker: SteppedWorker,
    guests: Vec<Arc<Mutex<GuestSide>>>,
    wakers: Vec<Arc<dyn Wake>>,
    queues: Vec<SteppedQueue>,
    fast: Arc<Offered>,
    slow: Arc<Offered>,
    /// The next block to request of the fast disks.
    next: u64,
}

impl Fixture {
    fn new(plug: PlugOptions, queues: usize, in_flight: u32) -> Fixture {
        let context = UringOptions { submissions: 64, in_flight, files: 1, buffers: 1 };
        let mut worker = SteppedWorker::new(context).expect("the host has io_uring");
        let (fast, slow) = (Arc::<Offered>::default(), Arc::<Offered>::default());
        let disk = |slow_one: bool| {
            Arc::new(ContextDisk { slow: slow_one, offered: Arc::clone(if slow_one { &slow } else { &fast }) })
        };
        let disks: Vec<QueueDisk> = (0..=FAST)
            .map(|slot| QueueDisk { slot: DiskSlot(slot), disk: disk(slot == SLOW.0), plug, health: Arc::default() })
            .collect();
        let guests: Vec<Arc<Mutex<GuestSide>>> = (0..queues).map(|_| Arc::default()).collect();
        let mut wakers = vec![];
        let attach = |guest: &Arc<Mutex<GuestSide>>| {
            let options = QueueOptions {
                disks: disks.clone(),
                kick: None,
                policy: PollPolicy::Busy.into(),
                paused: false,
                on_fault: Box::new(|fault| panic!("{fault:?}")),
            };
            let made = worker.attach(options, |waker| {
                wakers.push(Arc::clone(waker));
                Ok(ScriptedQueue(Arc::clone(guest), vec![]))
            });
            made.expect("attached")
        };
        let queues = guests.iter().map(attach).collect();
        Fixture { worker, guests, wakers, queues, fast, slow, next: 0 }
    }

    /// Keeps the fast disks at their depth for many turns. Returns how many requests of each completed in each turn.
    fn serve(&mut self) -> Vec<[usize; FAST as usize]> {
        let request_block = |guest: &mut GuestSide, disk: DiskSlot, next: &mut u64| {
            *next += 7; // nothing touches
            guest.waiting.push_back((disk, DISCARD, *next % 10_000, BLOCK));
        };
        for disk in (0..FAST).map(DiskSlot) {
            for _ in 0..DEPTH {
                request_block(&mut self.guests[1].lock().unwrap(), disk, &mut self.next);
            }
        }
        let mut turns = vec![];
        for _ in 0..TURNS {
            self.worker.turn();
            let mut ended = [0; FAST as usize];
            let mut guest = self.guests[1].lock().unwrap();
            for (disk, outcome) in std::mem::take(&mut guest.completed) {
                assert!(outcome.is_done(), "{disk:?}: {outcome:?}");
                ended[usize::from(disk.0)] += 1;
                request_block(&mut guest, disk, &mut self.next);
            }
            turns.push(ended);
        }
        turns
    }

    /// Requests thousands of blocks of the slow disk, on the first queue.
    fn request_slow(&mut self, stride: u64) {
        let requests = (0..SLOW_REQUESTS as u64).map(|at| (SLOW, DISCARD, at * stride, BLOCK));
        self.guests[0].lock().unwrap().waiting.extend(requests);
    }
}

const DISCARD: Op = Op::Discard { secure: false };

fn plug(merge: MergeMode) -> PlugOptions {
    PlugOptions { merge, ..PlugOptions::default() }
}

#[test]
fn a_slow_disk_does_not_hold_up_fast_ones() {
    for merge in [MergeMode::Off, MergeMode::On] {
        let mut alone = Fixture::new(plug(merge), 2, CONTEXT_OPS);
        let mut with_slow = Fixture::new(plug(merge), 2, CONTEXT_OPS);
        with_slow.request_slow(3);
        let (without, with) = (alone.serve(), with_slow.serve());
        let served: usize = without.iter().flatten().sum();
        assert!(served > TURNS * usize::from(FAST), "{merge:?}: {served} requests in {TURNS} turns");
        let differ = without.iter().zip(&with).position(|(without, with)| without != with);
        assert_eq!(differ, None, "{merge:?}: the first turn that is another one");
        // It has its quota of the context, and its other requests wait.
        assert_eq!(with_slow.slow.outstanding.load(Ordering::Relaxed), u64::from(CONTEXT_OPS / 4), "{merge:?}");
        let stats = with_slow.worker.report();
        let disks = &stats.queues[0].1.disks;
        assert_eq!((disks[7].slot, disks[7].in_flight), (SLOW, SLOW_REQUESTS as u32), "{merge:?}");
        assert_eq!(stats.queues[1].1.disks[0].others, with.iter().map(|ended| ended[0] as u64).sum::<u64>());
        // Once cancelled, all of its requests complete.
        with_slow.wakers[0].wake();
        for _ in 0..4 {
            with_slow.worker.turn();
        }
        let completed = std::mem::take(&mut with_slow.guests[0].lock().unwrap().completed);
        assert_eq!(completed, vec![(SLOW, Outcome::Aborted); SLOW_REQUESTS], "{merge:?}");
        with_slow.worker.drain(with_slow.queues[0]);
        assert!(!with_slow.worker.serves(with_slow.queues[0]));
    }
}

#[test]
fn a_turn_is_shared_while_several_channels_are_busy_and_the_whole_plug_is_merged() {
    // No requests touch: none is merged. Eight queues fill the plug faster than it is submitted.
    let of = |len: u64| move |at: u64| (SLOW, Op::Write { fua: false }, at * 100 % 200_000, len);
    for (len, requests, bytes) in [(BLOCK, 64, 64 * BLOCK), (32 * BLOCK, 8, 1 << 20)] {
        let mut fixture = Fixture::new(plug(MergeMode::Off), 9, 4096);
        for guest in [0, 2, 3, 4, 5, 6, 7, 8] {
            fixture.guests[guest].lock().unwrap().waiting.extend((0..SLOW_REQUESTS as u64).map(of(len)));
        }
        fixture.serve();
        let most = |of: &AtomicU64| of.load(Ordering::Relaxed);
        assert_eq!((most(&fixture.slow.requests), most(&fixture.slow.bytes)), (requests, bytes), "{len} bytes each");
        let outstanding = most(&fixture.slow.outstanding);
        assert!((4096 / 4 - 64..=4096 / 4).contains(&outstanding), "{outstanding}");
    }
    // All requests touch: they are merged into long ones, however few are offered at once.
    let mut fixture = Fixture::new(PlugOptions { depth: 1, ..plug(MergeMode::On) }, 2, CONTEXT_OPS);
    fixture.request_slow(1);
    fixture.serve();
    assert_eq!(fixture.slow.outstanding.load(Ordering::Relaxed), 1);
    assert!(fixture.slow.longest.load(Ordering::Relaxed) >= 16 * BLOCK, "{:?}", fixture.slow);
    assert!(fixture.fast.outstanding.load(Ordering::Relaxed) <= 1, "{:?}", fixture.fast);
}
