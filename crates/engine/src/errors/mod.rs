//! The handling of requests that the storage failed: they are completed with the error, repeated for a while, or parked
//! until the disk is resumed.
//!
//! `policy` is a user's configuration, `health` is the state of a disk that all its workers share, `failures` logs
//! failed requests, `guard` applies the policy between a worker's plugs and its channel.

mod failures;
mod guard;
mod health;
mod policy;

pub(crate) use guard::{EngineChannel, SharedGuard, guarded};
pub use health::{DiskHealth, HealthStats, StopReport, failure_count};
pub use policy::{ErrorPolicy, OnError, OnNoSpace};
