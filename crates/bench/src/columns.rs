//! The table of `mqblk bench`.

use mqblk_core::ByteLen;

use crate::plan::Plan;
use crate::report::{OpSummary, ResultRow};
use crate::table::{Heading, ResultTable, cpu_cell, mebibytes, or_dash, three_digits};
use crate::words::{ClientMode, Distribution, IoSizes};

/// Text of a cell: of its row, and the row of the first target.
type Cell<'a> = Box<dyn Fn(&ResultRow, &ResultRow) -> String + 'a>;

/// When a column is shown.
#[derive(Clone, Copy)]
enum Shown {
    Always,
    /// A value that all rows share is printed once, above the table.
    Varying,
    /// If a row has a value.
    Known,
}

/// A column of the table.
struct Column<'a> {
    heading: &'static str,
    number: bool,
    shown: Shown,
    cell: Cell<'a>,
}

/// Returns the table. `groups`: the rows of one combination each.
pub(crate) fn table(plan: &Plan, groups: &[Vec<ResultRow>]) -> String {
    let columns = columns(plan, groups);
    let rows: Vec<Vec<String>> = groups
        .iter()
        .flat_map(|group| group.iter().map(|row| (row, &group[0])))
        .map(|(row, first)| columns.iter().map(|column| (column.cell)(row, first)).collect())
        .collect();
    let (mut varying, mut constants) = (vec![], vec![]);
    for (at, column) in columns.iter().enumerate() {
        let same = rows.iter().all(|row| row[at] == rows[0][at]);
        match (column.shown, rows[0][at].as_str()) {
            // A running server's policy is not known, and an interface may have no targets.
            (Shown::Varying, "unknown" | "-") | (Shown::Known, "-") if same => {}
            (Shown::Varying, value) if same => constants.push(format!("{} {value}", column.heading)),
            _ => varying.push(at),
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

fn columns<'a>(plan: &'a Plan, groups: &[Vec<ResultRow>]) -> Vec<Column<'a>> {
    use Shown::{Always, Known, Varying};

    fn column<'a>(
        heading: &'static str,
        number: bool,
        shown: Shown,
        cell: impl Fn(&ResultRow, &ResultRow) -> String + 'a,
    ) -> Column<'a> {
        Column { heading, number, shown, cell: Box::new(cell) }
    }
    fn of(op: Option<&OpSummary>, text: fn(&OpSummary) -> String) -> String {
        or_dash(op.map(text))
    }
    fn of_rate(rate: Option<f64>) -> String {
        or_dash(rate.map(|rate| format!("{rate:.0}")))
    }
    let any = |is: fn(&ResultRow) -> bool| groups.iter().flatten().any(is);
    let has_errors = any(|row| row.errors > 0);
    let mixed = any(|row| row.read.is_some() && row.write.is_some());
    let unstarted = any(|row| row.rate.is_some_and(|rate| rate.unstarted > 0));
    let unfinished = groups.iter().flatten().any(|row| row.runs != usize::from(plan.runs));
    let several = plan.targets.len() > 1;
    // Alone they are all I/Os.
    let of_mixed = move |op: &Option<OpSummary>, text| of(op.as_ref().filter(|_| mixed), text);
    vec![
        column("target", false, Varying, |row, _| row.target.clone()),
        column("poll", false, Varying, |row, _| row.poll.clone()),
        column("merge", false, Varying, |row, _| row.merge.clone()),
        column("grants", false, Varying, |row, _| or_dash(row.grants.as_ref())),
        column("rw", false, Varying, |row, _| row.rw.to_owned()),
        column("bs", true, Varying, |row, _| block_size(row)),
        column("queues", true, Varying, |row, _| row.queues.to_string()),
        column("targets", true, Varying, |row, _| or_dash(row.targets)),
        column("luns", true, Varying, |row, _| or_dash(row.luns)),
        column("steer", false, Varying, |row, _| or_dash(row.steer)),
        column("jobs", true, Varying, |row, _| row.jobs.to_string()),
        column("iodepth", true, Varying, |row, _| row.iodepth.to_string()),
        column("batch", true, Varying, |row, _| row.batch.to_string()),
        column("rate-iops", true, Varying, |row, _| or_dash(row.rate_iops)),
        column("runs", true, Known, move |row, _| or_dash(unfinished.then_some(row.runs))),
        column("IOPS", true, Always, |row, _| format!("{:.0}", row.iops_mean)),
        column("+/-", true, Always, |row, _| format!("{:.0}", row.iops_stderr)),
        column("MiB/s", true, Always, |row, _| format!("{:.0}", row.bw_bytes_per_s / f64::from(1 << 20))),
        column("MiB/s per LUN", true, Known, |row, _| or_dash(row.lun_bw_bytes_per_s.map(mebibytes))),
        column("lat us: mean", true, Always, |row, _| three_digits(row.lat_us.mean)),
        column("p50", true, Always, |row, _| three_digits(row.lat_us.p50)),
        column("p99", true, Always, |row, _| three_digits(row.lat_us.p99)),
        column("p99.9", true, Always, |row, _| three_digits(row.lat_us.p999)),
        column("CPU us/IO: server", true, Always, |row, _| cpu_cell(row.server_cpu_us_per_io)),
        column("client", true, Always, |row, _| format!("{:.2}", row.client_cpu_us_per_io)),
        column("rrqm/s", true, Known, |row, _| of_rate(row.rrqm_per_s)),
        column("wrqm/s", true, Known, |row, _| of_rate(row.wrqm_per_s)),
        column("kicks/IO", true, Always, |row, _| format!("{:.3}", row.kicks_per_io)),
        column("calls/IO", true, Always, |row, _| format!("{:.3}", row.calls_per_io)),
        column("reads: IOPS", true, Known, move |row, _| of_mixed(&row.read, |op| format!("{:.0}", op.iops_mean))),
        column("reads: p50", true, Known, move |row, _| of_mixed(&row.read, |op| three_digits(op.lat_us.p50))),
        column("reads: p99", true, Known, move |row, _| of_mixed(&row.read, |op| three_digits(op.lat_us.p99))),
        column("writes: IOPS", true, Known, move |row, _| of_mixed(&row.write, |op| format!("{:.0}", op.iops_mean))),
        column("writes: p50", true, Known, move |row, _| of_mixed(&row.write, |op| three_digits(op.lat_us.p50))),
        column("writes: p99", true, Known, move |row, _| of_mixed(&row.write, |op| three_digits(op.lat_us.p99))),
        column("flushes/s", true, Known, |row, _| of(row.flush.as_ref(), |op| format!("{:.0}", op.iops_mean))),
        column("flushes: p50", true, Known, |row, _| of(row.flush.as_ref(), |op| three_digits(op.lat_us.p50))),
        column("flushes: p99", true, Known, |row, _| of(row.flush.as_ref(), |op| three_digits(op.lat_us.p99))),
        column("not started", true, Known, move |row, _| {
            or_dash(row.rate.filter(|_| unstarted).map(|rate| rate.unstarted))
        }),
        // Errors must be visible beside the IOPS.
        column("errors", true, if has_errors { Always } else { Varying }, |row, _| row.errors.to_string()),
        column("verified blocks", true, Known, |row, _| or_dash(plan.verify.map(|_| row.verified))),
        column("ratio", true, if several { Always } else { Known }, move |row, first| {
            // In a short run no I/O may have completed.
            let ratio = (several && first.iops_median > 0.0).then(|| row.iops_median / first.iops_median);
            or_dash(ratio.map(|ratio| format!("{ratio:.2}")))
        }),
    ]
}
