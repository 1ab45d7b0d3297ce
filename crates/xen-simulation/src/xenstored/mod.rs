//! Simulated xenstored: the database and its server. Source: Xen's `docs/misc/xenstore.txt` and `public/io/xs_wire.h`.
//!
//! Each domain has its own socket in place of the shared page of a real one, so the server knows the domain of each
//! request. Permissions are those of a real xenstored: each node has a list (a missing node has that of its nearest
//! existing parent), a new node inherits the list and belongs to its creator, domain 0 may do everything. A transaction
//! sees the database as it was at its start; its commit fails with `EAGAIN` if a node that it has accessed has changed
//! since.
//!
//! Not implemented: the requests of a toolstack (INTRODUCE, RELEASE, RESUME, SET_TARGET, CONTROL), which fail with
//! `ENOSYS`. The machine's methods replace them.

mod server;
mod state;
#[cfg(test)]
mod tests;
mod transaction;
mod tree;
mod watches;

use std::path::{Path, PathBuf};

use mqblk_memory::DomainId;

pub(super) use server::Xenstored;

/// Returns the xenstored socket of a domain.
pub(super) fn socket_path(folder: &Path, domain: DomainId) -> PathBuf {
    match domain {
        DomainId(0) => folder.join("xenstored.sock"),
        DomainId(number) => folder.join(format!("xenstored-{number}.sock")),
    }
}

/// Quota of a domain other than 0. The defaults are those of Xen 4.17.
#[derive(Clone, Copy, Debug)]
pub struct XenstoreQuota {
    /// Nodes that it owns.
    pub nodes: u32,
    /// Watches of all its connections together.
    pub watches: usize,
    /// Concurrent transactions per connection.
    pub transactions: usize,
    /// Bytes per value.
    pub value_bytes: usize,
    /// Permission entries per node.
    pub permissions: usize,
    /// Nodes that one transaction accesses, and changes that it makes.
    pub transaction_nodes: usize,
}

impl Default for XenstoreQuota {
    fn default() -> XenstoreQuota {
        XenstoreQuota {
            nodes: 1000,
            watches: 128,
            transactions: 10,
            value_bytes: 2048,
            permissions: 5,
            transaction_nodes: 1024,
        }
    }
}

/// Errno of an error reply. Source: `xsd_errors` of `xs_wire.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum XsdError {
    Invalid,
    Access,
    Exists,
    NoEntry,
    NoSpace,
    /// No such request.
    Unknown,
    Busy,
    Again,
    TooBig,
    NotPermitted,
}

impl XsdError {
    fn name(self) -> &'static str {
        match self {
            XsdError::Invalid => "EINVAL",
            XsdError::Access => "EACCES",
            XsdError::Exists => "EEXIST",
            XsdError::NoEntry => "ENOENT",
            XsdError::NoSpace => "ENOSPC",
            XsdError::Unknown => "ENOSYS",
            XsdError::Busy => "EBUSY",
            XsdError::Again => "EAGAIN",
            XsdError::TooBig => "E2BIG",
            XsdError::NotPermitted => "EPERM",
        }
    }
}
