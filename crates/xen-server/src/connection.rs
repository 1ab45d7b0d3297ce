//! Opens the rings that a frontend has published, and attaches them to workers.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mqblk_blkif::journal::{Journal, JournalSlot};
use mqblk_blkif::{BlkifQueue, RingParts, Vbd};
use mqblk_core::{DiskSlot, Wake};
use mqblk_engine::{Engine, Kick, QueueDisk, QueueFault, QueueHandle, QueueOptions, QueueSettings, UringContext};
use mqblk_memory::{DomainId, GrantAccess, GuestAddress, PageArena, PageSlot};
use mqblk_ring::blkif::{Abi, BackRing, BlkifRing, RawRequest};
use mqblk_xen::{EventPort, Xen, XenError};

use crate::frontend::{FrontendConfig, RingKeys, ring_identity};
use crate::journal_dir::JournalDir;
use crate::name::DeviceName;
use crate::storage::DiskBacking;

/// Time that a port of an earlier process may stay bound after the release of the device: the kernel closes it shortly
/// after.
const REBIND_TIME: Duration = Duration::from_secs(2);
const REBIND_INTERVAL: Duration = Duration::from_millis(5);

/// A ring's pages, mapped until this is dropped.
struct MappedRing {
    arena: PageArena,
    grants: Box<dyn GrantAccess>,
}

impl MappedRing {
    fn map(xen: &dyn Xen, front: DomainId, ring: &RingKeys) -> Result<MappedRing, String> {
        let pages = ring.grefs.len() as u32;
        let arena = PageArena::reserve(pages).map_err(|error| format!("addresses for {pages} pages: {error}"))?;
        let mut grants = xen.grants(front).map_err(|error| error.to_string())?;
        let refs: Vec<u32> = ring.grefs.iter().map(|gref| gref.0).collect();
        grants.map(&arena, PageSlot(0), &ring.grefs, true).map_err(|error| {
            format!("ring-ref: found {refs:?}, which cannot be mapped ({error}), expected grants for us")
        })?;
        Ok(MappedRing { arena, grants })
    }

    fn resolve(&self, abi: Abi) -> Result<BlkifRing, String> {
        let memory = self.arena.memory();
        BlkifRing::resolve(memory, GuestAddress(0), self.arena.pages(), abi).map_err(|error| error.to_string())
    }
}

impl Drop for MappedRing {
    fn drop(&mut self) {
        if let Err(error) = self.grants.unmap(&self.arena, PageSlot(0)) {
            tracing::error!(%error, "cannot unmap a ring's pages");
        }
    }
}

/// The start of a ring: its position, and the requests to replay.
struct RingStart {
    ring: BackRing,
    journal: Option<Journal>,
    replay: Vec<(JournalSlot, RawRequest)>,
}

/// Called with the number of a ring and its fault.
pub(crate) type RingFaultHandler = Arc<dyn Fn(usize, QueueFault<'_>) + Send + Sync>;

/// Connects the rings of a device.
pub(crate) struct RingConnector<'a> {
    pub(crate) xen: &'a dyn Xen,
    pub(crate) engine: &'a Engine,
    pub(crate) name: &'a DeviceName,
    pub(crate) backing: &'a DiskBacking,
    /// Settings of the rings.
    pub(crate) queues: QueueSettings,
    pub(crate) journals: Option<&'a JournalDir>,
    /// The device's lock, if there is one.
    pub(crate) lock: Option<&'a Arc<OwnedFd>>,
    /// Time at which a stop ends its wait for storage; empty before a stop.
    pub(crate) stop_deadline: &'a OnceLock<Instant>,
    /// True if an earlier process served these rings.
    pub(crate) resume: bool,
    /// Called on a worker's thread with the frontend's faults.
    pub(crate) on_fault: RingFaultHandler,
}

/// Handle of a ring.
pub(crate) type RingHandle = QueueHandle<BlkifQueue<UringContext>>;

/// Handles of a device's rings.
pub(crate) type RingHandles = Vec<RingHandle>;

impl RingConnector<'_> {
    /// Attaches all rings to workers, or none.
    pub(crate) fn connect_all(&self, vbd: &Arc<Vbd>, published: &FrontendConfig) -> Result<RingHandles, String> {
        let mut handles = RingHandles::new();
        for (index, ring) in published.rings.iter().enumerate() {
            match self.connect_ring(vbd, published.abi, index, ring) {
                Ok(handle) => handles.push(handle),
                Err(why) => {
                    // Completes the requests of attached rings, including barriers that wait for the missing rings.
                    vbd.skip_unopened_rings();
                    for handle in handles {
                        self.detach(handle);
                    }
                    return Err(format!("ring {index}: {why}"));
                }
            }
        }
        Ok(handles)
    }

    /// Detaches a ring of a connection that was not completed.
    fn detach(&self, handle: RingHandle) {
        let end = || self.stop_deadline.get().copied();
        // If the worker is gone, nothing is in flight.
        let _ = handle.drain().and_then(|mut draining| match draining.wait_until(end, |_| {})? {
            Some(_) => Ok(()),
            None => draining.freeze().map(drop),
        });
    }

    fn bind(&self, keys: &RingKeys) -> Result<EventPort, XenError> {
        let end = Instant::now() + REBIND_TIME;
        loop {
            match self.xen.bind_interdomain(self.name.frontend_id, keys.port) {
                Err(_) if self.resume && Instant::now() < end => std::thread::sleep(REBIND_INTERVAL),
                bound => return bound,
            }
        }
    }

    fn connect_ring(&self, vbd: &Arc<Vbd>, abi: Abi, index: usize, keys: &RingKeys) -> Result<RingHandle, String> {
        let front = self.name.frontend_id;
        let pages = MappedRing::map(self.xen, front, keys)?;
        let start = self.start_ring(&pages, abi, index, keys)?;
        let port = self.bind(keys).map_err(|error| {
            let found = keys.port.0;
            format!("event-channel: found {found}, which cannot be bound ({error}), expected a port allocated for us")
        })?;
        let grants = self.xen.grants(front).map_err(|error| error.to_string())?;
        if self.resume {
            // The earlier process may have been killed before it sent the event for published responses.
            port.channel.notify();
        }
        let (on_fault, settings) = (Arc::clone(&self.on_fault), &self.queues);
        let options = QueueOptions {
            disks: vec![QueueDisk {
                slot: DiskSlot::FIRST,
                disk: Arc::clone(&self.backing.disk),
                plug: self.backing.plug,
                health: Arc::clone(&self.backing.health),
            }],
            kick: Some(Kick::from(port.descriptor)),
            policy: settings.policy,
            paused: false,
            on_fault: Box::new(move |fault| on_fault(index, fault)),
        };
        let (vbd, channel) = (Arc::clone(vbd), port.channel);
        let RingStart { ring, journal, replay } = start;
        let fence = self.lock.cloned();
        let open = move |waker: &Arc<dyn Wake>| {
            let (waker, guard) = (Arc::clone(waker), Some(Box::new(pages) as Box<dyn Any + Send>));
            BlkifQueue::open(vbd, RingParts { ring, grants, channel, waker, journal, replay, fence, guard })
                .map_err(|error| error.to_string())
        };
        let worker = self.queues.map.get(index).copied().unwrap_or_default();
        self.engine.attach(worker, options, open).map_err(|error| error.to_string())
    }

    /// Returns the start of the ring: from the journal of an earlier process if there is one, else from the ring's
    /// content.
    fn start_ring(&self, pages: &MappedRing, abi: Abi, index: usize, keys: &RingKeys) -> Result<RingStart, String> {
        let ring = BackRing::attach(pages.resolve(abi)?);
        let Some(journals) = self.journals else {
            self.warn_without_journal(&ring, index, "journals are off");
            return Ok(RingStart { ring, journal: None, replay: Vec::new() });
        };
        let file = journals.open(self.name, index).map_err(|error| error.to_string())?;
        let (entries, identity) =
            (ring.size(), ring_identity(self.name.frontend_id, self.name.devid, abi, index, keys));
        if self.resume {
            match Journal::resume(&file, entries, identity, ring.published()) {
                Ok((journal, recovery)) => {
                    tracing::info!(device = %self.name, ring = index, replayed = recovery.replay.len(), "ring resumed");
                    let ring = BackRing::new(pages.resolve(abi)?, recovery.position);
                    return Ok(RingStart { ring, journal: Some(journal), replay: recovery.replay });
                }
                Err(error) => self.warn_without_journal(&ring, index, &error.to_string()),
            }
        }
        let journal = Journal::create(&file, entries, identity, ring.position());
        let journal = journal.map_err(|error| format!("journal: {error}"))?;
        Ok(RingStart { ring, journal: Some(journal), replay: Vec::new() })
    }

    /// Warns that a ring is resumed from its content, which is correct only if no response was out of order.
    fn warn_without_journal(&self, ring: &BackRing, index: usize, why: &str) {
        if self.resume && ring.waiting() != Ok(0) {
            tracing::warn!(
                device = %self.name,
                ring = index,
                "requests without a response are read from the ring again, where responses may have replaced some: {why}"
            );
        }
    }
}
