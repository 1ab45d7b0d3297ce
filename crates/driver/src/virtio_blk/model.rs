//! A small vhost-user-blk server for tests, in this process, with a disk in memory. It can inject faults.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use mqblk_core::lock::lock;
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::model::{Descriptor, ModelDevice, ModelRequest, ModelServer, RequestOutcome, read, write};

/// Bytes of a sector, on the wire.
const SECTOR: usize = mqblk_core::units::SECTOR_BYTES as usize;
/// MQ, REPLY_ACK, CONFIG.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 9;
/// SEG_MAX, BLK_SIZE, FLUSH, CONFIG_WCE, MQ, DISCARD, WRITE_ZEROES; INDIRECT_DESC, EVENT_IDX, protocol features,
/// VERSION_1.
const FEATURES: u64 = 1 << 2 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 14 | 0b111 << 28 | 1 << 32;

/// Options of the model.
#[derive(Clone, Debug)]
pub struct BlkBehaviour {
    /// Bytes of the disk.
    pub size: usize,
    /// Number of queues offered.
    pub queues: u16,
    /// Feature bits that are not offered.
    pub without_features: u64,
    /// VIRTIO_BLK_F_RO.
    pub read_only: bool,
    /// VIRTIO_BLK_F_SIZE_MAX, with this value.
    pub size_max: Option<u32>,
    /// The fault to inject.
    pub fault: BlkFault,
}

/// A fault that the model injects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlkFault {
    /// None.
    #[default]
    None,
    /// Closes the connection after this many requests.
    DisconnectAfter(u64),
    /// Completes no requests after this many.
    StallAfter(u64),
    /// Flips a bit of the data of every write from this request on.
    CorruptFrom(u64),
    /// Completes with VIRTIO_BLK_S_IOERR from this request on.
    FailFrom(u64),
    /// Completes without writing the status byte from this request on.
    NoStatusFrom(u64),
    /// Completes this request with an id that is not in flight.
    WrongIdAt(u64),
}

impl Default for BlkBehaviour {
    fn default() -> Self {
        BlkBehaviour {
            size: 1 << 20,
            queues: 4,
            without_features: 0,
            read_only: false,
            size_max: None,
            fault: BlkFault::None,
        }
    }
}

/// State shared by the connections and the test.
#[derive(Debug)]
struct ModelState {
    behaviour: BlkBehaviour,
    disk: Mutex<Vec<u8>>,
    requests: AtomicU64,
    per_queue: Vec<AtomicU64>,
    flushes: AtomicU64,
    writeback: AtomicBool,
}

/// The running server. Stopped on drop.
#[derive(Debug)]
pub struct BlkModel {
    shared: Arc<ModelState>,
    _server: ModelServer,
}

impl BlkModel {
    /// Serves at `path`, one connection after the other.
    ///
    /// # Panics
    /// If the socket cannot be created.
    pub fn start(path: &Path, behaviour: BlkBehaviour) -> BlkModel {
        let shared = Arc::new(ModelState {
            disk: Mutex::new(vec![0; behaviour.size]),
            per_queue: (0..behaviour.queues).map(|_| AtomicU64::new(0)).collect(),
            behaviour,
            requests: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            writeback: AtomicBool::new(true),
        });
        BlkModel { _server: ModelServer::start(path, Arc::clone(&shared)), shared }
    }

    /// Returns the disk's content.
    pub fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        self.shared.disk()
    }

    /// Returns the number of requests of queue `index`.
    pub fn requests(&self, index: usize) -> u64 {
        self.shared.per_queue[index].load(Ordering::Relaxed)
    }

    /// Returns the number of completed flushes.
    pub fn flushes(&self) -> u64 {
        self.shared.flushes.load(Ordering::Relaxed)
    }
}

impl ModelState {
    fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        lock(&self.disk)
    }
}

impl ModelDevice for ModelState {
    fn ring_count(&self) -> u16 {
        self.behaviour.queues
    }

    fn features(&self) -> u64 {
        let size_max = u64::from(self.behaviour.size_max.is_some()) << 1;
        (FEATURES | size_max | u64::from(self.behaviour.read_only) << 5) & !self.behaviour.without_features
    }

    fn protocol_features(&self) -> u64 {
        PROTOCOL
    }

    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.behaviour.size as u64 / 512).to_le_bytes());
        put(8, &self.behaviour.size_max.unwrap_or(0).to_le_bytes());
        put(12, &126_u32.to_le_bytes());
        put(20, &512_u32.to_le_bytes());
        put(32, &[u8::from(self.writeback.load(Ordering::Relaxed))]);
        put(34, &self.behaviour.queues.to_le_bytes());
        for (sectors, ranges) in [(36, 40), (48, 52)] {
            put(sectors, &1024_u32.to_le_bytes());
            put(ranges, &32_u32.to_le_bytes());
        }
        config
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        if let (32, [writeback]) = (offset, bytes) {
            self.writeback.store(*writeback != 0, Ordering::Relaxed);
        }
    }

    fn execute(&self, memory: &GuestMemory, request: &ModelRequest) -> RequestOutcome {
        let count = self.requests.load(Ordering::Relaxed);
        match self.behaviour.fault {
            BlkFault::DisconnectAfter(n) if count >= n => return RequestOutcome::Disconnect,
            BlkFault::StallAfter(n) if count >= n => return RequestOutcome::Hold,
            _ => {}
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.per_queue[request.queue].fetch_add(1, Ordering::Relaxed);
        let written = execute(self, memory, &request.descriptors, count);
        match self.behaviour.fault {
            BlkFault::WrongIdAt(n) if count == n => RequestOutcome::CompleteWrongId(written),
            _ => RequestOutcome::Complete(written),
        }
    }
}

/// Executes a request and writes its status. Returns the bytes written.
fn execute(shared: &ModelState, memory: &GuestMemory, descriptors: &[Descriptor], count: u64) -> u32 {
    let (first, rest) = descriptors.split_first().expect("a header");
    let (status, data) = rest.split_last().expect("a status");
    assert!(first.1 == 16 && !first.2 && status.1 == 1 && status.2, "framing {descriptors:?}");
    let header: [u8; 16] = read(memory, first.0);
    let kind = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
    let sector = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
    let mut failed = matches!(shared.behaviour.fault, BlkFault::FailFrom(n) if count >= n);
    let mut written = 1;
    let mut disk = shared.disk();
    let mut at = sector as usize * SECTOR;
    for (address, len, writable) in data.iter().copied() {
        let len = len as usize;
        match kind {
            0 | 1 if at + len > disk.len() || (kind == 1 && shared.behaviour.read_only) => failed = true,
            0 => {
                assert!(writable);
                write(memory, address, &disk[at..at + len]);
                written += len as u32;
            }
            1 => {
                assert!(!writable);
                memory.read(GuestAddress(address), &mut disk[at..at + len]).expect("a mapped address");
                disk[at] ^= u8::from(matches!(shared.behaviour.fault, BlkFault::CorruptFrom(n) if count >= n));
            }
            8 => write(memory, address, b"model\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
            11 | 13 => {
                for range in (0..len as u64).step_by(16) {
                    let range = range_at(memory, address + range);
                    disk[range].fill(0);
                }
            }
            _ => failed = true,
        }
        at += len;
    }
    if kind == 4 {
        shared.flushes.fetch_add(1, Ordering::Relaxed);
    }
    if !matches!(shared.behaviour.fault, BlkFault::NoStatusFrom(n) if count >= n) {
        write(memory, status.0, &[u8::from(failed)]);
    }
    written
}

/// Returns the bytes of a discard or write-zeroes range.
fn range_at(memory: &GuestMemory, at: u64) -> Range<usize> {
    let start = u64::from_le_bytes(read(memory, at)) as usize * SECTOR;
    let sectors = u32::from_le_bytes(read(memory, at + 8)) as usize;
    start..start + sectors * SECTOR
}
