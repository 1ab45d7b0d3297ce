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

mod block_limits;
mod cdb;
pub mod command;
mod commands;
mod context;
mod logical_unit;
mod multi_step;
mod nexus;
mod opcode_table;
pub mod range_lock;
pub mod reservation;
pub mod sense;
pub mod target;
pub mod unit_attention;
mod unit_state;

pub use command::{Command, CommandAction, CommandBuffers, CommandCompletion, DataOut, NextStep};
pub use logical_unit::{Identity, LogicalUnit, LogicalUnitOptions};
pub use multi_step::MultiStepCommand;
pub use nexus::{Nexus, TaskSet, Transfer, TransferRules};
pub use sense::{Sense, SenseKey, Status};
pub use unit_attention::UnitAttention;
pub use unit_state::{UnitState, ValidatedUnitState};
