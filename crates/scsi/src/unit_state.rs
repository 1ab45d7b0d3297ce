//! State of a logical unit that an initiator relies on, for the next process that serves it while the initiator
//! continues: for a migrating guest.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use mqblk_core::Wake;
use mqblk_core::lock::lock;
use serde::{Deserialize, Serialize};

use crate::logical_unit::{Nexus, flag};
use crate::reservation::{ReservationSnapshot, RestoreError, ValidatedReservations};
use crate::unit_attention::UnitAttention;

/// Timeout for making reservations durable.
const SAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A logical unit as one nexus sees it: its identity, and the initiator's changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct UnitState {
    /// See [`Identity`](crate::Identity). Its revision may differ: it is the version of the process that serves the
    /// logical unit.
    pub name: String,
    /// See [`Identity`](crate::Identity).
    pub vendor: String,
    /// See [`Identity`](crate::Identity).
    pub product: String,
    /// See [`Identity`](crate::Identity).
    pub serial: String,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// Size of the logical unit in bytes.
    pub size_bytes: u64,
    /// True if the disk is read-only.
    pub read_only: bool,
    /// Name of the initiator port, by which registrations are stored.
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
    /// Unit attentions that have not been reported, in the order of reporting.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attentions: Vec<UnitAttention>,
    /// Reservations of all initiators.
    #[serde(default)]
    pub reservations: ReservationSnapshot,
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

/// A validated state of a nexus and its logical unit, not yet applied.
#[derive(Debug)]
pub struct ValidatedUnitState {
    nexus: Arc<Nexus>,
    flags: u8,
    attentions: Vec<UnitAttention>,
    reservations: ValidatedReservations,
    has_grown: bool,
}

impl Nexus {
    /// Returns the current state of the logical unit as this nexus sees it.
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
            reservations: self.reservation().reservations().snapshot(),
        }
    }

    /// Validates `state`: it must belong to this logical unit, and be possible for it. A larger logical unit is
    /// accepted; the initiator is notified.
    ///
    /// # Errors
    /// If it is invalid: the field, the found and the expected value.
    pub fn validate_state(self: &Arc<Nexus>, state: UnitState) -> Result<ValidatedUnitState, String> {
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
        let reservations =
            self.reservation().reservations().validate(state.reservations).map_err(|error| match error {
                RestoreError::InvalidField { field, found, expected } => {
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
        Ok(ValidatedUnitState { nexus: Arc::clone(self), flags, attentions: state.attentions, reservations, has_grown })
    }
}

impl ValidatedUnitState {
    /// Returns true if the logical unit is larger here than the initiator knows.
    pub fn has_grown(&self) -> bool {
        self.has_grown
    }

    /// Applies the state. Blocks until reservations with APTPL are on stable storage.
    ///
    /// # Errors
    /// If they cannot be made durable; the state is applied nevertheless.
    pub fn apply(self) -> Result<(), String> {
        const CARRIED: u8 = flag::WRITE_THROUGH | flag::SOFTWARE_PROTECTED | flag::DESCRIPTOR_SENSE | flag::STOPPED;
        let ValidatedUnitState { nexus, flags, mut attentions, reservations, has_grown } = self;
        nexus.unit().replace_flags(CARRIED, flags);
        if has_grown {
            attentions.push(UnitAttention::CapacityChanged);
        }
        nexus.attentions().replace(&attentions);
        let done = Arc::new(BlockingWaker::default());
        let ticket = nexus.reservation().reservations().replace(reservations, Arc::clone(&done) as Arc<dyn Wake>);
        let Some(ticket) = ticket else { return Ok(()) };
        done.wait(Instant::now() + SAVE_TIMEOUT);
        let name = &nexus.unit().identity().name;
        match ticket.result() {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(format!("unit {name:?}: reservations: {why}")),
            None => {
                Err(format!("unit {name:?}: reservations: not on stable storage within {} s", SAVE_TIMEOUT.as_secs()))
            }
        }
    }
}

/// Waker that a thread blocks on until a ticket is resolved.
#[derive(Default)]
struct BlockingWaker {
    woken: Mutex<bool>,
    condvar: Condvar,
}

impl BlockingWaker {
    fn wait(&self, deadline: Instant) {
        let woken = lock(&self.woken);
        let left = deadline.saturating_duration_since(Instant::now());
        drop(self.condvar.wait_timeout_while(woken, left, |woken| !*woken));
    }
}

impl Wake for BlockingWaker {
    fn wake(&self) {
        *lock(&self.woken) = true;
        self.condvar.notify_all();
    }
}
