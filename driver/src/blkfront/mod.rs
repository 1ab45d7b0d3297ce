//! A frontend of Xen's block interface. Source: Xen's `public/io/blkif.h`; what it accepts of a backend is what Linux's
//! `xen-blkfront` accepts.
//!
//! ```text
//! Device::connect  ->  QueueSet (one for each thread)  ->  Queue: read, write, ... publish, look, reap
//! ```
//!
//! A request's data lies in pages that are granted to the backend's domain for as long as the device is connected: each queue
//! has a stretch of them ([`Queue::data`]), and nothing is copied. A backend that keeps pages mapped knows them by queue and
//! grant, so a queue's requests should use its own stretch, and of that what was used last.

mod device;
#[cfg(test)]
mod device_tests;
mod keys;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod queue;
#[cfg(test)]
mod queue_tests;
#[cfg(any(test, feature = "model"))]
pub mod raw;
mod segments;
mod set;
mod shadow;
pub mod toolstack;
mod xenbus;

pub use device::{BlkfrontDevice, BlkfrontOptions, DeviceChange};
pub use keys::{BlkfrontInfo, DiscardInfo};
pub use mqblk_ring::blkif::Abi;
pub use queue::BlkfrontQueue;
pub use set::BlkfrontQueueSet;
pub use shadow::{BlkfrontCompletion, BlkfrontStatus, ResponseError};
pub use xenbus::BackendMonitor;
