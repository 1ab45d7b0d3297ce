//! A disk's health, which all its workers share. Written when a request fails; workers of a disk that may stop read one
//! flag per batch.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mqblk_core::lock::lock;
use mqblk_core::{ByteOffset, Op, Outcome};

use super::failures::{FailedRequest, FailureLog};
use super::policy::{ErrorPolicy, OnError};
use crate::limits::DiskLimits;
use crate::options::PlugOptions;

/// Shortest time between two log lines about requests of a disk that are repeated.
const RETRY_LOG: Duration = Duration::from_secs(10);

/// See [`failure_count`].
static FAILURES: AtomicU64 = AtomicU64::new(0);

/// Returns the number of requests of all disks of the process that were completed with an error. While it is unchanged,
/// no disk need be queried.
pub fn failure_count() -> u64 {
    FAILURES.load(Ordering::Relaxed)
}

/// A disk's name, its error policy, its limits, and its stop.
#[derive(Debug, Default)]
pub struct DiskHealth {
    name: String,
    policy: ErrorPolicy,
    limits: Arc<DiskLimits>,
    /// Plug options, once changed.
    plug: Mutex<Option<PlugOptions>>,
    stopped: AtomicBool,
    /// Its stop, while it is stopped.
    stop: Mutex<Option<Stop>>,
    stops: AtomicU64,
    parked: AtomicU64,
    retries: AtomicU64,
    retry_logged: Mutex<Option<Instant>>,
    /// Requests that failed for the guest.
    failures: Mutex<FailureLog>,
}

/// Reason and time of a stop.
#[derive(Clone, Copy, Debug)]
struct Stop {
    request: FailedRequest,
    since: Instant,
}

/// A snapshot of a disk's health.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthStats {
    /// Its stop; `None` while it runs.
    pub stopped: Option<StopReport>,
    /// Parked requests.
    pub parked: u64,
    /// Number of stops.
    pub stops: u64,
    /// Number of repetitions by `retry`.
    pub retries: u64,
    /// Number of requests that were completed with an error.
    pub failed: u64,
    /// The last of them, and its age.
    pub last_failure: Option<(String, Duration)>,
}

/// The stop of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopReport {
    /// Time since the stop.
    pub time: Duration,
    /// The failed request and its error.
    pub why: String,
    /// True if it was a lack of space.
    pub no_space: bool,
}

impl DiskHealth {
    /// Returns the health of a disk that runs, without limits. `name`: for the log.
    pub fn new(name: impl Into<String>, policy: ErrorPolicy) -> DiskHealth {
        DiskHealth::with_limits(name, policy, DiskLimits::default())
    }

    /// Returns the health of a disk that runs.
    pub fn with_limits(name: impl Into<String>, policy: ErrorPolicy, limits: DiskLimits) -> DiskHealth {
        DiskHealth { name: name.into(), policy, limits: Arc::new(limits), ..DiskHealth::default() }
    }

    /// Returns its limits.
    pub fn limits(&self) -> &Arc<DiskLimits> {
        &self.limits
    }

    /// Returns its plug options if they were [changed](Self::set_plug). Otherwise each queue has its own
    /// ([`QueueDisk::plug`](crate::QueueDisk)).
    pub fn plug(&self) -> Option<PlugOptions> {
        *lock(&self.plug)
    }

    /// Changes its plug options. Workers use them after [`disks_changed`](crate::Engine::disks_changed).
    pub fn set_plug(&self, plug: PlugOptions) {
        *lock(&self.plug) = Some(plug);
    }

    /// Returns the disk's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its error policy.
    pub fn policy(&self) -> ErrorPolicy {
        self.policy
    }

    /// Returns true if it is stopped.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        // Relaxed: a request that misses a concurrent stop is submitted, and parked if it fails.
        self.stopped.load(Ordering::Relaxed)
    }

    /// Returns a snapshot.
    pub fn stats(&self) -> HealthStats {
        let stop = *lock(&self.stop);
        let failures = lock(&self.failures);
        HealthStats {
            stopped: stop.map(|stop| StopReport {
                time: stop.since.elapsed(),
                why: stop.request.to_string(),
                no_space: stop.request.outcome == Outcome::NoSpace,
            }),
            parked: self.parked.load(Ordering::Relaxed),
            stops: self.stops.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            failed: failures.total(),
            last_failure: failures.last().map(|(request, at)| (request.to_string(), at.elapsed())),
        }
    }

    /// Stops the disk because of a failed request, unless it is stopped.
    pub(crate) fn stop(&self, outcome: Outcome, op: Op, start: ByteOffset) {
        let mut stop = lock(&self.stop);
        if stop.is_some() {
            return;
        }
        let why = FailedRequest { outcome, op, start };
        *stop = Some(Stop { request: why, since: Instant::now() });
        self.stopped.store(true, Ordering::Relaxed);
        self.stops.fetch_add(1, Ordering::Relaxed);
        drop(stop);
        tracing::error!(disk = %self.name, why = %why, "the disk is stopped: its requests are parked until `mqblk resume`");
    }

    /// Clears the stop. Returns the outcome for failing parked requests that were never tried; `None` when it is not
    /// stopped.
    pub(crate) fn clear_stop(&self) -> Option<Outcome> {
        let mut stop = lock(&self.stop);
        let was = stop.take()?;
        self.stopped.store(false, Ordering::Relaxed);
        Some(was.request.outcome)
    }

    /// Returns the outcome that stopped it, if it is stopped.
    pub(crate) fn stop_outcome(&self) -> Option<Outcome> {
        lock(&self.stop).map(|stop| stop.request.outcome)
    }

    pub(crate) fn parked(&self, more: usize) {
        self.parked.fetch_add(more as u64, Ordering::Relaxed);
    }

    pub(crate) fn unparked(&self, less: usize) {
        self.parked.fetch_sub(less as u64, Ordering::Relaxed);
    }

    /// Counts a repetition, and logs it unless one was logged recently.
    pub(crate) fn retried(&self, outcome: Outcome, op: Op, start: ByteOffset) {
        self.retries.fetch_add(1, Ordering::Relaxed);
        let mut logged = lock(&self.retry_logged);
        if logged.is_some_and(|at| at.elapsed() < RETRY_LOG) {
            return;
        }
        *logged = Some(Instant::now());
        drop(logged);
        let why = FailedRequest { outcome, op, start };
        let OnError::Retry(time) = self.policy.on_error else { return };
        tracing::warn!(disk = %self.name, why = %why, "a request failed and is tried again for up to {} s", time.as_secs());
    }

    /// Counts a request that is completed with an error, and logs it unless one was logged recently.
    pub(crate) fn failed(&self, outcome: Outcome, op: Op, start: ByteOffset) {
        FAILURES.fetch_add(1, Ordering::Relaxed);
        let line = lock(&self.failures).add(FailedRequest { outcome, op, start }, Instant::now());
        line.into_iter().for_each(|line| line.log(&self.name));
    }

    /// Logs the number of requests that failed since the last line about them, once that is due; with `all` at once.
    /// Returns true if failures remain to be logged. Call it periodically while it returns true, and after
    /// [`failure_count`] has changed.
    pub fn log_failures(&self, all: bool) -> bool {
        let mut failures = lock(&self.failures);
        let line = failures.summary(Instant::now(), all);
        let has_untold = failures.has_untold();
        drop(failures);
        line.into_iter().for_each(|line| line.log(&self.name));
        has_untold
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mqblk_core::Errno;

    #[test]
    fn a_stop_keeps_its_first_reason() {
        let health = DiskHealth::new("vm1", ErrorPolicy::default());
        assert_eq!(health.stats(), HealthStats::default());
        assert_eq!(health.clear_stop(), None);
        health.stop(Outcome::NoSpace, Op::Write { fua: false }, ByteOffset(4096));
        health.stop(Outcome::Failed(Errno(5)), Op::Read, ByteOffset(0));
        let report = health.stats();
        let stopped = report.stopped.expect("it is stopped");
        assert!(health.is_stopped() && report.stops == 1 && stopped.no_space);
        assert_eq!(stopped.why, "write at 4096: no space left on the host's storage");
        assert_eq!(health.clear_stop(), Some(Outcome::NoSpace));
        assert!(!health.is_stopped());
        health.stop(Outcome::Failed(Errno(5)), Op::Flush, ByteOffset(0));
        assert_eq!(health.stats().stopped.unwrap().why, "flush: Input/output error (os error 5)");
    }
}
