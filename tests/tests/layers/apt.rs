//! Scripts install packages through one function that waits for the locks of another apt.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, fcntl_lock};

use super::metadata;

/// Returns the lines of a shell script that call apt-get, except simulations.
fn apt_calls(script: &str) -> Vec<&str> {
    let calls = |line: &&str| {
        let code = line.trim_start();
        let is_text =
            code.starts_with('#') || ["echo ", "fail ", "command -v apt-get"].iter().any(|text| code.contains(text));
        code.contains("apt-get ") && !code.contains("apt-get indextargets") && !is_text
    };
    script.lines().filter(calls).collect()
}

/// Another apt may hold a lock: scripts/apt.sh waits for it.
#[test]
fn one_script_calls_apt() {
    let root = metadata().workspace_root.into_std_path_buf();
    let folders = ["scripts", "tests/guest", "tests/xen", "tests/ceph", ".ci"];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(root.join(folder)).expect("a folder"));
    let files: Vec<PathBuf> = files.map(|file| file.expect("an entry").path()).filter(|path| path.is_file()).collect();
    assert!(files.len() > 20, "{} scripts", files.len());
    let mut callers = vec![];
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a script");
        if !apt_calls(&text).is_empty() {
            callers.push(path.file_name().expect("a name").to_owned());
        }
    }
    assert_eq!(callers, ["apt.sh"], "expected scripts/apt.sh alone to call apt-get");
    assert_eq!(apt_calls("  # apt-get update\n  apt-get install x\n").len(), 1);
}

/// apt-get itself waits only for the locks of dpkg.
#[test]
fn apt_waits_for_the_lock_of_its_lists() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in
        ["etc/apt/sources.list.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg"]
    {
        std::fs::create_dir_all(folder.path().join(name)).expect("a folder");
    }
    File::create(folder.path().join("var/lib/dpkg/status")).expect("a file");
    let lock = File::create(folder.path().join("var/lib/apt/lists/lock")).expect("a file");
    fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive).expect("a lock");

    let script = "apt_lock_timeout=60; . scripts/apt.sh; apt_get -o Dir=\"$1\" update";
    let mut command = Command::new("bash");
    command.args(["-c", script, "bash"]).arg(folder.path()).current_dir(metadata().workspace_root);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("bash");
    let mut attempts = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    for attempt in 1..=2 {
        assert!(attempts.next().is_some_and(|line| line.is_ok()), "attempt {attempt}");
    }
    drop(lock);
    assert!(child.wait().expect("its end").success());
}
