//! Selects the axis, series and panels from the keys that vary.

use std::collections::BTreeSet;

use super::group::{MAX_SERIES, PlotGroup};
use super::keys::{KeyValue, RowKey, UNKNOWN};
use super::metric::Metric;
use super::options::PlotArgs;
use super::row_table::RowTable;
use crate::BenchError;

/// Most series in a panel before one of their keys gets panels of its own: the number of colours that need no dots.
const MAX_SERIES_UNSPLIT: usize = 7;
/// Most names along an axis.
const MAX_BARS: usize = 24;
/// Most panels in a picture.
const MAX_PANELS: usize = 24;

/// Selects the groups to draw from `table`.
///
/// # Errors
/// When the rows lack a requested value, or the picture would be too large to read.
pub(super) fn select(table: &RowTable, args: &PlotArgs) -> Result<Vec<PlotGroup>, BenchError> {
    let mut groups = groups(table, args)?;
    let panels = groups.iter().map(|group| group.metrics.len() * table.identities(&group.panels).len()).sum::<usize>();
    at_most(MAX_PANELS, panels, "panels to draw", "", "fewer with --y, --panels, or fewer rows with --only")?;
    if let Some(filter) = &args.ratio {
        filter.check("ratio", &table.rows)?;
        if !groups.iter().any(|group| group.draws(filter.key)) {
            let expected = "a key that is drawn: one that varies, and does not follow from another";
            return Err(BenchError::option("ratio", filter.key, expected));
        }
        groups.iter_mut().for_each(|group| group.ratio = vec![filter.clone()]);
    }
    Ok(groups)
}

/// Checks that a picture does not become too large to read.
pub(super) fn at_most(most: usize, found: usize, what: &str, place: &str, advice: &str) -> Result<(), BenchError> {
    let error = || format!("{place}found {found} {what}, expected at most {most}: {advice}");
    if found <= most { Ok(()) } else { Err(BenchError::Usage(error())) }
}

/// Selects metrics against a key or over time, and distributions.
fn groups(table: &RowTable, args: &PlotArgs) -> Result<Vec<PlotGroup>, BenchError> {
    let x = args.x.unwrap_or_else(|| axis(table));
    let is_mixed = || table.rows.iter().any(|row| row.number(RowKey::Bs).is_none());
    let metrics = match args.y.as_slice() {
        [] if x == RowKey::Time => vec![Metric::Iops],
        // IOPS of mixed sizes do not compare.
        [] if x.is_numeric() && is_mixed() => vec![Metric::Bandwidth],
        [] if x.is_numeric() => vec![Metric::Iops],
        [] if table.rows.len() == 1 => vec![Metric::Percentiles],
        [] => vec![Metric::Iops, Metric::Percentiles],
        given => once_each(given),
    };
    let is_over_time = |metric: &Metric| matches!(metric, Metric::Iops | Metric::Latency);
    if let Some(metric) = metrics.iter().find(|metric| x == RowKey::Time && !is_over_time(metric)) {
        return Err(BenchError::option("y", metric, "iops or latency with --x time"));
    }
    if let Some(metric) = metrics
        .iter()
        .find(|metric| !metric.is_distribution() && !table.rows.iter().any(|row| metric.of(row).is_some()))
    {
        let found = format!("no row with {}", metric.keys());
        return Err(BenchError::option(&format!("y {metric}"), found, "at least one"));
    }
    let (distributions, values): (Vec<Metric>, Vec<Metric>) =
        metrics.iter().partition(|metric| metric.is_distribution());
    let mut groups = vec![];
    if !values.is_empty() {
        groups.push(group(table, args, values, Some(x))?);
    } else if let Some(x) = args.x {
        let expected = format!("no --x with --y {} alone, which has an axis of its own", metrics[0]);
        return Err(BenchError::option("x", x, expected));
    }
    for metric in distributions {
        groups.push(group(table, args, vec![metric], None)?);
    }
    if metrics[0].is_distribution() {
        groups.reverse();
    }
    Ok(groups)
}

fn once_each(metrics: &[Metric]) -> Vec<Metric> {
    metrics.iter().enumerate().filter(|(at, metric)| !metrics[..*at].contains(metric)).map(|(_, m)| *m).collect()
}

/// Returns the key of the horizontal axis: the first number with at least three values, else with two; else the target,
/// or the first name that varies.
fn axis(table: &RowTable) -> RowKey {
    let several = RowKey::ranked().find(|key| key.is_numeric() && table.levels(*key).len() > 2);
    several.or_else(|| RowKey::ranked().find(|key| table.varies(*key))).unwrap_or(RowKey::Target)
}

fn group(table: &RowTable, args: &PlotArgs, metrics: Vec<Metric>, x: Option<RowKey>) -> Result<PlotGroup, BenchError> {
    let mut series = distinguishing(table, x, args.panels);
    let panels = match args.panels {
        Some(key) if Some(key) == x => {
            return Err(BenchError::option("panels", key, format!("another key than the axis (--x {key})")));
        }
        Some(key) => table.varies(key).then_some(key),
        None => panel_key(table, &series),
    };
    series.retain(|key| Some(*key) != panels);
    if let Some(x) = x.filter(|x| !x.is_numeric()) {
        let advice = "another --x, or fewer rows with --only";
        at_most(MAX_BARS, table.levels(x).len(), "values to draw bars for", &format!("--x {x}: "), advice)?;
    }
    let (place, advice) =
        (format!("--y {}: ", metrics[0]), "choose others with --x or --panels, or fewer rows with --only");
    at_most(MAX_SERIES, table.identities(&series).len(), "series in a panel", &place, advice)?;
    let panels = panels.into_iter().collect();
    Ok(PlotGroup { metrics, x, series, panels, scale: args.scale, ..PlotGroup::default() })
}

/// Returns the keys that distinguish rows with the same `x`. Leaves out numbers that follow from others (as many jobs
/// as queues), and names that follow from names. Keeps `wanted` where it varies.
fn distinguishing(table: &RowTable, x: Option<RowKey>, wanted: Option<RowKey>) -> Vec<RowKey> {
    let mut kept: Vec<RowKey> = wanted.into_iter().filter(|key| table.varies(*key)).collect();
    let is_free = |key: &RowKey| Some(*key) != x && Some(*key) != wanted && table.varies(*key);
    let known = |kept: &[RowKey], numeric: bool| -> Vec<RowKey> {
        kept.iter().copied().chain(x).filter(|key| key.is_numeric() == numeric).collect()
    };
    for key in RowKey::ranked().filter(is_free) {
        let follows = match key {
            // Only if nothing else distinguishes two rows.
            RowKey::File | RowKey::Repeat => {
                let all: Vec<RowKey> = kept.iter().copied().chain(x).collect();
                table.identities(&all).len() == table.rows.len()
            }
            _ => table.is_determined(key, &known(&kept, key.is_numeric())),
        };
        if !follows {
            kept.push(key);
        }
    }
    kept.sort();
    kept
}

/// Returns the key that gets its own panels when `keys` make too many series: the one with the fewest panels that
/// leaves few enough series, else the one that leaves the fewest. Among equals, prefers keys that are not usually
/// compared.
fn panel_key(table: &RowTable, keys: &[RowKey]) -> Option<RowKey> {
    const COMPARED: [RowKey; 5] = [RowKey::Target, RowKey::Storage, RowKey::Poll, RowKey::Merge, RowKey::File];
    // Each panel of a single key would have one series.
    if table.identities(keys).len() <= MAX_SERIES_UNSPLIT || keys.len() < 2 {
        return None;
    }
    let possible = keys.iter().copied().filter(|key| table.levels(*key).len() <= MAX_PANELS);
    possible.min_by_key(|key| {
        let rest: Vec<RowKey> = keys.iter().copied().filter(|other| other != key).collect();
        let left = table.identities(&rest).len();
        let is_compared = COMPARED.contains(key);
        // Prefers numbers of the load to those of the device.
        let rank = (is_compared, matches!(key, RowKey::Queues | RowKey::Jobs));
        if left <= MAX_SERIES_UNSPLIT { (0, table.levels(*key).len(), rank) } else { (1, left, rank) }
    })
}

/// Returns the constants of all rows, the ranges of numbers that neither an axis nor a legend shows, and the names that
/// follow from drawn ones. Leaves out no key that varies.
pub(super) fn constants(table: &RowTable, groups: &[PlotGroup]) -> String {
    let is_drawn = |key: &RowKey| groups.iter().any(|group| group.draws(*key));
    let said = RowKey::all().filter(|key| !matches!(key, RowKey::File | RowKey::Repeat) && !is_drawn(key));
    let mut words: Vec<String> = said.filter_map(|key| constant(table, key, &is_drawn)).collect();
    if !table.same_in_targets.is_empty() {
        words.push(format!("all targets {}", table.same_in_targets));
    }
    let runs: BTreeSet<u64> = table.rows.iter().map(|row| row.runs).collect();
    if let (Some(first), Some(last)) = (runs.first(), runs.last()) {
        let plural = if *last == 1 { "run" } else { "runs" };
        words.push(if first == last { format!("{first} {plural}") } else { format!("{first} to {last} {plural}") });
    }
    let failed = table.rows.iter().filter(|row| row.errors > 0).count();
    if failed > 0 {
        let what = if table.rows[0].number(RowKey::Run).is_some() { "time series" } else { "rows" };
        words.push(format!("requests failed in {failed} of {} {what}", table.rows.len()));
    }
    words.join(", ")
}

/// Returns the words for a key that is not drawn.
fn constant(table: &RowTable, key: RowKey, is_drawn: &dyn Fn(&RowKey) -> bool) -> Option<String> {
    let rows = || table.rows.iter();
    match table.levels(key) {
        // Follows from the load.
        _ if key == RowKey::Op && rows().all(|row| row.text(RowKey::Rw).ends_with(row.text(key))) => None,
        [_] if key == RowKey::Run && rows().all(|row| row.runs == 1) => None,
        [_] if key == RowKey::Abi => None,
        [KeyValue::Text(text)] if text == UNKNOWN => None,
        [KeyValue::Text(text)] if key == RowKey::Distribution && text == "random" => None,
        [KeyValue::Number(1)] if matches!(key, RowKey::Batch | RowKey::Luns | RowKey::Targets) => None,
        // The label of a served disk includes its storage.
        [KeyValue::Text(storage)] if key == RowKey::Storage && says_storage(table, storage) => None,
        [only] => Some(key.phrase(only)),
        levels if levels.iter().all(|level| matches!(level, KeyValue::Number(_))) => Some(number_range(table, key)),
        _ => followed(table, key, is_drawn),
    }
}

/// Returns true if every target's label includes the storage.
fn says_storage(table: &RowTable, storage: &str) -> bool {
    let says = |label: &str| label.contains(storage) || (storage == "file" && label.contains("path="));
    table.rows.iter().all(|row| says(row.text(RowKey::Target))) || table.same_in_targets.contains(storage)
}

fn number_range(table: &RowTable, key: RowKey) -> String {
    let is_product = |factors: &[RowKey]| {
        let product = |row: &super::rows::PlotRow| factors.iter().map(|key| row.number(*key)).product::<Option<u64>>();
        table.rows.iter().all(|row| row.number(RowKey::Jobs) == product(row))
    };
    match table.levels(key) {
        _ if key == RowKey::Jobs && is_product(&[RowKey::Queues]) => "1 job per queue".into(),
        _ if key == RowKey::Jobs && is_product(&[RowKey::Targets, RowKey::Luns]) => "1 job per LUN".into(),
        [first, .., last] => key.phrase(&KeyValue::Text(format!("{} to {}", key.tick(first), key.tick(last)))),
        _ => String::new(),
    }
}

/// Returns the values of a key that follows from drawn ones, and those keys: `poll off or busy, with target`.
fn followed(table: &RowTable, key: RowKey, is_drawn: &dyn Fn(&RowKey) -> bool) -> Option<String> {
    const MOST: usize = 4;
    if matches!(key, RowKey::Experiment | RowKey::Target) {
        return None;
    }
    let leader = RowKey::all().filter(is_drawn).find(|leader| table.is_determined(key, &[*leader]));
    let with = leader.map_or(String::new(), |leader| format!(", with {}", leader.subject()));
    let levels = table.levels(key);
    let shown: Vec<String> = levels.iter().take(MOST).map(|level| key.tick(level)).collect();
    let more = if levels.len() > MOST { " or others" } else { "" };
    Some(format!("{}{more}{with}", key.phrase(&KeyValue::Text(shown.join(" or ")))))
}
