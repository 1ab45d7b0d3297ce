//! A connected device: set-up, what it is, changes while it is connected, and tear-down.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{ByteLen, Sector512};
use mqblk_memory::{DomainId, GuestAddress, PAGE_BYTES};
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_ring::blkif::{Abi, BlkifRing, FrontRing};
use mqblk_xen::vbd::{self, XenbusState, keys};
use mqblk_xen::{EventPort, SharedPages, Xen};

use super::keys::{
    BackendOffer, BlkfrontInfo, MAX_RING_ORDER, Negotiated, RingEndpoint, frontend_keys, parse_capacity,
};
use super::queue::{BlkfrontQueue, GrantGuard, QueueParts};
use super::segments::{IndirectPages, MAX_REQUEST_SEGMENTS, SegmentComposer};
use super::set::BlkfrontQueueSet;
use super::xenbus::{BackendMonitor, XenbusDevice};
use crate::DriverError;
use crate::error::check_range;
use crate::setup::DataArea;

/// How to connect.
#[derive(Clone)]
pub struct BlkfrontOptions {
    /// The Xen, as the frontend's domain sees it.
    pub xen: Arc<dyn Xen>,
    /// The frontend's directory in xenstore, which the toolstack makes.
    pub path: String,
    /// Rings to set up; fewer than the backend offers is fine.
    pub queues: u16,
    /// Pages of each ring, as a power of two's exponent, 0 to 4; `None`: what the backend allows.
    pub ring_order: Option<u8>,
    /// How requests are laid out.
    pub abi: Abi,
    /// Let the backend keep pages mapped.
    pub persistent: bool,
    /// Most segments of an indirect request, as far as the backend takes them; up to 11: there are none.
    pub indirect_segments: u16,
    /// Most requests that will be in flight on one queue; more than a ring has entries are not.
    pub depth: u16,
    /// Threads that will own the queues: queue `q` goes to set `q` modulo `threads`.
    pub threads: u16,
    /// Data memory of each queue, rounded up to whole pages.
    pub data_per_queue: ByteLen,
    /// How long to wait for the toolstack.
    pub connect_timeout: Duration,
    /// How long to wait for the backend at each step.
    pub reply_timeout: Duration,
}

impl BlkfrontOptions {
    /// Device `devid` of the program's domain: one ring as large as may be, with 1 MiB of data, owned by one thread.
    pub fn new(xen: Arc<dyn Xen>, devid: u32) -> BlkfrontOptions {
        BlkfrontOptions {
            path: vbd::frontend_path(xen.domain(), devid),
            xen,
            queues: 1,
            ring_order: None,
            abi: Abi::X86_64,
            persistent: true,
            indirect_segments: MAX_REQUEST_SEGMENTS,
            depth: u16::MAX,
            threads: 1,
            data_per_queue: ByteLen(1 << 20),
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
        }
    }

    /// Pages of a queue's data.
    fn data_pages(&self) -> u64 {
        self.data_per_queue.0.div_ceil(PAGE_BYTES.into()).max(1)
    }
}

/// What has changed of a connected device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChange {
    /// It has another size now.
    Resized(Sector512),
    /// The backend lets go of it, or is gone: [`Device::stop`] is due.
    Closing,
}

/// A ring that was made and not told of yet.
struct NewRing {
    pages: SharedPages,
    port: EventPort,
    front: FrontRing,
}

/// A connected device. The queues are handed out once; this end keeps the conversation. Dropped without a
/// [`stop`](Self::stop) it says that it is closed, and waits for nothing.
pub struct BlkfrontDevice {
    xen: Arc<dyn Xen>,
    xenbus: XenbusDevice,
    info: BlkfrontInfo,
    sets: Vec<BlkfrontQueueSet>,
}

impl BlkfrontDevice {
    /// Waits for the toolstack to make the device and for the backend to be ready, makes the rings, and connects. What an earlier
    /// frontend has left of its connection is ended first.
    ///
    /// # Errors
    /// When there is no such device, the backend refuses a step, or it cannot do what the options ask for.
    pub fn connect(options: &BlkfrontOptions) -> Result<BlkfrontDevice, DriverError> {
        check_range("threads", options.threads, 1..=options.queues)?;
        if let Some(order) = options.ring_order {
            check_range("ring order", order.into(), 0..=MAX_RING_ORDER.into())?;
        }
        let xen = &*options.xen;
        let mut bus = XenbusDevice::open(xen, &options.path, options.connect_timeout, options.reply_timeout)?;
        bus.initialise()?;
        let offer = BackendOffer::parse(&bus.read_keys(&BackendOffer::KEYS)?)?;
        check_range("queues", options.queues, 1..=offer.queues)?;
        let order = options.ring_order.unwrap_or(offer.ring_order);
        check_range("ring order", order.into(), 0..=offer.ring_order.into())?;
        let make = |_| make_ring(xen, bus.backend(), 1 << order, options.abi);
        let rings = (0..options.queues).map(make).collect::<Result<Vec<NewRing>, _>>()?;
        let told: Vec<RingEndpoint> =
            rings.iter().map(|ring| RingEndpoint { refs: ring.pages.refs.clone(), port: ring.port.port }).collect();
        bus.connect(&frontend_keys(options.abi, options.persistent, &told))?;
        let BackendOffer { queues: most_queues, .. } = offer;
        let BlkfrontOptions { persistent, indirect_segments, .. } = *options;
        let agreed = Negotiated { persistent, indirect_segments, max_queues: most_queues, ring_order: order };
        let info = BlkfrontInfo::parse(&bus.read_keys(&BlkfrontInfo::KEYS)?, &agreed)?;
        let sets = make_sets(options, bus.backend(), &info, rings)?;
        bus.set_state(XenbusState::Connected)?;
        tracing::debug!(?info, queues = options.queues, back = bus.backend_path(), "device connected");
        Ok(BlkfrontDevice { xen: Arc::clone(&options.xen), xenbus: bus, info, sets })
    }

    /// What the device is.
    pub fn info(&self) -> &BlkfrontInfo {
        &self.info
    }

    /// The queues, a set for each thread. Empty the second time.
    pub fn take_queues(&mut self) -> Vec<BlkfrontQueueSet> {
        std::mem::take(&mut self.sets)
    }

    /// Something to see the backend's end with.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn backend_monitor(&self) -> Result<BackendMonitor, DriverError> {
        self.xenbus.backend_monitor(&*self.xen)
    }

    /// Waits for a change, for at most `limit`.
    ///
    /// # Errors
    /// When xenstore is gone, or the new size makes no sense.
    pub fn wait_change(&mut self, limit: Duration) -> Result<Option<DeviceChange>, DriverError> {
        let deadline = Instant::now() + limit;
        while self.xenbus.wait_event(Some(deadline.saturating_duration_since(Instant::now())))? {
            match self.xenbus.backend_state()? {
                XenbusState::Connected => {
                    let before = self.info.capacity;
                    if self.refresh()?.capacity != before {
                        return Ok(Some(DeviceChange::Resized(self.info.capacity)));
                    }
                }
                XenbusState::Closing | XenbusState::Closed | XenbusState::Unknown => {
                    return Ok(Some(DeviceChange::Closing));
                }
                // As Linux's frontend: the others mean nothing to one that is connected.
                _ => {}
            }
        }
        Ok(None)
    }

    /// Reads the size again.
    ///
    /// # Errors
    /// When xenstore refuses or the size makes no sense.
    pub fn refresh(&mut self) -> Result<&BlkfrontInfo, DriverError> {
        self.info.capacity = parse_capacity(&self.xenbus.read_keys(&[keys::SECTORS])?)?;
        Ok(&self.info)
    }

    /// Ends the connection: the backend uses the rings and pages no more. A new one may [start](Self::connect).
    ///
    /// # Errors
    /// When the backend does not answer in time.
    pub fn stop(mut self, sets: Vec<BlkfrontQueueSet>) -> Result<(), DriverError> {
        let closed = self.xenbus.close();
        drop(sets);
        closed
    }
}

impl std::fmt::Debug for BlkfrontDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("bus", &self.xenbus).field("info", &self.info).finish_non_exhaustive()
    }
}

fn make_ring(xen: &dyn Xen, backend: DomainId, pages: u32, abi: Abi) -> Result<NewRing, DriverError> {
    let shared = xen.share(backend, pages, true)?;
    let ring = BlkifRing::resolve(&shared.memory, GuestAddress(0), pages, abi)?;
    Ok(NewRing { front: FrontRing::init(ring), port: xen.alloc_unbound(backend)?, pages: shared })
}

/// Deals the rings to the threads. The data of a thread's queues is one memory.
fn make_sets(
    options: &BlkfrontOptions,
    backend: DomainId,
    info: &BlkfrontInfo,
    rings: Vec<NewRing>,
) -> Result<Vec<BlkfrontQueueSet>, DriverError> {
    let mut dealt: Vec<Vec<NewRing>> = (0..options.threads).map(|_| vec![]).collect();
    for (index, ring) in rings.into_iter().enumerate() {
        dealt[index % usize::from(options.threads)].push(ring);
    }
    dealt.into_iter().map(|rings| make_set(options, backend, info, rings)).collect()
}

fn make_set(
    options: &BlkfrontOptions,
    backend: DomainId,
    info: &BlkfrontInfo,
    rings: Vec<NewRing>,
) -> Result<BlkfrontQueueSet, DriverError> {
    let pages = options.data_pages();
    let all = pages.checked_mul(rings.len() as u64).and_then(|all| u32::try_from(all).ok());
    let too_many = || DriverError::Option {
        field: "data memory",
        found: options.data_per_queue.0,
        expected: "fewer than 2^32 pages for the queues of a thread".to_owned(),
    };
    let data = options.xen.share(backend, all.ok_or_else(too_many)?, true)?;
    let refs: Arc<[_]> = data.refs.into();
    let guard: GrantGuard = Arc::from(data.guard);
    let queues = (0..).zip(rings).map(|(place, ring)| {
        let depth = options.depth.clamp(1, ring.front.size() as u16);
        let (tables, tables_guard) = make_indirect_pages(options, backend, info, depth)?;
        let NewRing { pages: own, port, front } = ring;
        let keepers = [Arc::from(own.guard)].into_iter().chain([Arc::clone(&guard)]).chain(tables_guard);
        let len = pages * u64::from(PAGE_BYTES);
        let queue = BlkfrontQueue::new(QueueParts {
            ring: front,
            channel: port.channel,
            handle: request_handle(&options.path),
            depth,
            composer: SegmentComposer::new(Arc::clone(&refs), tables, info.max_segments),
            memory: Arc::clone(&data.memory),
            data: DataArea { start: GuestAddress(place * len), len: ByteLen(len) },
            guards: keepers.collect(),
        });
        Ok((queue, port.descriptor))
    });
    let queues = queues.collect::<Result<Vec<_>, DriverError>>()?;
    BlkfrontQueueSet::new(queues).map_err(|source| DriverError::System { what: "epoll", source })
}

/// Pages of segments for a queue, if its requests may have more than they hold.
fn make_indirect_pages(
    options: &BlkfrontOptions,
    backend: DomainId,
    info: &BlkfrontInfo,
    depth: u16,
) -> Result<(Option<IndirectPages>, Option<GrantGuard>), DriverError> {
    if usize::from(info.max_segments) <= MAX_SEGMENTS {
        return Ok((None, None));
    }
    let per_id = IndirectPages::per_id(info.max_segments);
    let shared = options.xen.share(backend, per_id * u32::from(depth), true)?;
    Ok((Some(IndirectPages::new(&shared.memory, &shared.refs, per_id)), Some(Arc::from(shared.guard))))
}

/// What Linux writes there: the low bits of the device's number.
fn request_handle(path: &str) -> u16 {
    path.rsplit('/').next().and_then(|devid| devid.parse::<u32>().ok()).unwrap_or(0) as u16
}
