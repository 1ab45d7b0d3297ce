//! Capabilities (capabilities(7)) that are kept.

use std::io;

use mqblk_core::thread_role::ThreadRole;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Kept by the daemon if it has them: its locked memory is not counted against the user's limit.
pub(crate) const KEPT_CAPABILITIES: CapabilitySet = CapabilitySet::IPC_LOCK.union(CapabilitySet::SYS_RESOURCE);
/// Also kept by root's daemon if it has to open files of other users itself.
pub(crate) const OTHER_USERS_FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE;
/// Kept by threads that open nothing.
const KEPT_BY_SERVERS: CapabilitySet = CapabilitySet::IPC_LOCK;

/// Gives up the capabilities that a thread of this role does not need.
pub(crate) fn drop_for(role: ThreadRole) -> io::Result<()> {
    match role {
        ThreadRole::Worker | ThreadRole::Storage | ThreadRole::RingMaker => keep(KEPT_BY_SERVERS),
        ThreadRole::Connector => keep(KEPT_CAPABILITIES),
        ThreadRole::Network | ThreadRole::Metrics => keep(CapabilitySet::empty()),
    }
}

/// Gives up all others, for the calling thread and the threads that it starts.
pub(crate) fn keep(kept: CapabilitySet) -> io::Result<()> {
    let now = capabilities(None)?;
    let sets = CapabilitySets {
        effective: now.effective & kept,
        permitted: now.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// Gives up all others, and makes these effective as far as they are permitted: a change of the user has made them
/// ineffective.
pub(crate) fn keep_and_use(kept: CapabilitySet) -> io::Result<()> {
    keep(kept)?;
    use_only(kept)
}

/// Makes only these effective in the calling thread. The others stay permitted.
pub(crate) fn use_only(used: CapabilitySet) -> io::Result<()> {
    let now = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { effective: now.permitted & used, ..now })?)
}
