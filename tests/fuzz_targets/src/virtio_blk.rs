//! A virtio-blk device over a split ring: a disk in memory on a stepped worker, and a guest with batches of chains of
//! any layout. Between them it stops and starts the queue, and at last it violates the ring's protocol. The oracle is
//! exact: every byte of guest memory, the used elements, calls, the disk, and the reason of a broken ring.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arbitrary::{Result, Unstructured};
use mqblk_core::{Call, DiskSlot};
use mqblk_engine::{
    AnyDisk, PlugOptions, PollPolicy, QueueDisk, QueueFault, QueueOptions, SteppedQueue, SteppedWorker, UringContext,
    UringOptions,
};
use mqblk_memory::MemoryShare;
use mqblk_ring::virtqueue::{DeviceRing, MappedRing, RingFormat};
use mqblk_virtio::{QueueResources, VirtioDevice};
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};

use crate::memory_disk::open_memory_disk;
use crate::ring_guest::{INDIRECT, MEMORY, NEXT, RING, RawDescriptor, RingGuest, WRITE, cut};
use crate::virtio_blk_requests::{BATCH, BlkRequest, DiskRules, PART, SECTOR, SECTORS, SERIAL};

/// Guest memory of each request: the part that the device reads, the part that it writes, and an indirect table.
const ROOM: u64 = 0x1_0000;
const FIRST: u64 = 0x8000;
const WRITES: u64 = 0x6000;
const TABLE: u64 = 0xc000;
/// Turns within which a batch must be complete. A disk in memory needs one.
const TURNS: usize = 1000;
const POISON: u8 = 0xee;

struct CountCalls(Arc<AtomicU64>);

impl Call for CountCalls {
    fn call(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The device and its guest.
struct Machine {
    worker: SteppedWorker,
    queue: SteppedQueue,
    device: Arc<VirtioBlk>,
    disk: Arc<AnyDisk>,
    guest: RingGuest,
    event_idx: bool,
    calls: Arc<AtomicU64>,
    broken: Arc<Mutex<Vec<String>>>,
    rules: DiskRules,
    /// The expected content of the disk.
    model: Vec<u8>,
}

impl Machine {
    fn new(u: &mut Unstructured<'_>) -> Result<Machine> {
        let block = if u.ratio(1, 3)? { 8 } else { 1 };
        let rules = DiskRules { block, read_only: u.ratio(1, 6)? };
        let event_idx: bool = u.arbitrary()?;
        let disk = open_memory_disk(SECTORS as usize * SECTOR, block as usize * SECTOR, rules.read_only);
        let options = BlkOptions { serial: SERIAL.to_owned(), queues: 1, queue_size: RING, writeback: u.arbitrary()? };
        let device = Arc::new(VirtioBlk::new(disk.geometry(), disk.limits(), options));
        let options = UringOptions { submissions: 64, in_flight: 128, files: 4, buffers: 4 };
        let mut worker = SteppedWorker::new(options).expect("the host has io_uring");
        let (guest, calls, broken) = (RingGuest::new(), Arc::default(), Arc::default());
        let queue = attach(&mut worker, &device, &disk, &guest, event_idx, &calls, &broken);
        let model = vec![0; SECTORS as usize * SECTOR];
        Ok(Machine { worker, queue, device, disk, guest, event_idx, calls, broken, rules, model })
    }

    /// Stops the queue and restarts it at its position.
    fn restart(&mut self) {
        self.worker.drain(self.queue);
        self.worker.turn();
        assert!(!self.worker.serves(self.queue), "nothing is in flight");
        let Machine { worker, device, disk, guest, event_idx, calls, broken, .. } = self;
        self.queue = attach(worker, device, disk, guest, *event_idx, calls, broken);
    }

    fn reasons(&self) -> Vec<String> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Runs a batch to its completion and checks it.
    fn batch(&mut self, u: &mut Unstructured<'_>, requests: Vec<BlkRequest>) -> Result<()> {
        let mut expected = vec![];
        for (part, request) in requests.into_iter().enumerate() {
            let (request, head, status) = self.lay(u, part, request)?;
            self.guest.offer(head);
            expected.push((head, request, status));
        }
        let call_wanted: bool = u.arbitrary()?;
        self.guest.request_call(call_wanted);
        self.guest.publish(0);
        let before = self.calls.load(Ordering::Relaxed);
        let mut turns = 0;
        while usize::from(self.guest.used_count()) < expected.len() {
            self.worker.turn();
            turns += 1;
            assert!(
                turns < TURNS,
                "{:?} used, {} offered, {:?}",
                self.guest.used_count(),
                expected.len(),
                self.reasons()
            );
        }
        let called = self.calls.load(Ordering::Relaxed) - before;
        assert_eq!(called > 0, call_wanted, "{called} calls");
        for (head, used) in self.guest.take_used() {
            let at = expected.iter().position(|(offered, ..)| u32::from(*offered) == head);
            let (_, request, status) = expected.remove(at.expect("a chain that was offered and not yet used"));
            let has_status = status.is_some();
            assert_eq!(used, if has_status { request.used } else { 0 }, "the used length of {}", request.describe());
            if let Some(status) = status {
                self.guest.expect(status, &[request.status]);
                self.guest.expect(status - request.room as u64, &request.found);
            }
            for (at, content) in &request.stored {
                self.model[*at..at + content.len()].copy_from_slice(content);
            }
        }
        self.guest.check();
        assert_eq!(self.reasons(), Vec::<String>::new(), "a ring that keeps the protocol");
        Ok(())
    }

    /// Writes a request to guest memory in any layout. Returns it with its head and the address of its status byte, if
    /// it has one.
    fn lay(
        &mut self,
        u: &mut Unstructured<'_>,
        part: usize,
        mut request: BlkRequest,
    ) -> Result<(BlkRequest, u16, Option<u64>)> {
        let at = FIRST + part as u64 * ROOM;
        let read = at + u.int_in_range(0..=63)?;
        let write = at + WRITES + u.int_in_range(0..=63)?;
        self.guest.put(read, &request.readable);
        self.guest.put(write, &vec![POISON; request.room + 1]);
        let mut pieces = cut(u, read, request.readable.len(), false)?;
        let mut status = Some(write + request.room as u64);
        match u.int_in_range(0..=39)? {
            // No status byte, and no other writable memory.
            39 => {
                request = request.fail_unmapped();
                status = None;
            }
            // Unmapped data.
            38 => {
                let address = *u.choose(&[MEMORY, MEMORY - 1, u64::MAX - 1, u64::MAX, 1 << 40])?;
                let len = u.int_in_range(2..=4096)?;
                pieces.push(crate::ring_guest::Piece { address, len, writable: false });
                pieces.extend(cut(u, write, request.room + 1, true)?);
                request = request.fail_unmapped();
            }
            _ => pieces.extend(cut(u, write, request.room + 1, true)?),
        }
        let direct = u.int_in_range(0..=pieces.len())?;
        let head = self.guest.put_chain(&pieces, direct, at + TABLE);
        Ok((request, head, status))
    }

    /// Violates the protocol in one way. The ring must be retired for that reason, and nothing may be written.
    fn break_ring(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let head = self.guest.take_descriptor();
        let other = self.guest.take_descriptor();
        let data = RawDescriptor { address: FIRST, len: 16, flags: NEXT, next: other };
        let mut ahead = 0;
        let mut heads = vec![head];
        let table = RawDescriptor { address: FIRST + TABLE, len: 32, flags: INDIRECT, next: 0 };
        let (first, second, reason) = match u.int_in_range(0..=10)? {
            0 => {
                heads = vec![RING + u.int_in_range(0..=u16::MAX - RING)?];
                (data, None, "an available entry names a descriptor outside the table")
            }
            1 => {
                ahead = u.int_in_range(RING..=u16::MAX - 1)?;
                (data, None, "the available index is further ahead than the ring is long")
            }
            2 => (RawDescriptor { next: RING, ..data }, None, "a descriptor's next field is outside the table"),
            3 => (
                data,
                Some(RawDescriptor { next: head, ..data }),
                "a descriptor chain is longer than its table: it loops",
            ),
            4 => (
                RawDescriptor { flags: NEXT | WRITE, ..data },
                Some(RawDescriptor { flags: 0, ..data }),
                "a readable descriptor follows a writable one",
            ),
            5 => (RawDescriptor { flags: INDIRECT | NEXT, ..table }, None, "a descriptor has both INDIRECT and NEXT"),
            6 => (
                RawDescriptor { len: *u.choose(&[0, 1, 15, 17, u32::MAX])?, ..table },
                None,
                "an indirect table's length is not a multiple of 16 above 0",
            ),
            7 => {
                self.guest.put_descriptor(FIRST + TABLE, 0, table);
                (table, None, "an indirect table names another one")
            }
            8 => {
                self.guest.put_descriptor(FIRST + TABLE, 0, RawDescriptor { next: 2, ..data });
                (table, None, "an indirect descriptor's next field is outside its table")
            }
            9 => {
                self.guest.put_descriptor(FIRST + TABLE, 0, RawDescriptor { next: 1, ..data });
                self.guest.put_descriptor(FIRST + TABLE, 1, RawDescriptor { next: 0, ..data });
                (table, None, "an indirect table loops")
            }
            _ => {
                heads = vec![head, head];
                (RawDescriptor { flags: 0, ..data }, None, "a chain was made available again before it was used")
            }
        };
        self.guest.put_descriptor(0, head, first);
        if let Some(second) = second {
            self.guest.put_descriptor(0, other, second);
        }
        heads.into_iter().for_each(|head| self.guest.offer(head));
        self.guest.publish(ahead);
        (0..8).for_each(|_| _ = self.worker.turn());
        assert_eq!(self.guest.used_count(), 0, "nothing is used of a broken ring");
        self.guest.check();
        assert_eq!(self.reasons(), [reason], "why the ring is broken");
        Ok(())
    }
}

fn attach(
    worker: &mut SteppedWorker,
    device: &Arc<VirtioBlk>,
    disk: &Arc<AnyDisk>,
    guest: &RingGuest,
    event_idx: bool,
    calls: &Arc<AtomicU64>,
    broken: &Arc<Mutex<Vec<String>>>,
) -> SteppedQueue {
    let reasons = Arc::clone(broken);
    let plug = PlugOptions::default();
    let options = QueueOptions {
        disks: vec![QueueDisk { slot: DiskSlot::FIRST, disk: Arc::clone(disk), plug, health: Arc::default() }],
        kick: None,
        policy: PollPolicy::Busy.into(),
        paused: false,
        on_fault: Box::new(move |fault| {
            if let QueueFault::BrokenRing(why) = fault {
                reasons.lock().unwrap_or_else(PoisonError::into_inner).push(why.to_owned());
            }
        }),
    };
    let attached = worker.attach(options, |waker| {
        let ring = MappedRing::resolve(&guest.memory, &RingGuest::addresses(), RING, RingFormat::Split)
            .map_err(|e| e.to_string())?;
        let parts = QueueResources {
            ring: DeviceRing::new(ring, guest.avail().into(), event_idx),
            share: MemoryShare::new(Arc::clone(&guest.memory), RING.into()),
            call: Some(Box::new(CountCalls(Arc::clone(calls)))),
            features: 0,
            waker: Arc::clone(waker),
        };
        Ok(VirtioDevice::<UringContext>::create_queue(device, 0, parts))
    });
    attached.expect("a free slot")
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut machine = Machine::new(u)?;
    for _ in 0..24 {
        if u.is_empty() {
            break;
        }
        if u.ratio(1, 8)? {
            machine.restart();
        }
        let count = u.int_in_range(1..=BATCH)?;
        let (rules, model) = (machine.rules, &machine.model);
        let requests = (0..count).map(|part| BlkRequest::any(u, rules, model, part)).collect::<Result<Vec<_>>>()?;
        machine.batch(u, requests)?;
    }
    let all = (0..BATCH).map(|part| BlkRequest::read_part(&machine.model, part)).collect();
    machine.batch(u, all)?;
    machine.break_ring(u)
}

const _: () = assert!(PART as usize * SECTOR + 64 < (TABLE - WRITES) as usize && FIRST + ROOM * BATCH as u64 <= MEMORY);

/// Runs the target.
///
/// # Panics
/// When the device violates the specification.
pub fn target(data: &[u8]) {
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
