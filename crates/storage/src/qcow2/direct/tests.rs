//! Requests that bypass the library: their selection, and the exclusions.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, Disk, ImageOpener, Op, Outcome};
use mqblk_uring::FixedBufferUse;
use rand::RngExt as _;

use crate::conformance::{TestRequest, TestWorker};
use crate::host_images::HostImages;
use crate::qcow2::tests::{do_one, folder, open_with, overlay, read_one, text, write_one};
use crate::qcow2::{Qcow2Disk, open_disk};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 1 << 16;
const BLOCK: u64 = 4096;
const WRITE: Op = Op::Write { fua: false };

fn open(path: &Path, more: &[(&str, &str)]) -> Qcow2Disk {
    let mut settings = Settings::new("disk \"a\"");
    settings.insert("path", text(path)).unwrap();
    settings.insert("backing", "allow").unwrap();
    more.iter().for_each(|(key, value)| settings.insert(key, value).unwrap());
    let opener: Arc<dyn ImageOpener> = Arc::new(HostImages);
    open_disk(&mut settings, &opener).unwrap()
}

fn done(len: u64) -> Outcome {
    Outcome::Done(ByteLen(len))
}

#[test]
fn what_has_a_known_place_needs_no_thread() {
    let (_dir, path) = overlay(8 * MIB);
    let disk = open(&path, &[]);
    // Learns locations in the backing file, in the image, and zeroes.
    assert_eq!(read_one(&disk, 4 * MIB, 512), [0xb5; 512]);
    write_one(&disk, MIB, BLOCK, 7);
    assert_eq!(do_one(&disk, Op::Discard { secure: false }, 2 * MIB, CLUSTER), done(0));
    assert_eq!(read_one(&disk, 2 * MIB, 512), [0; 512]);
    let mut worker = TestWorker::new(&disk, 8, FixedBufferUse::Off);
    let kept = disk.image.keep_library();
    for (at, len, expected) in [
        (4 * MIB + 1024, 2 * CLUSTER, 0xb5),
        (MIB, BLOCK, 7),
        (MIB + BLOCK, CLUSTER - BLOCK, 0xb5),
        (2 * MIB + 512, CLUSTER - 512, 0),
    ] {
        assert_eq!(worker.run_one(TestRequest::with_data(Op::Read, at, len, 0)), done(len), "{at}");
        assert!(worker.read_memory(0, len as usize).iter().all(|byte| *byte == expected), "{at}");
    }
    worker.write_memory(0, &[9; 512]);
    assert_eq!(worker.run_one(TestRequest::with_data(WRITE, MIB + 512, 512, 0)), done(512));
    drop(kept);
    worker.close();
    assert_eq!(read_one(&disk, MIB, 1536), [[7; 512], [9; 512], [7; 512]].concat());
    drop(disk);
    let settings = [("path", text(&path)), ("backing", "allow"), ("aio", "threads")];
    let disk = open_with(&settings).unwrap();
    assert_eq!(read_one(disk.as_ref(), MIB, 1536), [[7; 512], [9; 512], [7; 512]].concat());
}

#[test]
fn a_write_that_needs_tables_goes_to_the_library() {
    let (_dir, path) = overlay(8 * MIB);
    let disk = open(&path, &[]);
    assert_eq!(read_one(&disk, 0, 512), [0xb5; 512]);
    write_one(&disk, 0, 512, 1);
    assert!(std::fs::read(path.with_file_name("base.raw")).unwrap().iter().all(|byte| *byte == 0xb5));
    assert_eq!(read_one(&disk, 0, 1024), [[1; 512], [0xb5; 512]].concat());
    // And after the cluster was freed.
    for forgotten in [Op::Discard { secure: false }, Op::WriteZeroes { may_unmap: true, fua: false }] {
        assert_eq!(do_one(&disk, forgotten, 0, CLUSTER), done(0));
        assert_eq!(read_one(&disk, 0, 1024), [0; 1024]);
        // Its former location is allocated to this one.
        write_one(&disk, 5 * MIB, CLUSTER, 5);
        write_one(&disk, 0, 512, 2);
        assert_eq!(read_one(&disk, 0, 1024), [[2; 512], [0; 512]].concat());
        assert_eq!(read_one(&disk, 5 * MIB, CLUSTER), vec![5; CLUSTER as usize]);
    }
    disk.resize(Some(ByteLen(CLUSTER / 2))).unwrap();
    disk.resize(Some(ByteLen(8 * MIB))).unwrap();
    assert_eq!(read_one(&disk, 5 * MIB, 512), [0; 512]);
}

/// A file that ends within its last cluster, as `qemu-img` makes them: the rest reads as zeroes.
#[test]
fn files_that_end_within_a_cluster() {
    let (_dir, root) = folder(2 * MIB);
    let (base, path) = (root.join("base.raw"), root.join("vm.qcow2"));
    drop(open_with(&[("overlay", text(&path)), ("base", text(&base))]).unwrap());
    let disk = open(&path, &[]);
    write_one(&disk, 0, CLUSTER, 3);
    drop(disk);
    let end = MIB + 3 * CLUSTER + 512;
    for file in [&path, &base] {
        let len = std::fs::metadata(file).unwrap().len();
        let shorter = if file == &base { end } else { len - CLUSTER / 2 };
        std::fs::File::options().write(true).open(file).unwrap().set_len(shorter).unwrap();
    }
    let disk = open(&path, &[("readonly", "on")]);
    for _ in 0..2 {
        let found = read_one(&disk, 0, CLUSTER);
        let (data, rest) = found.split_at(CLUSTER as usize / 2);
        assert!(data.iter().all(|byte| *byte == 3) && rest.iter().all(|byte| *byte == 0));
        assert_eq!(read_one(&disk, end - 512, 1024), [[0xb5; 512], [0; 512]].concat());
        assert_eq!(read_one(&disk, end + 512, 512), [0; 512]);
    }
    drop(disk);
    // Only the library extends the file: it relies on its known length.
    let disk = open(&path, &[]);
    let is_known = || disk.image.direct().is_some_and(|direct| direct.map.find(0, 512).is_some());
    write_one(&disk, 0, 512, 4);
    write_one(&disk, 40 << 10, 512, 5);
    assert!(!is_known());
    write_one(&disk, CLUSTER - 512, 512, 6);
    assert!(is_known());
    let zeroes = Op::WriteZeroes { may_unmap: false, fua: false };
    assert_eq!(do_one(&disk, zeroes, 36 << 10, 4096), done(0));
    for _ in 0..2 {
        assert_eq!(read_one(&disk, 40 << 10, 1024), [[5; 512], [0; 512]].concat());
        assert_eq!(read_one(&disk, 0, 1024), [[4; 512], [3; 512]].concat());
    }
}

/// A cluster of the image is several of the backing file, some without data: it has no single location.
#[test]
fn a_backing_file_of_smaller_clusters() {
    let (_dir, root) = folder(MIB);
    let (base, path) = (root.join("small.qcow2"), root.join("vm.qcow2"));
    let created = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", text(&base), "1M"])
        .status();
    assert!(created.expect("qemu-img (apt-get install qemu-utils)").success());
    let below = open(&base, &[]);
    write_one(&below, 0, BLOCK, 1);
    write_one(&below, 3 * BLOCK, BLOCK, 3);
    drop(below);
    drop(open_with(&[("overlay", text(&path)), ("base", text(&base))]).unwrap());
    let disk = open(&path, &[]);
    for _ in 0..2 {
        for (block, byte) in [(0, 1), (1, 0), (3, 3), (4, 0)] {
            assert_eq!(read_one(&disk, block * BLOCK, BLOCK), [byte; BLOCK as usize], "block {block}");
        }
    }
}

/// Durable data also has its tables in the file.
#[test]
fn a_durable_write_has_durable_tables() {
    let (_dir, path) = overlay(2 * MIB);
    let disk = open(&path, &[]);
    write_one(&disk, MIB, BLOCK, 1);
    let mut worker = TestWorker::new(&disk, 8, FixedBufferUse::Off);
    worker.write_memory(0, &[2; BLOCK as usize]);
    assert_eq!(worker.run_one(TestRequest::with_data(Op::Write { fua: true }, MIB, BLOCK, 0)), done(BLOCK));
    // The state after a kill.
    let killed = path.with_file_name("killed.qcow2");
    std::fs::copy(&path, &killed).unwrap();
    worker.close();
    assert_eq!(read_one(&open(&killed, &[("lock", "off")]), MIB, BLOCK), [2; BLOCK as usize]);
}

/// Workers write blocks of shared clusters while another one discards clusters, whose locations are reused: no read
/// returns foreign data.
#[test]
fn workers_and_discards_side_by_side() {
    const WRITERS: u64 = 2;
    const BLOCKS: u64 = 8 * MIB / BLOCK;
    let (_dir, path) = overlay(16 * MIB);
    let disk = open(&path, &[("threads", "3")]);
    let (rounds, done_writers) = (AtomicU64::new(0), AtomicBool::new(false));
    let contents = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                let (disk, rounds) = (&disk, &rounds);
                scope.spawn(move || {
                    let mut random = rand::rng();
                    let mut worker = TestWorker::new(disk, 32, FixedBufferUse::Off);
                    let mut contents = vec![0xb5_u8; (BLOCKS / WRITERS) as usize];
                    for round in 0..600_u64 {
                        let own = random.random_range(0..BLOCKS / WRITERS);
                        let (at, byte) = ((own * WRITERS + number) * BLOCK, (round % 250) as u8 + 1);
                        let request = match random.random_range(0..10) {
                            0 => TestRequest::without_data(Op::WriteZeroes { may_unmap: true, fua: false }, at, BLOCK),
                            1..5 => TestRequest::with_data(WRITE, at, BLOCK, 0),
                            _ => TestRequest::with_data(Op::Read, at, BLOCK, 0),
                        };
                        worker.write_memory(0, &[byte; BLOCK as usize]);
                        let op = request.op;
                        let outcome = worker.run_one(request);
                        assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?}");
                        let content = &mut contents[own as usize];
                        match op {
                            Op::Read => assert_eq!(worker.read_memory(0, BLOCK as usize), [*content; BLOCK as usize]),
                            WRITE => *content = byte,
                            _ => *content = 0,
                        }
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                    worker.close();
                    contents
                })
            })
            .collect();
        let discards = scope.spawn(|| {
            let mut worker = TestWorker::new(&disk, 8, FixedBufferUse::Off);
            let mut random = rand::rng();
            while !done_writers.load(Ordering::Relaxed) {
                let at = 8 * MIB + random.random_range(0..8 * MIB / CLUSTER) * CLUSTER;
                worker.write_memory(0, &[0xdd; CLUSTER as usize]);
                assert_eq!(worker.run_one(TestRequest::with_data(WRITE, at, CLUSTER, 0)), done(CLUSTER));
                assert_eq!(worker.run_one(TestRequest::with_data(WRITE, at, BLOCK, 0)), done(BLOCK));
                assert_eq!(
                    worker.run_one(TestRequest::without_data(Op::Discard { secure: false }, at, CLUSTER)),
                    done(0)
                );
                assert_eq!(worker.run_one(TestRequest::with_data(Op::Read, at, BLOCK, 0)), done(BLOCK));
                assert_eq!(worker.read_memory(0, BLOCK as usize), [0; BLOCK as usize]);
            }
            worker.close();
        });
        let contents: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done_writers.store(true, Ordering::Relaxed);
        discards.join().unwrap();
        contents.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    });
    let verify = |disk: &Qcow2Disk| {
        for (number, contents) in (0..).zip(&contents) {
            for (own, byte) in (0..).zip(contents) {
                let at = (own * WRITERS + number) * BLOCK;
                assert_eq!(read_one(disk, at, BLOCK), [*byte; BLOCK as usize], "block {at}");
            }
        }
    };
    verify(&disk);
    drop(disk);
    verify(&open(&path, &[("readonly", "on"), ("aio", "threads")]));
}
