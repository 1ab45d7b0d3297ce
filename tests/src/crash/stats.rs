//! Counters of the runs, for the log and for `docs/reliability.md`.

use std::io::Write;
use std::path::Path;

use serde_json::json;

/// Prints a line directly, because the test harness captures output.
pub fn print_uncaptured(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrashStats {
    /// Daemons killed.
    pub kills: u64,
    /// Daemons stopped.
    pub stops: u64,
    /// Drivers killed.
    pub driver_deaths: u64,
    /// Requests completed.
    pub requests: u64,
    /// Sectors read and checked.
    pub sectors: u64,
    /// Requests replayed by a daemon.
    pub replayed: u64,
    /// Requests cancelled by task management.
    pub cancelled: u64,
    /// Task management functions.
    pub task_functions: u64,
    /// COMPARE AND WRITEs that succeeded.
    pub compare_writes: u64,
}

impl CrashStats {
    /// Adds the counters of another device.
    pub fn add(&mut self, other: &CrashStats) {
        self.kills += other.kills;
        self.stops += other.stops;
        self.driver_deaths += other.driver_deaths;
        self.requests += other.requests;
        self.sectors += other.sectors;
        self.replayed += other.replayed;
        self.cancelled += other.cancelled;
        self.task_functions += other.task_functions;
        self.compare_writes += other.compare_writes;
    }

    /// Prints them, and appends a line to `target/test-logs/crash.json`.
    pub fn log(&self, name: &str, seed: u64) {
        let line = json!({
            "test": name,
            "seed": seed,
            "kills": self.kills,
            "stops": self.stops,
            "driver_deaths": self.driver_deaths,
            "requests": self.requests,
            "sectors_verified": self.sectors,
            "replayed": self.replayed,
            "task_management": self.task_functions,
            "cancelled": self.cancelled,
            "compare_and_write": self.compare_writes,
        });
        print_uncaptured(&line.to_string());
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/test-logs");
        let file = std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::File::options().create(true).append(true).open(folder.join("crash.json")));
        if let Ok(mut file) = file {
            // One write per line: tests run in parallel.
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }
}
