//! Steering and handover under all interleavings (with a bounded number of preemptions) and reorderings that the memory
//! model allows.
//!
//! The code under test is `steering::TargetSteering` and `handover::IdleWait` of the driver, with loom's atomics.
//! Shown: a target is never in flight on two queues, no command is lost, the count ends at 0. A thread that sleeps
//! while a command waits for it is a deadlock, which loom reports. Further tests each omit one part of a rule, to show
//! that the model can fail.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use loom::sync::{Mutex, Notify};
use mqblk_driver::virtio_scsi::handover::{AtomicFlag, IdleWait};
use mqblk_driver::virtio_scsi::steering::{AtomicWord, TargetSteering};

#[derive(Debug)]
struct ModelWord(AtomicU64);

impl AtomicWord for ModelWord {
    fn zero() -> Self {
        ModelWord(AtomicU64::new(0))
    }
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(value, order)
    }
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> bool {
        self.0.compare_exchange(old, new, order, Ordering::Relaxed).is_ok()
    }
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
}

/// A word whose exchange does not compare: the queue is changed even if another command has begun in between.
#[derive(Debug)]
struct Careless(AtomicU64);

impl AtomicWord for Careless {
    fn zero() -> Self {
        Careless(AtomicU64::new(0))
    }
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(value, order)
    }
    fn compare_exchange(&self, _old: u64, new: u64, _order: Ordering) -> bool {
        let queue = new >> 32 << 32;
        let set = |word: u64| Some(queue | word & 0xffff_ffff);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, set).is_ok()
    }
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
}

#[derive(Debug)]
struct ModelFlag<const FENCED: bool>(AtomicBool);

impl<const FENCED: bool> AtomicFlag for ModelFlag<FENCED> {
    fn unset() -> Self {
        ModelFlag(AtomicBool::new(false))
    }
    fn load(&self, order: Ordering) -> bool {
        self.0.load(order)
    }
    fn store(&self, value: bool, order: Ordering) {
        self.0.store(value, order);
    }
    fn swap(&self, value: bool, order: Ordering) -> bool {
        self.0.swap(value, order)
    }
    fn full_fence() {
        if FENCED {
            fence(Ordering::SeqCst);
        }
    }
}

/// A target, and the number of its commands in flight on each queue.
struct Target<W: AtomicWord> {
    steering: TargetSteering<W>,
    on: [AtomicU32; 3],
}

impl<W: AtomicWord> Target<W> {
    fn new() -> Self {
        Target { steering: TargetSteering::default(), on: std::array::from_fn(|_| AtomicU32::new(0)) }
    }

    fn begin(&self, own: u16) -> u16 {
        let queue = self.steering.begin(own);
        self.on[usize::from(queue)].fetch_add(1, Ordering::SeqCst);
        // If two commands are on different queues at the same time, the later one observes the other.
        for (other, count) in self.on.iter().enumerate() {
            let count = count.load(Ordering::SeqCst);
            assert!(other == usize::from(queue) || count == 0, "in flight on queues {queue} and {other}");
        }
        queue
    }

    fn end(&self, queue: u16) {
        self.on[usize::from(queue)].fetch_sub(1, Ordering::SeqCst);
        self.steering.end();
    }
}

/// Largest number of preemptions in an interleaving. Bugs of this kind need one or two, and without a bound the model
/// of the handover runs for hours. LOOM_MAX_PREEMPTIONS overrides it.
const PREEMPTIONS: usize = 3;

fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(run);
}

/// Thread `t` runs `commands[t]` commands, one after the other, and prefers queue `t`.
fn steer<W: AtomicWord + Send + Sync + 'static>(commands: &'static [usize], busy_before: bool) {
    model(move || {
        let target = Arc::new(Target::<W>::new());
        let before = busy_before.then(|| target.begin(0));
        let threads: Vec<_> = (1..commands.len())
            .map(|own| {
                let target = Arc::clone(&target);
                loom::thread::spawn(move || work(&target, own as u16, commands[own]))
            })
            .collect();
        if let Some(queue) = before {
            target.end(queue);
        }
        work(&target, 0, commands[0]);
        threads.into_iter().for_each(|thread| thread.join().expect("a thread ends"));
        assert_eq!(target.steering.in_flight(), 0, "the count is stuck");
    });
}

fn work<W: AtomicWord>(target: &Target<W>, own: u16, commands: usize) {
    for _ in 0..commands {
        let queue = target.begin(own);
        target.end(queue);
    }
}

#[test]
fn a_target_is_on_one_queue() {
    steer::<ModelWord>(&[2, 2], false);
    steer::<ModelWord>(&[1, 1, 1], false);
}

#[test]
fn a_target_that_goes_idle_meanwhile_is_on_one_queue() {
    steer::<ModelWord>(&[1, 2], true);
}

#[test]
#[should_panic(expected = "in flight on queues")]
fn the_compare_is_needed() {
    steer::<Careless>(&[1, 1, 1], false);
}

/// A thread's queue, and the messages handed over to it. A command is represented by its submitter's number only.
struct Owner<const FENCED: bool> {
    idle: IdleWait<ModelFlag<FENCED>>,
    commands: Mutex<VecDeque<Message>>,
    /// The eventfd: a signal stays until it is waited for.
    event: Notify,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    Command,
    Done,
}

struct Machine<const FENCED: bool> {
    target: Target<ModelWord>,
    owners: [Owner<FENCED>; 2],
    done: AtomicU32,
}

/// The owners' sleep protocol.
#[derive(Clone, Copy)]
struct Sleep {
    rechecks: bool,
}

impl<const FENCED: bool> Machine<FENCED> {
    fn new() -> Self {
        let owner =
            |_| Owner { idle: IdleWait::default(), commands: Mutex::new(VecDeque::new()), event: Notify::new() };
        Machine { target: Target::new(), owners: std::array::from_fn(owner), done: AtomicU32::new(0) }
    }

    fn push(&self, to: usize, message: Message) {
        let owner = &self.owners[to];
        let mut commands = owner.commands.lock().expect("no thread panics with it");
        commands.push_back(message);
        owner.idle.set_pending();
        drop(commands);
        if owner.idle.claim_wakeup() {
            owner.event.notify();
        }
    }

    fn take(&self, own: usize) -> VecDeque<Message> {
        let owner = &self.owners[own];
        if !owner.idle.is_pending() {
            return VecDeque::new();
        }
        let mut commands = owner.commands.lock().expect("no thread panics with it");
        owner.idle.clear_pending();
        std::mem::take(&mut *commands)
    }

    /// Submits a command and serves handed over commands until the `total` commands of all threads are completed.
    fn run(&self, own: usize, total: u32, sleep: Sleep) {
        // One command each. The device completes at once, so a command on an own queue ends at submission.
        let queue = usize::from(self.target.begin(own as u16));
        let mut waits = queue != own;
        if waits {
            self.push(queue, Message::Command);
        } else {
            self.finish(queue, own, own, total);
        }
        while waits || self.done.load(Ordering::SeqCst) < total {
            let messages = self.take(own);
            let idle = messages.is_empty();
            for message in messages {
                match message {
                    Message::Command => self.finish(own, own, 1 - own, total),
                    Message::Done => waits = false,
                }
            }
            if idle {
                let pending = self.owners[own].idle.prepare_to_wait();
                let finished = !waits && self.done.load(Ordering::SeqCst) >= total;
                if !(finished || pending && sleep.rechecks) {
                    self.owners[own].event.wait();
                }
                self.owners[own].idle.finish_wait();
            }
        }
    }

    /// Handles a command of `origin` that the owner `own` of `queue` has reaped.
    fn finish(&self, queue: usize, own: usize, origin: usize, total: u32) {
        self.target.end(queue as u16);
        let last = self.done.fetch_add(1, Ordering::SeqCst) + 1 == total;
        if origin != own {
            self.push(origin, Message::Done);
        }
        if last {
            // As the last finishing thread does: threads that only serve others may end.
            self.owners.iter().filter(|owner| owner.idle.claim_wakeup()).for_each(|owner| owner.event.notify());
        }
    }
}

fn hand_over<const FENCED: bool>(sleep: Sleep) {
    model(move || {
        let machine = Arc::new(Machine::<FENCED>::new());
        let other = Arc::clone(&machine);
        let thread = loom::thread::spawn(move || other.run(1, 2, sleep));
        machine.run(0, 2, sleep);
        thread.join().expect("a thread ends");
        assert_eq!(machine.done.load(Ordering::SeqCst), 2, "a command is lost");
        assert_eq!(machine.target.steering.in_flight(), 0, "the count is stuck");
    });
}

#[test]
fn no_command_is_lost_in_a_handover() {
    hand_over::<true>(Sleep { rechecks: true });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_fences_are_needed() {
    hand_over::<false>(Sleep { rechecks: true });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_check_before_sleep_is_needed() {
    hand_over::<true>(Sleep { rechecks: false });
}
