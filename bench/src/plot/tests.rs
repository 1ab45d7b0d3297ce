use std::path::PathBuf;

use super::keys::{RowKey, RowTable};
use super::layout;
use super::metric::Metric;
use super::ratio::{AxisChoice, ChartOptions};
use super::rows::PlotRow;
use super::scene::{Anchor, Font, Outline, Scene, SceneShape, TextLine};
use super::select::{PlotSelection, constants, select};
use super::{PlotArgs, PlotAxis, PlotError, build, filter_rows, parse_filter};

mod series;
mod unambiguous;

/// A change to [`row`].
type Change<'a> = &'a dyn Fn(&mut PlotRow);
type OwnChange = Box<dyn Fn(&mut PlotRow)>;

fn row() -> PlotRow {
    PlotRow {
        file: "a".into(),
        target: "null".into(),
        interface: "virtio-blk".into(),
        storage: "null".into(),
        rw: "read".into(),
        poll: "off".into(),
        merge: "off".into(),
        grants: "unknown".into(),
        grants_pool: "unknown".into(),
        ring_order: None,
        abi: "unknown".into(),
        rate_iops: None,
        fsync: None,
        distribution: "unknown".into(),
        workers: None,
        storage_latency: None,
        experiment: None,
        bs: 4096,
        bs_max: 0,
        targets: 1,
        luns: 1,
        steer: "unknown".into(),
        queues: 1,
        jobs: 1,
        iodepth: 32,
        batch: 1,
        runs: 3,
        iops: (100_000.0, 500.0),
        bandwidth: (100_000.0 * 4096.0, 500.0 * 4096.0),
        percentiles: vec![(50.0, 10.0), (99.0, 30.0), (99.9, 90.0), (100.0, 2000.0)],
        latency: (10.0, 30.0),
        server_cpu: Some(1.5),
        merges: None,
        requests_per_io: 1,
        errors: 0,
        series: vec![],
        run: None,
        op: "unknown".into(),
    }
}

fn args() -> PlotArgs {
    PlotArgs {
        results: vec![],
        output: PathBuf::new(),
        x: None,
        y: vec![],
        panels: None,
        only: vec![],
        ratio: None,
        scale: AxisChoice::Auto,
        title: None,
    }
}

/// Returns the rows of all combinations of changes; no two results are equal.
fn sweep(changes: &[&[Change]]) -> Vec<PlotRow> {
    let mut rows = vec![row()];
    for change in changes {
        rows = rows.iter().flat_map(|row| change.iter().map(|change| changed(row, change))).collect();
    }
    for (at, row) in rows.iter_mut().enumerate() {
        row.iops.0 += 10_000.0 * at as f64;
    }
    rows
}

fn changed(row: &PlotRow, change: &dyn Fn(&mut PlotRow)) -> PlotRow {
    let mut row = row.clone();
    change(&mut row);
    row
}

fn chosen(rows: Vec<PlotRow>, args: &PlotArgs) -> Vec<PlotSelection> {
    select(&RowTable::new(rows), args).unwrap()
}

fn error(rows: Vec<PlotRow>, args: &PlotArgs) -> String {
    match select(&RowTable::new(rows), args) {
        Err(PlotError::Input(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn names(rows: Vec<PlotRow>, args: &PlotArgs) -> Vec<String> {
    let table = RowTable::new(rows);
    let selections = select(&table, args).unwrap();
    build::chart(&table, &selections, &ChartOptions::default()).groups.swap_remove(0).series
}

#[test]
fn the_axis_is_the_first_number_that_varies_most() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|r| r.bs = 4096];
    let queues: &[Change] = &[&|r| r.queues = 1, &|r| r.queues = 2, &|r| r.queues = 4];
    let depth: &[Change] = &[&|r| r.iodepth = 1, &|r| r.iodepth = 8];
    let axis = |changes: &[_]| chosen(sweep(changes), &args())[0].x;
    assert_eq!(axis(&[bs, depth]), Some(RowKey::Bs));
    assert_eq!(axis(&[bs, queues, depth]), Some(RowKey::Queues));
    assert_eq!(axis(&[depth]), Some(RowKey::Iodepth));
    let selection = &chosen(sweep(&[bs, queues]), &PlotArgs { x: Some(PlotAxis::Key(RowKey::Bs)), ..args() })[0];
    assert_eq!(
        (selection.x, selection.series.as_slice(), selection.panels),
        (Some(RowKey::Bs), [RowKey::Queues].as_slice(), None)
    );
    assert_eq!(selection.metrics, [Metric::Iops]);
}

#[test]
fn series_are_named_by_what_tells_them_apart() {
    let targets: &[Change] = &[&|r| (r.target, r.storage) = ("z".into(), "file".into()), &|_| {}];
    let queues: &[Change] = &[&|r| (r.queues, r.jobs) = (8, 8), &|_| {}];
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}, &|r| r.bs = 1 << 20];
    // Targets are in the order of the file, queues ascend; storage follows from target, and jobs from queues.
    assert_eq!(
        names(sweep(&[bs, targets, queues]), &args()),
        ["z, 1 queue", "z, 8 queues", "null, 1 queue", "null, 8 queues"]
    );
    assert_eq!(names(sweep(&[bs]), &args()), [""]);
    // Jobs that do not follow from queues.
    let jobs: &[Change] = &[&|r| r.jobs = 8, &|r| r.jobs = 16];
    assert_eq!(names(sweep(&[bs, jobs]), &args()), ["8 jobs", "16 jobs"]);
    // What differs between targets is named, even if each target has one value only.
    let deeper: &[Change] = &[&|r| (r.target, r.iodepth) = ("z".into(), 1), &|_| {}];
    assert_eq!(names(sweep(&[bs, deeper]), &args()), ["z, iodepth 1", "null, iodepth 32"]);
    let pools: &[Change] = &[&|r| r.grants_pool = "shared".into(), &|r| r.grants_pool = "per-ring".into()];
    let rings: &[Change] = &[&|_| {}, &|r| r.queues = 4, &|r| r.queues = 16];
    assert_eq!(names(sweep(&[pools, rings]), &args()), ["pool shared", "pool per-ring"]);
    let merging: &[Change] = &[&|r| r.merge = "on".into(), &|_| {}];
    let three = PlotArgs { x: Some(PlotAxis::Key(RowKey::Bs)), ..args() };
    assert_eq!(names(sweep(&[bs, merging]), &three), ["merge on", "merge off"]);
}

#[test]
fn files_and_repeats_are_named_only_when_nothing_else_differs() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}];
    let one = sweep(&[bs]);
    let other =
        |change: &dyn Fn(&mut PlotRow)| [one.clone(), one.iter().map(|row| changed(row, change)).collect()].concat();
    assert_eq!(names(other(&|r| r.file = "b".into()), &args()), ["a", "b"]);
    assert_eq!(names(other(&|r| (r.file, r.target) = ("b".into(), "ram".into())), &args()), ["null", "ram"]);
    assert_eq!(names(other(&|_| {}), &args()), ["#1", "#2"]);
}

#[test]
fn without_a_number_there_are_bars_and_percentiles() {
    let targets: &[Change] = &[&|r| r.target = "z".into(), &|_| {}];
    let selections = chosen(sweep(&[targets]), &args());
    assert_eq!(selections.iter().map(|selection| selection.x).collect::<Vec<_>>(), [Some(RowKey::Target), None]);
    assert_eq!(selections[1].series, [RowKey::Target]);
    let selections = chosen(vec![row()], &args());
    assert_eq!(
        (selections.len(), selections[0].x, selections[0].metrics.as_slice()),
        (1, None, [Metric::Percentiles].as_slice())
    );
    let table = RowTable::new(sweep(&[targets]));
    let chart = build::chart(&table, &select(&table, &args()).unwrap(), &ChartOptions::default());
    assert_eq!(chart.title, "IOPS by target; latency percentiles");
    assert_eq!(
        chart.subtitle,
        "virtio-blk, storage null, read, bs 4K, 1 queue, 1 job, iodepth 32, poll off, merge off, 3 runs"
    );
    assert!(chart.groups[0].panels[0].x.bars && !chart.groups[0].panels[0].y.log && chart.groups[1].panels[0].y.log);
}

#[test]
fn many_series_get_panels() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}, &|r| r.bs = 1 << 20];
    let rw: &[Change] = &[&|_| {}, &|r| r.rw = "randread".into()];
    let targets: &[Change] = &[&|r| r.target = "z".into(), &|_| {}];
    let queues: &[Change] = &[&|_| {}, &|r| r.queues = 8];
    let rows = sweep(&[bs, targets, rw, queues]);
    let selection = &chosen(rows.clone(), &args())[0];
    assert_eq!(
        (selection.panels, selection.series.as_slice()),
        (Some(RowKey::Rw), [RowKey::Target, RowKey::Queues].as_slice())
    );
    let selection = &chosen(rows.clone(), &PlotArgs { panels: Some(RowKey::Target), ..args() })[0];
    assert_eq!(
        (selection.panels, selection.series.as_slice()),
        (Some(RowKey::Target), [RowKey::Rw, RowKey::Queues].as_slice())
    );
    // Percentiles have an axis of their own: block sizes are among the series.
    let selection = &chosen(rows.clone(), &PlotArgs { y: vec![Metric::Percentiles], ..args() })[0];
    assert_eq!(selection.panels, Some(RowKey::Bs));
    assert!(
        error(rows, &PlotArgs { panels: Some(RowKey::Bs), ..args() })
            .starts_with("--panels: found bs, expected another key")
    );
}

#[test]
fn what_cannot_be_drawn_is_an_error() {
    let many =
        |change: fn(&mut PlotRow, u64)| (0..30).map(|n| changed(&row(), &|row| change(row, n))).collect::<Vec<_>>();
    let y = |metric| PlotArgs { y: vec![metric], ..args() };
    let names = many(|row, n| row.target = n.to_string());
    assert!(error(names, &args()).starts_with("--x target: found 30 values to draw bars for, expected at most 24"));
    let sizes = many(|row, n| row.bs = 1 << n);
    assert_eq!(chosen(sizes.clone(), &args()).len(), 1);
    let crowd = error(sizes, &y(Metric::Percentiles));
    assert!(crowd.starts_with("--y percentiles: found 30 series in a panel, expected at most 14"), "{crowd}");
    let panels = many(|row, n| (row.bs, row.queues) = (n % 3 + 1, n / 3 + 1));
    let args_panels =
        PlotArgs { y: vec![Metric::Iops, Metric::Cpu, Metric::Latency], panels: Some(RowKey::Queues), ..args() };
    assert!(
        error(panels, &PlotArgs { x: Some(PlotAxis::Key(RowKey::Bs)), ..args_panels })
            .starts_with("found 30 panels to draw")
    );
    assert!(
        error(vec![row()], &y(Metric::Merges)).starts_with("--y merges: found no row with rrqm_per_s or wrqm_per_s")
    );
    let both = PlotArgs { x: Some(PlotAxis::Key(RowKey::Bs)), ..y(Metric::Percentiles) };
    assert!(error(vec![row()], &both).starts_with("--x: found bs, expected no --x"));
}

#[test]
fn only_takes_rows_of_all_keys() {
    let bs: &[Change] = &[&|r| r.bs = 512, &|_| {}, &|r| r.bs = 65536];
    let targets: &[Change] = &[&|r| r.target = "storage=ram,size=1G".into(), &|_| {}];
    let rows = sweep(&[bs, targets]);
    let take = |texts: &[&str]| {
        let only: Vec<_> = texts.iter().map(|text| parse_filter(text).unwrap()).collect();
        filter_rows(rows.clone(), &only).map(|rows| rows.iter().map(|row| row.bs).collect::<Vec<_>>())
    };
    assert_eq!(take(&["bs=4k,64k", "target=storage=ram,size=1G"]).unwrap(), [4096, 65536]);
    assert_eq!(take(&["bs=512", "bs=64K", "target=null"]).unwrap(), [512, 65536]);
    assert_eq!(take(&["bs=1M"]).unwrap_err().to_string(), "--only: found bs=1M, expected one of 512 4K 64K");
    assert!(parse_filter("size=3").unwrap_err().starts_with("found key \"size\", expected one of target, rw, op, bs"));
    assert!(parse_filter("bs").unwrap_err().starts_with("expected KEY=VALUE"));
}

#[test]
fn what_does_not_vary_is_in_the_subtitle() {
    let queues: &[Change] = &[&|_| {}, &|r| (r.queues, r.jobs, r.iodepth) = (8, 8, 4)];
    let mut rows = sweep(&[queues]);
    let constants_of = |rows: &[PlotRow]| {
        let table = RowTable::new(rows.to_vec());
        constants(&table, &select(&table, &args()).unwrap())
    };
    assert_eq!(
        constants_of(&rows),
        "virtio-blk, null, read, bs 4K, 1 job per queue, iodepth 4 to 32, poll off, merge off, 3 runs"
    );
    (rows[0].errors, rows[0].runs, rows[0].jobs) = (7, 1, 2);
    rows[1].poll = "off".into();
    assert!(
        constants_of(&rows).ends_with(
            "2 to 8 jobs, iodepth 4 to 32, poll off, merge off, 1 to 3 runs, requests failed in 1 of 2 rows"
        )
    );
}

/// Returns the left, top, right and bottom of a text, with the ascent and descent of the letters in use.
fn extent(text: &TextLine, font: &Font) -> [f64; 4] {
    let width = font.width(&text.text, text.size);
    let before = match text.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => width / 2.0,
        Anchor::End => width,
    };
    let (x, y, up, down) = (text.at.x, text.at.y, 0.76 * text.size, 0.24 * text.size);
    match text.upward {
        false => [x - before, y - up, x - before + width, y + down],
        true => [x - up, y - width + before, x + down, y + before],
    }
}

fn check_scene(scene: &Scene, what: &str) {
    let font = Font::new();
    let texts: Vec<&TextLine> = scene
        .shapes
        .iter()
        .filter_map(|shape| if let SceneShape::Text(text) = shape { Some(text) } else { None })
        .collect();
    for (at, text) in texts.iter().enumerate() {
        let [left, top, right, bottom] = extent(text, &font);
        assert!(
            left >= 0.0 && top >= 0.0 && right <= scene.width && bottom <= scene.height,
            "{what}: {text:?} is cut off"
        );
        assert!(text.size >= 12.0, "{what}: {text:?} is small");
        for other in &texts[..at] {
            let [l, t, r, b] = extent(other, &font);
            let apart = left >= r || l >= right || top >= b || t >= bottom;
            assert!(apart, "{what}: {text:?} is on {other:?}");
        }
    }
    // The vertical axes show the frames: samples are inside, legends are outside.
    let ends = |classes: &'static [&'static str]| {
        let paths = scene.shapes.iter().filter_map(move |shape| match shape {
            SceneShape::Figure { outline: Outline::Path(points, _), class, .. } if classes.contains(class) => {
                Some(points)
            }
            _ => None,
        });
        paths.cloned().collect::<Vec<_>>()
    };
    let axes: Vec<_> = ends(&["axis"]).into_iter().filter(|axis| axis[0].x == axis[1].x).collect();
    let inside = |y: f64, margin: f64| axes.iter().any(|axis| axis[0].y - margin < y && y < axis[1].y + margin);
    let (legend, drawn) = (ends(&["legend"]), ends(&["line", "error", "bar", "marker"]));
    assert!(!axes.is_empty() && !drawn.is_empty(), "{what}");
    assert!(drawn.iter().flatten().all(|point| inside(point.y, 8.0)), "{what}: something is outside of its frame");
    assert!(!legend.iter().flatten().any(|point| inside(point.y, 0.0)), "{what}: a legend is on a panel");
}

#[test]
fn no_text_is_cut_off_or_on_another() {
    let long = "storage=file,path=/srv/images/an-image-with-quite-a-long-name.raw,direct=on,size=100G".to_owned();
    let targets: &[Change] = &[&|r| r.target = long.clone(), &|_| {}, &|r| r.target = "W".repeat(160)];
    let rw: &[Change] = &[&|_| {}, &|r| r.rw = "randread".into()];
    let sizes: Vec<OwnChange> = (9..=22).map(|n| Box::new(move |r: &mut PlotRow| r.bs = 1 << n) as Box<_>).collect();
    let sizes: Vec<Change> = sizes.iter().map(AsRef::as_ref).collect();
    let near: Vec<OwnChange> = (1..=40).map(|n| Box::new(move |r: &mut PlotRow| r.queues = n) as Box<_>).collect();
    let near: Vec<Change> = near.iter().map(AsRef::as_ref).collect();
    let all = vec![Metric::Iops, Metric::Bandwidth, Metric::Latency, Metric::Cpu];
    let with = |y: Vec<Metric>, x: Option<RowKey>| PlotArgs { y, x: x.map(PlotAxis::Key), ..args() };
    let cases: [(&str, Vec<PlotRow>, PlotArgs); 9] = [
        ("one row", vec![row()], args()),
        ("sizes", sweep(&[&sizes, rw]), with(all.clone(), None)),
        ("near ticks", sweep(&[&near]), args()),
        ("long names", sweep(&[targets, rw]), args()),
        ("grouped bars", sweep(&[targets, rw]), with(all.clone(), Some(RowKey::Rw))),
        ("long names, lines", sweep(&[targets, &sizes]), with(vec![Metric::Latency], None)),
        ("panels", sweep(&[targets, &near[..4], &sizes]), with(all.clone(), Some(RowKey::Bs))),
        ("percentiles", sweep(&[rw, &near[..3]]), with(vec![Metric::Percentiles], None)),
        ("both", sweep(&[rw, &near[..3]]), with(vec![Metric::Percentiles, Metric::Iops], None)),
    ];
    for (what, rows, args) in cases {
        let table = RowTable::new(rows);
        let chart = build::chart(&table, &select(&table, &args).unwrap(), &ChartOptions::default());
        check_scene(&layout::scene(&chart, &Font::new()), what);
    }
}

/// The results of the `targets` experiment: bandwidth of each number of queues against targets.
#[test]
fn targets_are_an_axis_and_mixed_sizes_are_bandwidth() {
    let targets: Vec<OwnChange> = [1, 2, 4, 8, 32]
        .into_iter()
        .map(|count| {
            Box::new(move |row: &mut PlotRow| (row.targets, row.jobs, row.bs_max) = (count, count, 65536)) as OwnChange
        })
        .collect();
    let targets: Vec<Change> = targets.iter().map(|change| &**change as Change).collect();
    let rows = sweep(&[&targets, &[&|row| row.queues = 1, &|row| row.queues = 2, &|row| row.queues = 8]]);
    let table = RowTable::new(rows);
    let selections = select(&table, &args()).unwrap();
    let expected = PlotSelection {
        metrics: vec![Metric::Bandwidth],
        x: Some(RowKey::Targets),
        series: vec![RowKey::Queues],
        panels: None,
    };
    assert_eq!(selections, [expected]);
    assert!(constants(&table, &selections).contains("bs 4K-64K"), "{}", constants(&table, &selections));
    assert!(constants(&table, &selections).contains("1 job per LUN"));
}

/// Every readable result file is drawn, with nothing outside of the picture.
#[test]
fn extreme_values_are_drawn() {
    let values = [0.0, 5e-324, 1e-9, 0.25, 1e15];
    let sizes = [1, 4096, 1 << 53];
    let mut rows = vec![];
    for (at, value) in values.into_iter().enumerate() {
        for bs in sizes {
            rows.push(PlotRow {
                bs,
                batch: at as u64,
                target: format!("{}", at % 2),
                iops: (value, values[values.len() - 1 - at]),
                bs_max: bs,
                bandwidth: (value, 0.0),
                percentiles: vec![(0.0, value), (100.0 - 1e-14, value), (100.0, values[0])],
                latency: (value, values[values.len() - 1 - at]),
                server_cpu: Some(value),
                merges: Some(value),
                ..row()
            });
        }
    }
    let all = [Metric::Iops, Metric::Bandwidth, Metric::Latency, Metric::Cpu, Metric::Merges, Metric::Percentiles];
    let parts = (1..=rows.len()).flat_map(|count| [rows[..count].to_vec(), rows[rows.len() - count..].to_vec()]);
    let mut drawn = 0;
    for rows in parts {
        for x in [None, Some(RowKey::Bs), Some(RowKey::Batch), Some(RowKey::Target), Some(RowKey::Merge)] {
            let args = PlotArgs { x: x.map(PlotAxis::Key), y: all.to_vec(), ..args() };
            let table = RowTable::new(rows.clone());
            let Ok(selections) = select(&table, &args) else { continue };
            let scene = layout::scene(&build::chart(&table, &selections, &ChartOptions::default()), &Font::new());
            for shape in &scene.shapes {
                let points = match shape {
                    SceneShape::Text(text) => vec![text.at],
                    SceneShape::Figure { outline: Outline::Path(points, _), .. } => points.clone(),
                    SceneShape::Figure { outline: Outline::Circle(center, _), .. } => vec![*center],
                };
                let inside = |at: f64, end: f64| (0.0..=end).contains(&at);
                assert!(points.iter().all(|at| inside(at.x, scene.width) && inside(at.y, scene.height)), "{shape:?}");
            }
            drawn += 1;
        }
    }
    assert!(drawn > 50, "{drawn}");
}
