//! All reservations of a unit, for whoever serves it next while its initiators go on: what a [`Keeper`](super::Keeper) keeps and what ends
//! with a loss of power, which this is none.

use std::collections::HashMap;
use std::sync::Arc;

use mqblk_core::Wake;
use serde::{Deserialize, Serialize};

use super::executed::Executed;
use super::file::LARGEST;
use super::kept::{self, KeptNexus, KeptRegistration, KeptReservation, RestoreError, impossible};
use super::state::State;
use super::{Effects, NexusName, Reservations, Ticket};

/// They as text. What stands at its default is left out.
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

/// Those that a unit can have, not yet in force.
#[derive(Debug)]
pub struct Judged(State);

impl Judged {
    /// Whether an initiator has something by its name.
    pub fn is_empty(&self) -> bool {
        self.0.registrations.is_empty() && self.0.reserved.is_none()
    }
}

impl Reservations {
    /// As they are now.
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

    /// Whether the unit can have them.
    ///
    /// # Errors
    /// When no unit can, or this one has nowhere to keep what is to outlive a loss of power, or not the nexus that reserved it.
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
        // Nothing is under way in a guest that is migrated.
        let executed = Executed::default();
        let state = State { generation, persist: aptpl, registrations, reservation, reserved, executed };
        let kept = kept::write(&state).len() as u64;
        if kept > LARGEST {
            // Whoever reads the file at the next start would not.
            return Err(impossible("registrations", &format!("{kept} bytes to be kept"), "at most 524288"));
        }
        Ok(Judged(state))
    }

    /// These hold from now on, in place of all others. Nobody is told: to the initiators nothing has changed. The ticket, if they are kept
    /// or were, says when they are on stable storage, and rings `done` then.
    pub fn replace(&self, judged: Judged, done: Arc<dyn Wake>) -> Option<Arc<Ticket>> {
        let mut inner = self.lock();
        let kept = inner.state.persist || judged.0.persist;
        inner.state = judged.0;
        inner.settle(&Effects::default());
        let keeper = self.keeper.as_ref().filter(|_| kept)?;
        Some(keeper.save(kept::write(&inner.state), done))
    }
}
