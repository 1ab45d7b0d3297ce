//! The virtio-blk device type. Source: virtio 1.3 section 5.2, "Block Device".
//!
//! `device` is the device as a transport sees it, `config` its configuration space, `queue` a request queue over a ring, `request` the
//! parser from descriptor chain to request, `state` the migration state.
#![forbid(unsafe_code)]

mod config;
mod device;
mod queue;
mod request;
mod state;

pub use config::{ConfigSpace, features};
pub use device::{BlkOptions, VirtioBlk};
pub use queue::BlkQueue;
