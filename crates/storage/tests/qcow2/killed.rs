//! A writer that is killed at any moment: completed writes are present, and opening repairs the image.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use mqblk_core::{ByteLen, Op, Outcome};
use mqblk_storage::conformance::{TestRequest, TestWorker};
use mqblk_uring::FixedBufferUse;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::model::open;
use crate::tools::{Leaks, assert_clean, create, folder, must, text};

const SIZE: u64 = 4 << 30;
const BLOCK: u64 = 4096;
/// Written blocks: spread over the disk, so that all kinds of tables are made.
const BLOCKS: u64 = 500;
const SEED: &str = "MQBLK_QCOW2_KILLED_SEED";
const PATH: &str = "MQBLK_QCOW2_KILLED_PATH";

/// One operation of the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Write(u64),
    Discard(u64),
    Flush,
}

fn steps(seed: u64) -> impl Iterator<Item = Step> {
    let mut random = SmallRng::seed_from_u64(seed);
    // Discards write the tables, so only writers without discards have them in memory for long.
    let discards = seed.is_multiple_of(2);
    std::iter::repeat_with(move || match random.random_range(0..if discards { 20 } else { 200 }) {
        0 => Step::Flush,
        1..=3 if discards => Step::Discard(random.random_range(0..BLOCKS)),
        _ => Step::Write(random.random_range(0..BLOCKS)),
    })
}

fn place(block: u64) -> u64 {
    block * (SIZE / BLOCKS) / BLOCK * BLOCK
}

/// The content that a step gives to its block; `None`: zeroes.
fn bytes(step: usize) -> Vec<u8> {
    let number = step as u64 + 1;
    number.to_le_bytes().iter().copied().cycle().take(BLOCK as usize).collect()
}

/// Run as a separate process by the test below.
#[test]
#[ignore = "the writer that is killed"]
fn writer() {
    let (Ok(path), Ok(seed)) = (std::env::var(PATH), std::env::var(SEED)) else { return };
    let disk = open(Path::new(&path), &[("backing", "allow")]).expect("the image");
    let cluster = disk.limits().discard.expect("discards").granularity.0;
    let mut worker = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    let mut output = std::io::stdout();
    for (number, step) in steps(seed.parse().expect("a number")).enumerate() {
        let request = match step {
            Step::Write(block) => {
                worker.write_memory(0, &bytes(number));
                TestRequest::with_data(Op::Write { fua: false }, place(block), BLOCK, 0)
            }
            Step::Discard(block) => {
                // No other block is in the cluster.
                let (start, len) = (place(block) / cluster * cluster, cluster.max(BLOCK));
                TestRequest::without_data(Op::Discard { secure: false }, start, len)
            }
            Step::Flush => TestRequest::without_data(Op::Flush, 0, 0),
        };
        let outcome = worker.run_one(request);
        assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?}");
        writeln!(output, "completed {number}").and_then(|()| output.flush()).expect("a reader");
    }
}

/// Runs the writer, and kills it some time after its first step. Returns the number of steps known to be completed.
fn run_and_kill(path: &Path, seed: u64, after: Duration) -> usize {
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program)
        .args(["--exact", "killed::writer", "--ignored", "--nocapture"])
        .env(PATH, path)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the writer");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut lines = output
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| line.split_once("completed ").and_then(|(_, number)| number.parse::<usize>().ok()));
    let first = lines.next().expect("a step");
    // The pipe has room for fewer lines than a writer makes.
    let reader = std::thread::spawn(move || lines.last());
    std::thread::sleep(after);
    child.kill().expect("a kill");
    child.wait().expect("the end");
    reader.join().expect("a reader").unwrap_or(first) + 1
}

/// Returns the possible last steps of each block.
fn expected(seed: u64, completed: usize) -> BTreeMap<u64, Vec<usize>> {
    let mut allowed: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    // The one step that the kill may have interrupted.
    for (number, step) in steps(seed).enumerate().take(completed + 1) {
        if let Step::Write(block) | Step::Discard(block) = step {
            let steps = allowed.entry(block).or_default();
            if number < completed {
                steps.clear();
            }
            steps.push(number);
        }
    }
    allowed
}

/// `initial`: the blocks' content before the writer. An interrupted write may be complete in a part of a block's
/// clusters.
fn verify(path: &Path, seed: u64, completed: usize, initial: &[u8]) {
    let disk = open(path, &[("backing", "allow")]).expect("it is repaired");
    let cluster = disk.limits().discard.expect("discards").granularity.0;
    let part = cluster.min(BLOCK) as usize;
    let mut worker = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    let all: Vec<_> = steps(seed).take(completed + 1).collect();
    for (block, allowed) in expected(seed, completed) {
        let read = TestRequest::with_data(Op::Read, place(block), BLOCK, 0);
        assert_eq!(worker.run_one(read), Outcome::Done(ByteLen(BLOCK)));
        let found = worker.read_memory(0, BLOCK as usize);
        let before = allowed[0] >= completed;
        for (found, initial) in found.chunks(part).zip(initial.chunks(part)) {
            let good = allowed.iter().any(|step| match all[*step] {
                Step::Write(_) => *found == bytes(*step)[..part],
                _ => found.iter().all(|byte| *byte == 0),
            });
            // Never written before the kill: it may be unchanged.
            assert!(good || before && found == initial, "block {block}: {:x?}, {allowed:?}", &found[..8]);
        }
    }
    worker.close();
}

fn kills(options: &str, count: u64) {
    kills_of(options, count, &vec![0; BLOCK as usize], |path| create(path, options, &[], SIZE));
}

fn kills_of(options: &str, count: u64, initial: &[u8], create: impl Fn(&Path)) {
    let (_dir, root) = folder();
    for seed in 0..count {
        let path = root.join(format!("{seed}.qcow2"));
        create(&path);
        let completed = run_and_kill(&path, seed, Duration::from_millis(seed * 7 % 60));
        // QEMU repairs a copy, we the image.
        let copy = root.join("copy.qcow2");
        std::fs::copy(&path, &copy).expect("a copy");
        verify(&path, seed, completed, initial);
        assert_clean(&path, Leaks::Accepted);
        if !options.contains("0.10") {
            must("qemu-io", &["-f", "qcow2", "-c", "write 0 512", "-c", "discard 0 64k", text(&copy)]);
            assert_clean(&copy, Leaks::Accepted);
        }
        std::fs::remove_file(path).expect("the image");
    }
}

#[test]
fn killed_at_any_moment() {
    kills("", 12);
    kills("cluster_size=4k,refcount_bits=64", 6);
    kills("cluster_size=512", 4);
}

#[test]
fn killed_with_version_2() {
    kills("compat=0.10", 6);
}

/// A write to a compressed cluster allocates another one, and frees the compressed one.
#[test]
fn killed_with_compressed_clusters() {
    let (_dir, root) = folder();
    let (raw, mut initial) = (root.join("a.raw"), vec![0; BLOCK as usize]);
    // Compressed to a little more than its half.
    SmallRng::seed_from_u64(1).fill(&mut initial[..2200]);
    let file = File::create(&raw).and_then(|file| file.set_len(SIZE).map(|()| file)).expect("a raw file");
    for block in 0..BLOCKS {
        file.write_all_at(&initial, place(block)).expect("a block");
    }
    for cluster in ["4k", "64k"] {
        let options = format!("cluster_size={cluster}");
        kills_of(&options, 5, &initial, |path| {
            must("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, text(&raw), text(path)]);
        });
    }
}
