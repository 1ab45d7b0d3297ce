//! xenstored: the database and its server. Source: Xen's `docs/misc/xenstore.txt` and `public/io/xs_wire.h`.
//!
//! Each domain has a socket of its own, in place of the shared page that a real one has, so the server knows who asks. What a
//! domain may is what a real xenstored lets it: permissions of each node (a missing node is as its nearest one above), new nodes
//! inherit and belong to who makes them, domain 0 may do all. A transaction sees the database as it was when it began; its commit
//! fails with `EAGAIN` if anybody has changed a node since that it has looked at or changed.
//!
//! Not there: what only a toolstack asks of a real one (INTRODUCE, RELEASE, RESUME, SET_TARGET, CONTROL). The machine's own
//! functions stand for those; the request is answered `ENOSYS`.

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

/// Where a domain's programs reach xenstored.
pub(super) fn socket(folder: &Path, domain: DomainId) -> PathBuf {
    match domain {
        DomainId(0) => folder.join("xenstored.sock"),
        DomainId(number) => folder.join(format!("xenstored-{number}.sock")),
    }
}

/// What a domain other than 0 may have. The defaults are those of Xen 4.17.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// Nodes that it owns.
    pub nodes: u32,
    /// Watches of all its connections.
    pub watches: usize,
    /// Transactions at once, for each connection.
    pub transactions: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Permissions of a node.
    pub permissions: usize,
    /// Nodes that one transaction looks at or changes, and changes that it makes.
    pub transaction_nodes: usize,
}

impl Default for Quota {
    fn default() -> Quota {
        Quota {
            nodes: 1000,
            watches: 128,
            transactions: 10,
            value_bytes: 2048,
            permissions: 5,
            transaction_nodes: 1024,
        }
    }
}

/// Why a request is refused. Source: `xsd_errors` of `xs_wire.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
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

impl Refusal {
    fn name(self) -> &'static str {
        match self {
            Refusal::Invalid => "EINVAL",
            Refusal::Access => "EACCES",
            Refusal::Exists => "EEXIST",
            Refusal::NoEntry => "ENOENT",
            Refusal::NoSpace => "ENOSPC",
            Refusal::Unknown => "ENOSYS",
            Refusal::Busy => "EBUSY",
            Refusal::Again => "EAGAIN",
            Refusal::TooBig => "E2BIG",
            Refusal::NotPermitted => "EPERM",
        }
    }
}
