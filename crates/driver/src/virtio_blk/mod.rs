//! A virtio-blk driver over vhost-user. Source: virtio 1.3 section 5.2, "Block Device".
//!
//! ```text
//! BlkDevice::connect  ->  BlkQueueSet (one for each thread)  ->  BlkQueue: read, write, ... publish, poll, reap
//! ```
//!
//! A request's data lies in memory that both sides map. Each queue has an area of it ([`BlkQueue::data`]), but any
//! queue may use any of it. [`GuestMemory`](mqblk_memory::GuestMemory) copies data in and out.

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
pub use wire::SectorRange;
