//! Serves a fixed number of 4 KiB reads of a `null` disk through a ring (split unless MODE says packed), and nothing
//! else: for callgrind.
//!
//! ```text
//! instruction-budget REQUESTS BATCH direct|indirect plain|regions|tracked|merge|packed|packed-tracked|packed-scsi|scsi|scsi-tracked|scsi32|persistent|bounce|copy|map [THREADS]
//! ```
//!
//! With `merge` the reads are scattered over the disk and merging is on: the cost of a search for adjacent requests
//! that finds none. With `packed` the ring is a packed one. With `tracked` requests in flight are recorded in an
//! in-flight region, as for a VMM that reconnects. With `scsi` the reads are READ(10) commands to the only logical unit
//! of a controller, with `scsi32` to 32 logical units round-robin. With `persistent`, `bounce`, `copy` or `map` they
//! come through a blkif ring (and are direct), with grant operations that cost nothing. With `regions` the data lies in
//! another region of guest memory than the headers.
//!
//! One thread runs both sides alternately. The guest's side publishes BATCH requests. The daemon's side is a real
//! worker that is stepped ([`SteppedWorker`]): the instructions counted are those of pull, admission, submission,
//! reaping, completion and publish, over a real virtio-blk queue and a real (idle) io_uring. With THREADS, each of that
//! many threads does this, with a worker and a queue of its own of the one device and its disks: this shows the memory
//! that several workers write. Nothing sleeps or depends on a clock: two runs execute the same instructions.
#![forbid(unsafe_code)]

mod blkif;

use std::sync::{Arc, Barrier};

use mqblk_blkif::ResolvedGrantMode;
use mqblk_core::DiskSlot;
use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, ByteOffset, Call};
use mqblk_engine::{
    AnyDisk, DiskHealth, MergeMode, PlugOptions, PollPolicy, QueueDisk, QueueOptions, SteppedWorker, UringContext,
    UringOptions,
};
use mqblk_memory::{GuestAddress, GuestMemory, MemoryShare, Region};
use mqblk_ring::driver_ring::{ChainLayout, DriverRing, IndirectArea};
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

const USAGE: &str = "usage: instruction-budget REQUESTS BATCH direct|indirect plain|regions|tracked|merge|packed|packed-tracked|packed-scsi|scsi|scsi-tracked|scsi32|persistent|bounce|copy|map [THREADS]";

/// The served load.
#[derive(Clone, Copy)]
struct Load {
    requests: u32,
    batch: u16,
    shape: ChainLayout,
    format: RingFormat,
    is_tracked: bool,
    /// Blocks between two reads.
    stride: u64,
    /// Logical units; `None`: a virtio-blk disk.
    units: Option<u8>,
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (requests, batch, shape, mode, threads) = match args.as_slice() {
        [requests, batch, shape, mode] => (requests, batch, shape, mode, 1),
        [requests, batch, shape, mode, threads] => (requests, batch, shape, mode, threads.parse::<u16>()?.max(1)),
        _ => return Err(USAGE.into()),
    };
    let (requests, batch): (u32, u16) = (requests.parse()?, batch.parse()?);
    let shape = match shape.as_str() {
        "direct" => ChainLayout::Direct,
        "indirect" => ChainLayout::Indirect,
        _ => return Err(USAGE.into()),
    };
    if batch == 0 || batch > RING / 3 || !requests.is_multiple_of(batch.into()) {
        return Err(format!("BATCH: found {batch}, expected 1 to {} that divide REQUESTS", RING / 3).into());
    }
    let grants = match mode.as_str() {
        "persistent" => Some(ResolvedGrantMode::Persistent),
        "bounce" => Some(ResolvedGrantMode::PersistentBounce),
        "copy" => Some(ResolvedGrantMode::Copy),
        "map" => Some(ResolvedGrantMode::Map),
        _ => None,
    };
    if let Some(grants) = grants {
        return blkif::serve(requests, batch.into(), grants);
    }
    let (merge, stride, units) = match mode.as_str() {
        "plain" | "regions" | "tracked" | "packed" | "packed-tracked" => (MergeMode::Auto, 1, None),
        "merge" => (MergeMode::On, STRIDE, None),
        "scsi" | "scsi-tracked" | "packed-scsi" => (MergeMode::Auto, 1, Some(1_u8)),
        "scsi32" => (MergeMode::Auto, 1, Some(32)),
        _ => return Err(USAGE.into()),
    };
    let format = if mode.starts_with("packed") { RingFormat::Packed } else { RingFormat::Split };
    let is_tracked = mode.ends_with("tracked");
    let load = Load { requests, batch, shape, format, is_tracked, stride, units };

    let memory = Arc::new(guest_memory(threads.into(), mode == "regions")?);
    match units {
        Some(units) => {
            let (device, disks) = controller(units, threads)?;
            // The first request queue is 2.
            serve_on_threads(&memory, &device, 2, &disks, load, threads)
        }
        None => {
            let (device, disks) = disk(merge, threads)?;
            serve_on_threads(&memory, &device, 0, &disks, load, threads)
        }
    }
}

/// Returns the memory of this many guests. Each has its data in a region of its own if `is_split`.
fn guest_memory(guests: u64, is_split: bool) -> Result<GuestMemory, Failure> {
    let starts = (0..guests).flat_map(|guest| [MEMORY * guest, MEMORY * guest + DATA]);
    let mut bounds: Vec<u64> = starts.filter(|start| is_split || *start == 0).collect();
    bounds.push(MEMORY * guests);
    let regions = bounds.windows(2).map(|bounds| {
        let (region, _) = Region::shared("budget", bounds[1] - bounds[0], GuestAddress(bounds[0]))?;
        Ok(Arc::new(region))
    });
    Ok(GuestMemory::new(regions.collect::<Result<_, Failure>>()?)?)
}

/// Serves the load on each of this many threads. Each has a worker, a queue of the device and a guest.
fn serve_on_threads<D: VirtioDevice<UringContext>>(
    memory: &Arc<GuestMemory>,
    device: &Arc<D>,
    first_queue: u16,
    disks: &[(DiskSlot, Arc<AnyDisk>, PlugOptions, Arc<DiskHealth>)],
    load: Load,
    threads: u16,
) -> Result<(), Failure> {
    device.set_features(device.features());
    let guests = (0..threads).map(|thread| Guest::new(memory, MEMORY * u64::from(thread), load));
    let guests = guests.collect::<Result<Vec<Guest>, Failure>>()?;
    // Keeps threads from getting memory that another one has returned.
    let all = Barrier::new(threads.into());
    let serve = |mut guest: Guest, queue: u16| -> Result<(), String> {
        let disks =
            disks.iter().cloned().map(|(slot, disk, plug, health)| QueueDisk { slot, disk, plug, health }).collect();
        let worker = attach(memory, guest.base, device, queue, disks, load).map_err(|error| error.to_string());
        all.wait();
        let served = worker.and_then(|mut worker| guest.run(&mut worker).map_err(|error| error.to_string()));
        all.wait();
        served
    };
    let mut guests: Vec<(u16, Guest)> = (first_queue..).zip(guests).collect();
    if let Some((queue, guest)) = guests.pop_if(|_| threads == 1) {
        return Ok(serve(guest, queue)?);
    }
    std::thread::scope(|scope| -> Result<(), Failure> {
        let serve = &serve;
        let running: Vec<_> =
            guests.into_iter().map(|(queue, guest)| scope.spawn(move || serve(guest, queue))).collect();
        for thread in running {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}

fn addresses(base: u64) -> RingAddresses {
    let at = |offset| GuestAddress(base + offset);
    RingAddresses { desc: at(DESC), avail: at(AVAIL), used: at(USED) }
}

/// The guest's end of a ring.
struct Guest {
    ring: DriverRing,
    base: u64,
    load: Load,
}

impl Guest {
    fn new(memory: &Arc<GuestMemory>, base: u64, load: Load) -> Result<Guest, Failure> {
        let tables = IndirectArea { start: GuestAddress(base + TABLES), per_table: TABLE };
        let ring = DriverRing::new(memory, &addresses(base), RING, load.format, true, Some(tables))?;
        for slot in 0..u64::from(RING) {
            // VIRTIO_BLK_T_IN is 0. The sector does not matter.
            let sector =
                ByteOffset(slot * load.stride * u64::from(BLOCK)).to_sector().ok_or("blocks are whole sectors")?;
            let header = [0, sector.0].map(u64::to_le_bytes).concat();
            memory
                .write(GuestAddress(base + HEADERS + slot * u64::from(HEADER)), &header)
                .ok_or("headers are mapped")?;
            let mut command = [0; COMMAND as usize];
            command[..4].copy_from_slice(&[1, (slot % u64::from(load.units.unwrap_or(1))) as u8, 0x40, 0]);
            // READ(10) of 8 blocks.
            command[19..29].copy_from_slice(&[0x28, 0, 0, 0, 0, slot as u8, 0, 0, 8, 0]);
            memory.write(GuestAddress(base + COMMANDS + slot * SPACING), &command).ok_or("commands are mapped")?;
        }
        Ok(Guest { ring, base, load })
    }

    /// Makes the worker serve all requests.
    fn run(&mut self, worker: &mut SteppedWorker) -> Result<(), Failure> {
        let (batch, scsi) = (self.load.batch, self.load.units.is_some());
        for round in 0..self.load.requests / u32::from(batch) {
            for number in 0..batch {
                self.add_read((round * u32::from(batch) + u32::from(number)) % u32::from(RING))?;
            }
            let _polled = self.ring.publish();
            while self.ring.poll_used()? < batch {
                worker.turn();
            }
            while let Some(used) = self.ring.take()? {
                if used.written != BLOCK + if scsi { ANSWER } else { 1 } {
                    return Err(format!("request {}: found {} bytes written", used.token, used.written).into());
                }
            }
        }
        Ok(())
    }

    /// Adds a read to the ring.
    fn add_read(&mut self, slot: u32) -> Result<(), Failure> {
        let of_slot = |area: u64, spacing: u64| GuestAddress(self.base + area + u64::from(slot) * spacing);
        let data = (of_slot(DATA, BLOCK.into()), BLOCK);
        let shape = self.load.shape;
        match self.load.units {
            Some(_) => {
                let (command, answer) = (of_slot(COMMANDS, SPACING), of_slot(ANSWERS, SPACING));
                self.ring.add(shape, &[(command, COMMAND)], &[(answer, ANSWER), data], slot)?;
            }
            None => {
                let (header, status) = (of_slot(HEADERS, HEADER.into()), of_slot(STATUSES, 1));
                self.ring.add(shape, &[(header, HEADER)], &[data, (status, 1)], slot)?;
            }
        }
        Ok(())
    }
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

/// A device, and the disks of its queues.
type Device<D> = (Arc<D>, Vec<(DiskSlot, Arc<AnyDisk>, PlugOptions, Arc<DiskHealth>)>);

/// Returns a controller of null disks.
fn controller(units: u8, queues: u16) -> Result<Device<VirtioScsi>, Failure> {
    let options = ScsiOptions { queues, queue_size: RING, cmd_per_lun: 128, max_transfer: ByteLen(1 << 20) };
    let device = Arc::new(VirtioScsi::new(options));
    let mut disks = Vec::new();
    for target in 0..units {
        let (disk, slot) = (null()?, DiskSlot(target.into()));
        let nexus = unit(&*disk, &target.to_string()).login("guest", 1)?;
        // Clears the initial unit attention.
        let ready = mqblk_scsi::Command { cdb: &[0; 16], data_in_len: 0 };
        nexus.begin(&ready, &[][..], &mut mqblk_scsi::CommandBuffers::default());
        device.map(LunAddress { target, lun: 0 }, slot, nexus)?;
        disks.push((slot, disk, PlugOptions::default(), Arc::default()));
    }
    Ok((device, disks))
}

/// Returns a null disk.
fn disk(merge: MergeMode, queues: u16) -> Result<Device<VirtioBlk>, Failure> {
    let disk = null()?;
    let options = BlkOptions { serial: String::new(), queues, queue_size: RING, writeback: true };
    let device = Arc::new(VirtioBlk::new(disk.geometry(), disk.limits(), options));
    let plug = PlugOptions { merge, ..PlugOptions::default() };
    Ok((device, vec![(DiskSlot::FIRST, disk, plug, Arc::default())]))
}

/// Returns a worker that serves the ring as queue `index` of a device.
fn attach<D: VirtioDevice<UringContext>>(
    memory: &Arc<GuestMemory>,
    base: u64,
    device: &Arc<D>,
    index: u16,
    disks: Vec<QueueDisk>,
    load: Load,
) -> Result<SteppedWorker, Failure> {
    let features = device.features();
    let Load { format, is_tracked, .. } = load;
    let mut worker = SteppedWorker::new(UringOptions::default())?;
    let event_idx = features & mqblk_virtio::features::RING_EVENT_IDX != 0;
    let ring = MappedRing::resolve(memory, &addresses(base), RING, format)?;
    let ring = if is_tracked {
        let words = usize::try_from(MappedRing::inflight_bytes(RING, format) / 8)?;
        let words = memory.shared_words(GuestAddress(base + IN_FLIGHT), words).ok_or("the table is mapped")?;
        DeviceRing::tracked(ring, format.first_base(), event_idx, words)?.0
    } else {
        DeviceRing::new(ring, format.first_base(), event_idx)
    };
    let queue = QueueOptions {
        disks,
        kick: None,
        policy: PollPolicy::Busy.into(),
        paused: false,
        on_fault: Box::new(|fault| panic!("{fault:?}")),
    };
    worker.attach(queue, |waker| {
        let share = MemoryShare::new(Arc::clone(memory), RING.into());
        let (call, waker) = (Some(Box::new(NoCall) as Box<dyn Call>), Arc::clone(waker));
        Ok(device.create_queue(index, QueueResources { ring, share, call, features, waker }))
    })?;
    Ok(worker)
}
