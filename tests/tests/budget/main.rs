//! The engine's instruction budget: the cost of a request from pull to publish, counted by callgrind, in total and by
//! stage (`stages.rs`). And the memory that several workers write (`shared_writes.rs`).
//!
//! `MQBLK_RENEW_BUDGET=1` updates the committed numbers after a change that is worth its cost. `MQBLK_BUDGET_PROGRAM`
//! is the path of a release build of the program to count; without it the test builds one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;
use toml::{Table, Value};

mod shared_writes;
mod stages;

use stages::{Profile, STAGES, Symbols};

/// Tolerated excess over the committed number in percent: the noise of code generation.
const TOLERANCE_PERCENT: f64 = 3.0;

const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/budget/committed.toml");
const RENEW: &str = "MQBLK_RENEW_BUDGET";
const PROGRAM: &str = "MQBLK_BUDGET_PROGRAM";
const HEAD: &str = "# Instructions of a worker for one 4 KiB read of a null disk (scsi32: 32 disks in turn), from pull to publish, by the
# number of requests published at once and by their layout in the ring (copy, map, persistent, bounce: a blkif ring,
# with grant operations that cost nothing). Made by tests/tests/budget/main.rs, which fails when a number grows by more
# than 3 percent. Another compiler gives other numbers: then they are printed and not checked.
";

/// Most additional instructions of a request with in-flight tracking, of 32 requests published at once.
const TRACKING: f64 = 45.0;

/// Requests of the shorter of the two runs whose difference is measured, which cancels setup and teardown.
const REQUESTS: u32 = 3200;

/// Counts of a number above the limit; the least one decides. The hash tables of grants have random multipliers, so the
/// number of collisions is random.
const COUNTS: u32 = 3;

/// The folder of callgrind's output, and of its explanation.
struct Callgrind {
    folder: TempDir,
    symbols: Symbols,
}

/// Returns the instructions executed inside `SteppedWorker::turn` while it serves `requests`, by stage.
fn instructions(requests: u32, batch: u32, shape: &str, mode: &str, callgrind: &mut Callgrind) -> [u64; STAGES.len()] {
    let out = callgrind.folder.path().join("callgrind.out");
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*SteppedWorker*turn*"])
        .args(stages::OPTIONS)
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program())
        .args([&requests.to_string(), &batch.to_string(), shape, mode])
        .output();
    let run = match run {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            panic!("found no valgrind, expected Debian's: apt-get install valgrind (make test does it)")
        }
        run => run.expect("valgrind can be started"),
    };
    assert!(run.status.success(), "the run under valgrind failed: {}", String::from_utf8_lossy(&run.stderr));
    let text = std::fs::read_to_string(&out).expect("callgrind's output");
    let totals = text.lines().find_map(|line| line.strip_prefix("totals: ")).expect("a line of totals");
    let total: u64 = totals.trim().parse().expect("one event is counted: instructions");
    // If the function were renamed, nothing would be counted, and 0 is within every budget.
    assert!(total > u64::from(requests) * 50, "{total} instructions for {requests} requests: wrong function counted");
    let profile = Profile::parse(&text);
    assert_eq!(profile.total(), total, "each instruction is counted once");
    let stages = profile.by_stage(&mut callgrind.symbols);
    for (stage, count) in STAGES.iter().zip(stages) {
        assert!(
            count > 0,
            "{stage}: found no instructions ({shape} {mode}), expected some: was a function renamed? See MARKS in stages.rs"
        );
    }
    stages
}

/// Returns the path of a release build of the program.
fn program() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a folder of the workspace");
        let built = Command::new("cargo")
            .args(["build", "--quiet", "--release", "-p", "mqblk-budget", "--bin", "instruction-budget"])
            .current_dir(workspace)
            .status();
        assert!(built.expect("cargo can be started").success(), "the program could not be built");
        workspace.join("target/release/instruction-budget")
    };
    let found = || std::env::var_os(PROGRAM).map_or_else(build, PathBuf::from);
    // Callgrind reports its full path.
    BUILT.get_or_init(|| std::fs::canonicalize(found()).expect("the program exists")).clone()
}

/// Instructions for one request, by stage.
#[derive(Clone, Copy)]
struct PerRequest([f64; STAGES.len()]);

impl PerRequest {
    fn count(batch: u32, shape: &str, mode: &str, callgrind: &mut Callgrind) -> PerRequest {
        let [once, twice] =
            [REQUESTS, 2 * REQUESTS].map(|requests| instructions(requests, batch, shape, mode, callgrind));
        let difference = |at: usize| (twice[at] as f64 - once[at] as f64) / f64::from(REQUESTS);
        PerRequest(std::array::from_fn(difference))
    }

    fn total(&self) -> f64 {
        self.0.iter().sum()
    }
}

impl std::fmt::Display for PerRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stages = STAGES.iter().zip(self.0).map(|(stage, count)| format!("{stage} {count:.1}"));
        f.write_str(&stages.collect::<Vec<_>>().join(", "))
    }
}

/// Returns the compiler's version.
fn rustc() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(rustc).arg("--version").output().expect("rustc can be started");
    String::from_utf8_lossy(&out.stdout).trim().to_owned()
}

#[test]
#[cfg_attr(debug_assertions, ignore = "instructions are counted in release builds: cargo test --release")]
fn instructions_per_request_are_within_the_budget() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut callgrind = Callgrind { folder, symbols: Symbols::of(&program()) };
    let committed = std::fs::read_to_string(COMMITTED).expect("the committed figures");
    let committed: Table = committed.parse().expect("TOML");
    let mut stdout = std::io::stdout().lock();
    let mut found = Table::new();
    let mut worse = vec![];
    for (shape, mode) in [
        ("direct", "plain"),
        ("indirect", "plain"),
        ("direct", "regions"),
        ("direct", "tracked"),
        ("direct", "packed"),
        ("indirect", "packed"),
        ("direct", "packed-tracked"),
        ("direct", "packed-scsi"),
        ("direct", "merge"),
        ("direct", "scsi"),
        ("direct", "scsi-tracked"),
        ("direct", "scsi32"),
        ("direct", "persistent"),
        ("direct", "bounce"),
        ("direct", "copy"),
        ("direct", "map"),
    ] {
        let what = match mode {
            "merge" => ", merging on, nothing to merge",
            "regions" => ", data in another region of guest memory",
            "tracked" => ", in-flight tracking",
            "packed" => ", packed ring",
            "packed-tracked" => ", packed ring, in-flight tracking",
            "packed-scsi" => ", packed ring, virtio-scsi",
            "scsi" => ", virtio-scsi",
            "scsi-tracked" => ", virtio-scsi, in-flight tracking",
            "scsi32" => ", virtio-scsi, 32 units by turns",
            "persistent" => ", blkif, persistent grants",
            "bounce" => ", blkif, persistent grants, data copied",
            "copy" => ", blkif, grant copy",
            "map" => ", blkif, grants mapped",
            _ => "",
        };
        let mut line = format!("{shape} descriptors{what}: instructions per request:");
        let mut by_stage = String::new();
        for batch in [1, 32] {
            let name = if mode == "plain" {
                format!("{shape}_batch_{batch}")
            } else {
                format!("{shape}_{mode}_batch_{batch}")
            };
            let before = committed.get(&name).and_then(Value::as_float);
            let too_many = |now: f64| before.is_none_or(|before| now > before * (1.0 + TOLERANCE_PERCENT / 100.0));
            let mut stages = PerRequest::count(batch, shape, mode, &mut callgrind);
            for _ in 1..COUNTS {
                if too_many(stages.total()) {
                    let again = PerRequest::count(batch, shape, mode, &mut callgrind);
                    stages = if again.total() < stages.total() { again } else { stages };
                }
            }
            let now = stages.total();
            by_stage += &format!("    batch {batch}: {stages}\n");
            line += &format!("{} batch {batch}: {now:.1}", if batch == 1 { "" } else { "," });
            if let Some(before) = before {
                line += &format!(" (committed {before:.1})");
            }
            if too_many(now) {
                worse.push(name.clone());
            }
            found.insert(name, Value::Float((now * 10.0).round() / 10.0));
        }
        write!(stdout, "{line}\n{by_stage}").expect("stdout");
    }
    for (plain, tracked) in [("direct", "direct_tracked"), ("direct_scsi", "direct_scsi-tracked")] {
        let [plain, tracked] =
            [plain, tracked].map(|name| found[&format!("{name}_batch_32")].as_float().expect("a figure"));
        let more = tracked - plain;
        assert!(
            more < TRACKING,
            "in-flight tracking costs {more:.1} instructions a request, expected less than {TRACKING}"
        );
    }
    let (now, before) = (rustc(), committed.get("rustc").and_then(Value::as_str).unwrap_or("an unknown compiler"));
    if std::env::var_os(RENEW).is_some_and(|value| value == "1") {
        found.insert("rustc".into(), Value::String(now));
        std::fs::write(COMMITTED, format!("{HEAD}{found}")).expect("written");
        return;
    }
    if now != before {
        writeln!(stdout, "not judged: built by {now}, the figures are of {before}").expect("stdout");
        return;
    }
    assert!(
        worse.is_empty(),
        "more than {TOLERANCE_PERCENT} percent over {COMMITTED}: {worse:?}. If the change is worth it, renew the figures: \
         {RENEW}=1 cargo test --release -p mqblk-tests --test budget"
    );
}
