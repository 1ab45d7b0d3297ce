//! A frontend of Xen's block interface. Source: Xen's `public/io/blkif.h`. It accepts the same backends as Linux's
//! `xen-blkfront`.
//!
//! ```text
//! BlkfrontDevice::connect  ->  BlkfrontQueueSet (one for each thread)  ->  BlkfrontQueue: read, write, ... publish, poll, reap
//! ```
//!
//! A request's data lies in pages that are granted to the backend's domain as long as the device is connected. Each
//! queue has an area of them ([`BlkfrontQueue::data`]), and nothing is copied. A backend with persistent grants caches
//! pages by queue and grant, so a queue's requests should use its own area, and reuse the pages used last.

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

pub use crate::error::ResponseError;
pub use device::{BlkfrontDevice, BlkfrontOptions, DeviceChange};
pub use keys::{BlkfrontInfo, DiscardInfo};
pub use mqblk_ring::blkif::Abi;
pub use queue::BlkfrontQueue;
pub use set::BlkfrontQueueSet;
pub use shadow::{BlkfrontCompletion, BlkfrontStatus};
pub use xenbus::BackendMonitor;
