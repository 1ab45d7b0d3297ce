//! Files that a frontend passes with its messages: descriptors, the in-flight region, dirty logs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use mqblk_engine::EventFd;
use mqblk_memory::{GuestAddress, GuestMemory, Region, UserAddress, create_memfd};

use crate::vhost_user_session::guest::Guest;
use crate::vhost_user_wire::wait_until;

/// A descriptor of a message.
#[derive(Clone, Debug)]
pub(crate) enum Fd {
    /// One of the guest's files.
    Guest(usize),
    Event(EventFd),
    Region(Rc<InflightFile>),
    Log(Rc<DirtyLogFile>),
    Socket(Rc<OwnedFd>),
    /// The writing end of a pipe.
    PipeIn(Rc<OwnedFd>),
    /// The reading end of a pipe.
    PipeOut(Rc<OwnedFd>),
    /// `/dev/null`.
    Null(Rc<File>),
}

impl Fd {
    pub(crate) fn borrow<'a>(&'a self, guest: &'a Guest) -> BorrowedFd<'a> {
        match self {
            Fd::Guest(file) => guest.file(*file).as_fd(),
            Fd::Event(event) => event.as_fd(),
            Fd::Region(region) => region.shared.file.as_fd(),
            Fd::Log(log) => log.shared.file.as_fd(),
            Fd::Socket(fd) | Fd::PipeIn(fd) | Fd::PipeOut(fd) => fd.as_fd(),
            Fd::Null(file) => file.as_fd(),
        }
    }
}

/// A file that both sides map.
#[derive(Debug)]
struct SharedFile {
    file: File,
    memory: GuestMemory,
    len: u64,
}

impl SharedFile {
    fn of(file: File) -> Rc<SharedFile> {
        let len = file.metadata().expect("its length").len();
        let region = Region::from_file(&file, 0, len, GuestAddress(0), UserAddress(0)).expect("mapped");
        let memory = GuestMemory::new(vec![Arc::new(region)]).expect("one region");
        Rc::new(SharedFile { file, memory, len })
    }

    fn new(len: u64) -> Rc<SharedFile> {
        SharedFile::of(create_memfd("mqblk-frontend", len).expect("memory"))
    }

    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(GuestAddress(at), &mut bytes).expect("mapped");
        u64::from_ne_bytes(bytes)
    }

    fn put_word(&self, at: u64, value: u64) {
        self.memory.write(GuestAddress(at), &value.to_ne_bytes()).expect("mapped");
    }

    /// Returns true if `len` bytes from `offset` on are in the file.
    fn has(&self, offset: u64, len: u64) -> bool {
        len > 0 && offset.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

/// Bytes after each table of a region that the server made, and their beginning in the first.
const TAIL: u64 = 64;
const MAGIC: u64 = u64::from_le_bytes(*b"mqblkinf");
const HEADER_BYTES: u64 = 16;
const ENTRY_BYTES: u64 = 16;

/// An in-flight region as set by the last message. Source: QEMU's `vhost-user.rst`, "Inflight I/O tracking", the split
/// layout.
#[derive(Clone, Debug)]
pub(crate) struct InflightFile {
    shared: Rc<SharedFile>,
    pub(crate) size: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    /// The driver's configuration as recorded by the server: `writeback`.
    config: Rc<Cell<Option<bool>>>,
}

impl InflightFile {
    /// Takes the region of a reply.
    pub(crate) fn received(fd: OwnedFd, [size, offset]: [u64; 2], queues: u16) -> InflightFile {
        let shared = SharedFile::of(File::from(fd));
        InflightFile { shared, size, offset, queues, config: Rc::default() }.checked()
    }

    /// Makes a region as another program may make it.
    pub(crate) fn foreign(size: u64, queues: u16) -> InflightFile {
        InflightFile { shared: SharedFile::new(size), size, offset: 0, queues, config: Rc::default() }
    }

    fn checked(self) -> InflightFile {
        assert!(self.shared.has(self.offset, self.size), "{self:?}: the region's file is shorter");
        assert!(self.as_set(self.size, self.offset, self.queues).is_some(), "{self:?}: the server's own region");
        self
    }

    /// Returns the region as described by SET_INFLIGHT_FD, if that is valid.
    pub(crate) fn as_set(&self, size: u64, offset: u64, queues: u16) -> Option<InflightFile> {
        let stride = size / u64::from(queues);
        let whole = stride > 0 && stride.is_multiple_of(8) && stride * u64::from(queues) == size;
        (whole && offset.is_multiple_of(8) && self.shared.has(offset, size)).then(|| InflightFile {
            size,
            offset,
            queues,
            ..self.clone()
        })
    }

    fn stride(&self) -> u64 {
        self.size / u64::from(self.queues)
    }

    fn tail(&self) -> Option<u64> {
        let tail = self.offset + self.stride().checked_sub(TAIL)?;
        (self.shared.word(tail) == MAGIC).then_some(tail)
    }

    pub(crate) fn record_config(&self, writeback: bool) {
        if self.tail().is_some() {
            self.config.set(Some(writeback));
        }
    }

    pub(crate) fn recorded_config(&self) -> Option<bool> {
        self.tail().and_then(|_| self.config.get())
    }

    /// Checks the record of the configuration. The server has answered since it may have changed.
    pub(crate) fn check_config(&self) {
        if let (Some(tail), Some(writeback)) = (self.tail(), self.config.get()) {
            let found = self.shared.word(tail + 8);
            assert_eq!(found, 1 | u64::from(writeback) << 1, "the driver's configuration in the in-flight region");
        }
    }

    /// Returns the offset of a queue's table.
    pub(crate) fn table(&self, queue: usize) -> Option<u64> {
        (queue < usize::from(self.queues)).then(|| self.offset + queue as u64 * self.stride())
    }

    fn header(&self, table: u64) -> [u16; 4] {
        let word = self.shared.word(table + 8);
        [0, 16, 32, 48].map(|shift| (word >> shift) as u16)
    }

    fn entry(&self, table: u64, head: u16) -> (u64, u64) {
        let at = table + HEADER_BYTES + ENTRY_BYTES * u64::from(head);
        (self.shared.word(at), self.shared.word(at + 8))
    }

    /// Returns the chains to replay of a ring of `size` entries whose used index is `used`; `None`: the table is unused
    /// or of another ring.
    ///
    /// # Errors
    /// When the table cannot be used.
    pub(crate) fn resume(&self, table: u64, size: u16, used: u16) -> Result<Option<Vec<u16>>, ()> {
        let bytes = self.stride() - if self.tail().is_some() { TAIL } else { 0 };
        if bytes < HEADER_BYTES + ENTRY_BYTES * u64::from(size) || self.shared.word(table) != 0 {
            return Err(());
        }
        let [version, entries, last, published] = self.header(table);
        let completed = used.wrapping_sub(published);
        match version {
            0 => return Ok(None),
            1 if entries != size || completed > size => return Ok(None),
            1 => {}
            _ => return Err(()),
        }
        // The batch of the interrupted publish is complete.
        let (mut done, mut head) = (BTreeSet::new(), last);
        for _ in 0..completed {
            if head >= size {
                return Err(());
            }
            done.insert(head);
            head = (self.entry(table, head).0 >> 48) as u16;
        }
        let marked = |head: &u16| !done.contains(head) && self.entry(table, *head).0 & 1 != 0;
        Ok(Some((0..size).filter(marked).collect()))
    }

    /// Waits until the table shows that all is published up to `used`.
    pub(crate) fn wait_published(&self, table: u64, size: u16, used: u16) {
        wait_until("the in-flight table", || {
            let [version, entries, _, published] = self.header(table);
            let clear = (0..size).all(|head| self.entry(table, head).0 & 0xff == 0);
            [version, entries, published] == [1, size, used] && clear
        });
    }

    /// Marks chains as a killed server leaves them: taken, in this order, and not complete. Returns false if the table
    /// is of another ring.
    pub(crate) fn leave(&self, table: u64, size: u16, used: u16, heads: &[u16]) -> bool {
        let bytes = self.stride() - if self.tail().is_some() { TAIL } else { 0 };
        let [version, entries, last, published] = self.header(table);
        let ours = version == 0 || [version, entries, published] == [1, size, used];
        if !ours || bytes < HEADER_BYTES + ENTRY_BYTES * u64::from(size) {
            return false;
        }
        for (counter, head) in (7..).zip(heads) {
            let at = table + HEADER_BYTES + ENTRY_BYTES * u64::from(*head);
            self.shared.put_word(at, self.shared.word(at) | 1);
            self.shared.put_word(at + 8, counter);
        }
        let last = if version == 0 { 0 } else { last };
        self.put_header(table, [1, size, last, used]);
        true
    }

    /// Writes an unknown version.
    pub(crate) fn spoil(&self, table: u64) {
        let [_, entries, last, published] = self.header(table);
        self.put_header(table, [7, entries, last, published]);
    }

    fn put_header(&self, table: u64, [a, b, c, d]: [u16; 4]) {
        let word = u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48;
        self.shared.put_word(table + 8, word);
    }
}

const PAGE: u64 = 4096;

/// A dirty log as set by a message.
#[derive(Clone, Debug)]
pub(crate) struct DirtyLogFile {
    shared: Rc<SharedFile>,
    pub(crate) len: u64,
    offset: u64,
    /// Pages that must be marked, and those that may be.
    required: RefCell<BTreeSet<u64>>,
    allowed: RefCell<BTreeSet<u64>>,
}

impl DirtyLogFile {
    pub(crate) fn new(len: u64) -> DirtyLogFile {
        let (required, allowed) = Default::default();
        DirtyLogFile { shared: SharedFile::new(len), len, offset: 0, required, allowed }
    }

    /// Returns the log as described by SET_LOG_BASE, if that is valid.
    pub(crate) fn as_set(&self, len: u64, offset: u64) -> Option<DirtyLogFile> {
        self.shared.has(offset, len).then(|| DirtyLogFile { len, offset, ..self.clone() })
    }

    /// Notes a write of the device: one that must be marked, or one that may be.
    pub(crate) fn note(&self, address: u64, len: u64, required: bool) {
        let pages = address / PAGE..=(address + len - 1) / PAGE;
        for page in pages.filter(|page| page / 8 < self.len) {
            self.allowed.borrow_mut().insert(page);
            if required {
                self.required.borrow_mut().insert(page);
            }
        }
    }

    /// Checks the marks. Waits for the last ones, because a page is marked just after a completion is visible.
    pub(crate) fn check(&self) {
        let mut bytes = vec![0; self.shared.len as usize];
        let mut marked = BTreeSet::new();
        wait_until("marks in the dirty log", || {
            self.shared.memory.read(GuestAddress(0), &mut bytes).expect("mapped");
            let log = &bytes[self.offset as usize..(self.offset + self.len) as usize];
            let bit = |page: &u64| log[*page as usize / 8] & 1 << (page % 8) != 0;
            marked = (0..self.len * 8).filter(bit).collect();
            self.required.borrow().is_subset(&marked)
        });
        let allowed = self.allowed.borrow();
        assert!(marked.is_subset(&allowed), "dirty log: found pages {marked:?} marked, expected of {allowed:?} only");
    }
}
