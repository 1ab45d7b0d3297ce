//! IOPS against block size, with one queue and with many. Source: the table sent with the multi-queue xen-blkfront
//! patches in 2015: 8 sequential fio readers, 32 requests in flight each, 512 bytes to 128 KiB. There 8 queues were
//! slower with small blocks than the old single queue, because nothing was merged any more. Here: with and without
//! merging, and up to 4 MiB.

use mqblk_core::ByteLen;

use super::claim::Claim;
use super::definition::{Columns, Experiment, column, plot_of, prefix, published_series, queue_count};
use super::estimate::MeasuredMean;
use super::published::{BLOCK_SIZE_WRITES_4K, BLOCK_SIZES};
use crate::BenchError;
use crate::plan::{Target, value_of};
use crate::plot::{AxisChoice, Figure, KeyValue, Metric, PlotGroup, PlotRow, PublishedSeries, RowFilter, RowKey};
use crate::report::ResultRow;
use crate::table::{Pivot, ResultTable, cpu_cell, groups, mebibytes, or_dash, ratio_cell, with_suffix};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "block-sizes",
    option: "block-size",
    about: "IOPS of sequential streams against block size, 1 queue beside --queues, and those without merging",
    document: "xen-blkfront multi-queue, RFC, 2015",
    defaults: "--rw read --bs 512-4M --iodepth 32 --queues 8 --jobs 8 --runtime 2 --warmup 0.5",
    columns,
    loads,
    full: (0.3, 3),
    quick: (0.12, 2),
    tables,
    claims,
    figure,
    notes: &[
        "In the document the guest's block layer merged, or did not; here the server merges what its guest did not (rrqm/s and wrqm/s are the server's). \
         The document's columns with 1 and 8 queues are without merging, and its third is a single queue that merges.",
        "The document's thread asks whether a larger iodepth-batch brings merging back: in its guest rrqm/s was 0.00 with fio's default of 1. The tables with \
         batch 16 beside those with 1 answer it for this server.",
        "blkif is over the simulated Xen. The disk is the one that the scratch folder is on: if it is shared or its writes are cached, so are these figures.",
    ],
};

/// The document's columns.
const PUBLISHED: [&str; 3] = ["2015: 1 queue", "2015: 8 queues", "2015: merged"];
/// The largest block that the document calls small.
const SMALL: u64 = 4096;

fn columns(queues: &[u16], targets: &[Target]) -> Columns {
    let (disks, peers): (Vec<&Target>, Vec<&Target>) = targets.iter().partition(|target| target.spec().is_some());
    if disks.is_empty() {
        let expected = "--disk KEY=VALUE,... with it: a server that runs already does not change its merging";
        return Err(BenchError::option("experiment", "block-size without a disk", expected));
    }
    let own: Vec<Target> = disks.iter().copied().cloned().collect();
    let mut columns = vec![];
    for disk in disks {
        let own = prefix(&own, disk);
        let name = |queues: u16| format!("{own}{}", queue_count(queues));
        columns.push(with_merging(disk, 1, "on", name(1))?);
        for &queues in queues {
            if queues != 1 {
                columns.push(with_merging(disk, queues, "on", name(queues))?);
            }
            columns.push(with_merging(disk, queues, "off", format!("{} without merging", name(queues)))?);
        }
    }
    for (peer, queues) in peers.iter().flat_map(|peer| queues.iter().map(move |queues| (peer, *queues))) {
        columns.push(peer.as_column(format!("{}, {}", peer.label, queue_count(queues)), queues));
    }
    Ok(columns)
}

/// Returns `disk` with this number of queues and this merging.
fn with_merging(disk: &Target, queues: u16, merge: &str, name: String) -> Result<Target, BenchError> {
    if disk.spec().is_some_and(|spec| value_of(spec, "merge").is_some()) {
        let expected = "one without: the experiment sets it";
        return Err(BenchError::option("disk", "a disk with the key merge", expected));
    }
    Ok(disk.with("merge", merge).as_column(name, queues))
}

fn loads(quick: bool) -> Vec<String> {
    let (all, some) = if quick { ("512,4k,64k,1M", "4k") } else { ("512-4M", "512,4k,32k") };
    let load = |interface: &str, sizes: &str, batch: u16| {
        format!(
            "--interface {interface} --rw read,write --allow-write --bs {sizes} --queues 8 --jobs 8 --iodepth 32 --batch {batch} \
             --label disk --disk path=IMAGE"
        )
    };
    ["virtio-blk", "xen"].iter().flat_map(|interface| [load(interface, all, 1), load(interface, some, 16)]).collect()
}

/// Returns the document's values beside a row.
fn published(row: &ResultRow) -> Option<&'static [f64; 3]> {
    let is_published = (row.rw, row.jobs, row.iodepth, row.batch) == ("read", 8, 32, 1);
    BLOCK_SIZES.iter().find(|line| is_published && line.0 == row.bs).map(|line| &line.1)
}

/// Returns the share of requests that the server merged into others, in percent.
fn merged_percent(row: &ResultRow) -> Option<f64> {
    let merged = row.rrqm_per_s? + row.wrqm_per_s?;
    let requests = row.iops_mean * f64::from(row.requests_per_io);
    (requests > 0.0).then(|| (merged / requests * 100.0).min(100.0))
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    let mut tables = vec![];
    for group in groups(rows, |row| (row.interface, row.rw, row.jobs, row.iodepth, row.batch)) {
        let ResultRow { interface, rw, jobs, iodepth, batch, .. } = group[0];
        let of = format!("{interface}, {rw}, jobs {jobs}, iodepth {iodepth}, batch {batch}");
        let size = |row: &ResultRow| ByteLen(row.bs).to_string();
        let pivot = Pivot { rows: &group, heading: "block_size", line: &size, column: &column, numbers: true };
        let first = column(group[0]);
        let best = |line: &[&ResultRow]| line.iter().map(|row| row.iops_mean).fold(0.0, f64::max);
        let mut to_best = pivot.table("IOPS, as a ratio to the best column of the line", &|row, line| {
            ratio_cell(Some(row.iops_mean / best(line)))
        });
        if group.iter().any(|row| published(row).is_some()) {
            to_best = to_best.with_columns(PUBLISHED, |line| {
                let values = group.iter().find(|row| size(row) == line).and_then(|row| published(row))?;
                let most = values.iter().copied().fold(0.0, f64::max);
                Some(values.map(|value| ratio_cell(Some(value / most))))
            });
        }
        tables.extend([
            pivot.table(format!("IOPS: {of}"), &|row, _| with_suffix(row.iops_mean)),
            pivot.table(format!("IOPS, as a ratio to {first}"), &|row, line| {
                ratio_cell(Some(row.iops_median / line[0].iops_median))
            }),
            to_best,
            pivot.table("MiB/s", &|row, _| mebibytes(row.bw_bytes_per_s)),
        ]);
        let mut merges = |title: &str, rate: fn(&ResultRow) -> Option<f64>| {
            tables.push(pivot.table(format!("{title} merged by the server, and their share"), &|row, _| {
                let share = merged_percent(row).map_or(String::new(), |percent| format!(" ({percent:.0}%)"));
                or_dash(rate(row).map(|rate| format!("{}{share}", with_suffix(rate))))
            }));
        };
        if !rw.ends_with("write") {
            merges("rrqm/s, reads", |row| row.rrqm_per_s);
        }
        if !rw.ends_with("read") {
            merges("wrqm/s, writes", |row| row.wrqm_per_s);
        }
        tables.push(pivot.table("CPU us/IO of the server", &|row, _| cpu_cell(row.server_cpu_us_per_io)));
    }
    tables
}

fn claims(rows: &[ResultRow]) -> Vec<Claim> {
    let find = |interface: &str, rw: &str, bs: u64, queues: u16, merge: &str| {
        let is_found = |row: &&ResultRow| {
            (row.interface, row.rw, row.bs, row.queues, row.batch) == (interface, rw, bs, queues, 1)
                && row.merge == merge
        };
        rows.iter().find(is_found)
    };
    let merging = |interface: &'static str, name: &str| {
        let small = BLOCK_SIZES.iter().filter(|line| line.0 <= SMALL);
        let pair = |bs: u64| find(interface, "read", bs, 8, "on").zip(find(interface, "read", bs, 8, "off"));
        let pairs: Vec<(&ResultRow, &ResultRow)> = small.clone().filter_map(|line| pair(line.0)).collect();
        // Only measured sizes, if there are any.
        let is_compared = |bs: u64| pairs.is_empty() || pairs.iter().any(|(on, _)| on.bs == bs);
        let documents = small.filter(|line| is_compared(line.0)).map(|(_, values)| (values[2] / values[1]).ln());
        let documents: Vec<f64> = documents.collect();
        let published = (documents.iter().sum::<f64>() / documents.len() as f64).exp();
        let what = format!("IOPS of 8 queues with merging over 8 without ({name}, reads of up to 4K)");
        Claim::new(what, published, MeasuredMean::iops, pairs)
    };
    let small = BLOCK_SIZES.iter().find(|line| line.0 == SMALL).map_or([1.0; 3], |line| line.1);
    let queues = |rw: &str, [one, many]: [f64; 2]| {
        let of = |queues: u16| find("xen", rw, SMALL, queues, "on");
        let what = format!("IOPS of 8 queues over 1 (blkif, {rw}s of 4K)");
        Claim::new(what, many / one, MeasuredMean::iops, of(8).zip(of(1)))
            .of_threads(16, "8 queues with a thread at each end")
    };
    vec![
        merging("xen", "blkif"),
        merging("virtio-blk", "virtio-blk"),
        queues("read", [small[0], small[1]]),
        queues("write", BLOCK_SIZE_WRITES_4K),
    ]
}

fn figure(rows: &[ResultRow]) -> Figure {
    let rows = Figure::rows(rows);
    let only = |passes: &dyn Fn(&PlotRow) -> bool| rows.iter().filter(|row| passes(row)).cloned().collect::<Vec<_>>();
    let group = |metric: Metric, series: &[RowKey]| PlotGroup {
        panels: vec![RowKey::Interface, RowKey::Rw],
        ..plot_of(metric, RowKey::Bs, series)
    };
    let line = |column: usize| PublishedSeries {
        only: Some(RowFilter::new(RowKey::Rw, "read")),
        ..published_series(
            PUBLISHED[column],
            BLOCK_SIZES.iter().map(|(bs, values)| (ByteLen(*bs).to_string(), values[column] / values[0])),
        )
    };
    let ratios = PlotGroup {
        ratio: vec![RowFilter::new(RowKey::Column, "1 queue")],
        references: vec![line(1), line(2)],
        scale: AxisChoice::Log,
        ..group(Metric::Iops, &[RowKey::Column])
    };
    // Both batches in one panel: the thread asks if the larger one restores merging. Without merging there is nothing
    // to see.
    let merges = PlotGroup { scale: AxisChoice::Linear, ..group(Metric::Merges, &[RowKey::Batch, RowKey::Column]) };
    Figure {
        title: "Sequential streams by block size: IOPS as a ratio to one queue",
        subtitle: "8 jobs, iodepth 32, iodepth-batch 1, a file on a disk with O_DIRECT; 2015: merged is the frontend without multi-queue",
        groups: vec![
            (only(&|row| *row.key(RowKey::Batch) == KeyValue::Number(1)), ratios),
            (only(&|row| row.text(RowKey::Merge) == "on"), merges),
        ],
    }
}
