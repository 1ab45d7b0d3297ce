//! A malformed or unusual ring: its builder, and the expected result.

use std::ops::Range;
use std::path::Path;

use super::frontend::{HostileFrontend, SEG_MAX, SIZE_MAX};
use super::memory::{END, START};
use super::request::{self, MemorySegment, SECTOR, STATUS_OK, STATUS_POISON, readable, request_type, writable};
use super::ring::RawDescriptor;
use super::{QUIET_TIME, TIMEOUT};

/// Address of the request headers.
pub const HEADER: u64 = START + 0x4_0000;
/// Address of the status bytes.
pub const STATUS: u64 = START + 0x5_0100;
/// Address of the data.
pub const DATA: u64 = START + 0x6_0000;
/// Address of the indirect tables.
pub const TABLE: u64 = START + 0x9_0000;
/// Bytes of the largest block size.
const BLOCK: u32 = 4096;
/// An address outside of guest memory.
pub const UNMAPPED: u64 = END + 0x1000;

/// Expected result of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedResult {
    /// The request completes with this status and this used length.
    Completed(u8, u32),
    /// The chain is used with length 0: it has no byte for a status.
    Returned,
    /// The queue is retired: its err eventfd is signalled, and nothing else happens.
    Retired,
    /// Any result that does not affect others.
    Anything,
}

/// A queue with a request being built, and the expected content of the disk.
#[derive(Debug)]
pub struct RingFixture<'a> {
    /// The frontend, with one queue of 64 entries.
    pub frontend: HostileFrontend,
    /// Expected content of the disk. Each case that writes updates it.
    pub expected_content: &'a mut Vec<u8>,
    /// Address of the status byte.
    pub status: u64,
    /// Guest memory that the device may write, besides the used ring and the status byte.
    pub may_change: Vec<Range<u64>>,
    /// Sector and data segments of a successful read.
    pub reads: Option<(u64, Vec<MemorySegment>)>,
    heads: Vec<u16>,
    published: bool,
}

impl<'a> RingFixture<'a> {
    /// Connects to a disk with this content.
    pub fn new(socket: &Path, model: &'a mut Vec<u8>) -> RingFixture<'a> {
        // Unusual layouts exceed the segment limits of a driver that knows them.
        let frontend = HostileFrontend::start(socket, SIZE_MAX | SEG_MAX, 1);
        let case = RingFixture {
            frontend,
            expected_content: model,
            status: STATUS,
            may_change: vec![],
            reads: None,
            heads: vec![],
            published: false,
        };
        case.write(STATUS - 16, &[STATUS_POISON; 32]);
        case.frontend.queues[0].ring.set_used_event(0);
        case
    }

    /// Writes guest memory.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.frontend.memory.write(at, bytes);
    }

    /// Writes the usual header. Returns its segment.
    pub fn header(&self, kind: u32, sector: u64) -> MemorySegment {
        self.write(HEADER, &request::header(kind, sector));
        readable(HEADER, 16)
    }

    /// Writes data-out. Returns its segment.
    pub fn data_out(&self, at: u64, bytes: &[u8]) -> MemorySegment {
        self.write(at, bytes);
        readable(at, bytes.len() as u32)
    }

    /// Returns a segment for data-in, which the device may write.
    pub fn data_in(&mut self, at: u64, len: u32) -> MemorySegment {
        self.may_change.push(at..at + u64::from(len));
        writable(at, len)
    }

    /// Returns the segment of the usual status byte.
    pub fn status(&self) -> MemorySegment {
        writable(STATUS, 1)
    }

    /// Writes descriptor `index` of the ring's table.
    pub fn write_descriptor(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        self.frontend.queues[0].ring.write_descriptor(index, RawDescriptor { address, len, flags, next });
    }

    /// Puts a head into the available ring, unpublished.
    pub fn offer(&mut self, head: u16) {
        self.heads.push(head);
        self.frontend.queues[0].ring.offer(head);
    }

    /// Offers these segments as direct descriptors from 0 on.
    pub fn direct(&mut self, segments: &[MemorySegment]) {
        let slots: Vec<u16> = (0..64).collect();
        let head = request::write_direct(&self.frontend.queues[0].ring, &slots, segments);
        self.offer(head);
    }

    /// Offers these segments as an indirect table in descriptor 0.
    pub fn indirect(&mut self, segments: &[MemorySegment]) {
        let slots: Vec<u16> = (0..segments.len() as u16).collect();
        let count = segments.len() as u16;
        let table = request::write_indirect(&self.frontend.memory, TABLE, count, &slots, segments);
        self.frontend.queues[0].ring.write_descriptor(0, table);
        self.offer(0);
    }

    /// Offers a table with any descriptors, through a descriptor with any length and flags.
    pub fn table(&mut self, entries: &[RawDescriptor], len: u32, flags: u16) {
        for (at, entry) in (0..).zip(entries) {
            self.write(TABLE + 16 * at, &entry.bytes());
        }
        self.write_descriptor(0, TABLE, len, flags, 0);
        self.offer(0);
    }

    /// Offers a direct request of this header, these data segments, and a status byte.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[MemorySegment]) {
        let mut segments = vec![self.header(kind, sector)];
        segments.extend_from_slice(data);
        segments.push(self.status());
        self.direct(&segments);
    }

    /// Offers a discard or write of zeroes with the range list `list`.
    pub fn ranges(&mut self, kind: u32, list: &[u8]) {
        let data = self.data_out(DATA, list);
        self.request(kind, 0, &[data]);
    }

    /// Sets the expected content from `sector` on.
    pub fn expect_content(&mut self, sector: usize, bytes: &[u8]) {
        self.expected_content[sector * SECTOR..sector * SECTOR + bytes.len()].copy_from_slice(bytes);
    }

    /// Stores this available index now; [`check`](Self::check) does not publish again.
    pub fn publish_now(&mut self, avail: u16) {
        self.frontend.queues[0].ring.avail = avail;
        self.frontend.queues[0].publish_and_kick();
        self.published = true;
    }

    /// Publishes the request, and checks its result.
    ///
    /// # Panics
    /// When it is not exactly the expected one.
    pub fn check(mut self, expect: ExpectedResult) {
        let mut before = self.frontend.memory.read(START, (END - START) as usize);
        if !self.published {
            self.frontend.queues[0].publish_and_kick();
        }
        // The driver may change its available ring.
        let ring = &self.frontend.queues[0].ring;
        let avail = (ring.addresses.avail + 2 - START) as usize;
        before[avail..avail + 2].copy_from_slice(&ring.avail.to_le_bytes());
        let queue = &mut self.frontend.queues[0];
        match expect {
            ExpectedResult::Completed(status, len) => {
                assert_eq!(queue.wait_completion(), (u32::from(self.heads[0]), len), "the used element");
                let found = self.frontend.memory.read(self.status, 1)[0];
                assert_eq!(found, status, "the status byte");
            }
            ExpectedResult::Returned => {
                assert_eq!(queue.wait_completion(), (u32::from(self.heads[0]), 0), "the used element")
            }
            ExpectedResult::Retired => {
                assert!(queue.wait_retired(TIMEOUT.time()), "the queue was not retired");
                std::thread::sleep(QUIET_TIME);
                assert_eq!(queue.ring.used(), 0, "a retired queue gave an answer");
            }
            ExpectedResult::Anything => {
                queue.wait_retired(QUIET_TIME);
                return;
            }
        }
        self.check_memory(&before, matches!(expect, ExpectedResult::Completed(..)));
        if expect == ExpectedResult::Completed(STATUS_OK, self.reads_len() + 1) {
            self.check_data();
        }
        match expect {
            ExpectedResult::Retired => self.check_stays_retired(),
            _ => self.check_still_works(),
        }
    }

    fn reads_len(&self) -> u32 {
        self.reads.iter().flat_map(|(_, segments)| segments).map(|segment| segment.len).sum()
    }

    /// Checks that only the allowed memory has changed.
    fn check_memory(&self, before: &[u8], has_status: bool) {
        let at = self.frontend.queues[0].ring.addresses.used;
        let used = at..at + 6 + 8 * 64;
        let status = if has_status { self.status..self.status + 1 } else { 0..0 };
        let after = self.frontend.memory.read(START, before.len());
        let allowed: Vec<&Range<u64>> = self.may_change.iter().chain([&used, &status]).collect();
        const PAGE: usize = 4096;
        let pages = before.chunks(PAGE).zip(after.chunks(PAGE)).enumerate().filter(|(_, (old, new))| old != new);
        for (page, (old, new)) in pages {
            for (at, (old, new)) in (START + (page * PAGE) as u64..).zip(old.iter().zip(new)) {
                let fine = old == new || allowed.iter().any(|range| range.contains(&at));
                assert!(fine, "guest memory at {at:#x} was changed from {old:#x} to {new:#x}");
            }
        }
    }

    fn check_data(&self) {
        let Some((sector, segments)) = &self.reads else { return };
        let mut disk = &self.expected_content[*sector as usize * SECTOR..];
        for segment in segments {
            let (expected, rest) = disk.split_at(segment.len as usize);
            let mut found = self.frontend.memory.read(segment.address, expected.len());
            if let Some(at) = self.status.checked_sub(segment.address).filter(|at| *at < found.len() as u64) {
                // The status byte lies in the data, and is written last.
                found[at as usize] = expected[at as usize];
            }
            assert_eq!(found, expected, "what was read to {:#x}", segment.address);
            disk = rest;
        }
    }

    /// Checks that the queue still serves requests: a bad request affects no other.
    fn check_still_works(&mut self) {
        assert!(!self.frontend.queues[0].wait_retired(std::time::Duration::ZERO), "the queue was retired");
        self.read_block(40);
        assert_eq!(self.frontend.queues[0].wait_completion().1, BLOCK + 1, "the next request on the same queue");
        let len = BLOCK as usize;
        assert_eq!(self.frontend.memory.read(DATA, len), self.expected_content[..len], "the next request's data");
    }

    /// Checks that a retired queue serves no requests, and can be stopped.
    fn check_stays_retired(&mut self) {
        self.read_block(40);
        std::thread::sleep(QUIET_TIME);
        assert_eq!(self.frontend.queues[0].ring.used(), 0, "a retired queue gave an answer");
        self.frontend.stop_queue(0);
    }

    /// Offers a valid read of the first block, in descriptors from `slot` on.
    fn read_block(&mut self, slot: u16) {
        let segments = [self.header(request_type::IN, 0), writable(DATA, BLOCK), self.status()];
        let ring = &self.frontend.queues[0].ring;
        let head = request::write_direct(ring, &[slot, slot + 1, slot + 2], &segments);
        self.frontend.queues[0].ring.offer(head);
        self.frontend.queues[0].publish_and_kick();
    }
}

/// Reads a disk of `len` bytes over a connection of its own.
///
/// # Panics
/// When it cannot be read.
pub fn read_disk(socket: &Path, len: usize) -> Vec<u8> {
    const STEP: usize = 256 << 10;
    let mut frontend = HostileFrontend::start(socket, 0, 1);
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        let run = STEP.min(len - all.len());
        frontend.memory.write(HEADER, &request::header(request_type::IN, (all.len() / SECTOR) as u64));
        let segments = [readable(HEADER, 16), writable(DATA, run as u32), writable(STATUS, 1)];
        let queue = &mut frontend.queues[0];
        let head = request::write_direct(&queue.ring, &[0, 1, 2], &segments);
        queue.ring.offer(head);
        queue.publish_and_kick();
        assert_eq!(queue.wait_completion(), (0, run as u32 + 1), "reading the disk");
        assert_eq!(frontend.memory.read(STATUS, 1), [STATUS_OK], "reading the disk");
        all.extend(frontend.memory.read(DATA, run));
    }
    all
}

/// Writes `bytes` to a disk over a connection of its own.
///
/// # Panics
/// When it cannot be written.
pub fn write_disk(socket: &Path, bytes: &[u8]) {
    const STEP: usize = 256 << 10;
    let mut frontend = HostileFrontend::start(socket, 0, 1);
    for (at, run) in bytes.chunks(STEP).enumerate() {
        frontend.memory.write(HEADER, &request::header(request_type::OUT, (at * STEP / SECTOR) as u64));
        frontend.memory.write(DATA, run);
        let segments = [readable(HEADER, 16), readable(DATA, run.len() as u32), writable(STATUS, 1)];
        let queue = &mut frontend.queues[0];
        let head = request::write_direct(&queue.ring, &[0, 1, 2], &segments);
        queue.ring.offer(head);
        queue.publish_and_kick();
        assert_eq!(queue.wait_completion(), (0, 1), "filling the disk");
        assert_eq!(frontend.memory.read(STATUS, 1), [STATUS_OK], "filling the disk");
    }
}
