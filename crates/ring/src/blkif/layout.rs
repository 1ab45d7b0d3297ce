//! Layout of a blkif ring: indices and entries, resolved once.

use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, SharedArray, SharedU32};

use super::abi::{Abi, ENTRIES_OFFSET};
use super::request::{RawRequest, Segment};
use crate::wakeup::{Direction, EventSuppression};

/// Maximum number of ring pages: order 4 (`XENBUS_MAX_RING_GRANT_ORDER` of Linux).
pub const MAX_RING_PAGES: u32 = 16;

/// Offsets of the indices in the first page.
mod offset {
    pub(super) const REQ_PROD: u64 = 0;
    pub(super) const REQ_EVENT: u64 = 4;
    pub(super) const RSP_PROD: u64 = 8;
    pub(super) const RSP_EVENT: u64 = 12;
}

/// Error of the set-up of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlkifSetupError {
    /// Invalid number of pages.
    #[error("ring pages: found {0}, expected 1, 2, 4, 8 or 16")]
    Pages(u32),
    /// The memory is not mapped contiguously.
    #[error("ring: {0} pages are not all in one piece of memory")]
    Unmapped(u32),
}

/// The entries, which both ends read and write, as words of 64 or 32 bits.
#[derive(Debug)]
enum Entries {
    Wide(SharedArray<[u64; 14]>),
    Narrow(SharedArray<[u32; 27]>),
}

/// A ring's fields in shared memory, as each end accesses them.
#[derive(Debug)]
pub struct BlkifRing {
    pub(super) req_prod: SharedU32,
    req_event: SharedU32,
    pub(super) rsp_prod: SharedU32,
    rsp_event: SharedU32,
    entries: Entries,
    size: u32,
    abi: Abi,
}

impl BlkifRing {
    /// Resolves the ring in `pages` pages from `address`.
    ///
    /// # Errors
    /// [`BlkifSetupError`].
    pub fn resolve(
        memory: &GuestMemory,
        address: GuestAddress,
        pages: u32,
        abi: Abi,
    ) -> Result<BlkifRing, BlkifSetupError> {
        if !pages.is_power_of_two() || pages > MAX_RING_PAGES {
            return Err(BlkifSetupError::Pages(pages));
        }
        let unmapped = BlkifSetupError::Unmapped(pages);
        let size = abi.entries(pages);
        let cell = |at: u64| memory.shared_u32(GuestAddress(address.0 + at)).ok_or(unmapped);
        let first = GuestAddress(address.0 + ENTRIES_OFFSET);
        let entries = match abi.aligns_u64_to_8() {
            true => Entries::Wide(memory.shared_array(first, size as usize).ok_or(unmapped)?),
            false => Entries::Narrow(memory.shared_array(first, size as usize).ok_or(unmapped)?),
        };
        Ok(BlkifRing {
            req_prod: cell(offset::REQ_PROD)?,
            req_event: cell(offset::REQ_EVENT)?,
            rsp_prod: cell(offset::RSP_PROD)?,
            rsp_event: cell(offset::RSP_EVENT)?,
            entries,
            size,
            abi,
        })
    }

    /// Returns the number of entries.
    #[inline]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the ABI of its entries.
    #[inline]
    pub fn abi(&self) -> Abi {
        self.abi
    }

    /// Initialises the ring: indices 0, events requested with the first entry (`SHARED_RING_INIT`).
    pub(super) fn reset(&self) {
        for (cell, value) in [(&self.req_prod, 0), (&self.rsp_prod, 0), (&self.req_event, 1), (&self.rsp_event, 1)] {
            cell.store(u32::to_le(value), Ordering::Release);
        }
    }

    /// Returns the direction of requests, which the frontend produces.
    #[inline]
    pub(super) fn requests(&self) -> Direction<'_, SharedU32> {
        Direction { index: &self.req_prod, suppression: EventSuppression::XenEvent(&self.req_event) }
    }

    /// Returns the direction of responses, which the backend produces.
    #[inline]
    pub(super) fn responses(&self) -> Direction<'_, SharedU32> {
        Direction { index: &self.rsp_prod, suppression: EventSuppression::XenEvent(&self.rsp_event) }
    }

    /// Copies entry `index`, each byte once: as many bytes as its operation and its number of segments use. The rest of
    /// `raw` is unchanged.
    #[inline]
    pub(super) fn read_request(&self, index: u32, raw: &mut RawRequest) {
        let index = index as usize;
        match &self.entries {
            Entries::Wide(entries) => {
                raw.put_words(entries.get_prefix::<[u64; 4]>(index).map(u64::to_ne_bytes));
                for at in 4..raw.length(Abi::X86_64).div_ceil(8) {
                    raw.put_word(at, entries.element(index, at).to_ne_bytes());
                }
            }
            Entries::Narrow(entries) => {
                raw.put_words(entries.get_prefix::<[u32; 7]>(index).map(u32::to_ne_bytes));
                for at in 7..raw.length(Abi::X86_32).div_ceil(4) {
                    raw.put_word(at, entries.element(index, at).to_ne_bytes());
                }
            }
        }
    }

    /// Writes a request into entry `index`.
    #[inline]
    pub(super) fn put_request(&self, index: u32, request: &RawRequest) {
        match &self.entries {
            Entries::Wide(entries) => entries.set(index as usize, request.to_wide()),
            Entries::Narrow(entries) => entries.set(index as usize, request.to_narrow()),
        }
    }

    /// Writes a request with inline segments into entry `index`; at most 11. The rest of the entry is unchanged: for a
    /// request with one segment, the common case, one cache line is written instead of two or three.
    ///
    /// Written in words: separate smaller stores that are read as words soon after stall on store forwarding (measured:
    /// 32 ns a request).
    #[inline]
    pub(super) fn put_rw(&self, index: u32, first: u32, id: u64, sector: u64, segments: &[Segment]) {
        let index = index as usize;
        let words = |segment: &Segment| u64::from_le_bytes(segment.to_bytes());
        match &self.entries {
            Entries::Wide(entries) => {
                let own = [first.into(), id, sector];
                if let [one] = segments {
                    return entries.set_prefix(index, [own[0].to_le(), id.to_le(), sector.to_le(), words(one).to_le()]);
                }
                let mut all = [0_u64; 14];
                let rest = segments.iter().map(words);
                all.iter_mut().zip(own.into_iter().chain(rest)).for_each(|(place, word)| *place = word.to_le());
                entries.set(index, all);
            }
            Entries::Narrow(entries) => {
                let halves = |word: u64| [word as u32, (word >> 32) as u32];
                let [[id, id_high], [sector, sector_high]] = [halves(id), halves(sector)];
                let own = [first, id, id_high, sector, sector_high];
                let mut all = [0_u32; 27];
                let rest = segments.iter().flat_map(|segment| halves(words(segment)));
                all.iter_mut().zip(own.into_iter().chain(rest)).for_each(|(place, word)| *place = word.to_le());
                match (segments, all) {
                    ([_], [a, b, c, d, e, f, g, ..]) => entries.set_prefix(index, [a, b, c, d, e, f, g]),
                    _ => entries.set(index, all),
                }
            }
        }
    }

    /// Writes a response into entry `index`: every byte that a reader may read as part of it, so that no private data
    /// leaks (XSA-216).
    #[inline]
    pub(super) fn put_response(&self, index: u32, id: u64, operation: u8, status: i16) {
        let tail = u32::from(operation) | u32::from(status as u16) << 16;
        match &self.entries {
            Entries::Wide(entries) => entries.set_prefix(index as usize, [id.to_le(), u64::from(tail).to_le()]),
            Entries::Narrow(entries) => {
                entries.set_prefix(index as usize, [(id as u32).to_le(), ((id >> 32) as u32).to_le(), tail.to_le()]);
            }
        }
    }

    /// Reads the response in entry `index` once: id, operation, status.
    #[inline]
    pub(super) fn response(&self, index: u32) -> (u64, u8, i16) {
        let (id, tail) = match &self.entries {
            Entries::Wide(entries) => {
                let [id, tail] = entries.get_prefix::<[u64; 2]>(index as usize).map(u64::from_le);
                (id, tail as u32)
            }
            Entries::Narrow(entries) => {
                let [low, high, tail] = entries.get_prefix::<[u32; 3]>(index as usize).map(u32::from_le);
                (u64::from(low) | u64::from(high) << 32, tail)
            }
        };
        (id, tail as u8, (tail >> 16) as i16)
    }

    /// Prefetches entry `index` into this core's cache.
    #[inline]
    pub(super) fn prefetch(&self, index: u32) {
        match &self.entries {
            Entries::Wide(entries) => entries.prefetch(index as usize),
            Entries::Narrow(entries) => entries.prefetch(index as usize),
        }
    }
}
