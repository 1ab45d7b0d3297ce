//! A ring's access to the pages of another domain.
//!
//! The caller copies by itself: it reads the domain's grant table in shared memory and copies between the domain's
//! memory and the arena, both of which are mapped. No message, no system call, no lock. The machine makes mappings by
//! hypercall, records them, and ends them with the program's connection.

use std::collections::HashMap;
use std::io;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_memory::{
    CopyDirection, DomainId, GrantAccess, GrantCopy, GrantRef, GrantStatus, GuestAddress, PAGE_BYTES, PageArena,
    PageSlot,
};
use rustix::io::Errno;

use super::foreign_domains::ForeignDomains;
use super::hypercall::{Hypercall, HypercallSocket, MOST_REFS, encode_map, hypercall, malformed_result};
use super::shared_memory::{CacheLine, ForeignDomain, counter_word};

/// The result of one [`map`](GrantAccess::map).
#[derive(Clone, Copy, Debug)]
struct Mapping {
    handle: u32,
    pages: u32,
}

/// Access to one domain's grants. When it is dropped the machine counts its mappings as unmapped; the slots keep the
/// pages until cleared.
pub(super) struct SimulatedGrants {
    of: DomainId,
    own: DomainId,
    connection: Mutex<HypercallSocket>,
    counters: CacheLine,
    domains: Arc<ForeignDomains>,
    foreign: Option<Arc<ForeignDomain>>,
    /// Mappings by arena (the address of its memory table) and first slot.
    mapped: HashMap<(usize, PageSlot), Mapping>,
    /// Frames of the mapping in progress.
    frames: Vec<u32>,
}

impl SimulatedGrants {
    pub(super) fn new(
        of: DomainId,
        own: DomainId,
        connection: Mutex<HypercallSocket>,
        counters: CacheLine,
        domains: Arc<ForeignDomains>,
    ) -> SimulatedGrants {
        SimulatedGrants {
            of,
            own,
            connection,
            counters,
            domains,
            foreign: None,
            mapped: HashMap::new(),
            frames: vec![],
        }
    }

    /// Returns the domain, if it is alive.
    fn foreign(&mut self) -> Option<&ForeignDomain> {
        if !self.foreign.as_ref().is_some_and(|foreign| foreign.is_alive()) {
            self.foreign = self.domains.attach(self.of, &self.connection).ok();
        }
        self.foreign.as_deref()
    }

    fn unmap_at_machine(&self, handle: u32) -> io::Result<()> {
        hypercall(&self.connection, &Hypercall::UnmapGrants { handle }, |_, _| Ok(()))
    }
}

fn key(arena: &PageArena, first: PageSlot) -> (usize, PageSlot) {
    (ptr::from_ref(arena.memory().as_ref()).expose_provenance(), first)
}

fn is_inside(arena: &PageArena, copy: &GrantCopy) -> bool {
    let end = u32::from(copy.offset) + u32::from(copy.len);
    end <= PAGE_BYTES && arena.host_address(copy.slot, copy.slot_offset.into(), copy.len.into()).is_some()
}

#[inline]
fn copy_one(foreign: &ForeignDomain, own: DomainId, arena: &PageArena, copy: &GrantCopy) -> GrantStatus {
    let Some(entry) = foreign.entry(copy.gref.0) else { return GrantStatus::BAD_REF };
    if entry.injected != GrantStatus::OKAY {
        return entry.injected;
    }
    let to_grant = copy.direction == CopyDirection::ToGrant;
    if entry.with != own || (to_grant && !entry.writable) {
        return GrantStatus::GENERAL_ERROR;
    }
    let theirs = GuestAddress(u64::from(entry.frame) * u64::from(PAGE_BYTES) + u64::from(copy.offset));
    let ours = copy.slot.address(copy.slot_offset.into());
    let len = u64::from(copy.len);
    let copied = if to_grant {
        arena.memory().copy_to(ours, &foreign.memory, theirs, len)
    } else {
        foreign.memory.copy_to(theirs, arena.memory(), ours, len)
    };
    if copied.is_some() { GrantStatus::OKAY } else { GrantStatus::GENERAL_ERROR }
}

impl GrantAccess for SimulatedGrants {
    /// Copies as `/dev/xen/gntdev` does: a copy that crosses its page or leaves the arena fails the whole call and
    /// nothing is copied; a copy of no bytes always succeeds; an unknown domain or reference, or a wrong direction,
    /// is the status of that copy.
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        if !copies.iter().all(|copy| is_inside(arena, copy)) {
            return Err(Errno::INVAL.into());
        }
        let own = self.own;
        let Some(foreign) = self.foreign() else {
            copies.iter_mut().for_each(|copy| copy.status = GrantStatus::BAD_DOMAIN);
            return Ok(());
        };
        let mut bytes = 0;
        for copy in copies.iter_mut() {
            copy.status = if copy.len == 0 { GrantStatus::OKAY } else { copy_one(foreign, own, arena, copy) };
            if copy.status == GrantStatus::OKAY {
                bytes += u64::from(copy.len);
            }
        }
        self.counters.add(counter_word::COPY_CALLS, 1);
        self.counters.add(counter_word::COPIES, copies.len() as u64);
        self.counters.add(counter_word::COPIED_BYTES, bytes);
        Ok(())
    }

    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> io::Result<()> {
        let pages = refs.len();
        let bytes = u32::try_from(pages).ok().and_then(|pages| pages.checked_mul(PAGE_BYTES));
        let is_inside = bytes.is_some_and(|bytes| arena.host_address(first, 0, bytes).is_some());
        if pages == 0 || pages > MOST_REFS || !is_inside || self.mapped.contains_key(&key(arena, first)) {
            return Err(Errno::INVAL.into());
        }
        let packets = self.connection.get_mut().unwrap_or_else(PoisonError::into_inner);
        encode_map(packets.words(), self.of, writable, refs);
        packets.call()?;
        let [_, handle, frames @ ..] = packets.words().as_slice() else { return Err(malformed_result()) };
        let handle = *handle;
        self.frames.clear();
        self.frames.extend(frames);
        let result = self.map_frames(arena, first, pages, writable);
        if result.is_err() {
            let _ = arena.map_zero_pages(first, pages as u32);
            self.unmap_at_machine(handle)?;
            return result;
        }
        self.mapped.insert(key(arena, first), Mapping { handle, pages: pages as u32 });
        Ok(())
    }

    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> io::Result<()> {
        let mapped = *self.mapped.get(&key(arena, first)).ok_or(Errno::INVAL)?;
        arena.map_zero_pages(first, mapped.pages)?;
        self.mapped.remove(&key(arena, first));
        self.unmap_at_machine(mapped.handle)
    }
}

impl SimulatedGrants {
    /// Maps the frames into the slots; consecutive frames in one call.
    fn map_frames(&mut self, arena: &PageArena, first: PageSlot, pages: usize, writable: bool) -> io::Result<()> {
        if self.frames.len() != pages {
            return Err(malformed_result());
        }
        let frames = std::mem::take(&mut self.frames);
        let foreign = self.foreign().ok_or_else(|| io::Error::from(Errno::SRCH));
        let result = foreign.and_then(|foreign| {
            let mut slot = first;
            for run in frames.chunk_by(|one, next| one + 1 == *next) {
                let offset = u64::from(run[0]) * u64::from(PAGE_BYTES);
                arena.map_file(slot, run.len() as u32, &foreign.memory_file, offset, writable)?;
                slot.0 += run.len() as u32;
            }
            Ok(())
        });
        self.frames = frames;
        result
    }
}
