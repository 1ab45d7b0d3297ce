//! A closed loop of overlapping requests on all queues of a device, which validates every completion.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mqblk_driver::Waker;
use mqblk_memory::{GuestAddress, GuestMemory};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::oracle::{Fate, Oracle, Range, SECTOR, fill};
use super::port::{End, Manage, Order, Port, Work};
use super::report::Figures;

/// Requests in flight on each queue.
pub const DEPTH: usize = 8;
/// Data buffers of each queue. There are more than requests, so that each is unused for a while after its completion, and then checked.
const SLOTS: usize = DEPTH + 4;
/// Bytes of the largest request.
pub const LARGEST: usize = 512 << 10;
/// Bytes of data memory that a queue needs.
pub const DATA: u64 = (SLOTS * LARGEST) as u64;
/// Sectors that are read and written at random.
pub const SECTORS: u64 = 8192;
/// Sectors of a disk: after the random area are the counter of COMPARE AND WRITE, and the bits of ORWRITE.
pub const DISK_SECTORS: u64 = SECTORS + 64;
const COUNTER: u64 = SECTORS;
const BITS: u64 = SECTORS + 8;
const BIT_SECTORS: u64 = 16;
/// Byte that fills unused buffers.
const CANARY: u8 = 0xc5;

/// State shared by a load's thread and its observer.
#[derive(Debug, Default)]
pub struct Shared {
    /// Completions so far.
    pub answered: AtomicU64,
    /// No more requests are sent.
    pub stop: AtomicBool,
    /// The driver dies: requests in flight are never reaped.
    pub die: AtomicBool,
    /// Requests hang.
    pub hangs: AtomicBool,
}

#[derive(Debug)]
struct Slot {
    queue: usize,
    data: GuestAddress,
    /// Bytes of the buffer that hold the canary.
    canary: usize,
    order: Option<Order>,
    id: u64,
    /// The value that a COMPARE AND WRITE writes, or the bit that an ORWRITE sets.
    value: u64,
}

/// Expected state of a disk.
#[derive(Debug)]
struct Disk {
    oracle: Oracle,
    /// The last value of the counter that is known.
    counter: u64,
    /// Successful COMPARE AND WRITEs.
    counted: u64,
    /// COMPARE AND WRITEs are not cancelled on this disk.
    counts: bool,
    /// For each bit: was it sent, and is it known to be set.
    bits: Vec<(bool, bool)>,
}

/// The expected state of a device's disks. Outlives the driver.
#[derive(Debug)]
pub struct History {
    disks: Vec<Disk>,
    next: u64,
    /// Counters of the run.
    pub figures: Figures,
}

impl History {
    /// Creates the history of `disks` disks of [`DISK_SECTORS`], all zeroes.
    pub fn new(disks: usize) -> History {
        let disk = |index| Disk {
            oracle: Oracle::new(SECTORS),
            counter: 0,
            counted: 0,
            counts: index != 1,
            bits: vec![(false, false); BIT_SECTORS as usize * SECTOR * 8],
        };
        History { disks: (0..disks).map(disk).collect(), next: 1, figures: Figures::default() }
    }

    /// Checks a disk's content, with nothing in flight.
    ///
    /// # Errors
    /// The first difference.
    pub fn judge_disk(&mut self, disk: usize, bytes: &[u8]) -> Result<(), String> {
        let disk = &mut self.disks[disk];
        disk.oracle.judge_disk(bytes)?;
        let sector = |at: u64| &bytes[at as usize * SECTOR..][..SECTOR];
        let counter = u64::from_le_bytes(sector(COUNTER)[..8].try_into().expect("eight bytes"));
        if counter != disk.counted {
            return Err(format!("the counter is {counter}, but {} COMPARE AND WRITEs succeeded", disk.counted));
        }
        for (bit, (sent, is_set)) in disk.bits.iter().enumerate() {
            let found = bytes[BITS as usize * SECTOR + bit / 8] >> (bit % 8) & 1 == 1;
            if found && !sent || *is_set && !found {
                return Err(format!("bit {bit}: sent {sent}, set for sure {is_set}, found {found}"));
            }
        }
        Ok(())
    }
}

/// The load of one device.
pub struct Load<P> {
    port: P,
    history: History,
    memory: Arc<GuestMemory>,
    shared: Arc<Shared>,
    random: SmallRng,
    slots: Vec<Slot>,
    /// Free slots of each queue, the longest unused first.
    free: Vec<VecDeque<u32>>,
    works: Vec<Work>,
    largest: u32,
    name: String,
}

impl<P: Port> Load<P> {
    /// Creates a load with this seed on a device's queues, each of which has [`DATA_BYTES`] bytes.
    pub fn new(name: &str, mut port: P, history: History, shared: &Arc<Shared>, seed: u64) -> Load<P> {
        let mut slots = Vec::new();
        let mut free = Vec::new();
        for queue in 0..port.queues() {
            let start = port.data(queue);
            free.push((slots.len() as u32..(slots.len() + SLOTS) as u32).collect());
            slots.extend((0..SLOTS).map(|at| Slot {
                queue,
                data: GuestAddress(start.0 + (at * LARGEST) as u64),
                canary: 0,
                order: None,
                id: 0,
                value: 0,
            }));
        }
        Load {
            memory: port.memory(),
            works: port.works().to_vec(),
            largest: port.largest().min(LARGEST as u32),
            port,
            history,
            shared: Arc::clone(shared),
            random: SmallRng::seed_from_u64(seed),
            slots,
            free,
            name: name.to_owned(),
        }
    }

    /// Runs until it is stopped and all requests have completed, or until it is told to die. Returns the history and the queues.
    ///
    /// # Panics
    /// When the device is wrong.
    pub fn run(mut self) -> (History, P) {
        let mut done = Vec::new();
        loop {
            if self.shared.hangs.load(Ordering::Relaxed) {
                panic!("{}: {} requests are never answered: {:?}", self.name, self.in_flight(), self.waiting());
            }
            if self.shared.die.load(Ordering::Relaxed) {
                return self.die();
            }
            let stopping = self.shared.stop.load(Ordering::Relaxed);
            if !stopping {
                self.send();
            }
            self.port.reap(&mut done);
            let none = done.is_empty();
            for (user, end) in done.drain(..) {
                self.answered(user, end);
            }
            if stopping && self.in_flight() == 0 && !self.port.is_managing() {
                break;
            }
            if none {
                // Mostly waits for a call; sometimes polls.
                match self.random.random_ratio(3, 4) && !self.port.is_managing() {
                    true => self.port.wait(),
                    false => std::thread::sleep(Duration::from_micros(50)),
                }
            }
        }
        for slot in 0..self.slots.len() {
            self.check_canary(slot);
        }
        (self.history, self.port)
    }

    /// Returns a handle that wakes the load.
    pub fn waker(&mut self) -> Waker {
        self.port.waker()
    }

    fn in_flight(&self) -> usize {
        self.slots.iter().filter(|slot| slot.order.is_some()).count()
    }

    fn waiting(&self) -> Vec<(usize, &Order)> {
        self.slots.iter().filter_map(|slot| Some((slot.queue, slot.order.as_ref()?))).collect()
    }

    /// Drops the requests in flight.
    fn die(mut self) -> (History, P) {
        for slot in &mut self.slots {
            if let Some(request) = slot.order.take() {
                let disk = &mut self.history.disks[request.disk];
                match request.work {
                    Work::Compare | Work::Or => {}
                    Work::Read | Work::Flush => disk.oracle.orphan(slot.id, &[]),
                    _ => disk.oracle.orphan(slot.id, &request.ranges),
                }
            }
        }
        self.history.figures.driver_deaths += 1;
        (self.history, self.port)
    }

    fn send(&mut self) {
        for queue in 0..self.free.len() {
            while self.free[queue].len() > SLOTS - DEPTH {
                let slot = self.free[queue][0] as usize;
                self.check_canary(slot);
                if !self.send_one(queue, slot) {
                    break;
                }
                self.free[queue].pop_front();
            }
        }
        self.port.publish();
        // Rare: each cancels many requests.
        if self.random.random_ratio(1, 60) {
            let slot = self.random.random_range(0..self.slots.len());
            let Some(request) = &self.slots[slot].order else { return };
            let what = match self.random.random_ratio(1, 4) {
                true => Manage::Reset,
                false => Manage::Abort(slot as u32),
            };
            // Requests that are counted are not cancelled, so that the count stays known.
            if request.work != Work::Compare && (what != Manage::Reset || !self.history.disks[request.disk].counts) {
                let disk = request.disk;
                self.history.figures.managed += u64::from(self.port.manage(disk, what));
            }
        }
    }

    fn size(&mut self) -> u32 {
        let bytes = match self.random.random_range(0..100) {
            0..25 => 512,
            25..75 => 4096,
            75..93 => 64 << 10,
            _ => LARGEST as u32,
        };
        bytes.min(self.largest) / SECTOR as u32
    }

    fn range(&mut self) -> Range {
        let sectors = self.size();
        let last = SECTORS - u64::from(sectors);
        // Sometimes contiguous, so that requests can be merged.
        let start = self.random.random_range(0..=last);
        let align = if self.random.random_ratio(1, 2) { 8.min(sectors) } else { 1 };
        (start - start % u64::from(align), sectors)
    }

    fn ranges(&mut self, work: Work) -> Vec<Range> {
        match work {
            Work::Flush => vec![],
            Work::Compare => vec![(COUNTER, 1)],
            Work::Or => vec![(BITS, 1)],
            Work::Discard => (0..self.random.random_range(1..=self.port.ranges())).map(|_| self.range()).collect(),
            _ => vec![self.range()],
        }
    }

    fn send_one(&mut self, queue: usize, slot: usize) -> bool {
        let disk = self.random.random_range(0..self.history.disks.len());
        let mut work = self.works[self.random.random_range(0..self.works.len())];
        if work == Work::Compare && !self.history.disks[disk].counts {
            work = Work::Write;
        }
        let mut request = Order { disk, work, ranges: self.ranges(work), data: self.slots[slot].data };
        let id = self.history.next;
        let value = self.prepare(slot, id, &mut request);
        let work = request.work;
        let oracle = &mut self.history.disks[disk].oracle;
        match work {
            Work::Read | Work::Flush => _ = oracle.send(id),
            Work::Write | Work::WriteThrough => oracle.send_write(id, id, &request.ranges, true),
            Work::Zero => oracle.send_write(id, 0, &request.ranges, true),
            Work::Discard => oracle.send_write(id, 0, &request.ranges, false),
            Work::Compare | Work::Or => {}
        }
        if !self.port.submit(queue, slot as u32, &request) {
            // The device has not seen it.
            match work {
                Work::Read | Work::Flush => _ = oracle.answer(id),
                Work::Compare | Work::Or => {}
                _ => oracle.answer_write(id, &request.ranges, Fate::Cancelled),
            }
            self.history.next += 1;
            return false;
        }
        self.history.next += 1;
        let used = &mut self.slots[slot];
        (used.order, used.id, used.value) = (Some(request), id, value);
        true
    }

    /// Writes a request's data to its buffer. Returns the value that it carries.
    fn prepare(&mut self, slot: usize, id: u64, request: &mut Order) -> u64 {
        let mut bytes = vec![0xa7; request.sectors() as usize * SECTOR];
        let mut value = 0;
        match request.work {
            Work::Write | Work::WriteThrough => {
                for (sector, bytes) in (request.start()..).zip(bytes.chunks_exact_mut(SECTOR)) {
                    fill(id, sector, bytes);
                }
            }
            Work::Compare => {
                // Sometimes a counter that is still in flight.
                let counter = self.history.disks[request.disk].counter + u64::from(self.random.random_ratio(1, 4));
                bytes = vec![0; 2 * SECTOR];
                value = counter + 1;
                bytes[..8].copy_from_slice(&counter.to_le_bytes());
                bytes[SECTOR..SECTOR + 8].copy_from_slice(&value.to_le_bytes());
            }
            Work::Or => {
                let bits = &mut self.history.disks[request.disk].bits;
                let bit = bits.iter().position(|(sent, _)| !sent);
                let Some(bit) = bit else {
                    (request.work, request.ranges) = (Work::Read, vec![(0, 1)]);
                    return self.prepare(slot, id, request);
                };
                bits[bit].0 = true;
                value = bit as u64;
                request.ranges = vec![(BITS + (bit / 8 / SECTOR) as u64, 1)];
                bytes.fill(0);
                bytes[bit / 8 % SECTOR] = 1 << (bit % 8);
            }
            // Also the parameter lists of these.
            Work::Discard | Work::Zero | Work::Flush => bytes = vec![0; SECTOR],
            Work::Read => {}
        }
        self.memory.write(request.data, &bytes).expect("data memory");
        self.slots[slot].canary = 0;
        value
    }

    fn answered(&mut self, user: u32, end: End) {
        let slot = user as usize;
        self.shared.answered.fetch_add(1, Ordering::Relaxed);
        let request = self.slots[slot].order.take();
        let request = request.unwrap_or_else(|| panic!("{}: request {user} is answered twice", self.name));
        let (id, value, queue) = (self.slots[slot].id, self.slots[slot].value, self.slots[slot].queue);
        assert!(end != End::Miscompare || request.work == Work::Compare, "{}: {request:?}: {end:?}", self.name);
        let disk = &mut self.history.disks[request.disk];
        // Only this load resets logical units, and a restarted backend raises no unit attention.
        assert!(
            !matches!(end, End::Attention(..)) || !disk.counts,
            "{}: {request:?}: {end:?} where nothing was reset",
            self.name
        );
        let stats = &mut self.history.figures;
        stats.requests += 1;
        stats.cancelled += u64::from(matches!(end, End::Cancelled | End::Attention(..)));
        let outcome = if end == End::Good { Fate::Done } else { Fate::Cancelled };
        match request.work {
            Work::Read | Work::Flush => {
                let when = disk.oracle.answer(id);
                if request.work == Work::Read && end == End::Good && request.start() < SECTORS {
                    let mut bytes = vec![0; request.sectors() as usize * SECTOR];
                    self.memory.read(request.data, &mut bytes).expect("data memory");
                    for (sector, bytes) in (request.start()..).zip(bytes.chunks_exact(SECTOR)) {
                        if let Err(why) = disk.oracle.judge(sector, bytes, when) {
                            panic!("{}: disk {}: {request:?}: {why}", self.name, request.disk);
                        }
                    }
                    stats.sectors += u64::from(request.sectors());
                }
            }
            Work::Compare => {
                assert!(end != End::Cancelled || !disk.counts, "{}: a COMPARE AND WRITE was cancelled", self.name);
                if end == End::Good {
                    disk.counted += 1;
                    disk.counter = disk.counter.max(value);
                    stats.compared += 1;
                }
            }
            Work::Or => disk.bits[value as usize].1 = end == End::Good,
            _ => disk.oracle.answer_write(id, &request.ranges, outcome),
        }
        let len = match request.work {
            Work::Compare => 2 * SECTOR,
            Work::Discard | Work::Zero | Work::Flush => SECTOR,
            _ => request.sectors() as usize * SECTOR,
        };
        self.memory.write(request.data, &vec![CANARY; len]).expect("data memory");
        self.slots[slot].canary = len;
        self.free[queue].push_back(user);
    }

    /// Checks that nothing was written to the buffer of a completed request.
    fn check_canary(&mut self, slot: usize) {
        let Slot { data, canary, .. } = self.slots[slot];
        let mut bytes = vec![0; canary];
        self.memory.read(data, &mut bytes).expect("data memory");
        if let Some(at) = bytes.iter().position(|byte| *byte != CANARY) {
            let id = self.slots[slot].id;
            panic!(
                "{}: byte {at} of {canary} was written after request {id} was answered: {:#x}",
                self.name, bytes[at]
            );
        }
    }
}
