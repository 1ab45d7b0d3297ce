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

mod answer;
mod cdb;
mod command;
mod control;
mod device;
pub mod handover;
mod inquiry;
mod layout;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod queue;
mod scan;
mod set;
pub mod steering;
#[cfg(test)]
mod tests;
mod wire;

pub use answer::{Ending, Sense};
pub use cdb::{Cdb, Extent, Lba, unmap_bytes};
pub use command::{Command, Data, MAX_EXTENTS};
pub use control::{Control, TaskDone};
pub use device::{Device, Info, Options};
pub use inquiry::{Designator, Limits, Unit};
pub use queue::{Completion, Queue};
pub use set::{QueueSet, Steer};
pub use wire::{Address, CDB_BYTES, Config, Event, EventKind, Response, SENSE_BYTES, TaskAnswer, TaskManagement};
