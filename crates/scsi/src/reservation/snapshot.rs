//! Snapshot of all reservations of a logical unit, for the process that serves it next while its initiators continue:
//! the content of a [`ReservationStore`](super::ReservationStore), and the state that would end with a power loss.

use std::collections::HashMap;
use std::sync::Arc;

use mqblk_core::Wake;
use serde::{Deserialize, Serialize};

use super::executed::ExecutedCommands;
use super::file_store::MAX_FILE_BYTES;
use super::nexus_name::NexusName;
use super::state::{Effects, ReservationState};
use super::stored::{self, RestoreError, StoredNexus, StoredRegistration, StoredReservation, invalid_field};
use super::{Reservations, Ticket};

/// Snapshot of reservations. Fields with default values are left out of the text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReservationSnapshot {
    /// PRGENERATION.
    #[serde(skip_serializing_if = "is_zero")]
    generation: u32,
    /// The last APTPL bit.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    aptpl: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    registrations: Vec<StoredRegistration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reservation: Option<StoredReservation>,
    /// Holder of a RESERVE(6) or (10).
    #[serde(skip_serializing_if = "Option::is_none")]
    reserved: Option<StoredNexus>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Validated reservations, not yet applied.
#[derive(Debug)]
pub struct ValidatedReservations(ReservationState);

impl ValidatedReservations {
    /// Returns true if no initiator has a registration or a RESERVE.
    pub fn is_empty(&self) -> bool {
        self.0.registrations.is_empty() && self.0.reserve_holder.is_none()
    }
}

impl Reservations {
    /// Returns a snapshot of the current reservations.
    pub fn snapshot(&self) -> ReservationSnapshot {
        let inner = self.lock();
        let state = &inner.state;
        ReservationSnapshot {
            generation: state.generation,
            aptpl: state.aptpl,
            registrations: stored::registrations(state),
            reservation: stored::reservation(state),
            reserved: state.reserve_holder.as_ref().map(StoredNexus::from),
        }
    }

    /// Validates a snapshot for this logical unit.
    ///
    /// # Errors
    /// If it is inconsistent, needs a store that this logical unit lacks, or has a RESERVE of a nexus that does not
    /// exist here.
    pub fn validate(&self, carried: ReservationSnapshot) -> Result<ValidatedReservations, RestoreError> {
        let ReservationSnapshot { generation, aptpl, registrations, reservation, reserved } = carried;
        let (registrations, reservation) = stored::validate_reservations(registrations, reservation)?;
        let reserved = reserved.map(|holder| stored::nexus(holder, "reserved")).transpose()?;
        if aptpl && self.store.is_none() {
            return Err(invalid_field(
                "aptpl",
                &true,
                "false: the unit has no reservations= here, where they would be kept",
            ));
        }
        let inner = self.lock();
        if let Some(holder) = &reserved {
            if !registrations.is_empty() {
                return Err(invalid_field("reserved", holder, "no RESERVE beside registrations"));
            }
            if !inner.nexuses.iter().any(|entry| entry.name == *holder) {
                return Err(invalid_field("reserved", holder, "a nexus that the unit has here"));
            }
        }
        let known: Vec<&NexusName> =
            inner.nexuses.iter().map(|entry| &entry.name).chain(registrations.iter().map(|held| &held.nexus)).collect();
        let mut addresses = HashMap::new();
        for name in known {
            let other = addresses.insert(name.address(), &name.initiator);
            if other.is_some_and(|other| *other != name.initiator) {
                return Err(invalid_field("registrations.nexus", name, "initiator ports of different addresses"));
            }
        }
        drop(inner);
        // A migrating guest has nothing in flight.
        let executed = ExecutedCommands::default();
        let state =
            ReservationState { generation, aptpl, registrations, reservation, reserve_holder: reserved, executed };
        let file_len = stored::encode(&state).len() as u64;
        if file_len > MAX_FILE_BYTES {
            // The next start would reject the file.
            return Err(invalid_field("registrations", &format!("{file_len} bytes to be kept"), "at most 524288"));
        }
        Ok(ValidatedReservations(state))
    }

    /// Replaces all reservations. Raises no unit attention, as nothing changes for the initiators. Returns a ticket
    /// if the old or the new state has APTPL set; it is resolved, and wakes `done`, when the state is on stable
    /// storage.
    pub fn replace(&self, judged: ValidatedReservations, done: Arc<dyn Wake>) -> Option<Arc<Ticket>> {
        let mut inner = self.lock();
        let is_persistent = inner.state.aptpl || judged.0.aptpl;
        inner.state = judged.0;
        inner.apply_effects(&Effects::default());
        let store = self.store.as_ref().filter(|_| is_persistent)?;
        Some(store.save(stored::encode(&inner.state), done))
    }
}
