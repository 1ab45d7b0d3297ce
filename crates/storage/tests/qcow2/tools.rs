//! QEMU's programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A version of QEMU's programs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Qemu {
    /// Folder of the programs; empty: those that are installed.
    folder: PathBuf,
}

impl Qemu {
    /// Returns the installed version, and those that `tests/guest/prepare.sh` has unpacked.
    pub(crate) fn all() -> Vec<Qemu> {
        let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/guest");
        let unpacked = ["trixie", "sid"].map(|release| Qemu { folder: cache.join(release).join("qemu") });
        let unpacked = unpacked.into_iter().filter(|qemu| qemu.folder.join("qemu-img").exists());
        std::iter::once(Qemu::default()).chain(unpacked).collect()
    }

    /// Runs one of its programs.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let missing = |error| panic!("{program}: {error}; apt-get install qemu-utils");
        Command::new(self.folder.join(program)).args(arguments).output().unwrap_or_else(missing)
    }

    /// Runs one that must succeed, and returns its output.
    pub(crate) fn must(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.run(program, arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{self:?} {program} {arguments:?}: {}\n{text}", output.status);
        text
    }

    /// Makes an image.
    pub(crate) fn create(&self, path: &Path, options: &str, more: &[&str], size: u64) {
        let size = size.to_string();
        let mut all = vec!["create", "-q", "-f", "qcow2"];
        if !options.is_empty() {
            all.extend(["-o", options]);
        }
        all.extend(more);
        all.extend([text(path), &size]);
        self.must("qemu-img", &all);
    }
}

/// Runs one of the installed programs.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Output {
    Qemu::default().run(program, arguments)
}

/// Runs one that must succeed, and returns its output.
pub(crate) fn must(program: &str, arguments: &[&str]) -> String {
    Qemu::default().must(program, arguments)
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// A folder on a file system with storage.
pub(crate) fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = dir.path().canonicalize().expect("a folder");
    (dir, path)
}

/// Makes an image.
pub(crate) fn create(path: &Path, options: &str, more: &[&str], size: u64) {
    Qemu::default().create(path, options, more, size);
}

/// Handling of clusters without an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaks {
    No,
    /// After a kill.
    Accepted,
}

/// `qemu-img check`: 0 is clean, 3 is leaks only (qemu-img(1)).
pub(crate) fn assert_clean(path: &Path, leaks: Leaks) {
    let output = run("qemu-img", &["check", text(path)]);
    let code = output.status.code();
    let good = code == Some(0) || code == Some(3) && leaks == Leaks::Accepted;
    assert!(good, "{path:?}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
}

/// Compares an image with a raw file of this content.
pub(crate) fn assert_equal(path: &Path, content: &[u8]) {
    let raw = path.with_extension("shadow");
    std::fs::write(&raw, content).expect("a raw file");
    must("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", text(&raw), text(path)]);
    std::fs::remove_file(raw).expect("a raw file");
}
