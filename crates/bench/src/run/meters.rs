//! CPU time and merges of the server in the measured time.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mqblk_admin::{Client, StatQuery};

use crate::cpu;

/// Reads the server's CPU time and merges, before and after the measurement.
#[derive(Debug)]
pub(super) struct ServerMeters {
    /// The server's process.
    pub pid: Option<i32>,
    /// Its admin socket.
    pub admin: Option<PathBuf>,
}

/// The values at one time.
#[derive(Debug)]
pub(super) struct MeterReading {
    at: Instant,
    cpu: Option<Duration>,
    /// Reads and writes that were merged since the disks were opened.
    merges: Option<[u64; 2]>,
}

/// CPU time and merges of the server in the measurement.
#[derive(Debug, Default)]
pub struct ServerUsage {
    /// Its CPU time, if it can be read.
    pub cpu: Option<Duration>,
    /// Reads and writes that it merged per second (iostat's rrqm/s and wrqm/s), if it reports them.
    pub merges: Option<[f64; 2]>,
}

impl ServerMeters {
    /// Reads the values now.
    pub(super) fn read(&self) -> MeterReading {
        let merges = self.admin.as_deref().and_then(merges);
        let at = Instant::now();
        // Last, so that the measurement begins or ends right after it.
        let cpu = self.pid.and_then(cpu::process_time);
        MeterReading { at, cpu, merges }
    }
}

impl MeterReading {
    /// Returns the usage since `before`.
    pub(super) fn since(&self, before: &MeterReading) -> ServerUsage {
        let seconds = (self.at - before.at).as_secs_f64().max(1e-9);
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let merges = self.merges.zip(before.merges);
        ServerUsage {
            cpu: self.cpu.zip(before.cpu).map(|(now, before)| now.saturating_sub(before)),
            merges: merges.map(|(now, before)| [0, 1].map(|at| rate(now[at], before[at]))),
        }
    }
}

/// Reads the merges of all disks of the server at the admin socket `admin`. `None` when it cannot be queried.
fn merges(admin: &Path) -> Option<[u64; 2]> {
    let stat = Client::connect(admin).and_then(|mut client| client.stat(&StatQuery::default()));
    let stat = stat.inspect_err(|error| tracing::debug!(%error, "no merges from the admin socket")).ok()?;
    let disks = stat.disks.iter().map(|disk| &disk.totals.counters);
    let loads = disks.chain(stat.controllers.iter().map(|controller| &controller.totals.counters));
    Some(loads.fold([0; 2], |[reads, writes], load| [reads + load.read_merges, writes + load.write_merges]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_server_has_no_merges() {
        assert_eq!(merges(Path::new("/nonexistent/admin")), None);
    }

    #[test]
    fn merges_are_the_rate_of_the_difference() {
        let before = MeterReading { at: Instant::now(), cpu: None, merges: Some([100, 7]) };
        let at = before.at + Duration::from_millis(500);
        let now = MeterReading { at, cpu: Some(Duration::ZERO), merges: Some([350, 7]) };
        let used = now.since(&before);
        assert_eq!((used.cpu, used.merges), (None, Some([500.0, 0.0])));
    }
}
