//! The machine's side of grants and event channels: permissions, mappings and bindings.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_memory::{DomainId, GrantRef, GrantStatus};
use rustix::io::Errno;

use super::channels::Channels;
use super::counters::{Counters, Sizes};
use super::runs::Runs;
use super::table::{Board, CONNECTIONS, count};
use super::tenant::{Share, Tenant};
use super::wire::{Answer, Ask};
use crate::Port;

/// Identifies an instance of a domain: a domain id is reused after the domain is destroyed.
type Life = u64;

#[derive(Debug)]
struct Mapping {
    owner: Life,
    refs: Vec<GrantRef>,
}

/// A program's connection, and the resources that end with it.
#[derive(Debug)]
struct Connection {
    domain: DomainId,
    life: Life,
    socket: OwnedFd,
    maps: HashMap<u32, Mapping>,
    shares: HashMap<u32, Share>,
    ports: BTreeSet<Port>,
    next: u32,
}

/// Number of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ConnectionId(pub u32);

#[derive(Debug)]
pub(super) struct Hypervisor {
    sizes: Sizes,
    board: Arc<Board>,
    board_file: File,
    lives: HashMap<Life, Tenant>,
    living: BTreeMap<DomainId, Life>,
    next_life: Life,
    connections: HashMap<ConnectionId, Connection>,
    numbers: Runs,
    channels: Channels,
    /// Number of map calls still to fail.
    failing_maps: u32,
    /// The machine has ended: no program can connect.
    ended: bool,
    done: Counters,
}

impl Hypervisor {
    pub(super) fn new(sizes: Sizes) -> io::Result<Hypervisor> {
        let (board, board_file) = Board::create()?;
        let board = Arc::new(board);
        Ok(Hypervisor {
            sizes,
            channels: Channels::new(Arc::clone(&board)),
            board,
            board_file,
            lives: HashMap::new(),
            living: BTreeMap::new(),
            next_life: 0,
            connections: HashMap::new(),
            numbers: Runs::new(0, CONNECTIONS),
            failing_maps: 0,
            ended: false,
            done: Counters::default(),
        })
    }

    /// Creates a domain. Returns false if it exists.
    pub(super) fn create_domain(&mut self, id: DomainId) -> io::Result<bool> {
        if self.living.contains_key(&id) {
            return Ok(false);
        }
        let tenant = Tenant::create(id, self.sizes)?;
        self.next_life += 1;
        self.lives.insert(self.next_life, tenant);
        self.living.insert(id, self.next_life);
        Ok(true)
    }

    /// Destroys a domain and ends the connections of its programs. Returns false if there is no such domain.
    pub(super) fn destroy_domain(&mut self, id: DomainId) -> bool {
        let Some(life) = self.living.remove(&id) else { return false };
        let ended: Vec<_> = self.connections.iter().filter(|(_, each)| each.life == life).map(|(id, _)| *id).collect();
        for connection in ended {
            self.disconnect(connection);
        }
        if let Some(instance) = self.lives.get_mut(&life) {
            instance.end();
        }
        self.bury(life);
        true
    }

    pub(super) fn domains(&self) -> Vec<DomainId> {
        self.living.keys().copied().collect()
    }

    /// Connects a program of a domain.
    pub(super) fn connect(&mut self, domain: DomainId, socket: OwnedFd) -> Result<(ConnectionId, Answer), Errno> {
        let life = *self.living.get(&domain).filter(|_| !self.ended).ok_or(Errno::SRCH)?;
        let board = self.board_file.try_clone().map_err(|_| Errno::NFILE)?;
        let number = self.numbers.take(1).ok_or(Errno::NOSPC)?;
        let (maps, shares, ports) = (HashMap::new(), HashMap::new(), BTreeSet::new());
        let connection = Connection { domain, life, socket, maps, shares, ports, next: 0 };
        self.connections.insert(ConnectionId(number), connection);
        Ok((ConnectionId(number), Ok((vec![number], vec![board.into()]))))
    }

    /// Ends a connection and frees its resources. Does nothing if it has ended.
    pub(super) fn disconnect(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.remove(&id) else { return };
        for mapping in connection.maps.into_values() {
            self.unpin(connection.life, mapping);
        }
        for share in connection.shares.into_values() {
            self.unshare(connection.life, &share);
        }
        for port in connection.ports {
            self.channels.close(connection.domain, port);
        }
        let line = self.board.connection(id.0).expect("a connection has a line");
        self.done.copies += line.take(count::COPIES);
        self.done.copy_calls += line.take(count::COPY_CALLS);
        self.done.copied_bytes += line.take(count::COPIED_BYTES);
        self.numbers.give(id.0);
        // The program, if it still runs, reads the end of the connection.
        let _ = rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Both);
    }

    /// Ends all connections: the machine ends.
    pub(super) fn end(&mut self) {
        self.ended = true;
        let all: Vec<_> = self.connections.keys().copied().collect();
        all.into_iter().for_each(|id| self.disconnect(id));
    }

    /// Executes a program's hypercall.
    pub(super) fn answer(&mut self, id: ConnectionId, call: Ask) -> Answer {
        let connection = self.connections.get(&id).ok_or(Errno::SRCH)?;
        let (domain, life) = (connection.domain, connection.life);
        match call {
            Ask::Hello(_) => Err(Errno::ISCONN),
            Ask::Attach(of) => self.attach(of),
            Ask::Map { of, writable, refs } => self.map(id, of, writable, refs),
            Ask::Unmap { handle } => {
                let mapping = self.connection(id)?.maps.remove(&handle).ok_or(Errno::INVAL)?;
                self.unpin(life, mapping);
                Ok((vec![], vec![]))
            }
            Ask::Share { with, pages, writable } => self.share(id, with, pages, writable),
            Ask::Unshare { share } => {
                let share = self.connection(id)?.shares.remove(&share).ok_or(Errno::INVAL)?;
                self.unshare(life, &share);
                Ok((vec![], vec![]))
            }
            Ask::Open { remote } => {
                let (port, result) = self.channels.open(domain, remote)?;
                self.connection(id)?.ports.insert(port);
                Ok(result)
            }
            Ask::Bind { remote, port } => {
                self.living.get(&remote).ok_or(Errno::SRCH)?;
                let (port, result) = self.channels.bind(domain, remote, port)?;
                self.connection(id)?.ports.insert(port);
                Ok(result)
            }
            Ask::Close { port } => {
                if !self.connection(id)?.ports.remove(&port) {
                    return Err(Errno::INVAL);
                }
                self.channels.close(domain, port);
                Ok((vec![], vec![]))
            }
        }
    }

    fn connection(&mut self, id: ConnectionId) -> Result<&mut Connection, Errno> {
        self.connections.get_mut(&id).ok_or(Errno::SRCH)
    }

    fn living(&mut self, id: DomainId) -> Option<&mut Tenant> {
        self.lives.get_mut(self.living.get(&id)?)
    }

    fn attach(&mut self, of: DomainId) -> Answer {
        let sizes = self.sizes;
        let tenant = self.living(of).ok_or(Errno::SRCH)?;
        let files = [&tenant.table.table_file, &tenant.table.memory_file].map(|file| file.try_clone());
        let files = files.into_iter().map(|file| file.map(OwnedFd::from)).collect::<io::Result<_>>();
        Ok((vec![sizes.refs, sizes.pages], files.map_err(|_| Errno::NFILE)?))
    }

    /// Maps all pages or none. EINVAL for every reason, as from gntdev.
    fn map(&mut self, id: ConnectionId, of: DomainId, writable: bool, refs: Vec<GrantRef>) -> Answer {
        let mapped = self.pin(id, of, writable, &refs);
        if mapped.is_none() {
            self.done.map_failures += 1;
        }
        let frames = mapped.ok_or(Errno::INVAL)?;
        let owner = self.living[&of];
        let connection = self.connection(id)?;
        connection.next = connection.next.wrapping_add(1);
        let handle = connection.next;
        let pages = refs.len() as u64;
        connection.maps.insert(handle, Mapping { owner, refs });
        self.done.map_calls += 1;
        self.done.maps += pages;
        Ok(([handle].into_iter().chain(frames).collect(), vec![]))
    }

    fn pin(&mut self, id: ConnectionId, of: DomainId, writable: bool, refs: &[GrantRef]) -> Option<Vec<u32>> {
        if self.failing_maps > 0 {
            self.failing_maps -= 1;
            return None;
        }
        let (domain, life) = self.connections.get(&id).map(|connection| (connection.domain, connection.life))?;
        let maptrack = self.lives.get(&life)?.maptrack.checked_add(u32::try_from(refs.len()).ok()?)?;
        if refs.is_empty() || maptrack > self.sizes.maptrack {
            return None;
        }
        let frames = self.living(of)?.pin(domain, writable, refs)?;
        self.lives.get_mut(&life)?.maptrack = maptrack;
        Some(frames)
    }

    fn unpin(&mut self, mapper: Life, mapping: Mapping) {
        let pages = mapping.refs.len();
        self.done.unmap_calls += 1;
        self.done.unmaps += pages as u64;
        if let Some(instance) = self.lives.get_mut(&mapper) {
            instance.maptrack -= pages as u32;
        }
        let Some(owner) = self.lives.get_mut(&mapping.owner) else { return };
        owner.unpin(&mapping.refs);
        self.bury(mapping.owner);
    }

    /// Drops a destroyed domain once none of its pages is mapped.
    fn bury(&mut self, life: Life) {
        if self.lives.get(&life).is_some_and(Tenant::is_gone) {
            self.lives.remove(&life);
        }
    }

    fn share(&mut self, id: ConnectionId, with: DomainId, pages: u32, writable: bool) -> Answer {
        let life = self.connection(id)?.life;
        let share = self.lives.get_mut(&life).ok_or(Errno::SRCH)?.share(with, pages, writable)?;
        let (first_frame, first_ref) = (share.first_frame, share.first_ref);
        let connection = self.connection(id)?;
        connection.next = connection.next.wrapping_add(1);
        let number = connection.next;
        connection.shares.insert(number, share);
        Ok((vec![number, first_frame, first_ref], vec![]))
    }

    fn unshare(&mut self, owner: Life, share: &Share) {
        if let Some(instance) = self.lives.get_mut(&owner) {
            instance.unshare(share);
        }
    }
}

/// Statistics and controls for tests.
impl Hypervisor {
    pub(super) fn counters(&self) -> Counters {
        let mut all = self.done;
        for id in self.connections.keys() {
            let line = self.board.connection(id.0).expect("a connection has a line");
            all.copies += line.get(count::COPIES);
            all.copy_calls += line.get(count::COPY_CALLS);
            all.copied_bytes += line.get(count::COPIED_BYTES);
        }
        (all.events_sent, all.events_delivered) = self.channels.events();
        all.live_mappings = self.lives.values().map(|tenant| tenant.mapped).sum();
        all.live_grants = self.living.values().map(|life| self.lives[life].live_grants).sum();
        all.open_ports = self.channels.open_ports(None);
        all.connections = self.connections.len() as u64;
        all
    }

    /// Returns the numbers of one domain: its mapped pages, the foreign pages that it has mapped, its grants, its ports.
    pub(super) fn domain(&self, id: DomainId) -> Option<[u64; 4]> {
        let tenant = self.lives.get(self.living.get(&id)?)?;
        let ports = self.channels.open_ports(Some(id));
        Some([tenant.mapped, tenant.maptrack.into(), tenant.live_grants, ports])
    }

    /// Returns the number of current mappings of a grant.
    pub(super) fn mappings_of(&self, id: DomainId, gref: GrantRef) -> u32 {
        let tenant = self.living.get(&id).and_then(|life| self.lives.get(life));
        tenant.map_or(0, |tenant| tenant.mappings_of(gref))
    }

    pub(super) fn is_bound(&self, id: DomainId, port: Port) -> bool {
        self.channels.is_bound(id, port)
    }

    pub(super) fn fail_maps(&mut self, calls: u32) {
        self.failing_maps = calls;
    }

    /// Returns false if there is no such grant, or no failure to end.
    pub(super) fn fail_map_of(&mut self, id: DomainId, gref: GrantRef, fail: bool) -> bool {
        self.living(id).is_some_and(|tenant| tenant.fail_map_of(gref, fail))
    }

    /// Returns false if there is no such grant.
    pub(super) fn fail_copy_of(&mut self, id: DomainId, gref: GrantRef, status: GrantStatus) -> bool {
        self.living(id).is_some_and(|tenant| tenant.fail_copy_of(gref, status))
    }

    pub(super) fn maptrack_limit(&mut self, pages: u32) {
        self.sizes.maptrack = pages;
    }
}
