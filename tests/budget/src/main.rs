//! Serves a fixed number of 4 KiB reads of a `null` disk through a ring (split unless MODE says packed), and nothing else: for callgrind.
//!
//! ```text
//! instruction-budget REQUESTS BATCH direct|indirect plain|tracked|merge|packed|packed-tracked|packed-scsi|scsi|scsi-tracked|scsi32|persistent|bounce|copy|map
//! ```
//!
//! With `merge` the reads are scattered over the disk and merging is on: the cost of the search for adjacent requests when there are none.
//! With `packed` the ring is a packed one. With `tracked` requests in flight are recorded in an in-flight region, as for a VMM that reconnects. With `scsi` the reads are READ(10)
//! commands to the only logical unit of a controller, with `scsi32` to 32 logical units round-robin. With `persistent`, `bounce`, `copy`
//! or `map` they come through a blkif ring (and are direct), with grant operations that cost nothing.
//!
//! One thread runs both sides alternately. The guest's side publishes BATCH requests. The daemon's side is a real worker that is stepped
//! ([`SteppedWorker::step`]): the instructions counted are those of pull, admission, submission, reaping, completion and publish, over a
//! real virtio-blk queue and a real (idle) io_uring. Nothing sleeps or depends on a clock: two runs execute the same instructions.
#![forbid(unsafe_code)]

mod blkif;

use std::sync::Arc;

use mqblk_blkif::ResolvedGrantMode;
use mqblk_core::DiskSlot;
use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, ByteOffset, Call};
use mqblk_engine::{
    AnyDisk, Coalesce, FixedBufferUse, MergeMode, PlugOptions, PollPolicy, QueueDisk, QueueOptions, SteppedWorker,
    UringContext, UringOptions,
};
use mqblk_memory::{GuestAddress, GuestMemory, Region};
use mqblk_ring::driver_ring::{ChainLayout, DriverRing, IndirectArea, RingFeatures};
use mqblk_ring::virtqueue::{DeviceRing, MappedRing, RingAddresses, RingFormat};
use mqblk_scsi::reservation::Reservations;
use mqblk_scsi::{Identity, LogicalUnit, LogicalUnitOptions};
use mqblk_virtio::{QueueResources, VirtioDevice};
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};
use mqblk_virtio_scsi::{LunAddress, ScsiOptions, VirtioScsi};

const RING: u16 = 256;
const BLOCK: u32 = 4096;
const HEADER: u32 = 16;
/// Bytes of a SCSI command's request and response (virtio 1.3 section 5.6.6.1).
const COMMAND: u32 = 51;
const ANSWER: u32 = 108;
/// Entries of an indirect table: header, data, status.
const TABLE: u16 = 4;

/// Guest addresses: the ring, then per request a table, a header and a status byte, then the data.
const DESC: u64 = 0x0_1000;
const AVAIL: u64 = 0x0_3000;
const USED: u64 = 0x0_4000;
const TABLES: u64 = 0x1_0000;
const HEADERS: u64 = 0x2_0000;
const STATUSES: u64 = 0x3_0000;
const COMMANDS: u64 = 0x4_0000;
const ANSWERS: u64 = 0x5_0000;
/// The in-flight region.
const IN_FLIGHT: u64 = 0x6_0000;
/// Distance between two requests or two responses.
const SPACING: u64 = 128;
const DATA: u64 = 0x10_0000;
/// Blocks between two scattered reads: no two reads of a ring are adjacent.
const STRIDE: u64 = 1021;
const MEMORY: u64 = DATA + RING as u64 * BLOCK as u64;

type Failure = Box<dyn std::error::Error>;

/// A call that does nothing: the guest polls.
struct NoCall;

impl Call for NoCall {
    fn call(&self) {}
}

fn main() -> Result<(), Failure> {
    let usage = "usage: instruction-budget REQUESTS BATCH direct|indirect plain|tracked|merge|packed|packed-tracked|packed-scsi|scsi|scsi-tracked|scsi32|persistent|bounce|copy|map";
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [requests, batch, shape, mode] = args.as_slice() else { return Err(usage.into()) };
    let (requests, batch): (u32, u16) = (requests.parse()?, batch.parse()?);
    let shape = match shape.as_str() {
        "direct" => ChainLayout::Direct,
        "indirect" => ChainLayout::Indirect,
        _ => return Err(usage.into()),
    };
    let grants = match mode.as_str() {
        "persistent" => Some(ResolvedGrantMode::Persistent),
        "bounce" => Some(ResolvedGrantMode::PersistentBounce),
        "copy" => Some(ResolvedGrantMode::Copy),
        "map" => Some(ResolvedGrantMode::Map),
        _ => None,
    };
    let format = if mode.starts_with("packed") { RingFormat::Packed } else { RingFormat::Split };
    let tracking = (format, mode.ends_with("tracked"));
    let (merge, stride, units) = match mode.as_str() {
        "plain" | "tracked" | "packed" | "packed-tracked" => (MergeMode::Auto, 1, None),
        "merge" => (MergeMode::On, STRIDE, None),
        "scsi" | "scsi-tracked" | "packed-scsi" => (MergeMode::Auto, 1, Some(1_u8)),
        "scsi32" => (MergeMode::Auto, 1, Some(32)),
        _ if grants.is_some() => (MergeMode::Auto, 1, None),
        _ => return Err(usage.into()),
    };
    if batch == 0 || batch > RING / 3 || !requests.is_multiple_of(batch.into()) {
        return Err(format!("BATCH: found {batch}, expected 1 to {} that divide REQUESTS", RING / 3).into());
    }
    if let Some(grants) = grants {
        return blkif::serve(requests, batch.into(), grants);
    }

    let region = Region::shared("budget", MEMORY, GuestAddress(0))?.0;
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)])?);
    let at = RingAddresses { desc: GuestAddress(DESC), avail: GuestAddress(AVAIL), used: GuestAddress(USED) };
    let tables = IndirectArea { start: GuestAddress(TABLES), per_table: TABLE };
    let mut guest = DriverRing::new(&memory, &at, RING, format, RingFeatures { event_idx: true }, Some(tables))?;
    for slot in 0..u64::from(RING) {
        // VIRTIO_BLK_T_IN is 0. The sector does not matter.
        let sector = ByteOffset(slot * stride * u64::from(BLOCK)).to_sector().ok_or("blocks are whole sectors")?;
        let header = [0, sector.0].map(u64::to_le_bytes).concat();
        memory.write(GuestAddress(HEADERS + slot * u64::from(HEADER)), &header).ok_or("headers are mapped")?;
        let mut command = [0; COMMAND as usize];
        command[..4].copy_from_slice(&[1, (slot % u64::from(units.unwrap_or(1))) as u8, 0x40, 0]);
        // READ(10) of 8 blocks.
        command[19..29].copy_from_slice(&[0x28, 0, 0, 0, 0, slot as u8, 0, 0, 8, 0]);
        memory.write(GuestAddress(COMMANDS + slot * SPACING), &command).ok_or("commands are mapped")?;
    }
    let mut worker = match units {
        Some(units) => scsi_worker(&memory, &at, units, tracking)?,
        None => worker(&memory, &at, merge, tracking)?,
    };
    let scsi = units.is_some();
    for round in 0..requests / u32::from(batch) {
        for number in 0..batch {
            let slot = (round * u32::from(batch) + u32::from(number)) % u32::from(RING);
            if scsi { add_scsi_read(&mut guest, shape, slot)? } else { add_read(&mut guest, shape, slot)? }
        }
        let _polled = guest.publish();
        while guest.poll_used()? < batch {
            worker.turn();
        }
        while let Some(used) = guest.take()? {
            if used.written != BLOCK + if scsi { ANSWER } else { 1 } {
                return Err(format!("request {}: found {} bytes written", used.token, used.written).into());
            }
        }
    }
    Ok(())
}

/// Adds a read to the ring.
fn add_read(guest: &mut DriverRing, shape: ChainLayout, slot: u32) -> Result<(), Failure> {
    let at = u64::from(slot);
    let (data, status) = (GuestAddress(DATA + at * u64::from(BLOCK)), GuestAddress(STATUSES + at));
    let header = GuestAddress(HEADERS + at * u64::from(HEADER));
    Ok(guest.add(shape, &[(header, HEADER)], &[(data, BLOCK), (status, 1)], slot)?)
}

/// Adds a SCSI read to the ring.
fn add_scsi_read(guest: &mut DriverRing, shape: ChainLayout, slot: u32) -> Result<(), Failure> {
    let at = u64::from(slot);
    let (command, answer) = (GuestAddress(COMMANDS + at * SPACING), GuestAddress(ANSWERS + at * SPACING));
    let data = GuestAddress(DATA + at * u64::from(BLOCK));
    Ok(guest.add(shape, &[(command, COMMAND)], &[(answer, ANSWER), (data, BLOCK)], slot)?)
}

fn null() -> Result<Arc<AnyDisk>, Failure> {
    let mut settings = Settings::new("disk");
    settings.insert("size", "2G")?;
    Ok(mqblk_storage::open("null", &mut settings)?)
}

fn unit(disk: &AnyDisk, name: &str) -> Arc<LogicalUnit> {
    let [vendor, product, revision, serial, name] = ["MQBLK", "TEST", "1", name, name].map(str::to_owned);
    Arc::new(LogicalUnit::new(LogicalUnitOptions {
        geometry: disk.geometry(),
        limits: disk.limits(),
        identity: Identity { vendor, product, revision, serial, name },
        writeback: true,
        reservations: Reservations::new(None),
    }))
}

/// Returns a worker that serves the ring as the request queue of a controller of null disks.
fn scsi_worker(
    memory: &Arc<GuestMemory>,
    at: &RingAddresses,
    units: u8,
    tracking: (RingFormat, bool),
) -> Result<SteppedWorker, Failure> {
    let options = ScsiOptions { queues: 1, queue_size: RING, cmd_per_lun: 128, max_transfer: ByteLen(1 << 20) };
    let device = Arc::new(VirtioScsi::new(options));
    let mut disks = Vec::new();
    for target in 0..units {
        let (disk, slot) = (null()?, DiskSlot(target.into()));
        let nexus = unit(&*disk, &target.to_string()).login("guest", 1)?;
        // Clears the initial unit attention.
        let ready = mqblk_scsi::Command { cdb: &[0; 16], data_in_len: 0 };
        nexus.begin(&ready, &[][..], &mut mqblk_scsi::CommandBuffers::default());
        device.map(LunAddress { target, lun: 0 }, slot, nexus)?;
        disks.push(QueueDisk { slot, disk, plug: PlugOptions::default(), health: Arc::default() });
    }
    // The first request queue.
    attach(memory, at, device, 2, disks, tracking)
}

/// Returns a worker that serves the ring with a null disk.
fn worker(
    memory: &Arc<GuestMemory>,
    at: &RingAddresses,
    merge: MergeMode,
    tracking: (RingFormat, bool),
) -> Result<SteppedWorker, Failure> {
    let disk = null()?;
    let options = BlkOptions { serial: String::new(), queues: 1, queue_size: RING, writeback: true };
    let device = Arc::new(VirtioBlk::new(disk.geometry(), disk.limits(), options));
    let plug = PlugOptions { merge, ..PlugOptions::default() };
    let disks = vec![QueueDisk { slot: DiskSlot::FIRST, disk, plug, health: Arc::default() }];
    attach(memory, at, device, 0, disks, tracking)
}

/// Returns a worker that serves the ring as queue `index` of a device.
fn attach<D: VirtioDevice<UringContext>>(
    memory: &Arc<GuestMemory>,
    at: &RingAddresses,
    device: Arc<D>,
    index: u16,
    disks: Vec<QueueDisk>,
    tracking: (RingFormat, bool),
) -> Result<SteppedWorker, Failure> {
    let features = device.features();
    device.set_features(features);
    let mut worker = SteppedWorker::new(UringOptions::default())?;
    let event_idx = features & mqblk_virtio::features::RING_EVENT_IDX != 0;
    let (format, is_tracked) = tracking;
    let ring = MappedRing::resolve(memory, at, RING, format)?;
    let ring = if is_tracked {
        let words = usize::try_from(MappedRing::inflight_bytes(RING, format) / 8)?;
        let words = memory.shared_words(GuestAddress(IN_FLIGHT), words).ok_or("the table is mapped")?;
        DeviceRing::tracked(ring, format.first_base(), event_idx, words)?.0
    } else {
        DeviceRing::new(ring, format.first_base(), event_idx)
    };
    let queue = QueueOptions {
        disks,
        kick: None,
        poll: PollPolicy::Busy,
        coalesce: Coalesce::default(),
        paused: false,
        on_broken: Box::new(|why| panic!("{why}")),
    };
    worker.attach(queue, |context, waker| {
        let lease = context.adopt(Arc::clone(memory), FixedBufferUse::Off).map_err(|error| error.to_string())?;
        context.buffers.reserve(RING.into());
        let (call, waker) = (Some(Box::new(NoCall) as Box<dyn Call>), Arc::clone(waker));
        Ok(device.create_queue(index, QueueResources { ring, lease, call, features, waker }))
    })?;
    Ok(worker)
}
