//! Hostile and unusual clients of a real daemon.
//!
//! `ring_fixture` builds one ring and checks its expected result; `ring_cases` runs tables of these. `session` does the
//! same for vhost-user messages. `daemon` is the `mqblk` binary as a child process. `socket` sends any message on a
//! vhost-user socket; `memory` and `ring` are guest memory and a split ring with every byte under control; `frontend`
//! sets up queues from these; `request` builds virtio-blk requests. `load` is a well-behaved client that verifies all
//! reads; `neighbour` runs one beside the client under test. `queue_load` does so on a raw queue, `timed_load` on any
//! device with the latency of each request; `direct_file` is a device without a daemon. `attacks` go on until they are
//! stopped. `usage` measures the host's resources that the daemon holds. `autogroup` makes the kernel schedule threads
//! by their priorities.

pub mod attacks;
pub mod autogroup;
pub mod daemon;
pub mod direct_file;
pub mod eventfd;
pub mod frontend;
pub mod fuse;
pub mod hung_device;
pub mod load;
pub mod loop_file_system;
pub mod memory;
pub mod neighbour;
pub mod one_region;
pub mod queue_load;
pub mod request;
pub mod ring;
pub mod ring_cases;
pub mod ring_fixture;
pub mod session;
pub mod socket;
pub mod timed_load;
pub mod usage;

use mqblk_test_bounds::Bound;
use std::time::Duration;

/// Timeout of every wait in these tests.
pub const TIMEOUT: Bound = Bound::seconds(20);

/// Time that a test waits for an event that must not happen.
pub const QUIET_TIME: Duration = Duration::from_millis(30);

/// Polls `found` until it returns a value.
///
/// # Panics
/// When there is none within [`TIMEOUT`], with `what` in the message.
pub fn wait_for<T>(what: &str, found: impl FnMut() -> Option<T>) -> T {
    mqblk_test_bounds::wait_for(TIMEOUT, found).unwrap_or_else(|exceeded| panic!("{what}: {exceeded}"))
}
