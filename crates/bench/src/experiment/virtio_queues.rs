//! IOPS with one virtqueue and with several, all served by one worker or each by its own. Source: the table sent with
//! the multi-queue patches of QEMU's virtio-blk in 2016: a guest of 4 virtual CPUs, null_blk, with and without
//! "dataplane", a thread that serves the virtqueues. There 4 queues gave 16 percent more with it and 30 percent more
//! without.

use super::claim::Claim;
use super::definition::{Columns, Experiment, column, error_cell, iops_ratio_cell, load, plot_of, prefix, queue_count};
use super::estimate::MeasuredMean;
use super::published::VIRTIO_QUEUES;
use crate::BenchError;
use crate::plan::Target;
use crate::plot::{Figure, KeyValue, Metric, PlotGroup, PublishedSeries, RowFilter, RowKey};
use crate::report::ResultRow;
use crate::table::{Column, ResultTable, cpu_cell, groups, or_dash, ratio_cell};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "virtio-queues",
    option: "virtio-queues",
    about: "IOPS with 1 virtqueue and with --queues, with a worker for each queue (dataplane) and with one for all (no-dataplane)",
    document: "virtio-blk multiqueue, 2016",
    defaults: "--disk storage=null,size=1T --rw randread --bs 4k --iodepth 32 --queues 4 --jobs 4 --runtime 2 --warmup 0.5",
    columns,
    loads: |_| vec!["--queues 4".into()],
    // The document states an error: at least 5 runs.
    full: (1.0, 7),
    quick: (0.3, 5),
    tables,
    claims,
    figure,
    notes: &[
        "This is the half with mqblk's userspace driver in the place of a guest. The half in a real guest, beside QEMU's own devices, is scripts/guest-benchmarks.sh.",
        "The document does not show its fio job; here it is 4K random reads, 4 jobs, iodepth 32. Both rows without multi-queue have the same settings here \
         (one queue, one worker): their difference is that of two equal rows.",
    ],
};

/// The document's words, at the end of a column's name: a worker for each queue, and one for all.
const DATAPLANE: [&str; 2] = ["dataplane", "no-dataplane"];

fn columns(queues: &[u16], targets: &[Target]) -> Columns {
    let mut columns = vec![];
    for target in targets {
        if target.spec().is_none() {
            let expected = "--disk KEY=VALUE,... with it: the workers of a running server do not change";
            return Err(BenchError::option("experiment", "virtio-queues without a disk", expected));
        }
        if let Some(workers) = target.workers {
            return Err(BenchError::option("server-workers", workers, "none: the experiment sets it"));
        }
        let own = prefix(targets, target);
        // One queue twice with the same settings, as in the document: the difference of two equal rows.
        for queues in queues.iter().copied().filter(|queues| *queues > 1).chain([1]) {
            let name = queue_count(queues).replace(' ', "-");
            columns.extend(DATAPLANE.map(|word| Target {
                workers: Some(if word == DATAPLANE[0] { queues } else { 1 }),
                ..target.as_column(format!("{own}{name}-{word}"), queues)
            }));
        }
    }
    Ok(columns)
}

fn is_plain(row: &ResultRow) -> bool {
    column(row).ends_with(DATAPLANE[1])
}

/// Returns the document's ratio of 4 queues to 1, and its standard error.
fn published(word: &str) -> (f64, f64) {
    let find = |queues: u16| VIRTIO_QUEUES.iter().find(|(own, count, ..)| (*own, *count) == (word, queues));
    let [many, one] = [find(4), find(1)].map(|row| row.map_or((1.0, 0.0), |(_, _, iops, error)| (*iops, *error)));
    let ratio = many.0 / one.0;
    (ratio, ratio * (many.1 / 100.0).hypot(one.1 / 100.0))
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    let mut tables = vec![];
    for group in groups(rows, load) {
        let ratio = |row: &ResultRow| {
            let is_same = |other: &&ResultRow| {
                other.queues == 1
                    && (&other.target, &other.poll, is_plain(other)) == (&row.target, &row.poll, is_plain(row))
            };
            let one = group.iter().copied().find(is_same).filter(|_| row.queues > 1);
            iops_ratio_cell(one.map(|one| (row, one)))
        };
        let document = |row: &ResultRow| (row.queues == 4).then(|| published(DATAPLANE[usize::from(is_plain(row))]).0);
        let columns: [Column<'_>; 10] = [
            ("Name", &column),
            ("Queues", &|row| row.queues.to_string()),
            ("Workers", &|row| or_dash(row.server_workers)),
            ("IOPS", &|row| format!("{:.1}", row.iops_mean)),
            ("Error", &error_cell),
            ("mq / no-mq (95 %)", &ratio),
            ("2016", &|row| ratio_cell(document(row))),
            ("CPU us/IO of the server", &|row| cpu_cell(row.server_cpu_us_per_io)),
            ("kicks/IO", &|row| format!("{:.3}", row.kicks_per_io)),
            ("calls/IO", &|row| format!("{:.3}", row.calls_per_io)),
        ];
        tables.push(ResultTable::of_rows(load(group[0]), 1, &columns, &group));
    }
    let document = VIRTIO_QUEUES.map(|(word, queues, iops, error)| {
        let name = format!("v4-smp-4-{word}{}", if queues == 1 { "-no-mq" } else { "" });
        vec![name, format!("{iops:.1}"), format!("± {error:.2}%")]
    });
    let title = "The document's rows: virtio-blk multiqueue, 2016";
    tables.push(ResultTable::new(title, 1, &["Name", "IOPS", "Error"], document.to_vec()));
    tables
}

fn claims(rows: &[ResultRow]) -> Vec<Claim> {
    let claim = |what: &str, word: &str| {
        let find = |name: String| rows.iter().find(|row| row.column.as_ref() == Some(&name));
        let pair = find(format!("4-queues-{word}")).zip(find(format!("1-queue-{word}")));
        Claim::new(what, published(word).0, MeasuredMean::iops, pair)
    };
    vec![
        claim("IOPS of 4 queues over 1 with a worker for each (dataplane)", DATAPLANE[0])
            .of_threads(8, "4 jobs and 4 workers"),
        claim("IOPS of 4 queues over 1 with one worker (no dataplane)", DATAPLANE[1])
            .of_threads(5, "4 jobs and a worker"),
    ]
}

fn figure(rows: &[ResultRow]) -> Figure {
    let plain: Vec<bool> = rows.iter().map(is_plain).collect();
    let mut rows = Figure::rows(rows);
    // The bars of a worker for each queue, and of one for all.
    for (row, is_plain) in rows.iter_mut().zip(plain) {
        row.keys[RowKey::Column as usize] = KeyValue::Text(DATAPLANE[usize::from(is_plain)].to_owned());
    }
    let points = DATAPLANE.map(|word| {
        let (ratio, error) = published(word);
        (word.to_owned(), ratio, error)
    });
    let group = PlotGroup {
        ratio: vec![RowFilter::new(RowKey::Queues, "1")],
        references: vec![PublishedSeries { name: "2016: 4 queues".into(), points: points.to_vec(), only: None }],
        ..plot_of(Metric::Iops, RowKey::Column, &[RowKey::Queues])
    };
    Figure {
        title: "Virtqueues of a virtio-blk disk: IOPS as a ratio to one queue",
        subtitle: "virtio-blk, null storage, 4K random reads, 4 jobs, iodepth 32; dataplane: a worker for each queue",
        groups: vec![(rows, group)],
    }
}
