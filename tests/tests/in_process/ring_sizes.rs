//! Full rings of every size: as many requests as ring entries, all of them at the storage at once.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{
    ByteLen, Completion, Disk, DiskChannel, DiskError, DiskSlot, Geometry, Limits, Outcome, Request, Sector512,
};
use mqblk_driver::virtio_blk::{self, BlkStatus};
use mqblk_driver::virtio_scsi::{self, Command, Lba};
use mqblk_driver::{DataSegment, DescriptorLayout};
use mqblk_engine::{
    AnyDisk, Engine, EngineOptions, FixedBufferUse, PlugOptions, PollPolicy, QueueDisk, UringContext, UringOptions,
};
use mqblk_memory::{Buffer, GuestAddress, GuestMemory};
use mqblk_tests::stepped_scsi::logical_unit;
use mqblk_vhost_user_devices::serve_scsi;
use mqblk_vhost_user_server::{ServerOptions, SocketAccess};
use mqblk_virtio_scsi::{LunAddress, ScsiOptions, VirtioScsi};

use mqblk_tests::in_process::{Plan, Rig, disk};

/// The smallest size of the project's driver, QEMU 7.2's, the previous largest, QEMU 10.0's, the largest of virtio.
const SIZES: [u16; 5] = [4, 128, 256, 1024, 32768];

/// Split and packed rings of all sizes.
fn formats_and_sizes() -> impl Iterator<Item = (bool, u16)> {
    [false, true].into_iter().flat_map(|packed| SIZES.map(|size| (packed, size)))
}

const ROUNDS: u64 = 3;
const SECTOR: u32 = 512;

/// A channel that completes requests only when it has as many as ring entries.
struct Gate {
    inner: Arc<AnyDisk>,
    wanted: usize,
}

struct GateChannel {
    wanted: usize,
    held: Vec<Completion<Buffer>>,
    open: bool,
}

impl Disk<UringContext> for Gate {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.inner.resize(size)
    }
    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![]
    }
    fn open_channel(&self, _: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        Ok(Box::new(GateChannel { wanted: self.wanted, held: vec![], open: false }))
    }
}

impl DiskChannel<UringContext> for GateChannel {
    fn submit(
        &mut self,
        _: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let taken = batch.len();
        self.held.extend(batch.drain(..).map(|request| Completion {
            outcome: Outcome::Done(request.len),
            tag: request.tag,
            buffer: request.buffer,
        }));
        assert!(self.held.len() <= self.wanted, "{} requests of a ring of {}", self.held.len(), self.wanted);
        self.open = self.held.len() == self.wanted;
        taken
    }
    fn reap(&mut self, _: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        if !self.open {
            return 0;
        }
        self.open = false;
        finished.append(&mut self.held);
        self.wanted
    }
    fn outstanding(&self) -> u32 {
        self.held.len() as u32
    }
    fn close(&mut self, _: &mut UringContext) {}
}

fn gate(size: u16) -> Arc<AnyDisk> {
    Arc::new(Gate { inner: disk("null", &[("size", "32M")]), wanted: size.into() })
}

/// Returns the data of request `slot` of a round.
fn content(round: u64, slot: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(round + 1).to_le_bytes());
    bytes[8..].copy_from_slice(&u64::from(slot).to_le_bytes());
    bytes
}

fn piece(data: GuestAddress, slot: u32) -> DataSegment {
    DataSegment { address: GuestAddress(data.0 + u64::from(slot * SECTOR)), len: SECTOR }
}

/// A queue of either interface.
trait Full {
    /// Returns its data memory.
    fn data(&mut self) -> (Arc<GuestMemory>, GuestAddress);
    /// Submits a transfer of a sector. Returns false if the ring is full.
    fn submit(&mut self, write: bool, slot: u32, piece: DataSegment) -> bool;
    fn publish(&mut self);
    /// Takes the next completion, which must be a success.
    fn next(&mut self) -> u32;
}

struct Blk(virtio_blk::BlkQueueSet);

impl Full for Blk {
    fn data(&mut self) -> (Arc<GuestMemory>, GuestAddress) {
        let queue = &self.0.queues_mut()[0];
        (Arc::clone(queue.memory()), queue.data().0)
    }
    fn submit(&mut self, write: bool, slot: u32, piece: DataSegment) -> bool {
        let (queue, at) = (&mut self.0.queues_mut()[0], Sector512(slot.into()));
        if write { queue.write(slot, at, piece) } else { queue.read(slot, at, piece) }.is_ok()
    }
    fn publish(&mut self) {
        self.0.queues_mut()[0].publish().expect("a kick");
    }
    fn next(&mut self) -> u32 {
        loop {
            let queue = &mut self.0.queues_mut()[0];
            queue.poll().expect("the device keeps to the protocol");
            if let Some(done) = queue.reap().expect("the device keeps to the protocol") {
                assert_eq!(done.status, BlkStatus::Ok, "request {}", done.user_data);
                return done.user_data;
            }
            self.0.wait(1).expect("a call");
        }
    }
}

struct Scsi(virtio_scsi::ScsiQueueSet);

impl Full for Scsi {
    fn data(&mut self) -> (Arc<GuestMemory>, GuestAddress) {
        let queue = &self.0.queues_mut()[0];
        (Arc::clone(queue.memory()), queue.data().0)
    }
    fn submit(&mut self, write: bool, slot: u32, piece: DataSegment) -> bool {
        let (to, at) = (virtio_scsi::LunAddress { target: 0, lun: 0 }, Lba(slot.into()));
        let command = if write { Command::write(to, at, 1, piece, false) } else { Command::read(to, at, 1, piece) };
        self.0.submit(0, slot, &command).is_ok()
    }
    fn publish(&mut self) {
        self.0.publish().expect("a kick");
    }
    fn next(&mut self) -> u32 {
        loop {
            self.0.poll(0).expect("the device keeps to the protocol");
            if let Some(done) = self.0.reap(0).expect("the device keeps to the protocol") {
                assert!(done.outcome.is_good(), "command {}: {:?}", done.user_data, done.outcome);
                return done.user_data;
            }
            self.0.wait(1).expect("a call");
        }
    }
}

/// Fills the ring, then takes all completions: each slot once.
fn full(queue: &mut impl Full, size: u16, write: bool) {
    let (_, data) = queue.data();
    for slot in 0..size.into() {
        assert!(queue.submit(write, slot, piece(data, slot)), "no room for request {slot} of {size}");
    }
    assert!(!queue.submit(write, size.into(), piece(data, 0)), "room for more than {size} requests");
    queue.publish();
    let mut seen = vec![false; size.into()];
    for _ in 0..size {
        let slot = queue.next() as usize;
        assert!(!std::mem::replace(&mut seen[slot], true), "request {slot} was answered twice");
    }
}

/// Writes and reads back with the ring always full.
fn verify(queue: &mut impl Full, size: u16) {
    let (memory, data) = queue.data();
    for round in 0..ROUNDS {
        let put = |bytes: &dyn Fn(u32) -> [u8; 16]| {
            for slot in 0..size.into() {
                memory.write(piece(data, slot).address, &bytes(slot)).expect("data memory");
            }
        };
        put(&|slot| content(round, slot));
        full(queue, size, true);
        put(&|_| [0xee; 16]);
        full(queue, size, false);
        for slot in 0..size.into() {
            let mut found = [0; 16];
            memory.read(piece(data, slot).address, &mut found).expect("data memory");
            assert_eq!(found, content(round, slot), "ring of {size}, round {round}, sector {slot}");
        }
    }
}

fn with_blk(packed: bool, size: u16, poll: PollPolicy, disk: Arc<AnyDisk>, test: impl FnOnce(&mut Blk)) {
    let plan = Plan { disk, workers: 1, policy: poll.into(), plug: PlugOptions::default(), health: Default::default() };
    let (rig, mut sets) = Rig::new(plan, |options| {
        options.queue_size = size;
        options.packed = packed;
        options.descriptors = DescriptorLayout::Indirect;
        options.data_per_queue = ByteLen(u64::from(size) * u64::from(SECTOR));
    });
    let mut queue = Blk(sets.remove(0));
    test(&mut queue);
    rig.stop(vec![queue.0]);
}

fn with_scsi(packed: bool, size: u16, poll: PollPolicy, disk: Arc<AnyDisk>, test: impl FnOnce(&mut Scsi)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let socket = folder.path().join("socket");
    let engine = EngineOptions { workers: 1, pin: vec![], context: UringOptions::default() };
    let engine = Arc::new(Engine::start(&engine).expect("a worker starts"));
    let options = ScsiOptions { queues: 1, queue_size: size.max(64), cmd_per_lun: 128, max_transfer: ByteLen(1 << 20) };
    let device = Arc::new(VirtioScsi::new(options));
    let unit = logical_unit(&*disk, "unit");
    let nexus = unit.login("guest", 1).expect("a name that is free");
    device.map(LunAddress { target: 0, lun: 0 }, DiskSlot::FIRST, nexus).expect("a free place");
    let serve = ServerOptions {
        name: "rig".to_owned(),
        socket: socket.clone(),
        socket_access: SocketAccess::with_mode(0o600),
        queue_map: vec![],
        policy: poll.into(),
        sharing: mqblk_vhost_user_server::SharePolicy::default(),
        fixed_buffers: FixedBufferUse::Off,
        drain_timeout: Duration::from_secs(30),
        disks: vec![QueueDisk { slot: DiskSlot::FIRST, disk, plug: PlugOptions::default(), health: Arc::default() }],
        engine,
        host_state: None,
        standby: false,
        guests: None,
    };
    let server = serve_scsi(device, serve).expect("the socket can be made");
    let mut device = virtio_scsi::ScsiController::connect(&virtio_scsi::ScsiConnectOptions {
        queue_size: size,
        packed,
        max_outstanding: u32::from(size) + 1,
        descriptors: DescriptorLayout::Indirect,
        data_per_queue: ByteLen(u64::from(size) * u64::from(SECTOR)),
        ..virtio_scsi::ScsiConnectOptions::new(socket)
    })
    .expect("connected");
    let mut queue = Scsi(device.take_queues().remove(0));
    // This also clears the unit attentions of a new nexus.
    assert_eq!(device.scan(&mut queue.0).expect("a scan").len(), 1);
    test(&mut queue);
    device.stop(vec![queue.0]).expect("the queues stop");
    server.stop();
}

#[test]
fn all_requests_of_a_disks_full_ring_are_at_the_storage() {
    for (packed, size) in formats_and_sizes() {
        with_blk(packed, size, PollPolicy::Off, gate(size), |queue| (0..ROUNDS).for_each(|_| full(queue, size, true)));
    }
}

#[test]
fn all_requests_of_a_controllers_full_ring_are_at_the_storage() {
    for (packed, size) in formats_and_sizes() {
        with_scsi(packed, size, PollPolicy::Off, gate(size), |queue| (0..ROUNDS).for_each(|_| full(queue, size, true)));
    }
}

#[test]
fn a_full_ring_is_right_in_memory_and_in_a_file() {
    let image = tempfile::NamedTempFile::new().expect("an image");
    image.as_file().set_len(16 << 20).expect("an image");
    let path = image.path().display().to_string();
    for (packed, size) in formats_and_sizes() {
        for poll in [PollPolicy::Off, PollPolicy::default()] {
            with_blk(packed, size, poll, disk("ram", &[("size", "16M")]), |queue| verify(queue, size));
            with_scsi(packed, size, poll, disk("ram", &[("size", "16M")]), |queue| verify(queue, size));
            with_blk(packed, size, poll, disk("file", &[("path", &path), ("direct", "off")]), |queue| {
                verify(queue, size)
            });
        }
    }
}
