//! Hundreds of thousands of single requests (times `MQBLK_REPETITIONS`) at random gaps around the poll window, by a
//! client that sleeps: no wakeup is lost.
//!
//! One request is in flight at a time, on one of two queues of one worker, so that the other queue is already armed
//! when a window closes. Every wait is bounded: a request that does not complete in time fails the test, which prints
//! it and the lost wakeup.
//!
//! The number of sleeps of either end depends on the host's cost of waking a thread. Therefore one request in 50 waits
//! for it: it is sent when the worker sleeps, and completed when the client sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mqblk_core::{Completion, DiskChannel, Request, Sector512};
use mqblk_driver::virtio_blk::{BlkQueueSet, BlkStatus, DataSegment, Waker};
use mqblk_engine::{PlugOptions, PollPolicy, UringContext};
use mqblk_memory::Buffer;
use mqblk_test_bounds::Bound;
use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};
use mqblk_tests::in_process::{Plan, Rig, disk};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const QUEUES: u16 = 2;
/// Timeout of a wait: long enough for a busy machine.
const PATIENCE: Bound = Bound::seconds(10);

/// One request in this many waits for both ends to sleep.
const ASLEEP_EVERY: u64 = 50;
/// The sector of these requests; others read the sectors before it.
const LATE: Sector512 = Sector512(1024);
/// Interval of the channel's checks for a sleeping client.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// The threads of the two ends; 0 while unknown.
#[derive(Default)]
struct Ends {
    worker: AtomicI32,
    client: AtomicI32,
}

fn this_thread(whose: &AtomicI32) {
    whose.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
}

/// Returns true if a thread sleeps in the kernel (proc(5): the field after the name, which may contain any characters).
fn is_asleep(thread: &AtomicI32) -> bool {
    let thread = thread.load(Ordering::Acquire);
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).expect("the thread's state");
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('S'))
}

/// A channel that holds the completions of reads of [`LATE`] until the client sleeps.
struct LateChannel {
    inner: AnyChannel,
    ends: Arc<Ends>,
    /// There is one such request at a time.
    late: bool,
    held: Vec<Completion<Buffer>>,
}

impl LateChannel {
    fn sift(&mut self, finished: &mut Vec<Completion<Buffer>>) {
        if self.late {
            self.held.append(finished);
        }
    }
}

impl DiskChannel<UringContext> for LateChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.late |= batch.iter().any(|request| Some(request.start) == LATE.to_offset());
        let taken = self.inner.submit(context, batch, finished);
        self.sift(finished);
        taken
    }
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        self.inner.reap(context, finished);
        self.sift(finished);
        if !self.held.is_empty() && is_asleep(&self.ends.client) {
            self.late = false;
            finished.append(&mut self.held);
        }
        finished.len() - before
    }
    fn outstanding(&self) -> u32 {
        self.inner.outstanding() + self.held.len() as u32
    }
    fn deadline(&self) -> Option<Instant> {
        if self.held.is_empty() { self.inner.deadline() } else { Some(Instant::now() + LOOK_EVERY) }
    }
    fn close(&mut self, context: &mut UringContext) {
        self.inner.close(context);
    }
}

/// Returns the time between a completion and the next request in nanoseconds: mostly none, often about `window`,
/// sometimes any.
fn gap(random: &mut SmallRng, window: u64) -> Duration {
    let nanoseconds = match random.random_range(0..10) {
        0..5 => random.random_range(0..1500),
        5..9 => random.random_range(window * 8 / 10..window * 12 / 10),
        _ => random.random_range(0..window * 4),
    };
    Duration::from_nanos(nanoseconds)
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// State shared by the client and its watchdog.
#[derive(Default)]
struct Progress {
    completed: AtomicU64,
    done: AtomicBool,
    /// The watchdog has ended the wait for a request.
    late: AtomicBool,
}

/// Wakes a client that has waited too long for one request.
fn watch(progress: &Progress, waker: &Waker) {
    let (mut seen, mut since) = (0, Instant::now());
    while !progress.done.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(50));
        let completed = progress.completed.load(Ordering::Acquire);
        if completed != seen {
            (seen, since) = (completed, Instant::now());
        } else if PATIENCE.is_exceeded_since(since) {
            progress.late.store(true, Ordering::Release);
            waker.wake();
            return;
        }
    }
}

/// Sends `count` requests. Fails with the state of a request that does not complete.
fn send(
    set: &mut BlkQueueSet,
    progress: &Progress,
    ends: &Ends,
    count: u64,
    windows: &[u64],
    seed: u64,
) -> Result<(), String> {
    this_thread(&ends.client);
    let mut random = SmallRng::seed_from_u64(seed);
    for number in 0..count {
        let window = windows[random.random_range(0..windows.len())];
        let gap = gap(&mut random, window);
        spin(gap);
        let late = number % ASLEEP_EVERY == 0;
        while late && !is_asleep(&ends.worker) {
            std::thread::yield_now();
        }
        let index = random.random_range(0..usize::from(QUEUES));
        let queue = &mut set.queues_mut()[index];
        let data = DataSegment { address: queue.data().0, len: 512 };
        queue.read(0, if late { LATE } else { Sector512(0) }, data).map_err(|refused| refused.to_string())?;
        let kicks = queue.kicks();
        queue.publish().map_err(|error| error.to_string())?;
        let kicked = queue.kicks() != kicks;
        // The completion comes before, while or after the client arms.
        if random.random_bool(0.5) && !late {
            spin(Duration::from_nanos(random.random_range(0..5000)));
        }
        loop {
            let queue = &mut set.queues_mut()[index];
            let found = queue.poll().map_err(|error| error.to_string())?;
            if progress.late.load(Ordering::Acquire) {
                let lost = if found > 0 { "the call (it is answered)" } else { "the kick (it is not answered)" };
                return Err(format!(
                    "request {number}: {lost} was lost; queue {index}, {gap:?} after the one before, kicked: {kicked}"
                ));
            }
            if let Some(done) = queue.reap().map_err(|error| error.to_string())? {
                assert_eq!(done.status, BlkStatus::Ok);
                break;
            }
            set.wait(1).map_err(|error| error.to_string())?;
        }
        progress.completed.store(number + 1, Ordering::Release);
    }
    Ok(())
}

/// Runs a soak with one policy. `windows`, in nanoseconds, are the gaps to stay close to.
fn soak(poll: &str, count: u64, windows: &[u64], event_idx: bool, packed: bool) {
    let count = count * u64::from(mqblk_tests::repetitions());
    let policy: PollPolicy = poll.parse().expect("a policy");
    let ends = Arc::new(Ends::default());
    let seen = Arc::clone(&ends);
    let late = move |inner| -> AnyChannel {
        // A channel is opened by the worker that will use it.
        this_thread(&seen.worker);
        Box::new(LateChannel { inner, ends: Arc::clone(&seen), late: false, held: vec![] })
    };
    let plan = Plan {
        disk: Arc::new(FilterDisk::new(disk("null", &[("size", "1M")]), late)),
        workers: 1,
        policy: policy.into(),
        plug: PlugOptions::default(),
        health: Default::default(),
    };
    let (rig, mut sets) = Rig::new(plan, |options| {
        options.queues = QUEUES;
        options.event_idx = event_idx;
        options.packed = packed;
    });
    let progress = Progress::default();
    let waker = sets[0].waker().expect("a waker");
    let start = Instant::now();
    let sent = std::thread::scope(|scope| {
        scope.spawn(|| watch(&progress, &waker));
        let sent = send(&mut sets[0], &progress, &ends, count, windows, count);
        progress.done.store(true, Ordering::Release);
        sent
    });
    assert_eq!(sent, Ok(()), "poll={poll}");
    let (kicks, calls) = (sets[0].kicks(), sets[0].calls().expect("the counter can be read"));
    let text = format!("{poll}: {count} requests, {kicks} kicks, {calls} calls in {:?}", start.elapsed());
    std::io::Write::write_all(&mut std::io::stderr(), format!("{text}\n").as_bytes()).expect("standard error");
    // Both ends slept many times; otherwise the soak would prove nothing.
    let asleep = count / ASLEEP_EVERY;
    assert!(kicks >= asleep && calls >= asleep, "poll={poll}: {kicks} kicks, {calls} calls, {asleep} asleep");
    rig.stop(sets);
}

#[test]
fn poll_off() {
    soak("off", 200_000, &[1000, 3000, 10_000], true, false);
}

#[test]
fn poll_off_without_event_idx() {
    soak("off", 100_000, &[1000, 3000, 10_000], false, false);
}

#[test]
fn poll_static() {
    soak("static:50", 60_000, &[50_000], true, false);
}

#[test]
fn poll_static_with_a_short_window_without_event_idx() {
    soak("static:10", 100_000, &[10_000], false, false);
}

#[test]
fn poll_adaptive() {
    soak("adaptive:100", 120_000, &[4000, 12_000, 25_000, 50_000, 100_000], true, false);
}

#[test]
fn poll_off_with_packed_rings() {
    soak("off", 200_000, &[1000, 3000, 10_000], true, true);
}

#[test]
fn poll_off_with_packed_rings_without_event_idx() {
    soak("off", 100_000, &[1000, 3000, 10_000], false, true);
}

#[test]
fn poll_static_with_packed_rings() {
    soak("static:50", 60_000, &[50_000], true, true);
}
