//! The controller: its logical units, the state that its driver sets, and its control operations.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use mqblk_core::lock::lock;
use mqblk_core::units::SECTOR_BYTES;
use mqblk_core::{ByteLen, DiskSlot, Wake};
use mqblk_scsi::reservation::Ticket;
use mqblk_scsi::{Nexus, TaskSet, UnitAttention};
use virtio_bindings::virtio_scsi as b;

use crate::config::{ConfigSpace, DriverSizes};
use crate::events::{Events, ScsiEvent};
use crate::lun_map::{LunAddress, LunInUse, LunMap, MappedUnit};
use crate::replay_gate::ReplayGate;
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
    pub(crate) options: ScsiOptions,
    pub(crate) negotiated: AtomicU64,
    sense_size: AtomicU32,
    cdb_size: AtomicU32,
    /// True if no queue has stopped and no driver has resumed since the last reset.
    pub(crate) unused_since_reset: AtomicBool,
    /// True if a queue has started since the process did.
    pub(crate) has_started: AtomicBool,
    /// True if no queue had started at the last reset.
    pub(crate) reset_before_start: AtomicBool,
    lun_map: Mutex<Arc<LunMap>>,
    /// Generation of `lun_map`, read without its lock.
    map_generation: AtomicU64,
    pub(crate) tmf_mailboxes: TmfMailboxes,
    pub(crate) replay_gate: ReplayGate,
    pub(crate) events: Arc<Events>,
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

    /// Records that the driver continues with unchanged logical units and that their unit attentions are new to it: a
    /// queue that it used before and that starts later does not clear them.
    pub(crate) fn driver_resumed(&self) {
        self.unused_since_reset.store(false, Ordering::Relaxed);
    }

    /// Clears the unit attentions that would report a restart to the driver: the guest has not rebooted, the process
    /// that served it before has ended.
    pub(crate) fn resume_initiator(&self) {
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
