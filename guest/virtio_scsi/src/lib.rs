//! The virtio-scsi device: a controller whose logical units are hot-plugged. Source: virtio 1.3 section 5.6, "SCSI
//! Host Device".
//!
//! `device` is the controller as a transport sees it, `config` its configuration space, `lun_map` its logical units,
//! `request_chain` the parser from descriptor chain to command, `commands` a request queue, `multi_step` its
//! multi-step commands, `control` the control queue, `task_management` the path of task management functions to the
//! request queues, `events` the event queue, `replay_gate` the order of commands after a crash, `state` the state that
//! moves with a guest that is migrated.
//!
//! `mqblk-scsi` implements the commands. This crate knows no storage: a logical unit is a nexus and the engine's slot
//! of its disk.
#![forbid(unsafe_code)]

mod commands;
mod config;
mod control;
mod device;
mod events;
mod lun_map;
mod multi_step;
mod queue;
mod replay_gate;
mod request_chain;
mod state;
mod task_management;
mod transfer;

pub use config::features;
pub use device::{FIXED_QUEUES, ScsiOptions, VirtioScsi};
pub use lun_map::{LunAddress, LunInUse};
pub use queue::{ScsiQueue, ScsiToken};
