//! Xen as a program in a domain sees it: xenstore, grants, event channels. One trait, [`Xen`], stands for a real one, reached through
//! the kernel's device nodes, and for a simulated one, reached through sockets in a folder.
#![forbid(unsafe_code)]

mod real;
pub mod simulation;
pub mod store;
pub mod vbd;

pub use real::real;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::EventChannel;
use mqblk_memory::{DomainId, GrantAccess, GrantRef, GuestMemory};

/// A port of an event channel, as its domain numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port(pub u32);

/// What could not be done, and why.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct XenError {
    /// What was tried: the node or socket, and for whom.
    pub what: String,
    /// The system's answer.
    pub source: std::io::Error,
}

/// Our end of an event channel. It is closed when both the channel and the descriptor are dropped.
pub struct EventPort {
    /// Our port: what the other end needs to bind to a port that was [opened](Xen::open_port).
    pub port: Port,
    /// For the worker that serves the ring.
    pub channel: Box<dyn EventChannel>,
    /// Becomes readable with an event; to be watched, never to be read or written but by the channel.
    pub descriptor: OwnedFd,
}

/// Pages of ours that another domain may use, until this is dropped.
pub struct SharedPages {
    /// The pages: one region of them, from guest address 0, zero at first.
    pub memory: Arc<GuestMemory>,
    /// What each page is granted as, in order.
    pub refs: Vec<GrantRef>,
    /// Ends the grants.
    pub keeper: Box<dyn Send + Sync>,
}

/// A Xen, seen from the domain that the program runs in.
pub trait Xen: Send + Sync {
    /// A new connection to xenstore: each thread that waits for watches has its own.
    ///
    /// # Errors
    /// When xenstore is not there, or refuses.
    fn store(&self) -> Result<store::Store, XenError>;

    /// The domain that the program runs in.
    fn domain(&self) -> DomainId;

    /// Whether pages that we have mapped may be pinned by the kernel (direct I/O) when this process is killed.
    ///
    /// In a paravirtualized domain they may not: `gntdev` unmaps what is pinned later, by the addresses of a process that is gone, and
    /// the kernel loses pages and grants over it (docs/design/0008-blkif.md).
    fn pages_may_be_pinned(&self) -> bool;

    /// A way to the pages that `of` grants to us.
    ///
    /// # Errors
    /// When the node or socket is not there, or refuses.
    fn grants(&self, of: DomainId) -> Result<Box<dyn GrantAccess>, XenError>;

    /// Binds to a port that `remote` has opened for us. The channel may be signalled at once.
    ///
    /// # Errors
    /// When there is no such port, or it is not for us.
    fn bind(&self, remote: DomainId, port: Port) -> Result<EventPort, XenError>;

    /// Opens a port that `remote` may bind to.
    ///
    /// # Errors
    /// When the node or socket is not there, or refuses.
    fn open_port(&self, remote: DomainId) -> Result<EventPort, XenError>;

    /// Fresh pages of ours that `with` may use.
    ///
    /// # Errors
    /// When there are not so many grants, or the node or socket is not there.
    fn share(&self, with: DomainId, pages: u32, writable: bool) -> Result<SharedPages, XenError>;
}

/// The simulated machine in a folder, for a program in domain 0. Another domain's program [connects](simulation::connect) itself.
///
/// # Errors
/// When there is no machine, or it has ended.
pub fn simulated(folder: &Path) -> Result<Arc<dyn Xen>, XenError> {
    simulation::connect(folder, DomainId(0))
}
