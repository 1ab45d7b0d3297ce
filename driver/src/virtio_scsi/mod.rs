//! A virtio-scsi driver over vhost-user. Source: virtio 1.3 section 5.6, "SCSI Host Device".
//!
//! ```text
//! Device::connect  ->  QueueSet (one for each thread): submit, publish, look, reap, collect, arrived
//!                  ->  Control: task management, events
//! Device::scan     ->  Unit (one for each logical unit): address, size, serial, limits
//! ```
//!
//! A command goes to a [`Unit`]'s address; which queue it is put on, [`Steer`] decides (`steering`), and where that queue is
//! another thread's, the command is handed over (`handover`). Every answer is judged: response, status, residual and sense data
//! make one [`Ending`].

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

pub use cdb::{Cdb, Extent, Lba, unmap_bytes};
pub use command::{Command, CommandData, MAX_EXTENTS};
pub use control::{ControlQueues, TaskCompletion};
pub use device::{ControllerInfo, ScsiConnectOptions, ScsiController};
pub use inquiry::{BlockLimits, Designator, LogicalUnit};
pub use outcome::{CommandOutcome, Sense};
pub use queue::{ScsiCompletion, ScsiQueue};
pub use set::{ScsiQueueSet, SteeringPolicy};
pub use wire::{
    CDB_BYTES, CommandResponse, LunAddress, SENSE_BYTES, ScsiConfig, ScsiEvent, ScsiEventKind, TaskManagementFunction,
    TaskManagementResponse,
};
