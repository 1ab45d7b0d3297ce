//! What a row was measured with, key by key: what varies, what is constant, and how both are said.

use std::collections::{HashMap, HashSet};
use std::fmt;

use clap::ValueEnum;
use mqblk_core::ByteLen;

use super::rows::Row;
use crate::args::Sizes;

/// A key of a row that says how it was measured. In the order in which they name a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Key {
    /// The target's label.
    Target,
    /// What was done: read, randwrite, ...
    Rw,
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
    /// Storage backend.
    Storage,
    /// Guest interface.
    Interface,
    /// Name of the experiment.
    Experiment,
    /// Result file.
    File,
    /// How often the same was measured before in the same file.
    #[value(skip)]
    Repeat,
}

/// All keys, in the order in which they name a series.
pub const KEYS: [Key; 19] = [
    Key::Target,
    Key::Rw,
    Key::Bs,
    Key::Targets,
    Key::Luns,
    Key::Queues,
    Key::Jobs,
    Key::Iodepth,
    Key::Batch,
    Key::Steer,
    Key::Poll,
    Key::Merge,
    Key::Grants,
    Key::GrantsPool,
    Key::Storage,
    Key::Interface,
    Key::Experiment,
    Key::File,
    Key::Repeat,
];

/// A row's value of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// A count, or bytes.
    Number(u64),
    /// Anything else.
    Text(String),
}

impl Key {
    /// Whether its values are numbers, which have places on an axis.
    pub fn numeric(self) -> bool {
        matches!(self, Key::Bs | Key::Targets | Key::Luns | Key::Queues | Key::Jobs | Key::Iodepth | Key::Batch)
    }

    /// Its value in `row`. [`Key::Repeat`] is not in a row: 1.
    pub fn value(self, row: &Row) -> Value {
        let text = |text: &str| Value::Text(text.to_owned());
        match self {
            Key::Target => text(&row.target),
            Key::Rw => text(&row.rw),
            Key::Bs if row.bs_max > row.bs => {
                Value::Text(Sizes { min: ByteLen(row.bs), max: ByteLen(row.bs_max) }.to_string())
            }
            Key::Bs => Value::Number(row.bs),
            Key::Targets => Value::Number(row.targets),
            Key::Luns => Value::Number(row.luns),
            Key::Queues => Value::Number(row.queues),
            Key::Jobs => Value::Number(row.jobs),
            Key::Iodepth => Value::Number(row.iodepth),
            Key::Batch => Value::Number(row.batch),
            Key::Steer => text(&row.steer),
            Key::Poll => text(&row.poll),
            Key::Merge => text(&row.merge),
            Key::Grants => text(&row.grants),
            Key::GrantsPool => text(&row.grants_pool),
            Key::Storage => text(&row.storage),
            Key::Interface => text(&row.interface),
            Key::Experiment => text(row.experiment.as_deref().unwrap_or("no experiment")),
            Key::File => text(&row.file),
            Key::Repeat => Value::Number(1),
        }
    }

    /// A value beside an axis that says the key.
    pub fn tick(self, value: &Value) -> String {
        match (self, value) {
            (Key::Bs, Value::Number(bytes)) => ByteLen(*bytes).to_string(),
            (_, Value::Number(number)) => number.to_string(),
            (_, Value::Text(text)) => text.clone(),
        }
    }

    /// A value where nothing else says the key: `8 jobs`, `iodepth 32`, `bs 4K`.
    pub fn phrase(self, value: &Value) -> String {
        let tick = self.tick(value);
        let count = |one: &str, many: &str| format!("{tick} {}", if tick == "1" { one } else { many });
        match self {
            Key::Target | Key::Experiment | Key::File | Key::Interface | Key::Rw => tick,
            Key::Bs => format!("bs {tick}"),
            Key::Targets => count("target", "targets"),
            Key::Luns if tick == "1" => "1 LUN each".into(),
            Key::Luns => format!("{tick} LUNs each"),
            Key::Queues => count("queue", "queues"),
            Key::Jobs => count("job", "jobs"),
            Key::Iodepth => format!("iodepth {tick}"),
            Key::Batch => format!("batch {tick}"),
            Key::Steer => format!("steer {tick}"),
            Key::Poll => format!("poll {tick}"),
            Key::Merge => format!("merge {tick}"),
            Key::Grants => format!("grants {tick}"),
            Key::GrantsPool => format!("pool {tick}"),
            Key::Storage => format!("storage {tick}"),
            Key::Repeat => format!("#{tick}"),
        }
    }

    /// The title of an axis of it.
    pub fn title(self) -> &'static str {
        match self {
            Key::Target => "target",
            Key::Rw => "load",
            Key::Bs => "block size (bytes)",
            Key::Targets => "targets",
            Key::Luns => "logical units of each target",
            Key::Queues => "queues",
            Key::Jobs => "jobs",
            Key::Iodepth => "iodepth (requests in flight of each job)",
            Key::Batch => "batch (requests submitted at once)",
            Key::Steer => "queue steering",
            Key::Poll => "poll policy",
            Key::Merge => "request merging",
            Key::Grants => "use of grants",
            Key::GrantsPool => "pools of granted pages",
            Key::Storage => "storage",
            Key::Interface => "guest interface",
            Key::Experiment => "experiment",
            Key::File => "result file",
            Key::Repeat => "measurement",
        }
    }

    /// Its name in a heading.
    pub fn subject(self) -> &'static str {
        match self {
            Key::Bs => "block size",
            Key::Iodepth => "iodepth",
            Key::Batch => "batch",
            other => other.title(),
        }
    }
}

impl fmt::Display for Key {
    /// As on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("repeat", |value| value.get_name()))
    }
}

/// The rows, and the values that each key has in them.
pub struct Table {
    /// The rows.
    pub rows: Vec<Row>,
    /// Of each key in [`KEYS`]: its values; numbers ascend, text is in the order of the file.
    levels: Vec<Vec<Value>>,
    /// Of each row, of each key in [`KEYS`]: the place of its value in `levels`.
    codes: Vec<[usize; KEYS.len()]>,
}

impl Table {
    /// Of at least one row.
    pub fn new(rows: Vec<Row>) -> Table {
        let mut table = Table { codes: vec![[0; KEYS.len()]; rows.len()], levels: vec![], rows };
        let repeats = repeats(&table.rows);
        for (at, key) in KEYS.into_iter().enumerate() {
            let values: Vec<Value> = match key {
                Key::Repeat => repeats.iter().map(|count| Value::Number(*count)).collect(),
                key => table.rows.iter().map(|row| key.value(row)).collect(),
            };
            let levels = levels(&values);
            let places: HashMap<&Value, usize> =
                levels.iter().enumerate().map(|(place, value)| (value, place)).collect();
            for (codes, value) in table.codes.iter_mut().zip(&values) {
                codes[at] = places[value];
            }
            table.levels.push(levels);
        }
        table
    }

    /// The values of `key`.
    pub fn levels(&self, key: Key) -> &[Value] {
        &self.levels[key as usize]
    }

    /// Whether `key` has more than one value.
    pub fn varies(&self, key: Key) -> bool {
        self.levels(key).len() > 1
    }

    /// The place in [`Table::levels`] of a row's value of `key`.
    pub fn code(&self, row: usize, key: Key) -> usize {
        self.codes[row][key as usize]
    }

    /// The row's places of `keys`: what tells it apart by them.
    pub fn identity(&self, row: usize, keys: &[Key]) -> Vec<usize> {
        keys.iter().map(|key| self.code(row, *key)).collect()
    }

    /// Whether rows that agree in `keys` agree in `key` too.
    pub fn determined(&self, key: Key, keys: &[Key]) -> bool {
        let mut seen = HashMap::new();
        (0..self.rows.len())
            .all(|row| *seen.entry(self.identity(row, keys)).or_insert(self.code(row, key)) == self.code(row, key))
    }

    /// How a series is called that has these values of `keys`.
    pub fn name(&self, keys: &[Key], identity: &[usize]) -> String {
        let phrases = keys.iter().zip(identity).map(|(key, code)| key.phrase(&self.levels(*key)[*code]));
        phrases.collect::<Vec<_>>().join(", ")
    }
}

fn levels(values: &[Value]) -> Vec<Value> {
    let mut seen = HashSet::new();
    let mut levels: Vec<Value> = values.iter().filter(|value| seen.insert(*value)).cloned().collect();
    levels.sort_by_key(|value| match value {
        Value::Number(number) => *number,
        // The sort is stable: as they come.
        Value::Text(_) => 0,
    });
    levels
}

/// Of each row: 1 if it is the first with what it was measured with, 2 if the second, and so on.
fn repeats(rows: &[Row]) -> Vec<u64> {
    let mut seen = HashMap::new();
    let identity = |row: &Row| KEYS.iter().map(|key| key.tick(&key.value(row))).collect::<Vec<_>>();
    let mut next = |row| {
        let count = seen.entry(identity(row)).or_insert(0);
        *count += 1;
        *count
    };
    rows.iter().map(&mut next).collect()
}
