//! A connected device: set-up, what it is, changes while it is connected, and tear-down.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{ByteLen, Sector512};
use mqblk_memory::{DomainId, GuestAddress, PAGE_BYTES};
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_ring::blkif::{Abi, BlkifRing, FrontRing};
use mqblk_xen::vbd::{self, XenbusState, keys};
use mqblk_xen::{EventPort, SharedPages, Xen};

use super::bus::{Bus, Lifeline};
use super::keys::{Agreed, Info, MOST_ORDER, Offer, Ring, capacity, frontend};
use super::queue::{Keeper, Parts, Queue};
use super::segments::{Composer, MOST, Tables};
use super::set::QueueSet;
use crate::DriverError;
use crate::error::check;
use crate::setup::DataArea;

/// How to connect.
#[derive(Clone)]
pub struct Options {
    /// The Xen, as the frontend's domain sees it.
    pub xen: Arc<dyn Xen>,
    /// The frontend's directory in xenstore, which the toolstack makes.
    pub path: String,
    /// Rings to set up; fewer than the back-end offers is fine.
    pub queues: u16,
    /// Pages of each ring, as a power of two's exponent, 0 to 4; `None`: what the back-end allows.
    pub ring_order: Option<u8>,
    /// How requests are laid out.
    pub abi: Abi,
    /// Let the back-end keep pages mapped.
    pub persistent: bool,
    /// Most segments of an indirect request, as far as the back-end takes them; up to 11: there are none.
    pub indirect_segments: u16,
    /// Most requests that will be in flight on one queue; more than a ring has entries are not.
    pub depth: u16,
    /// Threads that will own the queues: queue `q` goes to set `q` modulo `threads`.
    pub threads: u16,
    /// Data memory of each queue, rounded up to whole pages.
    pub data_per_queue: ByteLen,
    /// How long to wait for the toolstack.
    pub patience: Duration,
    /// How long to wait for the back-end at each step.
    pub answer_limit: Duration,
}

impl Options {
    /// Device `devid` of the program's domain: one ring as large as may be, with 1 MiB of data, owned by one thread.
    pub fn new(xen: Arc<dyn Xen>, devid: u32) -> Options {
        Options {
            path: vbd::frontend_path(xen.domain(), devid),
            xen,
            queues: 1,
            ring_order: None,
            abi: Abi::X86_64,
            persistent: true,
            indirect_segments: MOST,
            depth: u16::MAX,
            threads: 1,
            data_per_queue: ByteLen(1 << 20),
            patience: Duration::from_secs(5),
            answer_limit: Duration::from_secs(10),
        }
    }

    /// Pages of a queue's data.
    fn data_pages(&self) -> u64 {
        self.data_per_queue.0.div_ceil(PAGE_BYTES.into()).max(1)
    }
}

/// What has changed of a connected device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It has another size now.
    Resized(Sector512),
    /// The back-end lets go of it, or is gone: [`Device::stop`] is due.
    Closing,
}

/// A ring that was made and not told of yet.
struct Made {
    pages: SharedPages,
    port: EventPort,
    front: FrontRing,
}

/// A connected device. The queues are handed out once; this end keeps the conversation. Dropped without a
/// [`stop`](Self::stop) it says that it is closed, and waits for nothing.
pub struct Device {
    xen: Arc<dyn Xen>,
    bus: Bus,
    info: Info,
    sets: Vec<QueueSet>,
}

impl Device {
    /// Waits for the toolstack to make the device and for the back-end to be ready, makes the rings, and connects. What an earlier
    /// frontend has left of its connection is ended first.
    ///
    /// # Errors
    /// When there is no such device, the back-end refuses a step, or it cannot do what the options ask for.
    pub fn connect(options: &Options) -> Result<Device, DriverError> {
        check("threads", options.threads, 1..=options.queues)?;
        if let Some(order) = options.ring_order {
            check("ring order", order.into(), 0..=MOST_ORDER.into())?;
        }
        let xen = &*options.xen;
        let mut bus = Bus::open(xen, &options.path, options.patience, options.answer_limit)?;
        bus.begin()?;
        let offer = Offer::judge(&bus.keys(&Offer::KEYS)?)?;
        check("queues", options.queues, 1..=offer.queues)?;
        let order = options.ring_order.unwrap_or(offer.ring_order);
        check("ring order", order.into(), 0..=offer.ring_order.into())?;
        let make = |_| make(xen, bus.backend(), 1 << order, options.abi);
        let rings = (0..options.queues).map(make).collect::<Result<Vec<Made>, _>>()?;
        let told: Vec<Ring> =
            rings.iter().map(|ring| Ring { refs: ring.pages.refs.clone(), port: ring.port.port }).collect();
        bus.connect(&frontend(options.abi, options.persistent, &told))?;
        let Offer { queues: most_queues, .. } = offer;
        let Options { persistent, indirect_segments, .. } = *options;
        let agreed = Agreed { persistent, indirect_segments, most_queues, ring_order: order };
        let info = Info::judge(&bus.keys(&Info::KEYS)?, &agreed)?;
        let sets = sets(options, bus.backend(), &info, rings)?;
        bus.set_state(XenbusState::Connected)?;
        tracing::debug!(?info, queues = options.queues, back = bus.back(), "device connected");
        Ok(Device { xen: Arc::clone(&options.xen), bus, info, sets })
    }

    /// What the device is.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The queues, a set for each thread. Empty the second time.
    pub fn take_queues(&mut self) -> Vec<QueueSet> {
        std::mem::take(&mut self.sets)
    }

    /// Something to see the back-end's end with.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn lifeline(&self) -> Result<Lifeline, DriverError> {
        self.bus.lifeline(&*self.xen)
    }

    /// Waits for a change, for at most `limit`.
    ///
    /// # Errors
    /// When xenstore is gone, or the new size makes no sense.
    pub fn changed(&mut self, limit: Duration) -> Result<Option<Change>, DriverError> {
        let deadline = Instant::now() + limit;
        while self.bus.event(Some(deadline.saturating_duration_since(Instant::now())))? {
            match self.bus.back_state()? {
                XenbusState::Connected => {
                    let before = self.info.capacity;
                    if self.refresh()?.capacity != before {
                        return Ok(Some(Change::Resized(self.info.capacity)));
                    }
                }
                XenbusState::Closing | XenbusState::Closed | XenbusState::Unknown => return Ok(Some(Change::Closing)),
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
    pub fn refresh(&mut self) -> Result<&Info, DriverError> {
        self.info.capacity = capacity(&self.bus.keys(&[keys::SECTORS])?)?;
        Ok(&self.info)
    }

    /// Ends the connection: the back-end uses the rings and pages no more. A new one may [start](Self::connect).
    ///
    /// # Errors
    /// When the back-end does not answer in time.
    pub fn stop(mut self, sets: Vec<QueueSet>) -> Result<(), DriverError> {
        let closed = self.bus.close();
        drop(sets);
        closed
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("bus", &self.bus).field("info", &self.info).finish_non_exhaustive()
    }
}

fn make(xen: &dyn Xen, backend: DomainId, pages: u32, abi: Abi) -> Result<Made, DriverError> {
    let shared = xen.share(backend, pages, true)?;
    let ring = BlkifRing::resolve(&shared.memory, GuestAddress(0), pages, abi)?;
    Ok(Made { front: FrontRing::init(ring), port: xen.alloc_unbound(backend)?, pages: shared })
}

/// Deals the rings to the threads. The data of a thread's queues is one memory.
fn sets(options: &Options, backend: DomainId, info: &Info, rings: Vec<Made>) -> Result<Vec<QueueSet>, DriverError> {
    let mut dealt: Vec<Vec<Made>> = (0..options.threads).map(|_| vec![]).collect();
    for (index, ring) in rings.into_iter().enumerate() {
        dealt[index % usize::from(options.threads)].push(ring);
    }
    dealt.into_iter().map(|rings| set(options, backend, info, rings)).collect()
}

fn set(options: &Options, backend: DomainId, info: &Info, rings: Vec<Made>) -> Result<QueueSet, DriverError> {
    let pages = options.data_pages();
    let all = pages.checked_mul(rings.len() as u64).and_then(|all| u32::try_from(all).ok());
    let too_many = || DriverError::Option {
        field: "data memory",
        found: options.data_per_queue.0,
        expected: "fewer than 2^32 pages for the queues of a thread".to_owned(),
    };
    let data = options.xen.share(backend, all.ok_or_else(too_many)?, true)?;
    let refs: Arc<[_]> = data.refs.into();
    let keeper: Keeper = Arc::from(data.guard);
    let queues = (0..).zip(rings).map(|(place, ring)| {
        let depth = options.depth.clamp(1, ring.front.size() as u16);
        let (tables, tables_keeper) = tables(options, backend, info, depth)?;
        let Made { pages: own, port, front } = ring;
        let keepers = [Arc::from(own.guard)].into_iter().chain([Arc::clone(&keeper)]).chain(tables_keeper);
        let len = pages * u64::from(PAGE_BYTES);
        let queue = Queue::new(Parts {
            ring: front,
            channel: port.channel,
            handle: handle(&options.path),
            depth,
            composer: Composer::new(Arc::clone(&refs), tables, info.segments),
            memory: Arc::clone(&data.memory),
            data: DataArea { start: GuestAddress(place * len), len: ByteLen(len) },
            keepers: keepers.collect(),
        });
        Ok((queue, port.descriptor))
    });
    let queues = queues.collect::<Result<Vec<_>, DriverError>>()?;
    QueueSet::new(queues).map_err(|source| DriverError::Host { what: "epoll", source })
}

/// Pages of segments for a queue, if its requests may have more than they hold.
fn tables(
    options: &Options,
    backend: DomainId,
    info: &Info,
    depth: u16,
) -> Result<(Option<Tables>, Option<Keeper>), DriverError> {
    if usize::from(info.segments) <= MAX_SEGMENTS {
        return Ok((None, None));
    }
    let per_id = Tables::per_id(info.segments);
    let shared = options.xen.share(backend, per_id * u32::from(depth), true)?;
    Ok((Some(Tables::new(&shared.memory, &shared.refs, per_id)), Some(Arc::from(shared.guard))))
}

/// What Linux writes there: the low bits of the device's number.
fn handle(path: &str) -> u16 {
    path.rsplit('/').next().and_then(|devid| devid.parse::<u32>().ok()).unwrap_or(0) as u16
}
