//! CPU time and merges of the server in the measured time.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::cpu;
use crate::merges::{MergeCounters, MergeRates};

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
    merges: Option<MergeCounters>,
}

/// CPU time and merges of the server in the measurement.
#[derive(Debug, Default)]
pub(super) struct ServerUsage {
    /// Its CPU time, if it can be read.
    pub cpu: Option<Duration>,
    /// Requests that it merged, if it reports them.
    pub merges: Option<MergeRates>,
}

impl ServerMeters {
    /// Reads the values now.
    pub(super) fn read(&self) -> MeterReading {
        let merges = self.admin.as_deref().and_then(MergeCounters::read);
        let at = Instant::now();
        // Last, so that the measurement begins or ends right after it.
        let cpu = self.pid.and_then(cpu::process_time);
        MeterReading { at, cpu, merges }
    }

    /// Returns the usage since `before`.
    pub(super) fn since(&self, before: &MeterReading) -> ServerUsage {
        let now = self.read();
        let cpu = now.cpu.zip(before.cpu).map(|(now, before)| now.saturating_sub(before));
        let time = now.at - before.at;
        let merges = now.merges.zip(before.merges).map(|(now, before)| now.rates_since(before, time));
        ServerUsage { cpu, merges }
    }
}
