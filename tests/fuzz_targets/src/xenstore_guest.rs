//! The frontends of the target `xenstore`: their rings and requests, the keys that they write, and their disks.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use mqblk_blkif::{DEFAULT_PERSISTENT_MAX, GrantMode, PoolScope};
use mqblk_engine::{PlugOptions, PollPolicy, QueueSettings, SharedQueueSettings};
use mqblk_ring::blkif::Abi;
use mqblk_xen::{EventPort, Xen};
use mqblk_xen_server::{DeviceName, DiskBacking, DiskUse, Opener, Params, RingLimits, VbdSettings};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::time::Timespec;

use crate::blkif_guest::GuestRing;
use crate::memory_disk::open_memory_disk;
use crate::xen_host::{GuestPages, HOST, PAGE};
use crate::xenstore_model::{GuestResources, MAX_ORDER, MAX_QUEUES};

/// Longest wait for a response. Only a lost one takes this long.
const TIMEOUT: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };
pub(crate) const SECTOR: usize = 512;
/// Sectors of each disk.
pub(crate) const SECTORS: usize = 64;

/// Opens a disk in memory for each device, and counts the open ones.
pub(crate) struct MemoryDisks {
    pub(crate) open: Arc<AtomicUsize>,
    /// Number of opens.
    pub(crate) opened: AtomicUsize,
    pub(crate) mode: GrantMode,
    pub(crate) indirect_segments: u16,
    pub(crate) journal: bool,
}

/// An open disk.
struct OpenGuard(Arc<AtomicUsize>);

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl DiskUse for OpenGuard {}

impl Opener for MemoryDisks {
    fn serves(&self, _params: &Params) -> bool {
        true
    }

    fn open(&self, params: &Params, name: &DeviceName, read_only: bool) -> std::result::Result<DiskBacking, String> {
        if *params != Params::Disk("disk".to_owned()) {
            return Err(format!("disk: found {params}, expected mqblk:disk"));
        }
        self.open.fetch_add(1, Ordering::SeqCst);
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(DiskBacking {
            id: format!("disk-{}", name.devid),
            storage: "ram".to_owned(),
            disk: open_memory_disk(SECTORS * SECTOR, SECTOR, read_only),
            plug: PlugOptions::default(),
            health: Arc::default(),
            settings: VbdSettings {
                ring_limits: RingLimits { queues: MAX_QUEUES as u16, ring_page_order: MAX_ORDER as u8 },
                indirect_segments: self.indirect_segments,
                mode: self.mode,
                pool: PoolScope::PerRing,
                persistent_max: DEFAULT_PERSISTENT_MAX,
                persistent_idle: Duration::ZERO,
                journal: self.journal,
                write_through: false,
            },
            queues: Arc::new(SharedQueueSettings::new(QueueSettings {
                policy: PollPolicy::Off.into(),
                ..QueueSettings::default()
            })),
            guests: None,
            disk_use: Box::new(OpenGuard(Arc::clone(&self.open))),
        })
    }
}

/// A ring with its port.
pub(crate) struct GuestQueue {
    ring: GuestRing,
    port: EventPort,
}

/// The rings of a frontend, and the page of its requests.
pub(crate) struct GuestFrontend {
    abi: Abi,
    pub(crate) queues: Vec<GuestQueue>,
    data: GuestPages,
    /// The expected content of the disk since the open number `opened`.
    pub(crate) model: Vec<u8>,
    pub(crate) opened: usize,
}

impl GuestFrontend {
    pub(crate) fn new(xen: &dyn Xen) -> GuestFrontend {
        let data = GuestPages::new(xen, HOST, 1, true);
        GuestFrontend { abi: Abi::X86_64, queues: vec![], data, model: vec![0; SECTORS * SECTOR], opened: 0 }
    }

    /// Replaces the rings. Returns the keys of a frontend that keeps to the protocol.
    pub(crate) fn make_rings(&mut self, xen: &dyn Xen, abi: Abi, queues: u64, order: u64) -> Vec<(String, String)> {
        self.queues.clear();
        self.abi = abi;
        let mut keys = vec![("protocol".to_owned(), abi.protocol().to_owned())];
        if order > 0 {
            keys.push(("ring-page-order".to_owned(), order.to_string()));
        }
        if queues > 1 {
            keys.push(("multi-queue-num-queues".to_owned(), queues.to_string()));
        }
        for queue in 0..queues {
            let prefix = if queues == 1 { String::new() } else { format!("queue-{queue}/") };
            let ring = GuestRing::new(xen, 1 << order, abi, 0);
            let port = xen.alloc_unbound(HOST).expect("a port");
            for page in 0..ring.page_count {
                let name = if order == 0 { "ring-ref".to_owned() } else { format!("ring-ref{page}") };
                keys.push((format!("{prefix}{name}"), ring.pages.gref(page).to_string()));
            }
            keys.push((format!("{prefix}event-channel"), port.port.0.to_string()));
            self.queues.push(GuestQueue { ring, port });
        }
        keys
    }

    pub(crate) fn resources(&self) -> GuestResources {
        let pages = self.queues.iter().flat_map(|one| (0..one.ring.page_count).map(|page| one.ring.pages.gref(page)));
        GuestResources {
            grefs: pages.chain([self.data.gref(0)]).collect(),
            ports: self.queues.iter().map(|one| one.port.port.0).collect(),
        }
    }

    /// Returns true if these are its intended rings.
    pub(crate) fn owns(&self, abi: Abi, rings: &[(Vec<u32>, u32)]) -> bool {
        let own = |one: &GuestQueue| {
            let grefs: Vec<_> = (0..one.ring.page_count).map(|page| one.ring.pages.gref(page)).collect();
            (grefs, one.port.port.0)
        };
        abi == self.abi && self.queues.iter().map(own).eq(rings.iter().cloned())
    }

    /// Runs a request on a ring and checks its response. `sector` is that of a transfer of a page's 8 sectors.
    fn request(&mut self, queue: usize, operation: u8, sector: u64, status: i16) {
        let GuestQueue { ring, port } = &mut self.queues[queue];
        let narrow = matches!(self.abi, Abi::X86_32);
        let (id_at, sector_at, rest_at) = if narrow { (4, 12, 20) } else { (8, 16, 24) };
        let id = 0x1234_5678_9abc_def0 ^ u64::from(ring.req_prod);
        let mut bytes = vec![0; if narrow { 108 } else { 112 }];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &[operation, u8::from(operation < 2)]);
        put(id_at, &id.to_le_bytes());
        put(sector_at, &sector.to_le_bytes());
        put(rest_at, &self.data.gref(0).to_le_bytes());
        put(rest_at + 4, &[0, 7]);
        let before = ring.req_prod;
        ring.put(&bytes);
        ring.request_event(before.wrapping_add(1));
        if ring.publish(before) {
            port.channel.notify();
        }
        while ring.ready() == 0 {
            let mut waiting = [PollFd::from_borrowed_fd(port.descriptor.as_fd(), PollFlags::IN)];
            let events = retry_on_intr(|| poll(&mut waiting, Some(&TIMEOUT))).expect("an event channel");
            assert!(events > 0, "no response on ring {queue} to operation {operation}");
            port.channel.take();
            port.channel.unmask();
        }
        assert_eq!((ring.ready(), ring.response()), (1, (id, operation, status)));
        ring.take(id, operation, status);
        ring.check();
    }

    /// Writes a page of the disk and reads another.
    pub(crate) fn use_disk(&mut self, u: &mut Unstructured<'_>, read_only: bool) -> Result<()> {
        let queue = u.choose_index(self.queues.len())?;
        let (written, read, byte) = (u.int_in_range(0..=7_usize)?, u.int_in_range(0..=7_usize)?, u.arbitrary()?);
        self.data.put(0, &[byte; PAGE]);
        self.request(queue, 1, written as u64 * 8, if read_only { -1 } else { 0 });
        if !read_only {
            self.model[written * PAGE..][..PAGE].fill(byte);
        }
        self.data.put(0, &[!byte; PAGE]);
        self.request(queue, 0, read as u64 * 8, 0);
        self.data.expect(0, &self.model[read * PAGE..][..PAGE]);
        self.request(queue, 0, SECTORS as u64, -1);
        self.request(queue, 9, 0, -2);
        self.data.check("the page of requests");
        Ok(())
    }
}

/// Returns a key of a frontend.
pub(crate) fn choose_key(u: &mut Unstructured<'_>) -> Result<&'static str> {
    u.choose(&[
        "protocol",
        "ring-ref",
        "ring-ref0",
        "ring-ref1",
        "ring-page-order",
        "num-ring-pages",
        "multi-queue-num-queues",
        "event-channel",
        "queue-0/ring-ref",
        "queue-0/event-channel",
        "queue-1/ring-ref0",
        "queue-1/event-channel",
        "feature-persistent",
        "feature-large-sector-size",
    ])
    .copied()
}

/// Returns a value of a frontend's key: a small number, a grant, a port, the name of a layout, or none of these.
pub(crate) fn choose_value(u: &mut Unstructured<'_>, front: &GuestFrontend) -> Result<Vec<u8>> {
    let resources = front.resources();
    let text = match u.int_in_range(0..=7)? {
        0 | 1 => u.int_in_range(0..=9)?.to_string(),
        2 => u.choose(&resources.grefs)?.to_string(),
        3 if !resources.ports.is_empty() => u.choose(&resources.ports)?.to_string(),
        4 => (*u.choose(&["x86_64-abi", "x86_32-abi", "arm-abi", "x86_64-ABI", "x86-abi"])?).to_owned(),
        5 => format!(
            "{}{}{}",
            u.choose(&["", " ", "0", "+", "-"])?,
            u.int_in_range(0..=9)?,
            u.choose(&["", "\n", "\0", " 1", "x"])?
        ),
        6 => (*u.choose(&["", " ", "0x1", "4294967295", "4294967296", "18446744073709551616", "eins", "\u{663}"])?)
            .to_owned(),
        _ => match u.int_in_range(0..=2)? {
            0 => "9".repeat(u.int_in_range(1..=3900)?),
            1 => "\u{e9}".repeat(u.int_in_range(1..=1900)?),
            _ => return Ok(vec![*u.choose(&[0x80, 0xff, 0xc3])?; u.int_in_range(1..=20)?]),
        },
    };
    Ok(text.into_bytes())
}
