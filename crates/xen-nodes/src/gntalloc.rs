//! `/dev/xen/gntalloc`: pages granted to another domain.

use std::fs::File;
use std::io;
use std::sync::Arc;

use mqblk_memory::{DomainId, GrantRef, GuestMemory, PageArena, PageSlot};

use crate::ioctl::{AllocGrants, DeallocGrants, ioctl, ioctl_indirect};

/// Pages granted to another domain until this is dropped. Then fresh memory replaces them at the same addresses.
#[derive(Debug)]
pub struct GrantedPages {
    arena: PageArena,
    refs: Vec<GrantRef>,
    node: File,
    index: u64,
}

impl GrantedPages {
    /// Grants `pages` zeroed pages to a domain. `writable`: the domain may write to them.
    ///
    /// # Errors
    /// When the node cannot be opened, not enough grants are free, or the module's limit is reached (1024 pages per
    /// domain unless raised).
    pub fn new(with: DomainId, pages: u32, writable: bool) -> io::Result<GrantedPages> {
        let node = crate::open_node("gntalloc")?;
        let arena = PageArena::reserve(pages)?;
        // The fixed part of 16 bytes, then a grant reference of 4 bytes for each page.
        let mut request = vec![0u64; 2 + (pages as usize).div_ceil(2)];
        let flags = if writable { AllocGrants::WRITABLE } else { 0 };
        let fixed = request.as_mut_ptr().cast::<AllocGrants>();
        // SAFETY: the fixed part is the first 16 bytes of `request`, which is aligned for it.
        unsafe { fixed.write(AllocGrants { domain: with.0, flags, count: pages, index: 0 }) };
        // SAFETY: the kernel reads the fixed part, and writes its index and `pages` references of 4 bytes after it, all
        // within `request`.
        unsafe { ioctl_indirect(&node, fixed) }.map_err(|error| alloc_error(error, pages))?;
        let refs = request[2..].iter().flat_map(|word| split_u64(*word)).map(GrantRef).take(pages as usize).collect();
        let granted = GrantedPages { arena, refs, node, index: request[1] };
        granted.arena.map_file(PageSlot(0), pages, &granted.node, granted.index, true)?;
        Ok(granted)
    }

    /// Returns the pages, as one region from guest address 0.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        self.arena.memory()
    }

    /// Returns the grant reference of each page, in order.
    pub fn refs(&self) -> &[GrantRef] {
        &self.refs
    }
}

impl Drop for GrantedPages {
    fn drop(&mut self) {
        let count = self.arena.pages();
        // The kernel frees a page that is neither mapped here nor allocated in the node. Closing the node has the same
        // effect, so errors are ignored.
        let _ = self.arena.map_zero_pages(PageSlot(0), count);
        let _ = ioctl(&self.node, &mut DeallocGrants { index: self.index, count, pad: 0 });
    }
}

fn split_u64(word: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

fn alloc_error(error: io::Error, pages: u32) -> io::Error {
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
    fn a_word_holds_two_references() {
        let bytes: Vec<u8> = [7u32, 9].iter().flat_map(|number| number.to_ne_bytes()).collect();
        assert_eq!(split_u64(u64::from_ne_bytes(bytes.try_into().unwrap())), [7, 9]);
    }

    #[test]
    fn a_limit_is_named() {
        let error = alloc_error(io::Error::from_raw_os_error(libc::ENOSPC), 2000);
        assert!(error.to_string().starts_with("granting 2000 pages: "), "{error}");
        assert!(error.to_string().contains("xen_gntalloc/parameters/limit"), "{error}");
    }
}
