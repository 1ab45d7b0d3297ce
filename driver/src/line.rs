//! What a driver and a device exchange for a request lies in one cache line: the header, and the status or the fixed part of a response. So the line
//! goes to the device's core and back once for a request, and no other request's status is in it: a device that writes that one takes the line away
//! while the driver reads this one.

use mqblk_memory::{Pod, SharedArray};
use mqblk_ring::driver_ring::DriverRing;

/// Bytes of a cache line.
pub(crate) const LINE: u32 = 64;

/// This many lines are on their way from the device's core at the same time: about as many as a core has reads in flight.
const PREFETCHED: u16 = 8;

/// A poll has found completions: the lines of the first ones are prefetched. `index`: of a slot's status in `statuses`.
#[inline]
pub(crate) fn prefetch_found<T: Pod>(
    (ring, statuses): (&DriverRing, &SharedArray<T>),
    found: u16,
    index: impl Fn(usize) -> usize,
) {
    (0..found.min(PREFETCHED)).for_each(|ahead| prefetch((ring, statuses), ahead, &index));
}

/// The next completion is taken: the line of a later one is prefetched.
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
