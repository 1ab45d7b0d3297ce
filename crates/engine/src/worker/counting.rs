//! A worker's counters and its calls: the requests of the test's guest complete one by one, as the test releases them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, FinishedRequest, GuestQueue, Intake, Op,
    Outcome, PublishResult, PullEnd, Request,
};
use mqblk_uring::EventFd;

use super::*;
use crate::mailbox::Mailbox;
use crate::options::{Coalesce, PlugOptions, QueuePolicy};
use crate::poll::PollPolicy;
use crate::queue_options::QueueOptions;
use crate::request::Buffer;
use crate::trial::TrialDisk;

/// The state of the guest and its disk.
#[derive(Debug, Default)]
struct GuestState {
    waiting: VecDeque<Op>,
    /// Requests that the queue completes in the pull without counting them.
    answered: u32,
    completed: u32,
    calls: u32,
    /// Requests that the disk may complete.
    release: usize,
    fail: bool,
}

type Shared = Arc<Mutex<GuestState>>;

struct Queue(Shared, u32);

impl GuestQueue for Queue {
    type Token = ();
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        64
    }

    fn enter(&mut self, _: &mut UringContext) -> Result<(), String> {
        Ok(())
    }

    fn leave(&mut self, _: &mut UringContext) {}

    fn pull<I: Intake<(), Buffer>>(&mut self, _: &mut UringContext, into: &mut I) -> PullEnd {
        let mut state = self.0.lock().unwrap();
        let (waiting, answered) = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.answered));
        drop(state);
        self.1 += answered;
        let taken = waiting.len() + answered as usize;
        for op in waiting {
            match op {
                Op::Discard { .. } => into.admit_parts(
                    (),
                    DiskSlot::FIRST,
                    op,
                    &[(ByteOffset(0), ByteLen(512)), (ByteOffset(512), ByteLen(1024))],
                ),
                _ => into.admit((), DiskSlot::FIRST, op, ByteOffset(0), ByteLen(512), None),
            }
        }
        PullEnd::Empty { taken }
    }

    fn finish<I: Intake<(), Buffer>>(&mut self, _: &mut UringContext, _: FinishedRequest<(), Buffer>, _: &mut I) {
        self.1 += 1;
    }

    fn abandon(&mut self, _: &mut UringContext, _: (), _: Option<Buffer>) {}

    fn publish(&mut self) -> PublishResult {
        self.0.lock().unwrap().completed += std::mem::take(&mut self.1);
        PublishResult::Wanted
    }

    fn notify(&mut self) {
        self.0.lock().unwrap().calls += 1;
    }

    fn arm(&mut self) -> ArmResult {
        ArmResult::Sleepable
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

struct SlowChannel(Shared, Rc<RefCell<VecDeque<Completion<Buffer>>>>);

impl DiskChannel<UringContext> for SlowChannel {
    fn submit(
        &mut self,
        _: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let count = batch.len();
        let fail = self.0.lock().unwrap().fail;
        let end = |request: Request<Buffer>| Completion {
            outcome: if fail { Outcome::NoSpace } else { Outcome::Done(request.len) },
            tag: request.tag,
            buffer: request.buffer,
        };
        self.1.borrow_mut().extend(batch.drain(..).map(end));
        count
    }

    fn reap(&mut self, _: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let mut taken = self.1.borrow_mut();
        let mut state = self.0.lock().unwrap();
        let count = state.release.min(taken.len());
        state.release -= count;
        finished.extend(taken.drain(..count));
        count
    }

    fn outstanding(&self) -> u32 {
        self.1.borrow().len() as u32
    }

    fn close(&mut self, _: &mut UringContext) {}
}

fn disk(state: &Shared) -> Arc<crate::AnyDisk> {
    let state = Arc::clone(state);
    Arc::new(TrialDisk(move || {
        Box::new(SlowChannel(Arc::clone(&state), Rc::default())) as Box<dyn DiskChannel<UringContext>>
    }))
}

fn fixture(coalesce: Coalesce) -> (Worker, Shared, Mailbox<Worker>) {
    fixture_of(PollPolicy::Busy, None, coalesce)
}

fn fixture_of(poll: PollPolicy, kick: Option<Kick>, coalesce: Coalesce) -> (Worker, Shared, Mailbox<Worker>) {
    let (mailbox, receiver) = Mailbox::new(0).expect("a mailbox");
    let options = UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 };
    let mut worker = Worker::new(options, receiver).expect("the host has io_uring");
    let state = Shared::default();
    let options = QueueOptions {
        disks: vec![QueueDisk {
            slot: DiskSlot::FIRST,
            disk: disk(&state),
            plug: PlugOptions::default(),
            health: Arc::default(),
        }],
        kick,
        policy: QueuePolicy { poll, coalesce },
        paused: false,
        on_fault: Box::new(|fault| panic!("{fault:?}")),
    };
    worker.attach_queue(options, |_| Ok(Queue(Arc::clone(&state), 0))).expect("attached");
    (worker, state, mailbox)
}

/// Lets `count` more requests complete and runs a turn. Returns completions and calls so far.
fn release(worker: &mut Worker, state: &Shared, count: usize) -> (u32, u32) {
    state.lock().unwrap().release += count;
    worker.turn();
    worker.poll_or_arm();
    let state = state.lock().unwrap();
    (state.completed, state.calls)
}

fn push(state: &Shared, ops: impl IntoIterator<Item = Op>) {
    state.lock().unwrap().waiting.extend(ops);
}

/// Requests of a run by the timer, one before each of the first checks.
const BY_TIMER: u32 = 5;

/// Serves requests by the timer until the worker sleeps without one. Returns the checks and the completions.
fn serve_by_timer(worker: &mut Worker, state: &Shared) -> (u32, u32) {
    let request = || {
        push(state, [Op::Read]);
        state.lock().unwrap().release += 1;
    };
    // Two that come soon after each other.
    request();
    worker.turn();
    request();
    let mut looks = 0;
    for _ in 0..10_000 {
        if worker.turn() {
            continue;
        }
        match worker.poll_or_arm() {
            IdleDecision::Turn => {}
            IdleDecision::Timer => {
                worker.sleep(Some(TIMER_PERIOD));
                looks += 1;
                if looks < BY_TIMER {
                    request();
                }
            }
            IdleDecision::Sleep => return (looks, state.lock().unwrap().completed),
        }
    }
    panic!("it never sleeps");
}

#[test]
fn a_worker_that_gives_way_looks_by_a_timer_without_kicks_and_arms_when_nothing_comes() {
    // On a busy host the queue may be armed before all requests have come, because the worker lacks its CPU: the run is
    // repeated.
    for _ in 0..1000 {
        let kick = EventFd::new().expect("an eventfd").into();
        let (mut worker, state, _open) = fixture_of(PollPolicy::default(), Some(kick), Coalesce::default());
        let now = worker.clock.now();
        (0..2).for_each(|_| assert!(worker.offers.offered(1_000_000_000, now)));
        let (looks, completed) = serve_by_timer(&mut worker, &state);
        let stats = worker.stats(0);
        assert_eq!(stats.queues[0].1.counters.kicks, 0);
        assert!(stats.sleeps >= u64::from(looks), "{} of {looks}", stats.sleeps);
        if looks >= BY_TIMER {
            assert_eq!(completed, BY_TIMER + 1);
            let timer = stats.queues[0].1.polling.and_then(|polling| polling.timer_ns);
            assert_eq!(timer, Some(TIMER_PERIOD.as_nanos() as u64));
            return;
        }
    }
    panic!("the queue was armed too early in each of 1000 runs");
}

const WRITE: Op = Op::Write { fua: false };

#[test]
fn every_request_is_once_in_each_latency_part() {
    let (mut worker, state, _open) = fixture(Coalesce::default());
    push(&state, [Op::Read, WRITE, Op::Read, Op::Flush, Op::Discard { secure: false }]);
    release(&mut worker, &state, 2);
    let stats = worker.stats(7);
    assert_eq!(stats.queues[0].0.worker, 7);
    let queue = &stats.queues[0].1;
    assert_eq!((queue.in_flight, queue.counters.requests), (3, 2));
    // The discard has two ranges.
    release(&mut worker, &state, 3);
    assert_eq!(worker.stats(0).queues[0].1.in_flight, 1);
    release(&mut worker, &state, 1);
    state.lock().unwrap().fail = true;
    // Enough for one turn that they are stamped.
    push(&state, (0..40).map(|at| if at % 4 == 0 { WRITE } else { Op::Read }));
    release(&mut worker, &state, 40);
    let queue = &worker.stats(0).queues[0].1;
    let counters = &queue.counters;
    assert_eq!((counters.reads, counters.writes, counters.flushes, counters.discards), (32, 11, 1, 1));
    assert_eq!((counters.errors, counters.requests, counters.read_bytes, counters.written_bytes), (40, 45, 1024, 512));
    assert_eq!((counters.read_errors, counters.write_errors), (30, 10));
    assert_eq!((counters.other_bytes, counters.calls, queue.in_flight), (1536, 4, 0));
    for (parts, count) in [(&queue.latency.reads, 32), (&queue.latency.writes, 11), (&queue.latency.others, 2)] {
        for part in [&parts.queued, &parts.device, &parts.publish, &parts.total] {
            assert_eq!(part.count(), count);
        }
        let split = parts.queued.sum_ns() + parts.device.sum_ns() + parts.publish.sum_ns();
        assert_eq!(split, parts.total.sum_ns(), "the parts are the whole");
    }
    assert!(queue.latency.reads.queued.sum_ns() > 0, "a full plug takes time");
    assert!(stats.cpu_ns > 0);
}

/// Requests that a queue completes itself are published even if it does not count them.
#[test]
fn what_a_queue_completes_in_its_pull_is_published_whether_or_not_it_was_counted() {
    let (mut worker, state, _open) = fixture(Coalesce::default());
    for answered in 1..4 {
        state.lock().unwrap().answered = 1;
        assert!(worker.turn());
        assert_eq!(state.lock().unwrap().completed, answered);
        assert_eq!(state.lock().unwrap().calls, answered);
    }
}

#[test]
fn a_queue_is_busy_while_it_has_requests_in_flight() {
    let (mut worker, state, _open) = fixture(Coalesce::default());
    let busy = |worker: &Worker| worker.stats(0).queues[0].1.counters.busy_ns;
    release(&mut worker, &state, 0);
    assert_eq!(busy(&worker), 0, "nothing was in flight");
    push(&state, [Op::Read, Op::Read]);
    release(&mut worker, &state, 1);
    let first = busy(&worker);
    release(&mut worker, &state, 0);
    let second = busy(&worker);
    assert!(0 < first && first < second, "{first} {second}: one is in flight");
    release(&mut worker, &state, 1);
    let last = busy(&worker);
    release(&mut worker, &state, 0);
    assert!(second < last && busy(&worker) == last, "nothing is in flight any more");
    assert_eq!(worker.stats(0).queues[0].1.slots, 64);
}

#[test]
fn calls_are_deferred_while_requests_are_in_flight() {
    let (mut worker, state, _open) = fixture(Coalesce { delay: Duration::from_secs(3600), answers: 3 });
    push(&state, [Op::Read]);
    assert_eq!(release(&mut worker, &state, 1), (1, 1), "nothing more is in flight");
    push(&state, [Op::Read; 6]);
    assert_eq!(release(&mut worker, &state, 1), (2, 1));
    assert_eq!(release(&mut worker, &state, 1), (3, 1));
    assert_eq!(release(&mut worker, &state, 1), (4, 2), "three completions");
    assert_eq!(release(&mut worker, &state, 1), (5, 2));
    assert_eq!(release(&mut worker, &state, 2), (7, 3), "the last ones");
    let counters = worker.stats(0).queues[0].1.counters;
    assert_eq!((counters.calls, counters.calls_put_off), (3, 3));
    assert!(
        worker.deferred_calls.is_empty()
            || worker.queues[0].as_mut().unwrap().runner.send_due_call(worker.clock.last()).is_none()
    );
}

#[test]
fn a_deferred_call_is_sent_when_its_delay_has_passed() {
    let (mut worker, state, _open) = fixture(Coalesce { delay: Duration::from_micros(200), answers: 0 });
    push(&state, [Op::Read; 2]);
    let (completed, _) = release(&mut worker, &state, 1);
    assert_eq!(completed, 1);
    // The storage never completes the other one.
    while state.lock().unwrap().calls == 0 {
        worker.sleep(None);
        worker.turn();
    }
    assert_eq!(state.lock().unwrap().calls, 1);
    worker.turn();
    assert!(worker.deferred_calls.is_empty());
    assert!(worker.stats(0).sleeps > 0);
}

#[test]
fn a_detached_queue_has_no_deferred_call() {
    let (mut worker, state, _open) = fixture(Coalesce { delay: Duration::from_secs(3600), answers: 0 });
    push(&state, [Op::Read; 3]);
    assert_eq!(release(&mut worker, &state, 2), (2, 0));
    let (done, left) = std::sync::mpsc::sync_channel(1);
    let generation = worker.queues[0].as_ref().unwrap().generation;
    worker.drain(0, generation, done);
    assert_eq!(release(&mut worker, &state, 1), (3, 1));
    assert_eq!(left.try_recv().expect("it is detached").report.counters.calls, 1);
    assert!(worker.deferred_calls.is_empty());
}

#[test]
fn polling_and_coalescing_change_while_requests_are_in_flight() {
    let (mut worker, state, _open) = fixture(Coalesce { delay: Duration::from_secs(3600), answers: 0 });
    let generation = worker.queues[0].as_ref().unwrap().generation;
    push(&state, [Op::Read; 4]);
    assert_eq!(release(&mut worker, &state, 1), (1, 0), "the call is deferred");
    let poll_ns = worker.stats(0).queues[0].1.counters.poll_ns;
    worker.set_policy(0, generation, PollPolicy::Off.into());
    assert_eq!(state.lock().unwrap().calls, 1, "a call that was deferred is sent at the change");
    assert_eq!(release(&mut worker, &state, 1), (2, 2), "no call is deferred any more");
    assert!(worker.stats(0).queues[0].1.counters.poll_ns >= poll_ns);
    let coalesce = Coalesce { delay: Duration::from_secs(3600), answers: 2 };
    worker.set_policy(0, generation, QueuePolicy { poll: PollPolicy::Busy, coalesce });
    assert_eq!(release(&mut worker, &state, 1), (3, 2));
    assert_eq!(release(&mut worker, &state, 1), (4, 3), "the last one");
    worker.set_policy(0, generation + 1, PollPolicy::Off.into());
    push(&state, [Op::Read; 2]);
    assert_eq!(release(&mut worker, &state, 1), (5, 3), "another queue was meant");
}

#[test]
fn a_disk_gets_another_depth_while_requests_wait() {
    let (mut worker, state, _open) = fixture(Coalesce::default());
    let at_storage = |worker: &Worker| worker.channels.all().map(|(_, open)| open.at_storage()).sum::<u32>();
    let set = |worker: &mut Worker, depth| {
        let health = Arc::clone(&worker.channels.all().next().unwrap().1.health);
        health.set_plug(PlugOptions { depth, ..PlugOptions::default() });
        worker.channels.reload_settings();
    };
    set(&mut worker, 2);
    push(&state, [Op::Read; 8]);
    release(&mut worker, &state, 0);
    assert_eq!(at_storage(&worker), 2);
    set(&mut worker, 5);
    release(&mut worker, &state, 0);
    assert_eq!(at_storage(&worker), 5);
    set(&mut worker, 0);
    release(&mut worker, &state, 0);
    assert_eq!(at_storage(&worker), 8);
    assert_eq!(release(&mut worker, &state, 8).0, 8);
}
