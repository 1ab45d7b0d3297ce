use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, ByteOffset, Disk, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};
use tempfile::TempDir;

use super::create::create_overlay;
use super::header::Header;
use crate::blocking::BlockingStorage as _;
use crate::conformance::{TestRequest, TestTarget, TestWorker, cancel, run};
use crate::host_images::HostImages;

const MIB: u64 = 1 << 20;
const WRITE: Op = Op::Write { fua: false };

/// A folder with `base.raw` of `len` bytes, all `0xb5`.
pub(super) fn folder(len: u64) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("base.raw"), vec![0xb5; len as usize]).unwrap();
    let path = dir.path().canonicalize().unwrap();
    (dir, path)
}

pub(super) fn open_with(settings: &[(&str, &str)]) -> Result<Arc<dyn Disk<UringContext>>, String> {
    TestTarget { kind: "qcow2", settings, keeps_data: true, seed: 0 }.open(&[]).map_err(|error| error.to_string())
}

pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An image of 8 MiB over a raw base.
pub(super) fn overlay(len: u64) -> (TempDir, PathBuf) {
    let (dir, root) = folder(len);
    let path = root.join("disk.qcow2");
    let base = root.join("base.raw");
    drop(open_with(&[("overlay", text(&path)), ("base", text(&base))]).unwrap());
    (dir, path)
}

/// An image without a backing file: its header is changed to have none.
fn plain(len: u64) -> (TempDir, PathBuf) {
    let (dir, path) = overlay(len);
    File::options().write(true).open(&path).unwrap().write_all_at(&[0; 12], 8).unwrap();
    (dir, path)
}

fn poke(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

fn header(path: &Path) -> Header {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    Header::read(&file, len).unwrap()
}

pub(super) fn write_one(disk: &dyn Disk<UringContext>, at: u64, len: u64, byte: u8) {
    let mut worker = TestWorker::new(disk, 8, FixedBufferUse::Off);
    worker.write_memory(0, &vec![byte; len as usize]);
    assert_eq!(worker.run_one(TestRequest::with_data(WRITE, at, len, 0)), Outcome::Done(ByteLen(len)));
    worker.close();
}

pub(super) fn read_one(disk: &dyn Disk<UringContext>, at: u64, len: u64) -> Vec<u8> {
    let mut worker = TestWorker::new(disk, 8, FixedBufferUse::Off);
    assert_eq!(worker.run_one(TestRequest::with_data(Op::Read, at, len, 0)), Outcome::Done(ByteLen(len)));
    let bytes = worker.read_memory(0, len as usize);
    worker.close();
    bytes
}

pub(super) fn do_one(disk: &dyn Disk<UringContext>, op: Op, at: u64, len: u64) -> Outcome {
    let mut worker = TestWorker::new(disk, 8, FixedBufferUse::Off);
    let outcome = worker.run_one(TestRequest::without_data(op, at, len));
    worker.close();
    outcome
}

#[test]
fn conforms() {
    let (_dir, path) = plain(8 * MIB);
    for seed in 1..=3 {
        run(&TestTarget { kind: "qcow2", settings: &[("path", text(&path))], keeps_data: true, seed });
    }
}

#[test]
fn conforms_over_a_backing_file() {
    let (_dir, path) = overlay(8 * MIB);
    let base = path.with_file_name("base.raw");
    let settings = [("path", text(&path)), ("backing", text(&base)), ("block-size", "4096"), ("threads", "3")];
    run(&TestTarget { kind: "qcow2", settings: &settings, keeps_data: true, seed: 2 });
    assert!(std::fs::read(base).unwrap().iter().all(|byte| *byte == 0xb5), "the backing file is only read");
}

#[test]
fn random_requests_are_cancelled() {
    let (_dir, path) = plain(16 * MIB);
    let settings = [("path", text(&path)), ("threads", "2")];
    let trial = TestTarget { kind: "qcow2", settings: &settings, keeps_data: true, seed: 7 };
    let seen = cancel::some_of_many(&trial, &trial.open(&[]).unwrap());
    assert!(seen.aborted + seen.too_late > 50, "{seen:?}");
}

#[test]
fn an_overlay_is_made_once_and_nothing_is_replaced() {
    let (_dir, root) = folder(2 * MIB);
    let (base, path) = (root.join("base.raw"), root.join("vm.qcow2"));
    let settings = [("overlay", text(&path)), ("base", text(&base))];
    let disk = open_with(&settings).unwrap();
    assert_eq!(disk.geometry().size, ByteLen(2 * MIB));
    assert_eq!(read_one(disk.as_ref(), MIB, 512), [0xb5; 512]);
    write_one(disk.as_ref(), MIB, 512, 7);
    drop(disk);
    let header = header(&path);
    assert_eq!((header.backing.as_deref(), header.backing_format.as_deref()), (Some(text(&base)), Some("raw")));
    let disk = open_with(&settings).unwrap();
    assert_eq!(read_one(disk.as_ref(), MIB, 512), [7; 512]);
    // An overlay of the overlay names the other format; the chain needs the rule for the first base.
    drop(disk);
    let second = root.join("second.qcow2");
    let both = [("overlay", text(&second)), ("base", text(&path))];
    let error = open_with(&both).err().unwrap();
    assert!(error.contains("base.raw") && error.contains("backing=deny"), "{error}");
    let disk = open_with(&[both[0], both[1], ("backing", text(&base))]).unwrap();
    assert_eq!(read_one(disk.as_ref(), MIB, 1024), [[7; 512], [0xb5; 512]].concat());
    let names: Vec<_> = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "no temporary file is left: {names:?}");
    // A file that is not an image is unchanged.
    std::fs::write(root.join("other"), "text").unwrap();
    let error = open_with(&[("overlay", text(&root.join("other"))), ("base", text(&base))]).err().unwrap();
    assert!(error.contains("no qcow2 header"), "{error}");
    assert_eq!(std::fs::read(root.join("other")).unwrap(), b"text");
}

#[test]
fn an_overlay_without_a_folder_or_base_is_an_error_that_names_the_key() {
    let (_dir, root) = folder(MIB);
    let (base, path) = (root.join("base.raw"), root.join("missing/vm.qcow2"));
    let error = open_with(&[("overlay", text(&path)), ("base", text(&base))]).err().unwrap();
    assert!(error.contains("overlay: found") && error.contains("qemu-img create"), "{error}");
    let error = open_with(&[("overlay", text(&path))]).err().unwrap();
    assert!(error.contains("base: found nothing"), "{error}");
    let error = open_with(&[("overlay", text(&root.join("a"))), ("base", text(&root.join("b")))]).err().unwrap();
    assert!(error.contains("base: found") && !root.join("a").exists(), "{error}");
}

#[test]
fn files_are_named_by_an_image_only_as_the_rule_allows() {
    let (_dir, path) = overlay(MIB);
    let base = path.with_file_name("base.raw");
    let with = |backing: &str| open_with(&[("path", text(&path)), ("backing", backing)]).map(drop);
    for backing in ["allow", text(&base), text(base.parent().unwrap()), &format!("/nowhere:{}", text(&base))] {
        with(backing).unwrap_or_else(|error| panic!("{backing}: {error}"));
    }
    for backing in ["deny", "/nowhere", text(&path)] {
        let error = with(backing).unwrap_err();
        assert!(error.contains("base.raw") && error.contains(&format!("backing={backing}")), "{error}");
    }
    let error = with("relative").unwrap_err();
    assert!(error.contains("backing: found \"relative\""), "{error}");
    // A link in an allowed folder leads to a file elsewhere.
    let other = tempfile::tempdir().unwrap();
    std::fs::rename(&base, other.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(other.path().join("elsewhere"), &base).unwrap();
    let error = with(text(base.parent().unwrap())).unwrap_err();
    assert!(error.contains("backing"), "{error}");
}

#[test]
fn an_image_is_locked_and_a_backing_file_is_shared() {
    let (_dir, path) = overlay(MIB);
    let base = path.with_file_name("base.raw");
    let settings = [("path", text(&path)), ("backing", "allow")];
    let disk = open_with(&settings).unwrap();
    let error = open_with(&settings).err().unwrap();
    assert!(error.contains("in use by another process"), "{error}");
    let second = path.with_file_name("second.qcow2");
    drop(open_with(&[("overlay", text(&second)), ("base", text(&base))]).unwrap());
    let file = |read_only| {
        let settings = [("path", text(&base)), ("readonly", read_only)];
        TestTarget { kind: "file", settings: &settings, keeps_data: true, seed: 0 }.open(&[]).map(drop)
    };
    file("on").unwrap();
    let error = file("off").unwrap_err().to_string();
    assert!(error.contains("in use by another process"), "{error}");
    drop(disk);
    file("off").unwrap();
    // A reader elsewhere does not keep it from being a backing file; a writer does.
    let reader = [("path", text(&base)), ("readonly", "on")];
    let reader = TestTarget { kind: "file", settings: &reader, keeps_data: true, seed: 0 }.open(&[]).unwrap();
    drop(open_with(&settings).unwrap());
    drop(reader);
    let writer = [("path", text(&base))];
    let _writer = TestTarget { kind: "file", settings: &writer, keeps_data: true, seed: 0 }.open(&[]).unwrap();
    let error = open_with(&settings).err().unwrap();
    assert!(error.contains("in use by another process"), "{error}");
}

#[test]
fn the_dirty_bit_is_set_while_the_image_changes_and_missing_refcounts_are_repaired() {
    let (_dir, path) = plain(8 * MIB);
    let settings = [("path", text(&path))];
    let disk = open_with(&settings).unwrap();
    assert!(!header(&path).is_dirty(), "nothing was changed");
    read_one(disk.as_ref(), 0, 512);
    assert!(!header(&path).is_dirty());
    write_one(disk.as_ref(), MIB, 4096, 9);
    assert!(header(&path).is_dirty());
    // The state after a killed writer: the current file.
    let killed = path.with_file_name("killed.qcow2");
    std::fs::copy(&path, &killed).unwrap();
    disk.sync().unwrap();
    assert!(!header(&path).is_dirty());
    write_one(disk.as_ref(), 0, 4096, 8);
    assert!(header(&path).is_dirty());
    disk.sync().unwrap();
    // Also if the data has a cluster already.
    write_one(disk.as_ref(), 0, 4096, 8);
    assert!(header(&path).is_dirty());
    drop(disk);
    assert!(!header(&path).is_dirty());
    let killed_settings = [("path", text(&killed))];
    let error = open_with(&[killed_settings[0], ("readonly", "on")]).err().unwrap();
    assert!(error.contains("dirty bit") && error.contains("qemu-img check -r all"), "{error}");
    let disk = open_with(&killed_settings).unwrap();
    assert!(!header(&killed).is_dirty());
    // It was not flushed: both are right.
    let bytes = read_one(disk.as_ref(), MIB, 4096);
    assert!(bytes == [0; 4096] || bytes == [9; 4096]);
    write_one(disk.as_ref(), 2 * MIB, 4096, 3);
    drop(disk);
    assert_eq!(read_one(open_with(&killed_settings).unwrap().as_ref(), 2 * MIB, 4096), [3; 4096]);
}

#[test]
fn a_larger_disk_reads_as_zeroes_also_where_the_backing_file_is_longer() {
    let (_dir, path) = overlay(MIB);
    let settings = [("path", text(&path)), ("backing", "allow")];
    let disk = open_with(&settings).unwrap();
    write_one(disk.as_ref(), 256 * 1024, 4096, 1);
    // In the middle of a written cluster.
    let shorter = 256 * 1024 + 2048;
    assert_eq!(disk.resize(Some(ByteLen(shorter))).unwrap(), ByteLen(shorter));
    assert_eq!(disk.resize(Some(ByteLen(4 * MIB))).unwrap(), ByteLen(4 * MIB));
    assert_eq!(read_one(disk.as_ref(), 256 * 1024, 4096), [[1; 2048], [0; 2048]].concat());
    for at in [300 * 1024, 512 * 1024, MIB - 512, MIB, 3 * MIB] {
        assert_eq!(read_one(disk.as_ref(), at, 512), [0; 512], "{at}");
    }
    assert_eq!(read_one(disk.as_ref(), 0, 512), [0xb5; 512]);
    drop(disk);
    assert_eq!(open_with(&settings).unwrap().geometry().size, ByteLen(4 * MIB));
}

#[test]
fn discards_and_zeroes_hide_the_backing_file() {
    let (_dir, path) = overlay(2 * MIB);
    let disk = open_with(&[("path", text(&path)), ("backing", "allow")]).unwrap();
    write_one(disk.as_ref(), 0, 128 * 1024, 5);
    let cluster = disk.limits().discard.unwrap().granularity.0;
    assert_eq!(cluster, 65536);
    let done = Outcome::Done(ByteLen::ZERO);
    assert_eq!(do_one(disk.as_ref(), Op::Discard { secure: false }, cluster, 4 * cluster), done);
    assert_eq!(read_one(disk.as_ref(), 0, cluster), vec![5; cluster as usize]);
    assert_eq!(read_one(disk.as_ref(), cluster, 4 * cluster), vec![0; 4 * cluster as usize]);
    // Parts of clusters keep their content.
    assert_eq!(do_one(disk.as_ref(), Op::Discard { secure: false }, 512, cluster - 512), done);
    assert_eq!(read_one(disk.as_ref(), 0, cluster), vec![5; cluster as usize]);
    for may_unmap in [false, true] {
        let at = MIB + u64::from(may_unmap) * 8 * cluster + 1024;
        assert_eq!(do_one(disk.as_ref(), Op::WriteZeroes { may_unmap, fua: true }, at, 3 * cluster), done);
        assert_eq!(read_one(disk.as_ref(), at, 3 * cluster), vec![0; 3 * cluster as usize]);
        assert_eq!(read_one(disk.as_ref(), at - 1024, 1024), [0xb5; 1024]);
        assert_eq!(read_one(disk.as_ref(), at + 3 * cluster, 512), [0xb5; 512]);
    }
}

/// A chain that is too long, and one that ends in itself.
#[test]
fn chains_end() {
    let (_dir, root) = folder(MIB);
    let opener: Arc<dyn mqblk_core::ImageOpener> = Arc::new(HostImages);
    let settings = mqblk_core::settings::Settings::new("disk \"a\"");
    let name = |number: usize| if number == 0 { root.join("base.raw") } else { root.join(format!("{number}.qcow2")) };
    for number in 1..=64 {
        create_overlay(&settings, &opener, &name(number - 1), &name(number)).unwrap();
    }
    let last = |number| open_with(&[("path", text(&name(number))), ("backing", "allow"), ("readonly", "on")]);
    assert_eq!(read_one(last(63).unwrap().as_ref(), 0, 512), [0xb5; 512]);
    let error = last(64).err().unwrap();
    assert!(error.contains("more than 64 images"), "{error}");
    std::fs::rename(name(64), name(3)).unwrap();
    let error = last(4).err().unwrap();
    assert!(error.contains("in the chain before"), "{error}");
    let itself = root.join("self.qcow2");
    std::fs::copy(name(1), &itself).unwrap();
    let at = header_name_offset(&itself);
    poke(&itself, 16, &("self.qcow2".len() as u32).to_be_bytes());
    poke(&itself, at, b"self.qcow2");
    let error = open_with(&[("path", text(&itself)), ("backing", "allow"), ("readonly", "on")]).err().unwrap();
    assert!(error.contains("in the chain before") || error.contains("format"), "{error}");
}

fn header_name_offset(path: &Path) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    super::header::be64(&bytes, 8)
}

#[test]
fn every_field_of_a_damaged_header_is_refused_by_its_name() {
    let (_dir, path) = plain(MIB);
    let good = std::fs::read(&path).unwrap();
    let cases: &[(u64, &[u8], &str)] = &[
        (0, b"QFI\0", "no qcow2 header"),
        (4, &4_u32.to_be_bytes(), "version 4"),
        (8, &65530_u64.to_be_bytes(), "backing file's name"),
        (20, &8_u32.to_be_bytes(), "cluster_bits 8"),
        (20, &22_u32.to_be_bytes(), "cluster_bits 22"),
        (20, &u32::MAX.to_be_bytes(), "cluster_bits"),
        (24, &u64::MAX.to_be_bytes(), "size 18446744073709551615"),
        (24, &(1_u64 << 62).to_be_bytes(), "l1_size"),
        (32, &1_u32.to_be_bytes(), "encryption"),
        (36, &u32::MAX.to_be_bytes(), "l1_size"),
        (36, &0_u32.to_be_bytes(), "l1_size 0"),
        (40, &1_u64.to_be_bytes(), "l1_table_offset"),
        (40, &(1_u64 << 40).to_be_bytes(), "l1_table_offset"),
        (40, &u64::MAX.to_be_bytes(), "l1_table_offset"),
        (48, &(1_u64 << 40).to_be_bytes(), "refcount_table_offset"),
        (48, &0_u64.to_be_bytes(), "refcount_table_offset"),
        (56, &u32::MAX.to_be_bytes(), "refcount_table_clusters"),
        (56, &0_u32.to_be_bytes(), "refcount_table_clusters"),
        (60, &u32::MAX.to_be_bytes(), "nb_snapshots"),
        (60, &1_u32.to_be_bytes(), "snapshots_offset"),
        (72, &2_u64.to_be_bytes(), "corrupt bit"),
        (72, &8_u64.to_be_bytes(), "compression"),
        (72, &16_u64.to_be_bytes(), "extended L2"),
        (72, &(1_u64 << 40).to_be_bytes(), "unknown incompatible features"),
        (72, &4_u64.to_be_bytes(), "no name"),
        (96, &7_u32.to_be_bytes(), "refcount_order 7"),
        (100, &96_u32.to_be_bytes(), "header_length 96"),
        (100, &108_u32.to_be_bytes(), "header_length 108"),
        (100, &u32::MAX.to_be_bytes(), "header_length"),
    ];
    for (at, bytes, expected) in cases {
        std::fs::write(&path, &good).unwrap();
        poke(&path, *at, bytes);
        for read_only in ["on", "off"] {
            let error = open_with(&[("path", text(&path)), ("readonly", read_only)]).err();
            let error = error.unwrap_or_else(|| panic!("{at} {bytes:?}: opened"));
            assert!(error.starts_with("disk \"trial\": path: found") && error.contains(expected), "{at}: {error}");
        }
    }
}

#[test]
fn tables_that_would_lead_a_write_elsewhere_are_refused() {
    let (_dir, path) = plain(8 * MIB);
    let disk = open_with(&[("path", text(&path))]).unwrap();
    write_one(disk.as_ref(), 0, 65536, 1);
    write_one(disk.as_ref(), 65536, 65536, 2);
    drop(disk);
    let good = std::fs::read(&path).unwrap();
    let (head, copied) = (header(&path), 1_u64 << 63);
    let number = |at: u64| super::header::be64(&good, at as usize);
    let l2 = number(head.l1_offset) & !copied;
    let (first, second) = (number(l2), number(l2 + 8));
    assert!(first & copied != 0 && second & copied != 0 && first != second);
    let (data, block) = (first & !copied, number(head.refcount_table_offset));
    let beyond = 1_u64 << 40;
    let cases = [
        (l2, copied | l2, "L2 at"),
        (l2, copied | head.l1_offset, "L1 at"),
        (l2, copied | block, "RefcountBlock at"),
        (l2, copied | head.refcount_table_offset, "ReferenceCounts at"),
        (l2, copied, "names the header"),
        (l2, copied | beyond, "no cluster of"),
        (l2, copied | (data + 512), "no cluster of"),
        (l2, second, "refcount 1 that is named 2 times"),
        (l2, second & !copied, "refcount 1 that is named 2 times"),
        (l2, first | 2, "reserved bits"),
        (l2, 1 << 62 | beyond, "compressed"),
        (l2, 1 << 62 | block, "RefcountBlock at"),
        (head.l1_offset, copied | head.l1_offset, "is L1 and L2"),
        (head.l1_offset, copied | beyond, "no cluster of"),
        (head.l1_offset, copied | l2 | 1 << 56, "reserved bits"),
        (head.refcount_table_offset, l2, "is RefcountBlock and L2"),
        (head.refcount_table_offset, beyond, "no cluster of"),
        // Refcounts of 16 bits: the clusters 0 to 3 have entries, with refcount 0 and 2.
        (block, 0, "refcount 0"),
        (block + 8, 0x0002_0002_0002_0002, "shared"),
    ];
    for (at, value, expected) in cases {
        std::fs::write(&path, &good).unwrap();
        poke(&path, at, &value.to_be_bytes());
        let error = open_with(&[("path", text(&path))]).err().unwrap_or_else(|| panic!("{at:#x} {value:#x}: opened"));
        assert!(error.contains("damaged") && error.contains(expected), "{at:#x} {value:#x}: {error}");
        assert!(error.contains("qemu-img check"), "{error}");
    }
    // Reading is harmless if the entries lie in the file.
    std::fs::write(&path, &good).unwrap();
    poke(&path, block, &0_u64.to_be_bytes());
    let disk = open_with(&[("path", text(&path)), ("readonly", "on")]).unwrap();
    assert_eq!(read_one(disk.as_ref(), 0, 512), [1; 512]);
}

fn load(path: &Path) -> super::image::Image {
    let mut given = mqblk_core::settings::Settings::new("disk \"a\"");
    given.insert("path", text(path)).unwrap();
    let opener: Arc<dyn mqblk_core::ImageOpener> = Arc::new(HostImages);
    let named = super::access::NamedFiles::Allow;
    let chain = super::chain::ChainOpener { settings: &given, opener: &opener, named: &named, lock: true };
    let files = chain.open(path, false).unwrap();
    let direct = files.direct().unwrap();
    let image = super::image::Image::new(files, direct);
    image.load().unwrap();
    image
}

#[test]
fn a_panic_of_the_library_fails_the_disk_and_nothing_else() {
    let (_dir, path) = plain(MIB);
    let settings = [("path", text(&path))];
    let disk = open_with(&settings).unwrap();
    write_one(disk.as_ref(), 0, 4096, 4);
    disk.sync().unwrap();
    drop(disk);
    let image = load(&path);
    image.panics_for_tests();
    assert!(image.size().is_err(), "all requests fail");
    assert!(image.close().is_err());
    assert!(open_with(&settings).is_err(), "it is locked");
    drop(image);
    let disk = open_with(&settings).unwrap();
    assert_eq!(read_one(disk.as_ref(), 0, 4096), [4; 4096]);
}

/// The data of a completed write is in the file while the image is open: a killed process leaves it.
#[test]
fn a_completed_write_is_in_the_file() {
    for aio in ["auto", "threads"] {
        let (_dir, path) = overlay(8 * MIB);
        let disk = open_with(&[("path", text(&path)), ("backing", "allow"), ("aio", aio)]).unwrap();
        let zeroes = Op::WriteZeroes { may_unmap: true, fua: false };
        assert_eq!(do_one(disk.as_ref(), zeroes, 4 * MIB, MIB), Outcome::Done(ByteLen(0)));
        let copy = path.with_file_name("copy.qcow2");
        // Allocated, in place, over the end of a cluster, where zeroes were.
        for (number, at) in (1..).zip([0, 512, 3 * (1 << 16) - 512, 4 * MIB, 4 * MIB + 1024, 7 * MIB]) {
            write_one(disk.as_ref(), at, 1024, number);
            std::fs::copy(&path, &copy).unwrap();
            let copied = open_with(&[("path", text(&copy)), ("backing", "allow"), ("aio", aio)]).unwrap();
            assert_eq!(read_one(copied.as_ref(), at, 1024), [number; 1024], "{aio}: {at}");
        }
    }
}

/// Returns the entry of a cluster in the file of an image of one table; 0: none.
fn entry(path: &Path, cluster: u64) -> u64 {
    let file = File::open(path).unwrap();
    let read = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    match read(read(40)) & 0x00ff_ffff_ffff_fe00 {
        0 => 0,
        table => read(table + 8 * cluster),
    }
}

/// Zeroes for a part of a cluster copy the rest of it from the backing file. A power cut may keep the entry and lose
/// the copy.
#[test]
fn zeroes_for_a_part_of_a_cluster_are_durable_before_its_entry() {
    const CLUSTER: u64 = 1 << 16;
    let (_dir, path) = overlay(2 * MIB);
    let image = Arc::new(load(&path));
    image.write_at(&[1; 512], ByteOffset(0)).unwrap();
    // Within a cluster, and with whole ones between.
    for (start, end) in [(5 * CLUSTER + 512, 5 * CLUSTER + 1024), (10 * CLUSTER + 512, 13 * CLUSTER + 512)] {
        let (first, last) = (start / CLUSTER, end / CLUSTER);
        let kept = image.data_syncs.lock().unwrap();
        std::thread::scope(|scope| {
            let (image, len) = (&image, ByteLen(end - start));
            let zeroing = scope.spawn(move || image.write_zeroes(ByteOffset(start), len, true).unwrap());
            for _ in 0..50 {
                let entries = [first, last].map(|cluster| entry(&path, cluster));
                assert_eq!(entries, [0; 2], "the data is in the host's memory only");
                std::thread::sleep(Duration::from_millis(2));
            }
            assert!(!zeroing.is_finished(), "it waits for its data");
            drop(kept);
        });
        assert!(entry(&path, first) != 0 && entry(&path, last) != 0);
        let mut bytes = [0; 1024];
        image.read_at(&mut bytes, ByteOffset(start - 512)).unwrap();
        assert_eq!((bytes[0], bytes[511], bytes[512], bytes[1023]), (0xb5, 0xb5, 0, 0));
        image.read_at(&mut bytes, ByteOffset(end - 512)).unwrap();
        assert_eq!((bytes[0], bytes[511], bytes[512], bytes[1023]), (0, 0, 0xb5, 0xb5));
    }
}

/// A power cut may keep the entry and lose the data copied from the backing file, also if another thread wrote the
/// entry.
#[test]
fn nobody_writes_the_entry_of_data_that_is_not_durable() {
    const CLUSTER: u64 = 1 << 16;
    let (_dir, path) = overlay(8 * MIB);
    let image = Arc::new(load(&path));
    image.write_at(&[1; 512], ByteOffset(0)).unwrap();
    assert!(entry(&path, 0) != 0 && entry(&path, 1) == 0);
    let kept = image.data_syncs.lock().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| image.write_at(&[2; 512], ByteOffset(CLUSTER)).unwrap());
        let is_written = || std::fs::read(&path).unwrap().chunks(512).any(|sector| sector == [2; 512]);
        while !is_written() {
            std::thread::yield_now();
        }
        // Its cluster is allocated in memory, or is being allocated.
        scope.spawn(|| image.write_at(&[3; 512], ByteOffset(CLUSTER + 4096)).unwrap());
        scope.spawn(|| image.flush().unwrap());
        for _ in 0..50 {
            assert_eq!(entry(&path, 1), 0, "the data is in the host's memory only");
            std::thread::sleep(Duration::from_millis(2));
        }
        drop(kept);
    });
    assert_ne!(entry(&path, 1), 0);
    let mut bytes = [0; 8192];
    image.read_at(&mut bytes, ByteOffset(CLUSTER)).unwrap();
    assert_eq!((bytes[0], bytes[512], bytes[4096], bytes[4608]), (2, 0xb5, 3, 0xb5));
}
