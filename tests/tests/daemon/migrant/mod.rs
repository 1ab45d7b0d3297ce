//! A guest migrated by the test's own frontend. Its memory is copied by the device's dirty log and by the driver's own
//! writes, as a VMM does it.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use mqblk_tests::hostile::frontend::{FrontendQueue, HostileFrontend};
use mqblk_tests::hostile::memory::{END, START, SharedMemory};
use mqblk_tests::hostile::request::{MemorySegment, header, range, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::message as m;
use mqblk_tests::hostile::wait_for;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const LOG_ALL: u64 = 1 << 26;
/// Most requests of a queue, each with its own range of memory and of the disk.
const SLOTS: usize = 12;
/// Bytes of memory of each.
const SLOT_BYTES: u64 = 0x4000;
/// Bytes of the disk of each.
pub(crate) const SLOT_DISK: u64 = 16 << 10;
const RINGS: u64 = 0x8000;
const SLOTS_FROM: u64 = START + 8 * RINGS;
const SECTOR: u64 = 512;
/// Entries of a ring: four for each request.
const RING: u16 = 64;

/// The guest's view of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interface {
    Blk,
    Scsi,
}

impl Interface {
    /// The index of the first queue for requests.
    fn first(self) -> usize {
        match self {
            Interface::Blk => 0,
            Interface::Scsi => 2,
        }
    }
}

/// A request in flight.
struct Running {
    read: Option<(u64, usize)>,
    disk: u64,
    status: u64,
    expect_sense: bool,
}

/// A dirty log, shared with the daemon.
pub(crate) struct Log {
    pub file: File,
    pub bytes: u64,
}

impl Log {
    /// Creates a log for the memory of these tests.
    pub(crate) fn new() -> Log {
        let bytes = END.div_ceil(8 * PAGE);
        let file = File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        Log { file, bytes }
    }

    /// Takes and clears all marks, as a VMM does before it copies. The daemon may set others at the same time, so bits
    /// are cleared atomically.
    pub(crate) fn take(&self) -> BTreeSet<u64> {
        let map =
            mqblk_memory::DirtyLog::from_file(&self.file, mqblk_memory::SharedFileRules::default(), 0, self.bytes)
                .unwrap();
        (0..self.bytes * 8).filter(|page| map.test_and_clear(mqblk_memory::GuestAddress(page * PAGE))).collect()
    }
}

pub(crate) struct Migrant {
    pub front: HostileFrontend,
    interface: Interface,
    queues: usize,
    running: Vec<Vec<Option<Running>>>,
    /// The expected content of the disk.
    pub model: Vec<u8>,
    rng: SmallRng,
    /// Pages that the driver wrote since they were last copied.
    driver: BTreeSet<u64>,
    /// Pages that the device may write.
    allowed: BTreeSet<u64>,
    pub log: Option<Log>,
    /// The copy at the destination.
    pub copy: Vec<u8>,
    pub answers: u64,
}

impl Migrant {
    /// Connects and starts `queues` request queues.
    pub(crate) fn start(socket: &Path, interface: Interface, queues: usize, seed: u64) -> Migrant {
        let front = HostileFrontend::connect(socket, LOG_ALL);
        let slots = queues * SLOTS;
        let mut migrant = Migrant {
            front,
            interface,
            queues,
            running: (0..queues).map(|_| (0..SLOTS).map(|_| None).collect()).collect(),
            model: vec![0; slots * SLOT_DISK as usize],
            rng: SmallRng::seed_from_u64(seed),
            driver: BTreeSet::new(),
            allowed: BTreeSet::new(),
            log: None,
            copy: vec![0; (END - START) as usize],
            answers: 0,
        };
        for index in 0..migrant.all_queues() {
            migrant.front.add_queue(RingAddresses::pages(START + RINGS * index as u64), RING);
            migrant.allowed.insert((START + RINGS * index as u64 + 0x2000) / PAGE);
        }
        migrant
    }

    fn all_queues(&self) -> usize {
        self.interface.first() + self.queues
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.front.memory.write(at, bytes);
        self.wrote(at, bytes.len() as u64);
    }

    fn wrote(&mut self, at: u64, len: u64) {
        self.driver.extend(at / PAGE..=(at + len.max(1) - 1) / PAGE);
    }

    fn slot(&self, queue: usize, slot: usize) -> (u64, u64) {
        let number = (queue * SLOTS + slot) as u64;
        (SLOTS_FROM + number * SLOT_BYTES, number * SLOT_DISK)
    }

    /// Puts random requests in `count` free slots and publishes them.
    pub(crate) fn submit(&mut self, count: usize) {
        for _ in 0..count {
            let queue = self.rng.random_range(0..self.queues);
            let free: Vec<_> = (0..SLOTS).filter(|slot| self.running[queue][*slot].is_none()).collect();
            let Some(&slot) = free.choose(&mut self.rng) else { continue };
            let (pieces, running) = match self.interface {
                Interface::Blk => self.blk(queue, slot),
                Interface::Scsi => self.scsi(queue, slot),
            };
            for piece in pieces.iter().filter(|piece| piece.writable) {
                let last = piece.address + u64::from(piece.len) - 1;
                self.allowed.extend(piece.address / PAGE..=last / PAGE);
            }
            self.running[queue][slot] = Some(running);
            let entries: Vec<u16> = (0..4).map(|entry| slot as u16 * 4 + entry).collect();
            let ring = &mut self.front.queues[self.interface.first() + queue];
            let head = write_direct(&ring.ring, &entries, &pieces);
            ring.ring.offer(head);
            let at = ring.ring.addresses;
            self.wrote(at.desc, 16 * u64::from(RING));
            self.wrote(at.avail, 6 + 2 * u64::from(RING));
        }
        let first = self.interface.first();
        self.front.queues[first..].iter_mut().for_each(FrontendQueue::publish_and_kick);
    }

    /// Returns a random range of a slot: disk offset, memory address and length.
    fn stretch(&mut self, memory: u64, disk: u64) -> (u64, u64, usize) {
        let sectors = self.rng.random_range(1..=16);
        let first = self.rng.random_range(0..=SLOT_DISK / SECTOR - sectors);
        // Anywhere: also across pages, and less aligned than direct I/O accepts.
        let at = memory + 0x800 + self.rng.random_range(0..0x800_u64);
        (disk + first * SECTOR, at, (sectors * SECTOR) as usize)
    }

    fn blk(&mut self, queue: usize, slot: usize) -> (Vec<MemorySegment>, Running) {
        let (memory, disk) = self.slot(queue, slot);
        let (start, at, len) = self.stretch(memory, disk);
        let status = memory + 0x3000 + self.rng.random_range(0..0xfff_u64);
        self.put(status, &[0xee]);
        let head = |kind, start: u64| header(kind, start / SECTOR);
        let stretch = start as usize..start as usize + len;
        let (bytes, mut pieces, read) = match self.rng.random_range(0..10) {
            0..4 => (head(request_type::IN, start), vec![writable(at, len as u32)], Some((at, len))),
            4..7 => {
                let mut data = vec![0; len];
                self.rng.fill_bytes(&mut data);
                self.put(at, &data);
                self.model[stretch].copy_from_slice(&data);
                (head(request_type::OUT, start), vec![readable(at, len as u32)], None)
            }
            7 => {
                self.put(at, &range(start / SECTOR, (len as u64 / SECTOR) as u32, 0));
                self.model[stretch].fill(0);
                (head(request_type::WRITE_ZEROES, 0), vec![readable(at, 16)], None)
            }
            8 => (head(request_type::GET_ID, 0), vec![writable(at, 20)], None),
            _ => (head(request_type::FLUSH, 0), vec![], None),
        };
        self.put(memory, &bytes);
        pieces.insert(0, readable(memory, 16));
        pieces.push(writable(status, 1));
        (pieces, Running { read, disk: start, status, expect_sense: false })
    }

    fn scsi(&mut self, queue: usize, slot: usize) -> (Vec<MemorySegment>, Running) {
        let (memory, disk) = self.slot(queue, slot);
        let (start, at, len) = self.stretch(memory, disk);
        let response = memory + 0x3000 + self.rng.random_range(0..0xf00_u64);
        self.put(response, &[0xee; 108]);
        let (lba, blocks) = ((start / SECTOR) as u32, (len as u64 / SECTOR) as u16);
        let ten = |opcode: u8| {
            let mut cdb = [0; 32];
            cdb[0] = opcode;
            cdb[2..6].copy_from_slice(&lba.to_be_bytes());
            cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
            cdb
        };
        let stretch = start as usize..start as usize + len;
        let mut expect_sense = false;
        let (cdb, out, into, read) = match self.rng.random_range(0..12) {
            0..4 => (ten(0x28), None, Some(writable(at, len as u32)), Some((at, len))),
            4..8 => {
                let mut data = vec![0; len];
                self.rng.fill_bytes(&mut data);
                self.put(at, &data);
                self.model[stretch].copy_from_slice(&data);
                (ten(0x2a), Some(readable(at, len as u32)), None, None)
            }
            // INQUIRY, SYNCHRONIZE CACHE, and an unknown command.
            8 => {
                let mut cdb = [0; 32];
                (cdb[0], cdb[4]) = (0x12, 96);
                (cdb, None, Some(writable(at, 96)), None)
            }
            9 => (ten(0x35), None, None, None),
            10 => {
                // WRITE SAME of one block: a multi-step command.
                let mut data = vec![0; SECTOR as usize];
                self.rng.fill_bytes(&mut data);
                self.put(at, &data);
                self.model[stretch].chunks_mut(SECTOR as usize).for_each(|block| block.copy_from_slice(&data));
                (ten(0x41), Some(readable(at, SECTOR as u32)), None, None)
            }
            _ => {
                expect_sense = true;
                (ten(0xff), None, None, None)
            }
        };
        let mut command = vec![1, 0, 0, 0, 0, 0, 0, 0];
        command.extend(((queue * SLOTS + slot) as u64).to_le_bytes());
        command.extend([0, 0, 0]);
        command.extend(cdb);
        self.put(memory, &command);
        let mut pieces = vec![readable(memory, command.len() as u32)];
        pieces.extend(out);
        pieces.push(writable(response, 108));
        pieces.extend(into);
        (pieces, Running { read, disk: start, status: response, expect_sense })
    }

    /// Takes all completions. With `wait`, until nothing is in flight.
    pub(crate) fn reap(&mut self, wait: bool) {
        for queue in 0..self.queues {
            let busy = |migrant: &Migrant| migrant.running[queue].iter().any(Option::is_some);
            while busy(self) {
                let ring = &mut self.front.queues[self.interface.first() + queue];
                let head = match ring.ring.take() {
                    Some((head, _)) => head,
                    None if wait => wait_for("an answer", || ring.ring.take()).0,
                    None => break,
                };
                let running = self.running[queue][head as usize / 4].take().expect("an answer to what was asked");
                self.check(&running);
                self.answers += 1;
            }
        }
    }

    fn check(&self, running: &Running) {
        match self.interface {
            Interface::Blk => assert_eq!(self.front.memory.read(running.status, 1), [0], "status"),
            Interface::Scsi => {
                let response = self.front.memory.read(running.status, 108);
                let (status, response) = (response[10], response[11]);
                // The very first command gets the power-on unit attention.
                let attention = self.answers == 0;
                assert_eq!(response, 0);
                assert!(status == 0 || (status == 2 && (running.expect_sense || attention)), "status {status}");
            }
        }
        if let Some((at, len)) = running.read {
            let found = self.front.memory.read(at, len);
            let disk = running.disk as usize;
            assert!(found == self.model[disk..disk + len], "what was read at {disk} differs");
        }
    }

    /// Clears the unit attention of a newly started controller.
    pub(crate) fn settle(&mut self) {
        if self.interface == Interface::Scsi {
            self.answers = 0;
            let (memory, _) = self.slot(0, 0);
            let mut command = vec![1, 0, 0, 0, 0, 0, 0, 0];
            command.extend([0; 11 + 32]);
            self.put(memory, &command);
            let pieces = [readable(memory, command.len() as u32), writable(memory + 0x3000, 108)];
            self.allowed.insert((memory + 0x3000) / PAGE);
            let ring = &mut self.front.queues[self.interface.first()];
            let head = write_direct(&ring.ring, &[0, 1], &pieces);
            ring.ring.offer(head);
            ring.publish_and_kick();
            let at = ring.ring.addresses;
            wait_for("an answer", || ring.ring.take());
            self.wrote(at.desc, 16 * u64::from(RING));
            self.wrote(at.avail, 6 + 2 * u64::from(RING));
            self.answers = 1;
        }
    }

    /// Enables logging, to a new log, in QEMU's order: log, features, addresses. Then all of memory is copied.
    pub(crate) fn start_logging(&mut self) {
        self.switch_log();
        self.tell_logging(true);
        self.copy = self.front.memory.read(START, self.copy.len());
        self.driver.clear();
    }

    /// Sets another log. Pages marked in the old one are copied.
    pub(crate) fn switch_log(&mut self) {
        let log = Log::new();
        let payload = [log.bytes.to_ne_bytes(), 0_u64.to_ne_bytes()].concat();
        let c = &mut self.front.connection;
        assert!(c.send(m::SET_LOG_BASE, 1, &payload, &[log.file.as_fd()]));
        assert!(matches!(c.receive(), mqblk_tests::hostile::socket::Received::Reply { message: m::SET_LOG_BASE, .. }));
        let old = self.log.replace(log);
        if let Some(old) = old {
            self.copy_pages(&old.take());
        }
    }

    pub(crate) fn stop_logging(&mut self) {
        self.tell_logging(false);
        self.log = None;
    }

    fn tell_logging(&mut self, on: bool) {
        let features = self.front.features | if on { LOG_ALL } else { 0 };
        self.front.connection.send_acked(m::SET_FEATURES, &features.to_ne_bytes(), &[]);
        for index in 0..self.all_queues() {
            let at = self.front.queues[index].ring.addresses;
            let mut payload = self.front.vring_addr_payload(index as u32, at);
            payload[4..8].copy_from_slice(&u32::from(on).to_ne_bytes());
            let end = payload.len();
            payload[end - 8..].copy_from_slice(&at.used.to_ne_bytes());
            self.front.connection.send_acked(m::SET_VRING_ADDR, &payload, &[]);
        }
    }

    /// Copies the pages written since the last time to the destination.
    pub(crate) fn copy_dirty(&mut self) {
        let marked = self.log.as_ref().expect("a log").take();
        let beyond: Vec<_> = marked.difference(&self.allowed).collect();
        assert!(beyond.is_empty(), "pages are marked that no request may write: {beyond:x?}");
        let written = std::mem::take(&mut self.driver);
        self.copy_pages(&(&marked | &written));
    }

    fn copy_pages(&mut self, pages: &BTreeSet<u64>) {
        for page in pages {
            let at = ((page * PAGE) - START) as usize;
            let bytes = self.front.memory.read(page * PAGE, PAGE as usize);
            self.copy[at..at + PAGE as usize].copy_from_slice(&bytes);
        }
    }

    /// Stops all queues. Returns the base index of each.
    pub(crate) fn stop(&mut self) -> Vec<u16> {
        (0..self.all_queues()).map(|index| self.front.stop_queue(index as u32)).collect()
    }

    /// Checks after the stop that the destination has every byte.
    pub(crate) fn check_copy(&mut self) {
        self.copy_dirty();
        let now = self.front.memory.read(START, self.copy.len());
        let differ: Vec<_> = (0..now.len() as u64 / PAGE)
            .filter(|page| {
                let at = (page * PAGE) as usize;
                now[at..at + PAGE as usize] != self.copy[at..at + PAGE as usize]
            })
            .map(|page| page + START / PAGE)
            .collect();
        assert!(differ.is_empty(), "pages that were written and not marked: {differ:x?}");
    }

    /// Restarts the queues at the source, after a failed migration.
    pub(crate) fn start_again(&mut self, bases: &[u16]) {
        for (index, base) in bases.iter().enumerate() {
            self.front.start_queue(index as u32, *base);
        }
    }

    /// Continues at another daemon, with the copied memory. Requests in flight complete there.
    pub(crate) fn arrive(self, socket: &Path, bases: &[u16]) -> Migrant {
        let memory = SharedMemory::two_regions();
        memory.write(START, &self.copy);
        let mut front = HostileFrontend::with_memory(socket, LOG_ALL, memory);
        for (index, base) in bases.iter().enumerate() {
            let old = &self.front.queues[index].ring;
            let mut queue = FrontendQueue::new(&front.memory, old.addresses, old.size);
            (queue.ring.avail, queue.ring.last_used) = (old.avail, old.last_used);
            front.queues.push(queue);
            front.start_queue(index as u32, *base);
        }
        Migrant { front, log: None, driver: BTreeSet::new(), ..self }
    }

    /// Returns true if the daemon accepts a start of the queues.
    pub(crate) fn is_start_accepted(socket: &Path) -> bool {
        let mut front = HostileFrontend::connect(socket, LOG_ALL);
        let queue = FrontendQueue::new(&front.memory, RingAddresses::pages(START), RING);
        let addresses = front.vring_addr_payload(0, queue.ring.addresses);
        let bell = 0_u64.to_ne_bytes();
        let c = &mut front.connection;
        c.send_acked(m::SET_VRING_NUM, &mqblk_tests::hostile::socket::vring_state_payload(0, RING.into()), &[]);
        c.send_acked(m::SET_VRING_BASE, &mqblk_tests::hostile::socket::vring_state_payload(0, 0), &[]);
        c.send_acked(m::SET_VRING_ADDR, &addresses, &[]);
        if c.try_send_acked(m::SET_VRING_KICK, &bell, &[queue.kick.as_fd()]) != Some(0) {
            return false;
        }
        // It may be deferred until the requests of the previous connection have ended.
        c.send(m::GET_VRING_BASE, 1, &mqblk_tests::hostile::socket::vring_state_payload(0, 0), &[]);
        c.receive() != mqblk_tests::hostile::socket::Received::Closed
    }

    /// Returns a random number.
    pub(crate) fn pick(&mut self, below: u32) -> u32 {
        self.rng.random_range(0..below)
    }
}

/// Returns the first bytes of an image.
pub(crate) fn image_bytes(path: &Path, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    File::open(path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    bytes
}
