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

mod outstanding;
mod queue;
mod segments;
mod set;
#[cfg(test)]
mod tests;

pub use outstanding::{Completion, ResponseError, Status};
pub use queue::Queue;
pub use set::QueueSet;
