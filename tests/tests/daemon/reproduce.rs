//! `mqblk reproduce`: every experiment makes all its rows, and a browser shows their page without a network.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use mqblk_test_bounds::Bound;
use mqblk_tests::hostile::daemon::mqblk_binary;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// The experiments, their number of rows with `--quick`, and the keys whose values differ between all rows.
const EXPERIMENTS: [(&str, usize, &[&str]); 5] = [
    // 4 numbers of rings, with both pools.
    ("xen-queues", 8, &["queues", "grants_pool"]),
    ("virtio-queues", 4, &["column"]),
    // 3 columns of reads and writes over two interfaces: 4 sizes, and one with the larger batch.
    ("block-sizes", 60, &["interface", "rw", "batch", "bs", "queues", "merge"]),
    // 5 numbers of targets, 3 of queues, 3 steering policies.
    ("scsi-targets", 45, &["steer", "targets", "queues"]),
    // 5 policies, 4 latencies.
    ("polling", 20, &["poll", "storage_latency_us"]),
];

/// Limit of a browser, in case it hangs.
const BROWSER_TIMEOUT: &str = "300";

/// Returns a folder on the workspace's disk: `/tmp` may be in memory, where O_DIRECT may fail.
pub(crate) fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

/// Returns a command that runs in `folder`, without this test's environment.
fn reproduce(folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(mqblk_binary());
    command.current_dir(folder).env_remove("MQBLK_TEST_KEYS").arg("reproduce").args(options).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// One quick run of everything, for all tests.
struct QuickRun {
    folder: TempDir,
    output: Output,
}

/// Fewer and shorter runs than with --quick alone: no test checks a time or compares speeds.
static QUICK: LazyLock<QuickRun> = LazyLock::new(|| {
    let folder = folder();
    let options = ["--quick", "--runs", "1", "--runtime", "0.05", "--report", "report.html", "--json", "all.json"];
    let output = reproduce(folder.path(), &options).output().expect("mqblk runs");
    QuickRun { folder, output }
});

impl QuickRun {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).expect("JSON")
    }
}

#[test]
fn every_experiment_makes_every_row_and_a_sentence() {
    let run = &*QUICK;
    let (stdout, stderr) = (text(&run.output.stdout), text(&run.output.stderr));
    assert!(run.output.status.success(), "{stdout}\n{stderr}");
    let all = run.json("all.json");
    assert_eq!(all["experiments"].as_array().map(Vec::len), Some(EXPERIMENTS.len()));
    assert!(all["machine"]["cores"].as_u64() > Some(0), "{}", all["machine"]);
    for ((name, count, keys), document) in EXPERIMENTS.iter().zip(all["experiments"].as_array().expect("a list")) {
        let rows = run.json(&format!("results/{name}.json"));
        let rows = rows.as_array().expect("a list of rows");
        assert_eq!((rows.len(), document["expected_rows"].as_u64()), (*count, Some(*count as u64)), "{name}");
        assert_eq!((document["name"].as_str(), document["rows"].as_array()), (Some(*name), Some(rows)));
        let mut seen: Vec<Vec<&Value>> = rows.iter().map(|row| keys.iter().map(|key| &row[*key]).collect()).collect();
        seen.sort_by_key(|values| format!("{values:?}"));
        seen.dedup();
        assert_eq!(seen.len(), *count, "{name}: two rows have the same {keys:?}");
        for row in rows {
            assert_eq!((row["errors"].as_u64(), row["runs"].as_u64()), (Some(0), Some(1)), "{name}: {row}");
            assert!(row["iops_mean"].as_f64() > Some(0.0), "{name}: {row}");
        }
        let sentence = document["sentence"].as_str().expect("a sentence");
        let outcomes = ["reproduced: ", "not reproduced: ", "not measurable here: "];
        let outcome = sentence.strip_prefix(&format!("{name}: ")).expect("the experiment's name");
        assert!(outcomes.iter().any(|words| outcome.starts_with(words)) && outcome.ends_with('.'), "{sentence}");
        assert!(stdout.lines().any(|line| line == sentence), "{sentence}\n{stdout}");
        // Each file has all rows.
        assert_eq!(run.read(&format!("results/{name}.csv")).lines().count(), count + 1);
        assert!(run.read(&format!("results/{name}.md")).contains(sentence));
        assert!(run.read(&format!("results/{name}.svg")).starts_with("<svg "));
    }
    let left: Vec<_> = std::fs::read_dir(run.path("results")).expect("the folder").flatten().collect();
    assert_eq!(left.len(), EXPERIMENTS.len() * 4, "the file on disk and temporary ones are removed: {left:?}");
    assert!(stderr.contains("left)"), "progress says the time that is left: {stderr}");
}

/// A row can be measured again with the command printed beside it.
#[test]
fn a_printed_command_measures_the_same_rows() {
    let run = &*QUICK;
    let all = run.json("all.json");
    let document = &all["experiments"][1];
    let command = document["commands"][0].as_str().expect("a command");
    let options = command.strip_prefix("mqblk bench ").expect("a command of the benchmark");
    let output = Command::new(mqblk_binary())
        .current_dir(run.folder.path())
        .arg("bench")
        .args(options.split(' '))
        .args(["--json", "again.json"])
        .output();
    let output = output.expect("mqblk runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let columns = |rows: &Value| -> Vec<Value> {
        rows.as_array().expect("rows").iter().map(|row| row["column"].clone()).collect()
    };
    assert_eq!(columns(&run.json("again.json")), columns(&document["rows"]));
}

/// Appended to a copy of the page to record the browser's layout: the page itself has no script.
const PROBE: &str = "<script>
for (const svg of document.querySelectorAll('svg')) {
    const box = svg.getBoundingClientRect();
    const drawn = svg.querySelectorAll('.marker, .bar');
    const sized = [...drawn].filter(shape => { const box = shape.getBoundingClientRect(); return box.width > 0 && box.height > 0; });
    const texts = [...svg.querySelectorAll('text')];
    const inside = texts.filter(text => {
        const own = text.getBoundingClientRect();
        return own.width > 0 && own.left >= box.left - 1 && own.right <= box.right + 1;
    });
    svg.setAttribute('data-layout', [box.width, box.height, drawn.length, sized.length, texts.length, inside.length].map(Math.round).join(' '));
}
document.body.setAttribute('data-requests', performance.getEntriesByType('resource').length);
document.body.setAttribute('data-overflow', document.documentElement.scrollWidth - document.documentElement.clientWidth);
</script>";

/// Returns the values of an attribute in a page.
fn attributes<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    let start = format!(" {name}=\"");
    page.split(&start).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

#[test]
fn a_browser_without_a_network_lays_every_plot_out() {
    let run = &*QUICK;
    let page = run.read("report.html");
    for outside in ["http:", "https:", "src=", "url(", "@import", "<script", "<link"] {
        assert!(!page.contains(outside), "the page has {outside}");
    }
    let probed = run.path("probed.html");
    std::fs::write(&probed, page.replace("</body>", &format!("{PROBE}</body>"))).expect("a copy");
    let profile = folder();
    let options =
        ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,1000"];
    let quiet =
        ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"];
    // An empty network namespace. Users other than root get one with a user namespace.
    let network: &[&str] =
        if rustix::process::geteuid().is_root() { &["--net"] } else { &["--net", "--map-root-user"] };
    let output = Command::new("timeout")
        .args(["--kill-after=5", BROWSER_TIMEOUT, "unshare"])
        .args(network)
        .args(["--", "chromium"])
        .args(options)
        .args(quiet)
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg("--dump-dom")
        .arg(format!("file://{}", probed.display()))
        .stdin(Stdio::null())
        .output()
        .expect("timeout and unshare are there");
    let shown = text(&output.stdout);
    assert!(
        output.status.success() && shown.contains("</html>"),
        "chromium: {}: apt-get install chromium\n{}",
        output.status,
        text(&output.stderr)
    );
    let layouts = attributes(&shown, "data-layout");
    assert_eq!(layouts.len(), EXPERIMENTS.len(), "a plot for each experiment: {layouts:?}");
    for layout in layouts {
        let numbers: Vec<u32> = layout.split(' ').map(|word| word.parse().expect("a number")).collect();
        let [width, height, drawn, sized, texts, inside] = numbers[..] else { panic!("{layout}") };
        assert!(width > 300 && height > 200, "a plot of {width} x {height}");
        assert!(drawn > 0 && sized == drawn, "{sized} of {drawn} marks have a size");
        assert!(texts > 10 && inside == texts, "{inside} of {texts} texts are inside of their plot");
    }
    assert_eq!(attributes(&shown, "data-requests"), ["0"], "the page asks for nothing");
    assert_eq!(attributes(&shown, "data-overflow"), ["0"], "the page is as wide as its window");
    for (name, ..) in EXPERIMENTS {
        assert!(shown.contains(&format!("<section id=\"{name}\">")), "{name}");
    }
}

#[test]
fn an_interruption_keeps_what_was_measured() {
    let folder = folder();
    let results = folder.path().join("results");
    let options = ["block-sizes", "--quick", "--runs", "1", "--runtime", "0.05", "--out", "results"];
    let mut command = reproduce(folder.path(), &options);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mqblk runs");
    let mut deadline = Bound::seconds(120).begin();
    while !results.join("block-sizes.json").exists() {
        assert!(!deadline.has_passed(), "the first rows are not written");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::INT).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    assert!(stdout.contains("Interrupted: the results so far are kept") && stdout.contains(" of 60 rows"), "{stdout}");
    let rows: Value =
        serde_json::from_slice(&std::fs::read(results.join("block-sizes.json")).expect("a file")).expect("JSON");
    let count = rows.as_array().map_or(0, Vec::len);
    assert!((1..60).contains(&count), "{count} rows");
    let names = std::fs::read_dir(&results).expect("the folder").flatten().map(|entry| entry.file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().expect("a plain name")).collect();
    names.sort();
    assert_eq!(names, ["block-sizes.csv", "block-sizes.json", "block-sizes.md", "block-sizes.svg"]);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_measured() {
    let folder = folder();
    std::fs::write(folder.path().join("file"), "").expect("a file");
    let huge = "mqblk: reproduce: --report: found none/report.html";
    for (options, want) in [
        (vec!["polling", "--out", "file/results"], "mqblk: reproduce: --out: found file/results"),
        (vec!["polling", "--report", "none/report.html"], huge),
        (vec!["polling", "--json", "results"], "mqblk: reproduce: --json: found the folder results"),
        (vec!["block-sizes", "--folder", "file"], "mqblk: reproduce: --folder: found file"),
        (vec!["blocks"], "error: invalid value 'blocks'"),
        (vec!["polling", "--runtime", "0"], "error: invalid value '0'"),
    ] {
        let output = reproduce(folder.path(), &options).output().expect("mqblk runs");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {stderr}");
        assert!(stderr.starts_with(want), "{options:?}: {stderr}");
    }
    let output = reproduce(folder.path(), &["--list"]).output().expect("mqblk runs");
    let list = text(&output.stdout);
    assert!(output.status.success() && EXPERIMENTS.iter().all(|(name, ..)| list.contains(name)), "{list}");
}
