//! SCSI block commands: parses a command descriptor block for a logical unit and returns the resulting disk requests,
//! or status and sense data. The crate knows no transport and does no I/O: commands come in as bytes, requests to the
//! disk go out as [`CommandAction`]s, and the caller passes outcomes back in. Sources: SAM-5, SPC-4, SBC-3 (T10).
//!
//! `logical_unit` is a logical unit with its I_T_L nexuses, `target` the responses for LUNs without one, `sense` status
//! and sense data, `command` the interface to the caller and `action` a command's first request to it. A command begins
//! in `begin`: in `transfer` if it is a usual READ or WRITE, else by its row (`opcode`) of `opcode_table` and a handler
//! of `commands`. `unit_state` moves with a migrating initiator.
#![forbid(unsafe_code)]

mod action;
mod begin;
mod block_limits;
mod cdb;
pub mod command;
mod commands;
mod context;
mod logical_unit;
mod multi_step;
mod opcode;
mod opcode_table;
pub mod range_lock;
pub mod reservation;
pub mod sense;
pub mod target;
mod transfer;
pub mod unit_attention;
mod unit_state;

pub use action::CommandAction;
pub use command::{Command, CommandBuffers, CommandCompletion, DataOut, NextStep};
pub use logical_unit::{Identity, LogicalUnit, LogicalUnitOptions, Nexus, TaskSet};
pub use multi_step::MultiStepCommand;
pub use sense::{Sense, SenseKey, Status};
pub use transfer::{Transfer, TransferRules};
pub use unit_attention::UnitAttention;
pub use unit_state::{UnitState, ValidatedUnitState};
