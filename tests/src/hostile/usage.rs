//! The host's resources that a daemon holds.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_test_bounds::Bound;
use serde_json::{Value, json};

/// Resources of a process at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Open file descriptors.
    pub fds: usize,
    /// Mappings of memory shared by frontends.
    pub shared_maps: usize,
    /// All mappings.
    pub maps: usize,
    /// Threads, without the kernel's io_uring threads, which come and go.
    pub threads: usize,
    /// Private resident memory, in KiB.
    pub memory_kib: u64,
    /// CPU time of all its threads so far, in milliseconds.
    pub cpu_ms: u64,
}

impl ProcessUsage {
    /// Reads the resources of a process.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn of(pid: u32) -> ProcessUsage {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let read = |name: &str| std::fs::read_to_string(proc.join(name)).expect("a running process");
        let list = |name: &str| std::fs::read_dir(proc.join(name)).expect("a running process").flatten();
        let maps = read("maps");
        let named = |comm: std::io::Result<String>| comm.is_ok_and(|name| !name.starts_with("iou-"));
        let status = read("status");
        let memory = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.split_whitespace().next());
        // User and system time, fields 14 and 15 of proc(5), in ticks of 10 ms. The name in parentheses ends before
        // field 3.
        let stat = read("stat");
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |field: usize| fields[field - 3].parse::<u64>().expect("a number of ticks");
        ProcessUsage {
            fds: list("fd").count(),
            shared_maps: maps.lines().filter(|line| line.contains("/memfd:")).count(),
            maps: maps.lines().count(),
            threads: list("task").filter(|task| named(std::fs::read_to_string(task.path().join("comm")))).count(),
            memory_kib: memory.expect("RssAnon").parse().expect("KiB"),
            cpu_ms: 10 * (ticks(14) + ticks(15)),
        }
    }

    /// Returns the descriptors, shared mappings and threads that differ, or `None`.
    pub fn difference(&self, before: &ProcessUsage) -> Option<String> {
        let held = |usage: &ProcessUsage| (usage.fds, usage.shared_maps, usage.threads);
        (held(self) != held(before)).then(|| {
            format!("(descriptors, shared mappings, threads): found {:?}, expected {:?}", held(self), held(before))
        })
    }

    /// Waits until the resources of a process are as before, and returns them.
    ///
    /// # Panics
    /// When they are not within `limit`.
    pub fn wait_until_as(before: &ProcessUsage, pid: u32, limit: Bound) -> ProcessUsage {
        let mut until = limit.begin();
        loop {
            let now = ProcessUsage::of(pid);
            match now.difference(before) {
                None => return now,
                Some(difference) => assert!(!until.has_passed(), "{difference}; not within {limit}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the resources as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "descriptors": self.fds, "shared_mappings": self.shared_maps, "mappings": self.maps, "threads": self.threads,
            "memory_kib": self.memory_kib, "cpu_ms": self.cpu_ms,
        })
    }
}
