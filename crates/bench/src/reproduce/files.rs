//! The result files. Each is written under a temporary name and renamed, so that it is always whole.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::args::ReproduceArgs;
use super::machine::MachineDescription;
use super::page;
use super::result::{ExperimentResult, ResultDocument};
use crate::BenchError;
use crate::experiment::shell_word;
use crate::output::{replace, temporary};
use crate::report::ResultRow;

#[derive(Debug)]
pub(super) struct ResultFiles {
    out: PathBuf,
    report: Option<PathBuf>,
    json: Option<JsonDestination>,
    command: String,
}

#[derive(Debug)]
enum JsonDestination {
    Standard,
    File(PathBuf),
}

/// All results as JSON.
#[derive(Debug, Serialize)]
struct SessionDocument<'a> {
    command: &'a str,
    machine: &'a MachineDescription,
    experiments: Vec<ResultDocument<'a>>,
}

impl ResultFiles {
    /// Makes the folder, and checks that all files can be written.
    ///
    /// # Errors
    /// [`BenchError::Usage`], naming the option.
    pub(super) fn check(args: &ReproduceArgs) -> Result<ResultFiles, BenchError> {
        let refused = |option: &str, path: &Path, error: std::io::Error| {
            BenchError::option(option, format!("{}: {error}", path.display()), "a place that can be written")
        };
        std::fs::create_dir_all(&args.out).map_err(|error| refused("out", &args.out, error))?;
        tempfile::tempfile_in(&args.out).map_err(|error| refused("out", &args.out, error))?;
        let json = args.json.as_ref().map(|path| match path.as_os_str() == "-" {
            true => JsonDestination::Standard,
            false => JsonDestination::File(path.clone()),
        });
        let file = match &json {
            Some(JsonDestination::File(path)) => Some(("json", path)),
            _ => None,
        };
        for (option, path) in args.report.iter().map(|path| ("report", path)).chain(file) {
            if path.is_dir() {
                return Err(BenchError::option(option, format!("the folder {}", path.display()), "a file name"));
            }
            temporary(path).map_err(|error| refused(option, path, error))?;
        }
        let words = std::env::args().skip(1).map(|word| shell_word(&word));
        let command = std::iter::once("mqblk".to_owned()).chain(words).collect::<Vec<_>>().join(" ");
        Ok(ResultFiles { out: args.out.clone(), report: args.report.clone(), json, command })
    }

    /// Writes the files of an experiment.
    ///
    /// # Errors
    /// When one cannot be written.
    pub(super) fn write_experiment(&mut self, result: &ExperimentResult) -> Result<(), BenchError> {
        let name = result.experiment.name;
        let of = |extension: &str| self.out.join(format!("{name}.{extension}"));
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
        if let Some(report) = &self.report {
            write(report, &page::page(machine, &self.command, results))?;
        }
        let experiments = results.iter().map(ExperimentResult::document).collect();
        let document = SessionDocument { command: &self.command, machine, experiments };
        match &self.json {
            None => Ok(()),
            Some(JsonDestination::File(path)) => write(path, &json(&document)?),
            Some(JsonDestination::Standard) => print(&json(&document)?),
        }
    }

    /// Writes text to standard output, unless that is for JSON.
    ///
    /// # Errors
    /// When it cannot be written. A closed pipe is no error.
    pub(super) fn say(&self, text: &str) -> Result<(), BenchError> {
        match self.json {
            Some(JsonDestination::Standard) => Ok(()),
            _ => print(text),
        }
    }
}

fn print(text: &str) -> Result<(), BenchError> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The files are written nevertheless.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| BenchError::Failed(format!("standard output: {error}"))),
    }
}

/// Writes a file as a whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    let written = replace(path, |file| file.write_all(text.as_bytes()));
    written.map_err(|error| BenchError::Failed(format!("{}: {error}", path.display())))
}

fn json(value: &impl Serialize) -> Result<String, BenchError> {
    let text = serde_json::to_string_pretty(value).map_err(|error| BenchError::Failed(format!("JSON: {error}")))?;
    Ok(text + "\n")
}

/// Returns the rows as CSV (RFC 4180): a column for each key of the JSON, those of objects as `lat_us.mean` and so on,
/// without lists. Keys that a row lacks are empty.
fn csv(rows: &[ResultRow]) -> Result<String, BenchError> {
    let mut names: Vec<String> = vec![];
    let mut lines: Vec<HashMap<String, String>> = vec![];
    for row in rows {
        let value = serde_json::to_value(row).map_err(|error| BenchError::Failed(format!("CSV: {error}")))?;
        let Value::Object(fields) = value else { continue };
        let mut line = vec![];
        for (key, value) in fields {
            match value {
                Value::Array(_) => {}
                Value::Object(under) => {
                    line.extend(under.iter().map(|(name, value)| (format!("{key}.{name}"), cell(value))));
                }
                value => line.push((key, cell(&value))),
            }
        }
        for (name, _) in &line {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        lines.push(line.into_iter().collect());
    }
    // A key that is null in some rows and an object in others has the object's columns.
    let all = names.clone();
    names.retain(|name| !all.iter().any(|other| other.starts_with(&format!("{name}."))));
    let quoted = |text: &str| match text.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let mut text = String::new();
    if !lines.is_empty() {
        text.push_str(&(names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(",") + "\r\n"));
    }
    for line in &lines {
        let cells = names.iter().map(|name| line.get(name).map_or(String::new(), |text| quoted(text)));
        text.push_str(&(cells.collect::<Vec<_>>().join(",") + "\r\n"));
    }
    Ok(text)
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
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
