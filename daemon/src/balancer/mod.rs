//! Moves the queues of a worker that gets little done where it is to another worker, where guests get more done by that.
//!
//! Workers are spread over the CPUs when a disk starts, and nobody knows then where guests will run. A guest's thread that polls, or computes, on a
//! worker's CPU leaves that worker time slices, or is interrupted by it for each request, while another worker may have a CPU to itself. Such a worker
//! [signals](HindranceSignal), and the thread here [tries](policy) whether another one serves its queues better. Without a signal the thread sleeps.
//! Queues whose workers somebody has chosen stay where they are, and so do those of storage with one channel.

mod policy;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::thread::{join_within, spawn};
use mqblk_engine::{HindranceSignal, QueueId, SignalWait, WorkerLoad};
use policy::{Loan, Move, Pause, Policy, WorkerSample};

use crate::interface::ServedDevice;
use crate::live::queues::Relocation;
use crate::state::DaemonState;

/// How long a queue's requests in flight may take while it moves: its guest waits for that.
const MOVE_TIMEOUT: Duration = Duration::from_millis(100);
/// How long a stop waits for the thread: a worker that does not respond is given up before.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the queues of a worker may take together: with a busy storage those that have moved go back.
const TOGETHER: Duration = Duration::from_millis(500);

/// The thread. Ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Balancer {
    signal: Arc<HindranceSignal>,
    thread: Option<JoinHandle<()>>,
}

impl Balancer {
    /// Starts the thread.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn start(state: &Arc<DaemonState>) -> io::Result<Balancer> {
        let signal = Arc::clone(state.engine().hindrance());
        let (waits, state) = (Arc::clone(&signal), Arc::downgrade(state));
        let thread = spawn("balancer", move || Placing::new(state).run(&waits))?;
        Ok(Balancer { signal, thread: Some(thread) })
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.signal.end();
        // It waits for a queue that moves, which has a bound.
        if self.thread.take().is_some_and(|thread| join_within(thread, END_TIMEOUT).is_none()) {
            tracing::warn!("the balancer does not end: it waits for a worker, and is left behind");
        }
    }
}

/// A queue that a worker has lent.
struct LentQueue {
    /// The device's id: interfaces make a new object of the device for each caller.
    device: String,
    queue: u16,
}

/// What the thread knows.
struct Placing {
    state: Weak<DaemonState>,
    began: Instant,
    policy: Policy,
    /// What the workers had done at the last step.
    loads: Vec<WorkerLoad>,
    /// By the worker that has lent them: the worker that they are at, and the queues.
    lent: BTreeMap<usize, (usize, Vec<LentQueue>)>,
}

impl Placing {
    fn new(state: Weak<DaemonState>) -> Placing {
        Placing { state, began: Instant::now(), policy: Policy::default(), loads: Vec::new(), lent: BTreeMap::new() }
    }

    fn run(&mut self, signal: &HindranceSignal) {
        let mut pause = Pause::UntilSignal;
        loop {
            let waited = match pause {
                Pause::UntilSignal => signal.wait(),
                Pause::For(length) => signal.pause(length),
            };
            if waited == SignalWait::Ended {
                return;
            }
            let Some(state) = self.state.upgrade() else { return };
            pause = self.step(&state);
        }
    }

    fn step(&mut self, state: &DaemonState) -> Pause {
        // A worker that does not respond is logged by others.
        let Ok(loads) = state.engine().loads() else { return Pause::For(MOVE_TIMEOUT) };
        let sample = |load: &WorkerLoad| WorkerSample { completions: load.completions, is_hindered: load.is_hindered };
        let samples: Vec<WorkerSample> = loads.iter().map(sample).collect();
        let before = self.policy.loans().clone();
        let (action, pause) = self.policy.step(self.began.elapsed(), &samples);
        tracing::trace!(?samples, ?action, ?pause, "placing queues");
        if let Some(moving) = action {
            let is_done = self.carry_out(state, moving, &loads);
            tracing::debug!(?moving, is_done, "a worker's queues are moved");
            self.policy.moved(moving, self.began.elapsed(), is_done);
        }
        self.loads = loads;
        self.bring_back_left(state);
        log_changes(&before, self.policy.loans());
        state.set_loans(self.policy.loans().iter().map(|(from, loan)| (*from as u32, loan.to as u32)).collect());
        pause
    }

    /// Returns true if all queues have moved; else they are where they were, but for those that could not go back.
    fn carry_out(&mut self, state: &DaemonState, moving: Move, loads: &[WorkerLoad]) -> bool {
        // Not while another process takes over.
        let Ok(_change) = state.begin_passing_change() else { return false };
        match moving {
            Move::Return { from, .. } => self.bring_back(state, from),
            Move::Lend { from, to } => {
                let queues = self.queues_to_lend(state, from, loads);
                let is_done = !queues.is_empty() && self.lend(state, from, to, queues);
                if !is_done {
                    self.bring_back(state, from);
                }
                is_done
            }
        }
    }

    /// Returns the queues of a worker that guests have used since the last step, and that may move.
    fn queues_to_lend(
        &self,
        state: &DaemonState,
        from: usize,
        loads: &[WorkerLoad],
    ) -> Vec<(Arc<dyn ServedDevice>, u16)> {
        let before: HashMap<QueueId, u64> =
            self.loads.get(from).iter().flat_map(|load| load.queues.iter().copied()).collect();
        let is_used = |(id, requests): &&(QueueId, u64)| before.get(id).is_none_or(|earlier| earlier < requests);
        let used: HashSet<QueueId> =
            loads.get(from).iter().flat_map(|load| load.queues.iter().filter(is_used)).map(|(id, _)| *id).collect();
        let of_device = |device: Arc<dyn ServedDevice>| {
            let queues = device.attached_queues().into_iter().filter(|(_, id)| used.contains(id));
            let queues: Vec<u16> = queues.map(|(queue, _)| queue).collect();
            let stays = queues.is_empty() || !may_move(device.as_ref());
            queues.into_iter().filter(move |_| !stays).map(move |queue| (Arc::clone(&device), queue))
        };
        state.devices().into_iter().flat_map(of_device).collect()
    }

    fn lend(&mut self, state: &DaemonState, from: usize, to: usize, queues: Vec<(Arc<dyn ServedDevice>, u16)>) -> bool {
        let end = Instant::now() + TOGETHER;
        let (_, lent) = self.lent.entry(from).or_insert_with(|| (to, Vec::new()));
        queues.into_iter().all(|(device, queue)| {
            let relocate = || state.relocate(device.as_ref(), queue, (from, to), MOVE_TIMEOUT);
            let moved = Instant::now() < end && relocate() == Relocation::Moved;
            if moved {
                lent.push(LentQueue { device: device.id(), queue });
            }
            moved
        })
    }

    /// Moves the queues that a worker has lent back to it. Returns true if none is left.
    fn bring_back(&mut self, state: &DaemonState, from: usize) -> bool {
        let Some((to, mut queues)) = self.lent.remove(&from) else { return true };
        let devices: HashMap<String, Arc<dyn ServedDevice>> =
            state.devices().into_iter().map(|device| (device.id(), device)).collect();
        if from >= state.engine().workers() {
            // Home is gone: they stay.
            queues.clear();
        }
        queues.retain(|lent| {
            let device = devices.get(&lent.device).filter(|device| may_move(device.as_ref()));
            let relocate =
                |device: &Arc<dyn ServedDevice>| state.relocate(device.as_ref(), lent.queue, (to, from), MOVE_TIMEOUT);
            device.map(relocate) == Some(Relocation::Stays)
        });
        let is_done = queues.is_empty();
        if !is_done {
            self.lent.insert(from, (to, queues));
        }
        is_done
    }

    /// Brings back what could not go back before, of workers that have no loan any more.
    fn bring_back_left(&mut self, state: &DaemonState) {
        let left: Vec<usize> = self.lent.keys().copied().filter(|from| !self.policy.may_be_away(*from)).collect();
        for from in left {
            if let Ok(_change) = state.begin_passing_change() {
                self.bring_back(state, from);
            }
        }
    }
}

/// Returns true if the daemon may move the device's queues by itself.
fn may_move(device: &dyn ServedDevice) -> bool {
    let is_free = device.queue_settings().is_some_and(|settings| !settings.is_map_chosen);
    is_free && !device.exports().iter().any(|export| export.has_one_channel())
}

fn log_changes(before: &BTreeMap<usize, Loan>, now: &BTreeMap<usize, Loan>) {
    for (worker, loan) in now.iter().filter(|(worker, _)| !before.contains_key(worker)) {
        let (iops_before, iops) = loan.rates;
        tracing::info!(
            worker,
            served_by = loan.to,
            iops_before,
            iops,
            "another worker serves the worker's queues: more requests complete so"
        );
    }
    for worker in before.keys().filter(|worker| !now.contains_key(worker)) {
        tracing::info!(worker, "the worker serves its queues again");
    }
}

#[cfg(test)]
mod tests;
