use std::fs::File;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::conformance::{Trial, run};

/// A sparse image in a fresh folder.
pub(super) fn image(place: &Path, len: u64) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(place).unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(len).unwrap();
    (dir, path)
}

/// A folder on a file system with storage below it: the one of this program.
pub(super) fn on_disk() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_path_buf()
}

fn in_memory() -> PathBuf {
    PathBuf::from("/dev/shm")
}

fn conforms(place: PathBuf, len: u64, settings: &[(&str, &str)], seed: u64) {
    let (_dir, path) = image(&place, len);
    let mut all = vec![("path", path.to_str().unwrap())];
    all.extend(settings);
    run(&Trial { kind: "file", settings: &all, keeps_data: true, seed });
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
fn conforms_in_memory() {
    conforms(in_memory(), 8 << 20, &[], 4);
}

#[test]
fn conforms_without_discard() {
    conforms(on_disk(), 8 << 20, &[("discard", "ignore")], 5);
    conforms(in_memory(), 8 << 20, &[("discard", "ignore"), ("block-size", "4096")], 6);
}
