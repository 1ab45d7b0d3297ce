//! The virtio-blk device type. Source: virtio 1.3 section 5.2, "Block Device".
//!
//! `device` has the device's state, `virtio_device` shows it to a transport, `config` is its configuration space,
//! `queue` a request queue over a ring, `request` the parser from descriptor chain to request, `state` the migration
//! state.
#![forbid(unsafe_code)]

mod config;
mod device;
mod queue;
mod request;
mod state;
mod virtio_device;

pub use config::{ConfigSpace, features};
pub use device::{BlkOptions, VirtioBlk};
pub use queue::BlkQueue;
