//! A ring of the controller.

use mqblk_core::Call;
use mqblk_memory::MemoryShare;
use mqblk_ring::virtqueue::DeviceRing;

/// A ring with its memory and call.
pub(crate) struct QueueRing {
    pub(crate) device: DeviceRing,
    pub(crate) share: MemoryShare,
    pub(crate) call: Option<Box<dyn Call>>,
}
