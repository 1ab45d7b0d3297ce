//! The table of `mqblk bench`.

use mqblk_core::ByteLen;

use crate::plan::Plan;
use crate::report::{OpSummary, ResultRow};
use crate::table::{Heading, ResultTable, cpu_cell, mebibytes, or_dash, three_digits};
use crate::words::{ClientMode, Distribution, IoSizes};

/// Text of a cell: of its row, and the row of the first target.
type Cell = Box<dyn Fn(&ResultRow, &ResultRow) -> String>;

/// A column of the table.
struct Column {
    heading: &'static str,
    number: bool,
    /// True if a value that all rows share is printed once, above the table.
    constant: bool,
    cell: Cell,
}

/// Returns the table. `groups`: the rows of one combination each.
pub(crate) fn table(plan: &Plan, groups: &[Vec<ResultRow>]) -> String {
    let columns = columns(plan, groups);
    let rows: Vec<Vec<String>> = groups
        .iter()
        .flat_map(|group| group.iter().map(|row| (row, &group[0])))
        .map(|(row, first)| columns.iter().map(|column| (column.cell)(row, first)).collect())
        .collect();
    let same = |at: usize| rows.iter().all(|row| row[at] == rows[0][at]);
    let (mut varying, mut constants) = (vec![], vec![]);
    for (at, column) in columns.iter().enumerate() {
        match column.constant && same(at) {
            // A running server's policy is not known, and an interface may have no targets.
            true if matches!(rows[0][at].as_str(), "unknown" | "-") => {}
            true => constants.push(format!("{} {}", column.heading, rows[0][at])),
            false => varying.push(at),
        }
    }
    let headings =
        varying.iter().map(|at| Heading { text: columns[*at].heading.into(), number: columns[*at].number }).collect();
    let rows = rows.iter().map(|row| varying.iter().map(|at| row[*at].clone()).collect()).collect();
    ResultTable { title: summary(plan, constants), headings, rows }.text()
}

/// Returns the line above a table: `words`, and the settings of the plan.
pub(crate) fn summary(plan: &Plan, mut words: Vec<String>) -> String {
    words.push(match plan.client {
        ClientMode::Poll => "client polls".into(),
        ClientMode::Wait => "client sleeps".into(),
    });
    if plan.combinations.iter().any(|combination| combination.rw.is_mixed()) {
        words.push(format!("{} % reads", plan.read_share));
    }
    if plan.distribution != Distribution::Uniform {
        words.push(plan.distribution.to_string());
    }
    if plan.fsync > 0 {
        words.push(format!("fsync {}", plan.fsync));
    }
    let runs = if plan.runs == 1 { "1 run".to_owned() } else { format!("{} runs", plan.runs) };
    words.push(match plan.runtime {
        Some(time) => format!("{runs} of {} s", time.as_secs_f64()),
        None => format!("{runs}, each block once"),
    });
    words.join(", ")
}

/// Returns the block size, or the range of mixed sizes.
pub(crate) fn block_size(row: &ResultRow) -> String {
    IoSizes { min: ByteLen(row.bs), max: ByteLen(row.bs_max) }.to_string()
}

fn columns(plan: &Plan, groups: &[Vec<ResultRow>]) -> Vec<Column> {
    fn column(
        heading: &'static str,
        number: bool,
        constant: bool,
        cell: impl Fn(&ResultRow, &ResultRow) -> String + 'static,
    ) -> Column {
        Column { heading, number, constant, cell: Box::new(cell) }
    }
    fn of(op: &Option<OpSummary>, text: impl Fn(&OpSummary) -> String) -> String {
        or_dash(op.as_ref().map(text))
    }
    fn of_rate(rate: Option<f64>) -> String {
        or_dash(rate.map(|rate| format!("{rate:.0}")))
    }
    let has_errors = groups.iter().flatten().any(|row| row.errors > 0);
    let mut columns = vec![
        column("target", false, true, |row, _| row.target.clone()),
        column("poll", false, true, |row, _| row.poll.clone()),
        column("merge", false, true, |row, _| row.merge.clone()),
        column("grants", false, true, |row, _| or_dash(row.grants.as_ref())),
        column("rw", false, true, |row, _| row.rw.to_owned()),
        column("bs", true, true, |row, _| block_size(row)),
        column("queues", true, true, |row, _| row.queues.to_string()),
        column("targets", true, true, |row, _| or_dash(row.targets)),
        column("luns", true, true, |row, _| or_dash(row.luns)),
        column("steer", false, true, |row, _| or_dash(row.steer)),
        column("jobs", true, true, |row, _| row.jobs.to_string()),
        column("iodepth", true, true, |row, _| row.iodepth.to_string()),
        column("batch", true, true, |row, _| row.batch.to_string()),
        column("rate-iops", true, true, |row, _| or_dash(row.rate_iops)),
        column("runs", true, false, |row, _| row.runs.to_string()),
        column("IOPS", true, false, |row, _| format!("{:.0}", row.iops_mean)),
        column("+/-", true, false, |row, _| format!("{:.0}", row.iops_stderr)),
        column("MiB/s", true, false, |row, _| format!("{:.0}", row.bw_bytes_per_s / f64::from(1 << 20))),
        column("MiB/s per LUN", true, false, |row, _| or_dash(row.lun_bw_bytes_per_s.map(mebibytes))),
        column("lat us: mean", true, false, |row, _| three_digits(row.lat_us.mean)),
        column("p50", true, false, |row, _| three_digits(row.lat_us.p50)),
        column("p99", true, false, |row, _| three_digits(row.lat_us.p99)),
        column("p99.9", true, false, |row, _| three_digits(row.lat_us.p999)),
        column("CPU us/IO: server", true, false, |row, _| cpu_cell(row.server_cpu_us_per_io)),
        column("client", true, false, |row, _| format!("{:.2}", row.client_cpu_us_per_io)),
        column("rrqm/s", true, false, |row, _| of_rate(row.rrqm_per_s)),
        column("wrqm/s", true, false, |row, _| of_rate(row.wrqm_per_s)),
        column("kicks/IO", true, false, |row, _| format!("{:.3}", row.kicks_per_io)),
        column("calls/IO", true, false, |row, _| format!("{:.3}", row.calls_per_io)),
        column("reads: IOPS", true, false, |row, _| of(&row.read, |op| format!("{:.0}", op.iops_mean))),
        column("reads: p50", true, false, |row, _| of(&row.read, |op| three_digits(op.lat_us.p50))),
        column("reads: p99", true, false, |row, _| of(&row.read, |op| three_digits(op.lat_us.p99))),
        column("writes: IOPS", true, false, |row, _| of(&row.write, |op| format!("{:.0}", op.iops_mean))),
        column("writes: p50", true, false, |row, _| of(&row.write, |op| three_digits(op.lat_us.p50))),
        column("writes: p99", true, false, |row, _| of(&row.write, |op| three_digits(op.lat_us.p99))),
        column("flushes/s", true, false, |row, _| of(&row.flush, |op| format!("{:.0}", op.iops_mean))),
        column("flushes: p50", true, false, |row, _| of(&row.flush, |op| three_digits(op.lat_us.p50))),
        column("flushes: p99", true, false, |row, _| of(&row.flush, |op| three_digits(op.lat_us.p99))),
        column("not started", true, false, |row, _| or_dash(row.rate.map(|rate| rate.unstarted))),
        // Errors must be visible beside the IOPS.
        column("errors", true, !has_errors, |row, _| row.errors.to_string()),
    ];
    let rows = || groups.iter().flatten();
    let mixed = rows().any(|row| row.read.is_some() && row.write.is_some());
    let flushes = rows().any(|row| row.flush.is_some());
    let unstarted = rows().any(|row| row.rate.is_some_and(|rate| rate.unstarted > 0));
    columns.retain(|column| match column.heading.split_once([':', '/']) {
        Some(("reads" | "writes", _)) => mixed,
        Some(("flushes", _)) => flushes,
        _ => column.heading != "not started" || unstarted,
    });
    if groups.iter().flatten().all(|row| row.runs == usize::from(plan.runs)) {
        columns.retain(|column| column.heading != "runs");
    }
    if groups.iter().flatten().all(|row| row.rrqm_per_s.is_none()) {
        columns.retain(|column| !matches!(column.heading, "rrqm/s" | "wrqm/s"));
    }
    if groups.iter().flatten().all(|row| row.luns.is_none()) {
        columns.retain(|column| column.heading != "MiB/s per LUN");
    }
    if plan.verify.is_some() {
        columns.push(column("verified blocks", true, false, |row, _| row.verified.to_string()));
    }
    if plan.targets.len() > 1 {
        columns.push(column("ratio", true, false, |row, first| {
            // In a short run no I/O may have completed.
            let ratio = (first.iops_median > 0.0).then(|| row.iops_median / first.iops_median);
            or_dash(ratio.map(|ratio| format!("{ratio:.2}")))
        }));
    }
    columns
}
