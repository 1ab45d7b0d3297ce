//! The split virtqueue. Source: virtio 1.3 section 2.7, "Split Virtqueues".

pub mod device;
pub mod driver;
pub mod inflight;
pub mod layout;
mod log;

pub use device::{DeviceRing, SplitState, VirtqueueError};
pub use driver::SplitDriver;
pub use inflight::{InflightError, InflightTable, Replay};
pub use layout::{Descriptor, SplitAddresses, SplitRing, SplitSetupError};
pub use log::RingLog;
