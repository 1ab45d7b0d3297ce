//! A simulated Xen without a hypervisor: a [`Machine`] in a folder, and programs that [`connect`] to it from the same
//! or other processes, each as a program of a given domain.
//!
//! * xenstore uses its real wire protocol on `xenstored.sock` (domain 0) and `xenstored-N.sock` (domain N), with real
//!   permissions, transactions, watches and quotas.
//! * Grants: each domain has memory and a grant table, both memfds. A program copies by itself, without the machine;
//!   the machine makes mappings, and ends them with the program's connection.
//! * Event channels: eventfds, and a pending and a masked bit for each direction. A closed end can be bound again.
//!
//! It simulates the interface with its checks and failures, so that both ends of a block device can be tested and
//! measured without Xen. It provides no isolation: a connected program could read any domain's memory. It is a crate of
//! its own, which neither the daemon's crates nor those of a real Xen depend on.
#![forbid(unsafe_code)]

mod channels;
mod client;
mod domain;
mod events;
mod foreign_domains;
mod grants;
mod hypercall;
mod hypervisor;
mod machine;
mod range_allocator;
mod shared_memory;
mod stats;
#[cfg(test)]
mod tests;
mod xenstored;

pub use client::connect;
pub use machine::{DomainStats, Machine};
pub use stats::{DomainLimits, MachineStats};
pub use xenstored::XenstoreQuota;

use std::path::Path;
use std::sync::Arc;

use mqblk_memory::DomainId;
use mqblk_xen::{Xen, XenError};

/// Connects to the simulated machine in a folder as a program in domain 0. See [`connect`] for other domains.
///
/// # Errors
/// When no machine runs there.
pub fn connect_dom0(folder: &Path) -> Result<Arc<dyn Xen>, XenError> {
    connect(folder, DomainId(0))
}
