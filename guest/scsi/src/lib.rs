//! SCSI block commands: parses a command descriptor block for a logical unit and returns the disk requests, or the
//! status and sense data, that it leads to. The crate knows no transport and does no I/O: commands come in as bytes,
//! requests to the disk go out as [`CommandAction`]s, and the caller passes outcomes back in. Sources: SAM-5, SPC-4,
//! SBC-3 (T10).
//!
//! `logical_unit` is a logical unit and its state, `nexus` an I_T_L nexus (unit attentions, reservations), `target`
//! the responses for LUNs without a logical unit, `sense` status and sense data, `command` what a command asks of its
//! caller. `opcode_table` has a row for each command; `commands` executes them. `unit_state` is the state that moves with an
//! initiator that is migrated.
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
