//! What becomes of requests that the storage failed: answered with the error, tried again for a while, or parked until somebody
//! says `resume`.
//!
//! `policy` is what a user may choose, `health` is a disk's state that all its workers share, `guard` carries it out between a
//! worker's plugs and its channel, `resume` is how others ask for it.

mod guard;
mod health;
mod policy;
mod resume;

pub(crate) use guard::{SharedGuard, guarded};
pub use health::{DiskHealth, HealthStats, StopReport};
pub use policy::{ErrorPolicy, OnError, OnNoSpace};
pub use resume::Resume;
