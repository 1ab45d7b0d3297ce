use std::process::Command;

use mqblk_core::Disk;
use mqblk_uring::UringContext;

use super::super::tests::{image, in_memory, on_disk};
use super::*;
use crate::conformance::TestTarget;

fn try_open(settings: &[(&str, &str)]) -> Result<Arc<dyn Disk<UringContext>>, String> {
    TestTarget { kind: "file", settings, keeps_data: true, seed: 0 }.open(&[]).map_err(|error| error.to_string())
}

fn error_of(settings: &[(&str, &str)]) -> String {
    try_open(settings).map(|_| ()).unwrap_err()
}

fn resolved(disk: &dyn Disk<UringContext>, key: &str) -> String {
    disk.resolved().into_iter().find(|(name, _)| *name == key).unwrap().1
}

#[test]
fn files_that_cannot_be_a_disk_are_refused_in_one_line() {
    let (dir, path) = image(&on_disk(), 1 << 20);
    let file = path.to_str().unwrap();
    let odd = dir.path().join("odd");
    std::fs::write(&odd, [0; 1000]).unwrap();
    let empty = dir.path().join("empty");
    std::fs::write(&empty, []).unwrap();
    let pipe = dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let [odd, empty, pipe, folder] = [&odd, &empty, &pipe, dir.path()].map(|path| path.to_str().unwrap());
    for (settings, want) in [
        (vec![], "path: found nothing, expected a regular file or a block device"),
        (vec![("path", "")], "No such file or directory"),
        (vec![("path", "/nowhere/x")], "path: found \"/nowhere/x\" (No such file or directory"),
        (vec![("path", folder)], "(a directory), expected a regular file or a block device"),
        (vec![("path", "/dev/null")], "path: found \"/dev/null\" (a character device), expected"),
        (vec![("path", pipe)], "(a pipe), expected a regular file or a block device"),
        (vec![("path", odd)], "path: found 1000 bytes in"),
        (vec![("path", odd), ("direct", "off")], "expected a multiple of block-size 512 above 0"),
        (vec![("path", empty)], "path: found 0 bytes in"),
        (vec![("path", file), ("direct", "maybe")], "direct: found \"maybe\", expected on or off"),
        (vec![("path", file), ("readonly", "")], "readonly: found \"\", expected on or off"),
        (vec![("path", file), ("block-size", "2048")], "block-size: found \"2048\", expected one of 512, 4096"),
        (vec![("path", file), ("lock", "on")], "lock: found \"on\", expected one of exclusive, shared-migration, off"),
        (vec![("path", file), ("discard", "on")], "discard: found \"on\", expected one of unmap, ignore"),
    ] {
        let error = error_of(&settings);
        assert!(error.starts_with("disk \"trial\": ") && error.contains(want), "{settings:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn a_reader_shares_the_file_with_readers_of_qemu() {
    let (_dir, path) = image(&on_disk(), 1 << 20);
    let file = path.to_str().unwrap();
    let reader = try_open(&[("path", file), ("readonly", "on")]).unwrap();
    let qemu_io = |arguments: &[&str]| {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw"]).args(arguments).arg(file);
        command.output().expect("qemu-io (apt-get install qemu-utils)").status.success()
    };
    assert!(qemu_io(&["-r", "-c", "read 0 512"]), "another reader");
    assert!(!qemu_io(&["-c", "write 0 512"]), "a writer");
    drop(reader);
    let writer = try_open(&[("path", file)]).unwrap();
    assert!(!qemu_io(&["-r", "-c", "read 0 512"]), "a reader of what is written");
    drop(writer);
    assert!(qemu_io(&["-c", "write 0 512"]));
}

#[test]
fn a_file_that_is_released_soon_is_waited_for() {
    let (_dir, path) = image(&on_disk(), 1 << 20);
    let settings = [("path", path.to_str().unwrap())];
    let before = try_open(&settings).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(before);
        });
        try_open(&settings).unwrap();
    });
}

#[test]
fn the_error_for_a_size_that_only_small_blocks_divide_names_the_settings() {
    let (_dir, path) = image(&on_disk(), (1 << 20) + 512);
    let path = path.to_str().unwrap();
    let error = error_of(&[("path", path), ("block-size", "4096"), ("direct", "off")]);
    assert!(error.contains("1049088 bytes") && error.contains("a multiple of block-size 4096"), "{error}");
    assert!(error.contains("block-size=512 direct=off"), "{error}");
    let disk = try_open(&[("path", path), ("block-size", "512"), ("direct", "off")]).unwrap();
    assert_eq!(disk.geometry().size.0, 1_049_088);
}

#[test]
fn one_writer_or_many_readers() {
    let (_dir, path) = image(&on_disk(), 1 << 20);
    let path = path.to_str().unwrap();
    let (writer, reader) = (vec![("path", path)], vec![("path", path), ("readonly", "on")]);
    let first = try_open(&writer).unwrap();
    let error = error_of(&writer);
    assert!(error.contains(&format!("path: found {path:?} (in use by another process)")), "{error}");
    assert!(error.contains("stop the other process") && error.contains("readonly=on"), "{error}");
    assert!(error_of(&reader).contains("in use by another process"));
    drop(first);
    let readers = [try_open(&reader).unwrap(), try_open(&reader).unwrap()];
    assert!(error_of(&writer).contains("in use by another process"));
    drop(readers);
    try_open(&writer).unwrap();
}

#[test]
fn a_failed_open_leaves_no_lock() {
    let (_dir, path) = image(&on_disk(), 1000);
    let path = path.to_str().unwrap();
    error_of(&[("path", path)]);
    std::fs::File::options().write(true).open(path).unwrap().set_len(8192).unwrap();
    try_open(&[("path", path)]).unwrap();
}

#[test]
fn in_memory_files_are_not_opened_for_direct_io() {
    let (_dir, path) = image(&in_memory(), 1 << 20);
    let disk = try_open(&[("path", path.to_str().unwrap())]).unwrap();
    assert_eq!(resolved(disk.as_ref(), "direct"), "off");
    assert_eq!(disk.geometry().logical_block.bytes(), 512);
    assert!(disk.limits().discard.is_some());
}

#[test]
fn blocks_are_those_of_the_storage_unless_given() {
    let settings = mqblk_core::settings::Settings::new("disk \"a\"");
    let config = |block| FileSettings {
        raw: false,
        served_raw: None,
        path: "/x".into(),
        direct: true,
        read_only: false,
        block,
        threads: None,
        unmap: true,
        lock: LockMode::Exclusive,
    };
    let coarse = Some(Alignment { memory: 512, offset: 4096 });
    let fine = Some(Alignment { memory: 4, offset: 512 });
    let disk = |logical_block| Some(BlockDeviceInfo { logical_block, ..BlockDeviceInfo::default() });
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let size = |block, kind, direct, device| {
        block_size(&settings, &config(block), (&file, kind), unit(kind, direct, device), device)
    };
    for (block, kind, direct, device, want) in [
        (None, FileKind::Regular, coarse, None, 4096),
        (None, FileKind::Regular, fine, disk(512), 512),
        (None, FileKind::Regular, fine, disk(4096), 4096),
        (None, FileKind::Regular, None, None, 512),
        (None, FileKind::Regular, None, disk(4096), 4096),
        (None, FileKind::BlockDevice, coarse, disk(4096), 4096),
        (Some(BlockSize::B512), FileKind::Regular, None, disk(4096), 512),
        (Some(BlockSize::B512), FileKind::Regular, coarse, disk(4096), 512),
        (Some(BlockSize::B512), FileKind::BlockDevice, coarse, disk(4096), 512),
        (Some(BlockSize::B4096), FileKind::BlockDevice, fine, disk(512), 4096),
    ] {
        assert_eq!(
            size(block, kind, direct, device).unwrap().bytes(),
            want,
            "{block:?} {kind:?} {direct:?} {device:?}"
        );
    }
}

#[test]
fn topology_is_that_of_the_device() {
    let device = BlockDeviceInfo {
        logical_block: 512,
        physical_block: 4096,
        alignment_offset: 3584,
        min_io: 4096,
        opt_io: 1 << 20,
        ..BlockDeviceInfo::default()
    };
    let disk = geometry(ByteLen(1 << 20), (BlockSize::B512, BlockSize::B512), false, FileKind::BlockDevice, device);
    assert_eq!((disk.physical_block, disk.alignment_offset), (BlockSize::B4096, 7));
    assert_eq!((disk.min_io, disk.opt_io), (ByteLen(4096), ByteLen(1 << 20)));
    let file = geometry(ByteLen(1 << 20), (BlockSize::B512, BlockSize::B512), false, FileKind::Regular, device);
    assert_eq!((file.physical_block, file.alignment_offset), (BlockSize::B4096, 0));
    let unknown = geometry(
        ByteLen(1 << 20),
        (BlockSize::B4096, BlockSize::B4096),
        false,
        FileKind::Regular,
        BlockDeviceInfo::default(),
    );
    assert_eq!((unknown.physical_block, unknown.min_io), (BlockSize::B4096, ByteLen::ZERO));
}

#[test]
fn an_image_of_another_format_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let mut bytes = vec![0; 1 << 20];
    bytes[..4].copy_from_slice(b"QFI\xfb");
    std::fs::write(&path, &bytes).unwrap();
    let open = |more: &[(&str, &str)]| try_open(&[&[("path", path.to_str().unwrap())], more].concat()).map(drop);
    for direct in ["on", "off"] {
        let error = open(&[("direct", direct)]).unwrap_err();
        for part in ["path: found", "an image of the format qcow2", "format=raw", "qemu-img convert -f qcow2"] {
            assert!(error.contains(part), "{error}");
        }
        open(&[("direct", direct), ("format", "raw")]).unwrap();
    }
    assert!(open(&[("format", "qcow2")]).unwrap_err().contains("format: found \"qcow2\", expected one of auto, raw"));
}

/// An image that was served as raw stays raw with any content of its guest; a new image there does not.
#[test]
fn an_image_that_was_served_as_raw_is_raw() {
    let (_dir, path) = image(&on_disk(), 1 << 20);
    let path_text = path.to_str().unwrap();
    let identity = try_open(&[("path", path_text)]).unwrap().raw_identity().unwrap();
    let write = |bytes: &[u8]| {
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).unwrap();
    };
    write(b"QFI\xfb\0\0\0\x03");
    assert!(error_of(&[("path", path_text)]).contains("an image of the format qcow2"));
    let known = [("path", path_text), ("served-raw", identity.as_str())];
    assert_eq!(try_open(&known).unwrap().raw_identity().as_ref(), Some(&identity));
    // Another size, or another file.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    assert!(error_of(&known).contains("an image of the format qcow2"));
    std::fs::copy(&path, path.with_extension("new")).unwrap();
    std::fs::rename(path.with_extension("new"), &path).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    assert!(error_of(&known).contains("an image of the format qcow2"));
}
