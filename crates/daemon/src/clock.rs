//! The host's clock.

use rustix::time::{ClockId, clock_gettime};

/// Returns the host's monotonic clock in nanoseconds.
pub(crate) fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // Neither part is negative, and 64 bits hold 584 years.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
