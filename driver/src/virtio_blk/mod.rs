//! A virtio-blk driver over vhost-user. Source: virtio 1.3 section 5.2, "Block Device".
//!
//! ```text
//! Device::connect  ->  QueueSet (one for each thread)  ->  Queue: read, write, ... publish, look, reap
//! ```
//!
//! A request's data lies in memory that both sides map: each queue has a stretch of it ([`Queue::data`]), and any queue may
//! use any of it. It is copied in and out by [`GuestMemory`](mqblk_memory::GuestMemory).

mod device;
mod layout;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod queue;
#[cfg(test)]
mod tests;
mod wire;

pub use crate::{DataSegment, DescriptorLayout, DeviceError, DriverError, SubmitError, Waker};
pub use device::{BlkConnectOptions, BlkDevice, BlkInfo};
pub use queue::{BlkCompletion, BlkQueue, BlkQueueSet, BlkStatus};
pub use wire::{MAX_RANGES, SectorRange};
