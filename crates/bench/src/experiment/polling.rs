//! IOPS and latency of one request at a time, by poll policy. Source: the commit that gave cloud-hypervisor's
//! vhost_user_block a poll window of 50 us in 2020: fio's sync engine reads random 4 KiB blocks from null_blk. There
//! the window gave 68.5 thousand IOPS instead of 43.2 thousand. Here also with storage that takes 10, 30 and 100 us,
//! and with other policies.

use super::claim::Claim;
use super::definition::{Columns, Experiment, error_cell, iops_ratio_cell, load, plot_of, published_series};
use super::estimate::MeasuredMean;
use super::published::{POLLING, POLLING_CPU_PERCENT, POLLING_IOPS, POLLING_MEAN_US, POLLING_PERCENTILES};
use crate::plan::{Target, value_of};
use crate::plot::{AxisChoice, Figure, Metric, PlotGroup, RowFilter, RowKey};
use crate::report::ResultRow;
use crate::table::{Column, ResultTable, cpu_cell, groups, ratio_cell, three_digits};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "polling",
    option: "polling",
    about: "IOPS, latency and CPU time of one request at a time, by poll policy and by what the storage takes",
    document: "vhost_user_block polling, 2020",
    defaults: "--disk storage=null,size=1T --rw randread --bs 4k --iodepth 1 --queues 1 --runtime 1 --warmup 0.25",
    columns,
    loads: |_| vec![String::new()],
    full: (0.8, 5),
    quick: (0.2, 3),
    tables,
    claims,
    figure,
    notes: &[
        "In the document fio is in a guest, and a request costs exits of the virtual machine, which polling saves; here the client is a process, and polling \
         saves what it takes to wake a thread.",
        "adaptive:200, auto and busy are not in the document. A policy that polls beyond its window on slow storage costs CPU time for nothing: \
         see the CPU time at 100 us.",
    ],
};

/// Policies; the first is the base of the comparison.
pub(super) const POLICIES: [&str; 5] = ["off", "static:50", "adaptive:200", "auto", "busy"];
/// Latencies of the storage in microseconds.
pub(super) const LATENCIES: [u64; 4] = [0, 10, 30, 100];

/// Returns a column for each target, latency, policy and number of queues.
fn columns(queues: &[u16], targets: &[Target]) -> Columns {
    let column = |target: Target| {
        let storage = target.latency_us().map_or_else(|| target.label.clone(), |us| format!("{us} us"));
        let name = format!("{storage}, poll {}", target.poll());
        queues.iter().map(|queues| target.as_column(name.clone(), *queues)).collect::<Vec<_>>()
    };
    Ok(targets.iter().flat_map(variants).flat_map(column).collect())
}

/// Returns a served disk with each latency and each policy. A null disk with a latency of its own, other storage, a
/// chosen policy, and a running server stay unchanged.
fn variants(target: &Target) -> Vec<Target> {
    let Some(spec) = target.spec() else { return vec![target.clone()] };
    // A label that was not chosen is the disk's settings, but for a chosen policy.
    let rest = spec.strip_prefix(target.label.as_str());
    let is_settings = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(",poll="));
    let with_latency = |us: u64| {
        let label = if is_settings { format!("{},latency-us={us}", target.label) } else { target.label.clone() };
        Target { label, ..target.with("latency-us", us) }
    };
    let latencies = match target.latency_us() {
        Some(_) if value_of(spec, "latency-us").is_none() => LATENCIES.map(with_latency).to_vec(),
        _ => vec![target.clone()],
    };
    match value_of(spec, "poll") {
        None => latencies.iter().flat_map(|one| POLICIES.map(|policy| one.with("poll", policy))).collect(),
        Some(_) => latencies,
    }
}

fn find<'a>(rows: &'a [ResultRow], latency: u64, poll: &str) -> Option<&'a ResultRow> {
    rows.iter().find(|row| row.storage_latency_us == Some(latency) && row.poll == poll)
}

/// Returns the storage of a row: its latency, or the label of its target.
fn storage(row: &ResultRow) -> String {
    row.storage_latency_us.map_or_else(|| row.target.clone(), |us| format!("null, {us} us"))
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    let mut tables = vec![];
    for group in groups(rows, |row| (load(row), row.queues)) {
        let load = load(group[0]);
        let is_published = load == "randread bs 4K, jobs 1, iodepth 1, batch 1";
        let ratio = |row: &ResultRow| {
            let first = group.iter().copied().find(|other| storage(other) == storage(row));
            let first = first.filter(|first| !std::ptr::eq(*first, row));
            first.map_or("1.00".into(), |first| iops_ratio_cell(Some((row, first))))
        };
        let published = |row: &ResultRow| {
            let at = POLLING.iter().position(|poll| row.poll == *poll);
            let at = at.filter(|_| is_published && row.storage_latency_us == Some(0));
            ratio_cell(at.map(|at| POLLING_IOPS[at] / POLLING_IOPS[0]))
        };
        let columns: [Column<'_>; 12] = [
            ("storage", &storage),
            ("poll", &|row| row.poll.clone()),
            ("IOPS", &|row| format!("{:.0}", row.iops_mean)),
            ("error", &error_cell),
            ("ratio (95 %)", &ratio),
            ("2020", &published),
            ("mean us", &|row| three_digits(row.lat_us.mean)),
            ("p50", &|row| three_digits(row.lat_us.p50)),
            ("p99", &|row| three_digits(row.lat_us.p99)),
            ("p99.9", &|row| three_digits(row.lat_us.p999)),
            ("server CPU us/IO", &|row| cpu_cell(row.server_cpu_us_per_io)),
            ("client CPU us/IO", &|row| cpu_cell(Some(row.client_cpu_us_per_io))),
        ];
        tables.push(ResultTable::of_rows(load, 2, &columns, &group));
    }
    tables.extend(latencies(rows));
    tables
}

/// Returns the table of the document's latencies, if both of its policies were measured.
fn latencies(rows: &[ResultRow]) -> Option<ResultTable> {
    let own = [find(rows, 0, POLLING[0])?, find(rows, 0, POLLING[1])?];
    let line = |name: String, own: [Option<f64>; 2], document: [f64; 2]| {
        let here = own[0].zip(own[1]).map(|(off, polled)| polled / off);
        let [off, polled] = document;
        vec![name, ratio_cell(here), ratio_cell(Some(polled / off)), cpu_cell(Some(off)), cpu_cell(Some(polled))]
    };
    let mut lines = vec![line("mean".into(), own.map(|row| Some(row.lat_us.mean)), POLLING_MEAN_US)];
    lines.extend(POLLING_PERCENTILES.iter().map(|(at, document)| {
        let find = |row: &ResultRow| row.percentiles.iter().find(|point| point.0 == *at).map(|point| point.1);
        line(format!("p{at}"), own.map(find), *document)
    }));
    let per_io = [0, 1].map(|at| POLLING_CPU_PERCENT[at] / 100.0 / (POLLING_IOPS[at] * 1e3) * 1e6);
    lines.push(line("client CPU for an I/O".into(), own.map(|row| Some(row.client_cpu_us_per_io)), per_io));
    let title = "Latency with static:50 as a ratio to off, storage that takes 0 us";
    Some(ResultTable::new(title, 1, &["", "here", "2020", "2020: off (us)", "2020: static:50 (us)"], lines))
}

fn claims(rows: &[ResultRow]) -> Vec<Claim> {
    let what = "IOPS of static:50 over off on storage that takes 0 us";
    let pair = find(rows, 0, POLLING[1]).zip(find(rows, 0, POLLING[0]));
    let claim = Claim::new(what, POLLING_IOPS[1] / POLLING_IOPS[0], MeasuredMean::iops, pair);
    vec![claim.of_threads(2, "a client and a worker that polls")]
}

fn figure(rows: &[ResultRow]) -> Figure {
    let against_latency =
        |metric| PlotGroup { scale: AxisChoice::Log, ..plot_of(metric, RowKey::Latency, &[RowKey::Poll]) };
    let gain = PlotGroup {
        ratio: vec![RowFilter::new(RowKey::Poll, POLLING[0])],
        references: vec![published_series("2020: static:50", [(0, POLLING_IOPS[1] / POLLING_IOPS[0])])],
        ..against_latency(Metric::Iops)
    };
    let distribution =
        PlotGroup { x: None, scale: AxisChoice::Linear, ..plot_of(Metric::Cdf, RowKey::Latency, &[RowKey::Poll]) };
    let rows = Figure::rows(rows);
    let fast = rows.iter().filter(|row| row.number(RowKey::Latency) == Some(0)).cloned().collect();
    Figure {
        title: "Polling: IOPS of one request at a time, as a ratio to poll off",
        subtitle: "virtio-blk, null storage with a latency, 4K random reads, 1 job, iodepth 1, a client that sleeps; the distribution: storage that takes 0 us",
        groups: vec![
            (rows.clone(), gain),
            (rows.clone(), against_latency(Metric::Mean)),
            (rows, against_latency(Metric::Cpu)),
            (fast, distribution),
        ],
    }
}
