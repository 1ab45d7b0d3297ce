//! Images with every option, from QEMU to us and back.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use mqblk_core::Outcome;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::model::{Model, open};
use crate::tools::{Leaks, assert_clean, assert_equal, create, folder, must, run, text};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 12 * MIB + 512;

/// Writes by QEMU, by us, by QEMU and again by us; each reads the other's writes.
fn takes_turns(path: &Path, more: &[(&str, &str)], mut content: Vec<u8>, seed: u64) {
    for turn in 0..2 {
        let (at, pattern) = (turn * 3 * MIB + 512, 0x11 + turn as u8);
        must("qemu-io", &["-f", "qcow2", "-c", &format!("write -P {pattern} {at} 200k"), text(path)]);
        content[at as usize..at as usize + 200 * 1024].fill(pattern);
        let mut model = Model::new(open(path, more).expect("an image of QEMU"), content, seed + turn);
        model.verify();
        assert_eq!(model.run(150), None);
        content = model.close();
        assert_clean(path, Leaks::No);
        assert_equal(path, &content);
    }
}

#[test]
fn every_option_that_is_supported() {
    let (_dir, root) = folder();
    let options = [
        "",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=1",
        "cluster_size=2M",
        "cluster_size=1M,refcount_bits=64",
        "lazy_refcounts=on",
        "refcount_bits=8,cluster_size=8k",
        "preallocation=metadata",
        "preallocation=full",
        "compat=0.10,cluster_size=1024",
    ];
    for (seed, options) in options.iter().enumerate() {
        let path = root.join(format!("{seed}.qcow2"));
        create(&path, options, &[], SIZE);
        takes_turns(&path, &[], vec![0; SIZE as usize], seed as u64);
    }
}

#[test]
fn an_external_data_file() {
    let (_dir, root) = folder();
    let (path, data) = (root.join("a.qcow2"), root.join("a.data"));
    create(&path, &format!("data_file={}", text(&data)), &[], SIZE);
    let error = open(&path, &[]).err().expect("it names a file");
    assert!(error.contains("backing") && error.contains("a.data"), "{error}");
    takes_turns(&path, &[("backing", text(&data))], vec![0; SIZE as usize], 20);
    let raw = root.join("raw.qcow2");
    create(&raw, &format!("data_file={},data_file_raw=on", text(&root.join("raw.data"))), &[], SIZE);
    let error = open(&raw, &[("backing", "allow")]).err().expect("it must stay raw");
    assert!(error.contains("data_file_raw"), "{error}");
    Model::new(open(&raw, &[("backing", "allow"), ("readonly", "on")]).expect("reads"), vec![0; SIZE as usize], 0)
        .verify();
}

#[test]
fn compressed_clusters() {
    let (_dir, root) = folder();
    let (raw, path) = (root.join("a.raw"), root.join("a.qcow2"));
    let content: Vec<u8> = (0..SIZE).map(|at| (at / 700) as u8).collect();
    std::fs::write(&raw, &content).expect("a raw file");
    for (seed, cluster) in ["4k", "64k", "2M"].iter().enumerate() {
        let option = format!("cluster_size={cluster}");
        must("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &option, text(&raw), text(&path)]);
        takes_turns(&path, &[], content.clone(), 30 + seed as u64);
    }
}

/// Each first write to a cluster decompresses it and frees a part of another. For `MQBLK_COMPRESSED_SECONDS`, at least
/// one image of each cluster size, which is opened several times.
#[test]
fn small_writes_to_compressed_clusters() {
    let seconds = std::env::var("MQBLK_COMPRESSED_SECONDS").map_or(0, |text| text.parse().expect("seconds"));
    let (_dir, root) = folder();
    let (raw, path) = (root.join("a.raw"), root.join("a.qcow2"));
    let began = Instant::now();
    let mut seeds = 0..;
    while seeds.start < 3 || began.elapsed().as_secs() < seconds {
        let seed = seeds.next().expect("no end");
        // Clusters of no data, of little, and of some that does not compress.
        let mut random = SmallRng::seed_from_u64(seed);
        let mut content = vec![0; SIZE as usize];
        for sector in content.chunks_mut(512).skip(random.random_range(0..5000)) {
            match random.random_range(0..40) {
                0 => random.fill(sector),
                1..20 => sector.fill(random.random()),
                _ => {}
            }
        }
        std::fs::write(&raw, &content).expect("a raw file");
        let option = format!("cluster_size={}", ["4k", "64k", "2M"][seed as usize % 3]);
        must("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &option, text(&raw), text(&path)]);
        for turn in 0..3 {
            let mut model = Model::new(open(&path, &[]).expect("an image of QEMU"), content, seed << 8 | turn);
            model.write_small(300);
            content = model.close();
            assert_clean(&path, Leaks::No);
            assert_equal(&path, &content);
        }
    }
}

#[test]
fn a_chain_of_three_with_a_raw_and_a_shorter_base() {
    let (_dir, root) = folder();
    let (raw, middle, path) = (root.join("a.raw"), root.join("b.qcow2"), root.join("c.qcow2"));
    let mut content: Vec<u8> = (0..5 * MIB).map(|at| (at / 1000) as u8).collect();
    std::fs::write(&raw, &content).expect("a raw file");
    create(&middle, "compat=0.10", &["-b", "a.raw", "-F", "raw"], 8 * MIB);
    create(&path, "cluster_size=16k", &["-b", text(&middle), "-F", "qcow2"], SIZE);
    must("qemu-io", &["-f", "qcow2", "-c", "write -P 7 4M 2M", text(&middle)]);
    content.resize(SIZE as usize, 0);
    content[4 * MIB as usize..6 * MIB as usize].fill(7);
    let before = std::fs::read(&middle).expect("the image");
    takes_turns(&path, &[("backing", text(&root))], content, 40);
    assert_eq!(std::fs::read(&middle).expect("the image"), before);
}

#[test]
fn internal_snapshots_are_left_as_they_are() {
    let (_dir, root) = folder();
    let path = root.join("a.qcow2");
    create(&path, "", &[], SIZE);
    let mut model = Model::new(open(&path, &[]).expect("an image"), vec![0; SIZE as usize], 50);
    assert_eq!(model.run(100), None);
    let first = model.close();
    must("qemu-img", &["snapshot", "-c", "first", text(&path)]);
    takes_turns(&path, &[], first.clone(), 51);
    must("qemu-img", &["snapshot", "-c", "second", text(&path)]);
    let out = root.join("out.raw");
    must("qemu-img", &["convert", "-l", "first", "-f", "qcow2", "-O", "raw", text(&path), text(&out)]);
    assert!(std::fs::read(&out).expect("a raw file") == first, "the snapshot has changed");
    must("qemu-img", &["snapshot", "-a", "first", text(&path)]);
    takes_turns(&path, &[], first, 53);
}

/// `qemu-img` ends the file with the last snapshot's entry, whose padding depends on the length of its name.
#[test]
fn a_table_of_snapshots_ends_the_file() {
    let (_dir, root) = folder();
    let path = root.join("a.qcow2");
    for len in 1..=9 {
        create(&path, "", &[], SIZE);
        must("qemu-img", &["snapshot", "-c", &"abcdefghi"[..len], text(&path)]);
        // QEMU's first write makes the file longer.
        Model::new(open(&path, &[]).expect("an image of QEMU"), vec![0; SIZE as usize], 0).verify();
        takes_turns(&path, &[], vec![0; SIZE as usize], 70 + len as u64);
        assert!(must("qemu-img", &["snapshot", "-l", text(&path)]).contains(&"abcdefghi"[..len]));
    }
}

#[test]
fn resized_images() {
    let (_dir, root) = folder();
    for (seed, options) in ["", "cluster_size=512", "compat=0.10"].iter().enumerate() {
        let path = root.join(format!("{seed}.qcow2"));
        create(&path, options, &[], SIZE);
        let mut model = Model::new(open(&path, &[]).expect("an image"), vec![0; SIZE as usize], 60 + seed as u64);
        for size in [SIZE, 20 * MIB + 1024, 9 * MIB + 1536, 9 * MIB + 4096, 15 * MIB, 30 * MIB] {
            model.resize(size);
            assert_eq!(model.run(40), None);
        }
        let content = model.close();
        assert_clean(&path, Leaks::No);
        assert_equal(&path, &content);
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let (_dir, root) = folder();
    let path = root.join("a.qcow2");
    for (options, expected) in [("extended_l2=on,cluster_size=128k", "extended L2"), ("compression_type=zstd", "zstd")]
    {
        create(&path, options, &[], SIZE);
        for read_only in ["on", "off"] {
            let error = open(&path, &[("readonly", read_only)]).err().expect("it is not supported");
            assert!(error.contains(expected) && error.contains("qemu-img convert"), "{error}");
        }
    }
}

/// The image of a QEMU killed with `lazy_refcounts=on`.
#[test]
fn an_image_that_qemu_left_dirty_is_repaired() {
    let (_dir, root) = folder();
    let path = root.join("a.qcow2");
    create(&path, "lazy_refcounts=on", &[], SIZE);
    let commands = ["-c", "write -P 5 0 3M", "-c", "write -P 6 6M 1M", "-c", "flush", "-c", "sigraise 9"];
    let killed = run("qemu-io", &[&["-f", "qcow2"][..], &commands, &[text(&path)]].concat());
    assert!(!killed.status.success());
    assert!(must("qemu-img", &["info", text(&path)]).contains("lazy refcounts: true"));
    assert!(!run("qemu-img", &["check", text(&path)]).status.success(), "it was closed: nothing is tried");
    let mut content = vec![0; SIZE as usize];
    content[..3 * MIB as usize].fill(5);
    content[6 * MIB as usize..7 * MIB as usize].fill(6);
    let mut model = Model::new(open(&path, &[]).expect("it is repaired"), content, 70);
    model.verify();
    assert_eq!(model.run(100), None);
    let content = model.close();
    assert_clean(&path, Leaks::Accepted);
    assert_equal(&path, &content);
}

#[test]
fn qemu_and_we_do_not_write_one_image() {
    let (_dir, root) = folder();
    let (base, path) = (root.join("base.qcow2"), root.join("a.qcow2"));
    create(&base, "", &[], SIZE);
    create(&path, "", &["-b", text(&base), "-F", "qcow2"], SIZE);
    let named = [("backing", "allow")];
    let disk = open(&path, &named).expect("an image");
    let in_use = |path: &Path, command: &str| {
        let output = run("qemu-io", &["-f", "qcow2", "-c", command, text(path)]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.is_empty() || error.contains(" lock"), "{error}");
        !error.is_empty()
    };
    assert!(in_use(&path, "write 0 512"), "our image");
    assert!(in_use(&base, "write 0 512"), "our backing file");
    // Another QEMU reads the same base.
    let second = root.join("second.qcow2");
    create(&second, "", &["-b", text(&base), "-F", "qcow2"], SIZE);
    must("qemu-io", &["-f", "qcow2", "-c", "write 0 512", text(&second)]);
    drop(disk);
    for (of_qemu, expected) in [(&path, "path"), (&base, "backing")] {
        let mut child = Command::new("qemu-io")
            .args(["-f", "qcow2", text(of_qemu)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(b"write 0 512\n").expect("a command");
        // After its write it has the image.
        let mut output = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        assert!(output.any(|line| line.expect("a line").contains("wrote 512")), "it ended");
        let error = open(&path, &named).err().expect("QEMU writes it");
        assert!(error.contains(&format!("{expected}: found")) && error.contains("in use"), "{error}");
        drop(input);
        child.wait().expect("qemu-io");
    }
    drop(open(&path, &named).expect("an image"));
}

#[test]
#[ignore = "needs root"]
fn as_root_full_storage_is_no_space_and_damages_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4M", "mqblk"]).arg(dir.path()).output();
    let mount = mount.expect("mount");
    assert!(mount.status.success(), "{mount:?}");
    let path = dir.path().join("a.qcow2");
    create(&path, "", &[], 16 * MIB);
    let mut full = 0;
    let mut content = vec![0; 16 * MIB as usize];
    for seed in 0..10 {
        let mut model = Model::new(open(&path, &[]).expect("an image"), content, seed);
        match model.run(200) {
            None => {}
            Some(outcome) => {
                assert_eq!(outcome, Outcome::NoSpace);
                full += 1;
            }
        }
        drop(model.close());
        // A failed write may have done a part of its work: its range is read.
        let out = tempfile::NamedTempFile::new().expect("a file");
        must("qemu-img", &["convert", "-U", "-f", "qcow2", "-O", "raw", text(&path), text(out.path())]);
        content = std::fs::read(out.path()).expect("a raw file");
    }
    let check = run("qemu-img", &["check", "-U", text(&path)]);
    let unmounted = Command::new("umount").arg("-l").arg(dir.path()).status().expect("umount");
    assert!(unmounted.success() && full > 0, "it was never full");
    assert!(matches!(check.status.code(), Some(0 | 3)), "{}", String::from_utf8_lossy(&check.stdout));
    drop(content);
}
