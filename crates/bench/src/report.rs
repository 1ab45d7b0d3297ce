//! The results of a target under a combination, and their JSON.

mod series;
mod summary;

use serde::Serialize;

use crate::device::IoOp;
use crate::machine::{self, Machine, ServerInfo};
use crate::plan::Case;
use crate::run::RunResult;
use crate::worker::WorkerStats;
use summary::{latencies, mean_and_stderr, median, percentiles};

pub(crate) use summary::{LatencySummary, OpSummary, RateSummary, RunValues};

/// One target under one combination. The serialized keys are an interface: they do not change.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(Default))]
pub(crate) struct ResultRow {
    /// Guest interface.
    pub interface: &'static str,
    /// Storage backend, `unknown` for a running server.
    pub storage: String,
    /// The target's label.
    pub target: String,
    /// fio's word for the access pattern.
    pub rw: &'static str,
    /// Bytes of an I/O; of the smallest where sizes are mixed.
    pub bs: u64,
    /// Bytes of the largest I/O.
    pub bs_max: u64,
    pub queues: u16,
    /// Targets; null where the interface has none.
    pub targets: Option<u16>,
    /// Logical units of each target; null where the interface has none.
    pub luns: Option<u16>,
    /// The queue that a command is put on: target, submitter or fixed; null where the interface leaves no choice.
    pub steer: Option<&'static str>,
    pub jobs: u16,
    /// I/Os in flight of each job.
    pub iodepth: u16,
    /// I/Os submitted and waited for at once.
    pub batch: u16,
    /// The server's poll policy, `unknown` for a running server.
    pub poll: String,
    /// Request merging in the server: on, off, auto, or `unknown` for a running server.
    pub merge: String,
    /// The server's use of granted pages: auto, copy, map, persistent, `default` if it was not chosen, or `unknown`
    /// for a running server; null if the interface has no grants.
    pub grants: Option<String>,
    /// The pool that caches granted pages: per-ring or shared; null if the interface has no grants, or for a running
    /// server.
    pub grants_pool: Option<&'static str>,
    /// Worker threads of the server that was started; null: the server's default, or a running server.
    pub server_workers: Option<u16>,
    /// Microseconds that a null disk takes for a request; null for other storage, and for a running server.
    pub storage_latency_us: Option<u64>,
    /// Pages of a ring as requested, as a power of two's exponent; null: as many as the server allows.
    pub ring_order: Option<u8>,
    /// Layout of the requests; null where the interface leaves no choice.
    pub abi: Option<&'static str>,
    pub runs: usize,
    /// I/Os per second, mean over the runs.
    pub iops_mean: f64,
    /// Its standard error.
    pub iops_stderr: f64,
    /// I/Os per second, median over the runs. Ratios are of medians.
    pub iops_median: f64,
    /// Bytes per second, mean over the runs.
    pub bw_bytes_per_s: f64,
    /// Its standard error.
    pub bw_stderr: f64,
    /// Bytes per second of a logical unit: mean of all. This and the next two are means over the runs; null where
    /// the interface has none.
    pub lun_bw_bytes_per_s: Option<f64>,
    /// The least of any logical unit.
    pub lun_bw_min_bytes_per_s: Option<f64>,
    /// The most of any logical unit.
    pub lun_bw_max_bytes_per_s: Option<f64>,
    /// Latency over all runs.
    pub lat_us: LatencySummary,
    /// Points of the latencies' distribution: (percentile, microseconds).
    pub percentiles: Vec<(f64, f64)>,
    /// CPU time of the server for an I/O; null when it cannot be read.
    pub server_cpu_us_per_io: Option<f64>,
    /// CPU time of the client's threads for an I/O.
    pub client_cpu_us_per_io: f64,
    /// Reads that the server merged, per second; null if unknown.
    pub rrqm_per_s: Option<f64>,
    /// Writes that the server merged, per second; null if unknown.
    pub wrqm_per_s: Option<f64>,
    /// Requests of an I/O that were handed over to the thread that owns their queue.
    pub handovers_per_io: f64,
    /// Requests of the largest I/O: more than 1 if the disk takes less than the block size at once.
    pub requests_per_io: u32,
    /// Kicks for an I/O.
    pub kicks_per_io: f64,
    /// Calls for an I/O.
    pub calls_per_io: f64,
    /// I/Os that failed or did not verify.
    pub errors: u64,
    pub experiment: Option<&'static str>,
    /// The experiment's heading for the target.
    pub column: Option<String>,
    /// I/Os per second that each job was to start; null: one when another had completed.
    pub rate_iops: Option<u32>,
    /// Starts and delays at that rate; null without it.
    pub rate: Option<RateSummary>,
    /// A job flushed after this many writes; 0: never.
    pub fsync: u32,
    /// Distribution of random blocks: random, or zipf and its theta.
    pub random_distribution: String,
    /// The reads alone; null if the load has none.
    pub read: Option<OpSummary>,
    /// The writes alone; null if the load has none.
    pub write: Option<OpSummary>,
    /// The trims alone; null if the load has none.
    pub trim: Option<OpSummary>,
    /// The flushes, which are not among the I/Os; null if the load has none.
    pub flush: Option<OpSummary>,
    /// Share of holes among the blocks read, from 0 to 1, before the first run; null if unknown.
    pub holes: Option<f64>,
    pub each_run: Vec<RunValues>,
    /// Seed of the first run; null: another one each time.
    pub seed: Option<u64>,
    /// When the first run began: RFC 3339, in UTC.
    pub date: String,
    pub server: ServerInfo,
    /// The benchmark's version.
    pub version: &'static str,
    /// The benchmark's command line.
    pub command: Vec<String>,
    pub machine: Machine,
    /// Blocks read back and checked.
    #[serde(skip)]
    pub verified: u64,
}

/// The keys of the results that only some interfaces have; `None` is null.
#[derive(Clone, Copy, Debug, Default)]
pub struct InterfaceResults {
    pub targets: Option<u16>,
    /// Logical units of each target. With them the results have the bandwidth of each.
    pub luns: Option<u16>,
    /// The queue that a command is put on.
    pub steer: Option<&'static str>,
    /// The pool of granted pages that the server caches.
    pub grants_pool: Option<&'static str>,
    /// Pages of a ring, as a power of two's exponent.
    pub ring_order: Option<u8>,
    /// Layout of the requests.
    pub abi: Option<&'static str>,
}

impl ResultRow {
    /// Creates the row of the runs of a case, at least one. `holes`: the share of holes before the first run.
    pub(crate) fn new(case: &Case<'_>, own: InterfaceResults, holes: Option<f64>, results: &[RunResult]) -> ResultRow {
        let Case { plan, target, combination } = case;
        let iops: Vec<f64> = results.iter().map(RunResult::iops).collect();
        let (iops_mean, iops_stderr) = mean_and_stderr(&iops);
        let requests = results.iter().map(RunResult::ios).sum::<u64>().max(1) as f64;
        let per_request = |value: f64| value / requests;
        let counted = |of: fn(&WorkerStats) -> u64| results.iter().map(|result| of(&result.stats)).sum::<u64>();
        let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let latencies = latencies(results.iter().flat_map(RunResult::transfers));
        let rw = combination.rw;
        let has = |op: IoOp| match op {
            IoOp::Read => rw.reads(),
            IoOp::Write => rw.writes() && !rw.trims(),
            IoOp::Trim => rw.trims(),
            IoOp::Flush => plan.fsync > 0,
        };
        let of = |op: IoOp| has(op).then(|| OpSummary::new(results, op));
        let merges = |at: usize| {
            let rates: Option<Vec<f64>> =
                results.iter().map(|result| result.used.merges.map(|both| both[at])).collect();
            rates.map(|rates| mean_and_stderr(&rates).0)
        };
        let bandwidths: Vec<f64> = results.iter().map(RunResult::bandwidth).collect();
        let (bandwidth, bandwidth_error) = mean_and_stderr(&bandwidths);
        let luns = |pick: fn(f64, f64) -> f64| -> Option<f64> {
            let picked: Option<Vec<f64>> = results.iter().map(|result| result.disk_bandwidths().reduce(pick)).collect();
            picked.filter(|_| own.luns.is_some()).map(|picked| mean_and_stderr(&picked).0)
        };
        let server_cpu: Option<f64> = results.iter().map(|result| result.used.cpu.map(micros)).sum();
        ResultRow {
            interface: plan.interface,
            storage: target.storage().to_owned(),
            target: target.label.clone(),
            rw: combination.rw.name(),
            bs: combination.sizes.min.0,
            bs_max: combination.sizes.max.0,
            queues: combination.queues,
            targets: own.targets,
            luns: own.luns,
            steer: own.steer,
            jobs: combination.jobs,
            iodepth: combination.iodepth,
            batch: combination.batch,
            poll: target.poll().to_owned(),
            merge: target.merge().to_owned(),
            grants: target.grants.clone(),
            grants_pool: own.grants_pool,
            server_workers: target.workers,
            storage_latency_us: target.latency_us(),
            ring_order: own.ring_order,
            abi: own.abi,
            runs: results.len(),
            iops_mean,
            iops_stderr,
            iops_median: median(&iops),
            bw_bytes_per_s: bandwidth,
            bw_stderr: bandwidth_error,
            lun_bw_bytes_per_s: own.luns.map(|_| bandwidth / f64::from(combination.disks())),
            lun_bw_min_bytes_per_s: luns(f64::min),
            lun_bw_max_bytes_per_s: luns(f64::max),
            lat_us: LatencySummary::new(&latencies),
            percentiles: percentiles(&latencies),
            server_cpu_us_per_io: server_cpu.map(per_request),
            client_cpu_us_per_io: per_request(results.iter().map(|result| micros(result.stats.cpu)).sum()),
            rrqm_per_s: merges(0),
            wrqm_per_s: merges(1),
            handovers_per_io: per_request(counted(|stats| stats.handed_over) as f64),
            requests_per_io: results[0].requests_per_io,
            kicks_per_io: per_request(counted(|stats| stats.kicks) as f64),
            calls_per_io: per_request(counted(|stats| stats.calls) as f64),
            errors: counted(|stats| stats.errors),
            experiment: plan.experiment,
            column: target.column.clone(),
            rate_iops: combination.rate_iops,
            rate: combination.rate_iops.map(|rate| RateSummary::new(results, rate, combination.jobs)),
            fsync: plan.fsync,
            random_distribution: plan.distribution.to_string(),
            read: of(IoOp::Read),
            write: of(IoOp::Write),
            trim: of(IoOp::Trim),
            flush: of(IoOp::Flush),
            holes,
            each_run: results.iter().map(|result| RunValues::new(result, &has)).collect(),
            seed: plan.seed,
            date: machine::date(results[0].started),
            server: results[0].server.clone(),
            version: machine::VERSION,
            command: plan.command.clone(),
            machine: plan.machine.clone(),
            verified: results.iter().map(|result| result.verified).sum(),
        }
    }
}

#[cfg(test)]
impl ResultRow {
    /// Creates a row for tests: the given I/Os per second, the rest invented.
    pub(crate) fn example(bs: u64, column: &str, iops: f64) -> ResultRow {
        ResultRow {
            interface: "virtio-blk",
            storage: "file".into(),
            target: "disk".into(),
            rw: "read",
            bs,
            bs_max: bs,
            queues: 8,
            jobs: 8,
            iodepth: 32,
            batch: 1,
            poll: "default".into(),
            merge: "on".into(),
            runs: 3,
            iops_mean: iops,
            iops_median: iops,
            bw_bytes_per_s: iops * bs as f64,
            lat_us: LatencySummary { mean: 1.0, p50: 1.0, p90: 2.0, p99: 3.0, p999: 4.0, max: 5.0 },
            percentiles: vec![(50.0, 1.0)],
            server_cpu_us_per_io: Some(1.5),
            client_cpu_us_per_io: 1.0,
            rrqm_per_s: Some(iops / 2.0),
            wrqm_per_s: Some(0.0),
            requests_per_io: 1,
            experiment: Some("block-size"),
            column: Some(column.into()),
            random_distribution: "random".into(),
            date: "1970-01-01T00:00:00Z".into(),
            version: machine::VERSION,
            ..ResultRow::default()
        }
    }
}
