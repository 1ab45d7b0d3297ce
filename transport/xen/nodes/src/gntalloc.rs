//! `/dev/xen/gntalloc`: pages that we grant to another domain.

use std::fs::File;
use std::io;
use std::sync::Arc;

use mqblk_memory::{DomainId, GrantRef, GuestMemory, PageArena, PageSlot};

use crate::ioctl::{AllocGrants, DeallocGrants, call, call_for_more};

/// Pages of ours that another domain may use, until this is dropped. The memory stays then, but it is other memory.
#[derive(Debug)]
pub struct GrantedPages {
    arena: PageArena,
    refs: Vec<GrantRef>,
    node: File,
    index: u64,
}

impl GrantedPages {
    /// Grants `pages` fresh pages, all zero, to a domain, which may write them when `writable` says so.
    ///
    /// # Errors
    /// When there is no such node or it may not be opened; when there are not so many grants left, or the module's own limit (1024
    /// pages in the whole domain unless it is raised) is reached.
    pub fn new(with: DomainId, pages: u32, writable: bool) -> io::Result<GrantedPages> {
        let node = crate::open("gntalloc")?;
        let arena = PageArena::reserve(pages)?;
        // The fixed part, then the references: two numbers of 64 bits, then half a one for each.
        let mut request = vec![0u64; 2 + (pages as usize).div_ceil(2)];
        let flags = if writable { AllocGrants::WRITABLE } else { 0 };
        let fixed = request.as_mut_ptr().cast::<AllocGrants>();
        // SAFETY: the fixed part is 16 bytes, which `request` starts with, aligned for it.
        unsafe { fixed.write(AllocGrants { domain: with.0, flags, count: pages, index: 0 }) };
        // SAFETY: the kernel reads the fixed part, and writes its index and `pages` references of 4 bytes behind it; all that
        // is in `request`.
        unsafe { call_for_more(&node, fixed) }.map_err(|error| refused(error, pages))?;
        let refs = request[2..].iter().flat_map(|two| halves(*two)).map(GrantRef).take(pages as usize).collect();
        let granted = GrantedPages { arena, refs, node, index: request[1] };
        granted.arena.map_file(PageSlot(0), pages, &granted.node, granted.index, true)?;
        Ok(granted)
    }

    /// The pages: one region, from guest address 0.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        self.arena.memory()
    }

    /// What each page is granted as, in order.
    pub fn refs(&self) -> &[GrantRef] {
        &self.refs
    }
}

impl Drop for GrantedPages {
    fn drop(&mut self) {
        let count = self.arena.pages();
        // The kernel takes a page back when it is neither mapped here nor accounted for; also when the node is closed, so nothing
        // is lost if one of these should fail.
        let _ = self.arena.map_zero_pages(PageSlot(0), count);
        let _ = call(&self.node, &mut DeallocGrants { index: self.index, count, pad: 0 });
    }
}

fn halves(two: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = two.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

fn refused(error: io::Error, pages: u32) -> io::Error {
    let advice = match error.raw_os_error() {
        Some(libc::ENOSPC) => "; see /sys/module/xen_gntalloc/parameters/limit, and Xen's gnttab_max_frames",
        _ => "",
    };
    io::Error::new(error.kind(), format!("granting {pages} pages: {error}{advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_come_two_in_a_number() {
        let bytes: Vec<u8> = [7u32, 9].iter().flat_map(|number| number.to_ne_bytes()).collect();
        assert_eq!(halves(u64::from_ne_bytes(bytes.try_into().unwrap())), [7, 9]);
    }

    #[test]
    fn a_limit_is_named() {
        let error = refused(io::Error::from_raw_os_error(libc::ENOSPC), 2000);
        assert!(error.to_string().starts_with("granting 2000 pages: "), "{error}");
        assert!(error.to_string().contains("xen_gntalloc/parameters/limit"), "{error}");
    }
}
