//! The keys of rows: which vary, which are constant, and how both are named.

use std::collections::{HashMap, HashSet};
use std::fmt;

use clap::ValueEnum;
use mqblk_core::ByteLen;

use super::rows::PlotRow;
use crate::args::IoSizes;

/// A key of a row that says how it was measured. The order is that of the names of series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum RowKey {
    /// The target's label.
    Target,
    /// What was done: read, randwrite, ...
    Rw,
    /// The operation of a time series: reads or writes alone.
    Op,
    /// Bytes of a request.
    Bs,
    /// Targets of a controller.
    Targets,
    /// Logical units of each target.
    Luns,
    /// Queues.
    Queues,
    /// Jobs.
    Jobs,
    /// Requests in flight of each job.
    Iodepth,
    /// Requests submitted and waited for at once.
    Batch,
    /// I/Os per second that each job starts.
    RateIops,
    /// Writes after which a job flushes.
    Fsync,
    /// Which blocks a random load prefers.
    Distribution,
    /// The queue that a command of a controller is put on.
    Steer,
    /// The server's poll policy.
    Poll,
    /// Request merging in the server.
    Merge,
    /// What the server does with granted pages.
    Grants,
    /// Whose the granted pages are that it keeps.
    GrantsPool,
    /// Pages of a ring, as a power of two's exponent.
    RingOrder,
    /// Layout of a ring's requests.
    Abi,
    /// Worker threads of the server.
    Workers,
    /// Storage backend.
    Storage,
    /// Microseconds that the storage takes, if that is set.
    Latency,
    /// Guest interface.
    Interface,
    /// Name of the experiment.
    Experiment,
    /// The run of a time series.
    Run,
    /// Result file.
    File,
    /// Number of the measurement among equal ones of the same file.
    #[value(skip)]
    Repeat,
}

/// All keys, in the order of the names of series.
pub(super) const ROW_KEYS: [RowKey; 28] = [
    RowKey::Target,
    RowKey::Rw,
    RowKey::Op,
    RowKey::Bs,
    RowKey::Targets,
    RowKey::Luns,
    RowKey::Queues,
    RowKey::Jobs,
    RowKey::Iodepth,
    RowKey::Batch,
    RowKey::RateIops,
    RowKey::Fsync,
    RowKey::Distribution,
    RowKey::Steer,
    RowKey::Poll,
    RowKey::Merge,
    RowKey::Grants,
    RowKey::GrantsPool,
    RowKey::RingOrder,
    RowKey::Abi,
    RowKey::Workers,
    RowKey::Storage,
    RowKey::Latency,
    RowKey::Interface,
    RowKey::Experiment,
    RowKey::Run,
    RowKey::File,
    RowKey::Repeat,
];

/// What a row says of a key that it does not have.
pub(super) const UNKNOWN: &str = "unknown";

/// Value of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum KeyValue {
    /// A count, or bytes.
    Number(u64),
    /// Anything else.
    Text(String),
}

impl RowKey {
    /// Returns true if its values are numbers, which have positions on an axis.
    pub(super) fn is_numeric(self) -> bool {
        matches!(
            self,
            RowKey::Bs
                | RowKey::Targets
                | RowKey::Luns
                | RowKey::Queues
                | RowKey::Jobs
                | RowKey::Iodepth
                | RowKey::Batch
                | RowKey::RateIops
                | RowKey::Fsync
                | RowKey::RingOrder
                | RowKey::Workers
                | RowKey::Latency
                | RowKey::Run
        )
    }

    /// Returns its value in `row`; 1 for [`RowKey::Repeat`], which a row does not have.
    pub(super) fn value(self, row: &PlotRow) -> KeyValue {
        let text = |text: &str| KeyValue::Text(text.to_owned());
        let number = |number: Option<u64>| number.map_or(KeyValue::Text(UNKNOWN.to_owned()), KeyValue::Number);
        match self {
            RowKey::Target => text(&row.target),
            RowKey::Rw => text(&row.rw),
            RowKey::Op => text(&row.op),
            RowKey::Bs if row.bs_max > row.bs => {
                KeyValue::Text(IoSizes { min: ByteLen(row.bs), max: ByteLen(row.bs_max) }.to_string())
            }
            RowKey::Bs => KeyValue::Number(row.bs),
            RowKey::Targets => KeyValue::Number(row.targets),
            RowKey::Luns => KeyValue::Number(row.luns),
            RowKey::Queues => KeyValue::Number(row.queues),
            RowKey::Jobs => KeyValue::Number(row.jobs),
            RowKey::Iodepth => KeyValue::Number(row.iodepth),
            RowKey::Batch => KeyValue::Number(row.batch),
            RowKey::RateIops => number(row.rate_iops),
            RowKey::Fsync => number(row.fsync),
            RowKey::Distribution => text(&row.distribution),
            RowKey::Steer => text(&row.steer),
            RowKey::Poll => text(&row.poll),
            RowKey::Merge => text(&row.merge),
            RowKey::Grants => text(&row.grants),
            RowKey::GrantsPool => text(&row.grants_pool),
            RowKey::RingOrder => number(row.ring_order),
            RowKey::Abi => text(&row.abi),
            RowKey::Workers => number(row.workers),
            RowKey::Storage => text(&row.storage),
            RowKey::Latency => number(row.storage_latency),
            RowKey::Interface => text(&row.interface),
            RowKey::Experiment => text(row.experiment.as_deref().unwrap_or("no experiment")),
            RowKey::Run => number(row.run),
            RowKey::File => text(&row.file),
            RowKey::Repeat => KeyValue::Number(1),
        }
    }

    /// Returns a value as a label of an axis that names the key.
    pub(super) fn tick(self, value: &KeyValue) -> String {
        match (self, value) {
            (RowKey::Bs, KeyValue::Number(bytes)) => ByteLen(*bytes).to_string(),
            (_, KeyValue::Number(number)) => number.to_string(),
            (_, KeyValue::Text(text)) => text.clone(),
        }
    }

    /// Returns a value with its key: `8 jobs`, `iodepth 32`, `bs 4K`.
    pub(super) fn phrase(self, value: &KeyValue) -> String {
        let tick = self.tick(value);
        let count = |one: &str, many: &str| format!("{tick} {}", if tick == "1" { one } else { many });
        match self {
            RowKey::Target | RowKey::Experiment | RowKey::File | RowKey::Interface | RowKey::Rw => tick,
            RowKey::Op => format!("{tick}s"),
            RowKey::Bs => format!("bs {tick}"),
            RowKey::Targets => count("target", "targets"),
            RowKey::Luns if tick == "1" => "1 LUN each".into(),
            RowKey::Luns => format!("{tick} LUNs each"),
            RowKey::Queues => count("queue", "queues"),
            RowKey::Jobs => count("job", "jobs"),
            RowKey::Iodepth => format!("iodepth {tick}"),
            RowKey::Batch => format!("batch {tick}"),
            RowKey::RateIops => format!("rate-iops {tick}"),
            RowKey::Fsync => format!("fsync {tick}"),
            RowKey::Distribution => format!("distribution {tick}"),
            RowKey::Steer => format!("steer {tick}"),
            RowKey::Poll => format!("poll {tick}"),
            RowKey::Merge => format!("merge {tick}"),
            RowKey::Grants => format!("grants {tick}"),
            RowKey::GrantsPool => format!("pool {tick}"),
            RowKey::RingOrder => format!("ring order {tick}"),
            RowKey::Abi => format!("abi {tick}"),
            RowKey::Workers => count("worker", "workers"),
            RowKey::Storage => format!("storage {tick}"),
            RowKey::Latency => format!("storage latency {tick} us"),
            RowKey::Run => format!("run {tick}"),
            RowKey::Repeat => format!("#{tick}"),
        }
    }

    /// Returns the title of its axis.
    pub(super) fn title(self) -> &'static str {
        match self {
            RowKey::Target => "target",
            RowKey::Rw => "load",
            RowKey::Op => "operation",
            RowKey::Bs => "block size (bytes)",
            RowKey::Targets => "targets",
            RowKey::Luns => "logical units of each target",
            RowKey::Queues => "queues",
            RowKey::Jobs => "jobs",
            RowKey::Iodepth => "iodepth (requests in flight of each job)",
            RowKey::Batch => "batch (requests submitted at once)",
            RowKey::RateIops => "rate-iops (I/Os that each job starts in a second)",
            RowKey::Fsync => "fsync (writes before a flush)",
            RowKey::Distribution => "distribution of random blocks",
            RowKey::Steer => "queue steering",
            RowKey::Poll => "poll policy",
            RowKey::Merge => "request merging",
            RowKey::Grants => "use of grants",
            RowKey::GrantsPool => "pools of granted pages",
            RowKey::RingOrder => "ring order (pages of a ring, as a power of two)",
            RowKey::Abi => "layout of requests",
            RowKey::Workers => "workers of the server",
            RowKey::Storage => "storage",
            RowKey::Latency => "latency of the storage (us)",
            RowKey::Interface => "guest interface",
            RowKey::Experiment => "experiment",
            RowKey::Run => "run",
            RowKey::File => "result file",
            RowKey::Repeat => "measurement",
        }
    }

    /// Returns its name in a heading.
    pub(super) fn subject(self) -> &'static str {
        match self {
            RowKey::Bs => "block size",
            RowKey::Iodepth => "iodepth",
            RowKey::Batch => "batch",
            RowKey::RateIops => "rate-iops",
            RowKey::Fsync => "fsync",
            RowKey::RingOrder => "ring order",
            RowKey::Latency => "latency of the storage",
            other => other.title(),
        }
    }
}

impl fmt::Display for RowKey {
    /// Writes its name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("repeat", |value| value.get_name()))
    }
}

/// The rows, and the values that each key has in them.
pub(super) struct RowTable {
    /// The rows.
    pub rows: Vec<PlotRow>,
    /// For each of [`ROW_KEYS`]: its values; numbers ascend, text is in the order of the files.
    levels: Vec<Vec<KeyValue>>,
    /// For each row, for each of [`ROW_KEYS`]: index of its value in `levels`.
    codes: Vec<[usize; ROW_KEYS.len()]>,
    /// What all targets' labels have, and their names leave out; may be empty.
    pub same_in_targets: String,
}

impl RowTable {
    /// Creates a table of at least one row.
    pub(super) fn new(mut rows: Vec<PlotRow>) -> RowTable {
        let same_in_targets = shorten_targets(&mut rows);
        let codes = vec![[0; ROW_KEYS.len()]; rows.len()];
        let mut table = RowTable { codes, levels: vec![], rows, same_in_targets };
        let repeats = repeats(&table.rows);
        for (at, key) in ROW_KEYS.into_iter().enumerate() {
            let values: Vec<KeyValue> = match key {
                RowKey::Repeat => repeats.iter().map(|count| KeyValue::Number(*count)).collect(),
                key => table.rows.iter().map(|row| key.value(row)).collect(),
            };
            let levels = levels(&values);
            let indices: HashMap<&KeyValue, usize> =
                levels.iter().enumerate().map(|(index, value)| (value, index)).collect();
            for (codes, value) in table.codes.iter_mut().zip(&values) {
                codes[at] = indices[value];
            }
            table.levels.push(levels);
        }
        table
    }

    /// Returns the values of `key`.
    pub(super) fn levels(&self, key: RowKey) -> &[KeyValue] {
        &self.levels[key as usize]
    }

    /// Returns true if `key` has more than one value.
    pub(super) fn varies(&self, key: RowKey) -> bool {
        self.levels(key).len() > 1
    }

    /// Returns the index in [`RowTable::levels`] of a row's value of `key`.
    pub(super) fn code(&self, row: usize, key: RowKey) -> usize {
        self.codes[row][key as usize]
    }

    /// Returns the row's codes of `keys`.
    pub(super) fn identity(&self, row: usize, keys: &[RowKey]) -> Vec<usize> {
        keys.iter().map(|key| self.code(row, *key)).collect()
    }

    /// Returns true if rows that agree in `keys` agree in `key` too.
    pub(super) fn is_determined(&self, key: RowKey, keys: &[RowKey]) -> bool {
        let mut seen = HashMap::new();
        (0..self.rows.len())
            .all(|row| *seen.entry(self.identity(row, keys)).or_insert(self.code(row, key)) == self.code(row, key))
    }

    /// Returns the name of a series with these values of `keys`.
    pub(super) fn name(&self, keys: &[RowKey], identity: &[usize]) -> String {
        let phrases = keys.iter().zip(identity).map(|(key, code)| key.phrase(&self.levels(*key)[*code]));
        phrases.collect::<Vec<_>>().join(", ")
    }
}

/// Shortens labels of targets that are settings of disks: what all have is left out, and returned. Names stay different and not empty.
fn shorten_targets(rows: &mut [PlotRow]) -> String {
    // A key of its own says the latency.
    for row in rows.iter_mut().filter(|row| row.storage_latency.is_some() && row.target.starts_with("storage=")) {
        let pairs: Vec<&str> = row.target.split(',').filter(|pair| !pair.starts_with("latency-us=")).collect();
        row.target = pairs.join(",");
    }
    let mut labels: Vec<String> = rows.iter().map(|row| row.target.clone()).collect();
    labels.sort();
    labels.dedup();
    let pairs = |label: &str| label.split(',').map(str::to_owned).collect::<Vec<String>>();
    let is_settings = |label: &String| label.split(',').all(|pair| pair.contains('='));
    if labels.len() < 2 || !labels.iter().all(is_settings) {
        return String::new();
    }
    let mut same = pairs(&labels[0]);
    same.retain(|pair| labels.iter().all(|label| pairs(label).contains(pair)));
    let short =
        |label: &str| pairs(label).into_iter().filter(|pair| !same.contains(pair)).collect::<Vec<_>>().join(",");
    let mut names: Vec<String> = labels.iter().map(|label| short(label)).collect();
    names.sort();
    names.dedup();
    if same.is_empty() || names.len() < labels.len() || names.iter().any(String::is_empty) {
        return String::new();
    }
    rows.iter_mut().for_each(|row| row.target = short(&row.target));
    same.join(",")
}

fn levels(values: &[KeyValue]) -> Vec<KeyValue> {
    let mut seen = HashSet::new();
    let mut levels: Vec<KeyValue> = values.iter().filter(|value| seen.insert(*value)).cloned().collect();
    levels.sort_by_key(|value| match value {
        KeyValue::Number(number) => *number,
        // The sort is stable: text keeps its order.
        KeyValue::Text(_) => 0,
    });
    levels
}

/// Returns for each row its number among the rows with equal keys, from 1.
fn repeats(rows: &[PlotRow]) -> Vec<u64> {
    let mut seen = HashMap::new();
    let identity = |row: &PlotRow| ROW_KEYS.iter().map(|key| key.tick(&key.value(row))).collect::<Vec<_>>();
    let mut next = |row| {
        let count = seen.entry(identity(row)).or_insert(0);
        *count += 1;
        *count
    };
    rows.iter().map(&mut next).collect()
}
