//! A virtio device as a guest's driver sees it.

use std::sync::Arc;

use crate::hostile::memory::SharedMemory;
use crate::hostile::ring::RingAddresses;

/// A virtio device over some transport. A method that the device or its VMM refuses panics.
pub trait Device {
    /// Returns the guest's memory.
    fn memory(&self) -> Arc<SharedMemory>;

    /// Returns the offered feature bits.
    fn offered(&mut self) -> u64;

    /// Returns `len` bytes of the configuration space.
    fn config(&mut self, offset: u32, len: u32) -> Vec<u8>;

    /// Accepts feature bits and starts a queue of `size` entries at each of the rings, which are zero.
    fn start(&mut self, accepted: u64, rings: &[RingAddresses], size: u16);

    /// Notifies the device of available requests.
    fn notify(&mut self, queue: u16);

    /// Resets the device. No request is in flight afterwards.
    fn reset(&mut self);
}
