//! The guest of the device: puts a load's requests on the rings, as virtio-blk or virtio-scsi requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_driver::Waker;
use mqblk_driver::virtio_scsi::{self, CommandData, CommandOutcome, CommandResponse, Sense};
use mqblk_memory::{GuestAddress, GuestMemory};
use mqblk_ring::driver_ring::ChainLayout;
use mqblk_tests::crash::load::{DATA_BYTES, LoadControl};
use mqblk_tests::crash::{blk, scsi};
use mqblk_tests::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType, TaskFunction};
use mqblk_virtio_scsi::LunAddress;
use rand::RngExt;

use super::{AREA, MortalDevice, World};

/// Bytes of a request besides its data: the part that the device reads, and in the second half the part that it writes.
const ASIDE: u64 = 1024;
const ANSWER: u64 = 512;
/// Largest data of a request: larger ones take longer to check and cover nothing more.
const LARGEST: u32 = 32 << 10;
/// Steps without new requests after which incomplete requests never will complete.
const PATIENCE: u64 = 200_000;
/// Requests of a control queue.
const CONTROLS: u32 = 4;

type Piece = (GuestAddress, u32);

/// The request format of an interface.
pub(crate) trait Form {
    type Device: MortalDevice;
    /// Rings before the request rings.
    const FIXED: usize;
    fn works(&self) -> &[RequestType];
    /// Writes a request's header. Returns the segments that the device reads, and those that it writes.
    fn put(&self, memory: &GuestMemory, aside: u64, tag: u64, order: &LoadRequest) -> (Vec<Piece>, Vec<Piece>);
    /// Returns a request's outcome.
    fn end(&self, memory: &GuestMemory, aside: u64, user: u32) -> RequestOutcome;
    /// Returns the bytes of a task management function for the request of this tag.
    fn manage(&self, _disk: usize, _what: TaskFunction, _tag: u64) -> Option<[u8; 24]> {
        None
    }
}

/// A guest whose backend is killed and restarted while it waits.
pub(crate) struct Guest<F: Form> {
    pub form: F,
    pub world: World<F::Device>,
    queues: usize,
    /// Requests in flight, by user.
    orders: Vec<Option<LoadRequest>>,
    /// Tag of each user's request: a new one each time.
    tags: Vec<u64>,
    controls: Vec<u32>,
    /// Steps until the guest stops submitting.
    left: u64,
    over: u64,
    shared: Arc<LoadControl>,
}

impl<F: Form> Guest<F> {
    pub(crate) fn new(form: F, world: World<F::Device>, steps: u64, shared: &Arc<LoadControl>) -> Guest<F> {
        let queues = world.rings.len() - F::FIXED;
        let orders: Vec<_> = (0..queues as u64 * 64).map(|_| None).collect();
        let tags = (0..orders.len() as u64).collect();
        let controls = (0..CONTROLS).collect();
        Guest { form, world, queues, orders, tags, controls, left: steps, over: 0, shared: Arc::clone(shared) }
    }

    /// Returns the bytes that the guest needs.
    pub(crate) const fn bytes(queues: u64) -> u64 {
        queues * DATA_BYTES + (queues * 64 + CONTROLS as u64) * ASIDE
    }

    fn data_start(&self) -> u64 {
        self.world.rings.len() as u64 * AREA
    }

    fn aside(&self, user: usize) -> u64 {
        self.data_start() + self.queues as u64 * DATA_BYTES + user as u64 * ASIDE
    }

    fn step(&mut self) {
        self.world.step();
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        self.over += 1;
        if self.over > PATIENCE {
            self.shared.hangs.store(true, Ordering::Relaxed);
        }
    }

    fn take(&mut self, done: &mut Vec<(u32, RequestOutcome)>) {
        for ring in 0..self.world.rings.len() {
            self.world.rings[ring].poll_used().expect("a device that keeps the protocol");
            while let Some(used) = self.world.rings[ring].take().expect("a device that keeps the protocol") {
                if ring < F::FIXED {
                    self.controls.push(used.token);
                    continue;
                }
                let order = self.orders[used.token as usize].take().expect("an answer to a request in flight");
                self.world.answers += 1;
                if changes(order.request_type) {
                    self.world.stores[order.disk].closed(&order.ranges);
                }
                done.push((used.token, self.form.end(&self.world.memory, self.aside(used.token as usize), used.token)));
            }
        }
    }
}

fn changes(work: RequestType) -> bool {
    !matches!(work, RequestType::Read | RequestType::Flush)
}

impl<F: Form> DeviceQueues for Guest<F> {
    fn queue_count(&mut self) -> usize {
        self.queues
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(&self.world.memory)
    }
    fn data_address(&mut self, queue: usize) -> GuestAddress {
        GuestAddress(self.data_start() + queue as u64 * DATA_BYTES)
    }
    fn max_request_bytes(&mut self) -> u32 {
        LARGEST
    }
    fn request_mix(&self) -> &[RequestType] {
        self.form.works()
    }
    fn submit(&mut self, queue: usize, user: u32, order: &LoadRequest) -> bool {
        let aside = self.aside(user as usize);
        let (readable, writable) =
            self.form.put(&self.world.memory, aside, self.tags[user as usize] + (1 << 32), order);
        let ring = &mut self.world.rings[F::FIXED + queue];
        if usize::from(ring.free_descriptors()) < readable.len() + writable.len() {
            return false;
        }
        ring.add(ChainLayout::Direct, &readable, &writable, user).expect("room");
        if changes(order.request_type) {
            self.world.stores[order.disk].opened(&order.ranges);
        }
        self.tags[user as usize] += 1 << 32;
        self.orders[user as usize] = Some(order.clone());
        true
    }
    fn publish(&mut self) {
        // The backend polls.
        self.world.rings.iter_mut().for_each(|ring| _ = ring.publish());
    }
    fn reap(&mut self, done: &mut Vec<(u32, RequestOutcome)>) {
        for _ in 0..self.world.random.random_range(1..6) {
            self.step();
            self.take(done);
        }
    }
    fn wait(&mut self) {}
    fn waker(&mut self) -> Waker {
        unreachable!("it does not sleep")
    }
    fn manage(&mut self, disk: usize, what: TaskFunction) -> bool {
        let tag = if let TaskFunction::Abort(user) = what { self.tags[user as usize] } else { 0 };
        let Some(request) = self.form.manage(disk, what, tag) else { return false };
        let Some(slot) = self.controls.pop() else { return false };
        let at = self.aside(self.orders.len() + slot as usize);
        self.world.memory.write(GuestAddress(at), &request).expect("mapped");
        let (request, answer) = ([(GuestAddress(at), 24)], [(GuestAddress(at + ANSWER), 1)]);
        self.world.rings[0].add(ChainLayout::Direct, &request, &answer, slot).expect("room");
        let _polled = self.world.rings[0].publish();
        true
    }
    fn is_managing(&self) -> bool {
        self.controls.len() < CONTROLS as usize
    }
}

/// Returns a request's data in two segments where possible.
fn pieces((at, len): Piece) -> Vec<Piece> {
    match len {
        0 => vec![],
        1..=512 => vec![(at, len)],
        // Not within a sector: real guests have whole pages.
        _ => {
            let first = (len / 1024) * 512;
            vec![(at, first), (GuestAddress(at.0 + u64::from(first)), len - first)]
        }
    }
}

/// virtio-blk. Source: virtio 1.3 section 5.2.6.
pub(crate) struct Blk;

impl Form for Blk {
    type Device = mqblk_virtio_blk::VirtioBlk;
    const FIXED: usize = 0;

    fn works(&self) -> &[RequestType] {
        &blk::REQUEST_MIX
    }

    fn put(&self, memory: &GuestMemory, aside: u64, _: u64, order: &LoadRequest) -> (Vec<Piece>, Vec<Piece>) {
        let kind: u32 = match order.request_type {
            RequestType::Read => 0,
            RequestType::Write => 1,
            RequestType::Flush => 4,
            RequestType::Discard => 11,
            RequestType::WriteZeroes => 13,
            other => panic!("{other:?} is none of virtio-blk's"),
        };
        let has_data = matches!(order.request_type, RequestType::Read | RequestType::Write);
        let sector = if has_data { order.start() } else { 0 };
        let header = [u64::from(kind).to_le_bytes(), sector.to_le_bytes()].concat();
        memory.write(GuestAddress(aside), &header).expect("mapped");
        memory.write(GuestAddress(aside + ANSWER), &[0xff]).expect("mapped");
        let (mut readable, mut writable) = (vec![(GuestAddress(aside), 16)], vec![]);
        let data = pieces((order.data, order.sectors() * 512));
        match order.request_type {
            RequestType::Read => writable.extend(data),
            RequestType::Write => readable.extend(data),
            RequestType::Discard | RequestType::WriteZeroes => {
                let unmap =
                    |start: u64| u32::from(order.request_type == RequestType::WriteZeroes && start.is_multiple_of(2));
                let range = |(start, sectors): &(u64, u32)| {
                    [start.to_le_bytes().to_vec(), sectors.to_le_bytes().to_vec(), unmap(*start).to_le_bytes().to_vec()]
                };
                let bytes = order.ranges.iter().flat_map(range).flatten().collect::<Vec<u8>>();
                memory.write(GuestAddress(aside + 16), &bytes).expect("mapped");
                readable.push((GuestAddress(aside + 16), bytes.len() as u32));
            }
            _ => {}
        }
        writable.push((GuestAddress(aside + ANSWER), 1));
        (readable, writable)
    }

    fn end(&self, memory: &GuestMemory, aside: u64, user: u32) -> RequestOutcome {
        let mut status = [0];
        memory.read(GuestAddress(aside + ANSWER), &mut status).expect("mapped");
        assert_eq!(status, [0], "request {user}");
        RequestOutcome::Good
    }
}

/// virtio-scsi. Source: virtio 1.3 section 5.6.6.
pub(crate) struct Scsi;

/// Returns the address of logical unit `disk`.
pub(crate) fn place(disk: usize) -> LunAddress {
    LunAddress { target: 0, lun: disk as u16 }
}

/// Bytes of a command's request header, and of its response.
const COMMAND: u32 = 51;
const RESPONSE: u32 = 108;

impl Form for Scsi {
    type Device = mqblk_virtio_scsi::VirtioScsi;
    const FIXED: usize = mqblk_virtio_scsi::FIXED_QUEUES as usize;

    fn works(&self) -> &[RequestType] {
        &scsi::REQUEST_MIX
    }

    fn put(&self, memory: &GuestMemory, aside: u64, tag: u64, order: &LoadRequest) -> (Vec<Piece>, Vec<Piece>) {
        let command = scsi::scsi_command(order, virtio_scsi::LunAddress::default(), memory);
        let mut header = vec![0; COMMAND as usize];
        header[..8].copy_from_slice(&place(order.disk).encode());
        header[8..16].copy_from_slice(&tag.to_le_bytes());
        header[19..].copy_from_slice(&command.cdb.bytes());
        memory.write(GuestAddress(aside), &header).expect("mapped");
        memory.write(GuestAddress(aside + ANSWER), &[0xff; RESPONSE as usize]).expect("mapped");
        let (mut readable, mut writable) =
            (vec![(GuestAddress(aside), COMMAND)], vec![(GuestAddress(aside + ANSWER), RESPONSE)]);
        match command.data {
            CommandData::None => {}
            CommandData::In(data) => writable.extend(pieces((data.address, data.len))),
            CommandData::Out(data) => readable.extend(pieces((data.address, data.len))),
        }
        (readable, writable)
    }

    fn end(&self, memory: &GuestMemory, aside: u64, user: u32) -> RequestOutcome {
        let mut bytes = [0; RESPONSE as usize];
        memory.read(GuestAddress(aside + ANSWER), &mut bytes).expect("mapped");
        let (status, response) = (bytes[10], bytes[11]);
        scsi::request_outcome(
            user,
            match (response, status) {
                (0, 0) => CommandOutcome::Good,
                (0, 2) => CommandOutcome::CheckCondition(Sense::parse(&bytes[12..]).expect("sense data")),
                (0, status) => CommandOutcome::Status(status),
                (2, _) => CommandOutcome::Response(CommandResponse::Aborted),
                (4, _) => CommandOutcome::Response(CommandResponse::Reset),
                (other, _) => CommandOutcome::Response(CommandResponse::Unknown(other)),
            },
        )
    }

    fn manage(&self, disk: usize, what: TaskFunction, tag: u64) -> Option<[u8; 24]> {
        let subtype: u32 = match what {
            TaskFunction::Abort(_) => 0,
            TaskFunction::Reset => 5,
        };
        let mut request = [0; 24];
        request[4..8].copy_from_slice(&subtype.to_le_bytes());
        request[8..16].copy_from_slice(&place(disk).encode());
        request[16..].copy_from_slice(&tag.to_le_bytes());
        Some(request)
    }
}
