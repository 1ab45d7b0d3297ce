//! The machine's side of grants and event channels: who may use which page, who uses it, who is bound to whom.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_memory::{DomainId, GrantRef, GrantStatus};
use rustix::io::Errno;

use super::channels::Channels;
use super::runs::Runs;
use super::table::{Board, CONNECTIONS, Domain, Entry, FIRST_REF, count};
use super::wire::{Answer, Ask};
use crate::Port;

/// How large domains are, and what they may have.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Pages that a domain has to share. Memory is taken on first touch.
    pub pages: u32,
    /// References in a grant table. Xen's own default, `gnttab_max_frames` of 64, makes 32768.
    pub refs: u32,
    /// Pages of others that a domain may have mapped at once. Xen's `gnttab_max_maptrack_frames`.
    pub maptrack: u32,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { pages: 1 << 20, refs: 1 << 20, maptrack: 32768 }
    }
}

/// What has been done on a machine since it started, and what there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls that mapped something.
    pub map_calls: u64,
    /// Pages that they mapped.
    pub maps: u64,
    /// Calls that were refused.
    pub map_failures: u64,
    /// Calls that ended a mapping, and mappings that ended with their connection.
    pub unmap_calls: u64,
    /// Pages of those.
    pub unmaps: u64,
    /// Calls that copied.
    pub copy_calls: u64,
    /// Copies in them, whatever their status.
    pub copies: u64,
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// Events sent.
    pub events_sent: u64,
    /// Events of those that the other side was woken for: it had taken the one before, and did not have its port masked.
    pub events_delivered: u64,
    /// Pages that are mapped now.
    pub live_mappings: u64,
    /// Grants that there are now.
    pub live_grants: u64,
    /// Ports that are open now.
    pub open_ports: u64,
    /// Connections that there are now: one for each [`Xen`](crate::Xen) and one for each [`GrantAccess`](mqblk_memory::GrantAccess).
    pub connections: u64,
}

/// A page that somebody has mapped.
#[derive(Debug)]
struct Pin {
    count: u32,
    frame: u32,
    /// Its owner has taken the grant back meanwhile: the page is free when the last mapping has gone.
    ended: bool,
}

/// One life of a domain. It stays, without a name, until nobody has a page of it mapped.
#[derive(Debug)]
struct Tenant {
    id: DomainId,
    alive: bool,
    table: Domain,
    frames: Runs,
    refs: Runs,
    pins: HashMap<u32, Pin>,
    live_grants: u64,
    /// Its pages that are mapped.
    mapped: u64,
    /// Pages of others that it has mapped.
    maptrack: u32,
    unmappable: BTreeSet<GrantRef>,
}

/// Which life of a domain.
type Life = u64;

#[derive(Debug)]
struct Mapping {
    owner: Life,
    refs: Vec<u32>,
}

#[derive(Debug)]
struct Share {
    first_frame: u32,
    first_ref: u32,
    pages: u32,
}

/// A program's connection, and what ends with it.
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

/// A connection's number.
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
    /// Map calls that are still to be refused.
    failing_maps: u32,
    /// The machine ends: nobody comes any more.
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

    /// `false` when there is such a domain.
    pub(super) fn create_domain(&mut self, id: DomainId) -> io::Result<bool> {
        if self.living.contains_key(&id) {
            return Ok(false);
        }
        let tenant = Tenant {
            id,
            alive: true,
            table: Domain::create(id, self.sizes.pages, self.sizes.refs)?,
            frames: Runs::new(0, self.sizes.pages),
            refs: Runs::new(FIRST_REF, self.sizes.refs.max(FIRST_REF)),
            pins: HashMap::new(),
            live_grants: 0,
            mapped: 0,
            maptrack: 0,
            unmappable: BTreeSet::new(),
        };
        self.next_life += 1;
        self.lives.insert(self.next_life, tenant);
        self.living.insert(id, self.next_life);
        Ok(true)
    }

    /// Ends a domain and the connections of its programs. `false` when there is none.
    pub(super) fn destroy_domain(&mut self, id: DomainId) -> bool {
        let Some(life) = self.living.remove(&id) else { return false };
        let ended: Vec<_> = self.connections.iter().filter(|(_, each)| each.life == life).map(|(id, _)| *id).collect();
        for connection in ended {
            self.disconnect(connection);
        }
        if let Some(tenant) = self.lives.get_mut(&life) {
            tenant.alive = false;
            tenant.table.end();
        }
        self.bury(life);
        true
    }

    pub(super) fn domains(&self) -> Vec<DomainId> {
        self.living.keys().copied().collect()
    }

    /// A program of a domain has come.
    pub(super) fn connect(&mut self, domain: DomainId, socket: OwnedFd) -> Result<(ConnectionId, Answer), Errno> {
        let life = *self.living.get(&domain).filter(|_| !self.ended).ok_or(Errno::SRCH)?;
        let board = self.board_file.try_clone().map_err(|_| Errno::NFILE)?;
        let number = self.numbers.take(1).ok_or(Errno::NOSPC)?;
        let (maps, shares, ports) = (HashMap::new(), HashMap::new(), BTreeSet::new());
        let connection = Connection { domain, life, socket, maps, shares, ports, next: 0 };
        self.connections.insert(ConnectionId(number), connection);
        Ok((ConnectionId(number), Ok((vec![number], vec![board.into()]))))
    }

    /// A program has gone, or its domain: all that it had goes too. Nothing when that has been done.
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
        let line = self.board.connection(id.0).expect("numbers are lines of the board");
        self.done.copies += line.take(count::COPIES);
        self.done.copy_calls += line.take(count::COPY_CALLS);
        self.done.copied_bytes += line.take(count::COPIED_BYTES);
        self.numbers.give(id.0);
        // The program reads the end of the connection, if it still lives.
        let _ = rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Both);
    }

    /// The machine ends.
    pub(super) fn end(&mut self) {
        self.ended = true;
        let all: Vec<_> = self.connections.keys().copied().collect();
        all.into_iter().for_each(|id| self.disconnect(id));
    }

    /// Answers a program.
    pub(super) fn answer(&mut self, id: ConnectionId, ask: Ask) -> Answer {
        let connection = self.connections.get(&id).ok_or(Errno::SRCH)?;
        let (domain, life) = (connection.domain, connection.life);
        match ask {
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
                let (port, answer) = self.channels.open(domain, remote)?;
                self.connection(id)?.ports.insert(port);
                Ok(answer)
            }
            Ask::Bind { remote, port } => {
                self.living.get(&remote).ok_or(Errno::SRCH)?;
                let (port, answer) = self.channels.bind(domain, remote, port)?;
                self.connection(id)?.ports.insert(port);
                Ok(answer)
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

    /// All or nothing, as gntdev does it: it has one answer for every reason.
    fn map(&mut self, id: ConnectionId, of: DomainId, writable: bool, refs: Vec<GrantRef>) -> Answer {
        let pinned = self.pin(id, of, writable, &refs);
        if pinned.is_none() {
            self.done.map_failures += 1;
        }
        let frames = pinned.ok_or(Errno::INVAL)?;
        let owner = self.living[&of];
        let connection = self.connection(id)?;
        connection.next = connection.next.wrapping_add(1);
        let handle = connection.next;
        let pages = refs.len() as u64;
        connection.maps.insert(handle, Mapping { owner, refs: refs.into_iter().map(|gref| gref.0).collect() });
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
        let owner = self.living(of)?;
        let allowed = |gref: &GrantRef| {
            let entry = owner.table.entry(gref.0).filter(|entry| entry.with == domain && (entry.writable || !writable));
            entry.filter(|_| !owner.unmappable.contains(gref)).map(|entry| entry.frame)
        };
        let frames: Vec<u32> = refs.iter().map(allowed).collect::<Option<_>>()?;
        for (gref, &frame) in refs.iter().zip(&frames) {
            owner.pins.entry(gref.0).or_insert(Pin { count: 0, frame, ended: false }).count += 1;
        }
        owner.mapped += refs.len() as u64;
        self.lives.get_mut(&life)?.maptrack = maptrack;
        Some(frames)
    }

    fn unpin(&mut self, mapper: Life, mapping: Mapping) {
        let pages = mapping.refs.len();
        self.done.unmap_calls += 1;
        self.done.unmaps += pages as u64;
        if let Some(tenant) = self.lives.get_mut(&mapper) {
            tenant.maptrack -= pages as u32;
        }
        let Some(owner) = self.lives.get_mut(&mapping.owner) else { return };
        owner.mapped -= pages as u64;
        for gref in mapping.refs {
            let pin = owner.pins.get_mut(&gref).expect("a mapped page is pinned");
            pin.count -= 1;
            if pin.count == 0 {
                let pin = owner.pins.remove(&gref).expect("just found");
                if pin.ended {
                    owner.refs.give(gref);
                    owner.free_frames(pin.frame, 1);
                }
            }
        }
        self.bury(mapping.owner);
    }

    /// Forgets a domain that has ended, when nobody has a page of it.
    fn bury(&mut self, life: Life) {
        if self.lives.get(&life).is_some_and(|tenant| !tenant.alive && tenant.pins.is_empty()) {
            self.lives.remove(&life);
        }
    }

    fn share(&mut self, id: ConnectionId, with: DomainId, pages: u32, writable: bool) -> Answer {
        if pages == 0 {
            return Err(Errno::INVAL);
        }
        let life = self.connection(id)?.life;
        let tenant = self.lives.get_mut(&life).ok_or(Errno::SRCH)?;
        let first_ref = tenant.refs.take(pages).ok_or(Errno::NOSPC)?;
        let Some(first_frame) = tenant.frames.take(pages) else {
            (first_ref..first_ref + pages).for_each(|gref| tenant.refs.give(gref));
            return Err(Errno::NOMEM);
        };
        for page in 0..pages {
            let entry = Entry { with, writable, frame: first_frame + page, injected: GrantStatus::OKAY };
            tenant.table.grant(first_ref + page, Some(entry));
        }
        tenant.live_grants += u64::from(pages);
        let connection = self.connection(id)?;
        connection.next = connection.next.wrapping_add(1);
        let share = connection.next;
        connection.shares.insert(share, Share { first_frame, first_ref, pages });
        Ok((vec![share, first_frame, first_ref], vec![]))
    }

    fn unshare(&mut self, owner: Life, share: &Share) {
        let Some(tenant) = self.lives.get_mut(&owner) else { return };
        tenant.live_grants -= u64::from(share.pages);
        let mut free_from = 0;
        for page in 0..share.pages {
            let gref = share.first_ref + page;
            tenant.table.grant(gref, None);
            tenant.unmappable.remove(&GrantRef(gref));
            if let Some(pin) = tenant.pins.get_mut(&gref) {
                pin.ended = true;
                tenant.free_frames(share.first_frame + free_from, page - free_from);
                free_from = page + 1;
            } else {
                tenant.refs.give(gref);
            }
        }
        tenant.free_frames(share.first_frame + free_from, share.pages - free_from);
    }
}

impl Tenant {
    /// Frames are zero when they are shared again.
    fn free_frames(&mut self, first: u32, count: u32) {
        use rustix::fs::FallocateFlags;
        if count == 0 {
            return;
        }
        let page = u64::from(mqblk_memory::PAGE_BYTES);
        let (start, len) = (u64::from(first) * page, u64::from(count) * page);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.table.memory_file, flags, start, len) {
            Ok(()) => (first..first + count).for_each(|frame| self.frames.give(frame)),
            Err(error) => tracing::warn!(domain = self.id.0, first, count, %error, "pages are lost to the domain"),
        }
    }
}

/// What tests ask for.
impl Hypervisor {
    pub(super) fn counters(&self) -> Counters {
        let mut all = self.done;
        for id in self.connections.keys() {
            let line = self.board.connection(id.0).expect("numbers are lines of the board");
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

    /// Of one domain: its pages that are mapped, the pages that it has mapped, its grants, its ports.
    pub(super) fn domain(&self, id: DomainId) -> Option<[u64; 4]> {
        let tenant = self.lives.get(self.living.get(&id)?)?;
        let ports = self.channels.open_ports(Some(id));
        Some([tenant.mapped, tenant.maptrack.into(), tenant.live_grants, ports])
    }

    /// Mappings of one page now.
    pub(super) fn mappings_of(&self, id: DomainId, gref: GrantRef) -> u32 {
        let tenant = self.living.get(&id).and_then(|life| self.lives.get(life));
        tenant.and_then(|tenant| tenant.pins.get(&gref.0)).map_or(0, |pin| pin.count)
    }

    pub(super) fn is_bound(&self, id: DomainId, port: Port) -> bool {
        self.channels.is_bound(id, port)
    }

    pub(super) fn fail_maps(&mut self, calls: u32) {
        self.failing_maps = calls;
    }

    /// `false` when there is no such grant.
    pub(super) fn fail_map_of(&mut self, id: DomainId, gref: GrantRef, fail: bool) -> bool {
        let Some(tenant) = self.living(id) else { return false };
        if !fail {
            return tenant.unmappable.remove(&gref);
        }
        tenant.table.entry(gref.0).is_some() && { tenant.unmappable.insert(gref) || true }
    }

    /// `false` when there is no such grant.
    pub(super) fn fail_copy_of(&mut self, id: DomainId, gref: GrantRef, status: GrantStatus) -> bool {
        let Some(tenant) = self.living(id) else { return false };
        let entry = tenant.table.entry(gref.0);
        tenant.table.grant(gref.0, entry.map(|entry| Entry { injected: status, ..entry }));
        entry.is_some()
    }

    pub(super) fn maptrack_limit(&mut self, pages: u32) {
        self.sizes.maptrack = pages;
    }
}
