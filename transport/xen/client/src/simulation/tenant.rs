//! An instance of a domain: its grant table, its memory, and its pages that other domains have mapped.

use std::collections::{BTreeSet, HashMap};
use std::io;

use mqblk_memory::{DomainId, GrantRef, GrantStatus, PAGE_BYTES};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::counters::Sizes;
use super::runs::Runs;
use super::table::{Domain, Entry, FIRST_REF};

/// A page that another domain has mapped.
#[derive(Debug)]
struct Pin {
    count: u32,
    frame: u32,
    /// The owner has ended the grant: the page is freed with the last mapping.
    ended: bool,
}

/// Pages granted by one call: consecutive frames and references.
#[derive(Debug)]
pub(super) struct Share {
    pub first_frame: u32,
    pub first_ref: u32,
    pages: u32,
}

#[derive(Debug)]
pub(super) struct Tenant {
    id: DomainId,
    /// False once the domain is destroyed. The instance stays until none of its pages is mapped.
    alive: bool,
    pub table: Domain,
    frames: Runs,
    refs: Runs,
    pins: HashMap<u32, Pin>,
    pub live_grants: u64,
    /// Its pages that other domains have mapped.
    pub mapped: u64,
    /// Foreign pages that it has mapped.
    pub maptrack: u32,
    unmappable: BTreeSet<GrantRef>,
}

impl Tenant {
    pub(super) fn create(id: DomainId, sizes: Sizes) -> io::Result<Tenant> {
        Ok(Tenant {
            id,
            alive: true,
            table: Domain::create(id, sizes.pages, sizes.refs)?,
            frames: Runs::new(0, sizes.pages),
            refs: Runs::new(FIRST_REF, sizes.refs.max(FIRST_REF)),
            pins: HashMap::new(),
            live_grants: 0,
            mapped: 0,
            maptrack: 0,
            unmappable: BTreeSet::new(),
        })
    }

    /// Marks the domain as destroyed.
    pub(super) fn end(&mut self) {
        self.alive = false;
        self.table.end();
    }

    /// Returns true if the domain is destroyed and none of its pages is mapped.
    pub(super) fn is_gone(&self) -> bool {
        !self.alive && self.pins.is_empty()
    }

    /// Records a mapping of pages by `domain` and returns their frames. `None`, and nothing is mapped, unless it may map all of them.
    pub(super) fn pin(&mut self, domain: DomainId, writable: bool, refs: &[GrantRef]) -> Option<Vec<u32>> {
        let allowed = |gref: &GrantRef| {
            let entry = self.table.entry(gref.0).filter(|entry| entry.with == domain && (entry.writable || !writable));
            entry.filter(|_| !self.unmappable.contains(gref)).map(|entry| entry.frame)
        };
        let frames: Vec<u32> = refs.iter().map(allowed).collect::<Option<_>>()?;
        for (gref, &frame) in refs.iter().zip(&frames) {
            self.pins.entry(gref.0).or_insert(Pin { count: 0, frame, ended: false }).count += 1;
        }
        self.mapped += refs.len() as u64;
        Some(frames)
    }

    /// Ends a mapping.
    pub(super) fn unpin(&mut self, refs: &[GrantRef]) {
        self.mapped -= refs.len() as u64;
        for gref in refs {
            let pin = self.pins.get_mut(&gref.0).expect("a mapped page is recorded");
            pin.count -= 1;
            if pin.count > 0 {
                continue;
            }
            let pin = self.pins.remove(&gref.0).expect("just found");
            if pin.ended {
                self.refs.give(gref.0);
                self.free_frames(pin.frame, 1);
            }
        }
    }

    /// Allocates pages and grants them to `with`.
    pub(super) fn share(&mut self, with: DomainId, pages: u32, writable: bool) -> Result<Share, Errno> {
        if pages == 0 {
            return Err(Errno::INVAL);
        }
        let first_ref = self.refs.take(pages).ok_or(Errno::NOSPC)?;
        let Some(first_frame) = self.frames.take(pages) else {
            (first_ref..first_ref + pages).for_each(|gref| self.refs.give(gref));
            return Err(Errno::NOMEM);
        };
        for page in 0..pages {
            let entry = Entry { with, writable, frame: first_frame + page, injected: GrantStatus::OKAY };
            self.table.grant(first_ref + page, Some(entry));
        }
        self.live_grants += u64::from(pages);
        Ok(Share { first_frame, first_ref, pages })
    }

    /// Ends the grants, and frees the pages: mapped ones with their last mapping, others at once.
    pub(super) fn unshare(&mut self, share: &Share) {
        self.live_grants -= u64::from(share.pages);
        let mut free_from = 0;
        for page in 0..share.pages {
            let gref = share.first_ref + page;
            self.table.grant(gref, None);
            self.unmappable.remove(&GrantRef(gref));
            if let Some(pin) = self.pins.get_mut(&gref) {
                pin.ended = true;
                self.free_frames(share.first_frame + free_from, page - free_from);
                free_from = page + 1;
            } else {
                self.refs.give(gref);
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
        match rustix::fs::fallocate(&self.table.memory_file, flags, start, len) {
            Ok(()) => (first..first + count).for_each(|frame| self.frames.give(frame)),
            Err(error) => tracing::warn!(domain = self.id.0, first, count, %error, "frames cannot be freed"),
        }
    }

    pub(super) fn mappings_of(&self, gref: GrantRef) -> u32 {
        self.pins.get(&gref.0).map_or(0, |pin| pin.count)
    }

    /// Returns false if there is no such grant, or no failure to end.
    pub(super) fn fail_map_of(&mut self, gref: GrantRef, fail: bool) -> bool {
        if !fail {
            return self.unmappable.remove(&gref);
        }
        let known = self.table.entry(gref.0).is_some();
        if known {
            self.unmappable.insert(gref);
        }
        known
    }

    /// Returns false if there is no such grant.
    pub(super) fn fail_copy_of(&mut self, gref: GrantRef, status: GrantStatus) -> bool {
        let entry = self.table.entry(gref.0);
        self.table.grant(gref.0, entry.map(|entry| Entry { injected: status, ..entry }));
        entry.is_some()
    }
}
