//! The simulated machine: its sockets, its domains, and controls for tests.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use mqblk_core::lock::lock;
use mqblk_memory::{DomainId, GrantRef, GrantStatus};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use super::hypercall::{self, Hypercall, HypercallSocket};
use super::hypervisor::{ConnectionId, Hypervisor};
use super::stats::{DomainLimits, MachineStats};
use super::xenstored::{XenstoreQuota, Xenstored};
use mqblk_xen::Port;

/// Current numbers of one domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DomainStats {
    /// Its pages that other domains have mapped.
    pub live_mappings: u64,
    /// Foreign pages that it has mapped.
    pub maptrack: u64,
    /// Its grants.
    pub live_grants: u64,
    /// Its ports.
    pub open_ports: u64,
}

/// A simulated machine. Dropping it ends it: its sockets are removed, and connected programs get errors.
#[derive(Debug)]
pub struct Machine {
    shared: Arc<Shared>,
    listener: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    hypervisor: Mutex<Hypervisor>,
    store: Xenstored,
    /// Held while a domain is created or destroyed.
    lifecycle: Mutex<()>,
    ending: AtomicBool,
}

impl Machine {
    /// Starts a machine in a folder, with domain 0.
    ///
    /// # Errors
    /// When the folder is missing or has a running machine, or a system call fails.
    pub fn start(folder: &Path) -> io::Result<Machine> {
        Machine::with_limits(folder, DomainLimits::default())
    }

    /// Starts a machine whose domains have the given limits.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    pub fn with_limits(folder: &Path, sizes: DomainLimits) -> io::Result<Machine> {
        let path = folder.join(hypercall::SOCKET);
        if HypercallSocket::connect(folder).is_ok() {
            let text = format!("{}: a machine runs there already", folder.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        let listener = Arc::new(hypercall::socket()?);
        hypercall::remove_stale(&path)?;
        let store = Xenstored::start(folder)?;
        let hypervisor = Mutex::new(Hypervisor::new(sizes)?);
        let (lifecycle, ending) = (Mutex::new(()), AtomicBool::new(false));
        let shared = Arc::new(Shared { folder: folder.to_owned(), hypervisor, store, lifecycle, ending });
        shared.create_domain(DomainId(0))?;
        rustix::net::bind(&listener, &hypercall::address(&path)?)?;
        rustix::net::listen(&listener, 128)?;
        let (for_thread, accepts) = (Arc::clone(&shared), Arc::clone(&listener));
        let thread =
            std::thread::Builder::new().name("hypervisor".to_owned()).spawn(move || accept(&for_thread, &accepts))?;
        Ok(Machine { shared, listener, thread: Some(thread) })
    }

    /// Returns the machine's folder.
    pub fn folder(&self) -> &Path {
        &self.shared.folder
    }

    /// Creates a domain and its xenstore directories, as a toolstack does. Does nothing if it exists.
    ///
    /// # Errors
    /// When a system call fails.
    pub fn create_domain(&self, id: DomainId) -> io::Result<()> {
        self.shared.create_domain(id)
    }

    /// Destroys a domain: ends its programs' connections, frees its pages, ports and xenstore nodes, and fires
    /// `@releaseDomain`. Pages that other domains have mapped are freed when they unmap them. Returns false if
    /// there is no such domain, or it is domain 0.
    pub fn destroy_domain(&self, id: DomainId) -> bool {
        let _guard = lock(&self.shared.lifecycle);
        let destroyed = id != DomainId(0) && self.shared.hypervisor().destroy_domain(id);
        if destroyed {
            self.shared.store.release(id);
        }
        destroyed
    }

    /// Returns the domains.
    pub fn domains(&self) -> Vec<DomainId> {
        self.shared.hypervisor().domains()
    }

    /// Returns the machine's statistics.
    pub fn stats(&self) -> MachineStats {
        self.shared.hypervisor().stats()
    }

    /// Returns the current numbers of one domain. `None` if there is no such domain.
    pub fn domain_stats(&self, id: DomainId) -> Option<DomainStats> {
        let [live_mappings, maptrack, live_grants, open_ports] = self.shared.hypervisor().domain_stats(id)?;
        Some(DomainStats { live_mappings, maptrack, live_grants, open_ports })
    }

    /// Returns the number of current mappings of a grant.
    pub fn mapping_count(&self, id: DomainId, gref: GrantRef) -> u32 {
        self.shared.hypervisor().mapping_count(id, gref)
    }

    /// Returns true if the port's other end is open.
    pub fn is_bound(&self, id: DomainId, port: Port) -> bool {
        self.shared.hypervisor().is_bound(id, port)
    }

    /// Makes the next `calls` map calls fail.
    pub fn fail_next_maps(&self, calls: u32) {
        self.shared.hypervisor().fail_next_maps(calls);
    }

    /// Makes each map call of this grant fail, or ends that. Returns false if there is no such grant, or no failure to
    /// end.
    pub fn set_map_failure(&self, id: DomainId, gref: GrantRef, fail: bool) -> bool {
        self.shared.hypervisor().set_map_failure(id, gref, fail)
    }

    /// Makes each copy to or from this grant fail with `status`; `OKAY` ends that. Returns false if there is no such
    /// grant.
    pub fn set_copy_failure(&self, id: DomainId, gref: GrantRef, status: GrantStatus) -> bool {
        self.shared.hypervisor().set_copy_failure(id, gref, status)
    }

    /// Sets the maximum of foreign pages that each domain may have mapped at once. Existing mappings stay.
    pub fn set_maptrack_limit(&self, pages: u32) {
        self.shared.hypervisor().set_maptrack_limit(pages);
    }

    /// Makes the next `count` commits of xenstore transactions fail with `EAGAIN`.
    pub fn inject_store_conflicts(&self, count: u32) {
        self.shared.store.inject_conflicts(count);
    }

    /// Sets the xenstore quota of domains other than 0.
    pub fn set_store_quota(&self, quota: XenstoreQuota) {
        self.shared.store.set_quota(quota);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        let _ = std::fs::remove_file(self.shared.folder.join(hypercall::SOCKET));
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.shared.hypervisor().end();
        self.shared.store.end();
    }
}

impl Shared {
    fn hypervisor(&self) -> MutexGuard<'_, Hypervisor> {
        lock(&self.hypervisor)
    }

    fn create_domain(&self, id: DomainId) -> io::Result<()> {
        let _guard = lock(&self.lifecycle);
        if self.hypervisor().create_domain(id)? {
            self.store.introduce(id)?;
        }
        Ok(())
    }
}

/// Accepts programs until the machine ends. Then ends the threads that serve them.
fn accept(shared: &Arc<Shared>, listener: &OwnedFd) {
    let mut served: Vec<(Arc<OwnedFd>, JoinHandle<()>)> = vec![];
    accept_programs(shared, listener, &mut served);
    for (socket, thread) in served {
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        let _ = thread.join();
    }
}

fn accept_programs(shared: &Arc<Shared>, listener: &OwnedFd, served: &mut Vec<(Arc<OwnedFd>, JoinHandle<()>)>) {
    while !shared.ending.load(Ordering::SeqCst) {
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            // For example EMFILE: connected programs may close descriptors.
            Err(error) if !shared.ending.load(Ordering::SeqCst) => {
                tracing::warn!(%error, "the simulated hypervisor cannot accept a program");
                std::thread::sleep(std::time::Duration::from_millis(50));
                continue;
            }
            Err(_) => return,
        };
        served.retain(|(_, thread)| !thread.is_finished());
        let Ok(own) = socket.try_clone().map(Arc::new) else { continue };
        let (for_thread, for_end) = (Arc::clone(shared), Arc::clone(&own));
        let spawned =
            std::thread::Builder::new().name("hypervisor".to_owned()).stack_size(256 * 1024).spawn(move || {
                serve(&for_thread, socket);
                // The program reads the end of the connection although this process still has the socket.
                let _ = rustix::net::shutdown(&for_end, Shutdown::Both);
            });
        match spawned {
            Ok(thread) => served.push((own, thread)),
            Err(error) => tracing::warn!(%error, "the simulated hypervisor cannot serve a program"),
        }
    }
}

/// Serves one program until it disconnects.
fn serve(shared: &Arc<Shared>, socket: OwnedFd) {
    let mut id = None;
    if let Err(error) = serve_calls(shared, socket, &mut id) {
        tracing::debug!(%error, "a program's connection to the simulated hypervisor failed");
    }
    if let Some(id) = id {
        shared.hypervisor().disconnect(id);
    }
}

fn serve_calls(shared: &Shared, socket: OwnedFd, id: &mut Option<ConnectionId>) -> io::Result<()> {
    let second = socket.try_clone()?;
    let mut packets = HypercallSocket::new(socket);
    let mut second = Some(second);
    while packets.receive()?.is_some() {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "found an invalid hypercall");
        let call = Hypercall::decode(packets.words()).ok_or_else(invalid)?;
        let result = match (call, *id, second.take()) {
            (Hypercall::Connect(domain), None, Some(socket)) => {
                shared.create_domain(domain)?;
                match shared.hypervisor().connect(domain, socket) {
                    Ok((number, result)) => {
                        *id = Some(number);
                        result
                    }
                    Err(errno) => Err(errno),
                }
            }
            (call, Some(id), _) => shared.hypervisor().call(id, call),
            (_, None, _) => return Err(invalid()),
        };
        packets.send_result(&result)?;
    }
    Ok(())
}
