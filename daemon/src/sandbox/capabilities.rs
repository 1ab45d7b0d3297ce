//! Capabilities (capabilities(7)) that are kept.

use std::io;

use mqblk_core::thread_role::ThreadRole;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Kept by the daemon, if it has it: images of other users are opened by root's daemon (`CAP_DAC_OVERRIDE`; which ones is limited by
/// landlock), locked memory is not counted against the limit of the user (`CAP_IPC_LOCK`, `CAP_SYS_RESOURCE`).
const KEPT: CapabilitySet =
    CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::IPC_LOCK).union(CapabilitySet::SYS_RESOURCE);
/// Kept by threads that open nothing.
const KEPT_BY_SERVERS: CapabilitySet = CapabilitySet::IPC_LOCK;

/// Gives up what the daemon does not need, for the calling thread and those that it starts.
pub(super) fn drop_unneeded() -> io::Result<()> {
    keep(KEPT)
}

/// Gives up what a thread of this role does not need.
pub(super) fn drop_for(role: ThreadRole) -> io::Result<()> {
    match role {
        ThreadRole::Worker | ThreadRole::Storage => keep(KEPT_BY_SERVERS),
        ThreadRole::Connector => keep(KEPT),
    }
}

fn keep(kept: CapabilitySet) -> io::Result<()> {
    let now = capabilities(None)?;
    let sets = CapabilitySets {
        effective: now.effective & kept,
        permitted: now.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}
