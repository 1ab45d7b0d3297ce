//! The worker itself, on a real io_uring, stepped: guests and a control thread act at every point where the worker
//! calls out, and while it sleeps. In all cases the worker sleeps only when nothing waits for it, or when the io_uring
//! holds a completion that will wake it.

use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, FinishedRequest, GuestQueue, Intake, Op,
    Outcome, PublishResult, PullEnd, Request, Wake,
};

use mqblk_uring::EventFd;

use super::*;
use crate::mailbox::Mailbox;
use crate::options::PlugOptions;
use crate::poll::PollPolicy;
use crate::queue_options::QueueOptions;
use crate::request::Buffer;
use crate::trial::TrialDisk;

const QUEUES: usize = 2;

/// An event outside the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A guest publishes a request on this queue, and kicks if the queue is armed.
    Publish(usize),
    /// A control thread sends a message.
    Control(ControlMessage),
    /// Another thread wakes the queue.
    Wake(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ControlMessage {
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
    Event::Control(ControlMessage::Nothing),
    Event::Control(ControlMessage::Disable(0)),
    Event::Control(ControlMessage::Enable(0)),
    Event::Control(ControlMessage::NewKick(0)),
    Event::Control(ControlMessage::Drain(0)),
    Event::Control(ControlMessage::Drain(1)),
    Event::Control(ControlMessage::CloseDisk(0)),
    Event::Control(ControlMessage::OpenDisk(0)),
    Event::Wake(0),
    Event::Wake(1),
];

/// The slot of the second disk, which queue 0 has.
const SECOND: DiskSlot = DiskSlot(1);

/// The time of each event: the n-th point where the worker calls out, or earlier if it sleeps before.
type Plan = Vec<(u32, Event)>;

struct Guest {
    waiting: u32,
    wants_kick: bool,
    kick: EventFd,
    taken: u32,
    completed: u32,
    /// Requests that the queue blocks until it is woken: each third.
    blocked: u32,
    waker: Option<Arc<dyn Wake>>,
    /// Number of wakes, and of those that the queue has seen.
    wakes: u32,
    wakes_seen: u32,
}

/// The state that queues, disks and the plan share.
struct Scene {
    guests: Vec<Guest>,
    queues: Vec<(u16, u32)>,
    mailbox: Mailbox<Worker>,
    read: Arc<Mutex<u32>>,
    sent: u32,
    plan: Plan,
    point: u32,
    second: Arc<crate::AnyDisk>,
    /// Signalled when a disk is closed.
    closing: Vec<Receiver<()>>,
    /// Channels of the second disk that are open.
    open: u32,
}

impl Scene {
    /// Called at each point where the worker calls out.
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
            Event::Control(message) => self.send(message),
            Event::Wake(at) => {
                let guest = &mut self.guests[at];
                guest.wakes += 1;
                guest.waker.as_ref().expect("attached").wake();
            }
        }
    }

    fn send(&mut self, message: ControlMessage) {
        let read = Arc::clone(&self.read);
        let queue = match message {
            ControlMessage::Nothing => 0,
            ControlMessage::Disable(at)
            | ControlMessage::Enable(at)
            | ControlMessage::NewKick(at)
            | ControlMessage::Drain(at) => at,
            ControlMessage::CloseDisk(at) | ControlMessage::OpenDisk(at) => at,
        };
        let (slot, generation) = self.queues[queue];
        let fresh = EventFd::new().expect("an eventfd");
        if matches!(message, ControlMessage::NewKick(_)) {
            self.guests[queue].kick = fresh.clone();
        }
        let (left, leaves) = sync_channel(1);
        if matches!(message, ControlMessage::CloseDisk(_)) {
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
                ControlMessage::Nothing => {}
                ControlMessage::Disable(_) => worker.set_enabled(slot, generation, false),
                ControlMessage::Enable(_) => worker.set_enabled(slot, generation, true),
                ControlMessage::NewKick(_) => worker.set_kick(slot, generation, Some(fresh.into())),
                ControlMessage::Drain(_) => worker.drain(slot, generation, sync_channel(1).0),
                ControlMessage::CloseDisk(_) => worker.close_disk(slot, generation, SECOND, left),
                // It may still be open.
                ControlMessage::OpenDisk(_) => _ = worker.open_disk(slot, generation, &disk),
            }
        }));
        sent.expect("the worker is there");
    }
}

type Shared = Arc<Mutex<Scene>>;

/// Locks the scene. No guard is held across a point.
fn at(scene: &Shared) -> MutexGuard<'_, Scene> {
    scene.lock().expect("not poisoned")
}

struct FakeQueue {
    scene: Shared,
    index: usize,
    unpublished: u32,
}

/// Of three requests one goes to the second disk and has another step there, and one is blocked until the queue is
/// woken.
impl GuestQueue for FakeQueue {
    type Token = (DiskSlot, u32);
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        16
    }

    fn enter(&mut self, _: &mut UringContext) -> Result<(), String> {
        Ok(())
    }

    fn leave(&mut self, _: &mut UringContext) {}

    fn pull<I: Intake<Self::Token, Buffer>>(&mut self, _context: &mut UringContext, into: &mut I) -> PullEnd {
        at(&self.scene).point();
        let waiting = std::mem::take(&mut at(&self.scene).guests[self.index].waiting);
        for _ in 0..waiting {
            let number = {
                let guest = &mut at(&self.scene).guests[self.index];
                guest.taken += 1;
                guest.taken
            };
            let (disk, more) = if number % 3 == 1 { (SECOND, 1) } else { (DiskSlot::FIRST, 0) };
            if number % 3 == 2 {
                at(&self.scene).guests[self.index].blocked += 1;
            } else {
                into.admit((disk, more), disk, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
            }
        }
        at(&self.scene).point();
        PullEnd::Empty { taken: waiting as usize }
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
        at(&self.scene).point();
        let wakes = at(&self.scene).guests[self.index].wakes;
        at(&self.scene).point();
        let mut scene = at(&self.scene);
        let guest = &mut scene.guests[self.index];
        guest.wakes_seen = wakes;
        self.unpublished += std::mem::take(&mut guest.blocked);
        Ok(())
    }

    fn blocked(&self) -> usize {
        at(&self.scene).guests[self.index].blocked as usize
    }

    fn abandon(&mut self, _: &mut UringContext, _: (DiskSlot, u32), _: Option<Buffer>) {}

    fn publish(&mut self) -> PublishResult {
        at(&self.scene).point();
        at(&self.scene).guests[self.index].completed += std::mem::take(&mut self.unpublished);
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        at(&self.scene).point();
        at(&self.scene).guests[self.index].wants_kick = true;
        at(&self.scene).point();
        let found =
            if at(&self.scene).guests[self.index].waiting > 0 { ArmResult::WorkWaiting } else { ArmResult::Sleepable };
        at(&self.scene).point();
        found
    }

    fn disarm(&mut self) {
        at(&self.scene).guests[self.index].wants_kick = false;
    }

    fn position(&self) {
        let scene = at(&self.scene);
        let guest = &scene.guests[self.index];
        assert_eq!(
            (guest.blocked, self.unpublished, guest.completed),
            (0, 0, guest.taken),
            "all are completed when it is detached"
        );
    }
}

/// A channel that completes requests at the reap after their submission, so that they are in flight for a while.
struct FakeChannel {
    scene: Shared,
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
        at(&self.scene).point();
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
        at(&self.scene).point();
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
        at(&self.scene).open -= u32::from(self.second);
    }
}

fn disk(scene: &Weak<Mutex<Scene>>, second: bool) -> Arc<crate::AnyDisk> {
    let scene = Weak::clone(scene);
    let channel = move || {
        let scene = scene.upgrade().expect("the scene outlives the worker");
        at(&scene).open += u32::from(second);
        Box::new(FakeChannel { scene, taken: vec![], second }) as Box<dyn DiskChannel<UringContext>>
    };
    Arc::new(TrialDisk(channel))
}

/// Returns a worker with two queues on one disk, of which the first has another disk, and the scene with the plan.
fn fixture(plan: &[(u32, Event)]) -> (Worker, Shared) {
    let (mailbox, receiver) = Mailbox::new(0).expect("a mailbox");
    let options = UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 };
    let mut worker = Worker::new(options, receiver).expect("the host has io_uring");
    let guest = || Guest {
        waiting: 0,
        wants_kick: false,
        kick: EventFd::new().expect("an eventfd"),
        taken: 0,
        completed: 0,
        blocked: 0,
        waker: None,
        wakes: 0,
        wakes_seen: 0,
    };
    let scene = Arc::new_cyclic(|scene: &Weak<Mutex<Scene>>| {
        Mutex::new(Scene {
            guests: (0..QUEUES).map(|_| guest()).collect(),
            queues: vec![],
            mailbox,
            read: Arc::default(),
            sent: 0,
            plan: plan.to_vec(),
            point: 0,
            second: disk(scene, true),
            closing: vec![],
            open: 0,
        })
    });
    let first = disk(&Arc::downgrade(&scene), false);
    for index in 0..QUEUES {
        let mut disks = vec![QueueDisk {
            slot: DiskSlot::FIRST,
            disk: Arc::clone(&first),
            plug: PlugOptions::default(),
            health: Arc::default(),
        }];
        if index == 0 {
            let second = Arc::clone(&at(&scene).second);
            disks.push(QueueDisk { slot: SECOND, disk: second, plug: PlugOptions::default(), health: Arc::default() });
        }
        let options = QueueOptions {
            disks,
            kick: Some(at(&scene).guests[index].kick.clone().into()),
            // Armed in the first idle turn.
            policy: PollPolicy::Static(Duration::from_nanos(1)).into(),
            paused: false,
            on_fault: Box::new(|fault| panic!("{fault:?}")),
        };
        let queue = FakeQueue { scene: Arc::clone(&scene), index, unpublished: 0 };
        let of_waker = Arc::clone(&scene);
        let make = |waker: &Arc<dyn Wake>| {
            at(&of_waker).guests[index].waker = Some(Arc::clone(waker));
            Ok(queue)
        };
        let slot_and_generation = worker.attach_queue(options, make).expect("attached");
        at(&scene).queues.push(slot_and_generation);
    }
    (worker, scene)
}

/// Runs a plan to its end. Returns the number of points that were passed.
fn play(plan: &[(u32, Event)]) -> u32 {
    let (mut worker, scene) = fixture(plan);
    // Each event wakes the worker at most once, and between two sleeps it runs few turns.
    for _ in 0..1000 {
        if worker.turn() || worker.poll_or_arm() != IdleDecision::Sleep {
            continue;
        }
        // It sleeps until a completion arrives; earlier ones do not wake it.
        while worker.context.turn(Wait::No) == 0 {
            let mut scene = at(&scene);
            assert_eq!(*scene.read.lock().expect("not poisoned"), scene.sent, "lost: a message waits, in {plan:?}");
            for (index, guest) in scene.guests.iter().enumerate() {
                let accounted = guest.completed + guest.blocked;
                assert_eq!(accounted, guest.taken, "lost: a request was pulled and not completed, in {plan:?}");
                let phase = worker.poll_list.phase(scene.queues[index].0);
                let runs = phase == Some(Phase::Running);
                assert!(!runs || guest.waiting == 0, "lost: a request waits on queue {index}, in {plan:?}");
                assert!(
                    phase.is_none() || guest.wakes_seen == guest.wakes,
                    "lost: a wake of queue {index}, in {plan:?}"
                );
                assert!(guest.blocked == 0 || phase.is_some(), "queue {index} left with blocked requests, in {plan:?}");
            }
            scene.closing.retain(|leaves| leaves.try_recv() == Err(TryRecvError::Empty));
            assert!(scene.closing.is_empty(), "nothing is in flight and a disk is not closed, in {plan:?}");
            let has_second = worker.queues[usize::from(scene.queues[0].0)]
                .as_ref()
                .is_some_and(|attached| attached.disks.get(SECOND).is_some());
            assert_eq!(scene.open, u32::from(has_second), "channels that are open, in {plan:?}");
            // The next event happens while it sleeps.
            let Some((when, _)) = scene.plan.first() else { return scene.point };
            scene.point = when - 1;
            scene.point();
        }
    }
    panic!("the worker does not sleep, in {plan:?}");
}

#[test]
fn it_sleeps_when_nothing_happens() {
    // Two pulls of two points each, two arms of three.
    assert_eq!(play(&[]), 10);
}

/// Points of a run with a request or two; an event past the last point happens while the worker sleeps.
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
    // The events of the first queue, without those of its second disk.
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
