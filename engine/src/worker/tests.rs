//! The worker itself, on a real ring, stepped by hand: guests and a control thread act at every point where the worker calls
//! out, and while it sleeps. Whatever they do and whenever, it goes to sleep only when nothing waits for it, or when the
//! ring holds what will wake it.

use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, FinishedRequest, GuestQueue, Intake, Op,
    Outcome, PublishResult, PullEnd, Request, Wake,
};

use mqblk_uring::EventFd;

use super::*;
use crate::engine::{QueueOptions, attached};
use crate::mailbox::Mailbox;
use crate::options::{Coalesce, PlugOptions};
use crate::poll::PollPolicy;
use crate::runner::Buffer;
use crate::trial::TrialDisk;

const QUEUES: usize = 2;

/// What happens outside the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A guest publishes a request on this queue, and kicks if it is asked to.
    Publish(usize),
    /// A control thread sends a message.
    Letter(Letter),
    /// Another thread rings the queue's waker.
    Wake(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Letter {
    Nothing,
    Disable(usize),
    Enable(usize),
    NewKick(usize),
    Drain(usize),
    CloseDisk(usize),
    OpenDisk(usize),
}

const EVENTS: [Event; 12] = [
    Event::Publish(0),
    Event::Publish(1),
    Event::Letter(Letter::Nothing),
    Event::Letter(Letter::Disable(0)),
    Event::Letter(Letter::Enable(0)),
    Event::Letter(Letter::NewKick(0)),
    Event::Letter(Letter::Drain(0)),
    Event::Letter(Letter::Drain(1)),
    Event::Letter(Letter::CloseDisk(0)),
    Event::Letter(Letter::OpenDisk(0)),
    Event::Wake(0),
    Event::Wake(1),
];

/// The slot of the second disk, which queue 0 has.
const SECOND: DiskSlot = DiskSlot(1);

/// What happens when: at the n-th point where the worker calls out, or when it sleeps before that.
type Plan = Vec<(u32, Event)>;

struct Guest {
    waiting: u32,
    wants_kick: bool,
    kick: EventFd,
    taken: u32,
    answered: u32,
    /// Requests that the queue holds until it is woken: each third.
    held: u32,
    waker: Option<Arc<dyn Wake>>,
    /// What was done before the waker rang, and what of it the queue saw.
    told: u32,
    seen: u32,
}

/// Where queues, disk and plan meet.
struct Stage {
    guests: Vec<Guest>,
    queues: Vec<(u16, u32)>,
    mailbox: Mailbox,
    read: Arc<Mutex<u32>>,
    sent: u32,
    plan: Plan,
    point: u32,
    second: Arc<crate::AnyDisk>,
    /// Told when a disk has left.
    closing: Vec<Receiver<()>>,
    /// Channels of the second disk that are open.
    open: u32,
}

impl Stage {
    /// The worker has called out.
    fn point(&mut self) {
        self.point += 1;
        while self.plan.first().is_some_and(|(when, _)| *when <= self.point) {
            let (_, event) = self.plan.remove(0);
            self.happen(event);
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Publish(at) => {
                let guest = &mut self.guests[at];
                guest.waiting += 1;
                if std::mem::take(&mut guest.wants_kick) {
                    guest.kick.signal();
                }
            }
            Event::Letter(message) => self.send(message),
            Event::Wake(at) => {
                let guest = &mut self.guests[at];
                guest.told += 1;
                guest.waker.as_ref().expect("attached").wake();
            }
        }
    }

    fn send(&mut self, message: Letter) {
        let read = Arc::clone(&self.read);
        let queue = match message {
            Letter::Nothing => 0,
            Letter::Disable(at) | Letter::Enable(at) | Letter::NewKick(at) | Letter::Drain(at) => at,
            Letter::CloseDisk(at) | Letter::OpenDisk(at) => at,
        };
        let (slot, generation) = self.queues[queue];
        let fresh = EventFd::new().expect("an eventfd");
        if matches!(message, Letter::NewKick(_)) {
            self.guests[queue].kick = fresh.clone();
        }
        let (left, leaves) = sync_channel(1);
        if matches!(message, Letter::CloseDisk(_)) {
            self.closing.push(leaves);
        }
        let disk = QueueDisk {
            slot: SECOND,
            disk: Arc::clone(&self.second),
            plug: PlugOptions::default(),
            health: Arc::default(),
        };
        self.sent += 1;
        let sent = self.mailbox.send(Box::new(move |worker| {
            *read.lock().expect("not poisoned") += 1;
            match message {
                Letter::Nothing => {}
                Letter::Disable(_) => worker.set_enabled(slot, generation, false),
                Letter::Enable(_) => worker.set_enabled(slot, generation, true),
                Letter::NewKick(_) => worker.set_kick(slot, generation, Some(fresh.into())),
                Letter::Drain(_) => worker.drain(slot, generation, sync_channel(1).0),
                Letter::CloseDisk(_) => worker.close_disk(slot, generation, SECOND, left),
                // It may be there still.
                Letter::OpenDisk(_) => _ = worker.open_disk(slot, generation, &disk),
            }
        }));
        sent.expect("the worker is there");
    }
}

type Shared = Arc<Mutex<Stage>>;

/// Locks without keeping the guard while a point is passed.
fn at(stage: &Shared) -> MutexGuard<'_, Stage> {
    stage.lock().expect("not poisoned")
}

struct FakeQueue {
    stage: Shared,
    index: usize,
    unpublished: u32,
}

/// Of three requests one goes to the second disk and goes on with another step there, one is held until the queue is woken.
impl GuestQueue for FakeQueue {
    type Token = (DiskSlot, u32);
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        16
    }

    fn pull<I: Intake<Self::Token, Buffer>>(&mut self, _context: &mut UringContext, into: &mut I) -> PullEnd {
        at(&self.stage).point();
        let waiting = std::mem::take(&mut at(&self.stage).guests[self.index].waiting);
        for _ in 0..waiting {
            let number = {
                let guest = &mut at(&self.stage).guests[self.index];
                guest.taken += 1;
                guest.taken
            };
            let (disk, more) = if number % 3 == 1 { (SECOND, 1) } else { (DiskSlot::FIRST, 0) };
            if number % 3 == 2 {
                at(&self.stage).guests[self.index].held += 1;
            } else {
                into.admit((disk, more), disk, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
            }
        }
        at(&self.stage).point();
        PullEnd::Empty
    }

    fn finish<I: Intake<Self::Token, Buffer>>(
        &mut self,
        _context: &mut UringContext,
        done: FinishedRequest<Self::Token, Buffer>,
        into: &mut I,
    ) {
        match done.token {
            (disk, more) if more > 0 => {
                into.admit((disk, more - 1), disk, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
            }
            _ => self.unpublished += 1,
        }
    }

    fn woken<I: Intake<Self::Token, Buffer>>(
        &mut self,
        _context: &mut UringContext,
        _into: &mut I,
        _running: bool,
    ) -> Result<(), &'static str> {
        assert_eq!(self.unpublished, 0, "all that was finished before has been published");
        at(&self.stage).point();
        let told = at(&self.stage).guests[self.index].told;
        at(&self.stage).point();
        let mut stage = at(&self.stage);
        let guest = &mut stage.guests[self.index];
        guest.seen = told;
        self.unpublished += std::mem::take(&mut guest.held);
        Ok(())
    }

    fn blocked(&self) -> usize {
        at(&self.stage).guests[self.index].held as usize
    }

    fn publish(&mut self) -> PublishResult {
        at(&self.stage).point();
        at(&self.stage).guests[self.index].answered += std::mem::take(&mut self.unpublished);
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        at(&self.stage).point();
        at(&self.stage).guests[self.index].wants_kick = true;
        at(&self.stage).point();
        let found =
            if at(&self.stage).guests[self.index].waiting > 0 { ArmResult::WorkWaiting } else { ArmResult::Sleepable };
        at(&self.stage).point();
        found
    }

    fn disarm(&mut self) {
        at(&self.stage).guests[self.index].wants_kick = false;
    }

    fn position(&self) {
        let stage = at(&self.stage);
        let guest = &stage.guests[self.index];
        assert_eq!((guest.held, self.unpublished, guest.answered), (0, 0, guest.taken), "it leaves with all answered");
    }
}

/// Ends requests at the reap after their submission, so that they are in flight for a while.
struct FakeChannel {
    stage: Shared,
    taken: Vec<Completion<Buffer>>,
    second: bool,
}

impl DiskChannel<UringContext> for FakeChannel {
    fn submit(
        &mut self,
        _: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        at(&self.stage).point();
        let count = batch.len();
        let ended = |request: Request<Buffer>| Completion {
            outcome: Outcome::Done(ByteLen::ZERO),
            tag: request.tag,
            buffer: request.buffer,
        };
        self.taken.extend(batch.drain(..).map(ended));
        count
    }

    fn reap(&mut self, _: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        at(&self.stage).point();
        let count = self.taken.len();
        finished.append(&mut self.taken);
        count
    }

    fn outstanding(&self) -> u32 {
        self.taken.len() as u32
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn close(&mut self, _: &mut UringContext) {
        assert!(self.taken.is_empty(), "a channel is drained before it is closed");
        at(&self.stage).open -= u32::from(self.second);
    }
}

fn disk(stage: &Weak<Mutex<Stage>>, second: bool) -> Arc<crate::AnyDisk> {
    let stage = Weak::clone(stage);
    let channel = move || {
        let stage = stage.upgrade().expect("the stage outlives the worker");
        at(&stage).open += u32::from(second);
        Box::new(FakeChannel { stage, taken: vec![], second }) as Box<dyn DiskChannel<UringContext>>
    };
    Arc::new(TrialDisk(channel))
}

/// A worker with two queues on one disk, of which the first has another disk, and the plan.
fn staged(plan: &[(u32, Event)]) -> (Worker, Shared) {
    let (mailbox, receiver) = Mailbox::new().expect("a mailbox");
    let options = UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 };
    let mut worker = Worker::new(options, receiver).expect("the host has io_uring");
    let guest = || Guest {
        waiting: 0,
        wants_kick: false,
        kick: EventFd::new().expect("an eventfd"),
        taken: 0,
        answered: 0,
        held: 0,
        waker: None,
        told: 0,
        seen: 0,
    };
    let stage = Arc::new_cyclic(|stage: &Weak<Mutex<Stage>>| {
        Mutex::new(Stage {
            guests: (0..QUEUES).map(|_| guest()).collect(),
            queues: vec![],
            mailbox,
            read: Arc::default(),
            sent: 0,
            plan: plan.to_vec(),
            point: 0,
            second: disk(stage, true),
            closing: vec![],
            open: 0,
        })
    });
    let first = disk(&Arc::downgrade(&stage), false);
    for index in 0..QUEUES {
        let mut disks = vec![QueueDisk {
            slot: DiskSlot::FIRST,
            disk: Arc::clone(&first),
            plug: PlugOptions::default(),
            health: Arc::default(),
        }];
        if index == 0 {
            let second = Arc::clone(&at(&stage).second);
            disks.push(QueueDisk { slot: SECOND, disk: second, plug: PlugOptions::default(), health: Arc::default() });
        }
        let options = QueueOptions {
            disks,
            kick: Some(at(&stage).guests[index].kick.clone().into()),
            poll: PollPolicy::Off,
            coalesce: Coalesce::default(),
            paused: false,
            on_broken: Box::new(|why| panic!("{why}")),
        };
        let queue = FakeQueue { stage: Arc::clone(&stage), index, unpublished: 0 };
        let of_waker = Arc::clone(&stage);
        let make = |_: &mut UringContext, waker: &Arc<dyn Wake>| {
            at(&of_waker).guests[index].waker = Some(Arc::clone(waker));
            Ok(queue)
        };
        let seated = attached(&mut worker, options, make, |_, _| {}).expect("attached");
        at(&stage).queues.push(seated);
    }
    (worker, stage)
}

/// Plays a plan to its end. Returns the points that were passed.
fn play(plan: &[(u32, Event)]) -> u32 {
    let (mut worker, stage) = staged(plan);
    // Each event wakes it once at most, and between two sleeps it does little.
    for _ in 0..1000 {
        if worker.turn() || worker.rest() == IdleDecision::Turn {
            continue;
        }
        // It sleeps until something arrives in the ring; what had arrived before does not wake it.
        while worker.context.turn(Wait::No) == 0 {
            let mut stage = at(&stage);
            assert_eq!(*stage.read.lock().expect("not poisoned"), stage.sent, "lost: a message waits, in {plan:?}");
            for (index, guest) in stage.guests.iter().enumerate() {
                let known = guest.answered + guest.held;
                assert_eq!(known, guest.taken, "lost: a request was taken and not answered, in {plan:?}");
                let phase = worker.poll_list.phase(stage.queues[index].0);
                let runs = phase == Some(Phase::Running);
                assert!(!runs || guest.waiting == 0, "lost: a request waits on queue {index}, in {plan:?}");
                assert!(phase.is_none() || guest.seen == guest.told, "lost: a wake of queue {index}, in {plan:?}");
                assert!(guest.held == 0 || phase.is_some(), "queue {index} left with what it held, in {plan:?}");
            }
            stage.closing.retain(|leaves| leaves.try_recv() == Err(TryRecvError::Empty));
            assert!(stage.closing.is_empty(), "nothing is in flight and a disk has not left, in {plan:?}");
            let has_second = worker.queues[usize::from(stage.queues[0].0)]
                .as_ref()
                .is_some_and(|attached| attached.disks.get(SECOND).is_some());
            assert_eq!(stage.open, u32::from(has_second), "channels that are open, in {plan:?}");
            // The next event comes while it sleeps.
            let Some((when, _)) = stage.plan.first() else { return stage.point };
            stage.point = when - 1;
            stage.point();
        }
    }
    panic!("the worker finds no rest, in {plan:?}");
}

#[test]
fn it_sleeps_when_nothing_happens() {
    // Two pulls of two points each, two arms of three.
    assert_eq!(play(&[]), 10);
}

/// Points of a run with a request or two; an event past the last point comes while the worker sleeps.
const POINTS: u32 = 32;

#[test]
fn one_event_at_any_point() {
    for event in EVENTS {
        for point in 1..=POINTS {
            play(&[(point, event)]);
        }
    }
}

#[test]
fn two_events_at_any_points() {
    for (first, second) in EVENTS.iter().flat_map(|first| EVENTS.iter().map(move |second| (*first, *second))) {
        for (one, two) in (1..=POINTS).flat_map(|one| (one..=POINTS).map(move |two| (one, two))) {
            play(&[(one, first), (two, second)]);
        }
    }
}

#[test]
fn three_events_near_each_other() {
    // Those of the first queue, without what only the second or its other disk is for.
    let events = [EVENTS[0], EVENTS[2], EVENTS[3], EVENTS[4], EVENTS[6], EVENTS[10]];
    for number in 0..events.len().pow(3) {
        let [a, b, c] = [1, events.len(), events.len().pow(2)].map(|place| events[number / place % events.len()]);
        for start in 1..=POINTS {
            for (next, last) in [(0, 0), (0, 1), (1, 1), (1, 2), (3, 5)] {
                play(&[(start, a), (start + next, b), (start + last, c)]);
            }
        }
    }
}
