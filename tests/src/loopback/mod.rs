//! Both ends of a Xen block device on one machine: a frontend that controls every byte, and the daemon's process. The
//! same scenarios run on a simulated Xen and in the first domain of a real one.
//!
//! `fixture` is the machine with the daemon, a good disk and the disks under attack. `daemon` is the process and its
//! resources. `frontend` is the hostile frontend, `pages` its granted memory, `request` builds its requests.
//! `neighbour` is the good disk's client. [`scenarios::SCENARIOS`] lists the attacks with their expected results.

pub mod daemon;
pub mod fixture;
pub mod frontend;
pub mod neighbour;
pub mod pages;
pub mod request;
pub mod scenarios;

use std::time::Duration;

use anyhow::{Context, Result};
use mqblk_test_bounds::Bound;

/// Timeout of every wait. An emulated machine is slow.
pub const TIMEOUT: Bound = Bound::seconds(40);

/// Time that a test waits for an event that must not happen.
pub const QUIET_TIME: Duration = Duration::from_millis(60);

/// Polls `found` until it returns a value.
///
/// # Errors
/// The error of `found`, or a timeout after [`TIMEOUT`].
pub fn wait_for<T>(what: &str, mut found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    mqblk_test_bounds::wait_for(TIMEOUT, || found().transpose()).with_context(|| what.to_owned())?
}
