//! The main thread's part of a run: it starts the client threads, changes their phase, and detects the end of the
//! server.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mqblk_driver::Waker;

use super::meters::{ServerMeters, ServerUsage};
use crate::BenchError;
use crate::control::{CompletionCounter, Phase, PhaseControl};
use crate::cpu;
use crate::device::{ServerMonitor, ThreadQueues};
use crate::plan::Plan;
use crate::progress;
use crate::worker::{Worker, WorkerError};

/// Interval at which the main thread checks the others.
const TICK: Duration = Duration::from_millis(50);

/// Supervises the client threads from the main thread.
pub(super) struct RunSupervisor<'a> {
    pub plan: &'a Plan,
    /// I/Os that the threads have completed.
    pub counters: Vec<Arc<CompletionCounter>>,
    /// End the threads' waits.
    pub wakers: Vec<Waker>,
    /// Detects the end of the server.
    pub monitor: ServerMonitor,
    /// The process of a started server: not every interface reports that a server was killed.
    pub process: Option<ServerMonitor>,
    /// Reads what the server uses.
    pub meters: ServerMeters,
    pub progress: &'a progress::ProgressDisplay,
    /// Blocks of all jobs.
    pub total: u64,
}

impl RunSupervisor<'_> {
    fn done(&self) -> u64 {
        self.counters.iter().map(|counter| counter.0.load(Ordering::Relaxed)).sum()
    }

    /// Runs the load of each worker on a thread, and `steer` on this one. Returns the workers.
    fn run<Q: ThreadQueues>(
        &self,
        control: &PhaseControl,
        workers: Vec<Worker<Q>>,
        steer: impl FnOnce(&dyn Fn() -> bool) -> Result<(), BenchError>,
    ) -> Result<Vec<Worker<Q>>, BenchError> {
        std::thread::scope(|scope| {
            let mut threads = vec![];
            for (index, mut worker) in workers.into_iter().enumerate() {
                let pin = (!self.plan.pin.is_empty()).then(|| self.plan.pin[index % self.plan.pin.len()]);
                let thread = std::thread::Builder::new().name(format!("client-{index}"));
                let started = thread.spawn_scoped(scope, move || {
                    if let Some(cpu) = pin {
                        cpu::pin("pin", cpu)?;
                    }
                    match worker.load(control) {
                        Ok(()) => Ok(Some(worker)),
                        Err(WorkerError::Abandoned) => Ok(None),
                        Err(error) => {
                            // Other threads may wait for this one.
                            self.abandon(control);
                            Err(BenchError::Failed(error.to_string()))
                        }
                    }
                });
                match started {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        self.abandon(control);
                        return Err(BenchError::failed("client thread", error));
                    }
                }
            }
            let steered = steer(&|| threads.iter().all(std::thread::ScopedJoinHandle::is_finished));
            if steered.is_err() {
                self.abandon(control);
            }
            let mut workers = vec![];
            let mut failure = None;
            for thread in threads {
                match thread.join() {
                    Ok(Ok(worker)) => workers.extend(worker),
                    Ok(Err(error)) => failure = failure.or(Some(error)),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            // The main thread's error is the cause of the others'.
            steered?;
            failure.map_or(Ok(workers), Err)
        })
    }

    fn abandon(&self, control: &PhaseControl) {
        control.set(Phase::Abandon);
        self.wakers.iter().for_each(Waker::wake);
    }

    fn is_interrupted(&self) -> bool {
        self.plan.interrupt.signal().is_some()
    }

    /// Waits until `over` returns true or all threads have ended.
    fn supervise(&self, finished: &dyn Fn() -> bool, mut over: impl FnMut() -> bool) -> Result<(), BenchError> {
        let (mut seen, mut at) = (self.done(), Instant::now());
        while !finished() && !over() {
            if self.plan.interrupt.is_urgent() {
                self.plan.interrupt.check()?;
            }
            if (self.monitor)(TICK) || self.process.as_ref().is_some_and(|process| process(Duration::ZERO)) {
                return Err(BenchError::Failed("the server went away: it closed the connection in mid-run".into()));
            }
            let done = self.done();
            if done != seen {
                (seen, at) = (done, Instant::now());
            } else if at.elapsed() > self.plan.stuck_timeout {
                let text = format!("the server is stuck: it answered no request for {:?}", self.plan.stuck_timeout);
                return Err(BenchError::Failed(text));
            }
        }
        Ok(())
    }

    /// Runs the load. Returns the workers and the server's usage. A signal ends the measurement early.
    ///
    /// # Errors
    /// The server is gone or stuck, a thread failed, or a signal came before the measurement.
    pub(super) fn load<Q: ThreadQueues>(
        &self,
        workers: Vec<Worker<Q>>,
    ) -> Result<(Vec<Worker<Q>>, LoadOutcome), BenchError> {
        let control = PhaseControl::new(if self.plan.runtime.is_some() { Phase::Warmup } else { Phase::Measure });
        let mut outcome = LoadOutcome::default();
        let workers = self.run(&control, workers, |finished| {
            let start = Instant::now();
            let whole = self.plan.runtime.map(|runtime| self.plan.warmup + runtime);
            let part = || match whole {
                Some(whole) => start.elapsed().as_secs_f64() / whole.as_secs_f64(),
                None => self.done() as f64 / self.total as f64,
            };
            let until = |end: Option<Duration>| {
                move || {
                    self.progress.update(part());
                    self.is_interrupted() || end.is_some_and(|end| start.elapsed() + TICK / 2 >= end)
                }
            };
            if whole.is_some() {
                self.supervise(finished, until(Some(self.plan.warmup)))?;
                self.plan.interrupt.check()?;
            }
            let before = self.meters.read();
            control.set(Phase::Measure);
            let measured_from = self.done();
            self.supervise(finished, until(whole))?;
            // Slow storage may complete no I/O in the runtime: the measurement lasts until one completes.
            self.supervise(finished, || self.is_interrupted() || self.done() > measured_from)?;
            outcome.used = self.meters.read().since(&before);
            outcome.cut_short = self.is_interrupted() && !finished();
            if whole.is_some() || outcome.cut_short {
                control.set(Phase::Stop);
                self.supervise(finished, || false)?;
            }
            let [start, stop] = [Phase::Measure, Phase::Stop].map(|phase| control.entered(phase));
            outcome.stopped_after = start.zip(stop).map(|(start, stop)| stop - start);
            Ok(())
        })?;
        Ok((workers, outcome))
    }

    /// Runs a load that is not measured to its end. `shown`: its blocks, if the display shows its progress.
    ///
    /// # Errors
    /// As [`load`](Self::load), and at a signal.
    pub(super) fn load_whole<Q: ThreadQueues>(
        &self,
        workers: Vec<Worker<Q>>,
        shown: Option<u64>,
    ) -> Result<Vec<Worker<Q>>, BenchError> {
        let control = PhaseControl::new(Phase::Warmup);
        let before = self.done();
        self.run(&control, workers, |finished| {
            self.supervise(finished, || {
                if let Some(blocks) = shown {
                    self.progress.update((self.done() - before) as f64 / blocks.max(1) as f64);
                }
                self.is_interrupted()
            })?;
            if finished() { Ok(()) } else { self.plan.interrupt.check() }
        })
    }
}

/// End of a load.
#[derive(Debug, Default)]
pub(super) struct LoadOutcome {
    /// The server's usage in the measurement.
    pub used: ServerUsage,
    /// True if a signal ended the measurement.
    pub cut_short: bool,
    /// Time of the stop request, from the start of the measurement; `None`: the threads ended by themselves.
    pub stopped_after: Option<Duration>,
}
