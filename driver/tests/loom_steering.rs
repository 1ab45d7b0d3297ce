//! Steering and hand-over, in every interleaving (with few switches) and any reordering that the memory model allows.
//!
//! The code under test is `steering::Steering` and `handover::Doze`, the same that the driver runs: here their words are
//! loom's. Shown: a target is never in flight on two queues, no command is lost, the count ends at 0. A thread that sleeps
//! while a command waits for it is a deadlock, which loom reports. That the model can fail is shown by leaving out, one at a
//! time, what the rules consist of.

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

/// A word whose exchange does not look again: the queue is changed even when somebody has come in between.
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
    fn store(&self, up: bool, order: Ordering) {
        self.0.store(up, order);
    }
    fn swap(&self, up: bool, order: Ordering) -> bool {
        self.0.swap(up, order)
    }
    fn full_fence() {
        if FENCED {
            fence(Ordering::SeqCst);
        }
    }
}

/// One target, and what is in flight on each queue.
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
        // Two that are on different queues at the same time: the later of the two sees the other.
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

/// Switches of threads, where a thread could have gone on, that an interleaving has at most: bugs of this kind need one or two,
/// and without a bound the model of the hand-over runs for hours. LOOM_MAX_PREEMPTIONS has another.
const PREEMPTIONS: usize = 3;

fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(run);
}

/// Each thread has `commands[thread]` commands, one after the other, and would use the queue of its number.
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
fn the_second_look_is_needed() {
    steer::<Careless>(&[1, 1, 1], false);
}

/// A thread's queue, and what others hand over to it. A command is only its submitter's number here.
struct Owner<const FENCED: bool> {
    doze: IdleWait<ModelFlag<FENCED>>,
    commands: Mutex<VecDeque<Message>>,
    /// The eventfd: a signal stays until somebody waits for it.
    bell: Notify,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    Order,
    Done,
}

struct Machine<const FENCED: bool> {
    target: Target<ModelWord>,
    owners: [Owner<FENCED>; 2],
    done: AtomicU32,
}

/// How the owners sleep.
#[derive(Clone, Copy)]
struct Sleep {
    looks_again: bool,
}

impl<const FENCED: bool> Machine<FENCED> {
    fn new() -> Self {
        let owner = |_| Owner { doze: IdleWait::default(), commands: Mutex::new(VecDeque::new()), bell: Notify::new() };
        Machine { target: Target::new(), owners: std::array::from_fn(owner), done: AtomicU32::new(0) }
    }

    fn push(&self, to: usize, message: Message) {
        let owner = &self.owners[to];
        let mut commands = owner.commands.lock().expect("no thread panics with it");
        commands.push_back(message);
        owner.doze.set_pending();
        drop(commands);
        if owner.doze.claim_wakeup() {
            owner.bell.notify();
        }
    }

    fn take(&self, own: usize) -> VecDeque<Message> {
        let owner = &self.owners[own];
        if !owner.doze.is_pending() {
            return VecDeque::new();
        }
        let mut commands = owner.commands.lock().expect("no thread panics with it");
        owner.doze.clear_pending();
        std::mem::take(&mut *commands)
    }

    /// Submits a command, serves what others hand over, until all commands are done. `total`: of all threads.
    fn run(&self, own: usize, total: u32, sleep: Sleep) {
        // One command each: the device answers at once, so a command on an own queue ends where it is put.
        let queue = usize::from(self.target.begin(own as u16));
        let mut waits = queue != own;
        if waits {
            self.push(queue, Message::Order);
        } else {
            self.finish(queue, own, own, total);
        }
        while waits || self.done.load(Ordering::SeqCst) < total {
            let messages = self.take(own);
            let idle = messages.is_empty();
            for message in messages {
                match message {
                    Message::Order => self.finish(own, own, 1 - own, total),
                    Message::Done => waits = false,
                }
            }
            if idle {
                let found = self.owners[own].doze.prepare_to_wait();
                let over = !waits && self.done.load(Ordering::SeqCst) >= total;
                if !(over || found && sleep.looks_again) {
                    self.owners[own].bell.wait();
                }
                self.owners[own].doze.finish_wait();
            }
        }
    }

    /// The owner `own` of `queue` has reaped a command of `origin`.
    fn finish(&self, queue: usize, own: usize, origin: usize, total: u32) {
        self.target.end(queue as u16);
        let last = self.done.fetch_add(1, Ordering::SeqCst) + 1 == total;
        if origin != own {
            self.push(origin, Message::Done);
        }
        if last {
            // As a thread that leaves last does: whoever still serves others may end.
            self.owners.iter().filter(|owner| owner.doze.claim_wakeup()).for_each(|owner| owner.bell.notify());
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
fn no_command_is_lost_on_its_way() {
    hand_over::<true>(Sleep { looks_again: true });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_fences_are_needed() {
    hand_over::<false>(Sleep { looks_again: true });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_look_before_sleep_is_needed() {
    hand_over::<true>(Sleep { looks_again: false });
}
