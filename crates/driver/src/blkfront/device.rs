//! A connected device: setup, properties, changes, and teardown.

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

/// Options of [`BlkfrontDevice::connect`].
#[derive(Clone)]
pub struct BlkfrontOptions {
    /// The Xen interface of the frontend's domain.
    pub xen: Arc<dyn Xen>,
    /// The frontend's directory in xenstore, created by the toolstack.
    pub path: String,
    /// Number of rings to set up, at most what the backend offers.
    pub queues: u16,
    /// Order of each ring, log2 of its pages, 0 to 4. `None`: the largest that the backend allows.
    pub ring_order: Option<u8>,
    /// ABI of the requests.
    pub abi: Abi,
    /// Offer persistent grants.
    pub persistent: bool,
    /// Largest number of segments of an indirect request, limited by the backend. Up to 11: no indirect requests.
    pub indirect_segments: u16,
    /// Largest number of requests in flight on a queue, limited by the ring's entries.
    pub depth: u16,
    /// Number of threads that own the queues: queue `q` belongs to set `q` modulo `threads`.
    pub threads: u16,
    /// Data memory of each queue, rounded up to whole pages.
    pub data_per_queue: ByteLen,
    /// Longest wait for the toolstack.
    pub connect_timeout: Duration,
    /// Longest wait for each step of the backend.
    pub reply_timeout: Duration,
}

impl BlkfrontOptions {
    /// Returns options for device `devid` of the program's domain: one ring of the largest size, with 1 MiB of data,
    /// owned by one thread.
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

    /// Returns the number of data pages of a queue.
    fn data_pages(&self) -> u64 {
        self.data_per_queue.0.div_ceil(PAGE_BYTES.into()).max(1)
    }
}

/// A change of a connected device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChange {
    /// The size has changed.
    Resized(Sector512),
    /// The backend releases the device, or is gone: [`BlkfrontDevice::stop`] is due.
    Closing,
}

/// A ring that is not published in xenstore yet.
struct NewRing {
    pages: SharedPages,
    port: EventPort,
    front: FrontRing,
}

/// A connected device. Owns the connection; the queues are handed out once. On drop without a [`stop`](Self::stop), the
/// state becomes Closed without a wait for the backend.
pub struct BlkfrontDevice {
    xen: Arc<dyn Xen>,
    xenbus: XenbusDevice,
    info: BlkfrontInfo,
    sets: Vec<BlkfrontQueueSet>,
}

impl BlkfrontDevice {
    /// Waits for the toolstack to create the device and for the backend to be ready, creates the rings, and connects.
    /// Closes the connection of an earlier frontend first.
    ///
    /// # Errors
    /// If the device does not exist, the backend closes it, or the backend does not support the options.
    pub fn connect(options: &BlkfrontOptions) -> Result<BlkfrontDevice, DriverError> {
        check_range("threads", options.threads, 1..=options.queues)?;
        if let Some(order) = options.ring_order {
            check_range("ring order", order.into(), 0..=MAX_RING_ORDER.into())?;
        }
        let xen = &*options.xen;
        let mut xenbus = XenbusDevice::open(xen, &options.path, options.connect_timeout, options.reply_timeout)?;
        xenbus.initialise()?;
        let offer = BackendOffer::parse(&xenbus.read_keys(&BackendOffer::KEYS)?)?;
        check_range("queues", options.queues, 1..=offer.queues)?;
        let order = options.ring_order.unwrap_or(offer.ring_order);
        check_range("ring order", order.into(), 0..=offer.ring_order.into())?;
        let make = |_| make_ring(xen, xenbus.backend(), 1 << order, options.abi);
        let rings = (0..options.queues).map(make).collect::<Result<Vec<NewRing>, _>>()?;
        let endpoints: Vec<RingEndpoint> =
            rings.iter().map(|ring| RingEndpoint { refs: ring.pages.refs.clone(), port: ring.port.port }).collect();
        xenbus.connect(&frontend_keys(options.abi, options.persistent, &endpoints))?;
        let BackendOffer { queues: max_queues, .. } = offer;
        let BlkfrontOptions { persistent, indirect_segments, .. } = *options;
        let negotiated = Negotiated { persistent, indirect_segments, max_queues, ring_order: order };
        let info = BlkfrontInfo::parse(&xenbus.read_keys(&BlkfrontInfo::KEYS)?, &negotiated)?;
        let sets = make_sets(options, xenbus.backend(), &info, rings)?;
        xenbus.set_state(XenbusState::Connected)?;
        tracing::debug!(?info, queues = options.queues, back = xenbus.backend_path(), "device connected");
        Ok(BlkfrontDevice { xen: Arc::clone(&options.xen), xenbus, info, sets })
    }

    /// Returns the device's properties.
    pub fn info(&self) -> &BlkfrontInfo {
        &self.info
    }

    /// Returns the queues, a set for each thread. Empty at the second call.
    pub fn take_queues(&mut self) -> Vec<BlkfrontQueueSet> {
        std::mem::take(&mut self.sets)
    }

    /// Returns a handle that detects the end of the backend.
    ///
    /// # Errors
    /// If xenstore fails a request.
    pub fn backend_monitor(&self) -> Result<BackendMonitor, DriverError> {
        self.xenbus.backend_monitor(&*self.xen)
    }

    /// Waits up to `limit` for a change.
    ///
    /// # Errors
    /// If xenstore is gone, or the new size is invalid.
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
                // A connected frontend ignores the other states, as in Linux.
                _ => {}
            }
        }
        Ok(None)
    }

    /// Reads the size again.
    ///
    /// # Errors
    /// If xenstore fails a request or the size is invalid.
    pub fn refresh(&mut self) -> Result<&BlkfrontInfo, DriverError> {
        self.info.capacity = parse_capacity(&self.xenbus.read_keys(&[keys::SECTORS])?)?;
        Ok(&self.info)
    }

    /// Ends the connection. The backend does not use the rings and pages any more, and the device can be
    /// [connected](Self::connect) again.
    ///
    /// # Errors
    /// If the backend does not close in time.
    pub fn stop(mut self, sets: Vec<BlkfrontQueueSet>) -> Result<(), DriverError> {
        let closed = self.xenbus.close();
        drop(sets);
        closed
    }
}

impl std::fmt::Debug for BlkfrontDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlkfrontDevice").field("xenbus", &self.xenbus).field("info", &self.info).finish_non_exhaustive()
    }
}

fn make_ring(xen: &dyn Xen, backend: DomainId, pages: u32, abi: Abi) -> Result<NewRing, DriverError> {
    let shared = xen.share(backend, pages, true)?;
    let ring = BlkifRing::resolve(&shared.memory, GuestAddress(0), pages, abi)?;
    Ok(NewRing { front: FrontRing::init(ring), port: xen.alloc_unbound(backend)?, pages: shared })
}

/// Distributes the rings over the threads. The data of a thread's queues is one memory.
fn make_sets(
    options: &BlkfrontOptions,
    backend: DomainId,
    info: &BlkfrontInfo,
    rings: Vec<NewRing>,
) -> Result<Vec<BlkfrontQueueSet>, DriverError> {
    let mut by_thread: Vec<Vec<NewRing>> = (0..options.threads).map(|_| vec![]).collect();
    for (index, ring) in rings.into_iter().enumerate() {
        by_thread[index % usize::from(options.threads)].push(ring);
    }
    by_thread.into_iter().map(|rings| make_set(options, backend, info, rings)).collect()
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
    let data_guard: GrantGuard = Arc::from(data.guard);
    let queues = (0..).zip(rings).map(|(place, ring)| {
        let depth = options.depth.clamp(1, ring.front.size() as u16);
        let (indirect, indirect_guard) = make_indirect_pages(options, backend, info, depth)?;
        let NewRing { pages: own, port, front } = ring;
        let guards = [Arc::from(own.guard)].into_iter().chain([Arc::clone(&data_guard)]).chain(indirect_guard);
        let len = pages * u64::from(PAGE_BYTES);
        let queue = BlkfrontQueue::new(QueueParts {
            ring: front,
            channel: port.channel,
            handle: request_handle(&options.path),
            depth,
            composer: SegmentComposer::new(Arc::clone(&refs), indirect, info.max_segments),
            memory: Arc::clone(&data.memory),
            data: DataArea { start: GuestAddress(place * len), len: ByteLen(len) },
            guards: guards.collect(),
        });
        Ok((queue, port.descriptor))
    });
    let queues = queues.collect::<Result<Vec<_>, DriverError>>()?;
    BlkfrontQueueSet::new(queues).map_err(|source| DriverError::System { what: "epoll", source })
}

/// Creates the indirect pages of a queue, if its requests may have more segments than fit in a request.
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

/// Returns the `handle` field of requests, as Linux sets it: the low bits of the device number.
fn request_handle(path: &str) -> u16 {
    path.rsplit('/').next().and_then(|devid| devid.parse::<u32>().ok()).unwrap_or(0) as u16
}
