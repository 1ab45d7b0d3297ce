//! What the verbs answer. Every field with its unit is in docs/admin.md, which is a promise: fields are added, none is renamed,
//! dropped or changed in meaning. What an older daemon does not send reads as nothing.

use serde::{Deserialize, Serialize};

/// One LUN, as `lun.list` and the verbs that change LUNs tell it.
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
    /// How far it is: `adding`, `ready`, `removing` or `removed`.
    pub state: String,
    /// The unit that it leads to: the id of the LUN that this was made for. Null while that is being opened, as are the others.
    pub unit: Option<String>,
    /// The kind of storage.
    pub storage: Option<String>,
    /// The unit's size, in bytes.
    pub size_bytes: Option<u64>,
    /// Its logical block, in bytes.
    pub block_bytes: Option<u32>,
    /// Whether it refuses writes.
    pub read_only: Option<bool>,
    /// Where it is from: `configuration`, or `run-time` when it was added while the daemon ran.
    pub origin: String,
    /// Whether a daemon after this one has it too: it is of the configuration, or kept by `--state`.
    pub survives_restart: bool,
    /// Its settings, with the keys of `--lun`.
    pub settings: serde_json::Map<String, serde_json::Value>,
}

/// The answer to `lun.list`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LunList {
    /// The LUNs, by controller and place.
    pub luns: Vec<Lun>,
}

/// The answer to `lun.add`, `lun.remove` and `lun.resize`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LunChange {
    /// The LUN as it is now.
    pub lun: Lun,
}

/// The answer to `resize`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResizeResult {
    /// What was asked for: the id of a disk, a LUN or a Xen device.
    pub id: String,
    /// The size before, in bytes.
    pub before_bytes: u64,
    /// The size now, in bytes.
    pub size_bytes: u64,
    /// Whether the guest knows: `told`, `unanswered`, `at-reconnect`, `no-guest`, or `unchanged` where there is nothing to know.
    pub guest: String,
}

/// The answer to `stat`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stat {
    /// The daemon's version.
    pub version: String,
    /// When this was read, in nanoseconds of the host's monotonic clock.
    pub time_ns: u64,
    /// How long the daemon had then been running, in nanoseconds. `time_ns - uptime_ns` tells one run from another.
    pub uptime_ns: u64,
    /// The disks, in the order of the configuration.
    pub disks: Vec<DiskStat>,
    /// The controllers, in the order of the configuration.
    pub controllers: Vec<ControllerStat>,
    /// The worker threads, by number.
    pub workers: Vec<WorkerStat>,
}

impl Stat {
    /// When the daemon was started, in nanoseconds of the host's monotonic clock: the same in all answers of one run.
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
    /// The kind of storage: `file`, `null`, `ram`.
    pub storage: String,
    /// Whether neighbouring requests are joined, as configured: `auto`, `on` or `off`.
    pub merge: String,
    /// Longest merged request, in bytes.
    pub merge_bytes: u64,
    /// Most memory segments of a merged request.
    pub merge_segments: u32,
    /// How many queues it offers.
    pub queue_count: u32,
    /// The sums over its queues.
    pub totals: Load,
    /// What becomes of its failed requests, and whether it is stopped.
    pub health: Health,
    /// Whether the VMM keeps the region in which requests in flight outlive the daemon. Null when no VMM has set queues up, and for
    /// interfaces that need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight_region: Option<bool>,
    /// What its rings did with the guest's pages: of a Xen disk. Null for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grants: Option<GrantStat>,
    /// Its queues, by number. Empty unless `queues` was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStat>,
}

/// What becomes of a disk's failed requests, and whether it is stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    /// `running` or `stopped`.
    pub state: String,
    /// What becomes of failed requests, as configured: `report`, `stop` or `retry:SECONDS`.
    pub on_error: String,
    /// Of those that found no space: `report` or `stop`.
    pub on_enospc: String,
    /// Why it is stopped; null while it runs.
    pub stopped: Option<HealthStop>,
    /// Requests that are parked.
    pub parked: u64,
    /// How often it stopped.
    pub stops: u64,
    /// How often requests were tried again by themselves.
    pub retries: u64,
}

/// Why a disk is stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HealthStop {
    /// For how long it is, in nanoseconds.
    pub stopped_ns: u64,
    /// What failed, and how.
    pub reason: String,
    /// It was a lack of space.
    pub enospc: bool,
}

/// The answer to `resume`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resumed {
    /// The disk or LUN.
    pub id: String,
    /// Requests that were parked.
    pub parked: u64,
    /// They were answered with their errors in place of being done.
    pub report: bool,
}

/// What the rings of a Xen disk did with the guest's pages. All but `held`, `stuck` and `buffer_pages` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GrantStat {
    /// Pages copied, either way.
    pub copies: u64,
    /// Calls that copied them.
    pub copy_calls: u64,
    /// Pages that could not be copied.
    pub copy_errors: u64,
    /// Pages mapped.
    pub maps: u64,
    /// Calls that mapped them.
    pub map_calls: u64,
    /// Calls that failed to; the pages were copied instead.
    pub map_errors: u64,
    /// Pages let go.
    pub unmaps: u64,
    /// Calls that let them go.
    pub unmap_calls: u64,
    /// Pages of requests that were mapped already.
    pub persistent_hits: u64,
    /// Pages of requests that were not.
    pub persistent_misses: u64,
    /// Pages let go because they were not used for long, or for others.
    pub persistent_purged: u64,
    /// Times that a page was copied because its ring has as many mapped as it may.
    pub over_cap: u64,
    /// Times that pages were copied because the host has as many mapped as it may.
    pub over_budget: u64,
    /// Pages that are mapped now.
    pub held: u64,
    /// Pages that could not be let go. They are not used any more.
    pub stuck: u64,
    /// Own pages that hold memory now.
    pub buffer_pages: u64,
    /// Requests with their segments in pages of their own.
    pub indirect_requests: u64,
    /// Barriers carried out.
    pub barriers: u64,
    /// Events sent.
    pub events_sent: u64,
    /// Events taken.
    pub events_taken: u64,
}

/// One controller: a guest interface with any number of LUNs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ControllerStat {
    /// Its name.
    pub id: String,
    /// The guest interface, `virtio-scsi`.
    pub interface: String,
    /// How many request queues it offers.
    pub queue_count: u32,
    /// The sums over its request queues.
    pub totals: Load,
    /// Whether the VMM keeps the region in which requests in flight outlive the daemon. Null when no VMM has set queues up, and for
    /// interfaces that need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight_region: Option<bool>,
    /// Its LUNs, by place.
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
    /// How far it is: `adding`, `ready` or `removing`.
    pub state: String,
    /// The unit that it leads to.
    pub unit: String,
    /// The kind of storage.
    pub storage: String,
    /// Whether neighbouring requests are joined, as configured: `auto`, `on` or `off`.
    pub merge: String,
    /// Longest merged request, in bytes.
    pub merge_bytes: u64,
    /// Most memory segments of a merged request.
    pub merge_segments: u32,
    /// Requests in flight at this moment.
    pub in_flight: u64,
    /// How long the oldest of them has been, in milliseconds; null without any.
    pub oldest_ms: Option<u64>,
    /// What becomes of its unit's failed requests, and whether that is stopped.
    pub health: Health,
    /// What was counted.
    pub counters: LunCounters,
}

/// Counters of a LUN since it is there. They only grow while it is.
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
    /// Requests that ended otherwise than done.
    pub errors: u64,
    /// How long the reads took in all, in nanoseconds.
    pub read_ns: u64,
    /// How long the writes took in all, in nanoseconds.
    pub write_ns: u64,
    /// How long the others took in all, in nanoseconds.
    pub other_ns: u64,
}

/// One queue of a disk or a controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStat {
    /// What it is for: `request`, `control` or `event`. Of a disk all are `request`.
    pub role: String,
    /// Its number among those of its role.
    pub queue: u32,
    /// The worker that serves it.
    pub worker: u32,
    /// What it did.
    #[serde(flatten)]
    pub load: Load,
}

/// What a queue, or all of a disk's, did since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Requests in flight at this moment.
    pub in_flight: u64,
    /// How long the oldest of them has been, in milliseconds; null without any.
    pub oldest_ms: Option<u64>,
    /// What was counted.
    pub counters: Counters,
    /// How long requests took.
    pub latency: Latency,
}

/// Counters that only grow while the daemon runs. Without a unit in its name a field is a number of things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Requests answered in all.
    pub requests: u64,
    /// Reads finished.
    pub reads: u64,
    /// Writes finished.
    pub writes: u64,
    /// Flushes finished.
    pub flushes: u64,
    /// Discards finished (guest requests, not ranges).
    pub discards: u64,
    /// Write-zeroes finished (guest requests, not ranges).
    pub write_zeroes: u64,
    /// Requests that the queue answered itself, without the disk.
    pub answered_alone: u64,
    /// Of those, the guest's mistakes.
    pub malformed: u64,
    /// Requests that ended otherwise than done.
    pub errors: u64,
    /// Of those, reads.
    pub read_errors: u64,
    /// Of those, writes.
    pub write_errors: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes of discards and write-zeroes.
    pub other_bytes: u64,
    /// Reads that were merged into the read before them on the disk.
    pub read_merges: u64,
    /// Writes that were merged into the write before them on the disk.
    pub write_merges: u64,
    /// Ranges of discards and write-zeroes that were merged into the one before them on the disk.
    pub other_merges: u64,
    /// Times the guest woke us.
    pub kicks: u64,
    /// Calls sent to the guest.
    pub calls: u64,
    /// Publishes for which the guest wanted no call.
    pub calls_suppressed: u64,
    /// Calls that were put off so that one could tell of more answers.
    pub calls_put_off: u64,
    /// Turns that found requests.
    pub turns: u64,
    /// Turns that found none.
    pub empty_turns: u64,
    /// Times the queue was armed for sleep.
    pub arms: u64,
    /// Time spent polling without finding anything, in nanoseconds.
    pub poll_ns: u64,
}

/// How long requests took, by kind.
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

/// How long requests of one kind took, by where the time went.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LatencyParts {
    /// From the pull to the hand-over to the storage.
    pub queued: Distribution,
    /// In the storage.
    pub device: Distribution,
    /// From the storage's answer until the guest could see it and was called.
    pub publish: Distribution,
    /// All of it.
    pub total: Distribution,
}

/// A distribution of latencies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Distribution {
    /// How many.
    pub count: u64,
    /// All together, in nanoseconds. Exact.
    pub sum_ns: u64,
    /// The median in nanoseconds, to within 7 percent; null without any.
    pub p50_ns: Option<u64>,
    /// 99 percent took less, in nanoseconds.
    pub p99_ns: Option<u64>,
    /// 99.9 percent took less, in nanoseconds.
    pub p999_ns: Option<u64>,
    /// `[lower_ns, upper_ns, count]` of each bucket that is not empty, ascending; a value equal to an upper bound is in the
    /// next bucket. Empty unless `latency` was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64, u64)>,
}

/// One worker thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStat {
    /// Its number.
    pub worker: u32,
    /// Queues that it serves at this moment.
    pub queues: u32,
    /// Turns in which something happened.
    pub turns: u64,
    /// Turns in which nothing happened.
    pub empty_turns: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Time asleep, in nanoseconds.
    pub slept_ns: u64,
    /// CPU time that the thread used, in nanoseconds.
    pub cpu_ns: u64,
    /// Merged requests that the storage failed, so that their members were done one by one.
    pub merge_splits: u64,
}
