//! A domain: pages, and a grant table with injected failures.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use mqblk_memory::{
    CopyDirection, GrantAccess, GrantCopy, GrantRef, GrantStatus, GuestAddress, GuestMemory, PageArena, PageSlot,
    Region,
};

use super::PAGE;

/// A grant and its injected failures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    /// The granted page.
    pub page: u32,
    /// Write access is granted.
    pub writable: bool,
    /// Status with which copies fail.
    pub copy_status: Option<GrantStatus>,
    /// Mapping fails.
    pub no_map: bool,
}

#[derive(Debug, Default)]
pub(crate) struct GrantTable {
    grants: HashMap<u32, Grant>,
    /// Grants that one call has mapped, by ring and first slot.
    mapped: HashMap<(u32, u32), Vec<u32>>,
    /// Number of calls that will fail.
    pub fail_maps: u32,
    pub fail_unmaps: u32,
    pub fail_copy_calls: u32,
    pub maps: u64,
    pub unmaps: u64,
    pub copies: u64,
    pub copy_calls: u64,
    /// Grants in the order in which they were unmapped.
    pub unmapped: Vec<u32>,
    rings: u32,
}

/// A domain with its memory.
pub(crate) struct Domain {
    pub memory: Arc<GuestMemory>,
    file: File,
    table: Mutex<GrantTable>,
}

impl Domain {
    pub(crate) fn new(pages: u32) -> Arc<Domain> {
        let (region, file) = Region::shared("domain", u64::from(pages) * PAGE, GuestAddress(0)).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        Arc::new(Domain { memory, file, table: Mutex::default() })
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, GrantTable> {
        self.table.lock().unwrap()
    }

    /// Grants a page.
    pub(crate) fn grant(&self, gref: u32, page: u32, writable: bool) {
        let grant = Grant { page, writable, copy_status: None, no_map: false };
        self.table().grants.insert(gref, grant);
    }

    /// Changes a grant.
    pub(crate) fn change(&self, gref: u32, change: impl FnOnce(&mut Grant)) {
        change(self.table().grants.get_mut(&gref).unwrap());
    }

    /// Ends a grant. Returns true if it is not mapped: only then the domain may reuse the page.
    #[must_use]
    pub(crate) fn end(&self, gref: u32) -> bool {
        let mut table = self.table();
        table.grants.remove(&gref).expect("a grant ends once");
        !table.mapped.values().flatten().any(|mapped| *mapped == gref)
    }

    /// Returns the number of mapped pages.
    pub(crate) fn mapped(&self) -> usize {
        self.table().mapped.values().map(Vec::len).sum()
    }

    /// Returns the mapped grants.
    pub(crate) fn mapped_grants(&self) -> Vec<u32> {
        let mut grants: Vec<u32> = self.table().mapped.values().flatten().copied().collect();
        grants.sort_unstable();
        grants
    }

    /// Clears all mappings, as when the backend process is killed.
    pub(crate) fn forget_mappings(&self) {
        self.table().mapped.clear();
    }

    pub(crate) fn fill(&self, page: u32, byte: u8) {
        self.memory.write(GuestAddress(u64::from(page) * PAGE), &[byte; PAGE as usize]).unwrap();
    }

    pub(crate) fn write(&self, page: u32, at: u64, bytes: &[u8]) {
        self.memory.write(GuestAddress(u64::from(page) * PAGE + at), bytes).unwrap();
    }

    pub(crate) fn read(&self, page: u32, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.read(GuestAddress(u64::from(page) * PAGE + at), &mut bytes).unwrap();
        bytes
    }

    /// Returns grant access for one ring.
    pub(crate) fn access(self: &Arc<Self>) -> Box<dyn GrantAccess> {
        let mut table = self.table();
        table.rings += 1;
        Box::new(DomainGrants { ring: table.rings, domain: Arc::clone(self) })
    }
}

struct DomainGrants {
    ring: u32,
    domain: Arc<Domain>,
}

fn einval(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

impl GrantAccess for DomainGrants {
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        let mut table = self.domain.table();
        table.copy_calls += 1;
        table.copies += copies.len() as u64;
        if table.fail_copy_calls > 0 {
            table.fail_copy_calls -= 1;
            return Err(einval("injected failure"));
        }
        // As in the kernel: one copy beyond its page fails the whole call.
        assert!(copies.iter().all(|copy| u64::from(copy.offset) + u64::from(copy.len) <= PAGE && copy.len > 0));
        let mut bytes = [0; PAGE as usize];
        for copy in copies {
            let GrantCopy { gref, offset, len, slot, slot_offset, direction, .. } = *copy;
            copy.status = match table.grants.get(&gref.0) {
                None => GrantStatus::BAD_REF,
                Some(Grant { copy_status: Some(status), .. }) => *status,
                Some(Grant { writable: false, .. }) if direction == CopyDirection::ToGrant => {
                    GrantStatus::GENERAL_ERROR
                }
                Some(grant) => {
                    let bytes = &mut bytes[..len.into()];
                    let theirs = GuestAddress(u64::from(grant.page) * PAGE + u64::from(offset));
                    let ours = slot.address(slot_offset.into());
                    let (from, at, to, there) = match direction {
                        CopyDirection::FromGrant => (&self.domain.memory, theirs, arena.memory(), ours),
                        CopyDirection::ToGrant => (arena.memory(), ours, &self.domain.memory, theirs),
                    };
                    from.read(at, bytes).unwrap();
                    to.write(there, bytes).unwrap();
                    GrantStatus::OKAY
                }
            };
        }
        Ok(())
    }

    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> io::Result<()> {
        let mut table = self.domain.table();
        if table.fail_maps > 0 {
            table.fail_maps -= 1;
            return Err(einval("injected failure"));
        }
        let allowed = |gref: &GrantRef| {
            table
                .grants
                .get(&gref.0)
                .filter(|grant| !grant.no_map && (grant.writable || !writable))
                .map(|grant| grant.page)
        };
        let pages: Option<Vec<u32>> = refs.iter().map(allowed).collect();
        let pages = pages.ok_or_else(|| einval("a grant is not there or not so allowed"))?;
        assert!(!table.mapped.contains_key(&(self.ring, first.0)), "one mapping in a slot");
        for (at, page) in (0..).zip(pages) {
            arena.map_file(PageSlot(first.0 + at), 1, &self.domain.file, u64::from(page) * PAGE, writable).unwrap();
        }
        table.maps += refs.len() as u64;
        table.mapped.insert((self.ring, first.0), refs.iter().map(|gref| gref.0).collect());
        Ok(())
    }

    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> io::Result<()> {
        let mut table = self.domain.table();
        if table.fail_unmaps > 0 {
            table.fail_unmaps -= 1;
            return Err(einval("injected failure"));
        }
        let refs = table.mapped.remove(&(self.ring, first.0)).expect("only mapped grants are unmapped");
        arena.map_zero_pages(first, refs.len() as u32).unwrap();
        table.unmaps += refs.len() as u64;
        table.unmapped.extend(refs);
        Ok(())
    }
}
