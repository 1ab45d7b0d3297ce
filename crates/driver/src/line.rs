//! The header of a request, and the status or the fixed part of its response, lie in one cache line. So the line moves
//! to the device's core and back once for a request. It contains no other request's status, so no write of the device
//! takes it away while the driver reads it.

use mqblk_memory::{Pod, SharedArray};
use mqblk_ring::driver_ring::DriverRing;

/// Bytes of a cache line.
pub(crate) const LINE: u32 = 64;

/// Number of lines that are transferred from the device's core at the same time: about a core's reads in flight.
const PREFETCHED: u16 = 8;

/// Prefetches the lines of the first completions that a poll has found. `index`: of a slot's status in `statuses`.
#[inline]
pub(crate) fn prefetch_found<T: Pod>(
    (ring, statuses): (&DriverRing, &SharedArray<T>),
    found: u16,
    index: impl Fn(usize) -> usize,
) {
    (0..found.min(PREFETCHED)).for_each(|ahead| prefetch((ring, statuses), ahead, &index));
}

/// Prefetches the line of a later completion, when the next one is taken.
#[inline]
pub(crate) fn prefetch_later<T: Pod>(of: (&DriverRing, &SharedArray<T>), index: impl Fn(usize) -> usize) {
    prefetch(of, PREFETCHED, &index);
}

#[inline]
fn prefetch<T: Pod>((ring, statuses): (&DriverRing, &SharedArray<T>), ahead: u16, index: &impl Fn(usize) -> usize) {
    if let Some(slot) = ring.upcoming(ahead) {
        statuses.prefetch(index(slot as usize));
    }
}
