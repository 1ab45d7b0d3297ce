//! The packed virtqueue. Source: virtio 1.3 section 2.8, "Packed Virtqueues".
//!
//! One ring of descriptors is written by both ends: the driver makes a descriptor available in its slot, the device
//! later writes a used descriptor over a slot that it has read. Both go through the ring in order, and each has a wrap
//! counter, which distinguishes descriptors of this lap from those of the lap before.

mod chain;
mod device;
pub mod driver;
pub mod inflight;
pub mod layout;
mod log;
pub mod position;
pub mod suppression;

pub use device::PackedDevice;
pub use driver::PackedDriver;
pub use inflight::PackedInflight;
pub use layout::PackedRing;
pub use position::Position;
