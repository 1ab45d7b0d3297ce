//! What an initiator relies on of a unit, for whoever serves the unit next while the initiator goes on: a guest that is migrated.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mqblk_core::Wake;
use serde::{Deserialize, Serialize};

use crate::attention::Attention;
use crate::nexus::Nexus;
use crate::reservation::{Carried, Judged, RestoreError};
use crate::unit::flag;

/// How long stable storage may take to keep reservations.
const KEPT_WITHIN: Duration = Duration::from_secs(5);

/// A unit as one nexus sees it: what tells whether it is the same unit, and what the initiator has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct UnitState {
    /// See [`Identity`](crate::Identity), whose revision may be another one: that is the version of who serves it.
    pub name: String,
    /// The same.
    pub vendor: String,
    /// The same.
    pub product: String,
    /// The same.
    pub serial: String,
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// Bytes of the unit.
    pub size_bytes: u64,
    /// The disk is read-only.
    pub read_only: bool,
    /// Name of the initiator port: what registrations are kept by.
    pub initiator: String,
    /// Caching mode page, WCE = 0.
    pub write_through: bool,
    /// Control mode page, SWP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub write_protected: bool,
    /// Control mode page, D_SENSE.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub descriptor_sense: bool,
    /// START STOP UNIT stopped it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// Unit attentions that were not told yet, in the order of telling.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attentions: Vec<Attention>,
    /// Of all initiators.
    #[serde(default)]
    pub reservations: Carried,
}

impl UnitState {
    fn flags(&self) -> u8 {
        let flags = [
            (self.write_through, flag::WRITE_THROUGH),
            (self.write_protected, flag::SOFTWARE_PROTECTED),
            (self.descriptor_sense, flag::DESCRIPTOR_SENSE),
            (self.stopped, flag::STOPPED),
        ];
        flags.into_iter().filter(|(on, _)| *on).fold(0, |all, (_, flag)| all | flag)
    }
}

/// A state that a nexus and its unit can have, not yet in force.
#[derive(Debug)]
pub struct ApplyUnit {
    nexus: Arc<Nexus>,
    flags: u8,
    attentions: Vec<Attention>,
    reservations: Judged,
    has_grown: bool,
}

impl Nexus {
    /// The unit as this nexus sees it now.
    pub fn state(&self) -> UnitState {
        let (unit, identity) = (self.unit(), self.unit().identity());
        let (geometry, flags) = (unit.geometry(), unit.flags());
        UnitState {
            name: identity.name.clone(),
            vendor: identity.vendor.clone(),
            product: identity.product.clone(),
            serial: identity.serial.clone(),
            block_bytes: geometry.logical_block.bytes(),
            size_bytes: geometry.size.0,
            read_only: geometry.read_only,
            initiator: self.name().initiator.to_string(),
            write_through: flags & flag::WRITE_THROUGH != 0,
            write_protected: flags & flag::SOFTWARE_PROTECTED != 0,
            descriptor_sense: flags & flag::DESCRIPTOR_SENSE != 0,
            stopped: flags & flag::STOPPED != 0,
            attentions: self.attentions().pending(),
            reservations: self.party().reservations().carried(),
        }
    }

    /// Whether the unit is the one of `state`, and can have what that says. A larger one will do: the initiator is told of it.
    ///
    /// # Errors
    /// The field that says no, what was found, what was expected.
    pub fn judge(self: &Arc<Nexus>, state: UnitState) -> Result<ApplyUnit, String> {
        let own = self.state();
        let wrong = |field: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug, key: &str| {
            Err(format!("{field}: found {found:?}, expected {expected:?}, which the unit has here ({key}=)"))
        };
        for (field, found, expected, key) in [
            ("name", &state.name, &own.name, "unit-name"),
            ("vendor", &state.vendor, &own.vendor, "vendor"),
            ("product", &state.product, &own.product, "product"),
            ("serial", &state.serial, &own.serial, "serial"),
        ] {
            if found != expected {
                return wrong(field, found, expected, key);
            }
        }
        if state.block_bytes != own.block_bytes {
            return wrong("block-bytes", &state.block_bytes, &own.block_bytes, "block-size");
        }
        if state.read_only != own.read_only {
            return wrong("read-only", &state.read_only, &own.read_only, "readonly");
        }
        if state.size_bytes > own.size_bytes {
            let (found, most) = (state.size_bytes, own.size_bytes);
            return Err(format!("size-bytes: found {found}, expected at most {most}, which the unit has here"));
        }
        let flags = state.flags();
        let reservations = self.party().reservations().judge(state.reservations).map_err(|error| match error {
            RestoreError::Impossible { field, found, expected } => {
                format!("reservations.{field}: found {found}, expected {expected}")
            }
            other => other.to_string(),
        })?;
        if state.initiator != own.initiator && !reservations.is_empty() {
            let (found, own) = (state.initiator, own.initiator);
            return Err(format!(
                "initiator: found {found:?}, expected {own:?}: reservations are kept by the controller's name; give it the same id= here"
            ));
        }
        let has_grown = state.size_bytes < own.size_bytes;
        Ok(ApplyUnit { nexus: Arc::clone(self), flags, attentions: state.attentions, reservations, has_grown })
    }
}

impl ApplyUnit {
    /// Whether the unit is larger here than the initiator knows.
    pub fn has_grown(&self) -> bool {
        self.has_grown
    }

    /// Puts it in force. Waits until reservations that have to outlive a loss of power are on stable storage.
    ///
    /// # Errors
    /// When they are not; the state is in force nevertheless.
    pub fn apply(self) -> Result<(), String> {
        const CARRIED: u8 = flag::WRITE_THROUGH | flag::SOFTWARE_PROTECTED | flag::DESCRIPTOR_SENSE | flag::STOPPED;
        let ApplyUnit { nexus, flags, mut attentions, reservations, has_grown } = self;
        nexus.unit().replace_flags(CARRIED, flags);
        if has_grown {
            attentions.push(Attention::CapacityChanged);
        }
        nexus.attentions().replace(&attentions);
        let done = Arc::new(Done::default());
        let ticket = nexus.party().reservations().replace(reservations, Arc::clone(&done) as Arc<dyn Wake>);
        let Some(ticket) = ticket else { return Ok(()) };
        done.wait(Instant::now() + KEPT_WITHIN);
        let name = &nexus.unit().identity().name;
        match ticket.result() {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(format!("unit {name:?}: reservations: {why}")),
            None => {
                Err(format!("unit {name:?}: reservations: not on stable storage within {} s", KEPT_WITHIN.as_secs()))
            }
        }
    }
}

/// Rung when a ticket is decided.
#[derive(Default)]
struct Done {
    rung: Mutex<bool>,
    bell: Condvar,
}

impl Done {
    fn wait(&self, until: Instant) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        drop(self.bell.wait_timeout_while(rung, left, |rung| !*rung));
    }
}

impl Wake for Done {
    fn wake(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.bell.notify_all();
    }
}
