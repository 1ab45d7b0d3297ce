//! The table of a ring's requests in flight. It has as many entries as the ring; nothing is allocated per request.

use mqblk_core::{ByteLen, ByteOffset};
use mqblk_ring::blkif::status;

use crate::journal::JournalSlot;
use crate::page_backing::{PageBacking, RequestPage};

/// The step that a request is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestStep {
    Read,
    /// A write as the last step.
    Write,
    /// A write that a flush follows.
    WriteFlush,
    /// A flush, alone or after a write.
    Flush,
    /// A part of a discard; `start` and `len` are the rest.
    Discard {
        secure: bool,
    },
}

/// A request that was taken off the ring and has no response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InflightRequest {
    pub(crate) id: u64,
    pub(crate) start: ByteOffset,
    pub(crate) len: ByteLen,
    pub(crate) backing: PageBacking,
    pub(crate) segment_count: u16,
    pub(crate) journal_slot: Option<JournalSlot>,
    /// Status of the response.
    pub(crate) status: i16,
    /// Operation in the response.
    pub(crate) operation: u8,
    pub(crate) step: RequestStep,
    pub(crate) barrier: bool,
    /// True if it was [admitted in one step](crate::single); it ends in one step if it succeeds.
    pub(crate) is_single: bool,
}

impl InflightRequest {
    /// Template of a new request. Its status is that of a malformed request.
    pub(crate) const NEW: InflightRequest = InflightRequest {
        id: 0,
        start: ByteOffset(0),
        len: ByteLen::ZERO,
        backing: PageBacking::None,
        segment_count: 0,
        journal_slot: None,
        status: status::ERROR,
        operation: 0,
        step: RequestStep::Flush,
        barrier: false,
        is_single: false,
    };
}

/// A table entry, with the page of a request of one segment: most have one, and so need no other cache line.
#[repr(align(64))]
#[derive(Clone, Debug)]
struct TableEntry {
    request: InflightRequest,
    single_page: [RequestPage; 1],
}

const _: () = assert!(size_of::<TableEntry>() == 64, "one cache line");

/// The table of a ring's requests in flight.
#[derive(Debug)]
pub(crate) struct RequestTable {
    entries: Vec<TableEntry>,
    free: Vec<u16>,
    /// Maximum of segments of a request.
    stride: usize,
    /// The pages of entry `n`, if it has several, from `n` times `stride` on. Grows, within its capacity, up to the
    /// highest entry used this way, so that unused memory is not touched.
    pages: Vec<RequestPage>,
}

impl RequestTable {
    /// Creates a table for `count` requests of at most `segments` segments.
    pub(crate) fn new(count: u16, segments: u16) -> RequestTable {
        let stride = usize::from(segments);
        RequestTable {
            entries: vec![
                TableEntry { request: InflightRequest::NEW, single_page: [RequestPage::EMPTY] };
                count.into()
            ],
            free: (0..count).rev().collect(),
            stride,
            pages: Vec::with_capacity(usize::from(count) * stride),
        }
    }

    /// Returns the number of free entries.
    #[inline]
    pub(crate) fn free_entries(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of requests in the table.
    pub(crate) fn in_use(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Inserts a request and returns its index. The caller has checked for a free entry.
    #[inline]
    pub(crate) fn insert(&mut self, entry: InflightRequest) -> u16 {
        let at = self.free.pop().expect("the caller has checked for a free entry");
        if entry.segment_count > 1 && self.pages.len() <= usize::from(at) * self.stride {
            self.grow_pages(at);
        }
        self.entries[usize::from(at)].request = entry;
        at
    }

    /// As [`insert`](Self::insert), for a request of one segment, with its page.
    #[inline(always)] // else it would travel through memory
    pub(crate) fn insert_single(&mut self, request: InflightRequest, page: RequestPage) -> u16 {
        let at = self.free.pop().expect("the caller has checked for a free entry");
        let entry = &mut self.entries[usize::from(at)];
        (entry.request, entry.single_page) = (request, [page]);
        at
    }

    /// Returns a request, and its page if it has one segment.
    #[inline(always)] // as above
    pub(crate) fn single(&self, at: u16) -> (&InflightRequest, &RequestPage) {
        let TableEntry { request, single_page: [page] } = &self.entries[usize::from(at)];
        (request, page)
    }

    /// Extends `pages` up to those of an entry.
    fn grow_pages(&mut self, at: u16) {
        self.pages.resize((usize::from(at) + 1) * self.stride, RequestPage::EMPTY);
    }

    #[inline]
    pub(crate) fn remove(&mut self, at: u16) {
        self.free.push(at);
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, at: u16) -> &mut InflightRequest {
        &mut self.entries[usize::from(at)].request
    }

    /// Returns a request and its pages.
    #[inline]
    pub(crate) fn with_pages(&mut self, at: u16) -> (&mut InflightRequest, &mut [RequestPage]) {
        let TableEntry { request: entry, single_page: one } = &mut self.entries[usize::from(at)];
        let pages = match entry.segment_count {
            1 => &mut one[..],
            0 => &mut [],
            several => {
                let first = usize::from(at) * self.stride;
                &mut self.pages[first..first + usize::from(several)]
            }
        };
        (entry, pages)
    }
}
