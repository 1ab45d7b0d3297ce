//! Registrations and reservations of one logical unit, and the effect of each service action. Plain data without
//! locks, clocks or threads. Source: SPC-4 section 5.12; SPC-2 section 5.5 for RESERVE and RELEASE.

use crate::sense::{FieldPointer, Sense, SenseKey};
use crate::unit_attention::UnitAttention;

use super::access::{AccessRights, ReservationType};
use super::error::ReservationError;
use super::executed::ExecutedCommands;
use super::nexus_name::NexusName;

/// Maximum number of registrations: it bounds the READ FULL STATUS parameter data to 48 KiB.
pub(super) const MAX_REGISTRATIONS: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Registration {
    pub nexus: NexusName,
    /// Never zero.
    pub key: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reservation {
    pub kind: ReservationType,
    /// `None` for the all-registrants types: every registered nexus holds it.
    pub holder: Option<NexusName>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReservationState {
    /// PRGENERATION.
    pub generation: u32,
    /// The last APTPL bit.
    pub aptpl: bool,
    /// In the order of registration.
    pub registrations: Vec<Registration>,
    pub reservation: Option<Reservation>,
    /// Holder of a RESERVE(6) or (10).
    pub reserve_holder: Option<NexusName>,
    pub executed: ExecutedCommands,
}

/// Effects of a service action besides the change of the state.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Effects {
    /// Unit attentions for other nexuses.
    pub attentions: Vec<(NexusName, UnitAttention)>,
    /// Other nexuses whose commands must be aborted.
    pub aborted: Vec<NexusName>,
}

/// REGISTER and REGISTER AND IGNORE EXISTING KEY.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegisterParams {
    /// RESERVATION KEY; `None`: any.
    pub presented: Option<u64>,
    /// SERVICE ACTION RESERVATION KEY.
    pub key: u64,
    /// ALL_TG_PT: all target ports of the initiator ports concerned.
    pub all_ports: bool,
    /// SPEC_I_PT and its initiator ports, as addresses.
    pub initiators: Option<Vec<u64>>,
    pub aptpl: bool,
}

/// REGISTER AND MOVE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MoveParams {
    pub key: u64,
    pub unregister: bool,
    pub aptpl: bool,
    pub port: u16,
    pub initiator: u64,
}

/// INVALID FIELD IN PARAMETER LIST.
pub(super) const fn invalid_parameter_field(byte: u16, bit: Option<u8>) -> ReservationError {
    let field = FieldPointer { in_cdb: false, byte, bit };
    ReservationError::CheckCondition(Sense { field: Some(field), ..Sense::new(SenseKey::IllegalRequest, 0x26, 0x00) })
}

/// INVALID FIELD IN CDB.
pub(super) const fn invalid_cdb_field(byte: u16, bit: Option<u8>) -> ReservationError {
    let field = FieldPointer { in_cdb: true, byte, bit };
    ReservationError::CheckCondition(Sense { field: Some(field), ..Sense::new(SenseKey::IllegalRequest, 0x24, 0x00) })
}

const INSUFFICIENT_REGISTRATION_RESOURCES: ReservationError =
    ReservationError::CheckCondition(Sense::new(SenseKey::IllegalRequest, 0x55, 0x04));
const INVALID_RELEASE: ReservationError =
    ReservationError::CheckCondition(Sense::new(SenseKey::IllegalRequest, 0x26, 0x04));

impl ReservationState {
    pub(super) fn key(&self, nexus: &NexusName) -> Option<u64> {
        self.registrations.iter().find(|held| held.nexus == *nexus).map(|held| held.key)
    }

    pub(super) fn holds(&self, nexus: &NexusName) -> bool {
        self.reservation.as_ref().is_some_and(|held| match &held.holder {
            Some(holder) => holder == nexus,
            None => self.key(nexus).is_some(),
        })
    }

    /// Returns the access rights of the nexus.
    pub(super) fn rights(&self, nexus: &NexusName) -> AccessRights {
        if let Some(holder) = &self.reserve_holder {
            return if holder == nexus { AccessRights::ALL } else { AccessRights::RESERVED };
        }
        match &self.reservation {
            None => AccessRights::ALL,
            Some(_) if self.holds(nexus) => AccessRights::ALL,
            Some(held) if held.kind.admits_registrants() && self.key(nexus).is_some() => AccessRights::ALL,
            Some(held) => AccessRights::under_reservation(held.kind),
        }
    }

    fn next_generation(&mut self, attentions: Vec<(NexusName, UnitAttention)>) -> Effects {
        self.generation = self.generation.wrapping_add(1);
        Effects { attentions, aborted: Vec::new() }
    }

    /// Returns this unit attention for every registered nexus but one.
    fn attention_for_others(&self, but: &NexusName, attention: UnitAttention) -> Vec<(NexusName, UnitAttention)> {
        let others = self.registrations.iter().filter(|held| held.nexus != *but);
        others.map(|held| (held.nexus.clone(), attention)).collect()
    }

    fn check_key(&self, from: &NexusName, presented: u64) -> Result<(), ReservationError> {
        if self.key(from) == Some(presented) { Ok(()) } else { Err(ReservationError::Conflict) }
    }

    /// REGISTER and REGISTER AND IGNORE EXISTING KEY. `known`: the present nexuses. Source: SPC-4 section 5.12.7, and
    /// 6.16.3 for the bits.
    pub(super) fn register(
        &mut self,
        from: &NexusName,
        params: &RegisterParams,
        known: &[NexusName],
    ) -> Result<Effects, ReservationError> {
        const SPEC_I_PT: ReservationError = invalid_parameter_field(20, Some(3));
        let own = self.key(from);
        if let Some(presented) = params.presented
            && presented != own.unwrap_or(0)
        {
            return Err(ReservationError::Conflict);
        }
        if own.is_none() && params.key == 0 {
            return Ok(Effects::default());
        }
        if own.is_some() && params.initiators.is_some() {
            return Err(SPEC_I_PT);
        }
        let affected = self.affected_nexuses(from, params, known)?;
        // Another registered nexus must have the key that the sender had to present.
        let other_key = |nexus| self.key(nexus).is_some_and(|key| params.presented.is_some_and(|given| given != key));
        if affected.iter().any(other_key) {
            return Err(ReservationError::Conflict);
        }
        let attentions = if params.key == 0 {
            self.unregister(from, &affected)
        } else {
            let new = affected.iter().filter(|nexus| self.key(nexus).is_none()).count();
            if self.registrations.len() + new > MAX_REGISTRATIONS {
                return Err(INSUFFICIENT_REGISTRATION_RESOURCES);
            }
            affected.iter().for_each(|nexus| self.set_key(nexus, params.key));
            Vec::new()
        };
        self.aptpl = params.aptpl;
        Ok(self.next_generation(attentions))
    }

    /// Returns the nexuses that a registration concerns. Source: SPC-4 section 5.12.7, "Which I_T nexuses are being
    /// registered".
    fn affected_nexuses(
        &self,
        from: &NexusName,
        params: &RegisterParams,
        known: &[NexusName],
    ) -> Result<Vec<NexusName>, ReservationError> {
        let registered = self.registrations.iter().map(|held| &held.nexus);
        let mut affected = vec![from.clone()];
        let mut add = |initiator: u64| {
            let there = known.iter().chain(registered.clone().filter(|nexus| !known.contains(nexus)));
            let mut of_port = there
                .filter(|nexus| nexus.address() == initiator && (params.all_ports || nexus.port == from.port))
                .peekable();
            let found = of_port.peek().is_some();
            for nexus in of_port {
                if !affected.contains(nexus) {
                    affected.push(nexus.clone());
                }
            }
            found
        };
        if params.all_ports {
            add(from.address());
        }
        for (index, initiator) in (0u16..).zip(params.initiators.iter().flatten()) {
            if !add(*initiator) {
                // The bound on the parameter list makes this fit.
                return Err(invalid_parameter_field(28 + index * super::transport_id::LEN as u16, None));
            }
        }
        Ok(affected)
    }

    fn set_key(&mut self, nexus: &NexusName, key: u64) {
        match self.registrations.iter_mut().find(|held| held.nexus == *nexus) {
            Some(held) => held.key = key,
            None => self.registrations.push(Registration { nexus: nexus.clone(), key }),
        }
    }

    /// Removes registrations, and the reservation if its last holder is among them. Returns the unit attentions.
    /// Source: SPC-4 section 5.12.11.3.
    fn unregister(&mut self, from: &NexusName, affected: &[NexusName]) -> Vec<(NexusName, UnitAttention)> {
        self.registrations.retain(|held| !affected.contains(&held.nexus));
        let Some(held) = &self.reservation else { return Vec::new() };
        let ends = match &held.holder {
            Some(holder) => affected.contains(holder),
            None => self.registrations.is_empty(),
        };
        if !ends {
            return Vec::new();
        }
        let notify = held.kind.admits_registrants();
        self.reservation = None;
        if notify { self.attention_for_others(from, UnitAttention::ReservationsReleased) } else { Vec::new() }
    }

    /// RESERVE. Source: SPC-4 section 5.12.9.
    pub(super) fn reserve(
        &mut self,
        from: &NexusName,
        presented: u64,
        kind: ReservationType,
    ) -> Result<Effects, ReservationError> {
        self.check_key(from, presented)?;
        match &self.reservation {
            Some(held) if held.kind == kind && self.holds(from) => Ok(Effects::default()),
            Some(_) => Err(ReservationError::Conflict),
            None => {
                let holder = (!kind.is_all_registrants()).then(|| from.clone());
                self.reservation = Some(Reservation { kind, holder });
                Ok(Effects::default())
            }
        }
    }

    /// RELEASE. `kind` is `None` if the SCOPE and TYPE fields are invalid. Source: SPC-4 section 5.12.11.2.
    pub(super) fn release(
        &mut self,
        from: &NexusName,
        presented: u64,
        kind: Option<ReservationType>,
    ) -> Result<Effects, ReservationError> {
        self.check_key(from, presented)?;
        let Some(held) = self.reservation.as_ref().filter(|_| self.holds(from)) else {
            return Ok(Effects::default());
        };
        if kind != Some(held.kind) {
            return Err(INVALID_RELEASE);
        }
        let attentions = if held.kind.admits_registrants() {
            self.attention_for_others(from, UnitAttention::ReservationsReleased)
        } else {
            Vec::new()
        };
        self.reservation = None;
        Ok(Effects { attentions, ..Effects::default() })
    }

    /// CLEAR. Source: SPC-4 section 5.12.11.6.
    pub(super) fn clear(&mut self, from: &NexusName, presented: u64) -> Result<Effects, ReservationError> {
        self.check_key(from, presented)?;
        let attentions = self.attention_for_others(from, UnitAttention::ReservationsPreempted);
        self.reservation = None;
        self.registrations.clear();
        Ok(self.next_generation(attentions))
    }

    /// PREEMPT and PREEMPT AND ABORT. `kind` matters only if a reservation is preempted. Source: SPC-4 sections
    /// 5.12.11.4 and 5.12.11.5.
    pub(super) fn preempt(
        &mut self,
        from: &NexusName,
        presented: u64,
        victim: u64,
        kind: Result<ReservationType, ReservationError>,
        abort: bool,
    ) -> Result<Effects, ReservationError> {
        self.check_key(from, presented)?;
        let of_reservation = self.reservation.as_ref().is_some_and(|held| match &held.holder {
            Some(holder) => self.key(holder) == Some(victim),
            None => victim == 0,
        });
        if victim == 0 && !of_reservation {
            return Err(invalid_parameter_field(8, None));
        }
        let goes = |held: &Registration| victim == 0 || held.key == victim;
        let mut attentions = Vec::new();
        let removed: Vec<NexusName>;
        if of_reservation {
            let kind = kind?;
            removed = self.remove_registrations(|held| goes(held) && held.nexus != *from);
            if self.reservation.as_ref().is_some_and(|held| held.kind != kind) {
                attentions = self.attention_for_others(from, UnitAttention::ReservationsReleased);
            }
            let holder = (!kind.is_all_registrants()).then(|| from.clone());
            self.reservation = Some(Reservation { kind, holder });
        } else {
            removed = self.remove_registrations(goes);
            if removed.is_empty() {
                return Err(ReservationError::Conflict);
            }
            // The holder's key is another one, so only an all-registrants reservation can have lost its last holder.
            if self.registrations.is_empty() {
                self.reservation = None;
            }
        }
        let lost: Vec<_> = removed.into_iter().filter(|nexus| nexus != from).collect();
        attentions.extend(lost.iter().map(|nexus| (nexus.clone(), UnitAttention::RegistrationsPreempted)));
        let mut effects = self.next_generation(attentions);
        if abort {
            effects.aborted = lost;
        }
        Ok(effects)
    }

    fn remove_registrations(&mut self, goes: impl Fn(&Registration) -> bool) -> Vec<NexusName> {
        let (gone, stay) = std::mem::take(&mut self.registrations).into_iter().partition(goes);
        self.registrations = stay;
        let gone: Vec<Registration> = gone;
        gone.into_iter().map(|held| held.nexus).collect()
    }

    /// REGISTER AND MOVE. Source: SPC-4 section 5.12.8.
    pub(super) fn register_and_move(
        &mut self,
        from: &NexusName,
        presented: u64,
        params: &MoveParams,
        known: &[NexusName],
    ) -> Result<Effects, ReservationError> {
        self.check_key(from, presented)?;
        let Some(held) = &self.reservation else {
            // There is no reservation to move: the service action is invalid.
            return Err(invalid_cdb_field(1, Some(4)));
        };
        if held.kind.is_all_registrants() || !self.holds(from) {
            return Err(ReservationError::Conflict);
        }
        let kind = held.kind;
        if params.key == 0 {
            return Err(invalid_parameter_field(8, None));
        }
        let of_port: Vec<_> = known.iter().filter(|nexus| nexus.port == params.port).collect();
        if of_port.is_empty() {
            return Err(invalid_parameter_field(18, None));
        }
        let target = of_port.into_iter().find(|nexus| nexus.address() == params.initiator && *nexus != from);
        let Some(target) = target else {
            return Err(invalid_parameter_field(24, None));
        };
        if self.key(target).is_none() && self.registrations.len() >= MAX_REGISTRATIONS + usize::from(params.unregister)
        {
            return Err(INSUFFICIENT_REGISTRATION_RESOURCES);
        }
        self.set_key(target, params.key);
        self.reservation = Some(Reservation { kind, holder: Some(target.clone()) });
        if params.unregister {
            self.registrations.retain(|held| held.nexus != *from);
        }
        self.aptpl = params.aptpl;
        Ok(self.next_generation(Vec::new()))
    }

    /// Returns the result of RESERVE and RELEASE if registrations or a persistent reservation determine it. Source:
    /// SPC-4 section 5.12.3, SPC-2 section 5.5.1.
    fn reserve_exception(&self, from: &NexusName) -> Option<Result<(), ReservationError>> {
        let registered = self.key(from).is_some();
        let shared = self.reservation.as_ref().is_some_and(|held| held.kind.admits_registrants());
        if self.holds(from) || (shared && registered) {
            return Some(Ok(()));
        }
        (!self.registrations.is_empty()).then_some(Err(ReservationError::Conflict))
    }

    /// RESERVE(6) and (10).
    pub(super) fn reserve_unit(&mut self, from: &NexusName) -> Result<(), ReservationError> {
        if let Some(result) = self.reserve_exception(from) {
            return result;
        }
        match &self.reserve_holder {
            Some(holder) if holder != from => Err(ReservationError::Conflict),
            _ => {
                self.reserve_holder = Some(from.clone());
                Ok(())
            }
        }
    }

    /// RELEASE(6) and (10). Without effect, and no error, from another nexus than the holder (SPC-2 section 7.24.2).
    pub(super) fn release_unit(&mut self, from: &NexusName) -> Result<(), ReservationError> {
        if let Some(result) = self.reserve_exception(from) {
            return result;
        }
        if self.reserve_holder.as_ref() == Some(from) {
            self.reserve_holder = None;
        }
        Ok(())
    }
}
