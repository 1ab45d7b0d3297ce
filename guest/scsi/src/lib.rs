//! SCSI block commands: what a command descriptor block asks of a logical unit, and what is answered. Knows no transport and
//! does no I/O: commands come as bytes, requests to the disk go out as [`Step`]s, and whoever drives a command brings the
//! outcome back. Sources: SAM-5, SPC-4, SBC-3 (T10).
//!
//! `unit` is a logical unit with its state, `nexus` one initiator's way to it (unit attentions, reservations), `target` what is
//! said where no unit is, `sense` what is said when a command fails, `step` what a command asks of its driver. `table` has a
//! row for each command; `commands` is what they do. `carried` is what goes with an initiator that is migrated.
#![forbid(unsafe_code)]

mod ask;
pub mod atomic;
pub mod attention;
mod bounds;
mod carried;
mod cdb;
mod commands;
mod nexus;
pub mod reservation;
pub mod sense;
mod sequence;
pub mod step;
mod table;
pub mod target;
mod unit;

pub use attention::Attention;
pub use carried::{ApplyUnit, UnitState};
pub use nexus::{Nexus, TaskSet};
pub use sense::{Sense, SenseKey, Status};
pub use sequence::Sequence;
pub use step::{Command, DataOut, Ending, Next, Step, Work};
pub use unit::{Identity, LogicalUnit, UnitOptions};
