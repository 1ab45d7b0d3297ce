//! The rows of a picture: the keys that vary, and those that follow from others.

use std::collections::{HashMap, HashSet};

use clap::ValueEnum;

use super::keys::{KeyValue, RowKey};
use super::rows::PlotRow;

/// The rows, and the values that each key has in them.
pub(super) struct RowTable {
    pub rows: Vec<PlotRow>,
    /// For each key: its values; numbers ascend, text is in the order of the files.
    levels: Vec<Vec<KeyValue>>,
    /// For each row, for each key: index of its value in `levels`.
    codes: Vec<Vec<usize>>,
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
            row.keys[RowKey::Repeat as usize] = KeyValue::Number(*count);
        }
        let mut table = RowTable { codes: vec![vec![]; rows.len()], levels: vec![], rows, same_in_targets };
        for at in 0..RowKey::value_variants().len() {
            let values = || table.rows.iter().map(|row| &row.keys[at]);
            let mut known = HashSet::new();
            let mut levels: Vec<KeyValue> = values().filter(|value| known.insert(*value)).cloned().collect();
            // The sort is stable: text keeps its order.
            levels.sort_by_key(|value| if let KeyValue::Number(number) = value { *number } else { 0 });
            let indices: HashMap<&KeyValue, usize> =
                levels.iter().enumerate().map(|(index, level)| (level, index)).collect();
            table.codes.iter_mut().zip(&table.rows).for_each(|(codes, row)| codes.push(indices[&row.keys[at]]));
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
        self.identities(&[keys, &[key]].concat()).len() == self.identities(keys).len()
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
    let without = |label: &str, left_out: &dyn Fn(&str) -> bool| {
        label.split(',').filter(|pair| !left_out(pair)).collect::<Vec<_>>().join(",")
    };
    // The latency has its own key.
    for row in rows.iter_mut().filter(|row| row.number(RowKey::Latency).is_some()) {
        if row.text(RowKey::Target).starts_with("storage=") {
            let label = without(row.text(RowKey::Target), &|pair| pair.starts_with("latency-us="));
            row.keys[RowKey::Target as usize] = KeyValue::Text(label);
        }
    }
    let labels: HashSet<String> = rows.iter().map(|row| row.text(RowKey::Target).to_owned()).collect();
    let is_in_all = |pair: &str| labels.iter().all(|label| label.split(',').any(|other| other == pair));
    let short = |label: &str| without(label, &is_in_all);
    let names: HashSet<String> = labels.iter().map(|label| short(label)).collect();
    let is_settings = labels.iter().all(|label| label.split(',').all(|pair| pair.contains('=')));
    if labels.len() < 2 || !is_settings || names.len() < labels.len() || names.contains("") {
        return String::new();
    }
    let same = without(rows[0].text(RowKey::Target), &|pair| !is_in_all(pair));
    for row in rows {
        row.keys[RowKey::Target as usize] = KeyValue::Text(short(row.text(RowKey::Target)));
    }
    same
}
