//! Images as people have them: combinations of the options of `qemu-img` with snapshots, bitmaps, compressed clusters,
//! an external data file, backing files and changed sizes. Each opens and has QEMU's content, or is refused by name.

use std::path::{Path, PathBuf};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use crate::model::{Model, open};
use crate::tools::{Leaks, Qemu, assert_clean, assert_equal, folder, text};

const MIB: u64 = 1 << 20;
/// Bytes of the disk: its last cluster is not a whole one.
const SIZE: u64 = 5 * MIB + 512;
/// Images of a run by each version of QEMU. `MQBLK_REPETITIONS` multiplies them.
const IMAGES: u64 = 12;

/// An image that QEMU has made.
struct Made {
    path: PathBuf,
    /// Its history, for an error.
    story: Vec<String>,
}

impl Made {
    /// Runs a program on it. Returns false if QEMU refuses it for this combination.
    fn try_with(&mut self, qemu: &Qemu, program: &str, arguments: &[&str]) -> bool {
        let done = qemu.run(program, arguments).status.success();
        self.story.push(format!("{program} {}{}", arguments.join(" "), if done { "" } else { " (refused)" }));
        done
    }
}

/// Makes an image by a random combination.
fn make(qemu: &Qemu, root: &Path, random: &mut SmallRng) -> Option<Made> {
    let path = root.join("a.qcow2");
    let cluster = *["512", "4k", "64k", "2M"].choose(random)?;
    let bits = *["1", "2", "4", "8", "16", "32", "64"].choose(random)?;
    let mut options = match random.random_bool(0.15) {
        true => format!("compat=0.10,cluster_size={cluster}"),
        false => format!("cluster_size={cluster},refcount_bits={bits}"),
    };
    options += if random.random_bool(0.2) && !options.starts_with("compat") { ",lazy_refcounts=on" } else { "" };
    let backing = *["", "", "raw", "qcow2"].choose(random)?;
    let base = root.join("base");
    let mut more = vec![];
    if !backing.is_empty() {
        qemu.must("qemu-img", &["create", "-q", "-f", backing, text(&base), &(3 * MIB).to_string()]);
        qemu.must("qemu-io", &["-f", backing, "-c", "write -P 9 100k 2M", text(&base)]);
        more.extend(["-b", text(&base), "-F", backing]);
    } else {
        options +=
            [",preallocation=metadata", ",preallocation=falloc", ",preallocation=full", "", ""].choose(random)?;
    }
    qemu.create(&path, &options, &more, SIZE);
    let mut made = Made { path: path.clone(), story: vec![format!("{qemu:?}: {options} over {backing:?}")] };
    let image = text(&path);
    for turn in 0..3 {
        let (at, len) = (random.random_range(0..SIZE / 512) * 512, random.random_range(1..400) * 512);
        let len = len.min(SIZE - at);
        let kind = *["write", "write -c", "write -z", "discard"].choose(random)?;
        let pattern =
            if kind.starts_with("write") && !kind.ends_with('z') { format!(" -P {}", turn + 1) } else { String::new() };
        made.try_with(qemu, "qemu-io", &["-f", "qcow2", "-c", &format!("{kind}{pattern} {at} {len}"), image]);
        match random.random_range(0..5) {
            0 | 1 => {
                let name = "a snapshot with a long name".split_at(random.random_range(1..20)).0.to_owned() + "x";
                made.try_with(qemu, "qemu-img", &["snapshot", "-c", &name, image]);
            }
            2 => {
                made.try_with(qemu, "qemu-img", &["bitmap", "--add", image, &format!("bitmap{turn}")]);
            }
            3 => {
                let size = (random.random_range(SIZE / 2..2 * SIZE) / 512 * 512).to_string();
                made.try_with(qemu, "qemu-img", &["resize", "-q", "--shrink", "-f", "qcow2", image, &size]);
            }
            _ => {}
        }
    }
    Some(made)
}

#[test]
fn each_image_of_qemu_is_served_or_refused_by_name() {
    let repetitions = std::env::var("MQBLK_REPETITIONS").map_or(1, |text| text.parse().expect("a number"));
    let (mut served, mut refused) = (0, Vec::new());
    let seeds =
        Qemu::all().into_iter().flat_map(|qemu| (0..IMAGES * repetitions).map(move |seed| (qemu.clone(), seed)));
    for (qemu, seed) in seeds {
        let (_dir, root) = folder();
        let mut random = SmallRng::seed_from_u64(seed);
        let made = make(&qemu, &root, &mut random).expect("lists that are not empty");
        let raw = root.join("raw");
        qemu.must("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(&made.path), text(&raw)]);
        let content = std::fs::read(&raw).expect("a raw file");
        // A write makes a bitmap invalid, and nobody names its clusters any more.
        let has_bitmap = made.story.iter().any(|step| step.contains("--add") && !step.contains("refused"));
        // A snapshot that QEMU refuses leaves some clusters, too, or wrong refcounts.
        let check = qemu.run("qemu-img", &["check", text(&made.path)]).status.code();
        let leaks = if has_bitmap || check == Some(3) { Leaks::Accepted } else { Leaks::No };
        match open(&made.path, &[("backing", text(&root))]) {
            Ok(disk) => {
                let story = || format!("seed {seed}: {:#?}", made.story);
                let _on_panic = OnPanic(&story);
                let mut model = Model::new(disk, content, seed);
                model.verify();
                assert_eq!(model.run(60), None);
                let content = model.close();
                assert_clean(&made.path, leaks);
                assert_equal(&made.path, &content);
                served += 1;
            }
            Err(error) if check == Some(2) => assert!(error.contains("damaged"), "{error}"),
            Err(error) => refused.push(format!("seed {seed}: {error}: {:#?}", made.story)),
        }
    }
    assert!(refused.is_empty(), "{served} were served; refused:\n{}", refused.join("\n"));
}

/// Prints the story of an image whose check panics.
struct OnPanic<'a>(&'a dyn Fn() -> String);

impl Drop for OnPanic<'_> {
    #[expect(clippy::print_stderr, reason = "the cause of a failure")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", (self.0)());
        }
    }
}
