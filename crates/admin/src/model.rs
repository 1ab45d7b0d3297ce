//! The results of the verbs. docs/admin.md lists every field with its unit and is a promise: fields are added, none is
//! renamed, dropped or changed in meaning. A field that an older daemon does not send reads as its default.

pub use crate::live_model::{
    ControllerList, DiskSettings, FrontendInfo, ListedController, ListedQueue, ListedWorker, QueueList, QueueMoved,
    WorkerChange, WorkerList,
};
pub use mqblk_core::counters::{ConnectionCounters, GrantCounters, QueueCounters};
use serde::{Deserialize, Serialize};

/// One LUN, in the results of `lun.list` and of the verbs that change LUNs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lun {
    /// Its name.
    pub id: String,
    /// Its controller's name.
    pub controller: String,
    /// Its target.
    pub target: u32,
    /// Its LUN.
    pub lun: u32,
    /// Its state: `adding`, `ready`, `removing` or `removed`.
    pub state: String,
    /// Its logical unit: the id of the LUN for which it was opened. Null while it is being opened, like the fields
    /// below.
    pub unit: Option<String>,
    /// The kind of storage.
    pub storage: Option<String>,
    /// The logical unit's size, in bytes.
    pub size_bytes: Option<u64>,
    /// Its logical block, in bytes.
    pub block_bytes: Option<u32>,
    /// True if it refuses writes.
    pub read_only: Option<bool>,
    /// Its origin: `configuration`, or `run-time` if it was added while the daemon ran.
    pub origin: String,
    /// True if it exists after a restart of the daemon: it is in the configuration, or kept by `--state`.
    pub survives_restart: bool,
    /// Its settings, with the keys of `--lun`.
    pub settings: serde_json::Map<String, serde_json::Value>,
}

/// The result of `lun.list`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LunList {
    /// The LUNs, by controller and address.
    pub luns: Vec<Lun>,
}

/// The result of `lun.add`, `lun.remove` and `lun.resize`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LunChange {
    /// The LUN as it is now.
    pub lun: Lun,
}

/// The result of `resize`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResizeResult {
    /// The id of the disk, LUN or Xen device.
    pub id: String,
    /// The size before, in bytes.
    pub before_bytes: u64,
    /// The size now, in bytes.
    pub size_bytes: u64,
    /// How the guest was notified: `told`, `unanswered`, `at-reconnect`, `no-guest`, or `unchanged` if the size is the
    /// same.
    pub guest: String,
}

/// The result of `stat`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stat {
    /// The daemon's version.
    pub version: String,
    /// Time of the sample, in nanoseconds of the host's monotonic clock.
    pub time_ns: u64,
    /// Uptime of the daemon at the sample, in nanoseconds. `time_ns - uptime_ns` identifies a run.
    pub uptime_ns: u64,
    /// The disks, in the order of the configuration.
    pub disks: Vec<DiskStat>,
    /// The controllers, in the order of the configuration.
    pub controllers: Vec<ControllerStat>,
    /// The worker threads, by number.
    pub workers: Vec<WorkerStat>,
    /// The disks and LUNs that cannot be served now, and are tried again.
    pub out: Vec<OutDisk>,
}

/// A disk or LUN that cannot be served now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutDisk {
    /// Its name.
    pub id: String,
    /// The controller of a LUN; null for a disk.
    pub controller: Option<String>,
    /// The guest interface.
    pub interface: String,
    /// The reason.
    pub why: String,
    /// Time since it is out, in nanoseconds.
    pub out_ns: u64,
    /// Number of attempts.
    pub tries: u32,
    /// Time of the next attempt, in nanoseconds from now.
    pub next_try_ns: u64,
}

impl Stat {
    /// Returns the start time of the daemon, in nanoseconds of the host's monotonic clock: equal in all results of one
    /// run.
    pub fn started_ns(&self) -> u64 {
        self.time_ns.saturating_sub(self.uptime_ns)
    }
}

/// One disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskStat {
    /// Its name.
    pub id: String,
    /// The guest interface: `virtio-blk`, `xen`.
    pub interface: String,
    /// The kind of storage: `file`, `nbd`, `qcow2`, ...
    pub storage: String,
    /// Merging of adjacent requests, as configured: `auto`, `on` or `off`.
    pub merge: String,
    /// Longest merged request, in bytes.
    pub merge_bytes: u64,
    /// Most memory segments of a merged request.
    pub merge_segments: u32,
    /// Number of queues that it offers.
    pub queue_count: u32,
    /// The sums over its queues.
    pub totals: Load,
    /// Its error policy and its stop.
    pub health: Health,
    /// Its connections to its storage. Null for storage that has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionsStat>,
    /// True if the VMM keeps an in-flight region, so that requests in flight survive the daemon. Null while no VMM has
    /// set queues up, and for interfaces that need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight_region: Option<bool>,
    /// Its VMM's use of its budget. Null for interfaces whose guests share no files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<TenantBudgetStat>,
    /// Grant statistics of a Xen disk. Null for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grants: Option<GrantCounters>,
    /// Its queues, by number. Empty unless `queues` was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStat>,
}

/// The use of its budget by a tenant: the VMM of a disk or controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantBudgetStat {
    /// Mappings of the VMM's memory, also those that only requests in flight still use.
    pub mappings: ResourceStat,
    /// The address space of these mappings, in bytes.
    pub address_space_bytes: ResourceStat,
    /// Guest memory of the VMM's memory table, in bytes.
    pub guest_memory_bytes: ResourceStat,
    /// Number of connections that had to wait because there were too many a second.
    pub delayed_connections: u64,
    /// Number of messages that had to wait because there were too many a second.
    pub delayed_messages: u64,
}

/// A tenant's use of one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceStat {
    /// The current use.
    pub used: u64,
    /// The highest use.
    pub highest: u64,
    /// The limit; null without one.
    pub limit: Option<u64>,
    /// Number of refusals.
    pub refused: u64,
}

/// A disk's error policy and its stop.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    /// `running` or `stopped`.
    pub state: String,
    /// The policy for failed requests, as configured: `report`, `stop` or `retry:SECONDS`.
    pub on_error: String,
    /// The policy for requests without space: `report` or `stop`.
    pub on_enospc: String,
    /// The stop; null while it runs.
    pub stopped: Option<HealthStop>,
    /// Parked requests.
    pub parked: u64,
    /// Number of stops.
    pub stops: u64,
    /// Number of repetitions by `retry`.
    pub retries: u64,
    /// Number of requests that were completed with an error. Without requests that a guest has cancelled.
    pub failed: u64,
    /// The last one; null without any.
    pub last_failure: Option<FailedRequest>,
    /// Its limits and their statistics. Null while nothing is limited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttle: Option<ThrottleStat>,
}

/// A request that was completed with an error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FailedRequest {
    /// Operation, offset in bytes, and error.
    pub what: String,
    /// Its age, in nanoseconds.
    pub ago_ns: u64,
}

/// The limits of a disk, and their statistics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThrottleStat {
    /// Its own limits and the name of its group, with the keys of the configuration.
    pub limits: serde_json::Map<String, serde_json::Value>,
    /// Requests that were submitted after waiting for a limit. Only grows.
    pub throttled: u64,
    /// Sum of their waiting times, in nanoseconds. Only grows.
    pub throttled_ns: u64,
    /// Requests that wait for a limit now.
    pub waiting: u64,
}

/// A group of disks that share limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitGroupStat {
    /// Its name.
    pub name: String,
    /// Its limits, with the keys of the configuration: only those that are set.
    pub limits: serde_json::Map<String, serde_json::Value>,
    /// The ids of its disks and LUNs.
    pub disks: Vec<String>,
}

/// The result of `limit-group.set`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitGroupChange {
    /// The group now.
    pub group: LimitGroupStat,
    /// True if the next daemon has these limits too.
    pub survives_restart: bool,
}

/// The result of `limit-group.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitGroupList {
    /// The groups, in the order of the configuration.
    pub groups: Vec<LimitGroupStat>,
}

/// A disk's connections to its storage: to an NBD server, or a Ceph cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConnectionsStat {
    /// Their counters, since the disk was opened.
    #[serde(flatten)]
    pub counters: ConnectionCounters,
    /// Time since the storage was last reached, in nanoseconds; null while it is reachable.
    pub unreachable_ns: Option<u64>,
    /// Reason of the last lost connection or failed attempt to connect.
    pub last_failure: Option<String>,
    /// The last error of the storage's own, with the request.
    pub last_error: Option<String>,
}

/// The stop of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HealthStop {
    /// Time since the stop, in nanoseconds.
    pub stopped_ns: u64,
    /// The failed request and its error.
    pub reason: String,
    /// True if it was a lack of space.
    pub enospc: bool,
}

/// The result of `config.diff` and `config.apply`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigDifferences {
    /// Differences of the file from the daemon.
    pub changes: Vec<ConfigDifference>,
}

/// A difference between a configuration file and the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigDifference {
    /// The difference.
    pub what: String,
    /// True if it can be applied while the daemon serves.
    pub can_apply: bool,
    /// True if it was applied.
    pub applied: bool,
    /// Error of applying it, if that was tried.
    pub error: Option<String>,
}

/// A disk or LUN, in the result of `disk.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListedDisk {
    /// Its id.
    pub id: String,
    /// The controller of a LUN; null for a disk.
    pub controller: Option<String>,
    /// The guest interface.
    pub interface: String,
    /// The kind of storage; null while it is being opened.
    pub storage: Option<String>,
    /// Its size, in bytes; null while its storage is not open.
    pub size_bytes: Option<u64>,
    /// Its logical block, in bytes.
    pub block_bytes: Option<u32>,
    /// True if it refuses writes.
    pub read_only: Option<bool>,
    /// Its error policy, its stop and its failed requests.
    pub health: Option<Health>,
    /// The connected VMM; null without one, and for interfaces whose guests do not connect to the daemon.
    pub frontend: Option<FrontendInfo>,
}

/// The result of `disk.retry`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskRetried {
    /// The ids of the disks and LUNs that are served now.
    pub served: Vec<String>,
    /// The disks and LUNs that are still out. Empty for a retry of one, which fails instead.
    pub out: Vec<StillOut>,
}

/// A disk that still cannot be served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StillOut {
    /// Its id.
    pub id: String,
    /// The reason.
    pub why: String,
}

/// The result of `disk.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskList {
    /// The disks and LUNs that cannot be served now, and are tried again.
    pub out: Vec<OutDisk>,
    /// The disks and LUNs, in the order of the configuration; added ones follow.
    pub disks: Vec<ListedDisk>,
}

/// The result of `disk.add`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskAdded {
    /// The id of the disk or LUN.
    pub id: String,
    /// True if the next daemon serves it too: this one has a state file.
    pub survives_restart: bool,
}

/// The result of `disk.remove`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskRemoved {
    /// The id of the disk or LUN.
    pub id: String,
}

/// The result of `resume`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resumed {
    /// The disk or LUN.
    pub id: String,
    /// Parked requests.
    pub parked: u64,
    /// True if they were completed with their errors instead of repeated.
    pub report: bool,
}

/// One controller: a guest interface with any number of LUNs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ControllerStat {
    /// Its name.
    pub id: String,
    /// The guest interface, `virtio-scsi`.
    pub interface: String,
    /// Number of request queues that it offers.
    pub queue_count: u32,
    /// The sums over its request queues.
    pub totals: Load,
    /// True if the VMM keeps an in-flight region, so that requests in flight survive the daemon. Null while no VMM has
    /// set queues up, and for interfaces that need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight_region: Option<bool>,
    /// Its VMM's use of its budget. Null for interfaces whose guests share no files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<TenantBudgetStat>,
    /// Its LUNs, by address.
    pub luns: Vec<LunStat>,
    /// Its queues: control, event, and the request queues by number. Empty unless `queues` was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStat>,
}

/// One LUN of a controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LunStat {
    /// Its name.
    pub id: String,
    /// Its target.
    pub target: u32,
    /// Its LUN.
    pub lun: u32,
    /// Its state: `adding`, `ready` or `removing`.
    pub state: String,
    /// Its logical unit.
    pub unit: String,
    /// The kind of storage.
    pub storage: String,
    /// Merging of adjacent requests, as configured: `auto`, `on` or `off`.
    pub merge: String,
    /// Longest merged request, in bytes.
    pub merge_bytes: u64,
    /// Most memory segments of a merged request.
    pub merge_segments: u32,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Age of the oldest request in flight, in milliseconds; null without any.
    pub oldest_ms: Option<u64>,
    /// The error policy of its logical unit, and its stop.
    pub health: Health,
    /// The connections of its logical unit to its storage. Null for storage that has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionsStat>,
    /// Its counters.
    pub counters: LunCounters,
}

/// Counters of a LUN since it was added. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LunCounters {
    /// Reads finished.
    pub reads: u64,
    /// Writes finished.
    pub writes: u64,
    /// Flushes, discards and write-zeroes finished.
    pub others: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that did not succeed.
    pub errors: u64,
    /// Total latency of the reads, in nanoseconds.
    pub read_ns: u64,
    /// Total latency of the writes, in nanoseconds.
    pub write_ns: u64,
    /// Total latency of the others, in nanoseconds.
    pub other_ns: u64,
}

/// One queue of a disk or a controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStat {
    /// Its role: `request`, `control` or `event`. All of a disk's are `request`.
    pub role: String,
    /// Its number among those of its role.
    pub queue: u32,
    /// The worker that serves it.
    pub worker: u32,
    /// Its polling now; null while no guest has set it up.
    pub polling: Option<PollingStat>,
    /// Its statistics.
    #[serde(flatten)]
    pub load: Load,
}

/// A queue's polling at this moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PollingStat {
    /// The reason for polling, or for not polling: `policy`, `expected`, `quiet` or `cpu-wanted`.
    pub reason: String,
    /// Longest time that it is polled without requests, in nanoseconds; null: unlimited.
    pub window_ns: Option<u64>,
    /// Period of the timer that checks its ring while requests come, in nanoseconds; null: it is polled continuously,
    /// or armed.
    pub timer_ns: Option<u64>,
}

/// The statistics of a queue, or of all queues of a disk, since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Requests in flight now.
    pub in_flight: u64,
    /// Requests that its ring has slots for; 0 while no guest has set it up.
    pub slots: u64,
    /// Age of the oldest request in flight, in milliseconds; null without any.
    pub oldest_ms: Option<u64>,
    /// Its counters.
    pub counters: QueueCounters,
    /// Latencies of its requests.
    pub latency: Latency,
}

/// Latencies of requests, by class of operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// Of reads.
    pub reads: LatencyParts,
    /// Of writes.
    pub writes: LatencyParts,
    /// Of flushes, discards and write-zeroes.
    pub others: LatencyParts,
}

/// Latencies of requests of one class, by stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LatencyParts {
    /// From the pull to the submission.
    pub queued: Distribution,
    /// In the storage.
    pub device: Distribution,
    /// From the storage's completion until the guest can see it and has been called.
    pub publish: Distribution,
    /// From the pull to the publish.
    pub total: Distribution,
}

/// A histogram of latencies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Distribution {
    /// Number of requests.
    pub count: u64,
    /// Sum of their latencies, in nanoseconds. Exact.
    pub sum_ns: u64,
    /// The median in nanoseconds, to within 7 percent; null without any.
    pub p50_ns: Option<u64>,
    /// 99 percent took less, in nanoseconds.
    pub p99_ns: Option<u64>,
    /// 99.9 percent took less, in nanoseconds.
    pub p999_ns: Option<u64>,
    /// `[lower_ns, upper_ns, count]` of each bucket that is not empty, ascending; a value equal to an upper bound is
    /// in the next bucket. Empty unless `latency` was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64, u64)>,
}

/// One worker thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStat {
    /// Its number.
    pub worker: u32,
    /// Queues that it serves now.
    pub queues: u32,
    /// Turns in which something happened.
    pub turns: u64,
    /// Turns in which nothing happened.
    pub empty_turns: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Time asleep, in nanoseconds.
    pub slept_ns: u64,
    /// Times it offered its CPU to other threads while it polled.
    pub yields: u64,
    /// Time slices that others used then, in nanoseconds.
    pub away_ns: u64,
    /// CPU time that the thread used, in nanoseconds.
    pub cpu_ns: u64,
    /// Merged requests that failed, so that their members were repeated one by one.
    pub merge_splits: u64,
}
