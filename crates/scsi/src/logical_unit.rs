//! A logical unit: a disk as SCSI shows it, with the state that all its initiators share; and the path of each
//! initiator to it.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use mqblk_core::lock::lock;
use mqblk_core::{BlockSize, ByteLen, ByteOffset, Geometry, Limits, Wake};

use crate::block_limits::BlockLimits;
use crate::range_lock::RangeLocks;
use crate::reservation::{AccessClass, LoginError, NexusName, ReservationHandle, Reservations, Ticket};
use crate::unit_attention::{UnitAttention, UnitAttentionQueue};

/// Identification data of a logical unit. Text that is too long for its field is cut; characters other than printable
/// ASCII become spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// T10 vendor identification, 8 characters.
    pub vendor: String,
    /// Product identification, 16 characters.
    pub product: String,
    /// Product revision level, 4 characters.
    pub revision: String,
    /// Unit serial number, at most 64 characters.
    pub serial: String,
    /// Name from which the designators of VPD page 83h are made. It must be constant for the logical unit at any
    /// server and time, and different from any other logical unit's.
    pub name: String,
}

/// Parameters of a new [`LogicalUnit`].
#[derive(Debug)]
pub struct LogicalUnitOptions {
    /// Size, block sizes and alignment of the disk.
    pub geometry: Geometry,
    /// Limits of the disk.
    pub limits: Limits,
    /// Identification data.
    pub identity: Identity,
    /// True if writes may complete before they are durable (WCE of the caching mode page). An initiator can change
    /// this.
    pub writeback: bool,
    /// Its reservations: [`Reservations::new`], or those that [`Reservations::restore`] read back.
    pub reservations: Arc<Reservations>,
}

/// Bits of a logical unit's state, in one word so that a command loads one.
pub(crate) mod flag {
    /// START STOP UNIT stopped it.
    pub(crate) const STOPPED: u8 = 1;
    /// The disk is read-only.
    pub(crate) const READ_ONLY: u8 = 2;
    /// Control mode page, SWP.
    pub(crate) const SOFTWARE_PROTECTED: u8 = 4;
    /// Caching mode page, WCE = 0.
    pub(crate) const WRITE_THROUGH: u8 = 8;
    /// Control mode page, D_SENSE.
    pub(crate) const DESCRIPTOR_SENSE: u8 = 16;
}

/// A logical unit. Many threads use it concurrently; read and write commands only load from it.
#[derive(Debug)]
pub struct LogicalUnit {
    geometry: Geometry,
    limits: Limits,
    identity: Identity,
    block_limits: BlockLimits,
    size: AtomicU64,
    flags: AtomicU8,
    default_flags: u8,
    range_locks: Arc<RangeLocks>,
    reservations: Arc<Reservations>,
    nexuses: Mutex<Vec<Weak<Nexus>>>,
}

impl LogicalUnit {
    /// Returns a logical unit that is started and has no initiator.
    pub fn new(options: LogicalUnitOptions) -> LogicalUnit {
        let LogicalUnitOptions { geometry, limits, identity, writeback, reservations } = options;
        let read_only = if geometry.read_only { flag::READ_ONLY } else { 0 };
        let write_through = if writeback { 0 } else { flag::WRITE_THROUGH };
        LogicalUnit {
            block_limits: BlockLimits::new(&geometry, &limits),
            size: AtomicU64::new(geometry.size.0),
            flags: AtomicU8::new(read_only | write_through),
            default_flags: read_only | write_through,
            range_locks: RangeLocks::new(),
            nexuses: Mutex::new(Vec::new()),
            geometry,
            limits,
            identity,
            reservations,
        }
    }

    /// Returns the nexus of an initiator port through a target port (by its relative identifier, 1 and up). The same
    /// name returns the same nexus; a new nexus keeps the registration of its name. Raises POWER ON on the nexus.
    ///
    /// # Errors
    /// If the name is empty or too long, or its address is that of another name.
    pub fn login(self: &Arc<Self>, initiator: &str, port: u16) -> Result<Arc<Nexus>, LoginError> {
        let name = NexusName { initiator: initiator.into(), port };
        let mut nexuses = self.nexuses();
        nexuses.retain(|nexus| nexus.strong_count() > 0);
        let known = nexuses.iter().filter_map(Weak::upgrade).find(|nexus| *nexus.name() == name);
        let nexus = match known {
            Some(nexus) => nexus,
            None => {
                let attentions = Arc::new(UnitAttentionQueue::new());
                let reservation = self.add_nexus(&name, &attentions)?;
                let (unit, task_set) = (Arc::clone(self), Mutex::new(None));
                let nexus = Arc::new(Nexus { unit, attentions, reservation, task_set });
                nexuses.push(Arc::downgrade(&nexus));
                nexus
            }
        };
        nexus.raise_attention(UnitAttention::PowerOn);
        Ok(nexus)
    }

    /// Adds a nexus to the reservations. Retries while a nexus of the same name, whose last user has just dropped it,
    /// has not been removed yet.
    fn add_nexus(
        &self,
        name: &NexusName,
        attentions: &Arc<UnitAttentionQueue>,
    ) -> Result<ReservationHandle, LoginError> {
        const TRIES: u32 = 1000;
        for _ in 0..TRIES {
            match self.reservations.add_nexus(name.clone(), Arc::clone(attentions)) {
                Err(LoginError::DuplicateName(_)) => std::thread::yield_now(),
                added => return added,
            }
        }
        Err(LoginError::DuplicateName(name.clone()))
    }

    /// Returns the current geometry.
    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size(), ..self.geometry }
    }

    /// Returns the limits of its disk.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns its identification data.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Changes the size. Raises CAPACITY DATA HAS CHANGED for all initiators if it differs.
    pub fn set_size(&self, size: ByteLen) {
        if self.size.swap(size.0, Ordering::AcqRel) != size.0 {
            self.raise_attention(UnitAttention::CapacityChanged);
        }
    }

    /// Resets the logical unit (LOGICAL UNIT RESET): its flags get their initial values; registrations and persistent
    /// reservations stay. The caller aborts the commands in flight. Source: SAM-5 section 6.3.3, SPC-4 section 5.12.
    pub fn reset(&self) {
        self.flags.store(self.default_flags, Ordering::Release);
        self.reservations.reset();
        self.raise_attention(UnitAttention::BusDeviceReset);
    }

    /// Ends the replay of commands that a previous process had in flight: each has been executed again, or will not be.
    pub fn end_replay(&self) {
        self.reservations.end_replay();
    }

    /// Returns true if initiators other than this one use it.
    pub(crate) fn has_other_initiators(&self, initiator: &str) -> bool {
        self.nexuses().iter().filter_map(Weak::upgrade).any(|nexus| &*nexus.name().initiator != initiator)
    }

    /// Aborts the commands of all nexuses but one (CLEAR TASK SET, LOGICAL UNIT RESET). The tickets are resolved when
    /// the commands have ended; each then wakes `done`.
    pub fn abort_others(&self, but: &Nexus, done: &Arc<dyn Wake>) -> Vec<Arc<Ticket>> {
        let others: Vec<_> = self.nexuses().iter().filter_map(Weak::upgrade).collect();
        let others = others.iter().filter(|nexus| !std::ptr::eq(but, &***nexus));
        others.filter_map(|nexus| Some(nexus.task_set()?.abort(Arc::clone(done)))).collect()
    }

    /// Raises COMMANDS CLEARED BY ANOTHER INITIATOR for all nexuses but one (CLEAR TASK SET). Source: SAM-5 section
    /// 7.5.
    pub fn raise_commands_cleared(&self, but: &Nexus) {
        self.raise_attention_except(Some(but), UnitAttention::CommandsCleared);
    }

    /// Raises a unit attention for all nexuses.
    pub fn raise_attention(&self, attention: UnitAttention) {
        self.raise_attention_except(None, attention);
    }

    /// Raises a unit attention for all nexuses but one.
    pub(crate) fn raise_attention_except(&self, but: Option<&Nexus>, attention: UnitAttention) {
        for nexus in self.nexuses().iter().filter_map(Weak::upgrade) {
            if !but.is_some_and(|but| std::ptr::eq(but, &*nexus)) {
                nexus.raise_attention(attention);
            }
        }
    }

    /// Returns true if every write is durable before it completes.
    #[inline]
    pub fn write_through(&self) -> bool {
        self.flags() & flag::WRITE_THROUGH != 0
    }

    /// Returns true if sense data is in descriptor format (D_SENSE of the control mode page).
    #[inline]
    pub fn descriptor_sense(&self) -> bool {
        self.flags() & flag::DESCRIPTOR_SENSE != 0
    }

    #[inline]
    pub(crate) fn flags(&self) -> u8 {
        self.flags.load(Ordering::Acquire)
    }

    /// Sets or clears the bits of `mask`. Returns true if that changed any.
    pub(crate) fn set_flags(&self, mask: u8, on: bool) -> bool {
        let before = if on {
            self.flags.fetch_or(mask, Ordering::AcqRel)
        } else {
            self.flags.fetch_and(!mask, Ordering::AcqRel)
        };
        before & mask != if on { mask } else { 0 }
    }

    /// Copies the bits of `mask` from `flags`, in one atomic update.
    pub(crate) fn replace_flags(&self, mask: u8, flags: u8) {
        let replaced = |old: u8| Some(old & !mask | flags & mask);
        // The closure never returns `None`.
        let _ = self.flags.fetch_update(Ordering::AcqRel, Ordering::Acquire, replaced);
    }

    /// Returns the initial flags.
    pub(crate) fn default_flags(&self) -> u8 {
        self.default_flags
    }

    /// Range locks of commands that read blocks and then write them.
    pub(crate) fn range_locks(&self) -> &Arc<RangeLocks> {
        &self.range_locks
    }

    pub(crate) fn block_limits(&self) -> &BlockLimits {
        &self.block_limits
    }

    #[inline]
    fn size(&self) -> ByteLen {
        ByteLen(self.size.load(Ordering::Acquire))
    }

    /// Returns the number of logical blocks.
    #[inline]
    pub(crate) fn block_count(&self) -> u64 {
        self.geometry.logical_block.blocks_in(self.size())
    }

    /// Returns the logical block size in bytes.
    #[inline]
    pub(crate) fn block_size(&self) -> u32 {
        self.geometry.logical_block.bytes()
    }

    #[inline]
    pub(crate) fn logical_block(&self) -> BlockSize {
        self.geometry.logical_block
    }

    /// Returns `count` blocks from `lba` on as bytes, or `None` if the range exceeds the logical unit.
    #[inline]
    pub(crate) fn lba_range(&self, lba: u64, count: u64) -> Option<(ByteOffset, ByteLen)> {
        if lba.checked_add(count)? > self.block_count() {
            return None;
        }
        let block = self.geometry.logical_block;
        Some((block.offset_of(lba)?, block.len_of(count)?))
    }

    /// Returns the nexus of this name, if it exists now.
    pub(crate) fn nexus(&self, name: &NexusName) -> Option<Arc<Nexus>> {
        self.nexuses().iter().filter_map(Weak::upgrade).find(|nexus| nexus.name() == name)
    }

    fn nexuses(&self) -> MutexGuard<'_, Vec<Weak<Nexus>>> {
        lock(&self.nexuses)
    }
}

/// I_T_L nexus: one initiator port's path through a target port to a logical unit.
#[derive(Debug)]
pub struct Nexus {
    unit: Arc<LogicalUnit>,
    attentions: Arc<UnitAttentionQueue>,
    reservation: ReservationHandle,
    task_set: Mutex<Option<Arc<dyn TaskSet>>>,
}

/// Commands of one nexus that are in flight.
pub trait TaskSet: Send + Sync + fmt::Debug {
    /// Aborts them all, for PREEMPT AND ABORT by another nexus. The ticket is resolved when the last has ended, and
    /// then wakes `done`.
    fn abort(&self, done: Arc<dyn Wake>) -> Arc<Ticket>;
}

impl Nexus {
    /// Returns its logical unit.
    pub fn unit(&self) -> &Arc<LogicalUnit> {
        &self.unit
    }

    /// Returns the names of the initiator port and the target port.
    pub fn name(&self) -> &NexusName {
        self.reservation.name()
    }

    /// Sets the task set through which the nexus's commands are aborted. Without a task set PREEMPT AND ABORT works
    /// like PREEMPT.
    pub fn set_task_set(&self, tasks: Option<Arc<dyn TaskSet>>) {
        *lock(&self.task_set) = tasks;
    }

    pub(crate) fn task_set(&self) -> Option<Arc<dyn TaskSet>> {
        lock(&self.task_set).clone()
    }

    /// Handles I_T NEXUS RESET: ends a RESERVE of the nexus and raises I_T NEXUS LOSS. Registrations and persistent
    /// reservations stay.
    pub fn nexus_lost(&self) {
        self.reservation.nexus_lost();
        self.raise_attention(UnitAttention::NexusLoss);
    }

    /// Handles a reset of the initiator, for example a guest's reboot. A logical unit that no other initiator uses is
    /// reset (a guest that stopped it must be able to boot from it); of a shared one only the nexus is lost.
    pub fn initiator_reset(&self) {
        if self.unit.has_other_initiators(&self.name().initiator) { self.nexus_lost() } else { self.unit.reset() }
    }

    /// Lets an initiator continue that was served before, without noticing: the logical unit was neither switched on
    /// nor reset. A command that it had in flight may have been executed, and a unit attention as its status would deny
    /// that. `elsewhere`: another process served it, so no unit attention of this process is new to it.
    pub fn initiator_resumed(&self, elsewhere: bool) {
        if elsewhere { self.attentions.clear_all() } else { self.attentions.clear_resets() }
    }

    pub(crate) fn reservation(&self) -> &ReservationHandle {
        &self.reservation
    }

    #[inline]
    pub(crate) fn allows(&self, access: AccessClass) -> bool {
        self.reservation.allows(access)
    }

    /// Raises a unit attention, which the initiator gets before its next command is executed.
    pub fn raise_attention(&self, attention: UnitAttention) {
        self.attentions.raise(attention);
    }

    pub(crate) fn attentions(&self) -> &UnitAttentionQueue {
        &self.attentions
    }
}
