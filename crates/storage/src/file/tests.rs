use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_core::{BlockSize, ByteLen, Disk, DiskChannel, DiskError, ImageOpener, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};
use tempfile::TempDir;

use super::channel::FileChannel;
use super::open_file::{FileKind, OpenFile};
use super::{FileDisk, ImageLock};
use crate::admission::DiskSize;
use crate::conformance::{TestRequest, TestTarget, TestWorker, cancel, run};
use crate::host_images::HostImages;
use crate::lock_mode::LockMode;

/// Opens images with the rights of this process.
fn host_images() -> Arc<dyn ImageOpener> {
    Arc::new(HostImages)
}

/// A sparse image in a new directory.
pub(super) fn image(place: &Path, len: u64) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(place).unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(len).unwrap();
    (dir, path)
}

/// A directory on a file system with storage: the one of this program.
pub(super) fn on_disk() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_path_buf()
}

pub(super) fn in_memory() -> PathBuf {
    PathBuf::from("/dev/shm")
}

fn conforms(place: PathBuf, len: u64, settings: &[(&str, &str)], seed: u64) {
    let (_dir, path) = image(&place, len);
    let mut all = vec![("path", path.to_str().unwrap())];
    all.extend(settings);
    run(&TestTarget { kind: "file", settings: &all, keeps_data: true, seed });
}

#[test]
fn conforms_direct() {
    conforms(on_disk(), 8 << 20, &[("block-size", "512")], 1);
}

#[test]
fn conforms_direct_with_large_blocks() {
    conforms(on_disk(), (5 << 20) + 4096, &[("block-size", "4096")], 2);
}

#[test]
fn conforms_buffered() {
    conforms(on_disk(), 8 << 20, &[("direct", "off"), ("block-size", "512")], 3);
}

#[test]
fn conforms_with_threads() {
    conforms(on_disk(), 8 << 20, &[("aio", "threads"), ("block-size", "4096")], 10);
    conforms(on_disk(), 8 << 20, &[("aio", "threads"), ("direct", "off"), ("block-size", "512")], 11);
    conforms(in_memory(), 8 << 20, &[("aio", "threads"), ("discard", "ignore")], 12);
}

#[test]
fn threads_are_for_file_systems_that_cannot_be_asked_without_waiting() {
    let aio = |disk: Arc<dyn Disk<UringContext>>| disk.resolved().into_iter().find(|(key, _)| *key == "aio").unwrap().1;
    let (_dir, path) = image(&on_disk(), 1 << 20);
    let path = path.to_str().unwrap();
    assert_eq!(aio(open(&[("path", path)])), "io_uring");
    assert_eq!(aio(open(&[("path", path), ("aio", "threads")])), "threads");
    assert_eq!(aio(open(&[("path", path), ("aio", "io_uring")])), "io_uring");
}

/// Requests that wait for a bounce slot have no operation in the kernel: cancelling aborts all of them at once.
#[test]
fn stalled_requests_can_be_cancelled() {
    let (_dir, path) = image(&on_disk(), 8 << 20);
    let settings = [("path", path.to_str().unwrap()), ("block-size", "512")];
    let trial = TestTarget { kind: "file", settings: &settings, keeps_data: true, seed: 0 };
    let disk = trial.open(&[]).unwrap();
    if disk.resolved().contains(&("direct", "off".to_owned())) {
        return;
    }
    let mut worker = TestWorker::new(disk.as_ref(), 128, FixedBufferUse::Off);
    // Memory that direct I/O cannot use. There are 32 slots.
    let reads: Vec<TestRequest> =
        (0..100).map(|at| TestRequest::with_data(Op::Read, at * 4096, 4096, at * 8192 + 1)).collect();
    let all = |turn| if turn == 0 { (0..100).collect() } else { vec![] };
    let results = worker.run_and_cancel(&reads, all);
    assert!(results[32..].iter().all(|result| result.outcome == Outcome::Aborted), "{results:?}");
    worker.close();
}

/// Transfers in the ring are cancelled, and all complete.
#[test]
fn transfers_in_the_ring_can_be_cancelled() {
    for direct in ["on", "off"] {
        let (_dir, path) = image(&on_disk(), 16 << 20);
        let settings = [("path", path.to_str().unwrap()), ("block-size", "512"), ("direct", direct)];
        let trial = TestTarget { kind: "file", settings: &settings, keeps_data: true, seed: 7 };
        let seen = cancel::some_of_many(&trial, &trial.open(&[]).unwrap());
        assert!(seen.aborted + seen.too_late > 50, "{seen:?}");
    }
}

#[test]
fn conforms_in_memory() {
    conforms(in_memory(), 8 << 20, &[], 4);
}

#[test]
fn conforms_without_discard() {
    conforms(on_disk(), 8 << 20, &[("discard", "ignore")], 5);
    conforms(in_memory(), 8 << 20, &[("discard", "ignore"), ("block-size", "4096")], 6);
}

pub(super) fn open(settings: &[(&str, &str)]) -> Arc<dyn Disk<UringContext>> {
    TestTarget { kind: "file", settings, keeps_data: true, seed: 0 }.open(&[]).unwrap()
}

/// Loop devices need root and a host that has them (`losetup`).
pub(super) struct LoopDevice(pub(super) String);

impl LoopDevice {
    pub(super) fn new(image: &Path, sector: &str) -> LoopDevice {
        let image = image.to_str().unwrap();
        let made = Command::new("losetup").args(["--find", "--show", "--sector-size", sector, image]).output().unwrap();
        assert!(made.status.success(), "losetup: {}", String::from_utf8_lossy(&made.stderr));
        LoopDevice(String::from_utf8(made.stdout).unwrap().trim().to_owned())
    }

    fn queue_attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/block").join(Path::new(&self.0).file_name().unwrap()).join("queue").join(name)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
#[ignore = "needs root"]
fn as_root_conforms_on_block_devices() {
    for (sector, direct, seed) in [("512", "on", 7), ("4096", "on", 8), ("512", "off", 9)] {
        let (_dir, path) = image(&on_disk(), 8 << 20);
        let device = LoopDevice::new(&path, sector);
        let settings = [("path", device.0.as_str()), ("direct", direct)];
        let disk = open(&settings);
        assert_eq!(disk.geometry().logical_block.bytes().to_string(), sector);
        assert_eq!(disk.geometry().size, ByteLen(8 << 20));
        // Once written, 0 is permanent: the kernel refuses a larger value (EINVAL) until the host restarts.
        let limit = std::fs::read_to_string(device.queue_attribute("discard_max_bytes")).unwrap();
        assert_eq!(disk.limits().discard.is_some(), limit.trim() != "0", "discard_max_bytes is {limit}");
        drop(disk);
        run(&TestTarget { kind: "file", settings: &settings, keeps_data: true, seed });
    }
}

/// Reads of a file that was truncated fail, writes extend it; nothing panics, and the rest is still served.
#[test]
fn a_file_that_is_truncated_while_open() {
    for (place, direct) in [(on_disk(), "on"), (on_disk(), "off"), (in_memory(), "off")] {
        let (_dir, path) = image(&place, 1 << 20);
        let disk = open(&[("path", path.to_str().unwrap()), ("direct", direct), ("block-size", "4096")]);
        let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Auto);
        File::options().write(true).open(&path).unwrap().set_len(8192 + 1000).unwrap();
        for shift in [0, 1] {
            for (start, len, want) in [
                (0, 8192, Outcome::Done(ByteLen(8192))),
                (8192, 4096, Outcome::OutOfRange),
                (4096, 16384, Outcome::OutOfRange),
                (524_288, 4096, Outcome::OutOfRange),
            ] {
                let got = worker.run_one(TestRequest::with_data(Op::Read, start, len, shift));
                assert_eq!(got, want, "direct={direct}, {len} bytes at {start}, memory shifted by {shift}");
            }
        }
        assert_eq!(
            worker.run_one(TestRequest::without_data(Op::Discard { secure: false }, 0, 1 << 20)),
            Outcome::Done(ByteLen::ZERO)
        );
        assert_eq!(worker.run_one(TestRequest::without_data(Op::Flush, 0, 0)), Outcome::Done(ByteLen::ZERO));
        worker.close();
    }
}

/// `/dev/full` fails every write with ENOSPC, for any user and without its own file system.
#[test]
fn a_full_device() {
    let fd = Arc::new(File::options().read(true).write(true).open("/dev/full").unwrap().into());
    let geometry = crate::admission::plain_geometry(ByteLen(1 << 20), BlockSize::B512, false);
    for kind in [FileKind::Regular, FileKind::InMemory] {
        let path = PathBuf::from("/dev/full");
        let size = Arc::new(DiskSize::new(geometry.size));
        let lock = ImageLock::new(LockMode::Exclusive, (&path, &fd), false, false, &host_images());
        let open = OpenFile {
            path,
            fd: Arc::clone(&fd),
            geometry,
            size,
            kind,
            direct: None,
            uses_threads: false,
            unmap: true,
            discard: None,
            threads_discard: false,
            small_blocks: None,
            locked: false,
        };
        let disk = FileDisk { open: Arc::new(open), lock, threads: None };
        let mut worker = TestWorker::new(&disk, 64, FixedBufferUse::Off);
        for op in [Op::Write { fua: false }, Op::Write { fua: true }] {
            assert_eq!(worker.run_one(TestRequest::with_data(op, 0, 4096, 0)), Outcome::NoSpace);
        }
        worker.close();
    }
}

/// A file system with less space than the image: the space ends in the middle of a request.
#[test]
#[ignore = "needs root"]
fn as_root_a_full_file_system() {
    let dir = tempfile::tempdir_in(on_disk()).unwrap();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1M", "mqblk"]).arg(dir.path()).output().unwrap();
    assert!(mount.status.success(), "mount: {}", String::from_utf8_lossy(&mount.stderr));
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(8 << 20).unwrap();
    let disk = open(&[("path", path.to_str().unwrap())]);
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Auto);
    let write = Op::Write { fua: false };
    let mebibyte = |at: u64, op| TestRequest::with_data(op, at << 20, 1 << 20, 0);
    assert_eq!(worker.run_one(mebibyte(0, write)), Outcome::Done(ByteLen(1 << 20)));
    assert_eq!(worker.run_one(mebibyte(1, write)), Outcome::NoSpace);
    assert_eq!(worker.run_one(TestRequest::with_data(write, 4 << 20, 4096, 0)), Outcome::NoSpace);
    let zeroes = Op::WriteZeroes { may_unmap: false, fua: false };
    assert_eq!(worker.run_one(TestRequest::without_data(zeroes, 4 << 20, 1 << 20)), Outcome::NoSpace);
    assert_eq!(worker.run_one(mebibyte(0, Op::Read)), Outcome::Done(ByteLen(1 << 20)));
    assert_eq!(
        worker.run_one(TestRequest::without_data(Op::Discard { secure: false }, 0, 1 << 20)),
        Outcome::Done(ByteLen::ZERO)
    );
    assert_eq!(worker.run_one(mebibyte(1, write)), Outcome::Done(ByteLen(1 << 20)), "discarded space is free again");
    worker.close();
    drop(disk);
    assert!(Command::new("umount").arg(dir.path()).status().unwrap().success());
}

/// Discards and zeroes that may unmap leave holes in the host's file; zeroes that may not, and `discard=ignore`, keep
/// space.
#[test]
fn holes_are_punched_only_where_allowed() {
    let unmapped = Op::WriteZeroes { may_unmap: true, fua: false };
    let kept = Op::WriteZeroes { may_unmap: false, fua: false };
    let discard = Op::Discard { secure: false };
    for (place, setting, op, want, holes) in [
        (on_disk(), "unmap", discard, Outcome::Done(ByteLen::ZERO), true),
        (on_disk(), "unmap", unmapped, Outcome::Done(ByteLen::ZERO), true),
        (on_disk(), "unmap", kept, Outcome::Done(ByteLen::ZERO), false),
        (on_disk(), "ignore", discard, Outcome::Unsupported, false),
        (on_disk(), "ignore", unmapped, Outcome::Done(ByteLen::ZERO), false),
        (in_memory(), "unmap", discard, Outcome::Done(ByteLen::ZERO), true),
        (in_memory(), "unmap", kept, Outcome::Done(ByteLen::ZERO), false),
        (in_memory(), "ignore", unmapped, Outcome::Done(ByteLen::ZERO), false),
    ] {
        let (_dir, path) = image(&place, 4 << 20);
        let disk = open(&[("path", path.to_str().unwrap()), ("discard", setting)]);
        let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Auto);
        worker.write_memory(0, &vec![9; 4 << 20]);
        assert_eq!(
            worker.run_one(TestRequest::with_data(Op::Write { fua: true }, 0, 4 << 20, 0)),
            Outcome::Done(ByteLen(4 << 20))
        );
        let sectors = || std::fs::metadata(&path).unwrap().blocks();
        let full = sectors();
        assert_eq!(worker.run_one(TestRequest::without_data(op, 1 << 20, 2 << 20)), want);
        let freed = full - sectors().min(full);
        let two_mebibytes = ByteLen(2 << 20).sectors().0;
        let expected = if holes { two_mebibytes } else { 0 };
        assert_eq!(freed, expected, "sectors freed by {op:?} with discard={setting} in {place:?}");
        worker.close();
    }
}

/// A host that neither punches holes nor zeroes extents: zeroes are written, also more of them at once than there are
/// slots.
#[test]
fn zeroes_without_fallocate() {
    for (place, direct) in [(on_disk(), "on"), (on_disk(), "off")] {
        let (_dir, path) = image(&place, 24 << 20);
        let mut settings = Settings::new("disk");
        for (key, value) in [("path", path.to_str().unwrap()), ("direct", direct)] {
            settings.insert(key, value).unwrap();
        }
        let (open, lock) = super::open::open(&mut settings, &host_images()).unwrap();
        let disk = NoFallocateDisk(FileDisk { open: Arc::new(open), lock, threads: None });
        let mut worker = TestWorker::new(&disk, 16, FixedBufferUse::Auto);
        worker.write_memory(0, &vec![7; 12 << 20]);
        let half = 12 << 20;
        for start in [0, half] {
            let write = worker.run_one(TestRequest::with_data(Op::Write { fua: false }, start, half, 0));
            assert_eq!(write, Outcome::Done(ByteLen(half)));
        }
        let zeroes = |at: u64| Op::WriteZeroes { may_unmap: at.is_multiple_of(2), fua: at.is_multiple_of(3) };
        let mut requests: Vec<TestRequest> =
            (0..30).map(|at| TestRequest::without_data(zeroes(at), at * 16384, 8192)).collect();
        // Longer than a slot, and not a multiple of it.
        requests.push(TestRequest::without_data(zeroes(0), 1 << 20, (3 << 20) + 4096));
        requests.push(TestRequest::without_data(zeroes(1), half, half));
        let results = worker.run(&requests);
        assert!(results.iter().all(|result| result.outcome == Outcome::Done(ByteLen::ZERO)), "{results:?}");
        assert_eq!(worker.run_one(TestRequest::with_data(Op::Read, 0, half, 0)), Outcome::Done(ByteLen(half)));
        let found = worker.read_memory(0, half as usize);
        for (at, block) in found.chunks(4096).enumerate() {
            let (start, end) = (at as u64 * 4096, at as u64 * 4096 + 4096);
            let zeroed = requests.iter().any(|want| want.start <= start && end <= want.start + want.len);
            assert!(block.iter().all(|byte| *byte == if zeroed { 0 } else { 7 }), "direct={direct}, byte {start}");
        }
        worker.close();
        assert!(std::fs::metadata(&path).unwrap().blocks() >= ByteLen(24 << 20).sectors().0, "no holes");
    }
}

/// A file disk on a host without the two modes of `fallocate`.
struct NoFallocateDisk(FileDisk);

impl Disk<UringContext> for NoFallocateDisk {
    fn geometry(&self) -> mqblk_core::Geometry {
        self.0.geometry()
    }

    fn limits(&self) -> mqblk_core::Limits {
        self.0.limits()
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.0.resize(size)
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let mut channel = FileChannel::new(Arc::clone(&self.0.open), self.0.geometry().size, context).unwrap();
        channel.unsupported = super::inflight::UnsupportedOps { punch: true, zero_range: true };
        Ok(Box::new(channel))
    }
}

/// More segments than the kernel accepts in one operation: the first 1024 are a short transfer, which continues with
/// the others.
#[test]
fn short_transfers_are_continued() {
    for (place, direct, segment) in [(on_disk(), "on", 512), (on_disk(), "off", 24), (in_memory(), "off", 24)] {
        let (_dir, path) = image(&place, 4 << 20);
        let disk = open(&[("path", path.to_str().unwrap()), ("direct", direct), ("block-size", "512")]);
        let mut worker = TestWorker::new(disk.as_ref(), 16, FixedBufferUse::Off);
        let count = 64 * 43_u32; // 2752 segments: three parts; whole blocks for both segment lengths
        let len = u64::from(count * segment);
        assert_eq!(len % 512, 0);
        let segments: Vec<(u64, u32)> = (0..u64::from(count)).rev().map(|at| (at * 1024, segment)).collect();
        let data: Vec<u8> = (0..len).map(|at| (at * 13 + at / 509) as u8).collect();
        for ((address, _), bytes) in segments.iter().zip(data.chunks(segment as usize)) {
            worker.write_memory(*address, bytes);
        }
        let request = |op| TestRequest { op, start: 512, len, segments: Some(segments.clone()) };
        assert_eq!(worker.run_one(request(Op::Write { fua: true })), Outcome::Done(ByteLen(len)), "direct={direct}");
        let stored = std::fs::read(&path).unwrap();
        assert!(stored[512..512 + len as usize] == data, "written with direct={direct}");
        worker.write_memory(0, &vec![0; count as usize * 1024]);
        assert_eq!(worker.run_one(request(Op::Read)), Outcome::Done(ByteLen(len)), "direct={direct}");
        let found: Vec<u8> =
            segments.iter().flat_map(|(address, len)| worker.read_memory(*address, *len as usize)).collect();
        assert!(found == data, "read with direct={direct}");
        worker.close();
    }
}

/// The kernel has few threads for these, shared by a worker's disks: one disk's flushes and discards do not occupy
/// them.
#[test]
fn many_flushes_and_discards_are_few_operations() {
    const COUNT: usize = 64;
    let (_dir, path) = image(&on_disk(), 8 << 20);
    let disk = open(&[("path", path.to_str().unwrap()), ("direct", "off"), ("block-size", "512")]);
    let mut worker = TestWorker::new(disk.as_ref(), 256, FixedBufferUse::Off);
    let discard = Op::Discard { secure: false };
    for (op, len, most) in [(Op::Flush, 0, 1), (discard, 4096, 2)] {
        let requests: Vec<TestRequest> = (0..COUNT).map(|_| TestRequest::without_data(op, 0, len)).collect();
        let (results, highest) = worker.run_counting_operations(&requests);
        assert!(results.iter().all(|result| result.outcome == Outcome::Done(ByteLen::ZERO)), "{results:?}");
        assert_eq!(highest, most, "operations of {op:?} in the kernel at once");
    }
    worker.close();
}
