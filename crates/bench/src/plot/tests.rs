//! Checks of result files, of the selection of axis, series and panels, and of pictures without overlaps.

use std::collections::BTreeSet;

use roxmltree::{Document, Node};
use serde_json::{Value, json};

use super::group::MAX_SERIES;
use super::keys::UNKNOWN;
use super::rows::{label, parse};
use super::select::{constants, select};
use super::series::of_each_run;
use super::svg::{reference_style, style, svg};
use super::*;

mod files;
mod series;

fn args() -> PlotArgs {
    PlotArgs {
        results: vec![],
        output: "x.svg".into(),
        x: None,
        y: vec![],
        panels: None,
        only: vec![],
        ratio: None,
        scale: AxisChoice::Auto,
        title: None,
    }
}

fn y(metric: Metric) -> PlotArgs {
    PlotArgs { y: vec![metric], ..args() }
}

fn x(key: RowKey) -> PlotArgs {
    PlotArgs { x: Some(key), ..args() }
}

fn ratio(text: &str) -> PlotArgs {
    PlotArgs { ratio: Some(RowFilter::parse(text).unwrap()), ..args() }
}

/// Returns a row as the benchmark writes it.
fn json_row() -> Value {
    json!({
        "interface": "virtio-blk", "storage": "null", "target": "null", "rw": "read", "bs": 4096, "queues": 1, "jobs": 1,
        "iodepth": 32, "batch": 1, "poll": "off", "merge": "off", "runs": 3, "iops_mean": 1e5, "iops_stderr": 1e3,
        "bw_bytes_per_s": 4e8, "bw_stderr": 1e6, "lat_us": {"mean": 12.0, "p50": 10.0, "p99": 30.0, "p999": 90.0, "max": 2000.0},
        "percentiles": [[50, 10.0], [99, 30.0], [99.9, 90.0], [100, 2000.0]], "server_cpu_us_per_io": 1.5, "errors": 0,
    })
}

fn row(changes: Value) -> PlotRow {
    let mut row = json_row();
    for (key, value) in changes.as_object().unwrap() {
        row[key] = value.clone();
    }
    parse(Value::Array(vec![row]).to_string().as_bytes(), "a").unwrap().remove(0)
}

/// Returns a row for each combination of changes, the last list varying fastest.
fn sweep(lists: &[Value]) -> Vec<PlotRow> {
    let mut all = vec![json!({})];
    for list in lists {
        let with = |base: &Value, change: &Value| {
            let mut both = base.as_object().unwrap().clone();
            both.extend(change.as_object().unwrap().clone());
            Value::Object(both)
        };
        all =
            all.iter().flat_map(|base| list.as_array().unwrap().iter().map(move |change| with(base, change))).collect();
    }
    all.into_iter().map(row).collect()
}

fn sizes() -> Value {
    json!([{"bs": 512}, {}])
}

fn targets() -> Value {
    json!([{"target": "z"}, {}])
}

fn drawn(rows: Vec<PlotRow>, args: &PlotArgs) -> Chart {
    chart(rows, args).unwrap_or_else(|error| panic!("{error}"))
}

fn error(rows: Vec<PlotRow>, args: &PlotArgs) -> String {
    chart(rows, args).unwrap_err().to_string()
}

fn names(rows: Vec<PlotRow>, args: &PlotArgs) -> Vec<String> {
    drawn(rows, args).groups.swap_remove(0).series
}

fn subtitle(rows: Vec<PlotRow>) -> String {
    drawn(rows, &args()).subtitle
}

fn groups(rows: &[PlotRow], args: &PlotArgs) -> Vec<PlotGroup> {
    select(&RowTable::new(rows.to_vec()), args).unwrap()
}

#[test]
fn what_varies_is_the_axis_and_the_series() {
    let queues = json!([{}, {"queues": 8, "jobs": 8}]);
    let all = sweep(&[
        json!([{"bs": 512}, {}, {"bs": 1 << 20}]),
        json!([{"target": "z", "storage": "file"}, {}]),
        queues.clone(),
    ]);
    // Targets are in the order of the file, queues ascend; storage follows from target, and jobs from queues.
    assert_eq!(names(all.clone(), &args()), ["z, 1 queue", "z, 8 queues", "null, 1 queue", "null, 8 queues"]);
    assert_eq!(groups(&all, &args())[0].x, Some(RowKey::Bs));
    assert_eq!(
        groups(&sweep(&[sizes(), json!([{}, {"iodepth": 1}, {"iodepth": 4}])]), &args())[0].x,
        Some(RowKey::Iodepth)
    );
    assert_eq!(names(sweep(&[sizes()]), &args()), [""]);
    assert_eq!(names(sweep(&[sizes(), json!([{"jobs": 8}, {"jobs": 16}])]), &args()), ["8 jobs", "16 jobs"]);
    // Differences between targets are named, even if each target has one value only.
    let deeper = json!([{"target": "z", "iodepth": 1}, {}]);
    assert_eq!(names(sweep(&[sizes(), deeper]), &args()), ["z, iodepth 1", "null, iodepth 32"]);
    let pools = json!([{"grants_pool": "shared"}, {"grants_pool": "per-ring"}]);
    assert_eq!(names(sweep(&[pools, json!([{}, {"queues": 4}])]), &args()), ["pool shared", "pool per-ring"]);
    let loads = json!([{}, {"fsync": 8, "random_distribution": "zipf:1.1"}]);
    assert_eq!(names(sweep(&[sizes(), loads]), &args())[1], "fsync 8, distribution zipf:1.1");
    for (key, found) in
        [("rate_iops", RowKey::RateIops), ("storage_latency_us", RowKey::Latency), ("ring_order", RowKey::RingOrder)]
    {
        assert_eq!(groups(&sweep(&[json!([{key: 1}, {key: 5000}])]), &args())[0].x, Some(found));
    }
    let mixed = sweep(&[
        json!([{"targets": 1, "jobs": 1, "bs_max": 65536}, {"targets": 8, "jobs": 8, "bs_max": 65536}]),
        queues,
    ]);
    let group = &groups(&mixed, &args())[0];
    assert_eq!((group.x, group.metrics.as_slice()), (Some(RowKey::Targets), [Metric::Bandwidth].as_slice()));
    assert!(subtitle(mixed).contains("bs 4K-64K"));
}

#[test]
fn files_and_repeats_are_named_only_when_nothing_else_differs() {
    let one = sweep(&[sizes()]);
    let with = |change: &dyn Fn(&mut PlotRow)| {
        let mut other = one.clone();
        other.iter_mut().for_each(change);
        [one.clone(), other].concat()
    };
    let set = |row: &mut PlotRow, key: RowKey, text: &str| row.keys[key as usize] = KeyValue::Text(text.into());
    assert_eq!(names(with(&|row| set(row, RowKey::File, "b")), &args()), ["a", "b"]);
    let both = with(&|row| {
        set(row, RowKey::File, "b");
        set(row, RowKey::Target, "ram");
    });
    assert_eq!(names(both, &args()), ["null", "ram"]);
    assert_eq!(names(with(&|_| {}), &args()), ["#1", "#2"]);
}

#[test]
fn without_a_number_there_are_bars_and_percentiles() {
    let rows = sweep(&[targets()]);
    let found = groups(&rows, &args());
    assert_eq!(found.iter().map(|group| group.x).collect::<Vec<_>>(), [Some(RowKey::Target), None]);
    assert_eq!(found[1].series, [RowKey::Target]);
    let found = groups(&[row(json!({}))], &args());
    assert_eq!((found.len(), found[0].x, found[0].metrics.as_slice()), (1, None, [Metric::Percentiles].as_slice()));
    let chart = drawn(rows, &args());
    assert_eq!(chart.title, "IOPS by target; latency percentiles");
    assert_eq!(
        chart.subtitle,
        "virtio-blk, storage null, read, bs 4K, 1 queue, iodepth 32, 1 job, poll off, merge off, 3 runs"
    );
    assert!(chart.groups[0].panels[0].x.bars && !chart.groups[0].panels[0].y.log && chart.groups[1].panels[0].y.log);
}

#[test]
fn many_series_get_panels() {
    let loads = json!([{}, {"rw": "randread"}]);
    let rows = sweep(&[json!([{"bs": 512}, {}, {"bs": 1 << 20}]), targets(), loads, json!([{}, {"queues": 8}])]);
    let of = |args: &PlotArgs| {
        let group = groups(&rows, args).swap_remove(0);
        (group.panels, group.series)
    };
    assert_eq!(of(&args()), (vec![RowKey::Rw], vec![RowKey::Target, RowKey::Queues]));
    let chosen = PlotArgs { panels: Some(RowKey::Target), ..args() };
    assert_eq!(of(&chosen), (vec![RowKey::Target], vec![RowKey::Rw, RowKey::Queues]));
    // Percentiles have an axis of their own: block sizes are among the series.
    assert_eq!(of(&y(Metric::Percentiles)).0, [RowKey::Bs]);
    let wrong = error(rows.clone(), &PlotArgs { panels: Some(RowKey::Bs), ..args() });
    assert!(wrong.starts_with("--panels: found bs, expected another key"), "{wrong}");
}

#[test]
fn what_cannot_be_drawn_is_an_error() {
    let many = |change: &dyn Fn(u64) -> Value| (0..30).map(|n| row(change(n))).collect::<Vec<_>>();
    let panels =
        PlotArgs { y: vec![Metric::Iops, Metric::Cpu, Metric::Latency], panels: Some(RowKey::Queues), ..x(RowKey::Bs) };
    let bars = many(&|n| json!({"target": n.to_string()}));
    let grid = many(&|n| json!({"bs": n % 3 + 1, "queues": n / 3 + 1}));
    let both = PlotArgs { y: vec![Metric::Percentiles], ..x(RowKey::Bs) };
    for (rows, args, want) in [
        (bars, args(), "--x target: found 30 values to draw bars for, expected at most 24"),
        (
            many(&|n| json!({"bs": 1 << n})),
            y(Metric::Percentiles),
            "--y percentiles: found 30 series in a panel, expected at most 14",
        ),
        (grid, panels, "found 30 panels to draw, expected at most 24"),
        (vec![row(json!({}))], y(Metric::Merges), "--y merges: found no row with rrqm_per_s or wrqm_per_s"),
        (vec![row(json!({}))], both, "--x: found bs, expected no --x"),
        (sweep(&[sizes()]), ratio("bs=1M"), "--ratio: found bs=1M, expected one of 512 4K"),
        (sweep(&[sizes()]), ratio("queues=1"), "--ratio: found queues, expected a key that is drawn"),
    ] {
        let found = error(rows, &args);
        assert!(found.starts_with(want), "{found}");
    }
}

#[test]
fn only_takes_rows_of_all_keys() {
    let long = "storage=ram,size=1G";
    let rows = sweep(&[json!([{"bs": 512}, {}, {"bs": 65536}]), json!([{"target": long}, {}])]);
    let take = |texts: &[&str]| {
        let only: Vec<_> = texts.iter().map(|text| RowFilter::parse(text).unwrap()).collect();
        filter_rows(rows.clone(), &only)
            .map(|rows| rows.iter().filter_map(|row| row.number(RowKey::Bs)).collect::<Vec<_>>())
    };
    assert_eq!(take(&["bs=4k,64k", "target=storage=ram,size=1G"]).unwrap(), [4096, 65536]);
    assert_eq!(take(&["bs=512", "bs=64K", "target=null"]).unwrap(), [512, 65536]);
    assert_eq!(take(&["bs=1M"]).unwrap_err().to_string(), "--only: found bs=1M, expected one of 512 4K 64K");
    assert!(RowFilter::parse("size=3").unwrap_err().starts_with("found key \"size\", expected one of experiment,"));
    assert!(RowFilter::parse("bs").unwrap_err().starts_with("expected KEY=VALUE"));
}

#[test]
fn nothing_that_varies_is_left_out() {
    let queues = json!([{}, {"queues": 8, "jobs": 8, "iodepth": 4}]);
    assert_eq!(
        subtitle(sweep(&[queues])),
        "virtio-blk, null, read, bs 4K, iodepth 4 to 32, 1 job per queue, poll off, merge off, 3 runs"
    );
    let uneven = json!([{"errors": 7, "runs": 1, "jobs": 2}, {"queues": 8, "jobs": 8}]);
    let text = subtitle(sweep(&[uneven]));
    assert!(text.contains("2 to 8 jobs") && text.ends_with("1 to 3 runs, requests failed in 1 of 2 rows"), "{text}");
    let follows = json!([{}, {"target": "z", "poll": "busy", "merge": "on", "storage": "file", "server_workers": 4, "storage_latency_us": 10, "ring_order": 2, "abi": "arm"}]);
    let text = subtitle(sweep(&[sizes(), follows]));
    for named in [
        "poll off or busy, with target",
        "merge off or on, with target",
        "storage null or file",
        "abi unknown or arm",
        "unknown or 4 workers, with target",
    ] {
        assert!(text.contains(named), "{named}: {text}");
    }
    // The common part of the targets is named once; the latency has its own key.
    let labels = json!([{"target": "storage=null,size=1T,poll=off"}, {"target": "storage=null,size=1T,poll=busy"}]);
    assert_eq!(names(sweep(&[sizes(), labels.clone()]), &args()), ["poll=off", "poll=busy"]);
    assert!(subtitle(sweep(&[sizes(), labels])).contains("all targets storage=null,size=1T"));
    let latencies = json!([
        {"target": "storage=null,latency-us=10", "storage_latency_us": 10}, {"target": "storage=null,latency-us=30", "storage_latency_us": 30}
    ]);
    assert_eq!(names(sweep(&[sizes(), latencies]), &args()), ["storage latency 10 us", "storage latency 30 us"]);
    // A target whose name would be empty keeps its label, and so do all others.
    let some = json!([{"target": "storage=null"}, {"target": "storage=null,size=1T"}]);
    assert_eq!(names(sweep(&[sizes(), some]), &args()), ["storage=null", "storage=null,size=1T"]);
}

#[test]
fn ratios_are_to_the_row_that_agrees_in_all_else() {
    let value = |iops: f64| json!({"iops_mean": iops, "iops_stderr": iops / 10.0});
    let mut rows = sweep(&[sizes(), json!([{}, {"queues": 8, "jobs": 8}])]);
    for (own, iops) in rows.iter_mut().zip([100.0, 150.0, 200.0, 500.0]) {
        own.iops = row(value(iops)).iops;
    }
    let of = |text: &str| drawn(rows.clone(), &ratio(text)).groups.swap_remove(0).panels.swap_remove(0);
    let panel = of("queues=1");
    assert_eq!((panel.y_title.as_str(), panel.baseline), ("IOPS, ratio to 1 queue", Some(1.0)));
    let values: Vec<Vec<f64>> =
        panel.lines.iter().map(|line| line.samples.iter().map(|sample| sample.y).collect()).collect();
    assert_eq!(values, [[1.0, 1.0], [1.5, 2.5]]);
    // Both relative errors are 10 %; a row differs from itself by nothing.
    let errors: Vec<f64> = panel.lines.iter().map(|line| line.samples[0].error).collect();
    assert!(errors[0] == 0.0 && (errors[1] - 1.5 * 0.02_f64.sqrt()).abs() < 1e-12, "{errors:?}");
    assert_eq!(panel.lines[1].samples[0].label, "bs 512: 1.5 ± 0.212");
    let gains: Vec<f64> = of("bs=512").lines.iter().map(|line| line.samples[1].y).collect();
    assert!((gains[0] - 2.0).abs() < 1e-12 && (gains[1] - 500.0 / 150.0).abs() < 1e-12, "{gains:?}");
}

#[test]
fn ratios_to_almost_nothing_are_left_out() {
    for (base, other, count) in [(5e-324, 1e15, 0), (0.0, 1.0, 0), (1e15, 5e-324, 2)] {
        let with = |queues: u64, iops: f64| row(json!({"queues": queues, "iops_mean": iops, "iops_stderr": 1e15}));
        let chart = drawn(vec![with(1, base), with(8, other)], &ratio("queues=1"));
        check_picture(&chart, "ratios");
        let samples = chart.groups[0].panels[0].lines.iter().map(|line| line.samples.len()).sum::<usize>();
        assert_eq!(samples, count, "{base} {other}");
    }
}

#[test]
fn scales_distributions_and_units_are_as_chosen() {
    let of = |metric: Metric, scale: AxisChoice| drawn(sweep(&[sizes()]), &PlotArgs { scale, ..y(metric) });
    let is_log = |metric: Metric, scale: AxisChoice| of(metric, scale).groups[0].panels[0].y.log;
    assert!(is_log(Metric::Iops, AxisChoice::Log) && !is_log(Metric::Iops, AxisChoice::Auto));
    assert!(!is_log(Metric::Percentiles, AxisChoice::Linear) && is_log(Metric::Percentiles, AxisChoice::Auto));
    let cdf = of(Metric::Cdf, AxisChoice::Log);
    let panel = &cdf.groups[0].panels[0];
    assert!(!panel.y.log && panel.y.ticks.last().is_some_and(|tick| tick.label == "100%"), "{:?}", panel.y);
    let points: Vec<(f64, f64)> = panel.lines[0].samples.iter().map(|sample| (sample.x, sample.y)).collect();
    assert_eq!(points, [(1.0, 50.0), (30_f64.log10(), 99.0), (90_f64.log10(), 99.9), (2000_f64.log10(), 100.0)]);
    let ticks: Vec<&str> = panel.x.ticks.iter().map(|tick| tick.label.as_str()).collect();
    assert_eq!((ticks[0], ticks[ticks.len() - 1]), ("10 us", "2 ms"));
    let merging = json!([{"rrqm_per_s": 150.0, "requests_per_io": 2, "iops_mean": 100.0}]);
    let merges = drawn(sweep(&[sizes(), merging]), &y(Metric::Merges));
    assert_eq!(merges.groups[0].panels[0].lines[0].samples[0].short, "75%");
}

#[test]
fn captions_say_what_error_bars_are() {
    let caption = |runs: Value| drawn(sweep(&[sizes(), runs]), &args()).caption.join(" ");
    assert_eq!(caption(json!([{}])), "Error bars of IOPS: one standard error of the mean of the runs, up and down.");
    assert_eq!(caption(json!([{"runs": 1}])), "IOPS: one run each, so that no error is known.");
    assert!(caption(json!([{"runs": 1}, {"queues": 2}])).ends_with("rows of a single run have none."));
}

#[test]
fn no_two_series_share_a_colour() {
    let colours: BTreeSet<&str> = (0..MAX_SERIES).map(|series| style(series, false).color).collect();
    let looks: BTreeSet<String> = (0..MAX_SERIES).map(|series| format!("{:?}", style(series, false))).collect();
    assert_eq!((colours.len(), looks.len()), (MAX_SERIES, MAX_SERIES));
    for grey in (0..4).map(|reference| reference_style(reference).color) {
        assert!(grey[1..3] == grey[3..5] && grey[3..5] == grey[5..7] && !colours.contains(grey), "{grey}");
    }
}

#[test]
fn published_series_are_grey_and_said_to_be() {
    let rows = sweep(&[json!([{}, {"queues": 4}])]);
    let points = vec![("1".to_owned(), 1.0, 0.0), ("4".to_owned(), 1.7, 0.1), ("16".to_owned(), 9.0, 0.0)];
    let figure = |rows: Vec<PlotRow>, scale: AxisChoice| {
        let references = vec![PublishedSeries { name: "2015: <a>".into(), points: points.clone(), only: None }];
        let ratio = vec![RowFilter::new(RowKey::Queues, "1")];
        let group = PlotGroup {
            metrics: vec![Metric::Iops],
            x: Some(RowKey::Queues),
            ratio,
            references,
            scale,
            ..PlotGroup::default()
        };
        Figure { title: "T", subtitle: "S", groups: vec![(rows, group)] }.svg()
    };
    for scale in [AxisChoice::Log, AxisChoice::Linear] {
        let svg = figure(rows.clone(), scale);
        let document = Document::parse(&svg).unwrap();
        let texts: Vec<&str> = texts(&document).iter().filter_map(|node| node.text()).collect();
        assert!(
            texts.contains(&"2015: <a>") && texts.iter().any(|text| text.starts_with("Grey: what the document")),
            "{texts:?}"
        );
        // A published value at no measured position is not drawn.
        assert!(svg.contains("<title>2015: &lt;a&gt;, 4: 1.7 ± 0.1</title>") && !svg.contains(": 9"), "{svg}");
        let lines: Vec<(&str, bool)> = classed(&document, "line")
            .map(|node| (node.attribute("stroke").unwrap(), node.attribute("stroke-dasharray").is_some()))
            .collect();
        assert_eq!(lines, [("#707070", true), ("#0072b2", false)]);
        let empty = figure(vec![], scale);
        assert!(empty.contains("Nothing was measured.") && !empty.contains("NaN"), "{empty}");
    }
}

fn classed<'a, 'input>(document: &'a Document<'input>, class: &'a str) -> impl Iterator<Item = Node<'a, 'input>> {
    document.descendants().filter(move |node| node.attribute("class") == Some(class))
}

fn texts<'a, 'input>(document: &'a Document<'input>) -> Vec<Node<'a, 'input>> {
    document.descendants().filter(|node| node.has_tag_name("text")).collect()
}

fn number(node: &Node, name: &str) -> f64 {
    node.attribute(name).unwrap().parse().unwrap()
}

/// Returns the left, top, right and bottom of a text in a usual font.
fn extent(node: &Node) -> [f64; 4] {
    let size = number(node, "font-size");
    let width = node.text().unwrap().chars().count() as f64 * size * 0.55;
    let before = width
        * match node.attribute("text-anchor").unwrap() {
            "start" => 0.0,
            "middle" => 0.5,
            _ => 1.0,
        };
    let (up, down) = (0.76 * size, 0.24 * size);
    match node.attribute("transform").and_then(|text| text.strip_prefix("translate(")?.split_once(") rotate(-90)")) {
        Some((at, _)) => {
            let (x, y) =
                at.split_once(' ').map(|(x, y)| (x.parse::<f64>().unwrap(), y.parse::<f64>().unwrap())).unwrap();
            [x - up, y - width + before, x + down, y + before]
        }
        None => {
            let (x, y) = (number(node, "x"), number(node, "y"));
            [x - before, y - up, x - before + width, y + down]
        }
    }
}

fn points(node: &Node) -> Vec<(f64, f64)> {
    let pair = |text: &str| text.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).unwrap();
    node.attribute("points").map_or(vec![], |points| points.split(' ').map(pair).collect())
}

/// Checks that texts are in the picture and do not overlap, shapes are in the frames, and legends are outside of them.
fn check_picture(chart: &Chart, what: &str) {
    let picture = svg(chart);
    let document = Document::parse(&picture).unwrap();
    let (width, height) = (number(&document.root_element(), "width"), number(&document.root_element(), "height"));
    let texts = texts(&document);
    for (at, text) in texts.iter().enumerate() {
        let [left, top, right, bottom] = extent(text);
        assert!(
            left >= 0.0 && top >= 0.0 && right <= width && bottom <= height,
            "{what}: {:?} is cut off",
            text.text()
        );
        for other in &texts[..at] {
            let [l, t, r, b] = extent(other);
            let apart = left >= r || l >= right || top >= b || t >= bottom;
            assert!(apart, "{what}: {:?} is on {:?}", text.text(), other.text());
        }
    }
    let axes: Vec<_> =
        classed(&document, "axis").map(|axis| points(&axis)).filter(|axis| axis[0].0 == axis[1].0).collect();
    let is_inside = |y: f64, margin: f64| axes.iter().any(|axis| axis[0].1 - margin < y && y < axis[1].1 + margin);
    let of = |class: &'static str| classed(&document, class).flat_map(|node| points(&node)).collect::<Vec<_>>();
    let shapes = ["line", "error", "bar", "marker"].map(of).concat();
    assert!(!axes.is_empty() && !picture.contains("NaN") && !picture.contains("inf"), "{what}");
    assert!(
        shapes.iter().all(|(x, y)| is_inside(*y, 8.0) && (0.0..=width).contains(x)),
        "{what}: something is outside of its frame"
    );
    assert!(!of("legend").iter().any(|(_, y)| is_inside(*y, 0.0)), "{what}: a legend is on a panel");
}

#[test]
fn no_text_is_cut_off_or_on_another() {
    let long = "storage=file,path=/srv/images/an-image-with-quite-a-long-name.raw,direct=on,size=100G";
    let targets = json!([{"target": long}, {}, {"target": "n".repeat(160)}]);
    let loads = json!([{}, {"rw": "randread"}]);
    let sizes: Value = (9..=22).map(|n| json!({"bs": 1 << n})).collect();
    let near: Value = (1..=40).map(|n| json!({"queues": n})).collect();
    let few: Value = (1..=4).map(|n| json!({"queues": n})).collect();
    let all = PlotArgs { y: vec![Metric::Iops, Metric::Bandwidth, Metric::Latency, Metric::Cpu], ..args() };
    let of = |lists: &[&Value]| sweep(&lists.iter().map(|list| (*list).clone()).collect::<Vec<_>>());
    for (what, rows, args) in [
        ("one row", vec![row(json!({}))], args()),
        ("sizes", of(&[&sizes, &loads]), all.clone()),
        ("near ticks", of(&[&near]), args()),
        ("long names", of(&[&targets, &loads]), args()),
        ("grouped bars", of(&[&targets, &loads]), PlotArgs { x: Some(RowKey::Rw), ..all.clone() }),
        ("long names, lines", of(&[&targets, &sizes]), y(Metric::Latency)),
        ("panels", of(&[&targets, &few, &sizes]), PlotArgs { x: Some(RowKey::Bs), ..all }),
        ("percentiles", of(&[&loads, &few]), y(Metric::Percentiles)),
        ("both", of(&[&loads, &few]), PlotArgs { y: vec![Metric::Percentiles, Metric::Iops], ..args() }),
    ] {
        check_picture(&drawn(rows, &args), what);
    }
}

/// Every readable result file is drawn, with nothing outside of the picture.
#[test]
fn extreme_values_are_drawn() {
    let values = [0.0, 5e-324, 1e-9, 0.25, 1e15];
    let mut rows = vec![];
    for (at, value) in values.into_iter().enumerate() {
        for bs in [1_u64, 4096, 1 << 53] {
            let other = values[values.len() - 1 - at];
            rows.push(row(json!({
                "bs": bs, "batch": at, "target": format!("{}", at % 2), "iops_mean": value, "iops_stderr": other,
                "bw_bytes_per_s": value, "bw_stderr": 0, "percentiles": [[0, value], [100.0 - 1e-13, value], [100, 0]],
                "lat_us": {"p50": value, "p99": other, "p999": value, "max": value}, "server_cpu_us_per_io": value, "rrqm_per_s": value,
            })));
        }
    }
    let all = vec![
        Metric::Iops,
        Metric::Bandwidth,
        Metric::Latency,
        Metric::Cpu,
        Metric::Merges,
        Metric::Percentiles,
        Metric::Cdf,
    ];
    let parts = (1..=rows.len()).flat_map(|count| [rows[..count].to_vec(), rows[rows.len() - count..].to_vec()]);
    let mut count = 0;
    for rows in parts {
        for x in [None, Some(RowKey::Bs), Some(RowKey::Batch), Some(RowKey::Target), Some(RowKey::Merge)] {
            let args = PlotArgs { x, y: all.clone(), ..args() };
            let Ok(chart) = chart(rows.clone(), &args) else { continue };
            let picture = svg(&chart);
            let document = Document::parse(&picture).unwrap();
            let size = ["width", "height"].map(|name| number(&document.root_element(), name));
            for node in document.descendants().filter(|node| node.attribute("points").is_some()) {
                let is_inside = |(x, y): &(f64, f64)| (0.0..=size[0]).contains(x) && (0.0..=size[1]).contains(y);
                assert!(points(&node).iter().all(is_inside), "{:?}", node.attribute("points"));
            }
            count += 1;
        }
    }
    assert!(count > 50, "{count}");
}
