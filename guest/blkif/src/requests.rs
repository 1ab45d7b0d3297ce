//! What a ring knows of each of its requests in flight. A table as long as the ring; nothing of it is allocated per request.

use mqblk_core::{ByteLen, ByteOffset};
use mqblk_ring::blkif::status;

use crate::journal::JournalSlot;
use crate::place::{PageUse, Place};

/// What is on, of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Read,
    /// A write, and nothing after it.
    Write,
    /// A write, and a flush after it.
    WriteFlush,
    /// A flush, perhaps after a write.
    Flush,
    /// A part of a discard; the rest is in the entry.
    Discard {
        secure: bool,
    },
}

/// A request that was taken off the ring and not answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) start: ByteOffset,
    pub(crate) len: ByteLen,
    pub(crate) place: Place,
    pub(crate) segments: u16,
    pub(crate) journal: Option<JournalSlot>,
    /// How it will be answered.
    pub(crate) status: i16,
    /// What the answer calls it.
    pub(crate) operation: u8,
    pub(crate) step: Step,
    pub(crate) barrier: bool,
}

impl Entry {
    /// A request of which nothing is known. If it ends like that, it was a mistake.
    pub(crate) const NEW: Entry = Entry {
        id: 0,
        start: ByteOffset(0),
        len: ByteLen::ZERO,
        place: Place::None,
        segments: 0,
        journal: None,
        status: status::ERROR,
        operation: 0,
        step: Step::Flush,
        barrier: false,
    };
}

/// An entry with the segment of a request that has one: most do, and then need no other cache line.
#[repr(align(64))]
#[derive(Clone, Debug)]
struct Slot {
    entry: Entry,
    one: [PageUse; 1],
}

const _: () = assert!(size_of::<Slot>() == 64, "one cache line");

/// The table.
#[derive(Debug)]
pub(crate) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Most segments of a request.
    stride: usize,
    /// The segments of entry `n` from `n` times `stride` on, if it has several. Grows to where entries were ever used so, into room
    /// that is there: of memory only what is used is touched.
    pages: Vec<PageUse>,
}

impl Requests {
    /// Room for `count` requests of at most `segments` segments.
    pub(crate) fn new(count: u16, segments: u16) -> Requests {
        let stride = usize::from(segments);
        Requests {
            slots: vec![Slot { entry: Entry::NEW, one: [PageUse::NONE] }; count.into()],
            free: (0..count).rev().collect(),
            stride,
            pages: Vec::with_capacity(usize::from(count) * stride),
        }
    }

    /// How many more there is room for.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// How many there are.
    pub(crate) fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// One more. There is room.
    #[inline]
    pub(crate) fn open(&mut self, entry: Entry) -> u16 {
        let at = self.free.pop().expect("whoever opens one has looked for room");
        if entry.segments > 1 && self.pages.len() <= usize::from(at) * self.stride {
            self.grow(at);
        }
        self.slots[usize::from(at)].entry = entry;
        at
    }

    /// The first use of an entry's pages.
    #[cold]
    fn grow(&mut self, at: u16) {
        self.pages.resize((usize::from(at) + 1) * self.stride, PageUse::NONE);
    }

    #[inline]
    pub(crate) fn close(&mut self, at: u16) {
        self.free.push(at);
    }

    #[inline]
    pub(crate) fn entry(&mut self, at: u16) -> &mut Entry {
        &mut self.slots[usize::from(at)].entry
    }

    /// An entry and its segments.
    #[inline]
    pub(crate) fn with_pages(&mut self, at: u16) -> (&mut Entry, &mut [PageUse]) {
        let Slot { entry, one } = &mut self.slots[usize::from(at)];
        let pages = match entry.segments {
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
