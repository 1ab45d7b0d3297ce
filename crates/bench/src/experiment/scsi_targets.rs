//! Bandwidth against targets, with one request queue and with many. Source: the tables sent with the multi-queue
//! virtio-scsi patches in 2012: fio reads in sequence, blocks of 4 to 64 KiB, 4 requests in flight for each of up to 32
//! disks on tmpfs, one logical unit a target. There many queues gave 30 to 90 percent more from 4 targets on, and lost
//! 6 to 13 percent from 16 to 32.

use super::claim::Claim;
use super::definition::{Columns, Experiment, column, plot_of, prefix, published_series, queue_count};
use super::estimate::MeasuredMean;
use super::published::{SCSI_BANDWIDTH, SCSI_COLUMNS, ScsiBandwidth};
use crate::columns::block_size;
use crate::plan::Target;
use crate::plot::{AxisChoice, Figure, Metric, PlotGroup, RowFilter, RowKey};
use crate::report::ResultRow;
use crate::table::{Pivot, ResultTable, cpu_cell, groups, or_dash, ratio_cell, three_digits};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "scsi-targets",
    option: "targets",
    about: "bandwidth of sequential streams against virtio-scsi targets, over all and of each, a column for each of --queues",
    document: "virtio-scsi multiqueue, 2012",
    // In memory as there, and small enough for 32. Memory that was never written is one page of zeroes.
    defaults: "--interface virtio-scsi --targets 1,2,4,8,16,24,32 --disk storage=ram,size=64M --fill --rw read --bsrange 4k-64k --iodepth 4 \
               --queues 1,2,4,8 --runtime 2 --warmup 0.5",
    columns,
    loads,
    full: (0.5, 3),
    quick: (0.15, 2),
    tables,
    claims,
    figure,
    notes: &[
        "The document's columns are a single queue, and as many queues as the guest's 4 and 8 virtual CPUs; here 1, 4 and 8 queues with a thread each.",
        "Steering by target is the document's rule: a target stays on a queue while it has commands in flight.",
    ],
};

/// The document's columns, as numbers of queues.
const QUEUES: [u16; 3] = [1, 4, 8];
/// Steering policies; the document's first.
const STEERING: [&str; 3] = ["target", "submitter", "fixed"];

fn columns(queues: &[u16], targets: &[Target]) -> Columns {
    let column = |target: &Target, queues: u16| {
        target.as_column(format!("{}{}", prefix(targets, target), queue_count(queues)), queues)
    };
    Ok(targets.iter().flat_map(|target| queues.iter().map(|queues| column(target, *queues))).collect())
}

fn loads(quick: bool) -> Vec<String> {
    let (targets, size) = if quick { ("1,4,8,16,32", "8M") } else { ("1,2,4,8,16,24,32", "32M") };
    let load =
        |steer: &str| format!("--disk storage=ram,size={size} --targets {targets} --queues 1,4,8 --steer {steer}");
    STEERING.map(load).to_vec()
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    let disks = |row: &ResultRow| u32::from(row.targets.unwrap_or(1)) * u32::from(row.luns.unwrap_or(1));
    let is_own_job = |row: &ResultRow| u32::from(row.jobs) == disks(row);
    // By default there are as many jobs as disks.
    let load = |row: &ResultRow| {
        let jobs = if is_own_job(row) { String::new() } else { format!(", jobs {}", row.jobs) };
        let luns = row.luns.filter(|luns| *luns > 1).map_or(String::new(), |luns| format!(", {luns} LUNs each"));
        format!("{} bs {}, iodepth {}, batch {}{jobs}{luns}", row.rw, block_size(row), row.iodepth, row.batch)
    };
    let mut tables = vec![];
    for group in groups(rows, load) {
        let load = load(group[0]);
        let is_published = load == "read bs 4K-64K, iodepth 4, batch 1";
        let several = group.iter().any(|row| row.steer != group[0].steer);
        let heading = |row: &ResultRow| match row.steer.filter(|_| several) {
            Some(steer) => format!("{}, {steer}", column(row)),
            None => column(row),
        };
        let targets = |row: &ResultRow| row.targets.unwrap_or(1).to_string();
        let pivot = Pivot { rows: &group, heading: "# of targets", line: &targets, column: &heading, numbers: true };
        let with_document = |table: ResultTable, cells: &dyn Fn(&ScsiBandwidth) -> [String; 3]| {
            let published = |line: &str| SCSI_BANDWIDTH.iter().find(|own| own.0.to_string() == line);
            if is_published { table.with_columns(SCSI_COLUMNS, |line| published(line).map(cells)) } else { table }
        };
        let whole = |value: f64| format!("{value:.0}");
        let megabytes = |bytes: f64| three_digits(bytes / 1e6);
        // The first column of the same steering.
        let first = |row: &ResultRow, rows: &[&ResultRow]| {
            rows.iter().find(|other| other.steer == row.steer).map(|row| row.bw_bytes_per_s)
        };
        let share = |row: &ResultRow| row.lun_bw_bytes_per_s;
        let single = |row: &ResultRow| {
            let is_single = |other: &&&ResultRow| (other.steer, other.targets) == (row.steer, Some(1));
            group.iter().find(is_single).and_then(|other| share(other))
        };
        let name = column(group[0]);
        tables.extend([
            with_document(
                pivot.table(format!("overall bandwidth (MB/s): {load}"), &|row, _| megabytes(row.bw_bytes_per_s)),
                &|own| own.1.map(whole),
            ),
            with_document(
                pivot.table("avg bandwidth per LUN (MB/s)", &|row, _| or_dash(share(row).map(megabytes))),
                &|own| own.2.map(whole),
            ),
            with_document(
                pivot.table(format!("overall bandwidth, as a ratio to {name} with as many targets"), &|row, line| {
                    ratio_cell(first(row, line).map(|first| row.bw_bytes_per_s / first))
                }),
                &|own| own.1.map(|value| ratio_cell(Some(value / own.1[0]))),
            ),
            with_document(
                pivot.table(format!("avg bandwidth per LUN, as a ratio to one target with {name}"), &|row, _| {
                    ratio_cell(share(row).zip(single(row)).map(|(own, one)| own / one))
                }),
                &|own| own.2.map(|value| ratio_cell(Some(value / SCSI_BANDWIDTH[0].2[0]))),
            ),
            pivot.table("the slowest LUN, as a ratio to the average", &|row, _| {
                ratio_cell(row.lun_bw_min_bytes_per_s.zip(share(row)).map(|(least, mean)| least / mean))
            }),
            pivot.table("CPU us/IO of the server", &|row, _| cpu_cell(row.server_cpu_us_per_io)),
        ]);
    }
    tables
}

fn claims(rows: &[ResultRow]) -> Vec<Claim> {
    let find = |(targets, column): (u16, usize)| {
        let own = |row: &&ResultRow| (row.steer, row.targets, row.queues);
        rows.iter().find(|row| own(row) == (Some(STEERING[0]), Some(targets), QUEUES[column]))
    };
    let published = |(targets, column): (u16, usize)| {
        SCSI_BANDWIDTH.iter().find(|line| line.0 == targets).map_or(1.0, |line| line.1[column])
    };
    let claim = |what: &str, value: (u16, usize), base: (u16, usize)| {
        Claim::new(what, published(value) / published(base), MeasuredMean::bandwidth, find(value).zip(find(base)))
    };
    vec![
        claim("bandwidth of 4 queues over one with 8 targets", (8, 1), (8, 0))
            .of_threads(8, "4 queues with a thread at each end"),
        claim("bandwidth of 8 queues over one with 32 targets", (32, 2), (32, 0))
            .of_threads(16, "8 queues with a thread at each end"),
        claim("bandwidth of 32 targets over 16 with 4 queues", (32, 1), (16, 1)),
    ]
}

fn figure(rows: &[ResultRow]) -> Figure {
    let line = |column: usize| {
        let points = SCSI_BANDWIDTH.iter().map(|own| (own.0, own.1[column] / SCSI_BANDWIDTH[0].1[0]));
        published_series(SCSI_COLUMNS[column], points)
    };
    let group = PlotGroup {
        panels: vec![RowKey::Steer],
        ratio: vec![RowFilter::new(RowKey::Targets, "1"), RowFilter::new(RowKey::Queues, "1")],
        scale: AxisChoice::Log,
        references: [0, 1, 2].map(line).to_vec(),
        ..plot_of(Metric::Bandwidth, RowKey::Targets, &[RowKey::Queues])
    };
    Figure {
        title: "virtio-scsi targets: bandwidth as a ratio to one target and one queue",
        subtitle: "virtio-scsi, disks in memory, sequential reads of 4K to 64K, iodepth 4, a job on each target",
        groups: vec![(Figure::rows(rows), group)],
    }
}
