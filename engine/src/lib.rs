//! Worker threads: they own queues, disk channels and one io_uring each, and nothing on the data path is shared between them.
//!
//! `engine` starts workers and attaches queues to them, `worker` runs a worker's turns, `runner` connects one queue to its tag table,
//! `attached_disks` are the disks that its requests may go to, `poll` decides how long a queue is polled, `poll_list` which queues are
//! polled and when the worker may sleep, `channels` are a worker's handles to disks, `quota` bounds what each may use of the worker,
//! `plug` merges their requests, `coalesce` defers calls, `errors` parks or repeats requests that failed, `watchdog` logs storage that
//! hangs, `draining` is a queue that is being detached, `mailbox` carries messages from control threads to a worker. The engine knows
//! neither guest interfaces nor storage backends.
#![forbid(unsafe_code)]

mod attached_disks;
mod channels;
mod clock;
mod coalesce;
mod counters;
mod draining;
mod engine;
mod errors;
mod latency;
mod mailbox;
mod moving;
mod options;
mod per_disk;
mod plug;
mod poll;
mod poll_list;
mod quota;
mod runner;
mod stats_registry;
mod stepped;
mod tags;
#[cfg(test)]
mod trial;
mod watchdog;
mod worker;

pub use attached_disks::QueueDisk;
pub use counters::{DiskCounters, LatencyParts, QueueCounters, QueueId, QueueLatency, QueueStats, WorkerStats};
pub use draining::{Detached, Draining};
pub use engine::{AttachError, Engine, EngineOptions, QueueHandle, QueueOptions, WorkerGone};
pub use errors::{DiskHealth, ErrorPolicy, HealthStats, OnError, OnNoSpace, Resume, StopReport};
pub use latency::{LatencyHistogram, percentile_ns};
pub use moving::{Extracted, Inserted, MoveResult, QueueState};
pub use mqblk_uring::{EventFd, FixedBufferUse, Kick, Notifier, UringContext, UringOptions};
pub use options::{Coalesce, MergeMode, PlugOptions};
pub use poll::PollPolicy;
pub use stats_registry::StatsRegistry;
pub use stepped::{SteppedQueue, SteppedWorker};
pub use watchdog::Watchdog;

/// A disk as the engine holds it.
pub type AnyDisk = dyn mqblk_core::Disk<UringContext>;
