//! IOPS with one virtqueue and with several, all served by one worker or each by its own. Source: the table sent with
//! the multi-queue patches of QEMU's virtio-blk in 2016: a guest of 4 virtual CPUs, null_blk, with and without
//! "dataplane", a thread that serves the virtqueues. There 4 queues gave 16 percent more with it and 30 percent more
//! without.

use super::published::VIRTIO_QUEUES;
use super::{
    BenchCommand, Claim, Columns, Experiment, ResultTable, cpu_cell, error_cell, estimate_cell, groups, iops_claim,
    iops_ratio, load, needs_cores, prefix, queue_count, ratio_cell,
};
use crate::BenchError;
use crate::plan::{Target, TargetSource};
use crate::plot::{Figure, KeyValue, Metric, PlotGroup, PublishedSeries, RowFilter, RowKey};
use crate::report::ResultRow;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "virtio-queues",
    option: "virtio-queues",
    about: "IOPS with 1 virtqueue and with --queues, with a worker for each queue (dataplane) and with one for all (no-dataplane)",
    document: "virtio-blk multiqueue, 2016",
    needs_disk: false,
    defaults: "--disk storage=null,size=1T --rw randread --bs 4k --iodepth 32 --queues 4 --jobs 4 --runtime 2 --warmup 0.5",
    columns,
    commands: |scale| {
        // The document states an error: at least 5 runs.
        let length = scale.length((1.0, 7), (0.3, 5));
        vec![BenchCommand::new(&format!("--experiment virtio-queues --queues 4 {length}"))]
    },
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
        if !matches!(target.source, TargetSource::Disk { .. }) {
            let expected = "--disk KEY=VALUE,... with it: the workers of a running server do not change";
            return Err(BenchError::option("experiment", "virtio-queues without a disk", expected));
        }
        if let Some(workers) = target.workers {
            return Err(BenchError::option("server-workers", workers, "none: the experiment sets it"));
        }
        let own = prefix(targets, target);
        // One queue twice with the same settings, as in the document: the difference of two equal rows.
        for queues in queues.iter().copied().filter(|queues| *queues > 1).chain([1]) {
            columns.extend(DATAPLANE.map(|word| Target {
                column: Some(format!("{own}{}-{word}", queue_count(queues).replace(' ', "-"))),
                queues: Some(queues),
                workers: Some(if word == DATAPLANE[0] { queues } else { 1 }),
                ..target.clone()
            }));
        }
    }
    Ok(columns)
}

fn is_plain(row: &ResultRow) -> bool {
    row.column.as_deref().is_some_and(|name| name.ends_with(DATAPLANE[1]))
}

/// Returns the document's ratio of 4 queues to 1, and its standard error.
fn published(word: &str) -> (f64, f64) {
    let find = |queues: u16| VIRTIO_QUEUES.iter().find(|(own, count, ..)| (*own, *count) == (word, queues));
    let [many, one] = [find(4), find(1)].map(|row| row.map_or((1.0, 0.0), |(_, _, iops, error)| (*iops, *error)));
    let ratio = many.0 / one.0;
    (ratio, ratio * (many.1 / 100.0).hypot(one.1 / 100.0))
}

fn tables(rows: &[ResultRow]) -> Vec<ResultTable> {
    const HEADINGS: [&str; 10] = [
        "Name",
        "Queues",
        "Workers",
        "IOPS",
        "Error",
        "mq / no-mq (95 %)",
        "2016",
        "CPU us/IO of the server",
        "kicks/IO",
        "calls/IO",
    ];
    let mut tables = vec![];
    for group in groups(rows, load) {
        let mut table = ResultTable::new(load(group[0]), 1, &HEADINGS);
        for row in &group {
            let is_same = |other: &&&ResultRow| {
                other.queues == 1
                    && (&other.target, &other.poll, is_plain(other)) == (&row.target, &row.poll, is_plain(row))
            };
            let one = group.iter().find(is_same).copied().filter(|_| row.queues > 1);
            let document = (row.queues == 4).then(|| published(DATAPLANE[usize::from(is_plain(row))]).0);
            table.rows.push(vec![
                row.column.clone().unwrap_or_default(),
                row.queues.to_string(),
                row.server_workers.map_or("-".into(), |workers| workers.to_string()),
                format!("{:.1}", row.iops_mean),
                error_cell(row),
                estimate_cell(iops_ratio(one.map(|_| *row), one)),
                ratio_cell(document),
                cpu_cell(row.server_cpu_us_per_io),
                format!("{:.3}", row.kicks_per_io),
                format!("{:.3}", row.calls_per_io),
            ]);
        }
        tables.push(table);
    }
    let mut document =
        ResultTable::new("The document's rows: virtio-blk multiqueue, 2016", 1, &["Name", "IOPS", "Error"]);
    for (word, queues, iops, error) in VIRTIO_QUEUES {
        let name = format!("v4-smp-4-{word}{}", if queues == 1 { "-no-mq" } else { "" });
        document.rows.push(vec![name, format!("{iops:.1}"), format!("± {error:.2}%")]);
    }
    tables.push(document);
    tables
}

fn claims(rows: &[ResultRow], cores: usize) -> Vec<Claim> {
    let claim = |what: &str, word: &str, obstacle: Option<String>| {
        let find = |name: String| rows.iter().find(|row| row.column.as_ref() == Some(&name));
        iops_claim(what, published(word).0, find(format!("4-queues-{word}")), find(format!("1-queue-{word}")), obstacle)
    };
    vec![
        claim(
            "IOPS of 4 queues over 1 with a worker for each (dataplane)",
            DATAPLANE[0],
            needs_cores(8, "4 jobs and 4 workers", cores),
        ),
        claim(
            "IOPS of 4 queues over 1 with one worker (no dataplane)",
            DATAPLANE[1],
            needs_cores(5, "4 jobs and a worker", cores),
        ),
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
        metrics: vec![Metric::Iops],
        x: Some(RowKey::Column),
        series: vec![RowKey::Queues],
        ratio: vec![RowFilter::new(RowKey::Queues, "1")],
        references: vec![PublishedSeries { name: "2016: 4 queues".into(), points: points.to_vec(), only: None }],
        ..PlotGroup::default()
    };
    Figure {
        title: "Virtqueues of a virtio-blk disk: IOPS as a ratio to one queue",
        subtitle: "virtio-blk, null storage, 4K random reads, 4 jobs, iodepth 32; dataplane: a worker for each queue",
        groups: vec![(rows, group)],
    }
}
