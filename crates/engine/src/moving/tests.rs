//! A queue's waker while the queue moves, and moves that do not succeed. Moves under load:
//! `tests/tests/daemon/queue_moves.rs`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use mqblk_core::{ArmResult, FinishedRequest, Intake, PublishResult, PullEnd, Wake};
use mqblk_test_bounds::Bound;
use mqblk_uring::UringOptions;

use super::*;
use crate::engine::EngineOptions;
use crate::poll::PollPolicy;
use crate::queue_options::QueueOptions;
use crate::request::Buffer;

/// Only a failing test waits that long.
fn timeout() -> Duration {
    Bound::seconds(30).time()
}

/// A queue without requests that reports each wake.
#[derive(Clone, Debug, Default)]
struct WokenQueue {
    /// The number of the last wake, which the waking thread sets before it wakes.
    requested: Arc<AtomicU64>,
    seen: Arc<AtomicU64>,
    /// Number of the next contexts that refuse it.
    refusals: Arc<AtomicU64>,
    /// True if it has resources of a context.
    entered: Arc<AtomicBool>,
    closed: Arc<AtomicBool>,
}

impl GuestQueue for WokenQueue {
    type Token = ();
    type Position = u64;
    type Context = UringContext;

    fn depth(&self) -> u16 {
        1
    }

    fn enter(&mut self, _: &mut UringContext) -> Result<(), String> {
        if self.refusals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err("no memory".to_owned());
        }
        assert!(!self.entered.swap(true, Ordering::SeqCst));
        Ok(())
    }

    fn leave(&mut self, _: &mut UringContext) {
        assert!(self.entered.swap(false, Ordering::SeqCst));
    }

    fn close(&mut self) {
        assert!(!self.closed.swap(true, Ordering::SeqCst));
    }

    fn pull<I: Intake<(), Buffer>>(&mut self, _: &mut UringContext, _: &mut I) -> PullEnd {
        PullEnd::Empty { taken: 0 }
    }

    fn finish<I: Intake<(), Buffer>>(&mut self, _: &mut UringContext, _: FinishedRequest<(), Buffer>, _: &mut I) {}

    fn woken<I: Intake<(), Buffer>>(&mut self, _: &mut UringContext, _: &mut I, _: bool) -> Result<(), &'static str> {
        self.seen.fetch_max(self.requested.load(Ordering::SeqCst), Ordering::SeqCst);
        Ok(())
    }

    fn abandon(&mut self, _: &mut UringContext, _: (), _: Option<Buffer>) {}

    fn publish(&mut self) -> PublishResult {
        PublishResult::Nothing
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::Sleepable
    }

    fn disarm(&mut self) {}

    fn position(&self) -> u64 {
        7
    }
}

fn engine() -> Engine {
    Engine::start(&EngineOptions { workers: 2, pin: Vec::new(), context: UringOptions::default() }).unwrap()
}

/// Attaches a queue to worker 0. Returns its handle and its waker.
fn attach(engine: &Engine, queue: &WokenQueue) -> Result<(QueueHandle<WokenQueue>, Arc<dyn Wake>), AttachError> {
    let options = QueueOptions {
        disks: Vec::new(),
        kick: None,
        policy: PollPolicy::Off.into(),
        paused: false,
        on_fault: Box::new(|fault| panic!("{fault:?}")),
    };
    let slot = Arc::<Mutex<Option<Arc<dyn Wake>>>>::default();
    let made = Arc::clone(&slot);
    let queue = queue.clone();
    let make = move |waker: &Arc<dyn Wake>| {
        *made.lock().unwrap() = Some(Arc::clone(waker));
        Ok(queue)
    };
    let handle = engine.attach(0, options, make)?;
    let waker = slot.lock().unwrap().take().unwrap();
    Ok((handle, waker))
}

fn move_to(handle: QueueHandle<WokenQueue>, engine: &Engine, worker: usize) -> MoveResult<WokenQueue> {
    handle.move_to(engine, worker, timeout()).unwrap()
}

/// Every wake reaches the queue at any worker, and also if it is at none.
#[test]
fn no_wake_is_lost_while_a_queue_moves() {
    const WAKES: u64 = 20_000;
    let engine = engine();
    let queue = WokenQueue::default();
    let (mut handle, waker) = attach(&engine, &queue).unwrap();
    let WokenQueue { requested, seen, .. } = queue;
    let done = Arc::<AtomicBool>::default();
    let waking_done = Arc::clone(&done);
    let waking = std::thread::spawn(move || {
        for number in 1..=WAKES {
            requested.store(number, Ordering::SeqCst);
            waker.wake();
            let start = Instant::now();
            while seen.load(Ordering::SeqCst) < number {
                if start.elapsed() > timeout() {
                    waking_done.store(true, Ordering::SeqCst);
                    panic!("wake {number} was lost");
                }
                std::thread::yield_now();
            }
        }
        waking_done.store(true, Ordering::SeqCst);
    });
    let mut moves = 0;
    while !done.load(Ordering::SeqCst) {
        moves += 1;
        match move_to(handle, &engine, moves % 2) {
            MoveResult::Moved(moved) => handle = moved,
            other => panic!("{other:?}"),
        }
    }
    waking.join().unwrap();
    assert!(moves > 10, "{moves} moves");
}

#[test]
fn a_refused_queue_returns_to_its_worker() {
    let engine = engine();
    let queue = WokenQueue::default();
    let (handle, _) = attach(&engine, &queue).unwrap();
    queue.refusals.store(1, Ordering::SeqCst);
    let MoveResult::Refused(handle, why) = move_to(handle, &engine, 1) else { panic!("it moved") };
    assert_eq!((why.to_string().as_str(), handle.id().worker), ("no memory", 0));
    queue.refusals.store(2, Ordering::SeqCst);
    let MoveResult::Stranded(state, _) = move_to(handle, &engine, 1) else { panic!("a worker took it") };
    assert_eq!(state.position(), 7);
    let handle = engine.insert(1, state).unwrap().unwrap_or_else(|(_, why)| panic!("{why}"));
    assert_eq!(handle.id().worker, 1);
    assert_eq!(engine.stats().unwrap().iter().map(|worker| worker.queues.len()).collect::<Vec<_>>(), [0, 1]);
    let is = |flag: &Arc<AtomicBool>| flag.load(Ordering::SeqCst);
    assert!(is(&queue.entered) && !is(&queue.closed));
    handle.drain().unwrap().wait(timeout()).unwrap().expect("nothing is in flight");
    assert!(!is(&queue.entered) && is(&queue.closed));
}

#[test]
fn a_new_queue_that_its_worker_refuses_is_closed() {
    let queue = WokenQueue::default();
    queue.refusals.store(1, Ordering::SeqCst);
    let why = attach(&engine(), &queue).err().expect("refused").to_string();
    assert!(why == "no memory" && queue.closed.load(Ordering::SeqCst), "{why}");
}
