//! The keys of rows: their names, those that vary, and those that follow from others.

use std::collections::{HashMap, HashSet};
use std::fmt;

use mqblk_core::ByteLen;
use mqblk_core::settings::parse_size;

use super::rows::PlotRow;

/// A key of a row's settings: an index of [`KEYS`]. Keys are named in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RowKey {
    Experiment,
    Interface,
    Target,
    Storage,
    Rw,
    Op,
    Bs,
    Targets,
    Luns,
    Queues,
    Iodepth,
    Jobs,
    Batch,
    RateIops,
    Fsync,
    Latency,
    Workers,
    RingOrder,
    Distribution,
    Steer,
    Poll,
    Merge,
    Grants,
    GrantsPool,
    Abi,
    Run,
    File,
    Repeat,
    Column,
}

use KeyFormat::{Count, CountOr1, Counted, Own, Text, TextIfAny};
use RowKey::{
    Abi, Batch, Bs, Column, Distribution, Experiment, File, Fsync, Grants, GrantsPool, Interface, Iodepth, Jobs,
    Latency, Luns, Merge, Op, Poll, Queues, RateIops, Repeat, RingOrder, Run, Rw, Steer, Storage, Target, Targets,
    Workers,
};

/// Format of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyFormat {
    /// A string.
    Text,
    /// A string, or [`UNKNOWN`] where it is absent or null.
    TextIfAny,
    /// A whole number, at least this.
    Count(u64),
    /// A whole number, 1 where it is absent or null.
    CountOr1,
    /// A whole number, or [`UNKNOWN`] where it is absent or null.
    Counted,
    /// Not in a file; numbers if true.
    Own(bool),
}

/// Words of a key: (key, name on the command line, name in a result file, format, title of its axis, phrase of a
/// value).
type KeyWords = (RowKey, &'static str, &'static str, KeyFormat, &'static str, &'static str);

/// All keys. The first number that varies is the axis. Of keys that follow from each other the first is kept.
pub(super) const KEYS: [KeyWords; 29] = [
    (Experiment, "experiment", "experiment", TextIfAny, "experiment", "{}"),
    (Interface, "interface", "interface", Text, "guest interface", "{}"),
    (Target, "target", "target", Text, "target", "{}"),
    (Storage, "storage", "storage", Text, "storage", "storage {}"),
    (Rw, "rw", "rw", Text, "load", "{}"),
    (Op, "op", "", Own(false), "operation", "{}s"),
    (Bs, "bs", "bs", Count(1), "block size (bytes)", "bs {}"),
    (Targets, "targets", "targets", CountOr1, "targets", "{} target(s)"),
    (Luns, "luns", "luns", CountOr1, "logical units of each target", "{} LUN(s) each"),
    (Queues, "queues", "queues", Count(1), "queues", "{} queue(s)"),
    (Iodepth, "iodepth", "iodepth", Count(1), "iodepth (requests in flight of each job)", "iodepth {}"),
    (Jobs, "jobs", "jobs", Count(1), "jobs", "{} job(s)"),
    (Batch, "batch", "batch", Count(0), "batch (requests submitted at once)", "batch {}"),
    (RateIops, "rate-iops", "rate_iops", Counted, "rate-iops (I/Os that each job starts in a second)", "rate-iops {}"),
    (Fsync, "fsync", "fsync", Counted, "fsync (writes before a flush)", "fsync {}"),
    (Latency, "latency", "storage_latency_us", Counted, "latency of the storage (us)", "storage latency {} us"),
    (Workers, "workers", "server_workers", Counted, "workers of the server", "{} worker(s)"),
    (
        RingOrder,
        "ring-order",
        "ring_order",
        Counted,
        "ring order (pages of a ring, as a power of two)",
        "ring order {}",
    ),
    (
        Distribution,
        "distribution",
        "random_distribution",
        TextIfAny,
        "distribution of random blocks",
        "distribution {}",
    ),
    (Steer, "steer", "steer", TextIfAny, "queue steering", "steer {}"),
    (Poll, "poll", "poll", Text, "poll policy", "poll {}"),
    (Merge, "merge", "merge", Text, "request merging", "merge {}"),
    (Grants, "grants", "grants", TextIfAny, "use of grants", "grants {}"),
    (GrantsPool, "grants-pool", "grants_pool", TextIfAny, "pools of granted pages", "pool {}"),
    (Abi, "abi", "abi", TextIfAny, "layout of requests", "abi {}"),
    (Run, "run", "", Own(true), "run", "run {}"),
    (File, "file", "", Own(false), "result file", "{}"),
    // Distinguishes equal rows of a file.
    (Repeat, "", "", Own(true), "measurement", "#{}"),
    // An experiment's heading. It follows from other keys, so only experiments draw it.
    (Column, "", "column", TextIfAny, "row of the document's table", "{}"),
];

/// Value of a key that a row lacks.
pub(super) const UNKNOWN: &str = "unknown";

/// Value of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KeyValue {
    /// A count, or bytes.
    Number(u64),
    /// Anything else.
    Text(String),
}

impl KeyValue {
    /// Returns the value of a key that a row lacks.
    pub(super) fn unknown() -> KeyValue {
        KeyValue::Text(UNKNOWN.to_owned())
    }

    /// Returns true if a user means this value by `text`.
    pub(super) fn is(&self, text: &str) -> bool {
        match self {
            KeyValue::Number(number) => parse_size(text).is_some_and(|size| size.0 == *number),
            KeyValue::Text(own) => own == text,
        }
    }
}

impl RowKey {
    /// Returns all keys but those that only the program uses.
    pub(super) fn all() -> impl Iterator<Item = RowKey> {
        KEYS.iter().map(|words| words.0).filter(|key| *key != Column)
    }

    /// Returns the numeric keys.
    pub(super) fn numbers() -> impl Iterator<Item = RowKey> {
        RowKey::all().filter(|key| key.is_numeric() && *key != Repeat)
    }

    /// Returns the key of this name on the command line.
    pub(super) fn find(name: &str) -> Option<RowKey> {
        RowKey::all().find(|key| !name.is_empty() && key.name() == name)
    }

    /// Returns its name on the command line.
    pub(super) fn name(self) -> &'static str {
        KEYS[self as usize].1
    }

    /// Returns true if its values are numbers, which have positions on an axis.
    pub(super) fn is_numeric(self) -> bool {
        matches!(KEYS[self as usize].3, Count(_) | CountOr1 | Counted | Own(true)) && self != Repeat
    }

    /// Returns a value as a label of an axis that names the key.
    pub(super) fn tick(self, value: &KeyValue) -> String {
        match (self, value) {
            (Bs, KeyValue::Number(bytes)) => ByteLen(*bytes).to_string(),
            (_, KeyValue::Number(number)) => number.to_string(),
            (_, KeyValue::Text(text)) => text.clone(),
        }
    }

    /// Returns a value with its key: `8 jobs`, `iodepth 32`, `bs 4K`.
    pub(super) fn phrase(self, value: &KeyValue) -> String {
        let tick = self.tick(value);
        let plural = if tick == "1" { "" } else { "s" };
        KEYS[self as usize].5.replace("(s)", plural).replace("{}", &tick)
    }

    /// Returns the title of its axis.
    pub(super) fn title(self) -> &'static str {
        KEYS[self as usize].4
    }

    /// Returns its name in a heading.
    pub(super) fn subject(self) -> &'static str {
        self.title().split(" (").next().unwrap_or_default()
    }
}

impl fmt::Display for RowKey {
    /// Writes its name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The rows, and the values that each key has in them.
pub(super) struct RowTable {
    pub rows: Vec<PlotRow>,
    /// For each key: its values; numbers ascend, text is in the order of the files.
    levels: Vec<Vec<KeyValue>>,
    /// For each row, for each key: index of its value in `levels`.
    codes: Vec<[usize; KEYS.len()]>,
    /// Common part of the targets' labels, left out of their names; may be empty.
    pub same_in_targets: String,
}

impl RowTable {
    /// Creates a table of at least one row.
    pub(super) fn new(mut rows: Vec<PlotRow>) -> RowTable {
        let same_in_targets = shorten_targets(&mut rows);
        // Equal rows are numbered.
        let mut seen: HashMap<Vec<KeyValue>, u64> = HashMap::new();
        for row in &mut rows {
            let count = seen.entry(row.keys.clone()).or_default();
            *count += 1;
            row.keys[Repeat as usize] = KeyValue::Number(*count);
        }
        let mut table = RowTable { codes: vec![[0; KEYS.len()]; rows.len()], levels: vec![], rows, same_in_targets };
        for at in 0..KEYS.len() {
            let values = || table.rows.iter().map(|row| &row.keys[at]);
            let mut known = HashSet::new();
            let mut levels: Vec<KeyValue> = values().filter(|value| known.insert(*value)).cloned().collect();
            // The sort is stable: text keeps its order.
            levels.sort_by_key(|value| if let KeyValue::Number(number) = value { *number } else { 0 });
            let indices: HashMap<&KeyValue, usize> =
                levels.iter().enumerate().map(|(index, level)| (level, index)).collect();
            table.codes.iter_mut().zip(&table.rows).for_each(|(codes, row)| codes[at] = indices[&row.keys[at]]);
            table.levels.push(levels);
        }
        table
    }

    /// Returns the values of `key`.
    pub(super) fn levels(&self, key: RowKey) -> &[KeyValue] {
        &self.levels[key as usize]
    }

    /// Returns the values of `key` as a user writes them.
    pub(super) fn ticks(&self, key: RowKey) -> String {
        self.levels(key).iter().map(|level| key.tick(level)).collect::<Vec<_>>().join(" ")
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

    /// Returns the different codes of `keys` in all rows, ascending.
    pub(super) fn identities(&self, keys: &[RowKey]) -> Vec<Vec<usize>> {
        let mut all: Vec<Vec<usize>> = (0..self.rows.len()).map(|row| self.identity(row, keys)).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Returns true if rows that agree in `keys` agree in `key` too.
    pub(super) fn is_determined(&self, key: RowKey, keys: &[RowKey]) -> bool {
        let mut seen = HashMap::new();
        (0..self.rows.len())
            .all(|row| *seen.entry(self.identity(row, keys)).or_insert(self.code(row, key)) == self.code(row, key))
    }

    /// Returns the name made of these values of `keys`.
    pub(super) fn name(&self, keys: &[RowKey], identity: &[usize]) -> String {
        let phrases = keys.iter().zip(identity).map(|(key, code)| key.phrase(&self.levels(*key)[*code]));
        phrases.collect::<Vec<_>>().join(", ")
    }
}

/// Shortens labels of targets that are settings of disks: removes and returns their common part. Names stay different
/// and not empty.
fn shorten_targets(rows: &mut [PlotRow]) -> String {
    let pairs = |label: &str| label.split(',').map(str::to_owned).collect::<Vec<String>>();
    let without = |label: &str, left_out: &dyn Fn(&String) -> bool| {
        pairs(label).into_iter().filter(|pair| !left_out(pair)).collect::<Vec<_>>().join(",")
    };
    // The latency has its own key.
    for row in rows.iter_mut().filter(|row| row.number(Latency).is_some() && row.text(Target).starts_with("storage=")) {
        let label = without(row.text(Target), &|pair| pair.starts_with("latency-us="));
        row.keys[Target as usize] = KeyValue::Text(label);
    }
    let labels: HashSet<String> = rows.iter().map(|row| row.text(Target).to_owned()).collect();
    let is_settings = |label: &String| label.split(',').all(|pair| pair.contains('='));
    if labels.len() < 2 || !labels.iter().all(is_settings) {
        return String::new();
    }
    let mut same = pairs(rows[0].text(Target));
    same.retain(|pair| labels.iter().all(|label| pairs(label).contains(pair)));
    let short = |label: &str| without(label, &|pair| same.contains(pair));
    let names: HashSet<String> = labels.iter().map(|label| short(label)).collect();
    if same.is_empty() || names.len() < labels.len() || names.contains("") {
        return String::new();
    }
    for row in rows {
        let name = short(row.text(Target));
        row.keys[Target as usize] = KeyValue::Text(name);
    }
    same.join(",")
}
