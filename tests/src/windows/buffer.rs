//! Buffers in scattered pages, as a guest's memory manager hands them to a driver.

use super::{MEMORY, PAGE};
use crate::hostile::memory::SharedMemory;
use crate::hostile::request::MemorySegment;

/// Guest address of the pages.
const PAGES: u64 = 8 << 20;
/// Number of pages.
const COUNT: u64 = (MEMORY - PAGES) / PAGE;
/// Distance of the pages of a buffer, without a common factor with [`COUNT`].
const STRIDE: u64 = 37;

/// Gives out pages, none of them next to the one before.
#[derive(Debug, Default)]
pub struct Buffers {
    given: u64,
}

impl Buffers {
    /// Returns a buffer of `len` bytes that begins at `offset` of its first page.
    ///
    /// # Panics
    /// When more than all pages are asked for.
    pub fn scattered(&mut self, offset: u64, len: u64) -> Buffer {
        let mut pieces = Vec::new();
        let (mut left, mut at) = (len, offset);
        while left > 0 {
            let part = left.min(PAGE - at);
            pieces.push((self.page() + at, part as u32));
            (left, at) = (left - part, 0);
        }
        Buffer { pieces }
    }

    /// Returns a buffer of `len` bytes in one piece, as of a large page, from `offset` of its first page on.
    ///
    /// # Panics
    /// When pages are given out, or it is too long.
    pub fn contiguous(&mut self, offset: u64, len: u64) -> Buffer {
        assert!(self.given == 0 && offset + len <= COUNT * PAGE, "pages are given out, or the buffer is too long");
        self.given = COUNT;
        Buffer { pieces: vec![(PAGES + offset, len as u32)] }
    }

    /// Takes all pages back.
    pub fn free_all(&mut self) {
        self.given = 0;
    }

    fn page(&mut self) -> u64 {
        assert!(self.given < COUNT, "all {COUNT} pages are given out");
        let page = self.given * STRIDE % COUNT;
        self.given += 1;
        PAGES + page * PAGE
    }
}

/// A buffer: addresses and lengths of its pieces.
#[derive(Clone, Debug)]
pub struct Buffer {
    pieces: Vec<(u64, u32)>,
}

impl Buffer {
    /// Returns its bytes.
    pub fn len(&self) -> u64 {
        self.pieces.iter().map(|(_, len)| u64::from(*len)).sum()
    }

    /// Returns true if it has no byte.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Returns its pieces as segments of a request, none of more than `max` bytes.
    pub fn segments(&self, writable: bool, max: u32) -> Vec<MemorySegment> {
        let mut all = Vec::new();
        for &(address, len) in &self.pieces {
            for start in (0..len).step_by(max as usize) {
                all.push(MemorySegment { address: address + u64::from(start), len: max.min(len - start), writable });
            }
        }
        all
    }

    /// Fills it.
    ///
    /// # Panics
    /// When `bytes` are fewer.
    pub fn fill(&self, memory: &SharedMemory, bytes: &[u8]) {
        let mut from = bytes;
        for &(address, len) in &self.pieces {
            let (piece, rest) = from.split_at(len as usize);
            memory.write(address, piece);
            from = rest;
        }
    }

    /// Returns its content.
    pub fn content(&self, memory: &SharedMemory) -> Vec<u8> {
        self.pieces.iter().flat_map(|&(address, len)| memory.read(address, len as usize)).collect()
    }
}
