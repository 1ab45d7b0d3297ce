//! A virtio-scsi controller with three logical units in memory, on a stepped worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_core::{ByteLen, Call, DiskSlot};
use mqblk_engine::{
    AnyDisk, PlugOptions, PollPolicy, QueueDisk, QueueFault, QueueOptions, SteppedWorker, UringContext, UringOptions,
};
use mqblk_memory::MemoryShare;
use mqblk_ring::virtqueue::{DeviceRing, MappedRing, RingFormat};
use mqblk_scsi::reservation::Reservations;
use mqblk_scsi::{Command, CommandBuffers, Identity, LogicalUnit, LogicalUnitOptions, Nexus};
use mqblk_virtio::{QueueResources, VirtioDevice};
use mqblk_virtio_scsi::{LunAddress, ScsiOptions, VirtioScsi};

use crate::memory_disk::open_memory_disk;
use crate::ring_guest::{RING, RingGuest};
use crate::scsi_commands::DISK;
use crate::scsi_unit::ScsiUnit;

/// Target and LUN of each logical unit. The last one is read-only.
pub(crate) const ADDRESSES: [(u8, u16); 3] = [(0, 0), (0, 300), (3, 5)];

struct CountCalls(Arc<AtomicU64>);

impl Call for CountCalls {
    fn call(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A served queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Control = 0,
    Requests = 2,
}

pub(crate) struct Controller {
    worker: SteppedWorker,
    device: Arc<VirtioScsi>,
    disks: Vec<Arc<AnyDisk>>,
    nexuses: Vec<Arc<Nexus>>,
    event_idx: bool,
}

impl Controller {
    /// Creates it, with the driver's sizes of sense data and CDB.
    pub(crate) fn new(block: usize, sizes: (u32, u32), event_idx: bool) -> Controller {
        let options = ScsiOptions { queues: 1, queue_size: RING, cmd_per_lun: 16, max_transfer: ByteLen(1 << 20) };
        let device = Arc::new(VirtioScsi::new(options));
        let bytes = [sizes.0.to_le_bytes(), sizes.1.to_le_bytes()].concat();
        VirtioDevice::<UringContext>::write_config(&*device, 20, &bytes).expect("sizes in range");
        let (mut disks, mut nexuses) = (vec![], vec![]);
        for (at, (target, lun)) in ADDRESSES.into_iter().enumerate() {
            let disk = open_memory_disk(DISK, block, at + 1 == ADDRESSES.len());
            let text = |text: &str| text.to_owned();
            let name = format!("unit{at}");
            let identity = Identity {
                vendor: text("MQBLK"),
                product: text("FUZZED"),
                revision: text("1"),
                serial: name.clone(),
                name,
            };
            let unit = Arc::new(LogicalUnit::new(LogicalUnitOptions {
                geometry: disk.geometry(),
                limits: disk.limits(),
                identity,
                writeback: true,
                reservations: Reservations::new(None),
            }));
            let nexus = unit.login("guest", u16::from(target) + 1).expect("a name that is free");
            device.map(LunAddress { target, lun }, DiskSlot(at as u16), Arc::clone(&nexus)).expect("a free place");
            disks.push(disk);
            nexuses.push(nexus);
        }
        let options = UringOptions { submissions: 64, in_flight: 128, files: 4, buffers: 16 };
        let worker = SteppedWorker::new(options).expect("the host has io_uring");
        Controller { worker, device, disks, nexuses, event_idx }
    }

    /// Serves a queue from its guest's position.
    pub(crate) fn attach(&mut self, queue: Queue, guest: &RingGuest, calls: &Arc<AtomicU64>) {
        let plug = PlugOptions::default();
        let slots = self.disks.iter().zip(0..).filter(|_| queue == Queue::Requests);
        let disks = slots.map(|(disk, slot)| QueueDisk {
            slot: DiskSlot(slot),
            disk: Arc::clone(disk),
            plug,
            health: Arc::default(),
        });
        let options = QueueOptions {
            disks: disks.collect(),
            kick: None,
            policy: PollPolicy::Busy.into(),
            paused: false,
            on_fault: Box::new(|fault| {
                assert!(!matches!(fault, QueueFault::BrokenRing(_)), "a ring that keeps the protocol: {fault:?}");
            }),
        };
        let (device, event_idx) = (&self.device, self.event_idx);
        let attached = self.worker.attach(options, |waker| {
            let ring = MappedRing::resolve(&guest.memory, &RingGuest::addresses(), RING, RingFormat::Split)
                .map_err(|e| e.to_string())?;
            let parts = QueueResources {
                ring: DeviceRing::new(ring, guest.avail().into(), event_idx),
                share: MemoryShare::new(Arc::clone(&guest.memory), RING.into()),
                call: Some(Box::new(CountCalls(Arc::clone(calls)))),
                features: 0,
                waker: Arc::clone(waker),
            };
            Ok(VirtioDevice::<UringContext>::create_queue(device, queue as u16, parts))
        });
        attached.expect("a free slot");
    }

    pub(crate) fn turn(&mut self) {
        self.worker.turn();
    }

    /// Executes a command on a logical unit, without the rings, and returns its data.
    fn ask(&self, at: usize, cdb: &[u8; 16]) -> Vec<u8> {
        let mut buffers = CommandBuffers::default();
        let _answer = self.nexuses[at].begin(&Command { cdb, data_in_len: 255 }, &[][..], &mut buffers);
        buffers.data_in
    }

    /// Clears the unit attentions of a logical unit, and starts it.
    pub(crate) fn start_unit(&self, at: usize) {
        self.nexuses[at].initiator_resumed(true);
        let mut cdb = [0; 16];
        (cdb[0], cdb[4]) = (0x1b, 1);
        self.ask(at, &cdb);
    }

    /// Returns the model of a new logical unit, with the limits that the unit reports.
    pub(crate) fn model(&self, at: usize) -> ScsiUnit {
        let geometry = self.disks[at].geometry();
        let block = geometry.logical_block.bytes() as usize;
        let pages = [None, Some(0), Some(0x80), Some(0x83), Some(0xb0), Some(0xb1), Some(0xb2)];
        let inquire = |page: Option<u8>| {
            let mut cdb = [0; 16];
            (cdb[0], cdb[1], cdb[2], cdb[4]) = (0x12, u8::from(page.is_some()), page.unwrap_or(0), 255);
            (page, self.ask(at, &cdb))
        };
        // POWER ON, and REPORTED LUNS DATA HAS CHANGED for those whose target got another logical unit.
        let grown = ADDRESSES[at + 1..].iter().any(|(target, _)| *target == ADDRESSES[at].0);
        let attentions = [(0x29, 1), (0x3f, 0x0e)][..if grown { 2 } else { 1 }].to_vec();
        let mut unit = ScsiUnit {
            block,
            read_only: geometry.read_only,
            bytes: vec![0; DISK],
            stopped: false,
            protected: false,
            descriptor_sense: false,
            attentions,
            pages: pages.into_iter().map(inquire).collect(),
            capacity: vec![],
        };
        let exponent = (geometry.physical_block.bytes() as usize / block).ilog2() as u8;
        let provisioning = u8::from(unit.unmaps()) << 7 | u8::from(unit.unmapped_is_zero()) << 6;
        let last = unit.blocks() - 1;
        let tail = [0, exponent, provisioning, geometry.alignment_offset];
        unit.capacity = [&last.to_be_bytes()[..], &(block as u32).to_be_bytes(), &tail, &[0; 16]].concat();
        unit
    }
}
