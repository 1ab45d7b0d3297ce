//! The device of the target `blkif`: its rings on a stepped worker of a simulated Xen host, stopped and restarted.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use mqblk_blkif::journal::Journal;
use mqblk_blkif::{BlkifQueue, DEFAULT_PERSISTENT_MAX, GrantBudget, GrantMode, PoolScope, RingParts, Vbd, VbdOptions};
use mqblk_core::{ByteLen, DiskSlot, EventChannel};
use mqblk_engine::{
    AnyDisk, Kick, PlugOptions, PollPolicy, QueueDisk, QueueFault, QueueOptions, SteppedQueue, SteppedWorker,
    UringOptions,
};
use mqblk_memory::{GrantAccess, GrantRef, GuestAddress, PageArena, PageSlot, create_memfd};
use mqblk_ring::blkif::{Abi, BackRing, BlkifRing};
use mqblk_xen::EventPort;

use crate::blkif_guest::requests::{DeviceRules, PageAccess, SECTOR, SECTORS};
use crate::blkif_guest::{BlkifGuest, BlkifMemory, GuestRing, HostileGrants, SharedGuest, lock};
use crate::memory_disk::open_memory_disk;
use crate::xen_host::{GUEST, HOST, XenHost};

/// Turns within which a batch must be complete.
pub(crate) const TURNS: usize = 1000;

/// Sends events to the guest, and counts them.
struct CountEvents {
    inner: Box<dyn EventChannel>,
    sent: Arc<AtomicU64>,
}

impl EventChannel for CountEvents {
    fn notify(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
        self.inner.notify();
    }

    fn take(&self) {
        self.inner.take();
    }

    fn unmask(&self) {
        self.inner.unmask();
    }
}

/// A ring's pages as the backend maps them.
struct MappedRing {
    arena: PageArena,
    grants: Box<dyn GrantAccess>,
}

impl MappedRing {
    fn new(host: &XenHost, ring: &GuestRing) -> MappedRing {
        let arena = PageArena::reserve(ring.page_count as u32).expect("addresses");
        let mut grants = host.host.grants(GUEST).expect("the machine runs");
        let refs: Vec<_> = (0..ring.page_count).map(|page| GrantRef(ring.pages.gref(page))).collect();
        grants.map(&arena, PageSlot(0), &refs, true).expect("a ring's grants");
        MappedRing { arena, grants }
    }

    fn resolve(&self, abi: Abi) -> BlkifRing {
        BlkifRing::resolve(self.arena.memory(), GuestAddress(0), self.arena.pages(), abi).expect("a ring")
    }
}

impl Drop for MappedRing {
    fn drop(&mut self) {
        self.grants.unmap(&self.arena, PageSlot(0)).expect("a ring that is mapped");
    }
}

/// A ring's backend.
pub(crate) struct RingBackend {
    queue: Option<SteppedQueue>,
    /// The guest's end of the event channel.
    pub(crate) port: EventPort,
    journal: File,
    pub(crate) sent: Arc<AtomicU64>,
    broken: Arc<Mutex<Vec<String>>>,
}

impl RingBackend {
    fn new(host: &XenHost) -> RingBackend {
        RingBackend {
            queue: None,
            port: host.guest.alloc_unbound(HOST).expect("a port"),
            journal: create_memfd("journal", 0).expect("a memfd"),
            sent: Arc::default(),
            broken: Arc::default(),
        }
    }

    pub(crate) fn reasons(&self) -> Vec<String> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Differences between devices, other than the rules of their requests.
#[derive(Clone, Copy)]
pub(crate) struct DeviceSetup {
    mode: GrantMode,
    pins_memory: bool,
    pub(crate) persistent_max: u32,
    pub(crate) budget: u64,
    pool: PoolScope,
    write_through: bool,
    journal: bool,
    /// The backend sleeps, and must be woken by events.
    pub(crate) sleeps: bool,
}

/// The device and its guest.
pub(crate) struct BlkifMachine {
    pub(crate) worker: SteppedWorker,
    pub(crate) backends: Vec<RingBackend>,
    pub(crate) vbd: Arc<Vbd>,
    disk: Arc<AnyDisk>,
    pub(crate) guest: SharedGuest,
    pub(crate) rules: DeviceRules,
    pub(crate) setup: DeviceSetup,
    /// The expected content of the disk.
    pub(crate) model: Vec<u8>,
    /// The worker has armed all rings and would sleep.
    pub(crate) asleep: bool,
    pub(crate) host: XenHost,
}

fn choose_device(u: &mut Unstructured<'_>) -> Result<(DeviceRules, DeviceSetup)> {
    let modes = [
        (PageAccess::Copy, GrantMode::Copy),
        (PageAccess::Map, GrantMode::Map),
        (PageAccess::Persistent, GrantMode::Persistent),
        (PageAccess::PersistentBounce, GrantMode::Persistent),
    ];
    let (access, mode) = *u.choose(&modes)?;
    let maps_enough = !u.ratio(1, 3)?;
    let read_only = u.ratio(1, 8)?;
    let rules = DeviceRules {
        abi: *u.choose(&Abi::ALL)?,
        block: if u.ratio(1, 4)? { 8 } else { 1 },
        read_only,
        max_indirect: *u.choose(&[520, 520, 64, 8, 0])?,
        barrier: !u.ratio(1, 4)?,
        flush: !u.ratio(1, 4)?,
        // A read-only disk does not offer discard.
        discard: !u.ratio(1, 4)? && !read_only,
        access,
        maps_enough,
        size: SECTORS,
    };
    let setup = DeviceSetup {
        mode,
        pins_memory: access == PageAccess::PersistentBounce,
        persistent_max: if maps_enough { DEFAULT_PERSISTENT_MAX } else { u.int_in_range(0..=40)? },
        budget: if maps_enough { 1 << 20 } else { u.int_in_range(0..=60)? },
        pool: if u.ratio(1, 4)? { PoolScope::Shared } else { PoolScope::PerRing },
        write_through: u.arbitrary()?,
        journal: u.arbitrary()?,
        sleeps: u.arbitrary()?,
    };
    Ok((rules, setup))
}

impl BlkifMachine {
    pub(crate) fn new(u: &mut Unstructured<'_>) -> Result<BlkifMachine> {
        let (rules, setup) = choose_device(u)?;
        let rings = if u.ratio(1, 3)? { 2 } else { 1 };
        let host = XenHost::new();
        let disk = open_memory_disk(SECTORS as usize * SECTOR, rules.block as usize * SECTOR, rules.read_only);
        let mut guest_rings = vec![];
        for _ in 0..rings {
            let pages = 1 << *u.choose(&[0, 0, 0, 1, 2, 4])?;
            let start = if u.ratio(1, 3)? { 0_u32.wrapping_sub(u.int_in_range(0..=40)?) } else { 0 };
            guest_rings.push(GuestRing::new(&*host.guest, pages, rules.abi, start));
        }
        let guest = BlkifGuest::new(BlkifMemory::new(&host), guest_rings);
        let options = UringOptions { submissions: 64, in_flight: 128, files: 4, buffers: 4 };
        let worker = SteppedWorker::new(options).expect("the host has io_uring");
        let backends = (0..rings).map(|_| RingBackend::new(&host)).collect();
        let vbd = Vbd::new(vbd_options(&rules, &setup, &*disk, rings as u16));
        let model = vec![0; SECTORS as usize * SECTOR];
        let mut machine = BlkifMachine { worker, backends, vbd, disk, guest, rules, setup, model, asleep: false, host };
        (0..rings).for_each(|ring| machine.attach(ring, false));
        Ok(machine)
    }

    /// Attaches a ring to the worker. `resume`: it was served before.
    fn attach(&mut self, ring: usize, resume: bool) {
        let BlkifMachine { worker, backends, vbd, disk, guest, rules, setup, host, .. } = self;
        let backend = &mut backends[ring];
        let mapped = MappedRing::new(host, &lock(guest).rings[ring]);
        let (mut back, identity) = (BackRing::attach(mapped.resolve(rules.abi)), ring as u64);
        let journal = setup.journal.then(|| {
            if !resume {
                return Journal::create(&backend.journal, back.size(), identity, back.position()).expect("a journal");
            }
            let resumed = Journal::resume(&backend.journal, back.size(), identity, back.published());
            let (journal, recovery) = resumed.expect("the journal of a ring that was drained");
            assert_eq!(recovery.replay.len(), 0, "a drained ring has nothing to replay");
            assert_eq!(recovery.position, back.position(), "where a drained ring is");
            back = BackRing::new(mapped.resolve(rules.abi), recovery.position);
            journal
        });
        let port = host.host.bind_interdomain(GUEST, backend.port.port).expect("the guest's port");
        let (kick, channel) = (Kick::from(port.descriptor), port.channel);
        let reasons = Arc::clone(&backend.broken);
        let plug = PlugOptions::default();
        let options = QueueOptions {
            disks: vec![QueueDisk { slot: DiskSlot::FIRST, disk: Arc::clone(disk), plug, health: Arc::default() }],
            kick: setup.sleeps.then_some(kick),
            policy: if setup.sleeps { PollPolicy::Off } else { PollPolicy::Busy }.into(),
            paused: false,
            on_fault: Box::new(move |fault| {
                if let QueueFault::BrokenRing(why) = fault {
                    reasons.lock().unwrap_or_else(PoisonError::into_inner).push(why.to_owned());
                }
            }),
        };
        let grants = HostileGrants {
            inner: host.host.grants(GUEST).expect("the machine runs"),
            guest: Arc::clone(guest),
            ring,
            own_pool: setup.pool == PoolScope::PerRing,
        };
        let sent = Arc::clone(&backend.sent);
        let attached = worker.attach(options, |waker| {
            let parts = RingParts {
                ring: back,
                grants: Box::new(grants),
                channel: Box::new(CountEvents { inner: channel, sent }),
                waker: Arc::clone(waker),
                journal,
                replay: vec![],
                fence: None,
                guard: Some(Box::new(mapped)),
            };
            BlkifQueue::open(Arc::clone(vbd), parts).map_err(|error| error.to_string())
        });
        backend.queue = Some(attached.expect("a free slot"));
    }

    /// Detaches all rings, and checks that no resource of the guest is in use.
    fn detach(&mut self) {
        for backend in &mut self.backends {
            let queue = backend.queue.take().expect("an attached ring");
            self.worker.drain(queue);
            for _ in 0..TURNS {
                if !self.worker.serves(queue) {
                    break;
                }
                self.worker.turn();
            }
            assert!(!self.worker.serves(queue), "nothing is in flight");
        }
        let (mapped, _, ports) = self.host.in_use();
        assert_eq!((mapped, ports), (0, self.backends.len() as u64), "mapped pages and open ports of a closed device");
        assert_eq!(self.vbd.options().budget.used(), 0, "pages of the budget");
    }

    /// Stops the rings and restarts them at their positions.
    pub(crate) fn restart(&mut self) {
        self.detach();
        let rings = self.backends.len();
        self.vbd = Vbd::new(vbd_options(&self.rules, &self.setup, &*self.disk, rings as u16));
        self.vbd.set_size(ByteLen(self.rules.size * SECTOR as u64));
        (0..rings).for_each(|ring| self.attach(ring, true));
        self.asleep = false;
    }

    /// Ends the device and the guest's grants.
    pub(crate) fn end(mut self) {
        self.detach();
        let BlkifMachine { worker, backends, guest, host, .. } = self;
        drop((worker, backends, guest));
        assert_eq!(host.in_use(), (0, 0, 0), "mapped pages, grants and ports at the end");
    }
}

fn vbd_options(rules: &DeviceRules, setup: &DeviceSetup, disk: &AnyDisk, rings: u16) -> VbdOptions {
    let mut limits = disk.limits();
    limits.pins_memory = setup.pins_memory;
    VbdOptions {
        geometry: disk.geometry(),
        limits,
        abi: rules.abi,
        persistent: setup.mode == GrantMode::Persistent,
        max_indirect_segments: rules.max_indirect,
        discard: rules.discard,
        discard_secure: false,
        barrier: rules.barrier,
        flush: rules.flush,
        write_through: setup.write_through,
        mode: setup.mode,
        pages_may_be_pinned: false,
        pool: setup.pool,
        budget: GrantBudget::new(setup.budget, mqblk_core::MappingBudget::of_process()),
        persistent_max: setup.persistent_max,
        persistent_idle: Duration::ZERO,
        rings,
    }
}
