//! Selects what to draw from what varies.

use std::collections::BTreeSet;

use super::keys::{KeyValue, ROW_KEYS, RowKey, RowTable, UNKNOWN};
use super::metric::Metric;
use super::{PlotArgs, PlotAxis, PlotError};

/// Most series in a panel before one of their keys gets panels of its own: the number of colours that need no dots.
const MAX_SERIES_UNSPLIT: usize = 7;
/// Most series in a panel: the number of colours, those of dotted lines among them.
pub(super) const MAX_SERIES: usize = 14;
/// Most names along an axis.
const MAX_BARS: usize = 24;
/// Most panels in a picture.
pub(super) const MAX_PANELS: usize = 24;

/// Numeric keys: the first that varies is the axis, and of those that follow from each other the first one is kept.
const NUMBERS: [RowKey; 13] = [
    RowKey::Bs,
    RowKey::Targets,
    RowKey::Luns,
    RowKey::Queues,
    RowKey::Iodepth,
    RowKey::Jobs,
    RowKey::Batch,
    RowKey::RateIops,
    RowKey::Fsync,
    RowKey::Latency,
    RowKey::Workers,
    RowKey::RingOrder,
    RowKey::Run,
];

/// What to draw: metrics against one key, or percentiles or time series, which have an axis of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlotSelection {
    /// Metrics, from top to bottom.
    pub metrics: Vec<Metric>,
    /// Key of the horizontal axis; `None` for percentiles and time series.
    pub x: Option<RowKey>,
    /// Keys whose values make the series of a panel.
    pub series: Vec<RowKey>,
    /// Key whose values make the panels.
    pub panels: Option<RowKey>,
}

/// Selects what to draw of `table`.
///
/// # Errors
/// When the options request what the rows do not have, or more than can be read.
pub(super) fn select(table: &RowTable, args: &PlotArgs) -> Result<Vec<PlotSelection>, PlotError> {
    let given = match args.x {
        Some(PlotAxis::Time) => return over_time(table, args).map(|selection| vec![selection]),
        Some(PlotAxis::Key(key)) => Some(key),
        None => None,
    };
    let x = given.unwrap_or_else(|| axis(table));
    let metrics = match args.y.as_slice() {
        // IOPS of mixed sizes do not compare.
        [] if x.is_numeric() && table.rows.iter().any(|row| row.bs_max > row.bs) => vec![Metric::Bandwidth],
        [] if x.is_numeric() => vec![Metric::Iops],
        [] if table.rows.len() == 1 => vec![Metric::Percentiles],
        [] => vec![Metric::Iops, Metric::Percentiles],
        given => once_each(given),
    };
    if let Some(metric) = metrics.iter().find(|metric| !table.rows.iter().any(|row| metric.has(row))) {
        let keys = metric.keys();
        return Err(PlotError::Input(format!("--y {metric}: found no row with {keys}, expected at least one")));
    }
    let against_x: Vec<Metric> = metrics.iter().copied().filter(|metric| !metric.is_distribution()).collect();
    let mut selections = vec![];
    if !against_x.is_empty() {
        selections.push(selection(table, args, against_x, Some(x))?);
    } else if let Some(x) = given {
        return Err(PlotError::option(
            "x",
            x,
            format!("no --x with --y {} alone, which has an axis of its own", metrics[0]),
        ));
    }
    for metric in metrics.iter().filter(|metric| metric.is_distribution()) {
        selections.push(selection(table, args, vec![*metric], None)?);
    }
    if metrics[0].is_distribution() {
        selections.reverse();
    }
    check_panels(table, &selections)?;
    Ok(selections)
}

fn once_each(metrics: &[Metric]) -> Vec<Metric> {
    metrics.iter().enumerate().filter(|(at, metric)| !metrics[..*at].contains(metric)).map(|(_, m)| *m).collect()
}

fn check_panels(table: &RowTable, selections: &[PlotSelection]) -> Result<(), PlotError> {
    let count =
        |selection: &PlotSelection| selection.metrics.len() * selection.panels.map_or(1, |key| table.levels(key).len());
    let panels = selections.iter().map(count).sum::<usize>();
    if panels > MAX_PANELS {
        let expected = format!("at most {MAX_PANELS}: fewer with --y, --panels, or fewer rows with --only");
        return Err(PlotError::Input(format!("found {panels} panels to draw, expected {expected}")));
    }
    Ok(())
}

/// Selects the time series of all rows. They share one axis.
fn over_time(table: &RowTable, args: &PlotArgs) -> Result<PlotSelection, PlotError> {
    let given = if args.y.is_empty() { vec![Metric::Iops] } else { once_each(&args.y) };
    let series =
        |metric: Metric| metric.over_time().ok_or(PlotError::option("y", metric, "iops or latency with --x time"));
    let metrics = given.into_iter().map(series).collect::<Result<Vec<_>, _>>()?;
    let selection = selection(table, args, metrics, None)?;
    check_panels(table, std::slice::from_ref(&selection))?;
    Ok(selection)
}

/// Returns the key of the horizontal axis: the first number with at least three values, else with two; else the first name that
/// varies.
fn axis(table: &RowTable) -> RowKey {
    let with = |least: usize| NUMBERS.into_iter().find(move |key| table.levels(*key).len() >= least);
    let names = || ROW_KEYS.into_iter().find(|key| !key.is_numeric() && table.varies(*key));
    with(3).or_else(|| with(2)).or_else(names).unwrap_or(RowKey::Target)
}

fn selection(
    table: &RowTable,
    args: &PlotArgs,
    metrics: Vec<Metric>,
    x: Option<RowKey>,
) -> Result<PlotSelection, PlotError> {
    let mut series = distinguishing(table, x, args.panels);
    let panels = match args.panels {
        Some(key) if Some(key) == x => {
            return Err(PlotError::option("panels", key, format!("another key than the axis (--x {key})")));
        }
        Some(key) => table.varies(key).then_some(key),
        None => panel_key(table, &series),
    };
    series.retain(|key| Some(*key) != panels);
    let selection = PlotSelection { metrics, x, series, panels };
    let bars = x.filter(|x| !x.is_numeric()).map_or(0, |x| table.levels(x).len());
    if bars > MAX_BARS {
        let x = selection.x.expect("bars are over a key");
        let expected = format!("at most {MAX_BARS}: another --x, or fewer rows with --only");
        return Err(PlotError::Input(format!("--x {x}: found {bars} values to draw bars for, expected {expected}")));
    }
    let found = names(table, &selection.series);
    if found > MAX_SERIES {
        let expected = format!("at most {MAX_SERIES}: choose others with --x or --panels, or fewer rows with --only");
        let what = selection.metrics[0];
        return Err(PlotError::Input(format!("--y {what}: found {found} series in a panel, expected {expected}")));
    }
    Ok(selection)
}

/// Returns the number of series that `keys` make.
fn names(table: &RowTable, keys: &[RowKey]) -> usize {
    (0..table.rows.len()).map(|row| table.identity(row, keys)).collect::<BTreeSet<_>>().len()
}

/// Returns the keys that distinguish rows with the same `x`. A number that follows from others (as many jobs as queues) is left
/// out, and a name that follows from names; `wanted` is kept wherever it varies.
fn distinguishing(table: &RowTable, x: Option<RowKey>, wanted: Option<RowKey>) -> Vec<RowKey> {
    let mut kept: Vec<RowKey> = wanted.into_iter().filter(|key| table.varies(*key)).collect();
    // Numbers first: of numbers that follow from each other, the first one is kept.
    let free = |key: &RowKey| Some(*key) != x && Some(*key) != wanted && table.varies(*key);
    for key in NUMBERS.into_iter().filter(free) {
        let numbers: Vec<RowKey> = kept.iter().copied().chain(x).filter(|key| key.is_numeric()).collect();
        if !table.is_determined(key, &numbers) {
            kept.push(key);
        }
    }
    for key in ROW_KEYS.into_iter().filter(|key| !key.is_numeric()).filter(free) {
        let follows = match key {
            // Only if nothing else distinguishes two rows.
            RowKey::File | RowKey::Repeat => unique(table, &with(&kept, x)),
            _ => table.is_determined(key, &names_of(&kept, x)),
        };
        if !follows {
            kept.push(key);
        }
    }
    // In the order of ROW_KEYS, as series are named.
    kept.sort_by_key(|key| *key as usize);
    kept
}

fn with(kept: &[RowKey], x: Option<RowKey>) -> Vec<RowKey> {
    kept.iter().copied().chain(x).collect()
}

fn names_of(kept: &[RowKey], x: Option<RowKey>) -> Vec<RowKey> {
    with(kept, x).into_iter().filter(|key| !key.is_numeric()).collect()
}

fn unique(table: &RowTable, keys: &[RowKey]) -> bool {
    names(table, keys) == table.rows.len()
}

/// Returns the key that gets panels of its own when `keys` make too many series: the one with the fewest panels that leaves few
/// enough, or else that leaves the fewest series.
fn panel_key(table: &RowTable, keys: &[RowKey]) -> Option<RowKey> {
    // Keys that are usually compared come last.
    const ORDER: [RowKey; 16] = [
        RowKey::Op,
        RowKey::Run,
        RowKey::Latency,
        RowKey::Rw,
        RowKey::Experiment,
        RowKey::Interface,
        RowKey::Bs,
        RowKey::Batch,
        RowKey::Iodepth,
        RowKey::Jobs,
        RowKey::Queues,
        RowKey::Storage,
        RowKey::Poll,
        RowKey::Merge,
        RowKey::Target,
        RowKey::File,
    ];
    // Each panel of a single key would have one series.
    if names(table, keys) <= MAX_SERIES_UNSPLIT || keys.len() < 2 {
        return None;
    }
    let rest = |key: RowKey| keys.iter().copied().filter(|other| *other != key).collect::<Vec<_>>();
    let possible = ORDER.into_iter().filter(|key| keys.contains(key) && table.levels(*key).len() <= MAX_PANELS);
    possible.min_by_key(|key| {
        let left = names(table, &rest(*key));
        if left <= MAX_SERIES_UNSPLIT { (0, table.levels(*key).len()) } else { (1, left) }
    })
}

/// Returns what is constant in all rows, the range of numbers that neither an axis nor a legend shows, and the names that go with what they
/// show: nothing that varies is left out.
pub(super) fn constants(table: &RowTable, selections: &[PlotSelection]) -> String {
    const SAID: [RowKey; 25] = [
        RowKey::Experiment,
        RowKey::Interface,
        RowKey::Target,
        RowKey::Storage,
        RowKey::Latency,
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
        RowKey::Workers,
        RowKey::Poll,
        RowKey::Merge,
        RowKey::Grants,
        RowKey::GrantsPool,
        RowKey::RingOrder,
        RowKey::Run,
    ];
    let drawn =
        |key: &RowKey| selections.iter().any(|c| c.x == Some(*key) || c.series.contains(key) || c.panels == Some(*key));
    let mut words: Vec<String> = vec![];
    let abi = [RowKey::Abi].into_iter().filter(|key| table.varies(*key));
    for key in SAID.into_iter().chain(abi).filter(|key| !drawn(key)) {
        words.extend(match table.levels(key) {
            // The load says it.
            _ if key == RowKey::Op && table.rows.iter().all(|row| row.rw.ends_with(&row.op)) => None,
            [_] if key == RowKey::Run && table.rows.iter().all(|row| row.runs == 1) => None,
            [KeyValue::Text(text)] if text == UNKNOWN => None,
            [KeyValue::Text(text)] if key == RowKey::Distribution && text == "random" => None,
            [KeyValue::Number(1)] if matches!(key, RowKey::Batch | RowKey::Luns | RowKey::Targets) => None,
            [_] if key == RowKey::Experiment && table.rows[0].experiment.is_none() => None,
            // The label of a served disk says what its storage is.
            [KeyValue::Text(storage)] if key == RowKey::Storage && says_storage(table, storage) => None,
            [only] => Some(key.phrase(only)),
            [first, .., last] if key.is_numeric() && levels_are_numbers(table, key) => {
                Some(number_range(table, key, first, last))
            }
            _ => followed(table, key, &drawn),
        });
    }
    if !table.same_in_targets.is_empty() {
        words.push(format!("all targets {}", table.same_in_targets));
    }
    let runs: BTreeSet<u64> = table.rows.iter().map(|row| row.runs).collect();
    if let (Some(first), Some(last)) = (runs.first(), runs.last()) {
        let plural = if *last == 1 { "run" } else { "runs" };
        words.push(if first == last { format!("{first} {plural}") } else { format!("{first} to {last} {plural}") });
    }
    match table.rows.iter().filter(|row| row.errors > 0).count() {
        0 => {}
        count => {
            let what = if table.varies(RowKey::Run) || table.rows[0].run.is_some() { "time series" } else { "rows" };
            words.push(format!("requests failed in {count} of {} {what}", table.rows.len()));
        }
    }
    words.join(", ")
}

fn levels_are_numbers(table: &RowTable, key: RowKey) -> bool {
    table.levels(key).iter().all(|level| matches!(level, KeyValue::Number(_)))
}

/// Returns true if every target's label has the storage in it.
fn says_storage(table: &RowTable, storage: &str) -> bool {
    let has = |row: &super::rows::PlotRow| {
        row.target.contains(storage) || (storage == "file" && row.target.contains("path="))
    };
    table.rows.iter().all(has) || table.same_in_targets.contains(storage)
}

fn number_range(table: &RowTable, key: RowKey, first: &KeyValue, last: &KeyValue) -> String {
    if key == RowKey::Jobs && table.rows.iter().all(|row| row.jobs == row.queues) {
        return "1 job per queue".into();
    }
    if key == RowKey::Jobs && table.rows.iter().all(|row| row.jobs == row.targets * row.luns) {
        return "1 job per LUN".into();
    }
    key.phrase(&KeyValue::Text(format!("{} to {}", key.tick(first), key.tick(last))))
}

/// Returns the values of a key that is not drawn since others that are say it, and which: `poll off or busy, with target`.
fn followed(table: &RowTable, key: RowKey, drawn: &dyn Fn(&RowKey) -> bool) -> Option<String> {
    const MOST: usize = 4;
    if matches!(key, RowKey::Experiment | RowKey::Target) {
        return None;
    }
    let leader = ROW_KEYS.into_iter().filter(drawn).find(|leader| table.is_determined(key, &[*leader]));
    let with = leader.map_or(String::new(), |leader| format!(", with {}", leader.subject()));
    let levels = table.levels(key);
    let shown: Vec<String> = levels.iter().take(MOST).map(|level| key.tick(level)).collect();
    let more = if levels.len() > MOST { " or others" } else { "" };
    Some(format!("{}{more}{with}", key.phrase(&KeyValue::Text(shown.join(" or ")))))
}
