//! What domains and the machine share: a grant table for each domain, and the machine's board (counters and the state of event
//! channels). Words of shared memory, so that a copy and an event need no message.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_memory::{DomainId, GrantStatus, GuestAddress, GuestMemory, PAGE_BYTES, Region, SharedWords, UserAddress};
use rustix::fs::{MemfdFlags, SealFlags};

/// The lowest reference that is given out: Xen reserves those below (`GNTTAB_NR_RESERVED_ENTRIES`), and here word 0 of a table
/// says whether its domain lives.
pub(super) const FIRST_REF: u32 = 8;

/// A sealed memory file: nobody can cut off what others have mapped.
pub(super) fn sealed_memfd(name: &str, len: u64) -> io::Result<File> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Maps all of a file, from guest address 0.
pub(super) fn map_file(file: &File, offset: u64, len: u64) -> io::Result<Arc<GuestMemory>> {
    let region = Region::of_file(file, offset, len, GuestAddress(0), UserAddress(0)).map_err(io::Error::other)?;
    Ok(Arc::new(GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?))
}

fn map_words(file: &File) -> io::Result<SharedWords> {
    let len = file.metadata()?.len();
    map_file(file, 0, len)?.words(GuestAddress(0), (len / 8) as usize).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// A grant, as its word in the table says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Who may use the page.
    pub with: DomainId,
    pub writable: bool,
    /// Which page of the owner's memory.
    pub frame: u32,
    /// What a copy is answered instead of being done, unless `OKAY`.
    pub injected: GrantStatus,
}

/// Bit 0: there is a grant. Bit 1: writable. Bits 8 to 15: the injected status, negated. 16 to 31: the domain. 32 to 63: the frame.
impl Entry {
    pub(super) fn encode(self) -> u64 {
        let status = u64::from(self.injected.0.unsigned_abs().min(0xff));
        1 | u64::from(self.writable) << 1 | status << 8 | u64::from(self.with.0) << 16 | u64::from(self.frame) << 32
    }

    #[inline]
    pub(super) fn decode(word: u64) -> Option<Entry> {
        (word & 1 != 0).then_some(Entry {
            with: DomainId((word >> 16) as u16),
            writable: word & 2 != 0,
            frame: (word >> 32) as u32,
            injected: GrantStatus(-i16::from((word >> 8) as u8)),
        })
    }
}

/// A domain's grant table and memory.
#[derive(Debug)]
pub(super) struct Domain {
    table: SharedWords,
    pub table_file: File,
    /// All its memory, which is never mapped by the machine.
    pub memory_file: File,
}

impl Domain {
    pub(super) fn create(id: DomainId, pages: u32, refs: u32) -> io::Result<Domain> {
        let table_file = sealed_memfd(&format!("grants-{}", id.0), u64::from(refs) * 8)?;
        let memory_file = sealed_memfd(&format!("domain-{}", id.0), u64::from(pages) * u64::from(PAGE_BYTES))?;
        let domain = Domain { table: map_words(&table_file)?, table_file, memory_file };
        domain.set(0, 1);
        Ok(domain)
    }

    fn set(&self, gref: u32, word: u64) {
        self.table.get(gref as usize).expect("a reference of the table").store(word, Ordering::Release);
    }

    pub(super) fn entry(&self, gref: u32) -> Option<Entry> {
        entry(&self.table, gref)
    }

    pub(super) fn grant(&self, gref: u32, entry: Option<Entry>) {
        self.set(gref, entry.map_or(0, Entry::encode));
    }

    /// Nothing of it is to be had any more.
    pub(super) fn end(&self) {
        self.set(0, 0);
    }
}

#[inline]
fn entry(table: &SharedWords, gref: u32) -> Option<Entry> {
    (gref >= FIRST_REF).then(|| table.get(gref as usize))?.and_then(|word| Entry::decode(word.load(Ordering::Acquire)))
}

/// A domain's grant table and memory as another domain sees them.
#[derive(Debug)]
pub(super) struct Foreign {
    table: SharedWords,
    pub memory: Arc<GuestMemory>,
    pub memory_file: File,
}

impl Foreign {
    pub(super) fn attach(table: OwnedFd, memory: OwnedFd) -> io::Result<Foreign> {
        let memory_file = File::from(memory);
        let len = memory_file.metadata()?.len();
        Ok(Foreign { table: map_words(&File::from(table))?, memory: map_file(&memory_file, 0, len)?, memory_file })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.table.get(0).is_some_and(|word| word.load(Ordering::Acquire) != 0)
    }

    #[inline]
    pub(super) fn entry(&self, gref: u32) -> Option<Entry> {
        entry(&self.table, gref)
    }
}

/// Words of a cache line: what two writers write never shares one.
const LINE: usize = 8;
/// Most connections to a machine.
pub(super) const CONNECTIONS: u32 = 8192;
/// Most event channels of a machine.
pub(super) const CHANNELS: u32 = 8192;

/// What a connection's [`Line`] counts, each word with one writer.
pub(super) mod count {
    pub(crate) const COPIES: usize = 0;
    pub(crate) const COPY_CALLS: usize = 1;
    pub(crate) const COPIED_BYTES: usize = 2;
}

/// What a lane of an event channel holds.
pub(super) mod lane {
    /// [`PENDING`] and [`MASKED`].
    pub(crate) const STATE: usize = 0;
    /// Events sent.
    pub(crate) const SENT: usize = 1;
    /// Events that made the other side's descriptor readable.
    pub(crate) const DELIVERED: usize = 2;

    /// An event was sent and not taken.
    pub(crate) const PENDING: u64 = 1;
    /// The receiver wants no more for now.
    pub(crate) const MASKED: u64 = 2;
}

/// The machine's board: a line of counters for each connection, and two lanes, one for each direction, for each event channel.
#[derive(Debug)]
pub(super) struct Board(SharedWords);

impl Board {
    pub(super) fn create() -> io::Result<(Board, File)> {
        let lines = u64::from(CONNECTIONS) + 2 * u64::from(CHANNELS);
        let file = sealed_memfd("board", lines * LINE as u64 * 8)?;
        Ok((Board(map_words(&file)?), file))
    }

    pub(super) fn attach(file: OwnedFd) -> io::Result<Board> {
        let board = Board(map_words(&File::from(file))?);
        let lines = CONNECTIONS as usize + 2 * CHANNELS as usize;
        if board.0.count() == lines * LINE { Ok(board) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    pub(super) fn connection(self: &Arc<Board>, number: u32) -> Option<Line> {
        (number < CONNECTIONS).then(|| Line { board: Arc::clone(self), first: number as usize * LINE })
    }

    pub(super) fn lane(self: &Arc<Board>, number: u32) -> Option<Line> {
        let first = (CONNECTIONS as usize + number as usize) * LINE;
        (number < 2 * CHANNELS).then(|| Line { board: Arc::clone(self), first })
    }
}

/// One line of the board.
#[derive(Debug)]
pub(super) struct Line {
    board: Arc<Board>,
    first: usize,
}

impl Line {
    #[inline]
    pub(super) fn word(&self, index: usize) -> &AtomicU64 {
        self.board.0.get(self.first + index % LINE).expect("lines lie on the board")
    }

    /// Adds to a word that nobody else writes.
    #[inline]
    pub(super) fn add(&self, index: usize, value: u64) {
        let word = self.word(index);
        word.store(word.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
    }

    /// Reads a word and sets it to 0.
    pub(super) fn take(&self, index: usize) -> u64 {
        self.word(index).swap(0, Ordering::Relaxed)
    }

    pub(super) fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_survives_its_word() {
        for (with, writable, frame, status) in [(0, false, 0, 0), (1, true, 7, -3), (u16::MAX, true, u32::MAX, -13)] {
            let entry = Entry { with: DomainId(with), writable, frame, injected: GrantStatus(status) };
            assert_eq!(Entry::decode(entry.encode()), Some(entry));
        }
        assert_eq!(Entry::decode(0), None);
        assert_eq!(Entry::decode(!1), None);
    }

    #[test]
    fn both_ends_see_one_table() {
        let domain = Domain::create(DomainId(3), 16, 64).unwrap();
        let files = (domain.table_file.try_clone().unwrap(), domain.memory_file.try_clone().unwrap());
        let seen = Foreign::attach(files.0.into(), files.1.into()).unwrap();
        let entry = Entry { with: DomainId(0), writable: true, frame: 5, injected: GrantStatus::OKAY };
        domain.grant(63, Some(entry));
        assert_eq!((seen.entry(63), seen.entry(62), seen.entry(64)), (Some(entry), None, None));
        assert_eq!((seen.entry(0), seen.is_alive()), (None, true));
        domain.end();
        assert!(!seen.is_alive());
        domain.memory_file.set_len(0).unwrap_err();
    }
}
