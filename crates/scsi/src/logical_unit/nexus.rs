//! I_T_L nexus: the path from an initiator port to a logical unit.

use std::fmt;
use std::sync::{Arc, Mutex};

use mqblk_core::Wake;
use mqblk_core::lock::lock;

use super::LogicalUnit;
use crate::reservation::{AccessClass, NexusName, ReservationHandle, Ticket};
use crate::unit_attention::{UnitAttention, UnitAttentionQueue};

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
    pub(super) fn new(
        unit: Arc<LogicalUnit>,
        attentions: Arc<UnitAttentionQueue>,
        reservation: ReservationHandle,
    ) -> Nexus {
        Nexus { unit, attentions, reservation, task_set: Mutex::new(None) }
    }

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
