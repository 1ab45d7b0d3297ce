//! Snapshot of all reservations of a logical unit, for the process that serves it next while its initiators continue:
//! what a [`ReservationStore`](super::ReservationStore) holds, and the state that would end with a power loss.

use std::collections::HashMap;
use std::sync::Arc;

use mqblk_core::Wake;
use serde::{Deserialize, Serialize};

use super::executed::Executed;
use super::file::LARGEST;
use super::kept::{self, KeptNexus, KeptRegistration, KeptReservation, RestoreError, impossible};
use super::state::State;
use super::{Effects, NexusName, Reservations, Ticket};

/// Snapshot of reservations. Fields with default values are left out of the text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Carried {
    /// PRGENERATION.
    #[serde(skip_serializing_if = "is_zero")]
    generation: u32,
    /// The last APTPL bit.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    aptpl: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    registrations: Vec<KeptRegistration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reservation: Option<KeptReservation>,
    /// Holder of a RESERVE(6) or (10).
    #[serde(skip_serializing_if = "Option::is_none")]
    reserved: Option<KeptNexus>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Validated reservations, not yet applied.
#[derive(Debug)]
pub struct Judged(State);

impl Judged {
    /// Returns true if no initiator has a registration or a RESERVE.
    pub fn is_empty(&self) -> bool {
        self.0.registrations.is_empty() && self.0.reserved.is_none()
    }
}

impl Reservations {
    /// Returns a snapshot of the current reservations.
    pub fn carried(&self) -> Carried {
        let inner = self.lock();
        let state = &inner.state;
        Carried {
            generation: state.generation,
            aptpl: state.persist,
            registrations: kept::registrations(state),
            reservation: kept::reservation(state),
            reserved: state.reserved.as_ref().map(KeptNexus::from),
        }
    }

    /// Validates a snapshot for this logical unit.
    ///
    /// # Errors
    /// If it is inconsistent, needs a store that this logical unit lacks, or has a RESERVE of a nexus that does not
    /// exist here.
    pub fn judge(&self, carried: Carried) -> Result<Judged, RestoreError> {
        let Carried { generation, aptpl, registrations, reservation, reserved } = carried;
        let (registrations, reservation) = kept::judge_held(registrations, reservation)?;
        let reserved = reserved.map(|holder| kept::nexus(holder, "reserved")).transpose()?;
        if aptpl && self.keeper.is_none() {
            return Err(impossible(
                "aptpl",
                &true,
                "false: the unit has no reservations= here, where they would be kept",
            ));
        }
        let inner = self.lock();
        if let Some(holder) = &reserved {
            if !registrations.is_empty() {
                return Err(impossible("reserved", holder, "no RESERVE beside registrations"));
            }
            if !inner.seats.iter().any(|seat| seat.name == *holder) {
                return Err(impossible("reserved", holder, "a nexus that the unit has here"));
            }
        }
        let known: Vec<&NexusName> =
            inner.seats.iter().map(|seat| &seat.name).chain(registrations.iter().map(|held| &held.nexus)).collect();
        let mut addresses = HashMap::new();
        for name in known {
            let other = addresses.insert(name.address(), &name.initiator);
            if other.is_some_and(|other| *other != name.initiator) {
                return Err(impossible("registrations.nexus", name, "initiator ports of different addresses"));
            }
        }
        drop(inner);
        // A guest that is migrated has nothing in flight.
        let executed = Executed::default();
        let state = State { generation, persist: aptpl, registrations, reservation, reserved, executed };
        let file_len = kept::write(&state).len() as u64;
        if file_len > LARGEST {
            // The next start would reject the file.
            return Err(impossible("registrations", &format!("{file_len} bytes to be kept"), "at most 524288"));
        }
        Ok(Judged(state))
    }

    /// Replaces all reservations. Raises no unit attention, as nothing changes for the initiators. Returns a ticket
    /// if the old or the new state has APTPL set; it is resolved, and wakes `done`, when the state is on stable
    /// storage.
    pub fn replace(&self, judged: Judged, done: Arc<dyn Wake>) -> Option<Arc<Ticket>> {
        let mut inner = self.lock();
        let is_persistent = inner.state.persist || judged.0.persist;
        inner.state = judged.0;
        inner.settle(&Effects::default());
        let store = self.keeper.as_ref().filter(|_| is_persistent)?;
        Some(store.save(kept::write(&inner.state), done))
    }
}
