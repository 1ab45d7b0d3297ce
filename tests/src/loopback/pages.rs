//! Pages that the frontend grants.

use anyhow::{Context, Result};
use mqblk_memory::{DomainId, GrantRef, GuestAddress, PAGE_BYTES, SharedArray};
use mqblk_xen::{SharedPages, Xen};

/// Bytes of a page.
pub const PAGE: usize = PAGE_BYTES as usize;

/// Words of a page, as in [`GrantedPages::words`].
pub const WORDS: usize = PAGE / size_of::<u32>();

/// Pages that stay granted until this is dropped.
pub struct GrantedPages(SharedPages);

impl GrantedPages {
    /// Creates pages, all zero, granted to domain `with`.
    ///
    /// # Errors
    /// When Xen refuses.
    pub fn new(xen: &dyn Xen, with: DomainId, count: u32, writable: bool) -> Result<GrantedPages> {
        Ok(GrantedPages(xen.share(with, count, writable).with_context(|| format!("granting {count} pages"))?))
    }

    /// Returns the number of pages.
    pub fn count(&self) -> usize {
        self.0.refs.len()
    }

    /// Returns the grant reference of a page.
    ///
    /// # Panics
    /// When there is no such page, as the other methods.
    pub fn gref(&self, page: usize) -> GrantRef {
        self.0.refs[page]
    }

    fn address(&self, page: usize, at: usize) -> GuestAddress {
        assert!(page < self.count() && at < PAGE, "no byte {at} of page {page}");
        GuestAddress((page * PAGE + at) as u64)
    }

    /// Writes bytes, which may extend into the following pages.
    pub fn write(&self, page: usize, at: usize, bytes: &[u8]) {
        self.0.memory.write(self.address(page, at), bytes).expect("granted pages are mapped");
    }

    /// Fills a page with one byte.
    pub fn fill(&self, page: usize, byte: u8) {
        self.write(page, 0, &[byte; PAGE]);
    }

    /// Fills all pages with one byte.
    pub fn fill_all(&self, byte: u8) {
        (0..self.count()).for_each(|page| self.fill(page, byte));
    }

    /// Reads bytes.
    pub fn read(&self, page: usize, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.memory.read(self.address(page, at), &mut bytes).expect("granted pages are mapped");
        bytes
    }

    /// Returns the content of a page.
    pub fn page(&self, page: usize) -> Vec<u8> {
        self.read(page, 0, PAGE)
    }

    /// Returns true if a page holds only this byte.
    pub fn is_filled(&self, page: usize, byte: u8) -> bool {
        self.page(page).iter().all(|found| *found == byte)
    }

    /// Returns a page as words, each of which is loaded and stored atomically.
    pub fn words(&self, page: usize) -> SharedArray<u32> {
        self.0.memory.shared_array(self.address(page, 0), WORDS).expect("granted pages are mapped")
    }
}
