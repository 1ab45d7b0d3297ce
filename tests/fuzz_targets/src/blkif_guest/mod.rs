//! The guest of the target `blkif`: its pages and their grants, its rings, and its attempts to change a request that
//! the backend has read.

pub(crate) mod requests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arbitrary::{Result, Unstructured};
use mqblk_memory::{CopyDirection, DomainId, GrantAccess, GrantCopy, GrantRef, GrantStatus, PageArena, PageSlot};
use mqblk_ring::blkif::Abi;
use mqblk_xen::Xen;

use crate::blkif_guest::requests::{BATCH, Effect, GuestRequest, Verdict};
use crate::xen_host::{GUEST, GuestPages, HOST, PAGE, XenHost};

/// Ordinary pages of a request's part of the memory.
pub(crate) const PAGES: usize = 66;
/// A page that can only be copied.
pub(crate) const UNMAPPABLE: usize = PAGES;
/// A page that can only be mapped.
pub(crate) const MAP_ONLY: usize = PAGES + 1;
/// A page granted read-only.
pub(crate) const READ_ONLY: usize = PAGES + 2 + TABLES;
/// Indirect pages of a request.
pub(crate) const TABLES: usize = 2;
/// Pages of a part that are granted for writing.
const WRITABLE: usize = PAGES + 2 + TABLES;
/// A third domain.
const OTHER: DomainId = DomainId(7);
/// The byte with which the guest overwrites memory.
const SCRIBBLE: u8 = 0x99;

/// The backend's abilities with a grant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GrantAbility {
    pub(crate) mapped: bool,
    pub(crate) mapped_writable: bool,
    pub(crate) copied_from: bool,
    pub(crate) copied_to: bool,
}

/// A grant in a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) gref: u32,
    /// Its page in [`BlkifMemory`]. `None`: unreachable for the backend.
    pub(crate) page: Option<usize>,
    pub(crate) ability: GrantAbility,
}

/// The pages of the guest's requests.
pub(crate) struct BlkifMemory {
    writable: GuestPages,
    /// One page of each part.
    read_only: GuestPages,
    foreign: GuestPages,
    /// An ended grant.
    ended: u32,
}

impl BlkifMemory {
    pub(crate) fn new(host: &XenHost) -> BlkifMemory {
        let guest = &*host.guest;
        let ended = GuestPages::new(guest, HOST, 1, true);
        let writable = GuestPages::new(guest, HOST, WRITABLE * BATCH, true);
        let read_only = GuestPages::new(guest, HOST, BATCH, false);
        let foreign = GuestPages::new(guest, OTHER, 1, true);
        for part in 0..BATCH {
            let gref = |page| GrantRef(writable.gref(part * WRITABLE + page));
            assert!(host.machine.set_map_failure(GUEST, gref(UNMAPPABLE), true));
            assert!(host.machine.set_copy_failure(GUEST, gref(MAP_ONLY), GrantStatus::GENERAL_ERROR));
        }
        let ended = ended.gref(0);
        BlkifMemory { writable, read_only, foreign, ended }
    }

    /// Returns the grant of a page of a part: one of the ordinary ones, or [`UNMAPPABLE`], [`MAP_ONLY`], [`READ_ONLY`].
    pub(crate) fn data(&self, part: usize, page: usize) -> Grant {
        let all = GrantAbility { mapped: true, mapped_writable: true, copied_from: true, copied_to: true };
        if page == READ_ONLY {
            let ability = GrantAbility { mapped_writable: false, copied_to: false, ..all };
            return Grant { gref: self.read_only.gref(part), page: Some(WRITABLE * BATCH + part), ability };
        }
        let at = part * WRITABLE + page;
        let ability = match page {
            UNMAPPABLE => GrantAbility { mapped: false, mapped_writable: false, ..all },
            MAP_ONLY => GrantAbility { copied_from: false, copied_to: false, ..all },
            _ => all,
        };
        Grant { gref: self.writable.gref(at), page: Some(at), ability }
    }

    /// Returns the grant of an indirect page of a part.
    pub(crate) fn table(&self, part: usize, table: usize) -> Grant {
        self.data(part, PAGES + 2 + table)
    }

    /// Returns a grant that the backend cannot use.
    pub(crate) fn missing(&self, u: &mut Unstructured<'_>) -> Result<Grant> {
        let gref = *u.choose(&[0, 1, self.foreign.gref(0), self.ended, 2047, 2048, 1 << 31, u32::MAX])?;
        Ok(Grant { gref, page: None, ability: GrantAbility::default() })
    }

    fn place(&mut self, at: usize) -> (&mut GuestPages, usize) {
        let first = WRITABLE * BATCH * PAGE;
        if at < first { (&mut self.writable, at) } else { (&mut self.read_only, at - first) }
    }

    pub(crate) fn expected(&self, at: usize, len: usize) -> &[u8] {
        let first = WRITABLE * BATCH * PAGE;
        if at < first { self.writable.expected(at, len) } else { self.read_only.expected(at - first, len) }
    }

    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        let (pages, at) = self.place(at);
        pages.put(at, bytes);
    }

    /// Writes the data that the device reads for a request, and overwrites the memory that it must write.
    pub(crate) fn prepare(&mut self, u: &mut Unstructured<'_>, request: &GuestRequest) -> Result<()> {
        let (seed, step): (u8, u8) = (u.arbitrary()?, u.arbitrary()?);
        for (number, segment) in request.segments.iter().enumerate() {
            let Some((at, len)) = segment.range() else { continue };
            let byte = |at: usize| seed.wrapping_add(step.wrapping_mul(at as u8)) ^ (number + (at >> 8)) as u8;
            let data: Vec<u8> = if request.is_write() { (0..len).map(byte).collect() } else { vec![!seed; len] };
            self.put(at, &data);
        }
        let table = request.table_bytes();
        for (bytes, grant) in table.chunks(PAGE).zip(&request.tables) {
            if let Some(page) = grant.page {
                self.put(page * PAGE, bytes);
            }
        }
        Ok(())
    }

    /// Enters the data that a completed request has written.
    pub(crate) fn enter(&mut self, request: &GuestRequest, verdict: &Verdict) {
        let (data, whole) = match &verdict.effect {
            Effect::Read(data) => (data, true),
            Effect::ReadInPart(data) => (data, false),
            Effect::Nothing | Effect::Stored(..) => return,
        };
        let mut from = 0;
        for segment in &request.segments {
            let len = segment.range().map_or_else(|| usize::from(segment.last - segment.first) * 512 + 512, |at| at.1);
            if from + len > data.len() {
                return;
            }
            let content = &data[from..from + len];
            from += len;
            let Some((at, _)) = segment.range() else { continue };
            let may_write = segment.grant.ability.copied_to || segment.grant.ability.mapped_writable;
            let (pages, at) = self.place(at);
            if whole || may_write && pages.read(at, len) == content {
                pages.expect(at, content);
            }
        }
    }

    pub(crate) fn check(&self) {
        self.writable.check("pages of requests");
        self.read_only.check("pages that are granted read-only");
        self.foreign.check("pages that are granted to another domain");
    }
}

/// Bytes before the first entry of a ring.
const HEADER: usize = 64;
/// Bytes of an entry that a response may overwrite.
const RESPONSE: usize = 16;

/// A ring, as its frontend uses it. Source: Xen's `public/io/ring.h`.
pub(crate) struct GuestRing {
    pub(crate) pages: GuestPages,
    pub(crate) page_count: usize,
    abi: Abi,
    entry_bytes: usize,
    pub(crate) entries: u32,
    pub(crate) req_prod: u32,
    pub(crate) rsp_cons: u32,
}

impl GuestRing {
    /// Makes a ring of `page_count` pages whose indexes start at `start`.
    pub(crate) fn new(guest: &dyn Xen, page_count: usize, abi: Abi, start: u32) -> GuestRing {
        let entry_bytes = if matches!(abi, Abi::X86_32) { 108 } else { 112 };
        let entries = 1 << ((page_count * PAGE - HEADER) / entry_bytes).ilog2();
        let mut pages = GuestPages::new(guest, HOST, page_count, true);
        for (at, value) in [(0, start), (4, start.wrapping_add(1)), (8, start), (12, start.wrapping_add(1))] {
            pages.put(at, &value.to_le_bytes());
        }
        GuestRing { pages, page_count, abi, entry_bytes, entries, req_prod: start, rsp_cons: start }
    }

    fn entry(&self, index: u32) -> usize {
        HEADER + (index & (self.entries - 1)) as usize * self.entry_bytes
    }

    /// Puts a request on the ring. Returns the offset of its entry.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> usize {
        let at = self.entry(self.req_prod);
        self.pages.put(at, bytes);
        self.req_prod = self.req_prod.wrapping_add(1);
        at
    }

    /// Requests an event when the response index passes `event`.
    pub(crate) fn request_event(&mut self, event: u32) {
        self.pages.put(12, &event.to_le_bytes());
    }

    /// Publishes the requests since `before`. Returns true if the backend has requested an event.
    pub(crate) fn publish(&mut self, before: u32) -> bool {
        self.pages.put(0, &self.req_prod.to_le_bytes());
        self.pages.read_u32(4).wrapping_sub(before.wrapping_add(1)) < self.req_prod.wrapping_sub(before)
    }

    /// Publishes any index.
    pub(crate) fn publish_index(&mut self, index: u32) {
        self.pages.put(0, &index.to_le_bytes());
    }

    /// Returns the number of responses to take.
    pub(crate) fn ready(&self) -> u32 {
        self.pages.read_u32(8).wrapping_sub(self.rsp_cons)
    }

    /// Returns the id, operation and status of the next response.
    pub(crate) fn response(&self) -> (u64, u8, i16) {
        let bytes = self.pages.read(self.entry(self.rsp_cons), RESPONSE);
        let id = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
        (id, bytes[8], i16::from_le_bytes([bytes[10], bytes[11]]))
    }

    /// Takes the next response, which must be this one and change nothing else of its entry.
    pub(crate) fn take(&mut self, id: u64, operation: u8, status: i16) {
        let mut bytes = [&id.to_le_bytes()[..], &[operation, 0], &status.to_le_bytes(), &[0; 4]].concat();
        if matches!(self.abi, Abi::X86_32) {
            bytes.truncate(12);
        }
        let at = self.entry(self.rsp_cons);
        self.pages.expect(at, &bytes);
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        self.pages.expect(8, &self.rsp_cons.to_le_bytes());
    }

    /// Checks every byte except the index with which the backend requests events.
    pub(crate) fn check(&self) {
        self.pages.check_except("a ring", 4..8);
    }
}

/// Memory that the guest overwrites once the backend has read it.
#[derive(Default)]
pub(crate) struct Overwrites {
    /// Offsets of entries, by ring.
    entries: Vec<Vec<usize>>,
    /// Indirect pages, by a grant of the request's data.
    tables: HashMap<u32, Vec<usize>>,
    /// Pages to overwrite once they were copied, by their grant.
    data: HashMap<u32, usize>,
}

/// The guest's memory and rings.
pub(crate) struct BlkifGuest {
    pub(crate) memory: BlkifMemory,
    pub(crate) rings: Vec<GuestRing>,
    pub(crate) overwrites: Overwrites,
}

pub(crate) type SharedGuest = Arc<Mutex<BlkifGuest>>;

/// Locks the guest. Nothing else runs while a target does.
pub(crate) fn lock(guest: &SharedGuest) -> MutexGuard<'_, BlkifGuest> {
    guest.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlkifGuest {
    pub(crate) fn new(memory: BlkifMemory, rings: Vec<GuestRing>) -> SharedGuest {
        Arc::new(Mutex::new(BlkifGuest { memory, rings, overwrites: Overwrites::default() }))
    }

    /// Clears the planned overwrites.
    pub(crate) fn clear_overwrites(&mut self) {
        self.overwrites = Overwrites { entries: vec![vec![]; self.rings.len()], ..Overwrites::default() };
    }

    /// Plans to overwrite a request's entry, its indirect pages and its data once the backend has read them.
    pub(crate) fn overwrite_later(&mut self, ring: usize, entry: usize, request: &GuestRequest) {
        self.overwrites.entries[ring].push(entry);
        let pages: Vec<usize> = request.tables.iter().filter_map(|table| table.page).collect();
        for table in &request.tables {
            self.overwrites.data.extend(table.page.map(|page| (table.gref, page)));
        }
        for segment in &request.segments {
            self.overwrites.tables.insert(segment.grant.gref, pages.clone());
            if let Some(page) = segment.grant.page {
                self.overwrites.data.insert(segment.grant.gref, page);
            }
        }
    }

    fn entries_read(&mut self, ring: usize) {
        let entries = self.overwrites.entries.get_mut(ring).map(std::mem::take).unwrap_or_default();
        let entry_bytes = self.rings[ring].entry_bytes;
        for (number, at) in entries.iter().enumerate() {
            // Each page but the last may begin with a response to another request.
            let kept = if number + 1 == entries.len() { 0 } else { RESPONSE };
            self.rings[ring].pages.put(at + kept, &vec![SCRIBBLE; entry_bytes - kept]);
        }
    }

    fn tables_read(&mut self, gref: GrantRef) {
        for page in self.overwrites.tables.remove(&gref.0).unwrap_or_default() {
            self.memory.put(page * PAGE, &[SCRIBBLE; PAGE]);
        }
    }
}

/// The backend's access to the guest's pages. During each call the guest overwrites the memory that the backend must
/// already have read.
pub(crate) struct HostileGrants {
    pub(crate) inner: Box<dyn GrantAccess>,
    pub(crate) guest: SharedGuest,
    pub(crate) ring: usize,
    /// It maps no pages for other rings.
    pub(crate) own_pool: bool,
}

impl GrantAccess for HostileGrants {
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> std::io::Result<()> {
        let copied = self.inner.copy(arena, copies);
        let mut guest = lock(&self.guest);
        guest.entries_read(self.ring);
        for copy in copies.iter().filter(|copy| copy.direction == CopyDirection::FromGrant) {
            guest.tables_read(copy.gref);
            if let Some(page) = guest.overwrites.data.get(&copy.gref.0).copied() {
                let at = page * PAGE + usize::from(copy.offset);
                guest.memory.put(at, &vec![SCRIBBLE; copy.len.into()]);
            }
        }
        copied
    }

    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> std::io::Result<()> {
        let mapped = self.inner.map(arena, first, refs, writable);
        let mut guest = lock(&self.guest);
        if self.own_pool {
            guest.entries_read(self.ring);
        }
        refs.iter().for_each(|gref| guest.tables_read(*gref));
        mapped
    }

    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> std::io::Result<()> {
        self.inner.unmap(arena, first)
    }
}
