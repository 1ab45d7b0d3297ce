//! The virtio-scsi personality: a controller whose logical units may come and go. Source: virtio 1.3 section 5.6, "SCSI Host
//! Device".
//!
//! `device` is the controller as a transport sees it, `config` its configuration space, `units` which unit is where, `element`
//! the parser from descriptor chain to command, `commands` a request queue, `sequences` its commands of several steps, `control`
//! the control queue, `orders` how task management reaches the request queues, `events` the event
//! queue, `resuming` what goes first after a crash, `state` what travels with a guest that is migrated.
//!
//! Commands themselves are `mqblk-scsi`'s. This crate knows no storage: a unit is a nexus and the engine's name for its disk.
#![forbid(unsafe_code)]

mod commands;
mod config;
mod control;
mod device;
mod element;
mod events;
mod orders;
mod queue;
mod resuming;
mod sequences;
mod state;
mod units;

pub use config::features;
pub use device::{FIXED_QUEUES, ScsiOptions, VirtioScsi};
pub use queue::{ScsiQueue, ScsiToken};
pub use units::{Place, PlaceTaken};
