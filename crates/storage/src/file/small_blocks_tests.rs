//! Disks with blocks of 512 bytes on storage with units of 4096: loop devices, XFS with reflinked files, btrfs. Each
//! needs root, and the last two their programs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;

use mqblk_core::{ByteLen, Disk, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;

use super::tests::{LoopDevice, image, on_disk, open};
use crate::conformance::{TestRequest, TestTarget, TestWorker, run};

const SECTOR: usize = 512;

/// A file system on a loop device. Unmounted and detached when dropped.
pub(super) struct FileSystem {
    folder: TempDir,
    _device: LoopDevice,
    _image: TempDir,
}

impl FileSystem {
    /// `None` if this host does not have it, or not the program that makes it.
    fn mount(mkfs: &str, options: &[&str]) -> Option<FileSystem> {
        let (image_folder, path) = image(&on_disk(), 400 << 20);
        let device = LoopDevice::new(&path, "512");
        let made = Command::new(mkfs).args(options).args(["-q", "-f"]).arg(&device.0).output().ok()?;
        assert!(made.status.success(), "{mkfs}: {}", String::from_utf8_lossy(&made.stderr));
        let folder = tempfile::tempdir_in(on_disk()).unwrap();
        let mounted = Command::new("mount").arg(&device.0).arg(folder.path()).status().unwrap();
        mounted.success().then_some(FileSystem { folder, _device: device, _image: image_folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.folder.path()).status();
    }
}

/// Runs `test` on storage with units of 4096 bytes, with the settings for a worker's ring and for threads.
fn with_storages(test: impl Fn(&Path, &[(&str, &str)])) {
    let (_dir, path) = image(&on_disk(), 8 << 20);
    let device = LoopDevice::new(&path, "4096");
    for more in [
        [("direct", "on"), ("aio", "io_uring")],
        [("direct", "off"), ("aio", "io_uring")],
        [("direct", "on"), ("aio", "threads")],
    ] {
        test(Path::new(&device.0), &more);
    }
    for system in [FileSystem::mount("mkfs.xfs", &[]), FileSystem::mount("mkfs.btrfs", &[])].into_iter().flatten() {
        let path = system.path("disk.img");
        std::fs::write(&path, vec![0; 8 << 20]).unwrap();
        let copied =
            Command::new("cp").arg("--reflink=always").arg(&path).arg(system.path("copy.img")).status().unwrap();
        assert!(copied.success(), "cp --reflink");
        test(&path, &[("direct", "on"), ("aio", "io_uring")]);
    }
}

#[test]
#[ignore = "needs root"]
fn as_root_conforms_with_blocks_smaller_than_the_storage_s() {
    with_storages(|path, more| {
        let mut settings = vec![("path", path.to_str().unwrap()), ("block-size", "512")];
        settings.extend(more);
        let disk = open(&settings);
        assert_eq!(disk.geometry().logical_block.bytes(), 512);
        assert!(disk.geometry().physical_block.bytes() >= 4096, "writes of whole units are faster, which guests see");
        let direct = ("direct", more[0].1.to_owned());
        assert!(disk.resolved().contains(&direct), "direct I/O is kept");
        drop(disk);
        run(&TestTarget { kind: "file", settings: &settings, keeps_data: true, seed: 13 });
    });
}

/// The possible values of a sector: the last one, or after concurrent writes one of theirs.
struct Sectors(Vec<Vec<u8>>);

/// A request of a round: its first sector, its sectors, and the byte that it writes; `None`: it zeroes.
type RoundWrite = (usize, usize, Option<u8>);

fn round_writes(random: &mut SmallRng, sectors: usize, count: usize, own: u8) -> Vec<RoundWrite> {
    let mut writes: Vec<RoundWrite> = Vec::new();
    for _ in 0..count {
        let len = [1, 1, 1, 3, 8, 8, 17][random.random_range(0..7)];
        let start = random.random_range(0..=sectors - len);
        let start = if len == 8 { start / 8 * 8 } else { start };
        let value = random.random_bool(0.9).then(|| own | random.random_range(0..32));
        // One guest has no overlapping writes of one queue in flight; others may.
        if writes.iter().all(|(other, size, _)| start + len <= *other || other + size <= start) {
            writes.push((start, len, value));
        }
    }
    writes
}

fn write_round(worker: &mut TestWorker, writes: &[RoundWrite]) {
    const AREA: usize = 16384;
    let mut requests = Vec::new();
    for (at, (start, len, value)) in writes.iter().enumerate() {
        let (start, bytes) = ((start * SECTOR) as u64, (len * SECTOR) as u64);
        requests.push(match value {
            Some(value) => {
                worker.write_memory((at * AREA) as u64, &vec![*value; len * SECTOR]);
                TestRequest::with_data(Op::Write { fua: at % 8 == 0 }, start, bytes, (at * AREA) as u64)
            }
            None => TestRequest::without_data(Op::WriteZeroes { may_unmap: at % 2 == 0, fua: false }, start, bytes),
        });
    }
    for result in worker.run(&requests) {
        assert!(matches!(result.outcome, Outcome::Done(_)), "{result:?}");
    }
}

/// Workers write sectors beside and over each other, all within a few units: no write undoes a neighbour's.
fn neighbours(disk: &dyn Disk<UringContext>) {
    const WORKERS: usize = 3;
    const SECTORS: usize = 64;
    const ROUNDS: usize = 150;
    let mut worker = TestWorker::new(disk, 64, FixedBufferUse::Off);
    write_round(&mut worker, &[(0, SECTORS, Some(7))]);
    let mut sectors = Sectors(vec![vec![7]; SECTORS]);
    let plans: Vec<Vec<Vec<RoundWrite>>> = (0..WORKERS)
        .map(|own| {
            let mut random = SmallRng::seed_from_u64(own as u64);
            (0..ROUNDS).map(|_| round_writes(&mut random, SECTORS, 12, (own as u8 + 1) << 5)).collect()
        })
        .collect();
    let (begin, end) = (Barrier::new(WORKERS + 1), Barrier::new(WORKERS + 1));
    std::thread::scope(|scope| {
        for plan in &plans {
            let (begin, end) = (&begin, &end);
            scope.spawn(move || {
                let mut worker = TestWorker::new(disk, 64, FixedBufferUse::Off);
                for writes in plan {
                    begin.wait();
                    write_round(&mut worker, writes);
                    end.wait();
                }
                worker.close();
            });
        }
        let mut wrong = None;
        for round in 0..ROUNDS {
            begin.wait();
            end.wait();
            let mut written = vec![Vec::new(); SECTORS];
            for (start, len, value) in plans.iter().flat_map(|plan| &plan[round]) {
                written[*start..start + len].iter_mut().for_each(|values| values.push(value.unwrap_or(0)));
            }
            let len = (SECTORS * SECTOR) as u64;
            let read = worker.run_one(TestRequest::with_data(Op::Read, 0, len, 0));
            let found = worker.read_memory(0, len as usize);
            if read != Outcome::Done(ByteLen(len)) {
                wrong.get_or_insert(format!("round {round}: {read:?}"));
            }
            for (at, values) in written.into_iter().enumerate() {
                let bytes = &found[at * SECTOR..][..SECTOR];
                let expected = if values.is_empty() { &sectors.0[at] } else { &values };
                if !expected.contains(&bytes[0]) || bytes.iter().any(|byte| *byte != bytes[0]) {
                    wrong.get_or_insert(format!(
                        "round {round}, sector {at}: found {}, expected {expected:?}",
                        bytes[0]
                    ));
                }
                sectors.0[at] = vec![bytes[0]];
            }
        }
        // Not within: the other threads wait at the barriers.
        assert_eq!(wrong, None);
    });
    worker.close();
}

#[test]
#[ignore = "needs root"]
fn as_root_writes_of_sectors_leave_their_neighbours() {
    with_storages(|path, more| {
        let mut settings = vec![("path", path.to_str().unwrap()), ("block-size", "512")];
        settings.extend(more);
        neighbours(open(&settings).as_ref());
    });
}

/// The image shows its guest's block size: it was made on other storage.
#[test]
#[ignore = "needs root"]
fn as_root_an_image_with_a_table_of_512_has_blocks_of_512() {
    with_storages(|path, more| {
        let mut settings = vec![("path", path.to_str().unwrap())];
        settings.extend(more);
        let block = || open(&settings).geometry().logical_block.bytes();
        let mut first = vec![0; 4096];
        std::fs::File::options().write(true).open(path).and_then(|file| write_at(&file, &first)).unwrap();
        let own = block();
        first[510..512].copy_from_slice(&[0x55, 0xaa]);
        first[512..520].copy_from_slice(b"EFI PART");
        std::fs::File::options().write(true).open(path).and_then(|file| write_at(&file, &first)).unwrap();
        assert_eq!((block(), own), (512, if more[0].1 == "off" && !path.starts_with("/dev") { 512 } else { 4096 }));
    });
}

fn write_at(file: &std::fs::File, bytes: &[u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, 0)?;
    file.sync_all()
}

/// A write of the last unit would extend such a file.
#[test]
#[ignore = "needs root"]
fn as_root_a_file_that_ends_within_a_unit_is_served_through_the_cache() {
    for system in [FileSystem::mount("mkfs.btrfs", &[])].into_iter().flatten() {
        let path = system.path("odd.img");
        let len = (8 << 20) + 512;
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        let disk = open(&[("path", path.to_str().unwrap())]);
        assert_eq!((disk.geometry().logical_block.bytes(), disk.geometry().size), (512, ByteLen(len)));
        assert!(disk.resolved().contains(&("direct", "off".to_owned())));
        let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Off);
        let write = Op::Write { fua: true };
        assert_eq!(worker.run_one(TestRequest::with_data(write, len - 512, 512, 0)), Outcome::Done(ByteLen(512)));
        worker.close();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
    }
}
