//! The machine itself: its sockets, its domains, and what tests ask of it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use mqblk_memory::{DomainId, GrantRef, GrantStatus};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use super::counters::{Counters, Sizes};
use super::hypervisor::{ConnectionId, Hypervisor};
use super::wire::{self, Ask, Packets};
use super::xenstored::{Quota, Xenstored};
use crate::Port;

/// What one domain has now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DomainCounters {
    /// Its pages that others have mapped.
    pub live_mappings: u64,
    /// Pages of others that it has mapped.
    pub maptrack: u64,
    /// Its grants.
    pub live_grants: u64,
    /// Its ports.
    pub open_ports: u64,
}

/// A simulated machine. It ends when this is dropped: its sockets vanish, and programs that are connected get errors.
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
    life: Mutex<()>,
    ending: AtomicBool,
}

impl Machine {
    /// Starts a machine in a folder, with domain 0.
    ///
    /// # Errors
    /// When the folder is not there or has a running machine, or the system refuses.
    pub fn start(folder: &Path) -> io::Result<Machine> {
        Machine::with_sizes(folder, Sizes::default())
    }

    /// [`start`](Self::start) with domains of another size.
    ///
    /// # Errors
    /// As there.
    pub fn with_sizes(folder: &Path, sizes: Sizes) -> io::Result<Machine> {
        let path = folder.join(wire::SOCKET);
        if Packets::connect(folder).is_ok() {
            let text = format!("{}: a machine runs there already", folder.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        let listener = Arc::new(wire::socket()?);
        remove_stale(&path)?;
        let store = Xenstored::start(folder)?;
        let hypervisor = Mutex::new(Hypervisor::new(sizes)?);
        let (life, ending) = (Mutex::new(()), AtomicBool::new(false));
        let shared = Arc::new(Shared { folder: folder.to_owned(), hypervisor, store, life, ending });
        shared.create(DomainId(0))?;
        rustix::net::bind(&listener, &wire::address(&path)?)?;
        rustix::net::listen(&listener, 128)?;
        let (for_thread, accepts) = (Arc::clone(&shared), Arc::clone(&listener));
        let thread =
            std::thread::Builder::new().name("hypervisor".to_owned()).spawn(move || accept(&for_thread, &accepts))?;
        Ok(Machine { shared, listener, thread: Some(thread) })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.shared.folder
    }

    /// Creates a domain, with the xenstore directories that a toolstack gives one. Does nothing when there is one.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create_domain(&self, id: DomainId) -> io::Result<()> {
        self.shared.create(id)
    }

    /// Destroys a domain: its programs' connections end, its pages and ports vanish, its xenstore nodes too, and `@releaseDomain`
    /// fires. Pages that others have mapped stay with them until they unmap them. `false` when there is none, or it is 0.
    pub fn destroy_domain(&self, id: DomainId) -> bool {
        let _life = self.shared.life.lock().unwrap_or_else(PoisonError::into_inner);
        let destroyed = id != DomainId(0) && self.shared.hypervisor().destroy_domain(id);
        if destroyed {
            self.shared.store.release(id);
        }
        destroyed
    }

    /// The domains.
    pub fn domains(&self) -> Vec<DomainId> {
        self.shared.hypervisor().domains()
    }

    /// What has been done, and what there is.
    pub fn counters(&self) -> Counters {
        self.shared.hypervisor().counters()
    }

    /// What one domain has. `None` when there is no such domain.
    pub fn domain_counters(&self, id: DomainId) -> Option<DomainCounters> {
        let [live_mappings, maptrack, live_grants, open_ports] = self.shared.hypervisor().domain(id)?;
        Some(DomainCounters { live_mappings, maptrack, live_grants, open_ports })
    }

    /// How often one page of a domain is mapped now.
    pub fn mappings_of(&self, id: DomainId, gref: GrantRef) -> u32 {
        self.shared.hypervisor().mappings_of(id, gref)
    }

    /// Whether the port has another end that is open.
    pub fn is_bound(&self, id: DomainId, port: Port) -> bool {
        self.shared.hypervisor().is_bound(id, port)
    }

    /// The next `calls` calls that map fail.
    pub fn fail_maps(&self, calls: u32) {
        self.shared.hypervisor().fail_maps(calls);
    }

    /// From now on each call that maps this grant fails, or no more. `false` when there was no such grant, or no such failure to end.
    pub fn fail_map_of(&self, id: DomainId, gref: GrantRef, fail: bool) -> bool {
        self.shared.hypervisor().fail_map_of(id, gref, fail)
    }

    /// From now on a copy to or from this grant ends with `status`, and nothing is copied; `OKAY` ends that. `false` when there is
    /// no such grant.
    pub fn fail_copy_of(&self, id: DomainId, gref: GrantRef, status: GrantStatus) -> bool {
        self.shared.hypervisor().fail_copy_of(id, gref, status)
    }

    /// Pages of others that each domain may have mapped at once, from now on. What is mapped stays.
    pub fn maptrack_limit(&self, pages: u32) {
        self.shared.hypervisor().maptrack_limit(pages);
    }

    /// The next `count` commits of xenstore transactions fail with `EAGAIN`.
    pub fn store_conflicts(&self, count: u32) {
        self.shared.store.conflicts(count);
    }

    /// What a domain other than 0 may have in xenstore, from now on.
    pub fn store_quota(&self, quota: Quota) {
        self.shared.store.quota(quota);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        let _ = std::fs::remove_file(self.shared.folder.join(wire::SOCKET));
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.shared.hypervisor().end();
        self.shared.store.end();
    }
}

/// Removes a socket that a machine left that was killed.
pub(super) fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Shared {
    fn hypervisor(&self) -> MutexGuard<'_, Hypervisor> {
        self.hypervisor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn create(&self, id: DomainId) -> io::Result<()> {
        let _life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        if self.hypervisor().create_domain(id)? {
            self.store.introduce(id)?;
        }
        Ok(())
    }
}

/// Serves programs until the machine ends.
fn accept(shared: &Arc<Shared>, listener: &OwnedFd) {
    while !shared.ending.load(Ordering::SeqCst) {
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            // No descriptors are left, for one: those that are connected may close some.
            Err(error) if !shared.ending.load(Ordering::SeqCst) => {
                tracing::warn!(%error, "the simulated hypervisor accepts no program");
                std::thread::sleep(std::time::Duration::from_millis(50));
                continue;
            }
            Err(_) => return,
        };
        let for_thread = Arc::clone(shared);
        let spawned = std::thread::Builder::new()
            .name("hypervisor".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || serve(&for_thread, socket));
        if let Err(error) = spawned {
            tracing::warn!(%error, "the simulated hypervisor serves no more programs");
        }
    }
}

/// Serves one program until it has gone.
fn serve(shared: &Arc<Shared>, socket: OwnedFd) {
    let mut id = None;
    if let Err(error) = converse(shared, socket, &mut id) {
        tracing::debug!(%error, "a program's connection to the simulated hypervisor");
    }
    if let Some(id) = id {
        shared.hypervisor().disconnect(id);
    }
}

fn converse(shared: &Shared, socket: OwnedFd, id: &mut Option<ConnectionId>) -> io::Result<()> {
    let second = socket.try_clone()?;
    let mut packets = Packets::new(socket);
    let mut second = Some(second);
    while packets.receive()?.is_some() {
        let unclear = || io::Error::new(io::ErrorKind::InvalidData, "found a message that is no question");
        let ask = Ask::decode(packets.words()).ok_or_else(unclear)?;
        let answer = match (ask, *id, second.take()) {
            (Ask::Hello(domain), None, Some(socket)) => {
                shared.create(domain)?;
                match shared.hypervisor().connect(domain, socket) {
                    Ok((number, answer)) => {
                        *id = Some(number);
                        answer
                    }
                    Err(errno) => Err(errno),
                }
            }
            (ask, Some(id), _) => shared.hypervisor().answer(id, ask),
            (_, None, _) => return Err(unclear()),
        };
        packets.answer(&answer)?;
    }
    Ok(())
}
