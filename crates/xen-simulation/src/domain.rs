//! An instance of a domain: its grant table, its memory, and its pages that other domains have mapped.

use std::collections::{BTreeSet, HashMap};
use std::io;

use mqblk_memory::{DomainId, GrantRef, GrantStatus, PAGE_BYTES};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::range_allocator::RangeAllocator;
use super::shared_memory::{DomainMemory, FIRST_REF, GrantEntry};
use super::stats::DomainLimits;

/// A page that another domain has mapped.
#[derive(Debug)]
struct MappedPage {
    count: u32,
    frame: u32,
    /// True if the owner has ended the grant: the page is freed with the last mapping.
    grant_ended: bool,
}

/// Pages granted by one call: consecutive frames and references.
#[derive(Debug)]
pub(super) struct GrantRange {
    pub first_frame: u32,
    pub first_ref: u32,
    pages: u32,
}

#[derive(Debug)]
pub(super) struct DomainInstance {
    id: DomainId,
    /// False once the domain is destroyed. The instance stays until none of its pages is mapped.
    alive: bool,
    pub memory: DomainMemory,
    frames: RangeAllocator,
    refs: RangeAllocator,
    mapped_pages: HashMap<u32, MappedPage>,
    pub live_grants: u64,
    /// Its pages that other domains have mapped.
    pub live_mappings: u64,
    /// Foreign pages that it has mapped.
    pub maptrack: u32,
    failing_refs: BTreeSet<GrantRef>,
}

impl DomainInstance {
    pub(super) fn create(id: DomainId, sizes: DomainLimits) -> io::Result<DomainInstance> {
        Ok(DomainInstance {
            id,
            alive: true,
            memory: DomainMemory::create(id, sizes.pages, sizes.refs)?,
            frames: RangeAllocator::new(0, sizes.pages),
            refs: RangeAllocator::new(FIRST_REF, sizes.refs.max(FIRST_REF)),
            mapped_pages: HashMap::new(),
            live_grants: 0,
            live_mappings: 0,
            maptrack: 0,
            failing_refs: BTreeSet::new(),
        })
    }

    /// Marks the domain as destroyed.
    pub(super) fn mark_destroyed(&mut self) {
        self.alive = false;
        self.memory.mark_destroyed();
    }

    /// Returns true if the domain is destroyed and none of its pages is mapped.
    pub(super) fn is_unused(&self) -> bool {
        !self.alive && self.mapped_pages.is_empty()
    }

    /// Records a mapping of pages by `domain` and returns their frames. `None`, and nothing is mapped, unless it may
    /// map all of them.
    pub(super) fn map(&mut self, domain: DomainId, writable: bool, refs: &[GrantRef]) -> Option<Vec<u32>> {
        let allowed = |gref: &GrantRef| {
            let entry = self.memory.entry(gref.0).filter(|entry| entry.with == domain && (entry.writable || !writable));
            entry.filter(|_| !self.failing_refs.contains(gref)).map(|entry| entry.frame)
        };
        let frames: Vec<u32> = refs.iter().map(allowed).collect::<Option<_>>()?;
        for (gref, &frame) in refs.iter().zip(&frames) {
            self.mapped_pages.entry(gref.0).or_insert(MappedPage { count: 0, frame, grant_ended: false }).count += 1;
        }
        self.live_mappings += refs.len() as u64;
        Some(frames)
    }

    /// Ends a mapping.
    pub(super) fn unmap(&mut self, refs: &[GrantRef]) {
        self.live_mappings -= refs.len() as u64;
        for gref in refs {
            let pin = self.mapped_pages.get_mut(&gref.0).expect("a mapped page is recorded");
            pin.count -= 1;
            if pin.count > 0 {
                continue;
            }
            let pin = self.mapped_pages.remove(&gref.0).expect("just found");
            if pin.grant_ended {
                self.refs.release(gref.0);
                self.free_frames(pin.frame, 1);
            }
        }
    }

    /// Allocates pages and grants them to `with`.
    pub(super) fn share(&mut self, with: DomainId, pages: u32, writable: bool) -> Result<GrantRange, Errno> {
        if pages == 0 {
            return Err(Errno::INVAL);
        }
        let first_ref = self.refs.allocate(pages).ok_or(Errno::NOSPC)?;
        let Some(first_frame) = self.frames.allocate(pages) else {
            (first_ref..first_ref + pages).for_each(|gref| self.refs.release(gref));
            return Err(Errno::NOMEM);
        };
        for page in 0..pages {
            let entry = GrantEntry { with, writable, frame: first_frame + page, injected: GrantStatus::OKAY };
            self.memory.set_entry(first_ref + page, Some(entry));
        }
        self.live_grants += u64::from(pages);
        Ok(GrantRange { first_frame, first_ref, pages })
    }

    /// Ends the grants, and frees the pages: mapped ones with their last mapping, others at once.
    pub(super) fn unshare(&mut self, share: &GrantRange) {
        self.live_grants -= u64::from(share.pages);
        let mut free_from = 0;
        for page in 0..share.pages {
            let gref = share.first_ref + page;
            self.memory.set_entry(gref, None);
            self.failing_refs.remove(&GrantRef(gref));
            if let Some(pin) = self.mapped_pages.get_mut(&gref) {
                pin.grant_ended = true;
                self.free_frames(share.first_frame + free_from, page - free_from);
                free_from = page + 1;
            } else {
                self.refs.release(gref);
            }
        }
        self.free_frames(share.first_frame + free_from, share.pages - free_from);
    }

    /// Frees frames and their memory: they are zero when they are allocated again.
    fn free_frames(&mut self, first: u32, count: u32) {
        if count == 0 {
            return;
        }
        let page = u64::from(PAGE_BYTES);
        let (start, len) = (u64::from(first) * page, u64::from(count) * page);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.memory.memory_file, flags, start, len) {
            Ok(()) => (first..first + count).for_each(|frame| self.frames.release(frame)),
            Err(error) => tracing::warn!(domain = self.id.0, first, count, %error, "frames cannot be freed"),
        }
    }

    pub(super) fn mapping_count(&self, gref: GrantRef) -> u32 {
        self.mapped_pages.get(&gref.0).map_or(0, |pin| pin.count)
    }

    /// Returns false if there is no such grant, or no failure to end.
    pub(super) fn set_map_failure(&mut self, gref: GrantRef, fail: bool) -> bool {
        if !fail {
            return self.failing_refs.remove(&gref);
        }
        let known = self.memory.entry(gref.0).is_some();
        if known {
            self.failing_refs.insert(gref);
        }
        known
    }

    /// Returns false if there is no such grant.
    pub(super) fn set_copy_failure(&mut self, gref: GrantRef, status: GrantStatus) -> bool {
        let entry = self.memory.entry(gref.0);
        self.memory.set_entry(gref.0, entry.map(|entry| GrantEntry { injected: status, ..entry }));
        entry.is_some()
    }
}
