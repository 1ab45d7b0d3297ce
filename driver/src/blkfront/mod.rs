//! A frontend of Xen's block interface. Source: Xen's `public/io/blkif.h`; what it accepts of a back-end is what Linux's
//! `xen-blkfront` accepts.
//!
//! ```text
//! Device::connect  ->  QueueSet (one for each thread)  ->  Queue: read, write, ... publish, look, reap
//! ```
//!
//! A request's data lies in pages that are granted to the back-end's domain for as long as the device is connected: each queue
//! has a stretch of them ([`Queue::data`]), and nothing is copied. A back-end that keeps pages mapped knows them by queue and
//! grant, so a queue's requests should use its own stretch, and of that what was used last.

mod bus;
mod device;
#[cfg(test)]
mod device_tests;
mod keys;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod outstanding;
mod queue;
#[cfg(test)]
mod queue_tests;
#[cfg(any(test, feature = "model"))]
pub mod raw;
mod segments;
mod set;
pub mod toolstack;

pub use bus::Lifeline;
pub use device::{Change, Device, Options};
pub use keys::{Discard, Info};
pub use mqblk_ring::blkif::Abi;
pub use outstanding::{Completion, ResponseError, Status};
pub use queue::Queue;
pub use set::QueueSet;
