//! What a picture must not leave open: which key varies, what a value is relative to, which series is which.

use std::collections::BTreeSet;

use super::super::chart::Chart;
use super::super::markers::{reference_style, style};
use super::super::select::MAX_SERIES;
use super::*;

fn chart(rows: Vec<PlotRow>, args: &PlotArgs, options: &ChartOptions) -> Chart {
    let table = RowTable::new(rows);
    build::chart(&table, &select(&table, args).unwrap(), options)
}

fn subtitle(rows: Vec<PlotRow>) -> String {
    chart(rows, &args(), &ChartOptions::default()).subtitle
}

#[test]
fn every_key_that_varies_is_named() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}];
    let follows: &[Change] = &[&|_| {}, &|r| {
        (r.target, r.poll, r.merge, r.storage) = ("z".into(), "busy".into(), "on".into(), "file".into());
        (r.workers, r.ring_order, r.storage_latency) = (Some(4), Some(2), Some(10));
        (r.grants, r.abi) = ("copy".into(), "arm".into());
    }];
    let text = subtitle(sweep(&[bs, follows]));
    for named in
        ["poll off or busy, with target", "merge off or on, with target", "storage null or file", "abi unknown or arm"]
    {
        assert!(text.contains(named), "{named}: {text}");
    }
    for named in ["unknown or 4 workers, with target", "ring order unknown or 2, with target"] {
        assert!(text.contains(named), "{named}: {text}");
    }
    let orders: &[Change] = &[&|r| r.ring_order = Some(0), &|r| r.ring_order = Some(4)];
    assert_eq!(
        super::names(sweep(&[bs, orders]), &PlotArgs { x: Some(PlotAxis::Key(RowKey::Bs)), ..args() }),
        ["ring order 0", "ring order 4"]
    );
    let rates: &[Change] = &[&|r| r.rate_iops = Some(1000), &|r| r.rate_iops = Some(5000)];
    assert_eq!(chosen(sweep(&[rates]), &args())[0].x, Some(RowKey::RateIops));
    let loads: &[Change] = &[&|_| {}, &|r| (r.fsync, r.distribution) = (Some(8), "zipf:1.1".into())];
    let names = super::names(sweep(&[bs, loads]), &args());
    assert!(names[1].contains("fsync 8") && names[1].contains("zipf:1.1"), "{names:?}");
    let latencies: &[Change] = &[&|r| r.storage_latency = Some(0), &|r| r.storage_latency = Some(30)];
    let selection = &chosen(sweep(&[latencies]), &args())[0];
    assert_eq!(
        (selection.x, selection.x.map(RowKey::title)),
        (Some(RowKey::Latency), Some("latency of the storage (us)"))
    );
}

#[test]
fn targets_have_short_names_and_what_they_share_is_said_once() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}];
    let targets: &[Change] = &[&|r| r.target = "storage=null,size=1T,latency-us=10".into(), &|r| {
        r.target = "storage=null,size=1T,latency-us=30".into()
    }];
    let rows = sweep(&[bs, targets]);
    assert_eq!(names(rows.clone(), &args()), ["latency-us=10", "latency-us=30"]);
    assert!(subtitle(rows).contains("all targets storage=null,size=1T"));
    // The latency is a key of its own.
    let latencies: &[Change] =
        &[&|r| (r.target, r.storage_latency) = ("storage=null,latency-us=10".into(), Some(10)), &|r| {
            (r.target, r.storage_latency) = ("storage=null,latency-us=30".into(), Some(30))
        }];
    assert_eq!(names(sweep(&[bs, latencies]), &args()), ["storage latency 10 us", "storage latency 30 us"]);
    // One that would have no name keeps them all.
    let some: &[Change] = &[&|r| r.target = "storage=null".into(), &|r| r.target = "storage=null,size=1T".into()];
    assert_eq!(names(sweep(&[bs, some]), &args()), ["storage=null", "storage=null,size=1T"]);
}

#[test]
fn no_two_series_share_a_colour() {
    let colours: BTreeSet<u32> = (0..MAX_SERIES).map(|series| style(series).color.0).collect();
    assert_eq!(colours.len(), MAX_SERIES);
    let looks: BTreeSet<String> = (0..MAX_SERIES).map(|series| format!("{:?}", style(series))).collect();
    assert_eq!(looks.len(), MAX_SERIES);
    for reference in 0..4 {
        let grey = reference_style(reference).color.0;
        let [_, red, green, blue] = grey.to_be_bytes();
        assert!(red == green && green == blue && !colours.contains(&grey), "{grey:x}");
    }
}

#[test]
fn ratios_are_to_the_row_that_agrees_in_all_else() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}];
    let queues: &[Change] = &[&|_| {}, &|r| (r.queues, r.jobs) = (8, 8)];
    let mut rows = sweep(&[bs, queues]);
    for (row, iops) in rows.iter_mut().zip([100.0, 150.0, 200.0, 500.0]) {
        row.iops = (iops, iops / 10.0);
    }
    let of = |ratio: &str| {
        let options = ChartOptions { ratio: Some(parse_filter(ratio).unwrap()), ..ChartOptions::default() };
        chart(rows.clone(), &args(), &options).groups.swap_remove(0).panels.swap_remove(0)
    };
    let panel = of("queues=1");
    assert_eq!((panel.y_title.as_str(), panel.baseline), ("IOPS, ratio to queues 1", Some(1.0)));
    let values: Vec<Vec<f64>> =
        panel.lines.iter().map(|line| line.samples.iter().map(|sample| sample.y).collect()).collect();
    assert_eq!(values, [[1.0, 1.0], [1.5, 2.5]]);
    // Both relative errors are 10 %; a row differs from itself by nothing.
    let errors: Vec<f64> = panel.lines.iter().map(|line| line.samples[0].error).collect();
    assert!(errors[0] == 0.0 && (errors[1] - 1.5 * 0.02_f64.sqrt()).abs() < 1e-12, "{errors:?}");
    assert_eq!(panel.lines[1].samples[0].label, "bs 512: 1.5 ± 0.212");
    let sizes: Vec<f64> = of("bs=512").lines.iter().map(|line| line.samples[1].y).collect();
    assert!((sizes[0] - 2.0).abs() < 1e-12 && (sizes[1] - 500.0 / 150.0).abs() < 1e-12, "{sizes:?}");
}

#[test]
fn a_ratio_that_cannot_be_drawn_is_an_error() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}];
    let table = RowTable::new(sweep(&[bs]));
    let selections = select(&table, &args()).unwrap();
    for (ratio, want) in [
        ("bs=1M", "--ratio: found bs=1M, expected one of 512 4K"),
        ("queues=1", "--ratio: found queues, expected a key that is drawn"),
    ] {
        let filter = parse_filter(ratio).unwrap();
        let error = super::super::check_ratio(&table, &selections, &filter).unwrap_err().to_string();
        assert!(error.starts_with(want), "{error}");
    }
}

#[test]
fn scales_distributions_and_units_are_as_chosen() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}, &|r| r.bs = 1 << 20];
    let of = |y: Metric, scale: AxisChoice| {
        let options = ChartOptions { scale, ..ChartOptions::default() };
        chart(sweep(&[bs]), &PlotArgs { y: vec![y], ..args() }, &options)
    };
    assert!(of(Metric::Iops, AxisChoice::Log).groups[0].panels[0].y.log);
    assert!(!of(Metric::Iops, AxisChoice::Auto).groups[0].panels[0].y.log);
    assert!(!of(Metric::Percentiles, AxisChoice::Linear).groups[0].panels[0].y.log);
    let cdf = of(Metric::Cdf, AxisChoice::Log);
    let panel = &cdf.groups[0].panels[0];
    assert!(!panel.y.log && panel.y.ticks.last().is_some_and(|tick| tick.label == "100%"), "{:?}", panel.y);
    let points: Vec<(f64, f64)> = panel.lines[0].samples.iter().map(|sample| (sample.x, sample.y)).collect();
    assert_eq!(points, [(1.0, 50.0), (30_f64.log10(), 99.0), (90_f64.log10(), 99.9), (2000_f64.log10(), 100.0)]);
    let ticks: Vec<&str> = panel.x.ticks.iter().map(|tick| tick.label.as_str()).collect();
    assert_eq!((ticks[0], ticks[ticks.len() - 1]), ("10 us", "2 ms"));
    let mut merging = sweep(&[bs]);
    for row in &mut merging {
        (row.merges, row.requests_per_io, row.iops.0) = (Some(150.0), 2, 100.0);
    }
    let merges = chart(merging, &PlotArgs { y: vec![Metric::Merges], ..args() }, &ChartOptions::default());
    assert_eq!(merges.groups[0].panels[0].lines[0].samples[0].short, "75%");
}

#[test]
fn captions_say_what_error_bars_are() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}];
    let caption = |rows: Vec<PlotRow>| chart(rows, &args(), &ChartOptions::default()).caption.join(" ");
    let rows = sweep(&[bs]);
    assert_eq!(caption(rows.clone()), "Error bars of IOPS: one standard error of the mean of the runs, up and down.");
    let once = |rows: &[PlotRow]| rows.iter().map(|row| PlotRow { runs: 1, ..row.clone() }).collect::<Vec<_>>();
    assert_eq!(caption(once(&rows)), "IOPS: one run each, so that no error is known.");
    assert!(caption([once(&rows[..1]), rows[1..].to_vec()].concat()).ends_with("rows of a single run have none."));
}
