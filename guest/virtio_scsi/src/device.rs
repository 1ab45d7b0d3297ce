//! The controller as a transport sees it, and its control operations.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use mqblk_core::lock::lock;
use mqblk_core::units::SECTOR_BYTES;
use mqblk_core::{ByteLen, DiskSlot, Wake};
use mqblk_scsi::reservation::Ticket;
use mqblk_scsi::{Nexus, TaskSet, UnitAttention};
use mqblk_virtio::features::RING_FEATURES;
use mqblk_virtio::{ApplyState, GuestContext, QueueResources, QueueRole, VirtioDevice};
use virtio_bindings::virtio_scsi as b;

use crate::commands::RequestQueue;
use crate::config::{ConfigSpace, DriverSizes, features};
use crate::control::ControlQueue;
use crate::events::{EventQueue, Events, ScsiEvent};
use crate::lun_map::{LunAddress, LunInUse, LunMap, MappedUnit};
use crate::queue::{QueueKind, QueueRing, ScsiQueue};
use crate::replay_gate::ReplayGate;
use crate::state;
use crate::task_management::{TmfAction, TmfMailboxes, TmfScope};

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
    /// Since the last reset no queue has stopped, and no driver has resumed.
    unused_since_reset: AtomicBool,
    /// A queue has started since the process did.
    has_started: AtomicBool,
    /// No queue had started at the last reset.
    reset_before_start: AtomicBool,
    lun_map: Mutex<Arc<LunMap>>,
    /// Generation of `lun_map`, read without its lock.
    map_generation: AtomicU64,
    pub(crate) tmf_mailboxes: TmfMailboxes,
    replay_gate: ReplayGate,
    events: Arc<Events>,
}

impl VirtioScsi {
    /// Returns a controller without logical units.
    pub fn new(options: ScsiOptions) -> VirtioScsi {
        VirtioScsi {
            options,
            negotiated: AtomicU64::new(0),
            sense_size: AtomicU32::new(DriverSizes::DEFAULT.sense),
            cdb_size: AtomicU32::new(DriverSizes::DEFAULT.cdb),
            unused_since_reset: AtomicBool::new(true),
            has_started: AtomicBool::new(false),
            reset_before_start: AtomicBool::new(true),
            lun_map: Mutex::default(),
            map_generation: AtomicU64::new(0),
            tmf_mailboxes: TmfMailboxes::default(),
            replay_gate: ReplayGate::default(),
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

    pub(crate) fn sizes(&self) -> DriverSizes {
        DriverSizes { sense: self.sense_size.load(Ordering::Relaxed), cdb: self.cdb_size.load(Ordering::Relaxed) }
    }

    pub(crate) fn set_sizes(&self, sizes: DriverSizes) {
        self.sense_size.store(sizes.sense, Ordering::Relaxed);
        self.cdb_size.store(sizes.cdb, Ordering::Relaxed);
    }

    /// Returns true if commands that compare must wait: see [`ReplayGate`].
    pub(crate) fn is_replaying(&self) -> bool {
        self.replay_gate.is_active()
    }

    /// Records that a command that had compared before a crash has requested its range lock.
    pub(crate) fn replayed_command_locked(&self) {
        if self.replay_gate.command_locked() {
            self.tmf_mailboxes.wake_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<LunMap>> {
        lock(&self.lun_map)
    }

    /// Returns the current LUN map.
    pub(crate) fn lun_map(&self) -> Arc<LunMap> {
        Arc::clone(&self.lock())
    }

    /// Returns true if a copy of the LUN map is current.
    #[inline]
    pub(crate) fn is_map_current(&self, units: &LunMap) -> bool {
        self.map_generation.load(Ordering::Acquire) == units.generation
    }

    /// Changes the LUN map.
    fn change_map<R>(&self, change: impl FnOnce(&mut LunMap) -> R) -> R {
        let mut guard = self.lock();
        let mut units = LunMap::clone(&guard);
        let result = change(&mut units);
        self.map_generation.store(units.generation, Ordering::Release);
        *guard = Arc::new(units);
        result
    }

    /// Adds a logical unit and notifies the driver. Its disk is open in `slot` of the controller's request queues.
    ///
    /// # Errors
    /// If the address has a logical unit.
    pub fn map(self: &Arc<Self>, address: LunAddress, slot: DiskSlot, nexus: Arc<Nexus>) -> Result<(), LunInUse> {
        let tasks = Arc::new(UnitTasks { controller: Arc::downgrade(self), slot });
        self.change_map(|units| units.insert(MappedUnit { address, slot, nexus: Arc::clone(&nexus) }))?;
        nexus.set_task_set(Some(tasks));
        self.raise_luns_changed(address);
        self.post_event(ScsiEvent::Appeared(address));
        Ok(())
    }

    /// Removes a logical unit and notifies the driver. When this returns, none of its commands is in flight. Returns
    /// the slot of its disk, or `None` if the address has no logical unit.
    pub fn unmap(&self, address: LunAddress) -> Option<DiskSlot> {
        let unit = self.change_map(|units| units.remove(address))?;
        unit.nexus.set_task_set(None);
        self.tmf_mailboxes
            .submit_and_wait(TmfScope::LogicalUnit(unit.slot), TmfAction::Abort(b::VIRTIO_SCSI_S_BAD_TARGET as u8));
        self.raise_luns_changed(address);
        self.post_event(ScsiEvent::Removed(address));
        Some(unit.slot)
    }

    /// Notifies the driver that the size of a logical unit changed.
    pub fn notify_resized(&self, address: LunAddress) {
        self.post_event(ScsiEvent::Resized(address));
    }

    /// Raises REPORTED LUNS DATA HAS CHANGED on the other logical units of the target.
    fn raise_luns_changed(&self, address: LunAddress) {
        for unit in
            self.lun_map().iter().filter(|unit| unit.address.target == address.target && unit.address != address)
        {
            unit.nexus.raise_attention(UnitAttention::ReportedLunsChanged);
        }
    }

    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Records that the driver continues with unchanged logical units and that their unit attentions are news to it:
    /// a queue that it used before and that starts later does not clear them.
    pub(crate) fn driver_resumed(&self) {
        self.unused_since_reset.store(false, Ordering::Relaxed);
    }

    /// Clears the unit attentions that would tell a driver of a restart: the guest has not rebooted, the process that served it before has ended.
    fn resume_initiator(&self) {
        if self.unused_since_reset.swap(false, Ordering::Relaxed) {
            let elsewhere = self.reset_before_start.load(Ordering::Relaxed);
            self.lun_map().iter().for_each(|unit| unit.nexus.initiator_resumed(elsewhere));
        }
    }

    pub(crate) fn post_event(&self, event: ScsiEvent) {
        let negotiated = self.negotiated.load(Ordering::Relaxed);
        // A driver that continues uses the event queue before its features are set again.
        if negotiated & event.feature() != 0 || (negotiated == 0 && self.events.has_driver()) {
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
                let action = TmfAction::Abort(b::VIRTIO_SCSI_S_ABORTED as u8);
                controller.tmf_mailboxes.submit(
                    TmfScope::LogicalUnit(self.slot),
                    action,
                    Arc::new(ResolveTicket(Arc::clone(&ticket))),
                );
            }
            // Without a controller there are no commands.
            None => ticket.resolve(Ok(())),
        }
        ticket
    }
}

/// Waker that resolves a ticket.
struct ResolveTicket(Arc<Ticket>);

impl Wake for ResolveTicket {
    fn wake(&self) {
        self.0.resolve(Ok(()));
    }
}

impl std::fmt::Debug for VirtioScsi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtioScsi").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<C: GuestContext> VirtioDevice<C> for VirtioScsi {
    type Queue = ScsiQueue<C>;

    fn features(&self) -> u64 {
        features::HOTPLUG | features::CHANGE | RING_FEATURES
    }

    fn set_features(&self, accepted: u64) {
        self.negotiated.store(accepted, Ordering::Relaxed);
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        mqblk_virtio::read_config_space(&self.config().bytes(), offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        self.config().apply_write(offset, bytes).map(|sizes| self.set_sizes(sizes))
    }

    fn reset(&self) {
        self.negotiated.store(0, Ordering::Relaxed);
        self.unused_since_reset.store(true, Ordering::Relaxed);
        self.reset_before_start.store(!self.has_started.load(Ordering::Relaxed), Ordering::Relaxed);
        self.set_sizes(DriverSizes::DEFAULT);
        self.events.reset();
    }

    fn driver_started(&self, resumed: bool) {
        if resumed {
            // Before any queue starts: one that the driver has not used yet may be the first.
            self.resume_initiator();
        } else {
            for unit in self.lun_map().iter() {
                unit.nexus.initiator_reset();
                unit.nexus.unit().end_replay();
            }
        }
    }

    fn queue_stopped(&self) {
        self.driver_resumed();
    }

    fn expect_replay(&self, queues: &[u16]) {
        let requests = queues.iter().copied().filter(|queue| *queue >= FIXED_QUEUES);
        self.replay_gate.begin(requests.collect());
    }

    fn end_replay_wait(&self) {
        if self.replay_gate.cancel() {
            self.tmf_mailboxes.wake_all();
        }
        self.lun_map().iter().for_each(|unit| unit.nexus.unit().end_replay());
    }

    fn config_bits(&self) -> u64 {
        let DriverSizes { sense, cdb } = self.sizes();
        u64::from(sense) << 32 | u64::from(cdb)
    }

    fn restore_config_bits(&self, configured: u64) {
        let (sense, cdb) = ((configured >> 32) as u32, configured as u32);
        if configured != 0
            && let Ok(sizes) = self.config().validate_sizes(DriverSizes { sense, cdb })
        {
            self.set_sizes(sizes);
        }
    }

    fn device_type(&self) -> &'static str {
        "virtio-scsi"
    }

    fn save_state(&self) -> String {
        state::save(self)
    }

    fn load_state(self: &Arc<Self>, state: &str) -> Result<ApplyState, String> {
        state::load(self, state)
    }

    fn num_queues(&self) -> u16 {
        FIXED_QUEUES + self.options.queues
    }

    fn queue_role(&self, index: u16) -> QueueRole {
        if index < FIXED_QUEUES { QueueRole::Control } else { QueueRole::Requests }
    }

    fn max_ring_size(&self) -> u16 {
        self.options.queue_size
    }

    fn create_queue(self: &Arc<Self>, index: u16, parts: QueueResources) -> ScsiQueue<C> {
        let QueueResources { ring, share, call, features, waker } = parts;
        if ring.is_resumed() {
            self.resume_initiator();
        }
        self.has_started.store(true, Ordering::Relaxed);
        if self.replay_gate.queue_started(index, ring.recorded_steps()) {
            self.tmf_mailboxes.wake_all();
        }
        let ring = QueueRing { device: ring, share, call };
        ScsiQueue::new(match index {
            0 => QueueKind::Control(Box::new(ControlQueue::new(Arc::clone(self), ring, waker))),
            1 => QueueKind::Event(Box::new(EventQueue::new(ring, features, Arc::clone(&self.events), waker))),
            _ => QueueKind::Request(Box::new(RequestQueue::new(Arc::clone(self), ring, waker))),
        })
    }
}
