//! Userspace drivers: the frontends of all guest interfaces.
//!
//! `virtio_blk/` drives a vhost-user-blk server, `virtio_scsi/` a vhost-user-scsi server. Both have many queues, each
//! owned by one thread, and share `setup` (shared memory and rings), `call_event` (waiting), `line` (a request's cache
//! line) and `error`. `blkfront/` is the frontend of Xen's block interface, over real or simulated grants and event
//! channels.
#![forbid(unsafe_code)]

pub mod blkfront;
mod call_event;
mod error;
mod line;
#[cfg(any(test, feature = "model"))]
mod model;
mod setup;
mod sleep_timer;
pub mod virtio_blk;
pub mod virtio_scsi;

pub use call_event::Waker;
pub use error::{DeviceError, DriverError, SubmitError};
pub use setup::{DataSegment, DescriptorLayout};
