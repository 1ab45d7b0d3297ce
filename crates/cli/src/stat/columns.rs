//! The columns of disks, LUNs and queues, as in iostat where it has them. Times are in milliseconds, as in iostat.

use super::rates::{IoRates, LunIoRates};

/// The table cell for an unknown value.
pub(crate) const UNKNOWN: &str = "-";
/// iostat's kB.
const KIB: f64 = 1024.0;

/// A column.
pub(crate) struct IoColumn {
    /// Its heading, and its name in `--sort`.
    pub(crate) name: &'static str,
    /// Its width; no cell is wider.
    pub(crate) width: usize,
    /// Returns its value, or `None` if there is none.
    pub(crate) value: fn(&IoRates) -> Option<f64>,
    format: fn(f64) -> String,
    /// True if LUNs have it too.
    of_luns: bool,
}

impl IoColumn {
    const fn new(
        name: &'static str,
        width: usize,
        value: fn(&IoRates) -> Option<f64>,
        format: fn(f64) -> String,
    ) -> IoColumn {
        IoColumn { name, width, value, format, of_luns: false }
    }

    const fn and_of_luns(self) -> IoColumn {
        IoColumn { of_luns: true, ..self }
    }

    /// Formats the cell of these rates.
    pub(crate) fn cell(&self, rates: Option<&IoRates>) -> String {
        rates.and_then(self.value).map_or(UNKNOWN.to_owned(), self.format)
    }

    /// Formats the cell of a LUN.
    pub(crate) fn lun_cell(&self, rates: Option<&LunIoRates>) -> String {
        let rates = rates.filter(|_| self.of_luns).map(lun_as_io);
        self.cell(rates.as_ref())
    }
}

/// All columns, in their display order.
pub(crate) const COLUMNS: &[IoColumn] = &[
    IoColumn::new("r/s", 7, |it| Some(it.reads_per_s), rate).and_of_luns(),
    IoColumn::new("w/s", 7, |it| Some(it.writes_per_s), rate).and_of_luns(),
    IoColumn::new("d/s", 6, |it| Some(it.discards_per_s), rate),
    IoColumn::new("f/s", 6, |it| Some(it.flushes_per_s), rate),
    IoColumn::new("rkB/s", 7, |it| Some(it.read_bytes_per_s / KIB), rate).and_of_luns(),
    IoColumn::new("wkB/s", 7, |it| Some(it.written_bytes_per_s / KIB), rate).and_of_luns(),
    IoColumn::new("rrqm/s", 7, |it| Some(it.read_merges_per_s), rate),
    IoColumn::new("wrqm/s", 7, |it| Some(it.write_merges_per_s), rate),
    IoColumn::new("rareq-sz", 8, |it| Some(it.read_request_bytes / KIB), rate).and_of_luns(),
    IoColumn::new("wareq-sz", 8, |it| Some(it.write_request_bytes / KIB), rate).and_of_luns(),
    IoColumn::new("r_await", 7, |it| Some(it.read_await_us), millis).and_of_luns(),
    IoColumn::new("w_await", 7, |it| Some(it.write_await_us), millis).and_of_luns(),
    IoColumn::new("queued", 7, |it| Some(it.queued_us), millis),
    IoColumn::new("device", 7, |it| Some(it.device_us), millis),
    IoColumn::new("publish", 7, |it| Some(it.publish_us), millis),
    IoColumn::new("p50", 6, |it| it.p50_us, millis),
    IoColumn::new("p99", 6, |it| it.p99_us, millis),
    IoColumn::new("p99.9", 6, |it| it.p999_us, millis),
    IoColumn::new("aqu-sz", 7, |it| Some(it.queue_size), rate).and_of_luns(),
    IoColumn::new("%util", 5, |it| it.util_percent, percent),
    IoColumn::new("%poll", 5, |it| Some(it.poll_percent), percent),
    IoColumn::new("kicks/s", 7, |it| Some(it.kicks_per_s), rate),
    IoColumn::new("calls/s", 7, |it| Some(it.calls_per_s), rate),
    IoColumn::new("inflight", 8, |it| Some(it.in_flight as f64), count).and_of_luns(),
    IoColumn::new("oldest-ms", 9, |it| it.oldest_ms.map(|ms| ms as f64), count).and_of_luns(),
    IoColumn::new("errors", 7, |it| Some(it.errors as f64), count).and_of_luns(),
];

/// Priority of columns where there is no room for all: groups, the most important first. A group is shown as a whole.
const GROUPS: &[&[&str]] = &[
    &["r/s"],
    &["w/s"],
    &["rkB/s"],
    &["wkB/s"],
    &["r_await"],
    &["w_await"],
    &["aqu-sz"],
    &["%util"],
    &["p99"],
    &["p50", "p99.9"],
    &["rareq-sz", "wareq-sz"],
    &["rrqm/s", "wrqm/s"],
    &["queued", "device", "publish"],
    &["f/s"],
    &["d/s"],
    &["%poll"],
    &["inflight"],
    &["errors"],
    &["kicks/s", "calls/s"],
    &["oldest-ms"],
];

/// Columns that are shown only if there are any.
pub(super) const DISCARDS: &str = "d/s";
/// As [`DISCARDS`].
pub(super) const FLUSHES: &str = "f/s";

/// Returns the columns that fit into `room` characters, each with a blank before it, without those of `hidden`.
pub(crate) fn columns_within(room: usize, hidden: &[&str]) -> Vec<&'static IoColumn> {
    let mut left = room;
    let mut shown: Vec<&str> = Vec::new();
    for group in GROUPS.iter().filter(|group| !hidden.contains(&group[0])) {
        let needed = COLUMNS.iter().filter(|column| group.contains(&column.name)).map(|column| column.width + 1).sum();
        if let Some(rest) = left.checked_sub(needed) {
            left = rest;
            shown.extend(*group);
        }
    }
    COLUMNS.iter().filter(|column| shown.contains(&column.name)).collect()
}

/// Returns the rates of a LUN as those of a disk.
pub(crate) fn lun_as_io(of: &LunIoRates) -> IoRates {
    IoRates {
        reads_per_s: of.reads_per_s,
        writes_per_s: of.writes_per_s,
        read_bytes_per_s: of.read_bytes_per_s,
        written_bytes_per_s: of.written_bytes_per_s,
        request_sectors: of.request_sectors,
        read_request_bytes: of.read_request_bytes,
        write_request_bytes: of.write_request_bytes,
        queue_size: of.queue_size,
        await_us: of.await_us,
        read_await_us: of.read_await_us,
        write_await_us: of.write_await_us,
        in_flight: of.in_flight,
        oldest_ms: of.oldest_ms,
        errors: of.errors,
        ..IoRates::default()
    }
}

/// Formats a rate in 7 characters: two decimals for small numbers, M for large ones.
pub(crate) fn rate(value: f64) -> String {
    match value {
        value if value >= 9.9995e9 => format!("{:.1}G", value / 1e9),
        value if value >= 9_999_999.5 => format!("{:.1}M", value / 1e6),
        value if value >= 999.95 => format!("{value:.0}"),
        value if value >= 99.995 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// Formats microseconds as milliseconds, in 6 characters up to 17 minutes.
pub(crate) fn millis(us: f64) -> String {
    match us / 1e3 {
        ms if ms >= 999.95 => format!("{ms:.0}"),
        ms if ms >= 99.995 => format!("{ms:.1}"),
        ms if ms >= 9.9995 => format!("{ms:.2}"),
        ms => format!("{ms:.3}"),
    }
}

/// Formats a percentage in 5 characters.
pub(crate) fn percent(value: f64) -> String {
    if value >= 99.95 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn count(value: f64) -> String {
    format!("{value:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(room: usize) -> Vec<&'static str> {
        columns_within(room, &[DISCARDS, FLUSHES]).iter().map(|column| column.name).collect()
    }

    #[test]
    fn more_room_has_more_columns() {
        let base = ["r/s", "w/s", "rkB/s", "wkB/s", "r_await", "w_await", "p99", "aqu-sz", "%util"];
        assert_eq!(names(69), base, "what 80 characters have");
        assert_eq!(names(16), ["r/s", "w/s"]);
        assert_eq!(names(0), Vec::<&str>::new());
        let wide = names(103);
        for name in ["p50", "p99.9", "rareq-sz", "wareq-sz"] {
            assert!(wide.contains(&name), "{name}: {wide:?}");
        }
        assert_eq!(names(1000).len(), COLUMNS.len() - 2);
        assert_eq!(columns_within(1000, &[]).len(), COLUMNS.len());
    }

    #[test]
    fn every_column_is_in_a_group_and_no_wider_than_its_heading_needs() {
        for column in COLUMNS {
            let groups = GROUPS.iter().filter(|group| group.contains(&column.name)).count();
            assert_eq!((groups, column.name.len() <= column.width), (1, true), "{}", column.name);
        }
        assert_eq!(GROUPS.iter().map(|group| group.len()).sum::<usize>(), COLUMNS.len());
    }

    #[test]
    fn digits() {
        for (value, want) in [
            (0.0, "0.00"),
            (99.994, "99.99"),
            (99.996, "100.0"),
            (999.94, "999.9"),
            (999.96, "1000"),
            (9_999_999.4, "9999999"),
            (1e7, "10.0M"),
            (12.34e9, "12.3G"),
        ] {
            assert_eq!(rate(value), want);
        }
        for (us, want) in [
            (0.0, "0.000"),
            (105.25, "0.105"),
            (9_999.4, "9.999"),
            (9_999.6, "10.00"),
            (123_456.0, "123.5"),
            (5e6, "5000"),
        ] {
            assert_eq!(millis(us), want);
        }
        assert_eq!(
            (percent(99.94), percent(100.0), percent(0.04)),
            ("99.9".to_owned(), "100".to_owned(), "0.0".to_owned())
        );
    }
}
