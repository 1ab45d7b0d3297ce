//! A closed loop of overlapping requests on all queues of a device. It validates every completion.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mqblk_driver::Waker;
use mqblk_memory::{GuestAddress, GuestMemory};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::oracle::{DiskOracle, SECTOR, WriteOutcome, fill};
use super::stats::CrashStats;
use crate::load_queues::SectorRange;
use crate::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType, TaskFunction};

/// Requests in flight on each queue.
pub const DEPTH: usize = 8;
/// Data buffers of each queue: more than requests, so that each is unused for a while after its completion, and then
/// checked.
const BUFFERS: usize = DEPTH + 4;
/// Bytes of the largest request.
pub const MAX_REQUEST_BYTES: usize = 512 << 10;
/// Bytes of data memory that a queue needs.
pub const DATA_BYTES: u64 = (BUFFERS * MAX_REQUEST_BYTES) as u64;
/// Sectors of random reads and writes.
pub const SECTORS: u64 = 8192;
/// Sectors of a disk: the random area, the counter of COMPARE AND WRITE, and the bits of ORWRITE.
pub const DISK_SECTORS: u64 = SECTORS + 64;
const COUNTER: u64 = SECTORS;
const BITS: u64 = SECTORS + 8;
const BIT_SECTORS: u64 = 16;
/// Byte that fills unused buffers.
const CANARY: u8 = 0xc5;

/// State shared by a load's thread and its observer.
#[derive(Debug, Default)]
pub struct LoadControl {
    /// Completions so far.
    pub completed: AtomicU64,
    /// True: sends no more requests.
    pub stop: AtomicBool,
    /// True: the driver dies, and requests in flight are never reaped.
    pub die: AtomicBool,
    /// True: requests hang.
    pub hangs: AtomicBool,
}

#[derive(Debug)]
struct Slot {
    queue: usize,
    data: GuestAddress,
    /// Bytes of the buffer that hold the canary.
    canary: usize,
    request: Option<LoadRequest>,
    id: u64,
    /// The value that a COMPARE AND WRITE writes, or the bit that an ORWRITE sets.
    value: u64,
}

/// Expected state of a disk.
#[derive(Debug)]
struct DiskHistory {
    oracle: DiskOracle,
    /// Last known value of the counter.
    counter: u64,
    /// Successful COMPARE AND WRITEs.
    compare_writes: u64,
    /// True: COMPARE AND WRITEs are not cancelled on this disk.
    never_cancels_compare: bool,
    /// For each bit: true if it was sent, and true if it is known to be set.
    bits: Vec<(bool, bool)>,
}

/// The expected state of a device's disks. Outlives the driver.
#[derive(Debug)]
pub struct LoadHistory {
    disks: Vec<DiskHistory>,
    next: u64,
    /// Counters of the run.
    pub stats: CrashStats,
}

impl LoadHistory {
    /// Creates the history of `disks` disks of [`DISK_SECTORS`], all zeroes.
    pub fn new(disks: usize) -> LoadHistory {
        let disk = |index| DiskHistory {
            oracle: DiskOracle::new(SECTORS),
            counter: 0,
            compare_writes: 0,
            never_cancels_compare: index != 1,
            bits: vec![(false, false); BIT_SECTORS as usize * SECTOR * 8],
        };
        LoadHistory { disks: (0..disks).map(disk).collect(), next: 1, stats: CrashStats::default() }
    }

    /// Checks a disk's content, with nothing in flight.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_disk(&mut self, disk: usize, bytes: &[u8]) -> Result<(), String> {
        let disk = &mut self.disks[disk];
        disk.oracle.check_disk(bytes)?;
        let sector = |at: u64| &bytes[at as usize * SECTOR..][..SECTOR];
        let counter = u64::from_le_bytes(sector(COUNTER)[..8].try_into().expect("eight bytes"));
        if counter != disk.compare_writes {
            return Err(format!("the counter is {counter}, but {} COMPARE AND WRITEs succeeded", disk.compare_writes));
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
pub struct CrashLoad<P> {
    queues: P,
    history: LoadHistory,
    memory: Arc<GuestMemory>,
    shared: Arc<LoadControl>,
    random: SmallRng,
    slots: Vec<Slot>,
    /// Free slots of each queue, the longest unused first.
    free: Vec<VecDeque<u32>>,
    request_mix: Vec<RequestType>,
    largest: u32,
    name: String,
}

impl<P: DeviceQueues> CrashLoad<P> {
    /// Creates a load with this seed on a device's queues, each of which has [`DATA_BYTES`] bytes.
    pub fn new(name: &str, mut queues: P, history: LoadHistory, shared: &Arc<LoadControl>, seed: u64) -> CrashLoad<P> {
        let mut slots = Vec::new();
        let mut free = Vec::new();
        for queue in 0..queues.queue_count() {
            let start = queues.data_address(queue);
            free.push((slots.len() as u32..(slots.len() + BUFFERS) as u32).collect());
            slots.extend((0..BUFFERS).map(|at| Slot {
                queue,
                data: GuestAddress(start.0 + (at * MAX_REQUEST_BYTES) as u64),
                canary: 0,
                request: None,
                id: 0,
                value: 0,
            }));
        }
        CrashLoad {
            memory: queues.memory(),
            request_mix: queues.request_mix().to_vec(),
            largest: queues.max_request_bytes().min(MAX_REQUEST_BYTES as u32),
            queues,
            history,
            shared: Arc::clone(shared),
            random: SmallRng::seed_from_u64(seed),
            slots,
            free,
            name: name.to_owned(),
        }
    }

    /// Runs until it is stopped and all requests have completed, or until its driver must die. Returns the history and
    /// the queues.
    ///
    /// # Panics
    /// When the device is wrong.
    pub fn run(mut self) -> (LoadHistory, P) {
        let mut done = Vec::new();
        loop {
            if self.shared.hangs.load(Ordering::Relaxed) {
                panic!(
                    "{}: {} requests are never answered: {:?}",
                    self.name,
                    self.in_flight(),
                    self.requests_in_flight()
                );
            }
            if self.shared.die.load(Ordering::Relaxed) {
                return self.die();
            }
            let stopping = self.shared.stop.load(Ordering::Relaxed);
            if !stopping {
                self.send();
            }
            self.queues.reap(&mut done);
            let none = done.is_empty();
            for (user, end) in done.drain(..) {
                self.complete(user, end);
            }
            if stopping && self.in_flight() == 0 && !self.queues.is_managing() {
                break;
            }
            if none {
                // Mostly waits for a call; sometimes polls.
                match self.random.random_ratio(3, 4) && !self.queues.is_managing() {
                    true => self.queues.wait(),
                    false => std::thread::sleep(Duration::from_micros(50)),
                }
            }
        }
        for slot in 0..self.slots.len() {
            self.check_canary(slot);
        }
        (self.history, self.queues)
    }

    /// Returns a handle that wakes the load.
    pub fn waker(&mut self) -> Waker {
        self.queues.waker()
    }

    fn in_flight(&self) -> usize {
        self.slots.iter().filter(|slot| slot.request.is_some()).count()
    }

    fn requests_in_flight(&self) -> Vec<(usize, &LoadRequest)> {
        self.slots.iter().filter_map(|slot| Some((slot.queue, slot.request.as_ref()?))).collect()
    }

    /// Drops the requests in flight.
    fn die(mut self) -> (LoadHistory, P) {
        for slot in &mut self.slots {
            if let Some(request) = slot.request.take() {
                let disk = &mut self.history.disks[request.disk];
                match request.request_type {
                    RequestType::CompareAndWrite | RequestType::OrWrite => {}
                    RequestType::Read | RequestType::Flush => disk.oracle.orphan(slot.id, &[]),
                    _ => disk.oracle.orphan(slot.id, &request.ranges),
                }
            }
        }
        self.history.stats.driver_deaths += 1;
        (self.history, self.queues)
    }

    fn send(&mut self) {
        for queue in 0..self.free.len() {
            while self.free[queue].len() > BUFFERS - DEPTH {
                let slot = self.free[queue][0] as usize;
                self.check_canary(slot);
                if !self.send_one(queue, slot) {
                    break;
                }
                self.free[queue].pop_front();
            }
        }
        self.queues.publish();
        // Rare: each cancels many requests.
        if self.random.random_ratio(1, 60) {
            let slot = self.random.random_range(0..self.slots.len());
            let Some(request) = &self.slots[slot].request else { return };
            let what = match self.random.random_ratio(1, 4) {
                true => TaskFunction::Reset,
                false => TaskFunction::Abort(slot as u32),
            };
            // Counted requests are not cancelled, so that the count stays known.
            if request.request_type != RequestType::CompareAndWrite
                && (what != TaskFunction::Reset || !self.history.disks[request.disk].never_cancels_compare)
            {
                let disk = request.disk;
                self.history.stats.task_functions += u64::from(self.queues.manage(disk, what));
            }
        }
    }

    fn size(&mut self) -> u32 {
        let bytes = match self.random.random_range(0..100) {
            0..25 => 512,
            25..75 => 4096,
            75..93 => 64 << 10,
            _ => MAX_REQUEST_BYTES as u32,
        };
        bytes.min(self.largest) / SECTOR as u32
    }

    fn range(&mut self) -> SectorRange {
        let sectors = self.size();
        let last = SECTORS - u64::from(sectors);
        // Sometimes contiguous, so that requests can be merged.
        let start = self.random.random_range(0..=last);
        let align = if self.random.random_ratio(1, 2) { 8.min(sectors) } else { 1 };
        (start - start % u64::from(align), sectors)
    }

    fn ranges(&mut self, work: RequestType) -> Vec<SectorRange> {
        match work {
            RequestType::Flush => vec![],
            RequestType::CompareAndWrite => vec![(COUNTER, 1)],
            RequestType::OrWrite => vec![(BITS, 1)],
            RequestType::Discard => {
                (0..self.random.random_range(1..=self.queues.max_ranges())).map(|_| self.range()).collect()
            }
            _ => vec![self.range()],
        }
    }

    fn send_one(&mut self, queue: usize, slot: usize) -> bool {
        let disk = self.random.random_range(0..self.history.disks.len());
        let mut work = self.request_mix[self.random.random_range(0..self.request_mix.len())];
        // A slow task management function may hit the next request of the same tag.
        if work == RequestType::CompareAndWrite
            && (!self.history.disks[disk].never_cancels_compare || self.queues.is_managing())
        {
            work = RequestType::Write;
        }
        let mut request =
            LoadRequest { disk, request_type: work, ranges: self.ranges(work), data: self.slots[slot].data };
        let id = self.history.next;
        let value = self.prepare(slot, id, &mut request);
        let work = request.request_type;
        let oracle = &mut self.history.disks[disk].oracle;
        match work {
            RequestType::Read | RequestType::Flush => _ = oracle.send(id),
            RequestType::Write | RequestType::WriteThrough => oracle.send_write(id, id, &request.ranges, true),
            RequestType::WriteZeroes => oracle.send_write(id, 0, &request.ranges, true),
            RequestType::Discard => oracle.send_write(id, 0, &request.ranges, false),
            RequestType::CompareAndWrite | RequestType::OrWrite => {}
        }
        if !self.queues.submit(queue, slot as u32, &request) {
            // The device has not seen the request.
            match work {
                RequestType::Read | RequestType::Flush => _ = oracle.complete(id),
                RequestType::CompareAndWrite | RequestType::OrWrite => {}
                _ => oracle.complete_write(id, &request.ranges, WriteOutcome::Cancelled),
            }
            self.history.next += 1;
            return false;
        }
        self.history.next += 1;
        let used = &mut self.slots[slot];
        (used.request, used.id, used.value) = (Some(request), id, value);
        true
    }

    /// Writes a request's data to its buffer. Returns its value.
    fn prepare(&mut self, slot: usize, id: u64, request: &mut LoadRequest) -> u64 {
        let mut bytes = vec![0xa7; request.sectors() as usize * SECTOR];
        let mut value = 0;
        match request.request_type {
            RequestType::Write | RequestType::WriteThrough => {
                for (sector, bytes) in (request.start()..).zip(bytes.chunks_exact_mut(SECTOR)) {
                    fill(id, sector, bytes);
                }
            }
            RequestType::CompareAndWrite => {
                // Sometimes a counter that is still in flight.
                let counter = self.history.disks[request.disk].counter + u64::from(self.random.random_ratio(1, 4));
                bytes = vec![0; 2 * SECTOR];
                value = counter + 1;
                bytes[..8].copy_from_slice(&counter.to_le_bytes());
                bytes[SECTOR..SECTOR + 8].copy_from_slice(&value.to_le_bytes());
            }
            RequestType::OrWrite => {
                let bits = &mut self.history.disks[request.disk].bits;
                let bit = bits.iter().position(|(sent, _)| !sent);
                let Some(bit) = bit else {
                    (request.request_type, request.ranges) = (RequestType::Read, vec![(0, 1)]);
                    return self.prepare(slot, id, request);
                };
                bits[bit].0 = true;
                value = bit as u64;
                request.ranges = vec![(BITS + (bit / 8 / SECTOR) as u64, 1)];
                bytes.fill(0);
                bytes[bit / 8 % SECTOR] = 1 << (bit % 8);
            }
            // Includes the parameter lists of these.
            RequestType::Discard | RequestType::WriteZeroes | RequestType::Flush => bytes = vec![0; SECTOR],
            RequestType::Read => {}
        }
        self.memory.write(request.data, &bytes).expect("data memory");
        self.slots[slot].canary = 0;
        value
    }

    fn complete(&mut self, user: u32, end: RequestOutcome) {
        let slot = user as usize;
        self.shared.completed.fetch_add(1, Ordering::Relaxed);
        let request = self.slots[slot].request.take();
        let request = request.unwrap_or_else(|| panic!("{}: request {user} is answered twice", self.name));
        let (id, value, queue) = (self.slots[slot].id, self.slots[slot].value, self.slots[slot].queue);
        assert!(
            end != RequestOutcome::Miscompare || request.request_type == RequestType::CompareAndWrite,
            "{}: {request:?}: {end:?}",
            self.name
        );
        let disk = &mut self.history.disks[request.disk];
        // Only this load resets logical units, and a restarted backend raises no unit attention.
        assert!(
            !matches!(end, RequestOutcome::Attention(..)) || !disk.never_cancels_compare,
            "{}: {request:?}: {end:?} where nothing was reset",
            self.name
        );
        let stats = &mut self.history.stats;
        stats.requests += 1;
        stats.cancelled += u64::from(matches!(end, RequestOutcome::Cancelled | RequestOutcome::Attention(..)));
        let outcome = if end == RequestOutcome::Good { WriteOutcome::Completed } else { WriteOutcome::Cancelled };
        match request.request_type {
            RequestType::Read | RequestType::Flush => {
                let when = disk.oracle.complete(id);
                if request.request_type == RequestType::Read && end == RequestOutcome::Good && request.start() < SECTORS
                {
                    let mut bytes = vec![0; request.sectors() as usize * SECTOR];
                    self.memory.read(request.data, &mut bytes).expect("data memory");
                    for (sector, bytes) in (request.start()..).zip(bytes.chunks_exact(SECTOR)) {
                        if let Err(why) = disk.oracle.check_read(sector, bytes, when) {
                            panic!("{}: disk {}: {request:?}: {why}", self.name, request.disk);
                        }
                    }
                    stats.sectors += u64::from(request.sectors());
                }
            }
            RequestType::CompareAndWrite => {
                assert!(
                    end != RequestOutcome::Cancelled || !disk.never_cancels_compare,
                    "{}: a COMPARE AND WRITE was cancelled",
                    self.name
                );
                if end == RequestOutcome::Good {
                    disk.compare_writes += 1;
                    disk.counter = disk.counter.max(value);
                    stats.compare_writes += 1;
                }
            }
            RequestType::OrWrite => disk.bits[value as usize].1 = end == RequestOutcome::Good,
            _ => disk.oracle.complete_write(id, &request.ranges, outcome),
        }
        let len = match request.request_type {
            RequestType::CompareAndWrite => 2 * SECTOR,
            RequestType::Discard | RequestType::WriteZeroes | RequestType::Flush => SECTOR,
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
        if bytes != vec![CANARY; canary] {
            let at = bytes.iter().position(|byte| *byte != CANARY).expect("they differ");
            let id = self.slots[slot].id;
            panic!(
                "{}: byte {at} of {canary} was written after request {id} was answered: {:#x}",
                self.name, bytes[at]
            );
        }
    }
}
