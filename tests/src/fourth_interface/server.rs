//! The server of a disk over lines.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mqblk_core::{ByteLen, DiskSlot, Op, Resize, SizeUsers};
use mqblk_daemon::change::ChangeError;
use mqblk_daemon::disk_list::DiskConfig;
use mqblk_daemon::interface::{DeviceDescription, DeviceStat, Export, ServedDevice, StartFailure, StatDetail};
use mqblk_daemon::report::DiskInfo;
use mqblk_daemon::resize::{GuestNotice, ResizeOutcome, resize_error};
use mqblk_daemon::storage::StorageConfig;
use mqblk_engine::{Engine, PollPolicy, QueueDisk, QueueHandle, QueueOptions, StatsRegistry, WorkerStats};
use mqblk_memory::{GuestAddress, GuestMemory, Region};

use super::WORD;
use super::endpoint::LineEndpoint;
use super::queue::{LineQueue, LineRequest, LineRing};

/// Longest wait of a stop for requests.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// A served disk.
pub(super) struct LineServer {
    info: DiskInfo,
    storage: StorageConfig,
    rings: Arc<Vec<LineRing>>,
    handles: Mutex<Vec<QueueHandle<LineQueue>>>,
    stats: StatsRegistry,
    socket: PathBuf,
}

impl LineServer {
    /// Attaches the queues and listens.
    pub(super) fn start(
        disk: DiskConfig<LineEndpoint>,
        max_bytes: u64,
        engine: &Engine,
    ) -> Result<LineServer, StartFailure> {
        let health = disk.storage.new_health(&disk.id);
        let info = disk.info(WORD, &health);
        let DiskConfig { endpoint, storage, .. } = disk;
        let stats = StatsRegistry::new(endpoint.queues.into());
        let (mut rings, mut handles) = (Vec::new(), Vec::new());
        for (index, worker) in (0..).zip(endpoint.queue_map.workers()) {
            let ring = LineRing::new()?;
            let region = Region::shared("lines", max_bytes, GuestAddress(0))?.0;
            let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)])?);
            let options = QueueOptions {
                disks: vec![QueueDisk {
                    slot: DiskSlot::FIRST,
                    disk: Arc::clone(&storage.disk),
                    plug: storage.plug,
                    health: Arc::clone(&health),
                }],
                kick: Some(ring.kick().into()),
                policy: PollPolicy::default().into(),
                paused: false,
                on_fault: Box::new(|_| {}),
            };
            let queue_ring = ring.clone();
            let handle = engine.attach((*worker).into(), options, move |_| Ok(LineQueue::new(queue_ring, memory)))?;
            stats.attached(index, handle.id());
            rings.push(ring);
            handles.push(handle);
        }
        let rings = Arc::new(rings);
        let listener = UnixListener::bind(&endpoint.socket)?;
        let free = Arc::new(Mutex::new((0..rings.len()).collect::<Vec<_>>()));
        let listener_rings = Arc::clone(&rings);
        std::thread::Builder::new().name("lines".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let (rings, free) = (Arc::clone(&listener_rings), Arc::clone(&free));
                std::thread::spawn(move || {
                    let queue = free.lock().unwrap_or_else(PoisonError::into_inner).pop();
                    if let Some(queue) = queue {
                        // The client ends the connection.
                        let _ = serve(stream, &rings[queue], max_bytes);
                        free.lock().unwrap_or_else(PoisonError::into_inner).push(queue);
                    }
                });
            }
        })?;
        Ok(LineServer { info, storage, rings, handles: Mutex::new(handles), stats, socket: endpoint.socket })
    }

    /// Drains the queues.
    pub(super) fn begin_stop(&self) {
        let handles = std::mem::take(&mut *self.handles.lock().unwrap_or_else(PoisonError::into_inner));
        for handle in handles {
            if let Ok(mut draining) = handle.drain() {
                // The daemon's flush reports storage that hangs.
                let _ = draining.wait(DRAIN_TIMEOUT);
            }
        }
        self.rings.iter().for_each(LineRing::close);
        // The file is in a folder of the test.
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Serves a connection until it ends.
fn serve(stream: UnixStream, ring: &LineRing, max_bytes: u64) -> std::io::Result<()> {
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| words.get(index).and_then(|word| word.parse::<u64>().ok());
        let request = match (words.first().copied(), number(1), number(2)) {
            (Some("flush"), None, None) => LineRequest { op: Op::Flush, offset: 0, len: 0, data: Vec::new() },
            (Some("read"), Some(offset), Some(len)) if (1..=max_bytes).contains(&len) => {
                LineRequest { op: Op::Read, offset, len: len as u32, data: Vec::new() }
            }
            (Some("write"), Some(offset), Some(len)) if (1..=max_bytes).contains(&len) => {
                let mut data = vec![0; len as usize];
                reader.read_exact(&mut data)?;
                LineRequest { op: Op::Write { fua: false }, offset, len: len as u32, data }
            }
            _ => return writer.write_all(b"error: read, write or flush, within the limit\n"),
        };
        match ring.call(request) {
            None => return Ok(()),
            Some(Ok(data)) => {
                writer.write_all(b"ok\n")?;
                writer.write_all(&data)?;
            }
            Some(Err(why)) => writer.write_all(format!("error: {why}\n").as_bytes())?,
        }
    }
}

/// The queues learn a new size from the engine.
struct Users<'a>(&'a LineServer);

impl SizeUsers for Users<'_> {
    fn set_size(&mut self, _: ByteLen) {}

    fn refresh(&mut self) {
        for handle in self.0.handles.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            // A worker that has ended serves nothing.
            let _ = handle.refresh_disk(DiskSlot::FIRST);
        }
    }
}

impl ServedDevice for LineServer {
    fn describe(&self) -> DeviceDescription {
        self.info.describe(None)
    }

    fn stat(&self, workers: &[WorkerStats], detail: StatDetail) -> Option<DeviceStat> {
        let stat = self.info.stat(None, &self.stats.report(workers)?, detail);
        Some(DeviceStat::Disk(Box::new(stat)))
    }

    fn exports(&self) -> Vec<Export> {
        vec![self.info.export()]
    }

    fn resize(&self, _id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        let resized = request.carry_out(self.storage.disk.as_ref(), &mut Users(self));
        let resized = resized.map_err(|error| resize_error(&format!("disk {:?}", self.info.id), request, error))?;
        let guest = if resized.is_change() { GuestNotice::AtReconnect } else { GuestNotice::Unchanged };
        Ok(ResizeOutcome { resized, guest })
    }

    /// Clients connect for each command.
    fn is_connected(&self) -> bool {
        false
    }
}
