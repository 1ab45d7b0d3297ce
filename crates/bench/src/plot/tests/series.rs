//! Time series: lines, points, and pauses.

use super::super::intervals::{OperationSeries, SeriesInterval};
use super::super::picture::SeriesLine;
use super::*;

/// Returns a series with intervals of 100 ms. `None`: nothing completed.
fn series(run: u64, op: &'static str, iops: &[Option<f64>]) -> OperationSeries {
    let point = |(at, iops): (usize, &Option<f64>)| SeriesInterval {
        time_ms: (at as f64 * 100.0, (at + 1) as f64 * 100.0),
        iops: iops.unwrap_or(0.0),
        latency: iops.map(|iops| (1e6 / iops, 2e6 / iops)),
    };
    OperationSeries { run, op, errors: 0, interval_ms: 100.0, points: iops.iter().enumerate().map(point).collect() }
}

fn with_series(row: PlotRow, all: &[OperationSeries]) -> PlotRow {
    PlotRow { series: all.to_vec(), ..row }
}

fn over_time(y: Vec<Metric>) -> PlotArgs {
    PlotArgs { x: Some(RowKey::Time), y, ..args() }
}

fn chart(rows: Vec<PlotRow>, args: &PlotArgs) -> Chart {
    let chart = drawn(of_each_run(rows).unwrap(), args);
    check_picture(&chart, &chart.title);
    chart
}

fn values(line: &SeriesLine) -> Vec<(f64, f64)> {
    line.samples.iter().map(|sample| (sample.x, sample.y)).collect()
}

#[test]
fn a_run_is_a_line_over_time() {
    let runs = [series(1, "read", &[Some(1000.0), Some(3000.0)]), series(2, "read", &[Some(500.0), None])];
    let chart = chart(vec![with_series(row(json!({})), &runs)], &over_time(vec![Metric::Latency, Metric::Iops]));
    assert_eq!(chart.title, "Latency and IOPS over time");
    assert!(!chart.subtitle.contains("reads") && chart.subtitle.ends_with("3 runs"), "{}", chart.subtitle);
    assert_eq!(chart.caption, ["A point is an interval of 100 ms, at its middle."]);
    let group = &chart.groups[0];
    assert_eq!(
        (group.series.as_slice(), group.styles),
        (["run 1", "run 2"].map(String::from).as_slice(), Some(["mean latency", "greatest latency"]))
    );
    let [latency, iops] = group.panels.as_slice() else { panic!("{group:?}") };
    assert_eq!(
        iops.lines.iter().map(values).collect::<Vec<_>>(),
        [[(0.05, 1000.0), (0.15, 3000.0)], [(0.05, 500.0), (0.15, 0.0)]]
    );
    assert_eq!(iops.lines[0].samples[1].label, "100 ms to 200 ms: 3k IOPS");
    assert_eq!(iops.x.title, "time from the start of the measurement (s)");
    let ticks: Vec<&str> = iops.x.ticks.iter().map(|tick| tick.label.as_str()).collect();
    assert_eq!((ticks[0], ticks[ticks.len() - 1]), ("0", "0.2"));
    let lines: Vec<_> = latency.lines.iter().map(|line| (line.series, line.dashed, values(line).len())).collect();
    assert_eq!(lines, [(0, false, 2), (0, true, 2), (1, false, 1), (1, true, 1)]);
    assert_eq!(latency.lines[1].samples[0].label, "0 to 100 ms: greatest 2 ms");
}

#[test]
fn a_pause_is_0_iops_and_a_gap_in_the_latency() {
    let runs = [series(1, "read", &[Some(1000.0), None, None, Some(1000.0), Some(2000.0)])];
    let row = PlotRow { runs: 1, ..with_series(row(json!({})), &runs) };
    let chart = chart(vec![row], &over_time(vec![Metric::Iops, Metric::Latency]));
    let [iops, latency] = chart.groups[0].panels.as_slice() else { panic!("{chart:?}") };
    let drawn: Vec<f64> = iops.lines[0].samples.iter().map(|sample| sample.y).collect();
    assert_eq!((iops.lines.len(), drawn.as_slice()), (1, [1000.0, 0.0, 0.0, 1000.0, 2000.0].as_slice()));
    let solid: Vec<usize> = latency.lines.iter().filter(|line| !line.dashed).map(|line| line.samples.len()).collect();
    assert_eq!((solid, chart.groups[0].series.as_slice()), (vec![1, 2], [String::new()].as_slice()));
    assert!(!chart.subtitle.contains("run 1"), "{}", chart.subtitle);
}

#[test]
fn what_varies_is_named() {
    let some = [Some(1000.0)];
    let mixed = [series(1, "read", &some), series(1, "write", &some)];
    let load = |rw: &str| row(json!({"rw": rw}));
    let of = |rows: Vec<PlotRow>, args: &PlotArgs| chart(rows, args).groups.swap_remove(0).series;
    let plain = over_time(vec![]);
    assert_eq!(of(vec![with_series(load("randrw"), &mixed)], &plain), ["reads", "writes"]);
    let two = vec![with_series(load("read"), &mixed[..1]), with_series(load("randwrite"), &mixed[1..])];
    assert_eq!(of(two.clone(), &plain), ["read", "randwrite"]);
    assert!(!chart(two, &plain).subtitle.contains("reads"));
    let queues = |queues: u64| row(json!({"rw": "rw", "queues": queues}));
    let both =
        [series(1, "read", &some), series(2, "read", &some), series(1, "write", &some), series(2, "write", &some)];
    let rows = vec![with_series(queues(1), &both), with_series(queues(8), &both)];
    // Eight would share a panel.
    let chart = chart(rows.clone(), &plain);
    assert_eq!(chart.groups[0].series, ["1 queue, run 1", "1 queue, run 2", "8 queues, run 1", "8 queues, run 2"]);
    let headings: Vec<_> = chart.groups[0].panels.iter().map(|panel| panel.heading.clone()).collect();
    assert_eq!(headings, [Some("reads".to_owned()), Some("writes".to_owned())]);
    // Keys with one chosen value are named.
    let only = [
        RowFilter::parse("run=2").unwrap(),
        RowFilter::parse("op=read").unwrap(),
        RowFilter::parse("queues=1").unwrap(),
    ];
    let rows = filter_rows(of_each_run(rows).unwrap(), &only).unwrap();
    let table = RowTable::new(rows);
    let text = constants(&table, &select(&table, &plain).unwrap());
    assert!(text.contains("rw, reads,") && text.contains("run 2, 3 runs"), "{text}");
}

#[test]
fn many_intervals_make_a_point_and_nothing_is_lost() {
    let many: Vec<Option<f64>> = (0..2500).map(|at| (at % 3 != 0).then_some(600.0)).collect();
    let mut one = series(1, "read", &many);
    // The last interval is half as long, and has a latency of its own.
    let last = one.points.last_mut().unwrap();
    last.time_ms.1 -= 50.0;
    last.latency = None;
    last.iops = 0.0;
    one.points[1].latency = Some((100.0, 9e6));
    let chart = chart(vec![with_series(row(json!({})), &[one])], &over_time(vec![Metric::Iops, Metric::Latency]));
    assert_eq!(
        chart.caption,
        ["A point is 3 intervals of 100 ms together, at their middle: mean IOPS, mean latency, greatest latency."]
    );
    let [iops, latency] = chart.groups[0].panels.as_slice() else { panic!("{chart:?}") };
    let drawn = values(&iops.lines[0]);
    assert_eq!((drawn.len(), drawn[0], drawn[1]), (834, (0.15, 400.0), (0.45, 400.0)));
    assert_eq!(drawn[833], ((249.9 + 249.95) / 2.0, 0.0));
    let (mean, most) = (values(&latency.lines[0])[0].1, values(&latency.lines[1])[0].1);
    assert!((mean - (100.0 + 1e6 / 600.0) / 2.0).abs() < 1e-6 && most == 9e6, "{mean} {most}");
    assert_eq!(latency.lines[0].samples.len(), 833, "nothing completed in the last one");
}

#[test]
fn what_has_no_series_is_said() {
    let nothing = of_each_run(vec![row(json!({}))]).unwrap_err().to_string();
    assert_eq!(
        nothing,
        "--x: found time, and no row with a time series (the key series of each_run), expected at least one: record it with `mqblk bench --interval 100ms --json FILE`"
    );
    // Rows that have one are drawn.
    let rows =
        of_each_run(vec![row(json!({})), with_series(row(json!({})), &[series(1, "read", &[Some(1.0)])])]).unwrap();
    assert_eq!(rows.len(), 1);
    for (y, found) in [(Metric::Bandwidth, "bandwidth"), (Metric::Cdf, "cdf"), (Metric::Cpu, "cpu")] {
        let text = error(rows.clone(), &over_time(vec![y]));
        assert_eq!(text, format!("--y: found {found}, expected iops or latency with --x time"));
    }
    let crowd: Vec<OperationSeries> = (1..=20).map(|run| series(run, "read", &[Some(1.0)])).collect();
    let text = error(of_each_run(vec![with_series(row(json!({})), &crowd)]).unwrap(), &over_time(vec![]));
    assert!(text.starts_with("--y iops: found 20 series in a panel, expected at most 14"), "{text}");
}
