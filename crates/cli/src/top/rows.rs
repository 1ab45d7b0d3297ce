//! The tables, and their rows.

use crate::stat::columns::{COLUMNS, IoColumn, columns_within, lun_as_io, percent, rate};
use crate::stat::rates::{ControllerRates, IoRates, QueueRates, Report, TurnRates, WorkerRates};

/// A table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TopView {
    /// Disks, controllers and LUNs.
    Disks,
    /// Their queues.
    Queues,
    /// The worker threads.
    Workers,
}

impl TopView {
    pub(super) const ALL: [TopView; 3] = [TopView::Disks, TopView::Queues, TopView::Workers];

    /// Returns its title.
    pub(super) fn title(self) -> &'static str {
        match self {
            TopView::Disks => "disks",
            TopView::Queues => "queues",
            TopView::Workers => "workers",
        }
    }

    /// Returns its place in [`TopView::ALL`].
    pub(super) fn index(self) -> usize {
        TopView::ALL.iter().position(|view| *view == self).unwrap_or(0)
    }
}

/// The sort key of rows besides columns.
pub(super) const NAME: &str = "name";

/// A row, before the width of the terminal is known.
pub(super) struct DataRow {
    /// Unique in its table.
    pub(super) name: String,
    /// The subject for `mqblk explain`.
    pub(super) subject: Option<String>,
    /// True if it was idle.
    pub(super) is_idle: bool,
    pub(super) values: RowValues,
}

/// The values of a row. `None`: unknown.
pub(super) enum RowValues {
    Io(Option<IoRates>),
    Lun(Option<crate::stat::rates::LunIoRates>),
    Worker { rates: Option<TurnRates>, queues: u32, devices: String },
}

/// A column of workers.
struct WorkerColumn {
    name: &'static str,
    width: usize,
    value: fn(&TurnRates) -> f64,
    format: fn(f64) -> String,
}

const WORKER_COLUMNS: &[WorkerColumn] = &[
    WorkerColumn { name: "%cpu", width: 5, value: |it| it.cpu_percent, format: percent },
    WorkerColumn { name: "%asleep", width: 7, value: |it| it.slept_percent, format: percent },
    WorkerColumn { name: "turns/s", width: 8, value: |it| it.turns_per_s, format: rate },
    WorkerColumn { name: "empty/s", width: 8, value: |it| it.empty_turns_per_s, format: rate },
    WorkerColumn { name: "sleeps/s", width: 8, value: |it| it.sleeps_per_s, format: rate },
];

/// Returns the names of a view's sort columns.
pub(super) fn sort_names(view: TopView) -> Vec<&'static str> {
    let columns: Vec<&str> = match view {
        TopView::Disks | TopView::Queues => COLUMNS.iter().map(|column| column.name).collect(),
        TopView::Workers => WORKER_COLUMNS.iter().map(|column| column.name).collect(),
    };
    [NAME].into_iter().chain(columns).collect()
}

/// Returns the headings that fit into `room`, each with its width.
pub(super) fn headings(view: TopView, room: usize) -> Vec<(&'static str, usize)> {
    match view {
        TopView::Disks | TopView::Queues => io_columns(room).iter().map(|column| (column.name, column.width)).collect(),
        TopView::Workers => {
            let columns = WORKER_COLUMNS.iter().map(|column| (column.name, column.width));
            columns.chain([("queues", 6), ("of", room.saturating_sub(52))]).collect()
        }
    }
}

fn io_columns(room: usize) -> Vec<&'static IoColumn> {
    // Columns that appear and disappear would move the others.
    columns_within(room, &["d/s"])
}

impl DataRow {
    /// Returns its cells, one for each of [`headings`].
    pub(super) fn cells(&self, room: usize) -> Vec<String> {
        match &self.values {
            RowValues::Io(rates) => io_columns(room).iter().map(|column| column.cell(rates.as_ref())).collect(),
            RowValues::Lun(rates) => io_columns(room).iter().map(|column| column.lun_cell(rates.as_ref())).collect(),
            RowValues::Worker { rates, queues, devices } => {
                let cell = |column: &WorkerColumn| {
                    rates.as_ref().map_or("-".to_owned(), |rates| (column.format)((column.value)(rates)))
                };
                WORKER_COLUMNS.iter().map(cell).chain([queues.to_string(), devices.clone()]).collect()
            }
        }
    }

    fn sort_value(&self, column: &str) -> Option<f64> {
        let io = |rates: &IoRates| COLUMNS.iter().find(|it| it.name == column).and_then(|it| (it.value)(rates));
        match &self.values {
            RowValues::Io(rates) => rates.as_ref().and_then(io),
            RowValues::Lun(rates) => rates.as_ref().map(lun_as_io).as_ref().and_then(io),
            RowValues::Worker { rates, .. } => {
                let found = WORKER_COLUMNS.iter().find(|it| it.name == column)?;
                rates.as_ref().map(found.value)
            }
        }
    }
}

/// Sorts rows: by a column the largest first, by name ascending. Rows of equal values are sorted by name.
pub(super) fn sort(rows: &mut [DataRow], column: &str, reverse: bool) {
    rows.sort_by(|one, other| {
        let value = |row: &DataRow| row.sort_value(column).unwrap_or(-1.0);
        let by_value = if column == NAME { std::cmp::Ordering::Equal } else { value(other).total_cmp(&value(one)) };
        let order = by_value.then_with(|| one.name.cmp(&other.name));
        if reverse { order.reverse() } else { order }
    });
}

fn is_idle(rates: Option<&IoRates>) -> bool {
    rates.is_some_and(|rates| {
        rates.reads_per_s + rates.writes_per_s + rates.discards_per_s + rates.flushes_per_s <= 0.0
            && rates.in_flight == 0
    })
}

fn io_row(name: String, subject: &str, rates: Option<IoRates>) -> DataRow {
    DataRow { name, subject: Some(subject.to_owned()), is_idle: is_idle(rates.as_ref()), values: RowValues::Io(rates) }
}

/// Returns the rows of disks, controllers and LUNs.
pub(super) fn devices(report: &Report) -> Vec<DataRow> {
    let mut rows: Vec<_> = report.disks.iter().map(|disk| io_row(disk.id.clone(), &disk.id, disk.totals)).collect();
    for ControllerRates { id, totals, luns, .. } in &report.controllers {
        rows.push(io_row(id.clone(), id, *totals));
        rows.extend(luns.iter().map(|lun| DataRow {
            name: lun.id.clone(),
            subject: Some(lun.id.clone()),
            is_idle: is_idle(lun.rates.as_ref().map(lun_as_io).as_ref()),
            values: RowValues::Lun(lun.rates),
        }));
    }
    rows
}

/// Returns the rows of queues.
pub(super) fn queues(report: &Report) -> Vec<DataRow> {
    let row = |id: &str, queue: &QueueRates| {
        let role = if queue.role == "request" { format!("q{:<3}", queue.queue) } else { queue.role.clone() };
        io_row(format!("{id} {role} w{}", queue.worker), id, queue.rates)
    };
    let disks = report.disks.iter().flat_map(|disk| disk.queues.iter().map(move |queue| row(&disk.id, queue)));
    let controllers = report.controllers.iter().flat_map(|it| it.queues.iter().map(move |queue| row(&it.id, queue)));
    disks.chain(controllers).collect()
}

/// Returns the rows of workers, with the devices whose queues they serve.
pub(super) fn workers(report: &Report) -> Vec<DataRow> {
    let row = |worker: &WorkerRates| {
        let is_own = |queue: &QueueRates| queue.worker == worker.worker;
        let disks = report.disks.iter().filter(|disk| disk.queues.iter().any(is_own)).map(|disk| disk.id.as_str());
        let controllers = report.controllers.iter().filter(|one| one.queues.iter().any(is_own));
        let devices: Vec<&str> = disks.chain(controllers.map(|one| one.id.as_str())).collect();
        DataRow {
            name: format!("worker {}", worker.worker),
            subject: None,
            is_idle: worker.rates.is_some_and(|rates| rates.turns_per_s <= 0.0),
            values: RowValues::Worker { rates: worker.rates, queues: worker.queues, devices: devices.join(", ") },
        }
    };
    report.workers.iter().map(row).collect()
}
