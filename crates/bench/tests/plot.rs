//! `mqblk-bench plot`, run as a process: pictures of result files, and errors of invalid files.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use roxmltree::{Document, Node};

const BLUE: &str = "#0072b2";
const VERMILLION: &str = "#d55e00";

/// A directory of result files and pictures.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Runs `mqblk plot` here and returns its exit code and standard error.
    fn plot(&self, args: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mqblk-bench"));
        command.arg("plot").args(args).current_dir(self.0.path()).env_remove("RUST_LOG").stdin(Stdio::null());
        let Output { status, stdout, stderr } = command.output().unwrap();
        assert!(stdout.is_empty());
        (status.code(), String::from_utf8(stderr).unwrap())
    }

    fn drawn(&self, args: &[&str], picture: &str) -> String {
        let (code, stderr) = self.plot(&[args, &["-o", picture]].concat());
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{args:?}");
        std::fs::read_to_string(self.path(picture)).unwrap()
    }

    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.0.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

fn row(target: &str, rw: &str, bs: u64, queues: u64, iops: f64) -> String {
    format!(
        r#"{{"interface": "virtio-blk", "storage": "null", "target": "{target}", "rw": "{rw}", "bs": {bs},
            "queues": {queues}, "jobs": 8, "iodepth": 32, "batch": 1, "poll": "off", "merge": "on", "runs": 3,
            "iops_mean": {iops}, "iops_stderr": {error}, "bw_bytes_per_s": {bandwidth},
            "lat_us": {{"mean": 3.0, "p50": {p50}, "p99": 7, "p999": 900.5, "max": 4000}},
            "server_cpu_us_per_io": null, "client_cpu_us_per_io": 1.0, "kicks_per_io": 0, "calls_per_io": 0, "errors": 0}}"#,
        error = iops / 50.0,
        bandwidth = iops * bs as f64,
        p50 = 1e6 / iops,
    )
}

fn array(rows: &[String]) -> String {
    format!("[{}]", rows.join(",\n"))
}

/// Block sizes on 1 and on 8 queues, with merging as in the published table: many queues are slower at small sizes.
fn sizes() -> String {
    const IOPS: [(u64, f64, f64); 4] = [
        (512, 400_000.0, 300_000.0),
        (4096, 321_000.0, 264_000.0),
        (16384, 90_000.0, 95_000.0),
        (131_072, 11_000.0, 12_000.0),
    ];
    let rows: Vec<String> = IOPS
        .iter()
        .flat_map(|(bs, one, many)| [row("a", "read", *bs, 1, *one), row("a", "read", *bs, 8, *many)])
        .collect();
    array(&rows)
}

fn texts(document: &Document) -> Vec<String> {
    document
        .descendants()
        .filter(|node| node.has_tag_name("text"))
        .map(|node| node.text().unwrap().to_owned())
        .collect()
}

fn classed<'a, 'input>(document: &'a Document<'input>, class: &str) -> Vec<Node<'a, 'input>> {
    document.descendants().filter(|node| node.attribute("class") == Some(class)).collect()
}

/// Returns the centre of a circle or of a polygon's corners.
fn middle(node: &Node) -> (f64, f64) {
    let number = |text: &str| text.parse::<f64>().unwrap();
    if let (Some(x), Some(y)) = (node.attribute("cx"), node.attribute("cy")) {
        return (number(x), number(y));
    }
    let points = node.attribute("points").unwrap().split(' ').map(|pair| pair.split_once(',').unwrap());
    let points: Vec<(f64, f64)> = points.map(|(x, y)| (number(x), number(y))).collect();
    let sum = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
    (sum.0 / points.len() as f64, sum.1 / points.len() as f64)
}

#[test]
fn an_svg_shows_each_point_where_it_belongs() {
    let folder = Folder::new();
    folder.write("sizes.json", &sizes());
    let svg = folder.drawn(&["sizes.json"], "sizes.svg");
    let document = Document::parse(&svg).unwrap();
    assert_eq!(document.root_element().attribute("font-family"), Some("sans-serif"));
    let texts = texts(&document);
    let expected =
        ["IOPS against block size", "IOPS", "block size (bytes)", "1 queue", "8 queues", "512", "4K", "16K", "128K"];
    for text in expected.into_iter().chain(["0", "100k", "400k"]) {
        assert!(texts.iter().any(|found| found == text), "{text} in {texts:?}");
    }
    assert!(
        texts.contains(&"virtio-blk, a, storage null, read, iodepth 32, 8 jobs, poll off, merge on, 3 runs".to_owned()),
        "{texts:?}"
    );

    let markers = classed(&document, "marker");
    let of = |color: &str| -> Vec<(f64, f64)> {
        markers.iter().filter(|node| node.attribute("fill") == Some(color)).map(middle).collect()
    };
    let (one, many) = (of(BLUE), of(VERMILLION));
    assert_eq!((markers.len(), one.len(), many.len()), (8, 4, 4));
    for (one, many) in one.iter().zip(&many) {
        assert!((one.0 - many.0).abs() < 0.1, "one block size is one place");
    }
    // Larger blocks are further right: 512 to 4K and 16K to 128K are three doublings each, 4K to 16K is two.
    let step = |at: usize| one[at + 1].0 - one[at].0;
    assert!((step(0) - step(2)).abs() < 0.1 && (step(0) / step(1) - 1.5).abs() < 0.01);
    // Larger values are proportionally higher: the first two markers give the scale.
    let unit = (one[1].1 - one[0].1) / (400_000.0 - 321_000.0);
    for (marker, iops) in one.iter().chain(&many).zip([4e5, 321e3, 9e4, 11e3, 3e5, 264e3, 95e3, 12e3]) {
        let expected = one[0].1 + (400_000.0 - iops) * unit;
        assert!(unit > 0.0 && (marker.1 - expected).abs() < 0.1, "{iops} at {}, expected at {expected}", marker.1);
    }
    // Tooltips, and error bars: a line and two ends each.
    let tooltips: Vec<&str> = markers.iter().map(|node| node.first_element_child().unwrap().text().unwrap()).collect();
    assert!(tooltips.contains(&"bs 4K: 321k IOPS ± 6.42k"), "{tooltips:?}");
    assert_eq!(classed(&document, "error").len(), 3 * 8);
    assert_eq!(classed(&document, "line").len(), 2);
}

#[test]
fn panels_latency_and_percentiles() {
    let folder = Folder::new();
    folder.write("sizes.json", &sizes());
    let svg =
        folder.drawn(&["sizes.json", "--y", "latency,bandwidth,percentiles", "--only", "bs=4k,16k,128k"], "all.svg");
    let document = Document::parse(&svg).unwrap();
    let texts = texts(&document);
    let expected = ["latency", "latency, log scale", "bandwidth (MiB/s)", "percentile of the requests", "99.9", "max"];
    for text in expected.into_iter().chain(["median latency", "99th percentile", "bs 128K, 8 queues"]) {
        assert!(texts.iter().any(|found| found == text), "{text} in {texts:?}");
    }
    // Median and 99th percentile of 6 rows, their bandwidth, and 4 percentiles of each.
    assert_eq!(classed(&document, "marker").len(), 2 * 6 + 6 + 4 * 6);
    let dashed = classed(&document, "line").iter().filter(|node| node.attribute("stroke-dasharray").is_some()).count();
    assert_eq!(dashed, 2);
    let svg = folder.drawn(&["sizes.json", "--x", "queues", "--panels", "bs", "--title", "A <title>"], "panels.svg");
    let document = Document::parse(&svg).unwrap();
    let texts = self::texts(&document);
    assert_eq!(texts.iter().filter(|text| *text == "queues").count(), 4);
    assert!(["A <title>", "bs 512", "bs 128K"].iter().all(|text| texts.iter().any(|found| found == text)), "{texts:?}");
}

#[test]
fn files_are_combined_and_labels_are_escaped() {
    let folder = Folder::new();
    let hostile = r"</text><script>&amp;\u0000\u001b[31m\n\u202e\uffff";
    for (name, iops) in [("before.json", 1000.0), ("after.json", 2000.0)] {
        folder.write(name, &array(&[row(hostile, "read", 4096, 1, iops), row("b", "read", 4096, 1, iops / 2.0)]));
    }
    let svg = folder.drawn(&["before.json", "after.json", "--y", "iops"], "x.svg");
    let document = Document::parse(&svg).unwrap();
    assert!(!document.descendants().any(|node| node.has_tag_name("script")));
    assert!(svg.chars().all(|c| c == '\n' || !c.is_control()));
    let texts = texts(&document);
    assert!(texts.contains(&"before".to_owned()) && texts.contains(&"after".to_owned()), "{texts:?}");
    assert!(texts.concat().contains(r"</text><script>&amp;\u{0}\u{1b}[31m\n\u{202e}\u{ffff}"), "{texts:?}");
    // The name below the bars is in lines; the bars of `after` are twice as high.
    let bars: Vec<f64> = classed(&document, "bar").iter().map(|node| middle(node).1).collect();
    let axis = classed(&document, "axis").iter().map(middle).map(|(_, y)| y).fold(0.0, f64::max);
    let heights: Vec<f64> = bars.iter().map(|y| axis - y).collect();
    assert_eq!(heights.len(), 4);
    for pair in [(heights[2], heights[0]), (heights[3], heights[1]), (heights[0], heights[1])] {
        assert!((pair.0 / pair.1 - 2.0).abs() < 0.01, "{heights:?}");
    }
}

#[test]
fn errors_of_invalid_files_name_row_and_key() {
    let folder = Folder::new();
    let good = row("a", "read", 4096, 1, 1000.0);
    let with = |from: &str, to: &str| array(&[good.clone(), good.replace(from, to)]);
    let cases: [(&str, String, &str); 12] = [
        ("not.json", "IOPS 12".into(), "not JSON: expected value at line 1 column 1; expected the JSON array that"),
        ("cut.json", sizes()[..300].into(), "not JSON: EOF while parsing"),
        ("object.json", good.clone(), "found an object, expected the JSON array that `mqblk bench --json` writes"),
        ("empty.json", "[]".into(), "found an empty array, expected at least one row"),
        ("number.json", "[7]".into(), "row 1 of 1: found 7, expected an object"),
        (
            "missing.json",
            with("\"queues\": 1,", ""),
            "row 2 of 2: queues: found nothing, expected a whole number from 1",
        ),
        ("nan.json", with("\"iops_mean\": 1000", "\"iops_mean\": NaN"), "not JSON: expected value at line"),
        (
            "null.json",
            with("\"iops_mean\": 1000", "\"iops_mean\": null"),
            "row 2 of 2: iops_mean: found null, expected a number",
        ),
        (
            "minus.json",
            with("\"p99\": 7", "\"p99\": -7"),
            "row 2 of 2: lat_us.p99: found -7, expected a number from 0 to 1e15",
        ),
        ("text.json", with("\"bs\": 4096", "\"bs\": \"4k\""), "row 2 of 2: bs: found \"4k\", expected a whole number"),
        ("huge.json", with("\"runs\": 3", "\"runs\": 1e999"), "not JSON: number out of range"),
        ("deep.json", "[".repeat(100_000), "not JSON: recursion limit exceeded"),
    ];
    for (name, text, expected) in &cases {
        folder.write(name, text);
        let (code, stderr) = folder.plot(&[name, "-o", "x.svg"]);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.starts_with(&format!("mqblk: plot: {name}: {expected}")), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    let (code, stderr) = folder.plot(&["none.json", "-o", "x.svg"]);
    assert_eq!((code, stderr.as_str()), (Some(2), "mqblk: plot: none.json: No such file or directory (os error 2)\n"));
    let large = std::fs::File::create(folder.path("large.json")).unwrap();
    large.set_len(1 << 30).unwrap();
    let (code, stderr) = folder.plot(&["large.json", "-o", "x.svg"]);
    assert_eq!(code, Some(2));
    assert!(stderr.starts_with("mqblk: plot: large.json: found more than 16 MiB"), "{stderr}");
    let (code, stderr) = folder.plot(&[".", "-o", "x.svg"]);
    assert!(code == Some(2) && stderr.starts_with("mqblk: plot: .: Is a directory"), "{stderr}");
    assert!(!folder.path("x.svg").exists());
}

#[test]
fn usage_errors_say_what_is_expected() {
    let folder = Folder::new();
    folder.write("sizes.json", &sizes());
    let cases: [(&[&str], &str); 12] = [
        (&["-o", "x.png"], "--output: found x.png, expected a file name that ends in .svg"),
        (&["-o", "svg"], "--output: found svg, expected"),
        (&[], "--output <FILE>"),
        (&["-o", "x.svg", "--x", "size"], "invalid value 'size' for '--x <KEY>'"),
        (&["-o", "x.svg", "--y", "iops,speed"], "invalid value 'speed' for '--y <METRIC,...>'"),
        (
            &["-o", "x.svg", "--y", "merges"],
            "--y merges: found no row with rrqm_per_s or wrqm_per_s, expected at least one",
        ),
        (&["-o", "x.svg", "--y", "cpu"], "--y cpu: found no row with server_cpu_us_per_io, expected at least one"),
        (&["-o", "x.svg", "--panels", "bs"], "--panels: found bs, expected another key than the axis (--x bs)"),
        (&["-o", "x.svg", "--only", "bs=2k"], "--only: found bs=2k, expected one of 512 4K 16K 128K"),
        (
            &["-o", "x.svg", "--only", "size=2k"],
            "found key \"size\", expected one of experiment, interface, target, storage, rw, op, bs",
        ),
        (&["-o", "x.svg", "--only", "bs"], "expected KEY=VALUE,..."),
        (
            &["-o", "x.svg", "--x", "bs", "--y", "percentiles"],
            "--x: found bs, expected no --x with --y percentiles alone",
        ),
    ];
    for (args, expected) in cases {
        let (code, stderr) = folder.plot(&[&["sizes.json"], args].concat());
        assert_eq!(code, Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
    assert_eq!(folder.plot(&["-o", "x.svg"]).0, Some(2));
    assert_eq!(folder.files(), ["sizes.json"]);
}

#[test]
fn a_picture_that_cannot_be_written_leaves_nothing() {
    let folder = Folder::new();
    folder.write("sizes.json", &sizes());
    let (code, stderr) = folder.plot(&["sizes.json", "-o", "no/such/folder/x.svg"]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("mqblk: plot: no/such/folder/x.svg: No such file or directory"), "{stderr}");
    // A folder has that name: the temporary file cannot be renamed to it, and is removed.
    std::fs::create_dir(folder.path("taken.svg")).unwrap();
    let (code, stderr) = folder.plot(&["sizes.json", "-o", "taken.svg"]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("mqblk: plot: taken.svg: Is a directory"), "{stderr}");
    assert_eq!(folder.files(), ["sizes.json", "taken.svg"]);
    // A picture that was there is replaced, and is as readable as any new file.
    folder.write("old.svg", "old");
    folder.drawn(&["sizes.json"], "old.svg");
    folder.write("new", "");
    let mode = |name| std::fs::metadata(folder.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("old.svg"), mode("new"));
    assert_eq!(folder.files(), ["new", "old.svg", "sizes.json", "taken.svg"]);
}
