//! Measures the experiments, run by run.

use std::io::Write;
use std::time::{Duration, Instant};

use mqblk_core::ByteLen;

use super::result::ExperimentResult;
use crate::BenchError;
use crate::benchmark::Benchmark;
use crate::experiment::{BenchCommand, Experiment, ExperimentScale};
use crate::interrupt::Interrupt;
use crate::plan::Plan;
use crate::progress::ProgressDisplay;
use crate::report::ResultRow;
use crate::run::RunResult;
use crate::sweep::{RunObserver, RunOfGroup, measure_group};

/// First estimate of a run's time besides its measurement: start and end of a server.
const OVERHEAD: Duration = Duration::from_millis(200);

/// The benchmarks of an experiment.
#[derive(Debug)]
struct PlannedExperiment {
    name: &'static str,
    commands: Vec<(BenchCommand, Benchmark)>,
}

impl PlannedExperiment {
    fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.commands.iter().map(|(_, benchmark)| &benchmark.plan)
    }

    fn rows(&self) -> usize {
        self.plans().map(|plan| plan.combinations.len() * plan.targets.len()).sum()
    }
}

/// All experiments to measure, and their progress.
#[derive(Debug)]
pub(super) struct ReproductionSession {
    planned: Vec<PlannedExperiment>,
    progress: ProgressDisplay,
    clock: SessionClock,
    interrupt: Interrupt,
}

/// Writes the result of an experiment so far.
pub(super) type WriteResult<'a> = &'a mut dyn FnMut(&ExperimentResult) -> Result<(), BenchError>;

impl ReproductionSession {
    /// Plans all commands of the experiments, and catches SIGINT, SIGTERM and SIGHUP. The first one ends the session
    /// and cuts the current run short. A second one does not wait for requests in flight.
    ///
    /// # Errors
    /// [`BenchError`] when a command cannot be planned, or the system refuses to report signals.
    pub(super) fn new(
        experiments: &[&'static Experiment],
        scale: &ExperimentScale,
    ) -> Result<ReproductionSession, BenchError> {
        let interrupt = Interrupt::default();
        interrupt.on_signals()?;
        let plan = |command: BenchCommand| {
            let mut benchmark = Benchmark::of_command(&command)?;
            benchmark.plan.interrupt = interrupt.clone();
            Ok((command, benchmark))
        };
        let planned = experiments.iter().map(|one| {
            let commands = (one.commands)(scale).into_iter().map(plan).collect::<Result<_, _>>()?;
            Ok(PlannedExperiment { name: one.name, commands })
        });
        let planned: Vec<PlannedExperiment> = planned.collect::<Result<_, BenchError>>()?;
        let plans = || planned.iter().flat_map(PlannedExperiment::plans);
        let runs: usize = plans().map(runs).sum();
        let total = plans().map(|plan| run_time(plan) * runs_u32(plan)).sum();
        Ok(ReproductionSession {
            planned,
            progress: ProgressDisplay::new(runs as u64),
            clock: SessionClock::new(total),
            interrupt,
        })
    }

    /// Returns the signal that ends the session.
    pub(super) fn signal(&self) -> Option<i32> {
        self.interrupt.signal()
    }

    /// Returns true after Ctrl-C.
    pub(super) fn is_interrupted(&self) -> bool {
        self.signal().is_some()
    }

    /// Announces the session on standard error.
    pub(super) fn announce(&self, scratch: Option<ByteLen>) {
        let rows: usize = self.planned.iter().map(PlannedExperiment::rows).sum();
        let scratch = scratch.map_or(String::new(), |size| format!(", and a file of {size}B is made first"));
        let names: Vec<&str> = self.planned.iter().map(|one| one.name).collect();
        let text = format!("{}: {rows} rows, about {}{scratch}", names.join(", "), minutes(self.clock.left()));
        // Standard error may be closed.
        let _ = writeln!(std::io::stderr(), "{text}");
    }

    /// Shows the written share of the scratch file. Returns false to stop.
    pub(super) fn filling(&self, share: f64) -> bool {
        self.progress.start(&format!("filling the file for block-sizes: {:.0}%", share * 100.0));
        !self.is_interrupted()
    }

    /// Measures an experiment. `write` is called after each combination, and at the end.
    ///
    /// # Errors
    /// When `write` fails. A failure of the measurement is part of the result.
    pub(super) fn measure(
        &mut self,
        experiment: &'static Experiment,
        cores: usize,
        write: WriteResult<'_>,
    ) -> Result<ExperimentResult, BenchError> {
        let at = self.planned.iter().position(|planned| planned.name == experiment.name);
        let planned = at
            .map(|at| self.planned.remove(at))
            .ok_or_else(|| BenchError::Failed(format!("{} was measured already", experiment.name)))?;
        let mut result = ExperimentResult {
            experiment,
            commands: planned.commands.iter().map(|(command, _)| command.clone()).collect(),
            expected_rows: planned.rows(),
            rows: vec![],
            cores,
            failure: None,
        };
        'commands: for (_, benchmark) in &planned.commands {
            for combination in &benchmark.plan.combinations {
                let (progress, clock) = (&mut self.progress, &mut self.clock);
                let mut observer = SessionObserver { name: planned.name, progress, clock };
                let measured = measure_group(benchmark, combination, &mut observer);
                result.rows.extend(measured.rows);
                result.failure = match measured.failure {
                    _ if self.is_interrupted() => Some("interrupted".into()),
                    failure => failure.map(|error| error.to_string()),
                };
                write(&result)?;
                if result.failure.is_some() {
                    break 'commands;
                }
            }
        }
        Ok(result)
    }

    /// Removes the progress.
    pub(super) fn finish(&self) {
        self.progress.finish();
    }
}

/// Follows the runs of an experiment and shows the time left.
struct SessionObserver<'a> {
    /// The experiment's name.
    name: &'static str,
    progress: &'a mut ProgressDisplay,
    clock: &'a mut SessionClock,
}

impl SessionObserver<'_> {
    fn describe(&self, run: &RunOfGroup<'_>) -> String {
        let RunOfGroup { target, combination, .. } = run;
        let column = target.column.as_deref().unwrap_or(&target.label);
        let disks = if combination.targets > 1 { format!(", {} targets", combination.targets) } else { String::new() };
        format!("{}: {column}, {} {}{disks}", self.name, combination.rw.name(), combination.sizes)
    }
}

impl RunObserver for SessionObserver<'_> {
    fn progress(&self) -> &ProgressDisplay {
        self.progress
    }

    fn starts(&mut self, run: &RunOfGroup<'_>) {
        self.progress.start(&format!("{} ({} left)", self.describe(run), minutes(self.clock.left())));
    }

    fn ended(&mut self, run: &RunOfGroup<'_>, result: &RunResult) {
        let what = self.describe(run);
        self.clock.advance(run_time(run.plan));
        self.progress.end(&format!("{what}: {:.0} IOPS ({} left)", result.iops(), minutes(self.clock.left())));
        for message in &result.messages {
            let _ = writeln!(std::io::stderr(), "mqblk: reproduce: {what}: {message}");
        }
    }

    fn counts_cut_short(&self, _: &RunResult) -> bool {
        // Nothing is compared to it.
        false
    }

    fn counted(&mut self, _: &dyn Fn() -> Vec<ResultRow>) {}
}

fn runs(plan: &Plan) -> usize {
    plan.combinations.len() * plan.targets.len() * usize::from(plan.runs)
}

fn runs_u32(plan: &Plan) -> u32 {
    u32::try_from(runs(plan)).unwrap_or(u32::MAX)
}

/// Returns the expected time of a run.
fn run_time(plan: &Plan) -> Duration {
    plan.warmup + plan.runtime.unwrap_or_default() + OVERHEAD
}

/// Estimates the time left from the expected and the elapsed time.
#[derive(Debug)]
struct SessionClock {
    total: Duration,
    done: Duration,
    since: Instant,
}

impl SessionClock {
    fn new(total: Duration) -> SessionClock {
        SessionClock { total, done: Duration::ZERO, since: Instant::now() }
    }

    fn advance(&mut self, by: Duration) {
        if self.done.is_zero() {
            // The time before the first run does not count.
            self.since = Instant::now() - by.min(self.since.elapsed());
        }
        self.done += by;
    }

    fn left(&self) -> Duration {
        left(self.total, self.done, self.since.elapsed())
    }
}

/// Returns the time left of `total`, of which `done` took `elapsed`.
fn left(total: Duration, done: Duration, elapsed: Duration) -> Duration {
    let rest = total.saturating_sub(done);
    let pace = if done.is_zero() { 1.0 } else { elapsed.as_secs_f64() / done.as_secs_f64() };
    rest.mul_f64(pace)
}

/// Returns a time as minutes or seconds.
fn minutes(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..=90 => format!("{seconds} s"),
        seconds => format!("{} min", (seconds + 30) / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_goes_by_what_was_measured() {
        let seconds = Duration::from_secs;
        assert_eq!(left(seconds(100), seconds(0), seconds(7)), seconds(100));
        assert_eq!(left(seconds(100), seconds(25), seconds(50)), seconds(150));
        assert_eq!(left(seconds(100), seconds(120), seconds(50)), seconds(0));
        assert_eq!((minutes(seconds(90)).as_str(), minutes(seconds(100)).as_str()), ("90 s", "2 min"));
    }
}
