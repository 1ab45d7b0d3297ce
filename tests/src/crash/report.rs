//! Figures of the runs, for whoever reads the log and for `docs/reliability.md`.

use std::io::Write;
use std::path::Path;

use serde_json::json;

/// Says something to whoever runs the test, whether it succeeds or not.
pub fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// What was done in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Daemons that were killed.
    pub kills: u64,
    /// Daemons that were told to stop.
    pub stops: u64,
    /// Drivers that died.
    pub driver_deaths: u64,
    /// Requests answered.
    pub requests: u64,
    /// Sectors that were read and judged.
    pub sectors: u64,
    /// Requests that a daemon took up again which another one had begun.
    pub replayed: u64,
    /// Requests that task management ended.
    pub cancelled: u64,
    /// Task management functions.
    pub managed: u64,
    /// COMPARE AND WRITEs that succeeded.
    pub compared: u64,
}

impl Figures {
    /// Adds another device's.
    pub fn add(&mut self, other: &Figures) {
        self.kills += other.kills;
        self.stops += other.stops;
        self.driver_deaths += other.driver_deaths;
        self.requests += other.requests;
        self.sectors += other.sectors;
        self.replayed += other.replayed;
        self.cancelled += other.cancelled;
        self.managed += other.managed;
        self.compared += other.compared;
    }

    /// Says them, and adds a line to `target/test-logs/crash.json`.
    pub fn report(&self, name: &str, seed: u64) {
        let line = json!({
            "test": name,
            "seed": seed,
            "kills": self.kills,
            "stops": self.stops,
            "driver_deaths": self.driver_deaths,
            "requests": self.requests,
            "sectors_verified": self.sectors,
            "replayed": self.replayed,
            "task_management": self.managed,
            "cancelled": self.cancelled,
            "compare_and_write": self.compared,
        });
        say(&line.to_string());
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/test-logs");
        let file = std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::File::options().create(true).append(true).open(folder.join("crash.json")));
        if let Ok(mut file) = file {
            // One write for each line: tests run side by side.
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }
}
