//! A model checker: visits every state that a worker with two queues can reach, with any actions of guests and a
//! control thread at any time. In none of them the worker sleeps while a request or a message waits.

use std::collections::HashSet;

use super::*;

const QUEUES: usize = 2;
/// Requests of each guest and messages of the control thread in one run, each at any time.
const PUBLISHES: u8 = 2;
const MESSAGES: u8 = 2;

/// A message of the control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Message {
    Enable(u16),
    Disable(u16),
    Drain(u16),
    /// Replaces the kick descriptor: the old watch ends, a new one begins.
    NewKick(u16),
}

/// Completions: a bit for each queue's kick, one for the mailbox's eventfd, and one for the end of the watch of the
/// first queue's kick.
const MAILBOX: u8 = 1 << QUEUES;
const WATCH_ENDED: u8 = MAILBOX << 1;
/// The queue whose watch ends once (the kernel ends a watch that it cannot report), and which messages go to. The other
/// queue keeps the worker busy and awake.
const FIRST: u16 = 0;

/// The worker's position in its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Signals,
    /// With `happened` so far.
    Pull(bool),
    Collect(bool),
    Rest,
    Asleep,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Queue {
    to_publish: u8,
    waiting: u8,
    wants_kick: bool,
    /// True if the kernel polls its kick.
    watched: bool,
    gone: bool,
}

/// The state of the model: a worker, the guests and the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Model {
    poll_list: PollList,
    queues: [Queue; QUEUES],
    messages: Vec<Message>,
    messages_to_send: u8,
    watch_ends: u8,
    /// Completions in the kernel, and those in the worker's completion queue.
    kernel: u8,
    completed: u8,
    at: Stage,
}

/// A correct worker, and two faulty ones: one hides unread completions from the poll list, the other a failed renewal
/// of a watch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Worker {
    Sound,
    HidesUnreadCompletions,
    HidesEndedWatch,
}

impl Model {
    fn new() -> Model {
        let mut poll_list = PollList::default();
        for slot in 0..QUEUES as u16 {
            poll_list.attach(slot, Phase::Running);
            poll_list.set_watched(slot, true);
        }
        let queue = Queue { to_publish: PUBLISHES, waiting: 0, wants_kick: false, watched: true, gone: false };
        Model {
            poll_list,
            queues: [queue.clone(), queue],
            messages: vec![],
            messages_to_send: MESSAGES,
            watch_ends: 1,
            kernel: 0,
            completed: 0,
            at: Stage::Signals,
        }
    }

    fn has_work(&self, slot: usize) -> bool {
        self.queues[slot].waiting > 0 && self.poll_list.phase(slot as u16) == Some(Phase::Running)
    }

    /// Returns the states after each step that a guest, the control thread or the kernel can take now.
    fn outside_steps(&self) -> Vec<Model> {
        let mut next = vec![];
        for slot in 0..QUEUES {
            if self.queues[slot].to_publish > 0 {
                let mut model = self.clone();
                let queue = &mut model.queues[slot];
                queue.to_publish -= 1;
                queue.waiting += 1;
                // The protocol of `wakeup::Direction`, proved there: a guest that finds the queue armed kicks.
                if std::mem::take(&mut queue.wants_kick) && queue.watched && !queue.gone {
                    model.kernel |= 1 << slot;
                }
                next.push(model);
            }
        }
        if self.messages_to_send > 0 {
            for message in
                [Message::Enable(FIRST), Message::Disable(FIRST), Message::Drain(FIRST), Message::NewKick(FIRST)]
            {
                let mut model = self.clone();
                model.messages_to_send -= 1;
                model.messages.push(message);
                model.kernel |= MAILBOX;
                next.push(model);
            }
        }
        let watched = &self.queues[usize::from(FIRST)];
        if self.watch_ends > 0 && watched.watched && !watched.gone {
            let mut model = self.clone();
            model.watch_ends -= 1;
            model.queues[usize::from(FIRST)].watched = false;
            model.kernel |= WATCH_ENDED;
            next.push(model);
        }
        next
    }

    fn read(&mut self, message: Message) {
        match message {
            Message::Enable(slot) => self.poll_list.enable(slot, true),
            Message::Disable(slot) => self.poll_list.enable(slot, false),
            Message::NewKick(slot) => {
                self.kernel &= !(1 << slot);
                self.completed &= !(1 << slot);
                self.renew(slot, true, Worker::Sound);
            }
            Message::Drain(slot) => {
                self.poll_list.drain(slot);
                if !std::mem::replace(&mut self.queues[usize::from(slot)].gone, true) {
                    self.poll_list.remove(slot);
                }
            }
        }
    }

    /// The worker watches a queue's kick again, or the ring is too full for it.
    fn renew(&mut self, slot: u16, room: bool, worker: Worker) {
        self.queues[usize::from(slot)].watched |= room;
        self.poll_list.set_watched(slot, room || worker == Worker::HidesEndedWatch);
    }

    /// Returns the states after the worker's next step: several, where the clock decides. The order of steps is the one
    /// of `Worker::turn`.
    fn steps(&self, worker: Worker) -> Vec<Model> {
        let mut model = self.clone();
        match self.at {
            Stage::Signals => {
                let completed = std::mem::take(&mut model.completed);
                for slot in (0..QUEUES).filter(|slot| completed & 1 << slot != 0) {
                    model.queues[slot].wants_kick = false;
                    model.poll_list.kicked(slot as u16);
                }
                if completed & MAILBOX != 0 {
                    for message in std::mem::take(&mut model.messages) {
                        model.read(message);
                    }
                }
                model.at = Stage::Pull(completed != 0);
                if completed & WATCH_ENDED == 0 || model.queues[usize::from(FIRST)].watched {
                    return vec![model];
                }
                model.either_renews(worker)
            }
            Stage::Pull(mut happened) => {
                for slot in model.poll_list.polled().to_vec() {
                    if model.has_work(slot.into()) {
                        model.queues[usize::from(slot)].waiting = 0;
                        happened = true;
                    }
                }
                model.at = Stage::Collect(happened);
                vec![model]
            }
            Stage::Collect(happened) => {
                model.completed |= std::mem::take(&mut model.kernel);
                model.at = if happened { Stage::Signals } else { Stage::Rest };
                vec![model]
            }
            // For each queue the window is open or closed. A concurrent step of the others is equivalent to one before
            // or after it: arming a queue is atomic to its guest, and queues are independent of each other.
            Stage::Rest => {
                let unwatched: Vec<u16> = model.poll_list.unwatched().collect();
                let states = if unwatched.is_empty() { vec![model] } else { model.either_renews(worker) };
                states.iter().flat_map(|model| (0..1 << QUEUES).map(|open| model.clone().rest(worker, open))).collect()
            }
            Stage::Asleep if model.kernel != 0 => {
                model.completed |= std::mem::take(&mut model.kernel);
                model.at = Stage::Signals;
                vec![model]
            }
            Stage::Asleep => vec![],
        }
    }

    /// Returns the state after a renewal that succeeds, and the one after a renewal that is refused.
    fn either_renews(&self, worker: Worker) -> Vec<Model> {
        let renewed = [true, false].map(|room| {
            let mut model = self.clone();
            model.renew(FIRST, room, worker);
            model
        });
        renewed.into()
    }

    fn rest(mut self, worker: Worker, open: u8) -> Model {
        let unread = self.completed != 0 && worker != Worker::HidesUnreadCompletions;
        let queues = &mut self.queues;
        let next = self.poll_list.decide_when_idle(unread, |slot| {
            let queue = &mut queues[usize::from(slot)];
            if open & 1 << slot != 0 {
                return IdleResult::Poll;
            }
            queue.wants_kick = true;
            if queue.waiting > 0 { IdleResult::Poll } else { IdleResult::Armed }
        });
        self.at = if next == IdleDecision::Sleep { Stage::Asleep } else { Stage::Signals };
        self
    }

    fn check(&self) {
        for slot in 0..QUEUES {
            let listed = self.poll_list.polled().iter().filter(|polled| usize::from(**polled) == slot).count();
            assert!(listed <= 1, "a queue is on the list once: {self:?}");
        }
        if self.at == Stage::Asleep && self.kernel == 0 {
            assert_eq!(self.messages, [], "lost: a message waits for a sleeping worker: {self:?}");
            for slot in 0..QUEUES {
                assert!(!self.has_work(slot), "lost: a request waits for a sleeping worker: {self:?}");
            }
        }
    }
}

/// Visits every reachable state. Returns their number, and the number of those in which the worker sleeps for good.
fn explore(worker: Worker, start: Model) -> (usize, usize) {
    let mut seen = HashSet::from([start.clone()]);
    let mut todo = vec![start];
    let mut asleep = 0;
    while let Some(model) = todo.pop() {
        model.check();
        let steps = model.steps(worker);
        asleep += usize::from(steps.is_empty());
        for next in steps.into_iter().chain(model.outside_steps()) {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    (seen.len(), asleep)
}

#[test]
fn nothing_waits_for_a_sleeping_worker() {
    let (states, asleep) = explore(Worker::Sound, Model::new());
    // The worker does sleep, and the exploration is not trivial.

    assert!(asleep > 100 && states > 100_000, "{states} states, {asleep} asleep");
}

#[test]
fn a_worker_looks_by_a_timer_while_all_of_its_polled_queues_do() {
    let mut list = PollList::default();
    (0..3).for_each(|slot| list.attach(slot, Phase::Running));
    (0..3).for_each(|slot| list.set_watched(slot, true));
    let mut decide = |results: [IdleResult; 3]| {
        (0..3).for_each(|slot| list.kicked(slot));
        let decision = list.decide_when_idle(false, |slot| results[usize::from(slot)]);
        (decision, list.polled().len())
    };
    use IdleResult::{Armed, Poll, PollByTimer, PollInWindow};
    assert_eq!(decide([PollByTimer; 3]), (IdleDecision::Timer, 3));
    assert_eq!(decide([Armed, PollByTimer, Armed]), (IdleDecision::Timer, 1));
    assert_eq!(decide([Poll, PollByTimer, Armed]), (IdleDecision::Turn, 2));
    assert_eq!(decide([PollInWindow, PollByTimer, PollByTimer]), (IdleDecision::Turn, 3));
    assert_eq!(decide([Armed; 3]), (IdleDecision::Sleep, 0));
    // A queue without a watched kick cannot wake the worker.
    list.set_watched(0, false);
    list.kicked(1);
    assert_eq!(list.decide_when_idle(false, |_| PollByTimer), IdleDecision::Turn);
    assert_eq!(list.decide_when_idle(true, |_| panic!("completions are unread")), IdleDecision::Turn);
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_worker_that_hides_unread_completions_is_detected() {
    explore(Worker::HidesUnreadCompletions, Model::new());
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_worker_that_hides_an_ended_watch_is_detected() {
    explore(Worker::HidesEndedWatch, Model::new());
}
