//! The machine's side of grants and event channels: permissions, mappings and bindings.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_memory::{DomainId, GrantRef, GrantStatus};
use rustix::io::Errno;

use super::channels::EventChannels;
use super::domain::{DomainInstance, GrantRange};
use super::hypercall::{Hypercall, HypercallResult};
use super::range_allocator::RangeAllocator;
use super::shared_memory::{CONNECTIONS, SharedInfo, counter_word};
use super::stats::{DomainLimits, MachineStats};
use mqblk_xen::Port;

/// Identifies an instance of a domain: a domain id is reused after the domain is destroyed.
type InstanceId = u64;

#[derive(Debug)]
struct Mapping {
    owner: InstanceId,
    refs: Vec<GrantRef>,
}

/// A program's connection, and the resources that end with it.
#[derive(Debug)]
struct Connection {
    /// Number of its line in the shared info. The line of a connection that has ended is used again.
    line: u32,
    domain: DomainId,
    instance: InstanceId,
    socket: OwnedFd,
    maps: HashMap<u32, Mapping>,
    shares: HashMap<u32, GrantRange>,
    ports: BTreeSet<Port>,
    next: u32,
}

/// Number of a connection. No other has it later: a destroyed domain's connections end before the threads that serve
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ConnectionId(u64);

#[derive(Debug)]
pub(super) struct Hypervisor {
    limits: DomainLimits,
    shared_info: Arc<SharedInfo>,
    shared_info_file: File,
    instances: HashMap<InstanceId, DomainInstance>,
    live_domains: BTreeMap<DomainId, InstanceId>,
    next_instance: InstanceId,
    connections: HashMap<ConnectionId, Connection>,
    next_connection: u64,
    lines: RangeAllocator,
    channels: EventChannels,
    /// Number of map calls still to fail.
    failing_maps: u32,
    /// True if the machine has ended: no program can connect.
    ended: bool,
    totals: MachineStats,
}

impl Hypervisor {
    pub(super) fn new(sizes: DomainLimits) -> io::Result<Hypervisor> {
        let (board, board_file) = SharedInfo::create()?;
        let board = Arc::new(board);
        Ok(Hypervisor {
            limits: sizes,
            channels: EventChannels::new(Arc::clone(&board)),
            shared_info: board,
            shared_info_file: board_file,
            instances: HashMap::new(),
            live_domains: BTreeMap::new(),
            next_instance: 0,
            connections: HashMap::new(),
            next_connection: 0,
            lines: RangeAllocator::new(0, CONNECTIONS),
            failing_maps: 0,
            ended: false,
            totals: MachineStats::default(),
        })
    }

    /// Creates a domain. Returns false if it exists.
    pub(super) fn create_domain(&mut self, id: DomainId) -> io::Result<bool> {
        if self.live_domains.contains_key(&id) {
            return Ok(false);
        }
        let tenant = DomainInstance::create(id, self.limits)?;
        self.next_instance += 1;
        self.instances.insert(self.next_instance, tenant);
        self.live_domains.insert(id, self.next_instance);
        Ok(true)
    }

    /// Destroys a domain and ends the connections of its programs. Returns false if there is no such domain.
    pub(super) fn destroy_domain(&mut self, id: DomainId) -> bool {
        let Some(life) = self.live_domains.remove(&id) else { return false };
        let ended: Vec<_> =
            self.connections.iter().filter(|(_, each)| each.instance == life).map(|(id, _)| *id).collect();
        for connection in ended {
            self.disconnect(connection);
        }
        if let Some(instance) = self.instances.get_mut(&life) {
            instance.mark_destroyed();
        }
        self.drop_if_unused(life);
        true
    }

    pub(super) fn domains(&self) -> Vec<DomainId> {
        self.live_domains.keys().copied().collect()
    }

    /// Connects a program of a domain.
    pub(super) fn connect(
        &mut self,
        domain: DomainId,
        socket: OwnedFd,
    ) -> Result<(ConnectionId, HypercallResult), Errno> {
        let life = *self.live_domains.get(&domain).filter(|_| !self.ended).ok_or(Errno::SRCH)?;
        let board = self.shared_info_file.try_clone().map_err(|_| Errno::NFILE)?;
        let line = self.lines.allocate(1).ok_or(Errno::NOSPC)?;
        let (maps, shares, ports) = (HashMap::new(), HashMap::new(), BTreeSet::new());
        let connection = Connection { line, domain, instance: life, socket, maps, shares, ports, next: 0 };
        self.next_connection += 1;
        let id = ConnectionId(self.next_connection);
        self.connections.insert(id, connection);
        Ok((id, Ok((vec![line], vec![board.into()]))))
    }

    /// Ends a connection and frees its resources. Does nothing if it has ended.
    pub(super) fn disconnect(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.remove(&id) else { return };
        for mapping in connection.maps.into_values() {
            self.unmap(connection.instance, mapping);
        }
        for share in connection.shares.into_values() {
            self.unshare(connection.instance, &share);
        }
        for port in connection.ports {
            self.channels.close(connection.domain, port);
        }
        let line = self.shared_info.connection_line(connection.line).expect("a connection has a line");
        self.totals.copies += line.take(counter_word::COPIES);
        self.totals.copy_calls += line.take(counter_word::COPY_CALLS);
        self.totals.copied_bytes += line.take(counter_word::COPIED_BYTES);
        self.lines.release(connection.line);
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
    pub(super) fn call(&mut self, id: ConnectionId, call: Hypercall) -> HypercallResult {
        let connection = self.connections.get(&id).ok_or(Errno::SRCH)?;
        let (domain, life) = (connection.domain, connection.instance);
        match call {
            Hypercall::Connect(_) => Err(Errno::ISCONN),
            Hypercall::AttachDomain(of) => self.attach(of),
            Hypercall::MapGrants { of, writable, refs } => self.map(id, of, writable, refs),
            Hypercall::UnmapGrants { handle } => {
                let mapping = self.connection(id)?.maps.remove(&handle).ok_or(Errno::INVAL)?;
                self.unmap(life, mapping);
                Ok((vec![], vec![]))
            }
            Hypercall::SharePages { with, pages, writable } => self.share(id, with, pages, writable),
            Hypercall::UnsharePages { share } => {
                let share = self.connection(id)?.shares.remove(&share).ok_or(Errno::INVAL)?;
                self.unshare(life, &share);
                Ok((vec![], vec![]))
            }
            Hypercall::AllocUnbound { remote } => {
                let (port, result) = self.channels.open(domain, remote)?;
                self.connection(id)?.ports.insert(port);
                Ok(result)
            }
            Hypercall::BindInterdomain { remote, port } => {
                self.live_domains.get(&remote).ok_or(Errno::SRCH)?;
                let (port, result) = self.channels.bind(domain, remote, port)?;
                self.connection(id)?.ports.insert(port);
                Ok(result)
            }
            Hypercall::ClosePort { port } => {
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

    fn live_domain(&mut self, id: DomainId) -> Option<&mut DomainInstance> {
        self.instances.get_mut(self.live_domains.get(&id)?)
    }

    fn attach(&mut self, of: DomainId) -> HypercallResult {
        let sizes = self.limits;
        let tenant = self.live_domain(of).ok_or(Errno::SRCH)?;
        let files = [&tenant.memory.table_file, &tenant.memory.memory_file].map(|file| file.try_clone());
        let files = files.into_iter().map(|file| file.map(OwnedFd::from)).collect::<io::Result<_>>();
        Ok((vec![sizes.refs, sizes.pages], files.map_err(|_| Errno::NFILE)?))
    }

    /// Maps all pages or none. EINVAL for every reason, as from gntdev.
    fn map(&mut self, id: ConnectionId, of: DomainId, writable: bool, refs: Vec<GrantRef>) -> HypercallResult {
        let mapped = self.try_map(id, of, writable, &refs);
        if mapped.is_none() {
            self.totals.map_failures += 1;
        }
        let frames = mapped.ok_or(Errno::INVAL)?;
        let owner = self.live_domains[&of];
        let connection = self.connection(id)?;
        connection.next = connection.next.wrapping_add(1);
        let handle = connection.next;
        let pages = refs.len() as u64;
        connection.maps.insert(handle, Mapping { owner, refs });
        self.totals.map_calls += 1;
        self.totals.maps += pages;
        Ok(([handle].into_iter().chain(frames).collect(), vec![]))
    }

    fn try_map(&mut self, id: ConnectionId, of: DomainId, writable: bool, refs: &[GrantRef]) -> Option<Vec<u32>> {
        if self.failing_maps > 0 {
            self.failing_maps -= 1;
            return None;
        }
        let (domain, life) = self.connections.get(&id).map(|connection| (connection.domain, connection.instance))?;
        let maptrack = self.instances.get(&life)?.maptrack.checked_add(u32::try_from(refs.len()).ok()?)?;
        if refs.is_empty() || maptrack > self.limits.maptrack {
            return None;
        }
        let frames = self.live_domain(of)?.map(domain, writable, refs)?;
        self.instances.get_mut(&life)?.maptrack = maptrack;
        Some(frames)
    }

    fn unmap(&mut self, mapper: InstanceId, mapping: Mapping) {
        let pages = mapping.refs.len();
        self.totals.unmap_calls += 1;
        self.totals.unmaps += pages as u64;
        if let Some(instance) = self.instances.get_mut(&mapper) {
            instance.maptrack -= pages as u32;
        }
        let Some(owner) = self.instances.get_mut(&mapping.owner) else { return };
        owner.unmap(&mapping.refs);
        self.drop_if_unused(mapping.owner);
    }

    /// Drops a destroyed domain once none of its pages is mapped.
    fn drop_if_unused(&mut self, life: InstanceId) {
        if self.instances.get(&life).is_some_and(DomainInstance::is_unused) {
            self.instances.remove(&life);
        }
    }

    fn share(&mut self, id: ConnectionId, with: DomainId, pages: u32, writable: bool) -> HypercallResult {
        let life = self.connection(id)?.instance;
        let share = self.instances.get_mut(&life).ok_or(Errno::SRCH)?.share(with, pages, writable)?;
        let (first_frame, first_ref) = (share.first_frame, share.first_ref);
        let connection = self.connection(id)?;
        connection.next = connection.next.wrapping_add(1);
        let number = connection.next;
        connection.shares.insert(number, share);
        Ok((vec![number, first_frame, first_ref], vec![]))
    }

    fn unshare(&mut self, owner: InstanceId, share: &GrantRange) {
        if let Some(instance) = self.instances.get_mut(&owner) {
            instance.unshare(share);
        }
    }
}

/// Statistics and controls for tests.
impl Hypervisor {
    pub(super) fn stats(&self) -> MachineStats {
        let mut all = self.totals;
        for connection in self.connections.values() {
            let line = self.shared_info.connection_line(connection.line).expect("a connection has a line");
            all.copies += line.get(counter_word::COPIES);
            all.copy_calls += line.get(counter_word::COPY_CALLS);
            all.copied_bytes += line.get(counter_word::COPIED_BYTES);
        }
        (all.events_sent, all.events_delivered) = self.channels.events();
        all.live_mappings = self.instances.values().map(|tenant| tenant.live_mappings).sum();
        all.live_grants = self.live_domains.values().map(|life| self.instances[life].live_grants).sum();
        all.open_ports = self.channels.open_ports(None);
        all.connections = self.connections.len() as u64;
        all
    }

    /// Returns the numbers of one domain: its mapped pages, the foreign pages that it has mapped, its grants, its
    /// ports.
    pub(super) fn domain_stats(&self, id: DomainId) -> Option<[u64; 4]> {
        let tenant = self.instances.get(self.live_domains.get(&id)?)?;
        let ports = self.channels.open_ports(Some(id));
        Some([tenant.live_mappings, tenant.maptrack.into(), tenant.live_grants, ports])
    }

    /// Returns the number of current mappings of a grant.
    pub(super) fn mapping_count(&self, id: DomainId, gref: GrantRef) -> u32 {
        let tenant = self.live_domains.get(&id).and_then(|life| self.instances.get(life));
        tenant.map_or(0, |tenant| tenant.mapping_count(gref))
    }

    pub(super) fn is_bound(&self, id: DomainId, port: Port) -> bool {
        self.channels.is_bound(id, port)
    }

    pub(super) fn fail_next_maps(&mut self, calls: u32) {
        self.failing_maps = calls;
    }

    /// Returns false if there is no such grant, or no failure to end.
    pub(super) fn set_map_failure(&mut self, id: DomainId, gref: GrantRef, fail: bool) -> bool {
        self.live_domain(id).is_some_and(|tenant| tenant.set_map_failure(gref, fail))
    }

    /// Returns false if there is no such grant.
    pub(super) fn set_copy_failure(&mut self, id: DomainId, gref: GrantRef, status: GrantStatus) -> bool {
        self.live_domain(id).is_some_and(|tenant| tenant.set_copy_failure(gref, status))
    }

    pub(super) fn set_maptrack_limit(&mut self, pages: u32) {
        self.limits.maptrack = pages;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A domain's connections end when it is destroyed, the threads that serve them a little later.
    #[test]
    fn the_end_of_a_destroyed_domains_connection_ends_no_other() {
        let mut hypervisor = Hypervisor::new(DomainLimits { pages: 4, refs: 16, maptrack: 4 }).unwrap();
        assert!(hypervisor.create_domain(DomainId(1)).unwrap());
        let (first, _) = hypervisor.connect(DomainId(1), UnixStream::pair().unwrap().0.into()).unwrap();
        assert!(hypervisor.destroy_domain(DomainId(1)));
        assert!(hypervisor.create_domain(DomainId(2)).unwrap());
        let (second, _) = hypervisor.connect(DomainId(2), UnixStream::pair().unwrap().0.into()).unwrap();
        hypervisor.disconnect(first);
        assert_eq!(hypervisor.stats().connections, 1);
        let shared = hypervisor.call(second, Hypercall::SharePages { with: DomainId(0), pages: 1, writable: true });
        assert!(shared.is_ok(), "{shared:?}");
        assert_eq!(hypervisor.call(first, Hypercall::AttachDomain(DomainId(2))).unwrap_err(), Errno::SRCH);
    }
}
