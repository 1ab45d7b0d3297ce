//! The virtio-scsi device: a controller whose logical units are hot-plugged. Source: virtio 1.3 section 5.6, "SCSI
//! Host Device".
//!
//! `device` is the controller and `virtio_device` its transport interface, `config` its configuration space, `lun_map`
//! its logical units, `request_chain` the parser from descriptor chain to command, `request_queue` a request queue and
//! `token` its commands in flight, `control` the control queue, `task_management` the path of task management functions
//! to the request queues, `events` the event queue, `queue` one of the three for the transport. `replay_gate` is the
//! order of commands after a crash, `state` moves with a migrating guest.
//!
//! `mqblk-scsi` implements the commands. This crate knows no storage: a logical unit is a nexus and the engine's slot
//! of its disk.
#![forbid(unsafe_code)]

mod config;
mod control;
mod device;
mod events;
mod lun_map;
mod queue;
mod queue_ring;
mod replay_gate;
mod request_chain;
mod request_queue;
mod state;
mod task_management;
mod token;
mod virtio_device;

pub use config::features;
pub use device::{FIXED_QUEUES, ScsiOptions, VirtioScsi};
pub use lun_map::{LunAddress, LunInUse};
pub use queue::ScsiQueue;
pub use token::ScsiToken;
