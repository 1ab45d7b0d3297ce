//! A virtio-scsi driver over vhost-user. Source: virtio 1.3 section 5.6, "SCSI Host Device".
//!
//! ```text
//! ScsiController::connect  ->  ScsiQueueSet (one for each thread): submit, publish, poll, reap, receive, reap_received
//!                          ->  ControlQueues: task management, events
//! ScsiController::scan     ->  LogicalUnit (one for each): address, size, serial, limits
//! ```
//!
//! A command has the address of a [`LogicalUnit`]. The [`SteeringPolicy`] selects its queue (`steering`). If another
//! thread owns that queue, the command is handed over (`handover`). Response, status, residual and sense data are
//! checked and make one [`CommandOutcome`].

mod cdb;
mod command;
mod control;
mod device;
pub mod handover;
mod inquiry;
mod layout;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod outcome;
mod queue;
mod scan;
mod set;
pub mod steering;
#[cfg(test)]
mod tests;
mod wire;

pub use cdb::{Cdb, Extent, Lba};
pub use command::{Command, CommandData};
pub use control::{ControlQueues, TaskCompletion};
pub use device::{ControllerInfo, ScsiConnectOptions, ScsiController};
pub use inquiry::{BlockLimits, Designator, LogicalUnit};
pub use outcome::{CommandOutcome, Sense};
pub use queue::{ScsiCompletion, ScsiQueue};
pub use set::{ScsiQueueSet, SteeringPolicy};
pub use wire::{
    CommandResponse, LunAddress, ScsiConfig, ScsiEvent, ScsiEventKind, TaskManagementFunction, TaskManagementResponse,
};
