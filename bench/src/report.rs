//! The results: JSON for programs, a table for people.

use std::fmt::Write as _;
use std::path::Path;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::BenchError;
use crate::args::{ClientMode, Rw};
use crate::load::RunResult;
use crate::plan::{Combination, Plan, Target};

/// Latency in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

/// One target under one combination. The serialized keys are an interface: they stay.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Guest interface.
    pub interface: &'static str,
    /// Storage backend, `unknown` for a server that runs already.
    pub storage: String,
    /// The target's label.
    pub target: String,
    /// fio's word.
    pub rw: &'static str,
    /// Bytes of a request.
    pub bs: u64,
    /// Queues.
    pub queues: u16,
    /// Jobs.
    pub jobs: u16,
    /// Requests in flight of each job.
    pub iodepth: u16,
    /// Requests submitted and waited for at once.
    pub batch: u16,
    /// The server's poll policy, `unknown` for a server that runs already.
    pub poll: String,
    /// Request merging in the server.
    pub merge: &'static str,
    /// Runs.
    pub runs: usize,
    /// Requests per second, mean over the runs.
    pub iops_mean: f64,
    /// Its standard error.
    pub iops_stderr: f64,
    /// Bytes per second, mean over the runs.
    pub bw_bytes_per_s: f64,
    /// Latency over all runs.
    pub lat_us: Latency,
    /// CPU time of the server for a request; null when it cannot be read.
    pub server_cpu_us_per_io: Option<f64>,
    /// CPU time of our threads for a request.
    pub client_cpu_us_per_io: f64,
    /// Kicks for a request.
    pub kicks_per_io: f64,
    /// Calls for a request.
    pub calls_per_io: f64,
    /// Requests that failed or did not verify.
    pub errors: u64,
    /// For the ratio in the table.
    #[serde(skip)]
    pub iops_median: f64,
    /// Blocks read back and checked.
    #[serde(skip)]
    pub verified: u64,
}

impl Row {
    /// Of the runs of a target, at least one.
    pub fn new(target: &Target, combination: &Combination, results: &[RunResult]) -> Row {
        let iops: Vec<f64> = results.iter().map(RunResult::iops).collect();
        let (iops_mean, iops_stderr) = mean_and_stderr(&iops);
        let requests = results.iter().map(|result| result.requests).sum::<u64>().max(1) as f64;
        let per_request = |value: f64| value / requests;
        let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let server_cpu: Option<f64> = results.iter().map(|result| result.server_cpu.map(micros)).sum();
        Row {
            interface: "virtio-blk",
            storage: target.storage.clone(),
            target: target.label.clone(),
            rw: combination.rw.name(),
            bs: combination.bs.0,
            queues: combination.queues,
            jobs: combination.jobs,
            iodepth: combination.iodepth,
            batch: combination.batch,
            poll: target.poll.clone(),
            merge: "off",
            runs: results.len(),
            iops_mean,
            iops_stderr,
            bw_bytes_per_s: iops_mean * combination.bs.0 as f64,
            lat_us: latency(results),
            server_cpu_us_per_io: server_cpu.map(per_request),
            client_cpu_us_per_io: per_request(results.iter().map(|result| micros(result.client_cpu)).sum()),
            kicks_per_io: per_request(results.iter().map(|result| result.kicks).sum::<u64>() as f64),
            calls_per_io: per_request(results.iter().map(|result| result.calls).sum::<u64>() as f64),
            errors: results.iter().map(|result| result.errors).sum(),
            iops_median: median(&iops),
            verified: results.iter().map(|result| result.verified).sum(),
        }
    }
}

fn latency(results: &[RunResult]) -> Latency {
    let mut all: Histogram<u64> = results[0].latency.clone();
    for result in &results[1..] {
        all.add(&result.latency).expect("all histograms have the same bounds");
    }
    let micros = |nanos: u64| nanos as f64 / 1e3;
    Latency {
        mean: if all.is_empty() { 0.0 } else { all.mean() / 1e3 },
        p50: micros(all.value_at_quantile(0.5)),
        p99: micros(all.value_at_quantile(0.99)),
        p999: micros(all.value_at_quantile(0.999)),
        max: micros(all.max()),
    }
}

/// The mean, and its standard error: the sample's standard deviation over the square root of the count. 0 for one value.
fn mean_and_stderr(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    if values.len() < 2 {
        return (mean, 0.0);
    }
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0)).sqrt() / count.sqrt())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Writes all rows as a JSON array.
///
/// # Errors
/// When the file cannot be written.
pub fn write_json<'a>(path: &Path, rows: impl Iterator<Item = &'a Row>) -> Result<(), BenchError> {
    let failed = |error: std::io::Error| BenchError::Failed(format!("--json {}: {error}", path.display()));
    let rows: Vec<&Row> = rows.collect();
    let mut text = serde_json::to_string_pretty(&rows).map_err(|error| failed(error.into()))?;
    text.push('\n');
    std::fs::write(path, text).map_err(failed)
}

/// A row's text in a column; the number is the ratio to the first target.
type Cell = Box<dyn Fn(&Row, f64) -> String>;

/// A column of the table.
struct Column {
    heading: &'static str,
    number: bool,
    /// Whether it is said once, above the table, when all rows have the same.
    constant: bool,
    cell: Cell,
}

/// The table. `groups`: the targets of one combination each.
pub fn table(plan: &Plan, groups: &[Vec<Row>]) -> String {
    let columns = columns(plan);
    let rows: Vec<Vec<String>> = groups
        .iter()
        .flat_map(|group| group.iter().map(|row| (row, row.iops_median / group[0].iops_median)))
        .map(|(row, ratio)| columns.iter().map(|column| (column.cell)(row, ratio)).collect())
        .collect();
    let same = |at: usize| rows.iter().all(|row| row[at] == rows[0][at]);
    let (mut shown, mut said) = (vec![], vec![]);
    for (at, column) in columns.iter().enumerate() {
        match column.constant && same(at) {
            // A server that runs already does not say its policy.
            true if rows[0][at] == "unknown" => {}
            true => said.push(format!("{} {}", column.heading, rows[0][at])),
            false => shown.push(at),
        }
    }
    let mut text = heading(plan, &said);
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = shown.iter().map(|at| width(*at).max(columns[*at].heading.chars().count())).collect();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((cell, at), width) in cells.zip(&shown).zip(&widths) {
            // Writing to a String cannot fail.
            let _ = match columns[*at].number {
                true => write!(line, "{cell:>width$}  "),
                false => write!(line, "{cell:<width$}  "),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    line(&mut shown.iter().map(|at| columns[*at].heading));
    for row in &rows {
        line(&mut shown.iter().map(|at| row[*at].as_str()));
    }
    text
}

/// What holds for all rows.
fn heading(plan: &Plan, said: &[String]) -> String {
    let mut words = said.to_vec();
    words.push(match plan.client {
        ClientMode::Poll => "client polls".into(),
        ClientMode::Wait => "client sleeps".into(),
    });
    if plan.combinations.iter().any(|combination| combination.rw == Rw::Randrw) {
        words.push(format!("{} % reads", plan.read_share));
    }
    let runs = if plan.runs == 1 { "1 run".to_owned() } else { format!("{} runs", plan.runs) };
    words.push(match plan.runtime {
        Some(time) => format!("{runs} of {} s", time.as_secs_f64()),
        None => format!("{runs}, each block once"),
    });
    format!("{}\n", words.join(", "))
}

fn columns(plan: &Plan) -> Vec<Column> {
    fn column(
        heading: &'static str,
        number: bool,
        constant: bool,
        cell: impl Fn(&Row, f64) -> String + 'static,
    ) -> Column {
        Column { heading, number, constant, cell: Box::new(cell) }
    }
    /// Three significant digits at least.
    fn micros(value: f64) -> String {
        match value {
            v if v >= 100.0 => format!("{v:.0}"),
            v if v >= 10.0 => format!("{v:.1}"),
            v => format!("{v:.2}"),
        }
    }
    let mut columns = vec![
        column("target", false, true, |row, _| row.target.clone()),
        column("poll", false, true, |row, _| row.poll.clone()),
        column("rw", false, true, |row, _| row.rw.to_owned()),
        column("bs", true, true, |row, _| mqblk_core::ByteLen(row.bs).to_string()),
        column("queues", true, true, |row, _| row.queues.to_string()),
        column("jobs", true, true, |row, _| row.jobs.to_string()),
        column("iodepth", true, true, |row, _| row.iodepth.to_string()),
        column("batch", true, true, |row, _| row.batch.to_string()),
        column("IOPS", true, false, |row, _| format!("{:.0}", row.iops_mean)),
        column("+/-", true, false, |row, _| format!("{:.0}", row.iops_stderr)),
        column("MiB/s", true, false, |row, _| format!("{:.0}", row.bw_bytes_per_s / f64::from(1 << 20))),
        column("lat us: mean", true, false, |row, _| micros(row.lat_us.mean)),
        column("p50", true, false, |row, _| micros(row.lat_us.p50)),
        column("p99", true, false, |row, _| micros(row.lat_us.p99)),
        column("p99.9", true, false, |row, _| micros(row.lat_us.p999)),
        column("CPU us/IO: server", true, false, |row, _| {
            row.server_cpu_us_per_io.map_or_else(|| "-".into(), |value| format!("{value:.2}"))
        }),
        column("client", true, false, |row, _| format!("{:.2}", row.client_cpu_us_per_io)),
        column("kicks/IO", true, false, |row, _| format!("{:.3}", row.kicks_per_io)),
        column("calls/IO", true, false, |row, _| format!("{:.3}", row.calls_per_io)),
        column("errors", true, true, |row, _| row.errors.to_string()),
    ];
    if plan.verify.is_some() {
        columns.push(column("verified blocks", true, false, |row, _| row.verified.to_string()));
    }
    if plan.targets.len() > 1 {
        columns.push(column("ratio", true, false, |_, ratio| format!("{ratio:.2}")));
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_errors_and_medians() {
        assert_eq!(mean_and_stderr(&[5.0]), (5.0, 0.0));
        let (mean, stderr) = mean_and_stderr(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert!((mean - 5.0).abs() < 1e-12 && (stderr - (32.0_f64 / 7.0).sqrt() / 8.0_f64.sqrt()).abs() < 1e-12);
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
    }
}
