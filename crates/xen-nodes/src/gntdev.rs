//! `/dev/xen/gntdev`: access to pages that another domain grants.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;

use mqblk_memory::{
    CopyDirection, DomainId, GrantAccess, GrantCopy, GrantRef, GrantStatus, PAGE_BYTES, PageArena, PageSlot,
};

use crate::ioctl::{CopyEnd, CopyGrants, CopySegment, DomainGrantRef, MapGrants, UnmapGrants, ioctl, ioctl_indirect};

/// GNTST_bad_copy_arg: Xen's status of a copy that crosses its page boundary.
const BAD_COPY_ARG: GrantStatus = GrantStatus(-10);

/// One mapping, as the kernel identifies it.
#[derive(Debug)]
struct GrantMapping {
    index: u64,
    pages: u32,
}

/// Access to the pages that one domain grants, over its own descriptor.
///
/// Mapped pages stay mapped after this is dropped, until their slots are cleared or their arena is dropped.
#[derive(Debug)]
pub struct GntdevAccess {
    node: File,
    domain: DomainId,
    /// Mappings by the address of their first page.
    mappings: HashMap<u64, GrantMapping>,
    /// Kept for its capacity, so that a copy allocates nothing.
    segments: Vec<CopySegment>,
    request: Vec<u64>,
}

impl GntdevAccess {
    /// Opens the node, for grants of `domain`.
    ///
    /// # Errors
    /// When the node cannot be opened; the error says how to fix it.
    pub fn open(domain: DomainId) -> io::Result<GntdevAccess> {
        Ok(GntdevAccess::from_file(crate::open_node("gntdev")?, domain))
    }

    fn from_file(node: File, domain: DomainId) -> GntdevAccess {
        GntdevAccess { node, domain, mappings: HashMap::new(), segments: vec![], request: vec![] }
    }

    /// Converts a copy to the kernel's form. `None` for an invalid range, for which the kernel would refuse the whole
    /// batch.
    fn copy_segment(&self, arena: &PageArena, copy: &GrantCopy) -> Option<CopySegment> {
        let inside = u32::from(copy.offset) + u32::from(copy.len) <= PAGE_BYTES;
        let address = arena.host_address(copy.slot, copy.slot_offset.into(), copy.len.into());
        let ours = CopyEnd::local(address.filter(|_| inside)?);
        let granted = CopyEnd::granted(copy.gref.0, copy.offset, self.domain.0);
        let (source, dest, flags) = match copy.direction {
            CopyDirection::FromGrant => (granted, ours, CopySegment::FROM_GRANT),
            CopyDirection::ToGrant => (ours, granted, CopySegment::TO_GRANT),
        };
        // The status stays if the kernel skips the copy.
        Some(CopySegment { source, dest, len: copy.len, flags, status: GrantStatus::GENERAL_ERROR.0, pad: 0 })
    }

    fn map_grants(
        &mut self,
        arena: &PageArena,
        first: PageSlot,
        refs: &[GrantRef],
        writable: bool,
    ) -> io::Result<GrantMapping> {
        let count = u32::try_from(refs.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // The fixed part of 16 bytes, then 8 bytes for each reference.
        self.request.clear();
        self.request.extend([u64::from_ne_bytes(pack_u32s(count, 0)), 0]);
        self.request.extend(refs.iter().map(|gref| {
            let DomainGrantRef { domain, gref } = DomainGrantRef { domain: self.domain.0.into(), gref: gref.0 };
            u64::from_ne_bytes(pack_u32s(domain, gref))
        }));
        // SAFETY: the kernel reads the fixed part and `count` references of 8 bytes, all within `request`, and writes
        // the index in the fixed part.
        unsafe { ioctl_indirect(&self.node, self.request.as_mut_ptr().cast::<MapGrants>())? };
        let mapped = GrantMapping { index: self.request[1], pages: count };
        if let Err(error) = arena.map_file(first, count, &self.node, mapped.index, writable) {
            // Nothing is mapped; without this the kernel would keep the allocation.
            let _ = self.unmap_grants(&mapped);
            return Err(error);
        }
        Ok(mapped)
    }

    fn unmap_grants(&self, mapped: &GrantMapping) -> io::Result<()> {
        ioctl(&self.node, &mut UnmapGrants { index: mapped.index, count: mapped.pages, pad: 0 }).map(|_| ())
    }
}

/// Packs two adjacent 32-bit numbers.
fn pack_u32s(first: u32, second: u32) -> [u8; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    [a, b, c, d, e, f, g, h]
}

/// Returns the host address at which a mapping starts, which is unique across arenas.
fn mapping_address(arena: &PageArena, first: PageSlot) -> io::Result<u64> {
    arena.host_address(first, 0, PAGE_BYTES).ok_or_else(|| {
        let text = format!("found slot {}, expected one of {}", first.0, arena.pages());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

impl GrantAccess for GntdevAccess {
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        self.segments.clear();
        for copy in &mut *copies {
            let segment = self.copy_segment(arena, copy);
            copy.status = if segment.is_some() { GrantStatus::GENERAL_ERROR } else { BAD_COPY_ARG };
            self.segments.extend(segment);
        }
        if self.segments.is_empty() {
            return Ok(());
        }
        let count = u32::try_from(self.segments.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut request = CopyGrants { count, pad: 0, segments: self.segments.as_mut_ptr() };
        // SAFETY: `segments` holds `count` segments, whose addresses are slots of the arena: always mapped, and
        // accessed only as bytes that may change at any moment.
        unsafe { ioctl_indirect(&self.node, &raw mut request)? };
        let done = copies.iter_mut().filter(|copy| copy.status != BAD_COPY_ARG);
        for (copy, segment) in done.zip(&self.segments) {
            copy.status = GrantStatus(segment.status);
        }
        Ok(())
    }

    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> io::Result<()> {
        let address = mapping_address(arena, first)?;
        if refs.is_empty() || self.mappings.contains_key(&address) {
            let text = format!("found {} grants for slot {}, expected some, for one that is free", refs.len(), first.0);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mapped = self.map_grants(arena, first, refs, writable)?;
        self.mappings.insert(address, mapped);
        Ok(())
    }

    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> io::Result<()> {
        let Entry::Occupied(mapped) = self.mappings.entry(mapping_address(arena, first)?) else {
            let text = format!("nothing was mapped to slot {}", first.0);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        };
        arena.map_zero_pages(first, mapped.get().pages)?;
        let mapped = mapped.remove();
        self.unmap_grants(&mapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an access over a file that refuses all ioctls.
    fn refusing_node() -> (GntdevAccess, PageArena) {
        (GntdevAccess::from_file(File::open("/dev/zero").unwrap(), DomainId(7)), PageArena::reserve(4).unwrap())
    }

    fn copy(offset: u16, len: u16, slot: u32, slot_offset: u16) -> GrantCopy {
        let (direction, status) = (CopyDirection::FromGrant, GrantStatus::OKAY);
        GrantCopy { gref: GrantRef(9), offset, len, slot: PageSlot(slot), slot_offset, direction, status }
    }

    #[test]
    fn a_copy_beyond_its_page_or_the_arena_fails_alone() {
        let (mut node, arena) = refusing_node();
        let mut bad = [
            copy(1, 4096, 0, 0),
            copy(4096, 1, 0, 0),
            copy(u16::MAX, u16::MAX, 0, 0),
            copy(0, 2, 3, 4095),
            copy(0, 1, 4, 0),
        ];
        node.copy(&arena, &mut bad).unwrap();
        assert!(bad.iter().all(|copy| copy.status == BAD_COPY_ARG), "{bad:?}");
        let mut mixed = [copy(0, 4096, 2, 17), copy(1, 4096, 0, 0), copy(4095, 1, 3, 4095)];
        let error = node.copy(&arena, &mut mixed).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(
            mixed.map(|copy| copy.status),
            [GrantStatus::GENERAL_ERROR, BAD_COPY_ARG, GrantStatus::GENERAL_ERROR]
        );
        node.copy(&arena, &mut []).unwrap();
    }

    #[test]
    fn a_copy_is_laid_out_by_its_direction() {
        let (node, arena) = refusing_node();
        let mut one = copy(5, 6, 1, 3);
        let address = arena.host_address(PageSlot(1), 3, 6).unwrap();
        let ends = (CopyEnd::granted(9, 5, 7), CopyEnd::local(address));
        let from = node.copy_segment(&arena, &one).unwrap();
        assert_eq!(((from.source, from.dest), from.flags, from.len), (ends, 1, 6));
        one.direction = CopyDirection::ToGrant;
        let to = node.copy_segment(&arena, &one).unwrap();
        assert_eq!(((to.dest, to.source), to.flags, to.len), (ends, 2, 6));
    }

    #[test]
    fn a_failed_map_changes_no_page() {
        let (mut node, arena) = refusing_node();
        arena.memory().write(PageSlot(1).address(0), &[5]).unwrap();
        let refs = [GrantRef(1), GrantRef(2)];
        assert!(node.map(&arena, PageSlot(1), &refs, true).is_err());
        assert!(node.map(&arena, PageSlot(4), &refs, true).is_err());
        assert!(node.map(&arena, PageSlot(1), &[], true).is_err());
        assert!(node.unmap(&arena, PageSlot(1)).is_err());
        let mut byte = [0];
        arena.memory().read(PageSlot(1).address(0), &mut byte).unwrap();
        assert_eq!((byte, node.mappings.len()), ([5], 0));
    }
}
