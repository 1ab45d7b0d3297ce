//! The keys of rows: their names, and their values.

use std::fmt;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use mqblk_core::ByteLen;
use mqblk_core::settings::parse_size;

/// A key of a row's settings, by its name on the command line. Keys are named in this order. The first number that
/// varies is the axis. Of keys that follow from each other the first is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
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
    Time,
}

/// Format of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyFormat {
    /// A string.
    Text,
    /// A string, or [`UNKNOWN`] where it is absent or null.
    TextIfAny,
    /// A whole number, at least this.
    Count(u64),
    /// A whole number, or [`UNKNOWN`] where it is absent or null.
    CountIfAny,
    /// A whole number, 1 where it is absent or null.
    CountOr1,
    /// Not in a file.
    Own,
}

impl RowKey {
    /// Returns its name in a result file, the format of its value, the phrase of a value, and the title of its axis.
    pub(super) fn words(self) -> (&'static str, KeyFormat, &'static str, &'static str) {
        use KeyFormat::{Count, CountIfAny, CountOr1, Own, Text, TextIfAny};
        use RowKey::*;
        match self {
            Experiment => ("experiment", TextIfAny, "{}", "experiment"),
            Interface => ("interface", Text, "{}", "guest interface"),
            Target => ("target", Text, "{}", "target"),
            Storage => ("storage", Text, "storage {}", "storage"),
            Rw => ("rw", Text, "{}", "load"),
            Op => ("", Own, "{}s", "operation"),
            Bs => ("bs", Count(1), "bs {}", "block size (bytes)"),
            Targets => ("targets", CountOr1, "{} target(s)", "targets"),
            Luns => ("luns", CountOr1, "{} LUN(s) each", "logical units of each target"),
            Queues => ("queues", Count(1), "{} queue(s)", "queues"),
            Iodepth => ("iodepth", Count(1), "iodepth {}", "iodepth (requests in flight of each job)"),
            Jobs => ("jobs", Count(1), "{} job(s)", "jobs"),
            Batch => ("batch", Count(0), "batch {}", "batch (requests submitted at once)"),
            RateIops => ("rate_iops", CountIfAny, "rate-iops {}", "rate-iops (I/Os that each job starts in a second)"),
            Fsync => ("fsync", CountIfAny, "fsync {}", "fsync (writes before a flush)"),
            Latency => ("storage_latency_us", CountIfAny, "storage latency {} us", "latency of the storage (us)"),
            Workers => ("server_workers", CountIfAny, "{} worker(s)", "workers of the server"),
            RingOrder => ("ring_order", CountIfAny, "ring order {}", "ring order (pages of a ring, as a power of two)"),
            Distribution => ("random_distribution", TextIfAny, "distribution {}", "distribution of random blocks"),
            Steer => ("steer", TextIfAny, "steer {}", "queue steering"),
            Poll => ("poll", Text, "poll {}", "poll policy"),
            Merge => ("merge", Text, "merge {}", "request merging"),
            Grants => ("grants", TextIfAny, "grants {}", "use of grants"),
            GrantsPool => ("grants_pool", TextIfAny, "pool {}", "pools of granted pages"),
            Abi => ("abi", TextIfAny, "abi {}", "layout of requests"),
            Run => ("", Own, "run {}", "run"),
            File => ("", Own, "{}", "result file"),
            Time => ("", Own, "{}", "time from the start of the measurement, a line for each run"),
            // Distinguishes equal rows of a file.
            Repeat => ("", Own, "#{}", "measurement"),
            // An experiment's heading. It follows from other keys, so only experiments draw it.
            Column => ("column", TextIfAny, "{}", "row of the document's table"),
        }
    }

    /// Returns all keys that may distinguish rows.
    pub(super) fn all() -> impl Iterator<Item = RowKey> {
        RowKey::value_variants().iter().copied().filter(|key| !matches!(key, RowKey::Column | RowKey::Time))
    }

    /// Returns the keys that a user may name.
    pub(super) fn named() -> impl Iterator<Item = RowKey> {
        RowKey::all().filter(|key| *key != RowKey::Repeat)
    }

    /// Returns them in the order in which they are chosen: numbers, the target, and the others.
    pub(super) fn ranked() -> impl Iterator<Item = RowKey> {
        let others = RowKey::all().filter(|key| !key.is_numeric() && *key != RowKey::Target);
        RowKey::all().filter(|key| key.is_numeric()).chain([RowKey::Target]).chain(others)
    }

    /// Returns its name and its title as a value of an option.
    pub(super) fn possible(self) -> PossibleValue {
        self.to_possible_value().expect("no key is skipped").help(self.words().3)
    }

    /// Returns true if its values are numbers, which have positions on an axis.
    pub(super) fn is_numeric(self) -> bool {
        let is_count = matches!(self.words().1, KeyFormat::Count(_) | KeyFormat::CountIfAny | KeyFormat::CountOr1);
        is_count || self == RowKey::Run
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
        let plural = if tick == "1" { "" } else { "s" };
        self.words().2.replace("(s)", plural).replace("{}", &tick)
    }

    /// Returns its name in a heading.
    pub(super) fn subject(self) -> &'static str {
        self.words().3.split(" (").next().unwrap_or_default()
    }
}

impl fmt::Display for RowKey {
    /// Writes its name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.possible().get_name())
    }
}

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
