//! A SCSI controller whose workers are stepped by the test, and its guest, in one thread. The rings, workers and engine
//! are real; the test chooses the order of the workers' turns.

use std::sync::Arc;

use mqblk_core::{Call, DiskSlot, Wake};
use mqblk_engine::{AnyDisk, PlugOptions, QueueDisk, SteppedQueue, SteppedWorker, UringContext};
use mqblk_memory::{GuestAddress, GuestMemory, MemoryShare};
use mqblk_ring::split::driver::ChainLayout;
use mqblk_ring::split::{SplitDriver, SplitRing};
use mqblk_ring::virtqueue::{DeviceRing, RingAddresses};
use mqblk_scsi::reservation::{ReservationStore, Reservations, Ticket};
use mqblk_scsi::{Identity, LogicalUnit, LogicalUnitOptions};
use mqblk_virtio::{QueueResources, QueueRole, VirtioDevice};
use mqblk_virtio_scsi::{LunAddress, ScsiOptions, VirtioScsi};

use crate::stepped::{guest_memory, polled_queue, start_workers};

/// Entries of each ring.
pub const RING_SIZE: u16 = 64;
/// Requests of a ring: each takes at most four descriptors.
pub const RING_SLOTS: usize = 16;
/// Largest data buffer of a request in bytes.
pub const MAX_DATA: usize = 64 << 10;
const HEADER_LEN: u64 = 51;
/// Offset of `cdb_size` in the configuration space. Source: virtio 1.3 section 5.6.4.
const CDB_SIZE_AT: u32 = 24;
const RESPONSE_LEN: u64 = 108;
/// Bytes of guest memory of a ring: the ring, then its slots.
const RING_AREA_LEN: u64 = 0x1_0000 + RING_SLOTS as u64 * SLOT_LEN;
const SLOT_LEN: u64 = MAX_DATA as u64 + 4096;
/// Queues before the request queues.
const FIXED_QUEUES: usize = mqblk_virtio_scsi::FIXED_QUEUES as usize;
const CONTROL: usize = 0;
const EVENT: usize = 1;
/// Feature bits of a controller: VIRTIO_SCSI_F_HOTPLUG and VIRTIO_SCSI_F_CHANGE (virtio 1.3 section 5.6.3).
const HOTPLUG_AND_CHANGE: u64 = 0b110;

/// A guest that polls: calls are dropped.
struct NoCall;

impl Call for NoCall {
    fn call(&self) {}
}

/// The data buffer of a command.
#[derive(Clone, Copy, Debug)]
pub enum CommandData<'a> {
    /// No data.
    None,
    /// Data-in buffer of this many bytes.
    In(usize),
    /// Data-out buffer with these bytes.
    Out(&'a [u8]),
}

/// A completed command. Source: virtio 1.3 section 5.6.6.1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletedCommand {
    /// Identifier as submitted.
    pub id: u64,
    /// Virtio `response` byte.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Residual: data that was not transferred, in bytes.
    pub residual: u32,
    /// Sense data.
    pub sense: Vec<u8>,
    /// Data-in buffer.
    pub data: Vec<u8>,
}

impl CompletedCommand {
    /// Returns sense key, additional sense code and qualifier (fixed format).
    pub fn sense_code(&self) -> (u8, u8, u8) {
        match self.sense[..] {
            [_, _, key, _, _, _, _, _, _, _, _, _, asc, ascq, ..] => (key & 0xf, asc, ascq),
            _ => (0, 0, 0),
        }
    }
}

struct Slot {
    id: u64,
    writable_len: usize,
}

struct GuestRing {
    driver: SplitDriver,
    start: u64,
    free: Vec<u32>,
    slots: Vec<Slot>,
}

impl GuestRing {
    fn slot_address(&self, slot: u32) -> u64 {
        self.start + 0x1_0000 + u64::from(slot) * SLOT_LEN
    }
}

/// A controller and its guest.
pub struct SteppedController {
    /// The device.
    pub device: Arc<VirtioScsi>,
    /// Its logical units, by disk slot.
    pub logical_units: Vec<Arc<LogicalUnit>>,
    memory: Arc<GuestMemory>,
    workers: Vec<SteppedWorker>,
    attached: Vec<(usize, SteppedQueue)>,
    rings: Vec<GuestRing>,
}

/// Makes reservations durable before the command that changes them runs its first step.
struct SavedAtOnce;

impl ReservationStore for SavedAtOnce {
    fn save(&self, _state: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket> {
        let ticket = Ticket::new(done);
        ticket.resolve(Ok(()));
        ticket
    }
}

/// Creates a logical unit of this name for a disk.
pub fn logical_unit(disk: &AnyDisk, name: &str) -> Arc<LogicalUnit> {
    let identity = Identity {
        vendor: "MQBLK".to_owned(),
        product: "TEST".to_owned(),
        revision: "1".to_owned(),
        serial: name.to_owned(),
        name: name.to_owned(),
    };
    Arc::new(LogicalUnit::new(LogicalUnitOptions {
        geometry: disk.geometry(),
        limits: disk.limits(),
        identity,
        writeback: true,
        reservations: Reservations::new(Some(Arc::new(SavedAtOnce))),
    }))
}

impl SteppedController {
    /// Creates a controller with a logical unit at each address. Queues are assigned to the workers round-robin. The
    /// guest accepts all features and posts 8 event buffers; unit attentions are pending.
    pub fn new(queues: u16, workers: usize, disks: &[(LunAddress, Arc<AnyDisk>, PlugOptions)]) -> SteppedController {
        SteppedController::with_cdb_size(queues, workers, disks, 32)
    }

    /// Same with another `cdb_size`, as a driver chooses it. Only [`run_chain`](Self::run_chain) can send such
    /// commands.
    pub fn with_cdb_size(
        queues: u16,
        workers: usize,
        disks: &[(LunAddress, Arc<AnyDisk>, PlugOptions)],
        cdb_size: u32,
    ) -> SteppedController {
        let options =
            ScsiOptions { queues, queue_size: RING_SIZE, cmd_per_lun: 16, max_transfer: mqblk_core::ByteLen(1 << 20) };
        let device = Arc::new(VirtioScsi::new(options));
        VirtioDevice::<UringContext>::set_features(&*device, HOTPLUG_AND_CHANGE);
        VirtioDevice::<UringContext>::write_config(&*device, CDB_SIZE_AT, &cdb_size.to_le_bytes())
            .expect("a size in range");
        let count = usize::from(VirtioDevice::<UringContext>::num_queues(&*device));
        let memory = guest_memory(RING_AREA_LEN * count as u64);
        let workers = start_workers(workers);
        let mut units = Vec::new();
        let mut open = Vec::new();
        for (slot, (address, disk, plug)) in (0..).zip(disks) {
            let unit = logical_unit(&**disk, &format!("{address}"));
            let nexus = unit.login("guest", u16::from(address.target) + 1).expect("a name that is free");
            device.map(*address, DiskSlot(slot), nexus).expect("a free place");
            open.push(QueueDisk { slot: DiskSlot(slot), disk: Arc::clone(disk), plug: *plug, health: Arc::default() });
            units.push(unit);
        }
        let mut controller =
            SteppedController { device, logical_units: units, memory, workers, attached: vec![], rings: vec![] };
        for index in 0..count {
            controller.attach(index, &open);
        }
        for _ in 0..8 {
            controller.post_event_buffer();
        }
        controller
    }

    fn attach(&mut self, index: usize, open: &[QueueDisk]) {
        let start = index as u64 * RING_AREA_LEN;
        let at = RingAddresses {
            desc: GuestAddress(start),
            avail: GuestAddress(start + 0x4000),
            used: GuestAddress(start + 0x8000),
        };
        let driver = SplitDriver::new(&self.memory, &at, RING_SIZE, false, None).expect("a ring");
        let ring = SplitRing::resolve(&self.memory, &at, RING_SIZE).expect("a ring");
        let role = VirtioDevice::<UringContext>::queue_role(&*self.device, index as u16);
        let options = polled_queue(if role == QueueRole::Requests { open.to_vec() } else { vec![] });
        let worker = index % self.workers.len();
        let (device, memory) = (&self.device, &self.memory);
        let attached = self.workers[worker].attach(options, |waker| {
            let parts = QueueResources {
                ring: DeviceRing::new(ring, 0, false),
                share: MemoryShare::new(Arc::clone(memory), RING_SIZE.into()),
                call: Some(Box::new(NoCall)),
                features: HOTPLUG_AND_CHANGE,
                waker: Arc::clone(waker),
            };
            Ok(VirtioDevice::<UringContext>::create_queue(device, index as u16, parts))
        });
        self.attached.push((worker, attached.expect("a seat")));
        let slots = (0..RING_SLOTS).map(|_| Slot { id: 0, writable_len: 0 }).collect();
        self.rings.push(GuestRing { driver, start, free: (0..RING_SLOTS as u32).rev().collect(), slots });
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Runs one turn of one worker. Returns true if it did any work.
    pub fn step(&mut self, worker: usize) -> bool {
        self.workers[worker].turn()
    }

    /// Runs turns of all workers until `done` returns a value.
    pub fn run_until<R>(&mut self, mut done: impl FnMut(&mut SteppedController) -> Option<R>) -> R {
        loop {
            if let Some(result) = done(self) {
                return result;
            }
            (0..self.workers()).for_each(|worker| _ = self.step(worker));
        }
    }

    /// Stops pulling from a request queue. The queue is detached when none of its requests is in flight.
    pub fn drain(&mut self, queue: usize) {
        let (worker, attached) = self.attached[FIXED_QUEUES + queue];
        self.workers[worker].drain(attached);
    }

    /// Returns true if a request queue is attached.
    pub fn is_attached(&mut self, queue: usize) -> bool {
        let (worker, attached) = self.attached[FIXED_QUEUES + queue];
        self.workers[worker].serves(attached)
    }

    /// Returns the number of free slots of a request queue.
    pub fn free_slots(&self, queue: usize) -> usize {
        self.rings[FIXED_QUEUES + queue].free.len()
    }

    /// Puts a command on a request queue, which must have a free slot.
    pub fn submit(&mut self, queue: usize, address: LunAddress, id: u64, cdb: &[u8], data: CommandData<'_>) {
        self.submit_with_lun_field(queue, address.encode(), id, cdb, data);
    }

    /// Puts a command on a request queue, with any `lun` field.
    pub fn submit_with_lun_field(&mut self, queue: usize, lun: [u8; 8], id: u64, cdb: &[u8], data: CommandData<'_>) {
        let mut header = vec![0; HEADER_LEN as usize];
        header[..8].copy_from_slice(&lun);
        header[8..16].copy_from_slice(&id.to_le_bytes());
        header[19..19 + cdb.len()].copy_from_slice(cdb);
        let ring = &mut self.rings[FIXED_QUEUES + queue];
        let slot = ring.free.pop().expect("the queue has room");
        let at = ring.slot_address(slot);
        self.memory.write(GuestAddress(at), &header).expect("mapped");
        let (response, body) = (GuestAddress(at + 256), GuestAddress(at + 4096));
        let chain = ring.driver.begin(ChainLayout::Direct).readable(GuestAddress(at), HEADER_LEN as u32).expect("room");
        let (chain, data_in) = match data {
            CommandData::None => (chain.writable(response, RESPONSE_LEN as u32).expect("room"), 0),
            CommandData::In(len) => {
                self.memory.write(body, &vec![0; len]).expect("mapped");
                let chain = chain.writable(response, RESPONSE_LEN as u32).expect("room");
                (chain.writable(body, len as u32).expect("room"), len)
            }
            CommandData::Out(bytes) => {
                self.memory.write(body, bytes).expect("mapped");
                let chain = chain.readable(body, bytes.len() as u32).expect("room");
                (chain.writable(response, RESPONSE_LEN as u32).expect("room"), 0)
            }
        };
        chain.commit(slot).expect("room");
        let _polled = ring.driver.publish();
        ring.slots[slot as usize] = Slot { id, writable_len: data_in };
    }

    /// Puts a chain of any bytes on a request queue and waits until it is used. Returns the bytes of its writable
    /// segments and the used length. Each segment is one descriptor, between poisoned bytes.
    ///
    /// # Panics
    /// When the device wrote outside of a writable segment.
    pub fn run_chain(&mut self, queue: usize, readable: &[&[u8]], writable: &[u32]) -> (Vec<u8>, u32) {
        const POISON: u8 = 0xee;
        const GAP: u64 = 16;
        let (memory, ring) = (&self.memory, &mut self.rings[FIXED_QUEUES + queue]);
        let slot = ring.free.pop().expect("the queue has room");
        let mut at = ring.slot_address(slot) + GAP;
        memory.write(GuestAddress(ring.slot_address(slot)), &vec![POISON; SLOT_LEN as usize]).expect("mapped");
        let mut chain = ring.driver.begin(ChainLayout::Direct);
        for segment in readable {
            memory.write(GuestAddress(at), segment).expect("mapped");
            chain = chain.readable(GuestAddress(at), segment.len() as u32).expect("room");
            at += segment.len() as u64 + GAP;
        }
        let start = at;
        for len in writable {
            chain = chain.writable(GuestAddress(at), *len).expect("room");
            at += u64::from(*len) + GAP;
        }
        chain.commit(slot).expect("room");
        let _polled = ring.driver.publish();
        let written = self.run_until(|controller| {
            let driver = &mut controller.rings[FIXED_QUEUES + queue].driver;
            driver.poll_used().expect("the device keeps to the protocol");
            driver.take().expect("the device keeps to the protocol").map(|used| used.written)
        });
        let mut area = vec![0; (at - start) as usize];
        self.memory.read(GuestAddress(start), &mut area).expect("mapped");
        let mut bytes = Vec::new();
        for len in writable {
            let gap = area.split_off(*len as usize + GAP as usize);
            assert!(area[*len as usize..].iter().all(|byte| *byte == POISON), "the device wrote behind a segment");
            bytes.extend(&area[..*len as usize]);
            area = gap;
        }
        self.rings[FIXED_QUEUES + queue].free.push(slot);
        (bytes, written)
    }

    /// Returns the commands of a request queue that completed since the last call.
    pub fn reap(&mut self, queue: usize) -> Vec<CompletedCommand> {
        let (memory, ring) = (&self.memory, &mut self.rings[FIXED_QUEUES + queue]);
        ring.driver.poll_used().expect("the device keeps to the protocol");
        let mut completed = Vec::new();
        while let Some(used) = ring.driver.take().expect("the device keeps to the protocol") {
            let at = ring.slot_address(used.token);
            let Slot { id, writable_len: data_in } = ring.slots[used.token as usize];
            let mut bytes = [0; RESPONSE_LEN as usize];
            memory.read(GuestAddress(at + 256), &mut bytes).expect("mapped");
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
            let mut data = vec![0; data_in];
            memory.read(GuestAddress(at + 4096), &mut data).expect("mapped");
            let sense = bytes[12..12 + word(0) as usize].to_vec();
            completed.push(CompletedCommand {
                id,
                response: bytes[11],
                status: bytes[10],
                residual: word(4),
                sense,
                data,
            });
            ring.free.push(used.token);
        }
        completed
    }

    /// Runs one command on queue 0 to its completion.
    pub fn run_command(&mut self, address: LunAddress, cdb: &[u8], data: CommandData<'_>) -> CompletedCommand {
        self.submit(0, address, u64::MAX, cdb, data);
        self.run_until(|controller| controller.reap(0).pop())
    }

    /// Clears the initial unit attention of each logical unit.
    pub fn clear_unit_attentions(&mut self, addresses: &[LunAddress]) {
        for address in addresses {
            while self.run_command(*address, &[0; 6], CommandData::None).status != 0 {}
        }
    }

    /// Puts a task management function on the control queue, which must have a free slot.
    pub fn submit_task_management(&mut self, subtype: u32, address: LunAddress, id: u64) {
        let mut request = [0; 24];
        request[4..8].copy_from_slice(&subtype.to_le_bytes());
        request[8..16].copy_from_slice(&address.encode());
        request[16..].copy_from_slice(&id.to_le_bytes());
        self.submit_control(id, &request, 1);
    }

    /// Puts any request on the control queue, with `response` writable bytes for the response.
    pub fn submit_control(&mut self, id: u64, request: &[u8], response: u32) {
        let ring = &mut self.rings[CONTROL];
        let slot = ring.free.pop().expect("the control queue has room");
        let at = ring.slot_address(slot);
        self.memory.write(GuestAddress(at), request).expect("mapped");
        self.memory.write(GuestAddress(at + 256), &[0xff; 8]).expect("mapped");
        let chain =
            ring.driver.begin(ChainLayout::Direct).readable(GuestAddress(at), request.len() as u32).expect("room");
        chain.writable(GuestAddress(at + 256), response).expect("room").commit(slot).expect("room");
        let _polled = ring.driver.publish();
        ring.slots[slot as usize] = Slot { id, writable_len: response as usize };
    }

    /// Returns the completed requests of the control queue: identifiers and responses.
    pub fn reap_control(&mut self) -> Vec<(u64, Vec<u8>)> {
        self.reap_writable(CONTROL)
    }

    /// Returns the events since the last call, and posts their buffers again.
    pub fn take_events(&mut self) -> Vec<Vec<u8>> {
        let events = self.reap_writable(EVENT);
        events.iter().for_each(|_| self.post_event_buffer());
        events.into_iter().map(|(_, bytes)| bytes).collect()
    }

    fn reap_writable(&mut self, ring: usize) -> Vec<(u64, Vec<u8>)> {
        let (memory, ring) = (&self.memory, &mut self.rings[ring]);
        ring.driver.poll_used().expect("the device keeps to the protocol");
        let mut completed = Vec::new();
        while let Some(used) = ring.driver.take().expect("the device keeps to the protocol") {
            let Slot { id, writable_len: data_in } = ring.slots[used.token as usize];
            let mut bytes = vec![0; data_in];
            memory.read(GuestAddress(ring.slot_address(used.token) + 256), &mut bytes).expect("mapped");
            completed.push((id, bytes));
            ring.free.push(used.token);
        }
        completed
    }

    fn post_event_buffer(&mut self) {
        let ring = &mut self.rings[EVENT];
        let slot = ring.free.pop().expect("the event queue has room");
        let at = GuestAddress(ring.slot_address(slot) + 256);
        ring.driver.begin(ChainLayout::Direct).writable(at, 16).expect("room").commit(slot).expect("room");
        let _polled = ring.driver.publish();
        ring.slots[slot as usize] = Slot { id: 0, writable_len: 16 };
    }
}
