//! The result files. Each is written under a temporary name and renamed, so that it is always whole.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::args::ReproduceArgs;
use super::page;
use super::result::{ExperimentResult, ResultDocument};
use crate::BenchError;
use crate::experiment::shell_word;
use crate::machine::MachineDescription;
use crate::output::{is_standard_output, replace, temporary, write_text};
use crate::report::ResultRow;

/// The files that the options name.
#[derive(Debug)]
pub(super) struct ResultFiles<'a> {
    args: &'a ReproduceArgs,
    command: String,
}

/// All results as JSON.
#[derive(Debug, Serialize)]
struct SessionDocument<'a> {
    command: &'a str,
    machine: &'a MachineDescription,
    experiments: Vec<ResultDocument<'a>>,
}

impl ResultFiles<'_> {
    /// Makes the folder, and checks that all files can be written.
    ///
    /// # Errors
    /// [`BenchError::Usage`], naming the option.
    pub(super) fn check(args: &ReproduceArgs) -> Result<ResultFiles<'_>, BenchError> {
        let refused = |option: &str, path: &Path, error: std::io::Error| {
            BenchError::option(option, format!("{}: {error}", path.display()), "a place that can be written")
        };
        std::fs::create_dir_all(&args.out).map_err(|error| refused("out", &args.out, error))?;
        tempfile::tempfile_in(&args.out).map_err(|error| refused("out", &args.out, error))?;
        let json = args.json.iter().filter(|path| !is_standard_output(path)).map(|path| ("json", path));
        for (option, path) in args.report.iter().map(|path| ("report", path)).chain(json) {
            if path.is_dir() {
                return Err(BenchError::option(option, format!("the folder {}", path.display()), "a file name"));
            }
            temporary(path).map_err(|error| refused(option, path, error))?;
        }
        let words = std::env::args().skip(1).map(|word| shell_word(&word));
        let command = std::iter::once("mqblk".to_owned()).chain(words).collect::<Vec<_>>().join(" ");
        Ok(ResultFiles { args, command })
    }

    /// Writes the files of an experiment.
    ///
    /// # Errors
    /// When one cannot be written.
    pub(super) fn write_experiment(&self, result: &ExperimentResult) -> Result<(), BenchError> {
        let name = result.experiment.name;
        let of = |extension: &str| self.args.out.join(format!("{name}.{extension}"));
        write(&of("json"), &json(&result.rows)?)?;
        write(&of("csv"), &csv(&result.rows)?)?;
        write(&of("svg"), &(result.experiment.figure)(&result.rows).svg())?;
        write(&of("md"), &result.markdown())
    }

    /// Writes the report and the JSON of all experiments.
    ///
    /// # Errors
    /// When one cannot be written.
    pub(super) fn write_whole(
        &self,
        machine: &MachineDescription,
        results: &[ExperimentResult],
    ) -> Result<(), BenchError> {
        if let Some(report) = &self.args.report {
            write(report, &page::page(machine, &self.command, results))?;
        }
        let experiments = results.iter().map(ExperimentResult::document).collect();
        let document = SessionDocument { command: &self.command, machine, experiments };
        match &self.args.json {
            None => Ok(()),
            Some(path) if is_standard_output(path) => print(&json(&document)?),
            Some(path) => write(path, &json(&document)?),
        }
    }

    /// Writes text to standard output, unless that is for JSON.
    ///
    /// # Errors
    /// When it cannot be written. A closed pipe is no error.
    pub(super) fn say(&self, text: &str) -> Result<(), BenchError> {
        if self.args.json.as_deref().is_some_and(is_standard_output) { Ok(()) } else { print(text) }
    }
}

/// Writes text to standard output. The files are written even if nobody reads that.
pub(super) fn print(text: &str) -> Result<(), BenchError> {
    write_text(std::io::stdout(), "standard output", text)
}

/// Writes a file as a whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    let written = replace(path, |file| file.write_all(text.as_bytes()));
    written.map_err(|error| BenchError::failed(path.display(), error))
}

fn json(value: &impl Serialize) -> Result<String, BenchError> {
    let text = serde_json::to_string_pretty(value).map_err(|error| BenchError::failed("JSON", error))?;
    Ok(text + "\n")
}

/// Returns the rows as CSV (RFC 4180): a column for each key of the JSON, those of objects as `lat_us.mean` and so on,
/// without lists. Keys that a row lacks are empty.
fn csv(rows: &[ResultRow]) -> Result<String, BenchError> {
    let mut lines: Vec<BTreeMap<String, String>> = vec![];
    for row in rows {
        let row = serde_json::to_value(row).map_err(|error| BenchError::failed("CSV", error))?;
        let mut line = BTreeMap::new();
        for (key, value) in row.as_object().into_iter().flatten() {
            match value {
                Value::Array(_) => {}
                Value::Object(under) => {
                    line.extend(under.iter().map(|(name, value)| (format!("{key}.{name}"), cell(value))));
                }
                value => _ = line.insert(key.clone(), cell(value)),
            }
        }
        lines.push(line);
    }
    let all: BTreeSet<&str> = lines.iter().flat_map(BTreeMap::keys).map(String::as_str).collect();
    // A key that is null in some rows and an object in others has the object's columns.
    let has_columns = |name: &str| all.iter().any(|other| other.starts_with(&format!("{name}.")));
    let names: Vec<&str> = all.iter().copied().filter(|name| !has_columns(name)).collect();
    let cells = |line: &BTreeMap<String, String>| {
        let cells = names.iter().map(|name| line.get(*name).map_or("", String::as_str));
        cells.collect::<Vec<_>>().join(",")
    };
    let head = (!lines.is_empty()).then(|| names.join(","));
    Ok(head.into_iter().chain(lines.iter().map(cells)).map(|line| line + "\r\n").collect())
}

/// Returns a value as a cell, in quotes where it needs them.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) if text.contains(['"', ',', '\n', '\r']) => format!("\"{}\"", text.replace('"', "\"\"")),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_has_a_column_for_each_key() {
        let row = ResultRow { target: "path=a,\"b\"".into(), ..ResultRow::example(4096, "1 queue", 5.0) };
        let text = csv(&[row]).unwrap();
        let lines: Vec<&str> = text.split("\r\n").collect();
        assert_eq!((lines.len(), lines[2]), (3, ""));
        for key in ["target", "bs", "lat_us.p99", "iops_mean", "storage_latency_us"] {
            assert!(lines[0].split(',').any(|found| found == key), "{key} in {}", lines[0]);
        }
        assert!(lines[1].contains("\"path=a,\"\"b\"\"\"") && !lines[0].contains("percentiles"), "{text}");
        assert_eq!(csv(&[]).unwrap(), "");
    }
}
