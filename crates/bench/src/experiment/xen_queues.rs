//! IOPS against rings of a Xen disk. Source: the table sent with the multi-queue patches of xen-blkfront and
//! xen-blkback in 2015: 16 fio jobs read 4 KiB blocks in sequence, 64 requests in flight each, submitted and reaped 64
//! at a time, on null_blk. There IOPS fell by a third from 4 rings to 16 while all rings shared a pool of persistent
//! grants and free pages under a lock. With a pool for each ring they did not fall. Here: both kinds of pool.

use super::claim::Claim;
use super::definition::{Columns, Experiment, column, load, plot_of, prefix, published_series};
use super::estimate::MeasuredMean;
use super::published::{XEN_IOPS, XEN_QUEUES};
use crate::plan::{Target, value_of};
use crate::plot::{Figure, Metric, PlotGroup, RowFilter, RowKey};
use crate::report::ResultRow;
use crate::table::{Pivot, ResultTable, cpu_cell, groups, or_dash, ratio_cell, three_digits};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "xen-queues",
    option: "xen-queues",
    about: "IOPS of a Xen disk with 1 to 16 rings, with granted pages kept for each ring and for all in common",
    document: "xen-block multi-queue, 2015",
    defaults: "--interface xen --disk storage=null,size=16G --rw read --bs 4k --iodepth 64 --batch 64 --queues 1,4,8,16 --jobs 16 \
               --ring-order 0 --runtime 2 --warmup 0.5",
    columns,
    loads: |_| vec!["--queues 1,4,8,16".into()],
    full: (1.0, 5),
    quick: (0.3, 3),
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
        for (target, pool) in variants(target) {
            let name = format!("{own}{pool}");
            columns.extend(queues.iter().map(|queues| target.as_column(name.clone(), *queues)));
        }
    }
    Ok(columns)
}

/// Returns a target with each pool, and the pool's name.
fn variants(target: &Target) -> Vec<(Target, &'static str)> {
    let Some(spec) = target.spec() else { return vec![(target.clone(), "as it runs")] };
    let kept = match value_of(spec, GRANTS) {
        Some(_) => target.clone(),
        None => Target { grants: Some("persistent".into()), ..target.with(GRANTS, "persistent") },
    };
    match value_of(spec, GRANTS_POOL) {
        Some(chosen) => POOLS.iter().filter(|pool| pool.0 == chosen).map(|pool| (kept.clone(), pool.1)).collect(),
        None => POOLS.map(|(pool, name)| (kept.with(GRANTS_POOL, pool), name)).to_vec(),
    }
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    let mut tables = vec![];
    for group in groups(rows, load) {
        let load = load(group[0]);
        let lines = if load == PUBLISHED_LOAD && group[0].ring_order == Some(0) { &XEN_IOPS[..] } else { &[] };
        let with_document = |table: ResultTable, cells: &dyn Fn(&[f64; 4]) -> [String; 4]| {
            let at = |heading: &str| XEN_QUEUES.iter().position(|queues| queues.to_string() == heading);
            let with_line = |table: ResultTable, (name, values): &(&str, [f64; 4])| {
                table.with_line(name, |heading| or_dash(at(heading).map(|at| cells(values)[at].clone())))
            };
            lines.iter().fold(table, with_line)
        };
        let queues = |row: &ResultRow| row.queues.to_string();
        let pivot = Pivot { rows: &group, heading: "Queues:", line: &column, column: &queues, numbers: false };
        let one = |line: &[&ResultRow]| line.iter().find(|row| row.queues == 1).map(|row| row.iops_mean);
        let best = |line: &[&ResultRow]| line.iter().map(|row| row.iops_median).fold(0.0, f64::max);
        let most = |line: &[f64; 4]| line.iter().copied().fold(0.0, f64::max);
        tables.extend([
            with_document(
                pivot.table(format!("IOPS (k): {load}"), &|row, _| three_digits(row.iops_mean / 1e3)),
                &|line| line.map(|value| format!("{value:.0}")),
            ),
            with_document(
                pivot.table("IOPS, as a ratio to the best of the line", &|row, line| {
                    ratio_cell(Some(row.iops_median / best(line)))
                }),
                &|line| line.map(|value| ratio_cell(Some(value / most(line)))),
            ),
            with_document(
                pivot.table("IOPS, as a ratio to 1 queue", &|row, line| {
                    ratio_cell(one(line).map(|one| row.iops_mean / one))
                }),
                &|line| line.map(|value| ratio_cell(Some(value / line[0]))),
            ),
            pivot.table("CPU us/IO of the server", &|row, _| cpu_cell(row.server_cpu_us_per_io)),
            pivot.table("CPU us/IO of the client", &|row, _| cpu_cell(Some(row.client_cpu_us_per_io))),
        ]);
    }
    tables
}

fn claims(rows: &[ResultRow]) -> Vec<Claim> {
    let find =
        |(pool, queues): (&str, u16)| rows.iter().find(|row| row.grants_pool == Some(pool) && row.queues == queues);
    let claim = |what: &str, published: f64, value: (&str, u16), base: (&str, u16)| {
        Claim::new(what, published, MeasuredMean::iops, find(value).zip(find(base)))
    };
    let [(_, shared), _, (_, own)] = XEN_IOPS;
    vec![
        claim("IOPS of 4 rings over 1 with pools of each ring", own[1] / own[0], ("per-ring", 4), ("per-ring", 1))
            .of_threads(8, "4 rings with a thread at each end"),
        claim(
            "IOPS of pools of each ring over one pool with 16 rings",
            own[3] / shared[3],
            ("per-ring", 16),
            ("shared", 16),
        )
        .of_threads(32, "16 rings with a thread at each end"),
    ]
}

fn figure(rows: &[ResultRow]) -> Figure {
    let line = |(name, values): (&str, [f64; 4])| {
        published_series(name, XEN_QUEUES.into_iter().zip(values.map(|value| value / values[0])))
    };
    let gain = PlotGroup {
        ratio: vec![RowFilter::new(RowKey::Queues, "1")],
        references: XEN_IOPS.map(line).to_vec(),
        ..plot_of(Metric::Iops, RowKey::Queues, &[RowKey::Column])
    };
    let rows = Figure::rows(rows);
    Figure {
        title: "Rings of a Xen disk: IOPS as a ratio to one ring",
        subtitle: "blkif over a simulated Xen, null storage, 4K sequential reads, 16 jobs, iodepth 64, batch 64",
        groups: vec![(rows.clone(), gain), (rows, plot_of(Metric::Cpu, RowKey::Queues, &[RowKey::Column]))],
    }
}
