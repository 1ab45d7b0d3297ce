//! The Xen interfaces that a program in a domain uses: xenstore, grants, event channels. The trait [`Xen`] is a Xen
//! host; [`connect_real`] is the machine's own, through xenstored and the kernel's device nodes.
//! `crates/xen-simulation` is another one.
#![forbid(unsafe_code)]

mod real;
pub mod store;
pub mod vbd;

pub use real::connect_real;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_core::EventChannel;
use mqblk_memory::{DomainId, GrantAccess, GrantRef, GuestMemory};

/// An event channel port (`evtchn_port_t`), local to its domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port(pub u32);

/// A failed operation.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct XenError {
    /// The operation: the node or socket, and the domain.
    pub what: String,
    /// The system's error.
    pub source: std::io::Error,
}

/// The local end of an event channel. The port is closed when both the channel and the descriptor are dropped.
pub struct EventPort {
    /// The local port. The remote domain binds to it if it was [allocated](Xen::alloc_unbound).
    pub port: Port,
    /// The channel, for the worker that serves the ring.
    pub channel: Box<dyn EventChannel>,
    /// Becomes readable with an event. Only for polling: only the channel reads and writes it.
    pub descriptor: OwnedFd,
}

/// Own pages granted to another domain until this is dropped.
pub struct SharedPages {
    /// The pages, as one region from guest address 0. Initially zero.
    pub memory: Arc<GuestMemory>,
    /// The grant reference of each page, in order.
    pub refs: Vec<GrantRef>,
    /// Ends the grants on drop.
    pub guard: Box<dyn Send + Sync>,
}

/// A Xen host, as seen from the domain that the program runs in.
pub trait Xen: Send + Sync {
    /// Opens a new connection to xenstore. Each thread that waits for watches needs its own.
    ///
    /// # Errors
    /// When xenstore is missing or refuses.
    fn store(&self) -> Result<store::Xenstore, XenError>;

    /// Returns the domain that the program runs in.
    fn domain(&self) -> DomainId;

    /// Returns true if mapped foreign pages may be pinned by the kernel (direct I/O) when this process is killed.
    ///
    /// In a paravirtualized domain they may not: `gntdev` unmaps pinned pages later, by addresses of the dead process,
    /// and the kernel leaks pages and grants (docs/design/0008-blkif.md).
    fn pages_may_be_pinned(&self) -> bool;

    /// Opens access to the pages that domain `of` grants to this domain.
    ///
    /// # Errors
    /// When the node or socket is missing or refuses.
    fn grants(&self, of: DomainId) -> Result<Box<dyn GrantAccess>, XenError>;

    /// Binds to a port that `remote` has allocated for this domain (EVTCHNOP_bind_interdomain). An event may be pending
    /// at once.
    ///
    /// # Errors
    /// When there is no such port, or it is for another domain.
    fn bind_interdomain(&self, remote: DomainId, port: Port) -> Result<EventPort, XenError>;

    /// Allocates a port that `remote` may bind to (EVTCHNOP_alloc_unbound).
    ///
    /// # Errors
    /// When the node or socket is missing or refuses.
    fn alloc_unbound(&self, remote: DomainId) -> Result<EventPort, XenError>;

    /// Allocates pages and grants domain `with` access to them.
    ///
    /// # Errors
    /// When too few grants are free, or the node or socket is missing.
    fn share(&self, with: DomainId, pages: u32, writable: bool) -> Result<SharedPages, XenError>;
}
