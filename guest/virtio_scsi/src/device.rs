//! The controller as a transport sees it, and its control operations.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use mqblk_core::units::SECTOR_BYTES;
use mqblk_core::{ByteLen, DiskSlot, Wake};
use mqblk_scsi::reservation::Ticket;
use mqblk_scsi::{Attention, Nexus, TaskSet};
use mqblk_virtio::features::RING_FEATURES;
use mqblk_virtio::{Apply, GuestLane, QueueParts, QueueRole, VirtioDevice};
use virtio_bindings::virtio_scsi as b;

use crate::commands::RequestQueue;
use crate::config::{ConfigSpace, Sizes, features};
use crate::control::ControlQueue;
use crate::events::{Event, EventQueue, Events};
use crate::orders::{Action, Posts, Scope};
use crate::queue::{Kind, Ring, ScsiQueue};
use crate::resuming::Resuming;
use crate::state;
use crate::units::{Place, PlaceTaken, Unit, Units};

/// Number of queues before the request queues: control and event.
pub const FIXED_QUEUES: u16 = 2;

/// User settings of a controller.
#[derive(Clone, Copy, Debug)]
pub struct ScsiOptions {
    /// Number of request queues.
    pub queues: u16,
    /// Maximum ring size.
    pub queue_size: u16,
    /// Reported maximum number of commands queued to one logical unit.
    pub cmd_per_lun: u32,
    /// Reported maximum transfer length.
    pub max_transfer: ByteLen,
}

/// A virtio-scsi controller. Logical units can be added and removed while it is served.
pub struct VirtioScsi {
    options: ScsiOptions,
    negotiated: AtomicU64,
    sense_size: AtomicU32,
    cdb_size: AtomicU32,
    /// Since the last reset no queue has stopped, and none has started that its driver had used before.
    fresh: AtomicBool,
    /// A queue has started since the process did.
    began: AtomicBool,
    /// No queue had started at the last reset.
    first: AtomicBool,
    units: Mutex<Arc<Units>>,
    /// Generation of `lun_map`, read without its lock.
    generation: AtomicU64,
    pub(crate) posts: Posts,
    resuming: Resuming,
    events: Arc<Events>,
}

impl VirtioScsi {
    /// Returns a controller without logical units.
    pub fn new(options: ScsiOptions) -> VirtioScsi {
        VirtioScsi {
            options,
            negotiated: AtomicU64::new(0),
            sense_size: AtomicU32::new(Sizes::DEFAULT.sense),
            cdb_size: AtomicU32::new(Sizes::DEFAULT.cdb),
            fresh: AtomicBool::new(true),
            began: AtomicBool::new(false),
            first: AtomicBool::new(true),
            units: Mutex::default(),
            generation: AtomicU64::new(0),
            posts: Posts::default(),
            resuming: Resuming::default(),
            events: Arc::default(),
        }
    }

    pub(crate) fn config(&self) -> ConfigSpace {
        ConfigSpace {
            queues: self.options.queues,
            // Request and response take two descriptors.
            seg_max: u32::from(self.options.queue_size.clamp(3, 128) - 2),
            max_sectors: u32::try_from(self.options.max_transfer.0 / SECTOR_BYTES).unwrap_or(u32::MAX),
            cmd_per_lun: self.options.cmd_per_lun,
            sizes: self.sizes(),
        }
    }

    pub(crate) fn sizes(&self) -> Sizes {
        Sizes { sense: self.sense_size.load(Ordering::Relaxed), cdb: self.cdb_size.load(Ordering::Relaxed) }
    }

    pub(crate) fn set_sizes(&self, sizes: Sizes) {
        self.sense_size.store(sizes.sense, Ordering::Relaxed);
        self.cdb_size.store(sizes.cdb, Ordering::Relaxed);
    }

    /// Returns true if commands that compare must wait: see [`ReplayGate`].
    pub(crate) fn is_resuming(&self) -> bool {
        self.resuming.is_on()
    }

    /// Records that a command that had compared before a crash has requested its range lock.
    pub(crate) fn compared_is_back(&self) {
        if self.resuming.one_less() {
            self.posts.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Units>> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current LUN map.
    pub(crate) fn units(&self) -> Arc<Units> {
        Arc::clone(&self.lock())
    }

    /// Returns true if a copy of the LUN map is current.
    #[inline]
    pub(crate) fn is_current(&self, units: &Units) -> bool {
        self.generation.load(Ordering::Acquire) == units.generation
    }

    /// Changes the LUN map.
    fn change<R>(&self, change: impl FnOnce(&mut Units) -> R) -> R {
        let mut guard = self.lock();
        let mut units = Units::clone(&guard);
        let result = change(&mut units);
        self.generation.store(units.generation, Ordering::Release);
        *guard = Arc::new(units);
        result
    }

    /// Adds a logical unit and notifies the driver. Its disk is open in `slot` of the controller's request queues.
    ///
    /// # Errors
    /// If the address has a logical unit.
    pub fn map(self: &Arc<Self>, address: Place, slot: DiskSlot, nexus: Arc<Nexus>) -> Result<(), PlaceTaken> {
        let tasks = Arc::new(UnitTasks { controller: Arc::downgrade(self), slot });
        self.change(|units| units.insert(Unit { place: address, slot, nexus: Arc::clone(&nexus) }))?;
        nexus.set_tasks(Some(tasks));
        self.luns_changed(address);
        self.tell(Event::Appeared(address));
        Ok(())
    }

    /// Removes a logical unit and notifies the driver. When this returns, none of its commands is in flight. Returns
    /// the slot of its disk, or `None` if the address has no logical unit.
    pub fn unmap(&self, address: Place) -> Option<DiskSlot> {
        let unit = self.change(|units| units.remove(address))?;
        unit.nexus.set_tasks(None);
        self.posts.give_and_wait(Scope::Unit(unit.slot), Action::End(b::VIRTIO_SCSI_S_BAD_TARGET as u8));
        self.luns_changed(address);
        self.tell(Event::Removed(address));
        Some(unit.slot)
    }

    /// Notifies the driver that the size of a logical unit changed.
    pub fn resized(&self, address: Place) {
        self.tell(Event::Resized(address));
    }

    /// Raises REPORTED LUNS DATA HAS CHANGED on the other logical units of the target.
    fn luns_changed(&self, address: Place) {
        for unit in self.units().iter().filter(|unit| unit.place.target == address.target && unit.place != address) {
            unit.nexus.attention(Attention::ReportedLunsChanged);
        }
    }

    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Records that the driver continues with unchanged logical units and that their unit attentions are news to it:
    /// a queue that it used before and that starts later does not clear them.
    pub(crate) fn go_on(&self) {
        self.fresh.store(false, Ordering::Relaxed);
    }

    pub(crate) fn tell(&self, event: Event) {
        let negotiated = self.negotiated.load(Ordering::Relaxed);
        // A driver that continues uses the event queue before its features are set again.
        if negotiated & event.feature() != 0 || (negotiated == 0 && self.events.is_listened_to()) {
            self.events.post(event);
        }
    }
}

/// Aborts a nexus's commands for another nexus that preempts it.
#[derive(Debug)]
struct UnitTasks {
    controller: Weak<VirtioScsi>,
    slot: DiskSlot,
}

impl TaskSet for UnitTasks {
    fn abort(&self, done: Arc<dyn Wake>) -> Arc<Ticket> {
        let ticket = Ticket::new(done);
        match self.controller.upgrade() {
            Some(controller) => {
                let action = Action::End(b::VIRTIO_SCSI_S_ABORTED as u8);
                controller.posts.give(Scope::Unit(self.slot), action, Arc::new(Resolve(Arc::clone(&ticket))));
            }
            // Without a controller there are no commands.
            None => ticket.resolve(Ok(())),
        }
        ticket
    }
}

/// Waker that resolves a ticket.
struct Resolve(Arc<Ticket>);

impl Wake for Resolve {
    fn wake(&self) {
        self.0.resolve(Ok(()));
    }
}

impl std::fmt::Debug for VirtioScsi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtioScsi").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<C: GuestLane> VirtioDevice<C> for VirtioScsi {
    type Queue = ScsiQueue<C>;

    fn features(&self) -> u64 {
        features::HOTPLUG | features::CHANGE | RING_FEATURES
    }

    fn set_features(&self, accepted: u64) {
        self.negotiated.store(accepted, Ordering::Relaxed);
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        mqblk_virtio::read_space(&self.config().bytes(), offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        self.config().written(offset, bytes).map(|sizes| self.set_sizes(sizes))
    }

    fn reset(&self) {
        self.negotiated.store(0, Ordering::Relaxed);
        self.fresh.store(true, Ordering::Relaxed);
        self.first.store(!self.began.load(Ordering::Relaxed), Ordering::Relaxed);
        self.set_sizes(Sizes::DEFAULT);
        self.events.reset();
    }

    fn driver_begins(&self, resumed: bool) {
        if !resumed {
            for unit in self.units().iter() {
                unit.nexus.initiator_reset();
                unit.nexus.unit().resume_ended();
            }
        }
    }

    fn queue_stopped(&self) {
        self.go_on();
    }

    fn resumes(&self, queues: &[u16]) {
        let requests = queues.iter().copied().filter(|queue| *queue >= FIXED_QUEUES);
        self.resuming.begin(requests.collect());
    }

    fn resume_ended(&self) {
        if self.resuming.give_up() {
            self.posts.wake();
        }
        self.units().iter().for_each(|unit| unit.nexus.unit().resume_ended());
    }

    fn configured(&self) -> u64 {
        let Sizes { sense, cdb } = self.sizes();
        u64::from(sense) << 32 | u64::from(cdb)
    }

    fn restore(&self, configured: u64) {
        let (sense, cdb) = ((configured >> 32) as u32, configured as u32);
        if configured != 0
            && let Ok(sizes) = self.config().with_sizes(Sizes { sense, cdb })
        {
            self.set_sizes(sizes);
        }
    }

    fn kind(&self) -> &'static str {
        "virtio-scsi"
    }

    fn save_state(&self) -> String {
        state::save(self)
    }

    fn load_state(self: &Arc<Self>, state: &str) -> Result<Apply, String> {
        state::load(self, state)
    }

    fn queues(&self) -> u16 {
        FIXED_QUEUES + self.options.queues
    }

    fn role(&self, index: u16) -> QueueRole {
        if index < FIXED_QUEUES { QueueRole::Control } else { QueueRole::Requests }
    }

    fn max_ring_size(&self) -> u16 {
        self.options.queue_size
    }

    fn queue(self: &Arc<Self>, index: u16, parts: QueueParts) -> ScsiQueue<C> {
        let QueueParts { ring, lease, call, features, waker } = parts;
        if ring.is_resumed() && self.fresh.swap(false, Ordering::Relaxed) {
            // The guest has not rebooted: the process that served it before has ended.
            let elsewhere = self.first.load(Ordering::Relaxed);
            self.units().iter().for_each(|unit| unit.nexus.resumed(elsewhere));
        }
        self.began.store(true, Ordering::Relaxed);
        if self.resuming.queue_is_back(index, ring.noted_steps()) {
            self.posts.wake();
        }
        let ring = Ring { device: ring, lease, call };
        ScsiQueue::new(match index {
            0 => Kind::Control(Box::new(ControlQueue::new(Arc::clone(self), ring, waker))),
            1 => Kind::Event(Box::new(EventQueue::new(ring, features, Arc::clone(&self.events), waker))),
            _ => Kind::Request(Box::new(RequestQueue::new(Arc::clone(self), ring, waker))),
        })
    }
}
