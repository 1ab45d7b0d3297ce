//! The server's counters of merged requests, read over its admin socket.

use std::path::Path;
use std::time::Duration;

use mqblk_admin::model::QueueCounters;
use mqblk_admin::{Client, StatQuery};

/// Requests that were merged since the disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MergeCounters {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// Requests that were merged per second (iostat's rrqm/s and wrqm/s).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeRates {
    /// Reads.
    pub reads: f64,
    /// Writes.
    pub writes: f64,
}

impl MergeCounters {
    /// Reads the counters of all disks of the server at the admin socket `admin`. `None` when it cannot be queried.
    pub(crate) fn read(admin: &Path) -> Option<MergeCounters> {
        match Client::connect(admin).and_then(|mut client| client.stat(&StatQuery::default())) {
            Ok(stat) => {
                let disks = stat.disks.iter().map(|disk| &disk.totals.counters);
                let loads = disks.chain(stat.controllers.iter().map(|controller| &controller.totals.counters));
                let sum = |MergeCounters { reads, writes }, load: &QueueCounters| MergeCounters {
                    reads: reads + load.read_merges,
                    writes: writes + load.write_merges,
                };
                Some(loads.fold(MergeCounters::default(), sum))
            }
            Err(error) => {
                tracing::debug!(%error, "no merges from the admin socket");
                None
            }
        }
    }

    /// Returns the rates since `before`, which was read `time` ago.
    pub(crate) fn rates_since(self, before: MergeCounters, time: Duration) -> MergeRates {
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / time.as_secs_f64().max(1e-9);
        MergeRates { reads: rate(self.reads, before.reads), writes: rate(self.writes, before.writes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_server_has_no_counters() {
        assert_eq!(MergeCounters::read(Path::new("/nonexistent/admin")), None);
    }

    #[test]
    fn rates_are_of_the_difference() {
        let (before, now) = (MergeCounters { reads: 100, writes: 7 }, MergeCounters { reads: 350, writes: 7 });
        let rate = now.rates_since(before, Duration::from_millis(500));
        assert_eq!(rate, MergeRates { reads: 500.0, writes: 0.0 });
    }
}
