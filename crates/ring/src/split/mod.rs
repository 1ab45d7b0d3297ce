//! The split virtqueue. Source: virtio 1.3 section 2.7, "Split Virtqueues".

mod chain;
mod device;
pub mod driver;
pub mod inflight;
pub mod layout;
mod log;

pub use device::SplitDevice;
pub use driver::SplitDriver;
pub use inflight::{InflightError, InflightTable, Replay};
pub use layout::SplitRing;
pub use log::RingLog;
