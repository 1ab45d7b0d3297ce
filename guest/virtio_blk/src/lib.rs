//! The virtio-blk personality: what a ring element means. Source: virtio 1.3 section 5.2, "Block Device".
//!
//! `device` is the device as a transport sees it, `config` its configuration space, `queue` a request queue over a ring,
//! `request` the parser from descriptor chain to request, `state` what travels with a guest that is migrated.
#![forbid(unsafe_code)]

mod config;
mod device;
mod queue;
mod request;
mod state;

pub use config::{ConfigSpace, features};
pub use device::{BlkOptions, VirtioBlk};
pub use queue::BlkQueue;
