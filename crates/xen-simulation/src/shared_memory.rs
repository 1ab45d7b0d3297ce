//! Memory shared by domains and the machine: each domain's grant table, and the shared info (counters and the state of
//! event channels). With it a copy and an event need no message.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_memory::{DomainId, GrantStatus, GuestAddress, GuestMemory, PAGE_BYTES, Region, SharedWords, UserAddress};
use rustix::fs::{MemfdFlags, SealFlags};

/// The lowest allocated grant reference: Xen reserves lower ones (`GNTTAB_NR_RESERVED_ENTRIES`). Word 0 of a table is 1
/// while its domain is alive.
pub(super) const FIRST_REF: u32 = 8;

/// Creates a sealed memfd: no process can truncate what others have mapped.
pub(super) fn sealed_memfd(name: &str, len: u64) -> io::Result<File> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Maps a range of a file at guest address 0.
pub(super) fn map_file(file: &File, offset: u64, len: u64) -> io::Result<Arc<GuestMemory>> {
    let region = Region::from_file(file, offset, len, GuestAddress(0), UserAddress(0)).map_err(io::Error::other)?;
    Ok(Arc::new(GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?))
}

fn map_words(file: &File) -> io::Result<SharedWords> {
    let len = file.metadata()?.len();
    map_file(file, 0, len)?
        .shared_words(GuestAddress(0), (len / 8) as usize)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// A grant table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GrantEntry {
    /// The domain that may use the page.
    pub with: DomainId,
    pub writable: bool,
    /// The page of the owner's memory.
    pub frame: u32,
    /// Status with which copies fail (fault injection), unless `OKAY`.
    pub injected: GrantStatus,
}

/// Bit 0: valid. Bit 1: writable. Bits 8 to 15: the injected status, negated. 16 to 31: the domain. 32 to 63: the
/// frame.
impl GrantEntry {
    pub(super) fn encode(self) -> u64 {
        let status = u64::from(self.injected.0.unsigned_abs().min(0xff));
        1 | u64::from(self.writable) << 1 | status << 8 | u64::from(self.with.0) << 16 | u64::from(self.frame) << 32
    }

    #[inline]
    pub(super) fn decode(word: u64) -> Option<GrantEntry> {
        (word & 1 != 0).then_some(GrantEntry {
            with: DomainId((word >> 16) as u16),
            writable: word & 2 != 0,
            frame: (word >> 32) as u32,
            injected: GrantStatus(-i16::from((word >> 8) as u8)),
        })
    }
}

/// A domain's grant table and memory.
#[derive(Debug)]
pub(super) struct DomainMemory {
    table: SharedWords,
    pub table_file: File,
    /// The domain's memory. The machine does not map it.
    pub memory_file: File,
}

impl DomainMemory {
    pub(super) fn create(id: DomainId, pages: u32, refs: u32) -> io::Result<DomainMemory> {
        let table_file = sealed_memfd(&format!("grants-{}", id.0), u64::from(refs) * 8)?;
        let memory_file = sealed_memfd(&format!("domain-{}", id.0), u64::from(pages) * u64::from(PAGE_BYTES))?;
        let domain = DomainMemory { table: map_words(&table_file)?, table_file, memory_file };
        domain.set(0, 1);
        Ok(domain)
    }

    fn set(&self, gref: u32, word: u64) {
        self.table.get(gref as usize).expect("a reference of the table").store(word, Ordering::Release);
    }

    pub(super) fn entry(&self, gref: u32) -> Option<GrantEntry> {
        entry(&self.table, gref)
    }

    pub(super) fn set_entry(&self, gref: u32, entry: Option<GrantEntry>) {
        self.set(gref, entry.map_or(0, GrantEntry::encode));
    }

    /// Marks the domain as destroyed.
    pub(super) fn mark_destroyed(&self) {
        self.set(0, 0);
    }
}

#[inline]
fn entry(table: &SharedWords, gref: u32) -> Option<GrantEntry> {
    (gref >= FIRST_REF)
        .then(|| table.get(gref as usize))?
        .and_then(|word| GrantEntry::decode(word.load(Ordering::Acquire)))
}

/// Another domain's grant table and memory.
#[derive(Debug)]
pub(super) struct ForeignDomain {
    table: SharedWords,
    pub memory: Arc<GuestMemory>,
    pub memory_file: File,
}

impl ForeignDomain {
    pub(super) fn attach(table: OwnedFd, memory: OwnedFd) -> io::Result<ForeignDomain> {
        let memory_file = File::from(memory);
        let len = memory_file.metadata()?.len();
        Ok(ForeignDomain {
            table: map_words(&File::from(table))?,
            memory: map_file(&memory_file, 0, len)?,
            memory_file,
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.table.get(0).is_some_and(|word| word.load(Ordering::Acquire) != 0)
    }

    #[inline]
    pub(super) fn entry(&self, gref: u32) -> Option<GrantEntry> {
        entry(&self.table, gref)
    }
}

/// Words of a cache line. Two writers never share a line.
const LINE: usize = 8;
/// Maximum number of connections to a machine.
pub(super) const CONNECTIONS: u32 = 8192;
/// Maximum number of event channels of a machine.
pub(super) const CHANNELS: u32 = 8192;

/// Words of a connection's [`CacheLine`]; each has one writer.
pub(super) mod counter_word {
    pub(crate) const COPIES: usize = 0;
    pub(crate) const COPY_CALLS: usize = 1;
    pub(crate) const COPIED_BYTES: usize = 2;
}

/// Words of a [`CacheLine`] for one direction of an event channel.
pub(super) mod event_word {
    /// [`PENDING`] and [`MASKED`].
    pub(crate) const STATE: usize = 0;
    /// Events sent.
    pub(crate) const SENT: usize = 1;
    /// Events that made the receiver's descriptor readable.
    pub(crate) const DELIVERED: usize = 2;

    /// An event is pending: sent and not taken.
    pub(crate) const PENDING: u64 = 1;
    /// The port is masked.
    pub(crate) const MASKED: u64 = 2;
}

/// The machine's shared info: a line of counters for each connection, and two lines, one per direction, for each event
/// channel.
#[derive(Debug)]
pub(super) struct SharedInfo(SharedWords);

impl SharedInfo {
    pub(super) fn create() -> io::Result<(SharedInfo, File)> {
        let lines = u64::from(CONNECTIONS) + 2 * u64::from(CHANNELS);
        let file = sealed_memfd("board", lines * LINE as u64 * 8)?;
        Ok((SharedInfo(map_words(&file)?), file))
    }

    pub(super) fn attach(file: OwnedFd) -> io::Result<SharedInfo> {
        let board = SharedInfo(map_words(&File::from(file))?);
        let lines = CONNECTIONS as usize + 2 * CHANNELS as usize;
        if board.0.count() == lines * LINE { Ok(board) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    pub(super) fn connection_line(self: &Arc<SharedInfo>, number: u32) -> Option<CacheLine> {
        (number < CONNECTIONS).then(|| CacheLine { shared_info: Arc::clone(self), first: number as usize * LINE })
    }

    pub(super) fn event_line(self: &Arc<SharedInfo>, number: u32) -> Option<CacheLine> {
        let first = (CONNECTIONS as usize + number as usize) * LINE;
        (number < 2 * CHANNELS).then(|| CacheLine { shared_info: Arc::clone(self), first })
    }
}

/// One cache line of the shared info.
#[derive(Debug)]
pub(super) struct CacheLine {
    shared_info: Arc<SharedInfo>,
    first: usize,
}

impl CacheLine {
    #[inline]
    pub(super) fn word(&self, index: usize) -> &AtomicU64 {
        self.shared_info.0.get(self.first + index % LINE).expect("a line lies in the shared info")
    }

    /// Adds to a word that has no other writer.
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
    fn a_grant_entry_is_encoded_and_decoded() {
        for (with, writable, frame, status) in [(0, false, 0, 0), (1, true, 7, -3), (u16::MAX, true, u32::MAX, -13)] {
            let entry = GrantEntry { with: DomainId(with), writable, frame, injected: GrantStatus(status) };
            assert_eq!(GrantEntry::decode(entry.encode()), Some(entry));
        }
        assert_eq!(GrantEntry::decode(0), None);
        assert_eq!(GrantEntry::decode(!1), None);
    }

    #[test]
    fn both_ends_share_one_table() {
        let domain = DomainMemory::create(DomainId(3), 16, 64).unwrap();
        let files = (domain.table_file.try_clone().unwrap(), domain.memory_file.try_clone().unwrap());
        let foreign = ForeignDomain::attach(files.0.into(), files.1.into()).unwrap();
        let entry = GrantEntry { with: DomainId(0), writable: true, frame: 5, injected: GrantStatus::OKAY };
        domain.set_entry(63, Some(entry));
        assert_eq!((foreign.entry(63), foreign.entry(62), foreign.entry(64)), (Some(entry), None, None));
        assert_eq!((foreign.entry(0), foreign.is_alive()), (None, true));
        domain.mark_destroyed();
        assert!(!foreign.is_alive());
        domain.memory_file.set_len(0).unwrap_err();
    }
}
