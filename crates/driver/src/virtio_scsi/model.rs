//! A small vhost-user-scsi server for tests, in this process, with disks in memory. It can inject faults.

mod command;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use mqblk_core::lock::lock;
use mqblk_memory::{GuestAddress, GuestMemory};

use super::wire::LunAddress;
use crate::model::{Descriptor, ModelDevice, ModelRequest, ModelServer, RequestOutcome, read};

/// MQ, REPLY_ACK.
const PROTOCOL: u64 = 1 | 1 << 3;
/// CONFIG.
const PROTOCOL_CONFIG: u64 = 1 << 9;
/// HOTPLUG, CHANGE; INDIRECT_DESC, EVENT_IDX, protocol features, VERSION_1.
const FEATURES: u64 = 1 << 1 | 1 << 2 | 0b111 << 28 | 1 << 32;

/// A logical unit of the model.
#[derive(Clone, Debug)]
pub struct ModelDisk {
    /// Its content.
    pub bytes: Vec<u8>,
    /// Bytes of a block.
    pub block_size: usize,
    /// Unit attentions to report before the first commands.
    pub unit_attentions: u8,
    /// WP of the mode parameter header.
    pub read_only: bool,
}

impl ModelDisk {
    /// Returns a zeroed disk with blocks of 512 bytes and one unit attention (power on).
    pub fn new(size: usize) -> ModelDisk {
        ModelDisk { bytes: vec![0; size], block_size: 512, unit_attentions: 1, read_only: false }
    }
}

/// Options of the model.
#[derive(Clone, Debug)]
pub struct ScsiBehaviour {
    /// The logical units.
    pub disks: BTreeMap<LunAddress, ModelDisk>,
    /// Number of request queues offered.
    pub queues: u16,
    /// Feature bits that are not offered.
    pub without_features: u64,
    /// True if the configuration space is left to the VMM.
    pub no_config: bool,
    /// `sense_size` after a reset.
    pub sense_size: u32,
    /// `max_sectors`.
    pub max_sectors: u32,
    /// The fault to inject. Reads and writes are counted.
    pub fault: ScsiFault,
}

/// A fault that the model injects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScsiFault {
    /// None.
    #[default]
    None,
    /// Closes the connection after this many.
    DisconnectAfter(u64),
    /// Completes none after this many.
    StallAfter(u64),
    /// Holds all from this one on until they are aborted.
    HoldFrom(u64),
    /// Flips a bit of the data of every write from this one on.
    CorruptFrom(u64),
    /// Completes with CHECK CONDITION, medium error, from this one on.
    FailFrom(u64),
    /// Completes with this status, from this one on.
    StatusFrom(u64, u8),
    /// Completes with this response code, from this one on.
    ResponseFrom(u64, u8),
    /// Completes with CHECK CONDITION and this many bytes of sense data, from this one on.
    SenseFrom(u64, u32),
    /// Completes with this residual, from this one on.
    ResidualFrom(u64, u32),
    /// Completes without writing a response, from this one on.
    NoResponseFrom(u64),
    /// Completes this one with an id that is not in flight.
    WrongIdAt(u64),
}

impl Default for ScsiBehaviour {
    /// Returns one target with one logical unit of 1 MiB.
    fn default() -> Self {
        ScsiBehaviour {
            disks: [(LunAddress::default(), ModelDisk::new(1 << 20))].into(),
            queues: 4,
            without_features: 0,
            no_config: false,
            sense_size: 96,
            max_sectors: 0xffff,
            fault: ScsiFault::None,
        }
    }
}

/// State shared by the connections and the test.
#[derive(Debug)]
struct ModelState {
    behaviour: ScsiBehaviour,
    disks: Mutex<BTreeMap<LunAddress, ModelDisk>>,
    /// Reads and writes.
    transfers: AtomicU64,
    per_queue: Vec<AtomicU64>,
    commands: AtomicU64,
    /// Pairs of commands of a target that were in flight on two queues.
    steering_violations: AtomicU64,
    sizes: Mutex<[u32; 2]>,
    events: Mutex<VecDeque<[u8; 16]>>,
    tasks: Mutex<TaskState>,
}

#[derive(Debug, Default)]
struct TaskState {
    /// (subtype, LUN field, tag) of all received functions.
    received: Vec<(u32, [u8; 8], u64)>,
    /// Tags of held commands.
    held: HashSet<u64>,
    /// Tags of held commands that are being aborted.
    aborting: HashSet<u64>,
}

/// The running server. Stopped on drop.
#[derive(Debug)]
pub struct ScsiModel {
    shared: Arc<ModelState>,
    _server: ModelServer,
}

impl ScsiModel {
    /// Serves at `path`, one connection after the other.
    ///
    /// # Panics
    /// If the socket cannot be created.
    pub fn start(path: &Path, behaviour: ScsiBehaviour) -> ScsiModel {
        let shared = Arc::new(ModelState {
            disks: Mutex::new(behaviour.disks.clone()),
            transfers: AtomicU64::new(0),
            per_queue: (0..behaviour.queues).map(|_| AtomicU64::new(0)).collect(),
            commands: AtomicU64::new(0),
            steering_violations: AtomicU64::new(0),
            sizes: Mutex::new([behaviour.sense_size, 32]),
            events: Mutex::default(),
            tasks: Mutex::default(),
            behaviour,
        });
        ScsiModel { _server: ModelServer::start(path, Arc::clone(&shared)), shared }
    }

    /// Returns the logical units.
    pub fn disks(&self) -> MutexGuard<'_, BTreeMap<LunAddress, ModelDisk>> {
        lock(&self.shared.disks)
    }

    /// Returns the number of reads and writes of request queue `index`.
    pub fn transfers(&self, index: usize) -> u64 {
        self.shared.per_queue[index].load(Ordering::Relaxed)
    }

    /// Returns the number of commands of all kinds.
    pub fn commands(&self) -> u64 {
        self.shared.commands.load(Ordering::Relaxed)
    }

    /// Returns how often commands of one target were observed in flight on two queues.
    pub fn steering_violations(&self) -> u64 {
        self.shared.steering_violations.load(Ordering::Relaxed)
    }

    /// Returns (subtype, LUN field, tag) of all task management functions.
    pub fn task_management(&self) -> Vec<(u32, [u8; 8], u64)> {
        lock(&self.shared.tasks).received.clone()
    }

    /// Sends an event as soon as there is a buffer for it.
    pub fn send_event(&self, event: u32, address: LunAddress, reason: u32) {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&event.to_le_bytes());
        bytes[4..12].copy_from_slice(&address.to_bytes());
        bytes[12..].copy_from_slice(&reason.to_le_bytes());
        lock(&self.shared.events).push_back(bytes);
    }
}

/// A request's device-readable bytes and device-writable segments.
struct Buffers<'a> {
    memory: &'a GuestMemory,
    readable: Vec<u8>,
    writable: Vec<(u64, u32)>,
}

impl<'a> Buffers<'a> {
    fn new(memory: &'a GuestMemory, parts: &[Descriptor]) -> Buffers<'a> {
        let mut buffers = Buffers { memory, readable: vec![], writable: vec![] };
        for &(at, len, write) in parts {
            if write {
                buffers.writable.push((at, len));
            } else {
                assert!(buffers.writable.is_empty(), "a readable part after a writable one: {parts:?}");
                let start = buffers.readable.len();
                buffers.readable.resize(start + len as usize, 0);
                memory.read(GuestAddress(at), &mut buffers.readable[start..]).expect("a mapped address");
            }
        }
        buffers
    }

    fn writable_bytes(&self) -> usize {
        self.writable.iter().map(|(_, len)| *len as usize).sum()
    }

    /// Writes `bytes` at offset `from` of the writable segments, as far as they reach. Returns the number of bytes
    /// written.
    fn write(&self, mut from: usize, mut bytes: &[u8]) -> usize {
        let mut written = 0;
        for &(at, len) in &self.writable {
            let len = len as usize;
            if from >= len {
                from -= len;
                continue;
            }
            let some = bytes.len().min(len - from);
            crate::model::write(self.memory, at + from as u64, &bytes[..some]);
            bytes = &bytes[some..];
            written += some;
            from = 0;
        }
        written
    }
}

impl ModelState {
    /// Executes a task management function: 24 bytes, with a response of one byte.
    fn manage_tasks(&self, buffers: &Buffers<'_>) -> RequestOutcome {
        let bytes = &buffers.readable;
        assert_eq!((bytes.len(), buffers.writable_bytes()), (24, 1), "framing of a task management function");
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let lun: [u8; 8] = std::array::from_fn(|index| bytes[8 + index]);
        let tag = u64::from_le_bytes(std::array::from_fn(|index| bytes[16 + index]));
        let (kind, subtype) = (word(0), word(4));
        assert_eq!(kind, 0, "the type of a control request");
        let mut tasks = lock(&self.tasks);
        if tasks.aborting.contains(&tag) && tasks.held.contains(&tag) {
            // Completed after the command that it aborts.
            return RequestOutcome::Hold;
        }
        if !tasks.aborting.remove(&tag) {
            tasks.received.push((subtype, lun, tag));
            if subtype == 0 && tasks.held.contains(&tag) {
                tasks.aborting.insert(tag);
                return RequestOutcome::Hold;
            }
        }
        let known = LunAddress::from_bytes(lun).is_some_and(|at| lock(&self.disks).contains_key(&at));
        let response = match subtype {
            _ if !known => 12,
            2 => 11,
            6 if tasks.held.contains(&tag) => 10,
            7 if !tasks.held.is_empty() => 10,
            _ => 0,
        };
        RequestOutcome::Complete(buffers.write(0, &[response]) as u32)
    }
}

impl ModelDevice for ModelState {
    fn ring_count(&self) -> u16 {
        2 + self.behaviour.queues
    }

    fn features(&self) -> u64 {
        FEATURES & !self.behaviour.without_features
    }

    fn protocol_features(&self) -> u64 {
        PROTOCOL | if self.behaviour.no_config { 0 } else { PROTOCOL_CONFIG }
    }

    fn config(&self) -> Vec<u8> {
        let [sense_size, cdb_size] = *lock(&self.sizes);
        let words = [self.behaviour.queues.into(), 126, self.behaviour.max_sectors, 128, 16, sense_size, cdb_size];
        let mut config: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        // max_channel and max_target, max_lun.
        config.extend([0, 0, 255, 0, 0xff, 0x3f, 0, 0]);
        config
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        assert_eq!((offset, bytes.len()), (20, 8), "a driver writes sense_size and cdb_size");
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        *lock(&self.sizes) = [word(0), word(4)];
    }

    fn observe_in_flight(&self, memory: &GuestMemory, requests: &[ModelRequest]) {
        let mut on: BTreeMap<u8, usize> = BTreeMap::new();
        for request in requests.iter().filter(|request| request.queue >= 2) {
            let [_, target] = read(memory, request.descriptors[0].0);
            if *on.entry(target).or_insert(request.queue) != request.queue {
                self.steering_violations.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn execute(&self, memory: &GuestMemory, request: &ModelRequest) -> RequestOutcome {
        let buffers = Buffers::new(memory, &request.descriptors);
        match request.queue {
            0 => self.manage_tasks(&buffers),
            1 => match lock(&self.events).pop_front() {
                Some(event) => RequestOutcome::Complete(buffers.write(0, &event) as u32),
                None => RequestOutcome::Hold,
            },
            queue => self.command(&buffers, queue - 2),
        }
    }

    fn closed(&self) {
        *lock(&self.tasks) = TaskState::default();
    }
}
