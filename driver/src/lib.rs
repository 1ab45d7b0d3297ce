//! Userspace drivers: the other end of each guest interface, in this process.
//!
//! `virtio_blk/` drives any vhost-user-blk server, `virtio_scsi/` any vhost-user-scsi server: many queues, each owned by one
//! thread. What they have in common: `setup` (shared memory and rings), `calls` (waiting), `error`.
#![forbid(unsafe_code)]

mod calls;
mod error;
#[cfg(any(test, feature = "model"))]
mod model;
mod setup;
pub mod virtio_blk;
pub mod virtio_scsi;

pub use calls::Waker;
pub use error::DriverError;
pub use mqblk_ring::split::driver::{DeviceError, Refused};
pub use setup::{Piece, ShapeChoice};
