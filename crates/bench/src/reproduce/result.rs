//! An experiment, planned and measured: its rows and claims, and their forms for people and programs.

use serde::Serialize;

use crate::BenchError;
use crate::benchmark::Benchmark;
use crate::experiment::{self, BenchCommand, ClaimResult, Experiment};
use crate::interrupt::Interrupt;
use crate::report::ResultRow;
use crate::sweep::Sweep;
use crate::table::ResultTable;
use crate::words::capitalised;

/// The result of an experiment, also of an unfinished one.
#[derive(Debug)]
pub(super) struct ExperimentResult {
    pub experiment: &'static Experiment,
    /// The commands whose rows these are.
    pub commands: Vec<BenchCommand>,
    /// Their benchmarks, until they are measured.
    pub planned: Vec<Benchmark>,
    /// Number of rows of the complete experiment.
    pub expected_rows: usize,
    /// The rows so far.
    pub rows: Vec<ResultRow>,
    /// Cores of the machine.
    pub cores: usize,
    /// Reason why it ended early.
    pub failure: Option<String>,
}

/// The result as JSON.
#[derive(Debug, Serialize)]
pub(super) struct ResultDocument<'a> {
    name: &'static str,
    document: &'static str,
    commands: Vec<String>,
    sentence: String,
    claims: Vec<ClaimResult>,
    notes: &'static [&'static str],
    expected_rows: usize,
    failure: Option<&'a str>,
    rows: &'a [ResultRow],
}

impl ExperimentResult {
    /// Plans all commands of an experiment. `interrupt` ends them early.
    ///
    /// # Errors
    /// [`BenchError`] when a command cannot be planned.
    pub(super) fn plan(
        experiment: &'static Experiment,
        commands: Vec<BenchCommand>,
        cores: usize,
        interrupt: &Interrupt,
    ) -> Result<ExperimentResult, BenchError> {
        let mut planned = commands.iter().map(Benchmark::of_command).collect::<Result<Vec<_>, _>>()?;
        planned.iter_mut().for_each(|benchmark| benchmark.plan.interrupt = interrupt.clone());
        let expected_rows = planned.iter().map(|benchmark| benchmark.plan.row_count()).sum();
        Ok(ExperimentResult { experiment, commands, planned, expected_rows, rows: vec![], cores, failure: None })
    }

    /// Measures it, until it fails or is interrupted. `write` is called after each combination.
    ///
    /// # Errors
    /// When `write` fails. A failure of the measurement is part of the result.
    pub(super) fn measure(
        &mut self,
        sweep: &mut Sweep,
        mut write: impl FnMut(&ExperimentResult) -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        for benchmark in std::mem::take(&mut self.planned) {
            for combination in &benchmark.plan.combinations {
                let (rows, outcome) = sweep.measure(&benchmark, combination, &mut |_| {});
                self.rows.extend(rows);
                self.failure = match benchmark.plan.interrupt.signal() {
                    Some(_) => Some("interrupted".into()),
                    None => outcome.err().map(|error| error.to_string()),
                };
                write(self)?;
                if self.failure.is_some() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Returns the result of each claim.
    pub(super) fn claims(&self) -> Vec<ClaimResult> {
        (self.experiment.claims)(&self.rows).iter().map(|claim| claim.result(self.cores)).collect()
    }

    /// Returns the sentence at its end.
    pub(super) fn sentence(&self) -> String {
        let name = self.experiment.name;
        match &self.failure {
            Some(why) if self.rows.len() < self.expected_rows => {
                format!("{name}: not finished, with {} of {} rows: {why}.", self.rows.len(), self.expected_rows)
            }
            Some(why) => format!("{name}: not finished, with all rows, but not all of their runs: {why}."),
            None => experiment::sentence(name, &self.claims()),
        }
    }

    /// Returns the number of failed requests.
    pub(super) fn failed_requests(&self) -> u64 {
        self.rows.iter().map(|row| row.errors).sum()
    }

    /// Returns the numbers of measured rows and of failed requests, in words.
    pub(super) fn completeness(&self) -> String {
        let failed = self.failed_requests();
        let failed = if failed == 0 { "no request failed".to_owned() } else { format!("{failed} requests failed") };
        format!("{} of {} rows, {failed}", self.rows.len(), self.expected_rows)
    }

    /// Returns it as text for a terminal.
    pub(super) fn text(&self) -> String {
        let Experiment { name, about, document, notes, .. } = self.experiment;
        format!(
            "\n== {name}: {about}\ndocument: {document}; {}\n{}\n{}\n{}\n{}\n",
            self.completeness(),
            self.experiment.tables_text(&self.rows),
            lines(&self.claims(), |claim| format!("- {}: {}", claim.outcome.words(), claim.reason)),
            lines(notes, |note| (*note).to_owned()),
            self.sentence()
        )
    }

    /// Returns it as Markdown.
    pub(super) fn markdown(&self) -> String {
        let Experiment { name, about, document, notes, tables, .. } = self.experiment;
        format!(
            "# {name}\n\n{}.\n\nDocument: *{document}*. {}.\n\n**{}**\n\n![{name}]({name}.svg)\n\n\
             ## What the document shows, and what is seen here\n\n{}\n## Tables\n\n{}## How to read it\n\n{}\n\
             ## Commands\n\n```sh\n{}```\n",
            capitalised(about),
            capitalised(&self.completeness()),
            self.sentence(),
            lines(&self.claims(), |claim| format!("- *{}*: {}", claim.outcome.words(), claim.reason)),
            lines(&tables(&self.rows), ResultTable::markdown),
            lines(notes, |note| format!("- {note}")),
            lines(&self.commands, BenchCommand::to_string)
        )
    }

    /// Returns it as a document for a program.
    pub(super) fn document(&self) -> ResultDocument<'_> {
        ResultDocument {
            name: self.experiment.name,
            document: self.experiment.document,
            commands: self.commands.iter().map(BenchCommand::to_string).collect(),
            sentence: self.sentence(),
            claims: self.claims(),
            notes: self.experiment.notes,
            expected_rows: self.expected_rows,
            failure: self.failure.as_deref(),
            rows: &self.rows,
        }
    }
}

/// Returns a line for each of `all`.
pub(super) fn lines<T>(all: &[T], line: impl Fn(&T) -> String) -> String {
    all.iter().map(|one| line(one) + "\n").collect()
}
