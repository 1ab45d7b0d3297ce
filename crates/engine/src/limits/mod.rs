//! Rate limits: requests and bytes a second of a disk, and of a group of disks.
//!
//! `io_limits` declares the limits. Workers draw tokens from `bucket`; `group` is shared by the workers of a disk and
//! the disks of a group; `throttle` holds a worker's requests of a disk back. Throttled requests wait in the engine, in
//! front of the plug: they are not merged yet, and the storage does not know them. Reasons:
//! docs/design/0019-rate-limits.md.

mod bucket;
mod group;
mod io_limits;
mod limit_clock;
mod throttle;

pub use group::{DiskLimits, LimitGroup, ThrottleStats, UsedTokens};
pub use io_limits::{Burst, IoLimit, IoLimits, LimitKind};
pub use limit_clock::LimitClock;
pub(crate) use throttle::Throttle;

#[cfg(test)]
mod bucket_tests;
