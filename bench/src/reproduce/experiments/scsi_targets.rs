//! `scsi-targets`: bandwidth of virtio-scsi targets, with one request queue and with many.

use super::{
    BenchCommand, Claim, ExperimentScale, Figure, MeasuredMean, RatioEstimate, Reproduction, ResultRow, ResultTable,
    ratio_cell,
};
use crate::plot::figure::{FigureAxis, FigureGroup, FigurePanel, FigurePoint, FigureSeries, Quantity};
use crate::published::{SCSI_BANDWIDTH, SCSI_COLUMNS};
use crate::reproduce::claim::needs_cores;

/// The experiment.
#[derive(Debug)]
pub(super) struct ScsiTargets;

/// The document's columns, as numbers of queues.
const QUEUES: [u16; 3] = [1, 4, 8];
/// Steering policies; the document's first.
const STEERING: [&str; 3] = ["target", "submitter", "fixed"];

fn find<'a>(rows: &'a [ResultRow], steer: &str, targets: u16, queues: u16) -> Option<&'a ResultRow> {
    rows.iter().find(|row| (row.steer, row.targets, row.queues) == (Some(steer), Some(targets), queues))
}

/// Returns the numbers of targets in the rows.
fn counts(rows: &[ResultRow]) -> Vec<u16> {
    let mut counts: Vec<u16> = rows.iter().filter_map(|row| row.targets).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

fn published(targets: u16) -> Option<(&'static [f64; 3], &'static [f64; 3])> {
    SCSI_BANDWIDTH.iter().find(|line| line.0 == targets).map(|line| (&line.1, &line.2))
}

fn ratio(value: Option<&ResultRow>, base: Option<&ResultRow>) -> Option<RatioEstimate> {
    RatioEstimate::of(&[(MeasuredMean::bandwidth(value?), MeasuredMean::bandwidth(base?))])
}

fn headings(queues: bool) -> Vec<String> {
    let ours = STEERING.iter().flat_map(|steer| {
        QUEUES.iter().map(move |queues| format!("{queues} {}, {steer}", if *queues == 1 { "queue" } else { "queues" }))
    });
    let theirs = SCSI_COLUMNS.iter().map(|name| (*name).to_owned()).filter(|_| queues);
    std::iter::once("# of targets".to_owned()).chain(ours).chain(theirs).collect()
}

/// Returns a table with a line for each number of targets, our columns, and the document's if `theirs` has them.
fn table(
    rows: &[ResultRow],
    title: &str,
    ours: &dyn Fn(&ResultRow) -> String,
    theirs: Option<&dyn Fn(u16, usize) -> String>,
) -> ResultTable {
    let mut table = ResultTable::new(title, 0, &[]);
    table.headings = headings(theirs.is_some());
    for targets in counts(rows) {
        let cells = STEERING.iter().flat_map(|steer| {
            QUEUES.iter().map(|queues| find(rows, steer, targets, *queues).map_or("-".into(), ours)).collect::<Vec<_>>()
        });
        let mut line: Vec<String> = std::iter::once(targets.to_string()).chain(cells).collect();
        if let Some(theirs) = theirs {
            line.extend((0..SCSI_COLUMNS.len()).map(|column| theirs(targets, column)));
        }
        table.rows.push(line);
    }
    table
}

impl Reproduction for ScsiTargets {
    fn name(&self) -> &'static str {
        "scsi-targets"
    }

    fn about(&self) -> &'static str {
        "bandwidth of 1 to 32 virtio-scsi targets with 1, 4 and 8 request queues, over all and of each, by steering policy"
    }

    fn document(&self) -> &'static str {
        "virtio-scsi multiqueue, 2012"
    }

    fn commands(&self, scale: &ExperimentScale) -> Vec<BenchCommand> {
        let length = scale.length((0.5, 3), (0.15, 2));
        // Disks in memory, as there; the document's tmpfs is filled, and so are these.
        let (targets, size) = if scale.quick { ("1,4,8,16,32", "8M") } else { ("1,2,4,8,16,24,32", "32M") };
        let command = |steer: &str| {
            BenchCommand::new(&format!(
                "--experiment targets --disk storage=ram,size={size} --targets {targets} --queues 1,4,8 --steer {steer} {length}"
            ))
        };
        STEERING.map(command).to_vec()
    }

    fn tables(&self, rows: &[ResultRow]) -> Vec<ResultTable> {
        let single = |row: &ResultRow| find(rows, row.steer.unwrap_or_default(), row.targets.unwrap_or(1), 1);
        let gain = |row: &ResultRow| ratio_cell(ratio(Some(row), single(row)).map(RatioEstimate::ratio));
        let gain_published = |targets: u16, column: usize| {
            ratio_cell(published(targets).map(|(overall, _)| overall[column] / overall[0]))
        };
        let first = |row: &ResultRow| find(rows, row.steer.unwrap_or_default(), 1, 1);
        let each = |row: &ResultRow| {
            let share = |row: &ResultRow| row.lun_bw_bytes_per_s;
            ratio_cell(share(row).zip(first(row).and_then(share)).map(|(own, one)| own / one))
        };
        let each_published = |targets: u16, column: usize| {
            ratio_cell(published(targets).zip(published(1)).map(|((_, own), (_, one))| own[column] / one[0]))
        };
        let megabytes = |bytes: f64| crate::grid::three_digits(bytes / 1e6);
        let slowest = |row: &ResultRow| {
            ratio_cell(row.lun_bw_min_bytes_per_s.zip(row.lun_bw_bytes_per_s).map(|(least, mean)| least / mean))
        };
        vec![
            table(
                rows,
                "Overall bandwidth, as a ratio to the single queue with as many targets",
                &gain,
                Some(&gain_published),
            ),
            table(
                rows,
                "Average bandwidth per LUN, as a ratio to one target with the single queue",
                &each,
                Some(&each_published),
            ),
            table(rows, "Overall bandwidth of this machine (MB/s)", &|row| megabytes(row.bw_bytes_per_s), None),
            table(
                rows,
                "Average bandwidth per LUN of this machine (MB/s)",
                &|row| row.lun_bw_bytes_per_s.map_or("-".into(), megabytes),
                None,
            ),
            table(rows, "The slowest LUN, as a ratio to the average", &slowest, None),
        ]
    }

    fn claims(&self, rows: &[ResultRow], cores: usize) -> Vec<Claim> {
        let at = |targets: u16, queues: u16| find(rows, STEERING[0], targets, queues);
        let of = |targets: u16, column: usize| published(targets).map_or(1.0, |(overall, _)| overall[column]);
        let claim = |what: &str, value: (u16, usize), base: (u16, usize), obstacle: Option<String>| {
            let [value_row, base_row] = [value, base].map(|(targets, column)| at(targets, QUEUES[column]));
            Claim {
                what: what.to_owned(),
                published: of(value.0, value.1) / of(base.0, base.1),
                measured: ratio(value_row, base_row),
                obstacle,
                failed: [value_row, base_row].into_iter().flatten().map(|row| row.errors).sum(),
            }
        };
        vec![
            claim(
                "bandwidth of 4 queues over one with 8 targets",
                (8, 1),
                (8, 0),
                needs_cores(8, "4 queues with a thread at each end", cores),
            ),
            claim(
                "bandwidth of 8 queues over one with 32 targets",
                (32, 2),
                (32, 0),
                needs_cores(16, "8 queues with a thread at each end", cores),
            ),
            claim("bandwidth of 32 targets over 16 with 4 queues", (32, 1), (16, 1), None),
        ]
    }

    fn figure(&self, rows: &[ResultRow]) -> Figure {
        let counts = counts(rows);
        let at = |targets: u16| f64::from(targets).log2();
        let panel = |steer: &str| {
            let base = find(rows, steer, 1, 1);
            let ours = QUEUES.iter().map(|queues| {
                let points = counts.iter().filter_map(|targets| {
                    let (row, base) = (find(rows, steer, *targets, *queues)?, base?);
                    let y = row.bw_bytes_per_s / base.bw_bytes_per_s;
                    let relative = |row: &ResultRow| row.bw_stderr / row.bw_bytes_per_s;
                    let error = if std::ptr::eq(row, base) { 0.0 } else { relative(row).hypot(relative(base)) };
                    y.is_finite().then_some(FigurePoint { x: at(*targets), y, error: y * error })
                });
                let name = format!("{queues} {}", if *queues == 1 { "queue" } else { "queues" });
                FigureSeries { name, points: points.collect(), is_reference: false }
            });
            let theirs = SCSI_COLUMNS.iter().enumerate().map(|(column, name)| {
                let lines = SCSI_BANDWIDTH.iter().filter(|line| counts.contains(&line.0));
                let points = lines.map(|line| FigurePoint::exact(at(line.0), line.1[column] / SCSI_BANDWIDTH[0].1[0]));
                FigureSeries { name: (*name).to_owned(), points: points.collect(), is_reference: true }
            });
            FigurePanel {
                heading: Some(format!("steering: {steer}")),
                x: FigureAxis::numbers(
                    "targets, one LUN each",
                    counts.iter().map(|count| (at(*count), count.to_string())),
                ),
                y_title: "bandwidth (ratio)".into(),
                y: Quantity::Ratio,
                log: true,
                series: ours.chain(theirs).collect(),
            }
        };
        Figure {
            title: "virtio-scsi targets: bandwidth as a ratio to one target and one queue".into(),
            subtitle: "virtio-scsi, disks in memory, sequential reads of 4K to 64K, iodepth 4, a job on each target"
                .into(),
            groups: vec![FigureGroup { panels: STEERING.map(panel).to_vec() }],
        }
    }

    fn notes(&self) -> Vec<&'static str> {
        vec![
            "The document's columns are a single queue, and as many queues as the guest's 4 and 8 virtual CPUs; here 1, 4 and 8 queues with a thread each.",
            "Steering by target is the document's rule: a target stays on a queue while it has commands in flight.",
        ]
    }
}
