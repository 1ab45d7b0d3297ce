//! Static properties of a command.

use crate::block_limits::BlockLimits;
use crate::context::{BeginResult, CommandContext};
use crate::reservation::AccessClass;

/// NACA, in the CONTROL byte that ends every command. Source: SAM-5 section 5.2.
pub(crate) const NACA: u8 = 0x04;

/// Commands that are executed while a unit attention is pending. Source: SAM-5 section 5.14.
pub(crate) const ALLOWED_BEFORE_ATTENTIONS: [u8; 3] = [0x03, 0x12, 0xa0];

/// State of the medium that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MediumState {
    /// Any.
    Any,
    /// The logical unit is not stopped.
    Ready,
    /// The logical unit is neither stopped nor write protected.
    Writable,
}

/// A supported command.
pub(crate) struct OpcodeRow {
    /// SERVICE ACTION, if the operation code has several commands.
    pub(crate) service_action: Option<u16>,
    /// CDB usage data: the operation code, the service action in its place, and a one for every other evaluated bit.
    /// Its length is the CDB's. Source: SPC-4 section 6.34.3.
    pub(crate) cdb_usage: &'static [u8],
    pub(crate) access: AccessClass,
    pub(crate) medium: MediumState,
    pub(crate) handler: Handler,
}

impl OpcodeRow {
    pub(crate) const fn opcode(&self) -> u8 {
        self.cdb_usage[0]
    }

    /// Returns true if a logical unit with these limits supports the command.
    pub(crate) fn is_supported(&self, limits: &BlockLimits) -> bool {
        match self.opcode() {
            0x42 => limits.unmap.is_some(),
            0x89 => limits.max_compare_and_write > 0,
            _ => true,
        }
    }
}

/// Executes a command, or begins it.
pub(crate) type Handler = fn(&mut CommandContext<'_>) -> BeginResult;
