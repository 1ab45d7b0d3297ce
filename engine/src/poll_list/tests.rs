//! Every state that a worker with two queues can reach, whatever its guests and its control thread do and whenever they do
//! it: none in which the worker sleeps while something waits for it.

use std::collections::HashSet;

use super::*;

const QUEUES: usize = 2;
/// What the outside may do in one run, each at any moment.
const PUBLISHES: u8 = 2;
const LETTERS: u8 = 2;

/// What a control thread asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Letter {
    Enable(u16),
    Disable(u16),
    Drain(u16),
    /// The kick descriptor is replaced: the old watch ends, a new one begins.
    NewKick(u16),
}

/// Signals: a bit for each queue's kick, one for the eventfd, and one that says that the watch of the first queue's kicks ended.
const MAILBOX: u8 = 1 << QUEUES;
const LAPSE: u8 = MAILBOX << 1;
/// The queue whose watch ends once (the kernel ends a watch when it cannot report it), and to which messages go. The other is
/// there to keep the worker busy and awake.
const FIRST: u16 = 0;

/// Where the worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Signals,
    /// `happened` so far.
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
    /// The kernel follows its kicks.
    watched: bool,
    gone: bool,
}

/// A worker and its surroundings.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    poll_list: PollList,
    queues: [Queue; QUEUES],
    messages: Vec<Letter>,
    letters_to_send: u8,
    lapses: u8,
    /// Signals in the kernel, and those in the worker's mailbox.
    kernel: u8,
    mailbox: u8,
    at: At,
}

/// What the worker tells the poll_list: the truth, or not that signals are unread, or not that a watch could not be renewed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Worker {
    Sound,
    HidesUnreadSignals,
    HidesEndedWatch,
}

impl World {
    fn new() -> World {
        let mut poll_list = PollList::default();
        for slot in 0..QUEUES as u16 {
            poll_list.attached(slot, Phase::Running);
            poll_list.watch(slot, true);
        }
        let queue = Queue { to_publish: PUBLISHES, waiting: 0, wants_kick: false, watched: true, gone: false };
        World {
            poll_list,
            queues: [queue.clone(), queue],
            messages: vec![],
            letters_to_send: LETTERS,
            lapses: 1,
            kernel: 0,
            mailbox: 0,
            at: At::Signals,
        }
    }

    fn has_work(&self, slot: usize) -> bool {
        self.queues[slot].waiting > 0 && self.poll_list.phase(slot as u16) == Some(Phase::Running)
    }

    /// What guests and control threads can do now.
    fn outside(&self) -> Vec<World> {
        let mut next = vec![];
        for slot in 0..QUEUES {
            if self.queues[slot].to_publish > 0 {
                let mut world = self.clone();
                let queue = &mut world.queues[slot];
                queue.to_publish -= 1;
                queue.waiting += 1;
                // The protocol of `wakeup::Direction`, proved there: a guest that finds the wish kicks.
                if std::mem::take(&mut queue.wants_kick) && queue.watched && !queue.gone {
                    world.kernel |= 1 << slot;
                }
                next.push(world);
            }
        }
        if self.letters_to_send > 0 {
            for message in [Letter::Enable(FIRST), Letter::Disable(FIRST), Letter::Drain(FIRST), Letter::NewKick(FIRST)]
            {
                let mut world = self.clone();
                world.letters_to_send -= 1;
                world.messages.push(message);
                world.kernel |= MAILBOX;
                next.push(world);
            }
        }
        let lapsing = &self.queues[usize::from(FIRST)];
        if self.lapses > 0 && lapsing.watched && !lapsing.gone {
            let mut world = self.clone();
            world.lapses -= 1;
            world.queues[usize::from(FIRST)].watched = false;
            world.kernel |= LAPSE;
            next.push(world);
        }
        next
    }

    fn read(&mut self, message: Letter) {
        match message {
            Letter::Enable(slot) => self.poll_list.enable(slot, true),
            Letter::Disable(slot) => self.poll_list.enable(slot, false),
            Letter::NewKick(slot) => {
                self.kernel &= !(1 << slot);
                self.mailbox &= !(1 << slot);
                self.renew(slot, true, Worker::Sound);
            }
            Letter::Drain(slot) => {
                self.poll_list.drain(slot);
                if !std::mem::replace(&mut self.queues[usize::from(slot)].gone, true) {
                    self.poll_list.leave(slot);
                }
            }
        }
    }

    /// The worker watches a queue's kicks again, or the ring has no room for it.
    fn renew(&mut self, slot: u16, room: bool, worker: Worker) {
        self.queues[usize::from(slot)].watched |= room;
        self.poll_list.watch(slot, room || worker == Worker::HidesEndedWatch);
    }

    /// The worker's next step; several, where the clock decides. The order of steps is that of `Worker::turn`.
    fn steps(&self, worker: Worker) -> Vec<World> {
        let mut world = self.clone();
        match self.at {
            At::Signals => {
                let mailbox = std::mem::take(&mut world.mailbox);
                for slot in (0..QUEUES).filter(|slot| mailbox & 1 << slot != 0) {
                    world.queues[slot].wants_kick = false;
                    world.poll_list.kicked(slot as u16);
                }
                if mailbox & MAILBOX != 0 {
                    for message in std::mem::take(&mut world.messages) {
                        world.read(message);
                    }
                }
                world.at = At::Pull(mailbox != 0);
                if mailbox & LAPSE == 0 || world.queues[usize::from(FIRST)].watched {
                    return vec![world];
                }
                world.either_renews(worker)
            }
            At::Pull(mut happened) => {
                for slot in world.poll_list.polled().to_vec() {
                    if world.has_work(slot.into()) {
                        world.queues[usize::from(slot)].waiting = 0;
                        happened = true;
                    }
                }
                world.at = At::Collect(happened);
                vec![world]
            }
            At::Collect(happened) => {
                world.mailbox |= std::mem::take(&mut world.kernel);
                world.at = if happened { At::Signals } else { At::Rest };
                vec![world]
            }
            // For each queue the window is open or closed. What comes from outside while `rest` runs is the same to it as
            // what comes before or after: arming a queue is atomic to its guest, and the queues know nothing of each other.
            At::Rest => {
                let unwatched: Vec<u16> = world.poll_list.unwatched().collect();
                let worlds = if unwatched.is_empty() { vec![world] } else { world.either_renews(worker) };
                worlds.iter().flat_map(|world| (0..1 << QUEUES).map(|open| world.clone().rest(worker, open))).collect()
            }
            At::Asleep if world.kernel != 0 => {
                world.mailbox |= std::mem::take(&mut world.kernel);
                world.at = At::Signals;
                vec![world]
            }
            At::Asleep => vec![],
        }
    }

    /// One world where a renewal succeeds and one where it is refused.
    fn either_renews(&self, worker: Worker) -> Vec<World> {
        let renewed = [true, false].map(|room| {
            let mut world = self.clone();
            world.renew(FIRST, room, worker);
            world
        });
        renewed.into()
    }

    fn rest(mut self, worker: Worker, open: u8) -> World {
        let unread = self.mailbox != 0 && worker != Worker::HidesUnreadSignals;
        let queues = &mut self.queues;
        let next = self.poll_list.rest(unread, |slot| {
            let queue = &mut queues[usize::from(slot)];
            if open & 1 << slot != 0 {
                return IdleResult::Poll;
            }
            queue.wants_kick = true;
            if queue.waiting > 0 { IdleResult::Poll } else { IdleResult::Armed }
        });
        self.at = if next == IdleDecision::Sleep { At::Asleep } else { At::Signals };
        self
    }

    fn judge(&self) {
        for slot in 0..QUEUES {
            let listed = self.poll_list.polled().iter().filter(|polled| usize::from(**polled) == slot).count();
            assert!(listed <= 1, "a queue is on the list once: {self:?}");
        }
        if self.at == At::Asleep && self.kernel == 0 {
            assert_eq!(self.messages, [], "lost: a message waits for a sleeping worker: {self:?}");
            for slot in 0..QUEUES {
                assert!(!self.has_work(slot), "lost: a request waits for a sleeping worker: {self:?}");
            }
        }
    }
}

/// Visits everything that can be reached. Returns how many worlds that is, and in how many the worker sleeps for good.
fn explore(worker: Worker, start: World) -> (usize, usize) {
    let mut seen = HashSet::from([start.clone()]);
    let mut todo = vec![start];
    let mut asleep = 0;
    while let Some(world) = todo.pop() {
        world.judge();
        let steps = world.steps(worker);
        asleep += usize::from(steps.is_empty());
        for next in steps.into_iter().chain(world.outside()) {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    (seen.len(), asleep)
}

#[test]
fn nothing_waits_for_a_sleeping_worker() {
    let (worlds, asleep) = explore(Worker::Sound, World::new());
    // It does sleep, and the exploration got somewhere.

    assert!(asleep > 100 && worlds > 100_000, "{worlds} worlds, {asleep} asleep");
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_worker_that_hides_unread_signals_is_found_out() {
    explore(Worker::HidesUnreadSignals, World::new());
}

#[test]
#[should_panic(expected = "lost: ")]
fn a_worker_that_hides_an_ended_watch_is_found_out() {
    explore(Worker::HidesEndedWatch, World::new());
}
