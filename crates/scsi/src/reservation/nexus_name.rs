//! Names of I_T nexuses.

use std::fmt;
use std::sync::Arc;

use super::transport_id::locally_assigned;

/// Maximum length of the name of an initiator port, in bytes.
pub const MAX_NAME_LEN: usize = 255;

/// Name of an I_T nexus: an initiator port and a target port. Registrations are stored by it, so it must be the same
/// after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NexusName {
    /// Name of the initiator port; its SAS address in TransportIDs is made from it ([`locally_assigned`]).
    pub initiator: Arc<str>,
    /// Relative target port identifier.
    pub port: u16,
}

impl NexusName {
    pub(super) fn address(&self) -> u64 {
        locally_assigned(&self.initiator)
    }
}

impl fmt::Display for NexusName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}", self.initiator, self.port)
    }
}
