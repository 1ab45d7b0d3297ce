//! IOPS and latency of one request at a time, by poll policy. Source: the commit that gave cloud-hypervisor's
//! vhost_user_block a poll window of 50 us in 2020: fio's sync engine reads random 4 KiB blocks from null_blk. There
//! the window gave 68.5 thousand IOPS instead of 43.2 thousand. Here also with storage that takes 10, 30 and 100 us,
//! and with other policies.

use super::published::{POLLING, PublishedPolling};
use super::{
    BenchCommand, Claim, Columns, Experiment, ResultTable, cpu_cell, error_cell, estimate_cell, groups, iops_claim,
    iops_ratio, load, needs_cores, ratio_cell,
};
use crate::grid::three_digits;
use crate::plan::{Target, TargetSource, null_latency, value_of};
use crate::plot::{AxisChoice, Figure, Metric, PlotGroup, PublishedSeries, RowFilter, RowKey};
use crate::report::ResultRow;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "polling",
    option: "polling",
    about: "IOPS, latency and CPU time of one request at a time, by poll policy and by what the storage takes",
    document: "vhost_user_block polling, 2020",
    needs_disk: false,
    defaults: "--disk storage=null,size=1T --rw randread --bs 4k --iodepth 1 --queues 1 --runtime 1 --warmup 0.25",
    columns,
    commands: |scale| vec![BenchCommand::new(&format!("--experiment polling {}", scale.length((0.8, 5), (0.2, 3))))],
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
    let all = targets.iter().flat_map(at_latencies).flat_map(by_policies);
    let column = |target: Target| {
        let storage = target.latency_us.map_or_else(|| target.label.clone(), |us| format!("{us} us"));
        let name = format!("{storage}, poll {}", target.poll);
        queues.iter().map(move |queues| Target { column: Some(name.clone()), queues: Some(*queues), ..target.clone() })
    };
    Ok(all.flat_map(|target| column(target).collect::<Vec<_>>()).collect())
}

/// Returns a null disk with each latency. Other targets, and one with its own latency, stay unchanged.
fn at_latencies(target: &Target) -> Vec<Target> {
    let TargetSource::Disk { spec, .. } = &target.source else { return vec![target.clone()] };
    if null_latency(spec).is_none() || value_of(spec, "latency-us").is_some() {
        return vec![target.clone()];
    }
    let with = |us: u64| {
        let mut own = target.clone();
        if let TargetSource::Disk { spec, .. } = &mut own.source {
            let is_named = own.label != *spec;
            spec.push_str(&format!(",latency-us={us}"));
            if !is_named {
                own.label.clone_from(spec);
            }
        }
        own.latency_us = Some(us);
        own
    };
    LATENCIES.map(with).to_vec()
}

/// Returns a served disk with each policy. One with a chosen policy, and a running server, stay unchanged.
fn by_policies(target: Target) -> Vec<Target> {
    let is_open = match &target.source {
        TargetSource::Disk { spec, poll, .. } => poll.is_none() && value_of(spec, "poll").is_none(),
        _ => false,
    };
    if !is_open {
        return vec![target];
    }
    let with = |policy: &str| {
        let mut own = target.clone();
        if let TargetSource::Disk { poll, .. } = &mut own.source {
            *poll = Some(policy.to_owned());
        }
        own.poll = policy.to_owned();
        own
    };
    POLICIES.map(with).to_vec()
}

fn find<'a>(rows: &'a [ResultRow], latency: u64, poll: &str) -> Option<&'a ResultRow> {
    rows.iter().find(|row| row.storage_latency_us == Some(latency) && row.poll == poll)
}

/// Returns the storage of a row: its latency, or the label of its target.
fn storage(row: &ResultRow) -> String {
    row.storage_latency_us.map_or_else(|| row.target.clone(), |us| format!("null, {us} us"))
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    const HEADINGS: [&str; 12] = [
        "storage",
        "poll",
        "IOPS",
        "error",
        "ratio (95 %)",
        "2020",
        "mean us",
        "p50",
        "p99",
        "p99.9",
        "server CPU us/IO",
        "client CPU us/IO",
    ];
    let mut tables = vec![];
    for group in groups(rows, |row| (load(row), row.queues)) {
        let is_published = load(group[0]) == "randread bs 4K, jobs 1, iodepth 1, batch 1";
        let mut table = ResultTable::new(load(group[0]), 2, &HEADINGS);
        for row in &group {
            let first = group.iter().find(|other| storage(other) == storage(row)).copied();
            let is_first = first.is_some_and(|first| std::ptr::eq(first, *row));
            let published =
                POLLING.iter().find(|run| is_published && row.storage_latency_us == Some(0) && run.poll == row.poll);
            table.rows.push(vec![
                storage(row),
                row.poll.clone(),
                format!("{:.0}", row.iops_mean),
                error_cell(row),
                if is_first { "1.00".into() } else { estimate_cell(iops_ratio(Some(row), first)) },
                ratio_cell(published.map(|run| run.iops / POLLING[0].iops)),
                three_digits(row.lat_us.mean),
                three_digits(row.lat_us.p50),
                three_digits(row.lat_us.p99),
                three_digits(row.lat_us.p999),
                cpu_cell(row.server_cpu_us_per_io),
                cpu_cell(Some(row.client_cpu_us_per_io)),
            ]);
        }
        tables.push(table);
    }
    tables.extend(latencies(rows));
    tables
}

/// Returns the table of the document's latencies, if both of its policies were measured.
fn latencies(rows: &[ResultRow]) -> Option<ResultTable> {
    let [off, polled] = POLLING;
    let [own_off, own_polled] = [find(rows, 0, off.poll)?, find(rows, 0, polled.poll)?];
    let mut table = ResultTable::new(
        "Latency with static:50 as a ratio to off, storage that takes 0 us",
        1,
        &["", "here", "2020", "2020: off (us)", "2020: static:50 (us)"],
    );
    type Here<'a> = &'a dyn Fn(&ResultRow) -> Option<f64>;
    type There<'a> = &'a dyn Fn(&PublishedPolling) -> Option<f64>;
    let mut add = |name: String, here: Here, there: There| {
        let ratio = |[off, polled]: [Option<f64>; 2]| ratio_cell(off.zip(polled).map(|(off, polled)| polled / off));
        let document = [there(&off), there(&polled)];
        let mut row = vec![name, ratio([here(own_off), here(own_polled)]), ratio(document)];
        row.extend(document.map(cpu_cell));
        table.rows.push(row);
    };
    add("mean".into(), &|row| Some(row.lat_us.mean), &|run| Some(run.mean_us));
    for at in [1.0, 50.0, 90.0, 99.0, 99.9, 99.99] {
        let find = |points: &[(f64, f64)]| points.iter().find(|point| point.0 == at).map(|point| point.1);
        add(format!("p{at}"), &|row| find(&row.percentiles), &|run| find(&run.percentiles));
    }
    let per_io = |run: &PublishedPolling| run.client_cpu_percent / 100.0 / (run.iops * 1e3) * 1e6;
    add("client CPU for an I/O".into(), &|row| Some(row.client_cpu_us_per_io), &|run| Some(per_io(run)));
    Some(table)
}

fn claims(rows: &[ResultRow], cores: usize) -> Vec<Claim> {
    let [off, polled] = POLLING;
    vec![iops_claim(
        "IOPS of static:50 over off on storage that takes 0 us",
        polled.iops / off.iops,
        find(rows, 0, polled.poll),
        find(rows, 0, off.poll),
        needs_cores(2, "a client and a worker that polls", cores),
    )]
}

fn figure(rows: &[ResultRow]) -> Figure {
    let [off, polled] = POLLING;
    let group = |metric: Metric, x: Option<RowKey>, scale: AxisChoice| PlotGroup {
        metrics: vec![metric],
        x,
        series: vec![RowKey::Poll],
        scale,
        ..PlotGroup::default()
    };
    let against_latency = |metric: Metric| group(metric, Some(RowKey::Latency), AxisChoice::Log);
    let published = vec![("0".to_owned(), polled.iops / off.iops, 0.0)];
    let gain = PlotGroup {
        ratio: vec![RowFilter::new(RowKey::Poll, off.poll)],
        references: vec![PublishedSeries { name: "2020: static:50".into(), points: published, only: None }],
        ..against_latency(Metric::Iops)
    };
    let rows = Figure::rows(rows);
    let fast = rows.iter().filter(|row| row.number(RowKey::Latency) == Some(0)).cloned().collect();
    Figure {
        title: "Polling: IOPS of one request at a time, as a ratio to poll off",
        subtitle: "virtio-blk, null storage with a latency, 4K random reads, 1 job, iodepth 1, a client that sleeps; the distribution: storage that takes 0 us",
        groups: vec![
            (rows.clone(), gain),
            (rows.clone(), against_latency(Metric::Mean)),
            (rows, against_latency(Metric::Cpu)),
            (fast, group(Metric::Cdf, None, AxisChoice::Linear)),
        ],
    }
}
