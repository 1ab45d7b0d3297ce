//! Worker threads: they own queues, disk channels and one io_uring each, and nothing on the data path is shared between
//! them.
//!
//! From the bottom up, each module uses only those above it in this list:
//! - `request`, `options`, `clock`, `latency`, `attach_error`: plain types; `queue_settings`: settings shared by a
//!   transport and the verbs that change its queues.
//! - `tags` is a queue's request table, `counters` and `per_disk` its statistics; `poll` decides how long a queue is
//!   polled, `poll_list` the polled queues and when the worker may sleep, `coalesce` defers calls, `quota` bounds a
//!   disk's use of its worker.
//! - `plug` merges requests of one disk, `limits` throttles them, `errors` parks or repeats those that failed,
//!   `channels` are a worker's handles to disks.
//! - `attached_disks` are the disks of one queue, `route` is the route of its requests there, `runner` connects the
//!   queue to its tags.
//! - `worker` runs the turns; `mailbox` carries messages to it.
//! - `workers` are the threads, `engine` starts them and attaches queues, `draining` detaches them, `moving` moves
//!   them, `resume` resumes stopped disks, `watchdog` logs storage that hangs, `liveness` finds workers that do not
//!   respond, `stepped` is a worker without a thread.
//!
//! The engine knows neither guest interfaces nor storage backends.
#![forbid(unsafe_code)]

mod attach_error;
mod attached_disks;
mod channels;
mod clock;
mod coalesce;
mod counters;
mod cpu;
mod draining;
mod engine;
mod errors;
mod latency;
mod limits;
mod liveness;
mod mailbox;
mod moving;
mod options;
mod per_disk;
mod placement;
mod plug;
mod poll;
mod poll_list;
mod queue_options;
mod queue_settings;
mod quota;
mod request;
mod resume;
mod route;
mod runner;
mod sleep_cost;
mod slices;
mod stats_registry;
mod stepped;
mod tags;
#[cfg(test)]
mod trial;
mod watchdog;
mod worker;
mod workers;

pub use attach_error::{AttachError, WorkerError};
pub use counters::{
    DiskCounters, LatencyParts, Polling, QueueCounters, QueueId, QueueLatency, QueueStats, WorkerStats,
};
pub use cpu::pin_thread;
pub use draining::{ClosingDisk, Draining};
pub use engine::{Engine, EngineOptions, QueueHandle};
pub use errors::{DiskHealth, ErrorPolicy, HealthStats, OnError, OnNoSpace, StopReport, failure_count};
pub use latency::{LatencyHistogram, percentile_ns};
pub use limits::{Burst, DiskLimits, IoLimit, IoLimits, LimitClock, LimitGroup, LimitKind, ThrottleStats, UsedTokens};
pub use liveness::LivenessProbe;
pub use moving::{MoveResult, QueueState};
pub use mqblk_uring::{
    CallDescriptor, EventFd, FixedBufferUse, Kick, Notifier, UringContext, UringOptions, make_rings_on_a_thread,
    redirect,
};
pub use options::{Coalesce, MergeMode, PlugOptions, QueuePolicy};
pub use placement::QueuePlacement;
pub use poll::{PollPolicy, PollReason};
pub use queue_options::{FaultHandler, QueueDisk, QueueFault, QueueOptions};
pub use queue_settings::{QueueMove, QueueSettings, SharedQueueSettings};
pub use resume::Resume;
pub use stats_registry::StatsRegistry;
pub use stepped::{SteppedQueue, SteppedWorker};
pub use watchdog::Watchdog;
pub use worker::Detached;
pub use workers::RemoveWorkerError;

/// A disk as the engine holds it.
pub type AnyDisk = dyn mqblk_core::Disk<UringContext>;
