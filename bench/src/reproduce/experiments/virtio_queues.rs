//! `virtio-queues`: what virtqueues of a virtio-blk disk gain, with one worker and with a worker for each.

use super::{
    BenchCommand, Claim, ExperimentScale, Figure, Reproduction, ResultRow, ResultTable, cpu_cell, estimate_cell,
    iops_claim, iops_ratio, ratio_cell, ratio_error,
};
use crate::plot::figure::{FigureAxis, FigureGroup, FigurePanel, FigurePoint, FigureSeries, Quantity};
use crate::published::VIRTIO_QUEUES;
use crate::reproduce::claim::needs_cores;

/// The experiment.
#[derive(Debug)]
pub(super) struct VirtioQueues;

/// A row of the document, and the column of `mqblk bench --experiment virtio-queues` that is like it.
const ROWS: [(&str, &str); 4] = [
    ("dataplane", "4-queues-dataplane"),
    ("dataplane-no-mq", "1-queue-dataplane"),
    ("no-dataplane", "4-queues-no-dataplane"),
    ("no-dataplane-no-mq", "1-queue-no-dataplane"),
];

fn find<'a>(rows: &'a [ResultRow], column: &str) -> Option<&'a ResultRow> {
    rows.iter().find(|row| row.column.as_deref() == Some(column))
}

/// Returns the row without multi-queue that row `at` is compared to.
fn base_of(at: usize) -> usize {
    at | 1
}

/// Returns the document's ratio of row `at`.
fn published(at: usize) -> f64 {
    VIRTIO_QUEUES[at].2 / VIRTIO_QUEUES[base_of(at)].2
}

impl Reproduction for VirtioQueues {
    fn name(&self) -> &'static str {
        "virtio-queues"
    }

    fn about(&self) -> &'static str {
        "IOPS of a virtio-blk disk with 1 and 4 virtqueues, with one worker (no dataplane) and a worker for each (dataplane)"
    }

    fn document(&self) -> &'static str {
        "virtio-blk multiqueue, 2016"
    }

    fn commands(&self, scale: &ExperimentScale) -> Vec<BenchCommand> {
        // The document has an error, so there are at least 5 runs.
        let length = scale.length((1.0, 7), (0.3, 5));
        vec![BenchCommand::new(&format!("--experiment virtio-queues --queues 4 {length}"))]
    }

    fn tables(&self, rows: &[ResultRow]) -> Vec<ResultTable> {
        let mut form = ResultTable::new(
            "In the document's form: IOPS and their standard error, of this machine",
            1,
            &["Name", "IOPS", "Error"],
        );
        let headings = [
            "Name",
            "queues",
            "workers",
            "mq / no-mq here (95 %)",
            "mq / no-mq 2016",
            "server CPU us/IO",
            "kicks/IO",
            "calls/IO",
        ];
        let mut ratios = ResultTable::new("IOPS, as a ratio to the same without multi-queue", 1, &headings);
        for (at, (name, column)) in ROWS.iter().enumerate() {
            let Some(row) = find(rows, column) else { continue };
            let error = if row.iops_mean > 0.0 { row.iops_stderr / row.iops_mean * 100.0 } else { 0.0 };
            let name = format!("mqblk-jobs-4-{name}");
            form.rows.push(vec![name.clone(), format!("{:.1}", row.iops_mean), format!("± {error:.2}%")]);
            let base = find(rows, ROWS[base_of(at)].1);
            let is_base = base_of(at) == at;
            ratios.rows.push(vec![
                name,
                row.queues.to_string(),
                row.server_workers.map_or("-".into(), |workers| workers.to_string()),
                if is_base { "1.00".into() } else { estimate_cell(iops_ratio(Some(row), base)) },
                ratio_cell(Some(published(at))),
                cpu_cell(row.server_cpu_us_per_io),
                format!("{:.3}", row.kicks_per_io),
                format!("{:.3}", row.calls_per_io),
            ]);
        }
        let mut document =
            ResultTable::new("The document's rows: virtio-blk multiqueue, 2016", 1, &["Name", "IOPS", "Error"]);
        for (name, _, iops, error) in VIRTIO_QUEUES {
            document.rows.push(vec![name.to_owned(), format!("{iops:.1}"), format!("± {error:.2}%")]);
        }
        vec![ratios, form, document]
    }

    fn claims(&self, rows: &[ResultRow], cores: usize) -> Vec<Claim> {
        let claim = |what: &str, at: usize, obstacle: Option<String>| {
            iops_claim(what, published(at), find(rows, ROWS[at].1), find(rows, ROWS[base_of(at)].1), obstacle)
        };
        vec![
            claim(
                "IOPS of 4 queues over 1 with a worker for each (dataplane)",
                0,
                needs_cores(8, "4 jobs and 4 workers", cores),
            ),
            claim(
                "IOPS of 4 queues over 1 with one worker (no dataplane)",
                2,
                needs_cores(5, "4 jobs and a worker", cores),
            ),
        ]
    }

    fn figure(&self, rows: &[ResultRow]) -> Figure {
        let ours = ROWS.iter().enumerate().filter_map(|(at, (_, column))| {
            let (row, base) = (find(rows, column)?, find(rows, ROWS[base_of(at)].1)?);
            let y = iops_ratio(Some(row), Some(base))?.ratio();
            Some(FigurePoint { x: at as f64, y, error: y * ratio_error(row, base) })
        });
        let theirs = (0..ROWS.len()).map(|at| {
            let error = |at: usize| VIRTIO_QUEUES[at].3 / 100.0;
            let error = if base_of(at) == at { 0.0 } else { error(at).hypot(error(base_of(at))) };
            FigurePoint { x: at as f64, y: published(at), error: published(at) * error }
        });
        let series = vec![
            FigureSeries { name: "here".into(), points: ours.collect(), is_reference: false },
            FigureSeries {
                name: "2016, with the document's error".into(),
                points: theirs.collect(),
                is_reference: true,
            },
        ];
        let panel = FigurePanel {
            heading: None,
            x: FigureAxis::names("row of the document's table", ROWS.map(|(name, _)| name.to_owned())),
            y_title: "IOPS, ratio to no-mq".into(),
            y: Quantity::Ratio,
            log: false,
            series,
        };
        Figure {
            title: "Virtqueues of a virtio-blk disk: IOPS as a ratio to one queue".into(),
            subtitle:
                "virtio-blk, null storage, 4K random reads, 4 jobs, iodepth 32; dataplane: a worker for each queue"
                    .into(),
            groups: vec![FigureGroup { panels: vec![panel] }],
        }
    }

    fn notes(&self) -> Vec<&'static str> {
        vec![
            "This is the half with mqblk's userspace driver in the place of a guest. The half in a real guest, beside QEMU's own devices, is scripts/guest-benchmarks.sh.",
            "The document does not show its fio job; here it is 4K random reads, 4 jobs, iodepth 32. Both rows without multi-queue have the same settings here \
             (one queue, one worker): what they differ by is what equal things differ by.",
        ]
    }
}
