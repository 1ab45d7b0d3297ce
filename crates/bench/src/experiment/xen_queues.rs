//! IOPS against rings of a Xen disk. Source: the table sent with the multi-queue patches of xen-blkfront and
//! xen-blkback in 2015: 16 fio jobs read 4 KiB blocks in sequence, 64 requests in flight each, submitted and reaped 64
//! at a time, on null_blk. There IOPS fell by a third from 4 rings to 16 while all rings shared a pool of persistent
//! grants and free pages under a lock. With a pool for each ring they did not fall. Here: both kinds of pool.

use super::published::{XEN_IOPS, XEN_QUEUES};
use super::tables::Pivot;
use super::{
    BenchCommand, Claim, Columns, Experiment, ResultTable, cpu_cell, groups, iops_claim, load, needs_cores, prefix,
    ratio_cell,
};
use crate::grid::three_digits;
use crate::plan::{Target, TargetSource, value_of};
use crate::plot::{Figure, Metric, PlotGroup, PublishedSeries, RowFilter, RowKey};
use crate::report::ResultRow;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "xen-queues",
    option: "xen-queues",
    about: "IOPS of a Xen disk with 1 to 16 rings, with granted pages kept for each ring and for all in common",
    document: "xen-block multi-queue, 2015",
    needs_disk: false,
    defaults: "--interface xen --disk storage=null,size=16G --rw read --bs 4k --iodepth 64 --batch 64 --queues 1,4,8,16 --jobs 16 \
               --ring-order 0 --runtime 2 --warmup 0.5",
    columns,
    commands: |scale| {
        let length = scale.length((1.0, 5), (0.3, 3));
        vec![BenchCommand::new(&format!("--experiment xen-queues --queues 1,4,8,16 {length}"))]
    },
    tables,
    claims,
    figure,
    notes: &[
        "The simulated Xen has xenstore, grants and event channels, and no hypervisor: only both ends of the ring and the ring itself are measured.",
        "The document's machines had 16 virtual CPUs in each domain. With fewer cores than threads, more rings share the same cores, and their \
         IOPS cannot grow; a pool behind a lock costs little while few threads run at the same time.",
    ],
};

/// Keys of a disk.
const GRANTS: &str = "grants";
const GRANTS_POOL: &str = "grants-pool";
/// Values of [`GRANTS_POOL`], and their names.
const POOLS: [(&str, &str); 2] = [("shared", "one pool for all rings"), ("per-ring", "pools of each ring")];
/// The document's load: see the defaults.
const PUBLISHED_LOAD: &str = "read bs 4K, jobs 16, iodepth 64, batch 64";

/// Returns a column for each pool and number of queues. A disk with a chosen pool keeps it, and a running server stays
/// unchanged.
fn columns(queues: &[u16], targets: &[Target]) -> Columns {
    let mut columns = vec![];
    for target in targets {
        let own = prefix(targets, target);
        let pools = match &target.source {
            TargetSource::Disk { keys, .. } => POOLS
                .iter()
                .filter(|pool| keys.get(GRANTS_POOL).is_none_or(|chosen| chosen == pool.0))
                .map(Some)
                .collect(),
            _ => vec![None],
        };
        for pool in pools {
            let mut column = target.clone();
            if let (TargetSource::Disk { spec, keys, .. }, Some(pool)) = (&mut column.source, pool) {
                if keys.get(GRANTS).is_none() && value_of(spec, GRANTS).is_none() {
                    keys.set(GRANTS, Some("persistent"));
                    column.grants = Some("persistent".into());
                }
                keys.set(GRANTS_POOL, Some(pool.0));
            }
            column.column = Some(format!("{own}{}", pool.map_or("as it runs", |pool| pool.1)));
            columns.extend(queues.iter().map(|queues| Target { queues: Some(*queues), ..column.clone() }));
        }
    }
    Ok(columns)
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    let mut tables = vec![];
    for group in groups(rows, load) {
        let load = load(group[0]);
        let lines = if load == PUBLISHED_LOAD && group[0].ring_order == Some(0) { &XEN_IOPS[..] } else { &[] };
        let with_document = |table: ResultTable, cell: &dyn Fn(f64, &[f64; 4]) -> String| {
            let published = |values: &[f64; 4], heading: &str| {
                let at = XEN_QUEUES.iter().position(|queues| queues.to_string() == heading);
                at.map_or("-".into(), |at| cell(values[at], values))
            };
            lines
                .iter()
                .fold(table, |table, (name, values)| table.with_line(name, |heading| published(values, heading)))
        };
        let pivot = Pivot {
            rows: &group,
            heading: "Queues:",
            line: &|row| row.column.clone().unwrap_or_default(),
            column: &|row| row.queues.to_string(),
            numbers: false,
        };
        let one = |line: &[&ResultRow]| line.iter().find(|row| row.queues == 1).map(|row| row.iops_mean);
        let best = |line: &[&ResultRow]| line.iter().map(|row| row.iops_median).fold(0.0, f64::max);
        let most = |line: &[f64; 4]| line.iter().copied().fold(0.0, f64::max);
        let iops = pivot.table(format!("IOPS (k): {load}"), &|row, _| three_digits(row.iops_mean / 1e3));
        let to_best = pivot.table("IOPS, as a ratio to the best of the line", &|row, line| {
            ratio_cell(Some(row.iops_median / best(line)))
        });
        let to_one = pivot
            .table("IOPS, as a ratio to 1 queue", &|row, line| ratio_cell(one(line).map(|one| row.iops_mean / one)));
        tables.extend([
            with_document(iops, &|value, _| format!("{value:.0}")),
            with_document(to_best, &|value, line| ratio_cell(Some(value / most(line)))),
            with_document(to_one, &|value, line| ratio_cell(Some(value / line[0]))),
            pivot.table("CPU us/IO of the server", &|row, _| cpu_cell(row.server_cpu_us_per_io)),
            pivot.table("CPU us/IO of the client", &|row, _| cpu_cell(Some(row.client_cpu_us_per_io))),
        ]);
    }
    tables
}

fn claims(rows: &[ResultRow], cores: usize) -> Vec<Claim> {
    let find = |pool: &str, queues: u16| rows.iter().find(|row| row.grants_pool == Some(pool) && row.queues == queues);
    let [shared, _, own] = XEN_IOPS.map(|(_, values)| values);
    vec![
        iops_claim(
            "IOPS of 4 rings over 1 with pools of each ring",
            own[1] / own[0],
            find("per-ring", 4),
            find("per-ring", 1),
            needs_cores(8, "4 rings with a thread at each end", cores),
        ),
        iops_claim(
            "IOPS of pools of each ring over one pool with 16 rings",
            own[3] / shared[3],
            find("per-ring", 16),
            find("shared", 16),
            needs_cores(32, "16 rings with a thread at each end", cores),
        ),
    ]
}

fn figure(rows: &[ResultRow]) -> Figure {
    let line = |(name, values): (&str, [f64; 4])| {
        let points = XEN_QUEUES.iter().zip(values).map(|(queues, value)| (queues.to_string(), value / values[0], 0.0));
        PublishedSeries { name: name.to_owned(), points: points.collect(), only: None }
    };
    let group = |metric: Metric| PlotGroup {
        metrics: vec![metric],
        x: Some(RowKey::Queues),
        series: vec![RowKey::Column],
        ..PlotGroup::default()
    };
    let gain = PlotGroup {
        ratio: vec![RowFilter::new(RowKey::Queues, "1")],
        references: XEN_IOPS.map(line).to_vec(),
        ..group(Metric::Iops)
    };
    let rows = Figure::rows(rows);
    Figure {
        title: "Rings of a Xen disk: IOPS as a ratio to one ring",
        subtitle: "blkif over a simulated Xen, null storage, 4K sequential reads, 16 jobs, iodepth 64, batch 64",
        groups: vec![(rows.clone(), gain), (rows, group(Metric::Cpu))],
    }
}
