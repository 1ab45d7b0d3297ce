//! The evidence that rules are given, and a finding of theirs.

use std::collections::BTreeMap;

use mqblk_admin::model::Stat;
use serde::Serialize;

use super::subject::Subject;
use crate::stat::rates::{IoRates, QueueRates, Report};

/// A sentence, and its evidence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Finding {
    /// A word for programs.
    pub(super) kind: &'static str,
    /// For readers.
    pub(super) sentence: String,
    /// The numbers by name; each name ends with the unit.
    pub(super) figures: BTreeMap<&'static str, f64>,
}

impl Finding {
    pub(super) fn new(kind: &'static str, sentence: String, figures: &[(&'static str, f64)]) -> Finding {
        Finding { kind, sentence, figures: figures.iter().copied().collect() }
    }
}

/// Input of the rules.
pub(super) struct Evidence<'a> {
    pub(super) subject: &'a Subject<'a>,
    /// The rates of its device.
    pub(super) rates: IoRates,
    pub(super) queues: Vec<&'a QueueRates>,
    pub(super) report: &'a Report,
    pub(super) stat: &'a Stat,
}

pub(super) fn requests_per_s(rates: &IoRates) -> f64 {
    rates.reads_per_s + rates.writes_per_s + rates.discards_per_s + rates.flushes_per_s
}

/// Formats a time.
pub(super) fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{:.1} s", us / 1e6),
        us if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        us => format!("{us:.1} us"),
    }
}
