//! Userspace drivers: the other end of each guest interface, in this process.
//!
//! `virtio_blk/` drives any vhost-user-blk server, `virtio_scsi/` any vhost-user-scsi server: many queues, each owned by one
//! thread. What they have in common: `setup` (shared memory and rings), `calls` (waiting), `error`. `blkfront/` is the frontend of
//! Xen's block interface, over grants and event channels, real or simulated.
#![forbid(unsafe_code)]

pub mod blkfront;
mod call_event;
mod error;
#[cfg(any(test, feature = "model"))]
mod model;
mod setup;
pub mod virtio_blk;
pub mod virtio_scsi;

pub use call_event::Waker;
pub use error::{DeviceError, DriverError, SubmitError};
pub use setup::{DataSegment, DescriptorLayout};
