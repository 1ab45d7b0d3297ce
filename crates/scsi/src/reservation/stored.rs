//! Registrations and reservations as text, for a [`ReservationStore`](super::ReservationStore): JSON with a version
//! and a checksum over its content. A file that is damaged, or has another format, is never read as "no
//! reservations".

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::access::ReservationType;
use super::executed::{self, ExecutedCommand, ExecutedCommands};
use super::nexus_name::{MAX_NAME_LEN, NexusName};
use super::state::{MAX_REGISTRATIONS, Registration, Reservation, ReservationState};
use super::transport_id::fnv1a;

const FORMAT: &str = "mqblk-reservations";
const VERSION: u32 = 1;

/// Reason why stored reservations cannot be restored.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RestoreError {
    /// Not JSON of the expected structure.
    #[error("kept reservations are not readable: {0}")]
    Unreadable(String),
    /// A file of another format.
    #[error("kept reservations: `format` is {0:?}, expected {FORMAT:?}")]
    WrongFormat(String),
    /// Written by another version.
    #[error("kept reservations: `version` is {0}, expected {VERSION}")]
    Version(u64),
    /// The content does not match its checksum.
    #[error("kept reservations are damaged: `checksum` is {found}, of the content {expected}")]
    Checksum {
        /// Checksum in the file.
        found: String,
        /// Checksum of its content.
        expected: String,
    },
    /// A field has an invalid value.
    #[error("kept reservations: {field}: {found}, expected {expected}")]
    InvalidField {
        /// Field name.
        field: &'static str,
        /// Its value.
        found: String,
        /// The expected value.
        expected: &'static str,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredFile {
    format: String,
    version: u32,
    checksum: String,
    state: StoredState,
}

/// Fields that identify a file; read first.
#[derive(Deserialize)]
struct FileHeader {
    format: String,
    version: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredState {
    /// The last APTPL bit. If false nothing else is stored.
    aptpl: bool,
    registrations: Vec<StoredRegistration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reservation: Option<StoredReservation>,
    /// Commands whose changes the state has, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    executed: Vec<StoredCommand>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredCommand {
    nexus: StoredNexus,
    /// In hexadecimal.
    digest: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredRegistration {
    nexus: StoredNexus,
    /// In hexadecimal, as tools print it.
    key: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredNexus {
    initiator: String,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredReservation {
    r#type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<StoredNexus>,
}

/// Names of the reservation types in the file.
const TYPE_NAMES: [(ReservationType, &str); 6] = [
    (ReservationType::WriteExclusive, "write-exclusive"),
    (ReservationType::ExclusiveAccess, "exclusive-access"),
    (ReservationType::WriteExclusiveRegistrantsOnly, "write-exclusive-registrants-only"),
    (ReservationType::ExclusiveAccessRegistrantsOnly, "exclusive-access-registrants-only"),
    (ReservationType::WriteExclusiveAllRegistrants, "write-exclusive-all-registrants"),
    (ReservationType::ExclusiveAccessAllRegistrants, "exclusive-access-all-registrants"),
];

impl From<&NexusName> for StoredNexus {
    fn from(name: &NexusName) -> StoredNexus {
        StoredNexus { initiator: name.initiator.to_string(), port: name.port }
    }
}

fn checksum(content: &StoredState) -> String {
    // Over the text without whitespace, so that a file may be reformatted.
    let text = serde_json::to_vec(content).unwrap_or_default();
    format!("{:016x}", fnv1a(&text))
}

/// Encodes a state. PRGENERATION, RESERVE(6) and RESERVE(10) do not persist through power loss.
pub(super) fn encode(state: &ReservationState) -> Vec<u8> {
    let (registrations, reservation, executed) = match state.aptpl {
        true => (registrations(state), reservation(state), executed(state)),
        false => (Vec::new(), None, Vec::new()),
    };
    let content = StoredState { aptpl: state.aptpl, registrations, reservation, executed };
    let file = StoredFile { format: FORMAT.into(), version: VERSION, checksum: checksum(&content), state: content };
    let mut text = serde_json::to_vec_pretty(&file).unwrap_or_default();
    text.push(b'\n');
    text
}

fn executed(state: &ReservationState) -> Vec<StoredCommand> {
    let kept = |command: &ExecutedCommand| StoredCommand {
        nexus: StoredNexus::from(&command.nexus),
        digest: format!("{:#018x}", command.digest),
    };
    state.executed.commands.iter().map(kept).collect()
}

pub(super) fn registrations(state: &ReservationState) -> Vec<StoredRegistration> {
    let kept = |held: &Registration| StoredRegistration {
        nexus: StoredNexus::from(&held.nexus),
        key: format!("{:#018x}", held.key),
    };
    state.registrations.iter().map(kept).collect()
}

pub(super) fn reservation(state: &ReservationState) -> Option<StoredReservation> {
    state.reservation.as_ref().map(|held| StoredReservation {
        r#type: TYPE_NAMES.iter().find(|(kind, _)| *kind == held.kind).map_or("", |(_, name)| name).into(),
        holder: held.holder.as_ref().map(StoredNexus::from),
    })
}

/// Decodes a state.
pub(super) fn decode(text: &[u8]) -> Result<ReservationState, RestoreError> {
    let unreadable = |error: serde_json::Error| RestoreError::Unreadable(error.to_string());
    let head: FileHeader = serde_json::from_slice(text).map_err(unreadable)?;
    if head.format != FORMAT {
        return Err(RestoreError::WrongFormat(head.format));
    }
    if head.version != u64::from(VERSION) {
        return Err(RestoreError::Version(head.version));
    }
    let file: StoredFile = serde_json::from_slice(text).map_err(unreadable)?;
    let expected = checksum(&file.state);
    if file.checksum != expected {
        return Err(RestoreError::Checksum { found: file.checksum, expected });
    }
    validate(file.state)
}

pub(super) fn invalid_field<T: ToString + ?Sized>(
    field: &'static str,
    found: &T,
    expected: &'static str,
) -> RestoreError {
    RestoreError::InvalidField { field, found: found.to_string(), expected }
}

pub(super) fn nexus(kept: StoredNexus, field: &'static str) -> Result<NexusName, RestoreError> {
    if kept.initiator.is_empty() || kept.initiator.len() > MAX_NAME_LEN {
        return Err(invalid_field(field, &kept.initiator, "a name of 1 to 255 bytes"));
    }
    Ok(NexusName { initiator: kept.initiator.into(), port: kept.port })
}

fn validate(content: StoredState) -> Result<ReservationState, RestoreError> {
    if !content.aptpl && (!content.registrations.is_empty() || content.reservation.is_some()) {
        return Err(invalid_field("aptpl", &false, "true where there are registrations or a reservation"));
    }
    let (registrations, reservation) = validate_reservations(content.registrations, content.reservation)?;
    let executed = validate_executed(content.executed)?;
    Ok(ReservationState { aptpl: content.aptpl, registrations, reservation, executed, ..ReservationState::default() })
}

fn validate_executed(kept: Vec<StoredCommand>) -> Result<ExecutedCommands, RestoreError> {
    if kept.len() > executed::MAX_COMMANDS {
        return Err(invalid_field("executed", &kept.len(), "16 at most"));
    }
    let command = |kept: StoredCommand| {
        let digest = hexadecimal(&kept.digest);
        let digest =
            digest.ok_or_else(|| invalid_field("executed.digest", &kept.digest, "a number in hexadecimal with 0x"))?;
        Ok(ExecutedCommand { nexus: nexus(kept.nexus, "executed.nexus")?, digest, by_previous_process: true })
    };
    Ok(ExecutedCommands { commands: kept.into_iter().map(command).collect::<Result<_, _>>()? })
}

fn hexadecimal(text: &str) -> Option<u64> {
    text.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok())
}

/// Validates registrations and the reservation that goes with them.
pub(super) fn validate_reservations(
    kept: Vec<StoredRegistration>,
    reservation: Option<StoredReservation>,
) -> Result<(Vec<Registration>, Option<Reservation>), RestoreError> {
    let count = kept.len();
    if count > MAX_REGISTRATIONS {
        return Err(invalid_field("registrations", &count, "1024 at most"));
    }
    let mut keys = BTreeMap::new();
    let mut registrations = Vec::with_capacity(count);
    for kept in kept {
        let nexus = nexus(kept.nexus, "registrations.nexus")?;
        let Some(key) = hexadecimal(&kept.key).filter(|key| *key != 0) else {
            return Err(invalid_field("registrations.key", &kept.key, "a number other than 0 in hexadecimal with 0x"));
        };
        if keys.insert(nexus.clone(), key).is_some() {
            return Err(invalid_field("registrations", &nexus, "each nexus once"));
        }
        registrations.push(Registration { nexus, key });
    }
    let reservation = reservation.map(|kept| {
        let found = TYPE_NAMES.iter().find(|(_, name)| *name == kept.r#type);
        let Some((kind, _)) = found else {
            return Err(invalid_field("reservation.type", &kept.r#type, "a type of persistent reservation"));
        };
        let holder = kept.holder.map(|holder| nexus(holder, "reservation.holder")).transpose()?;
        match &holder {
            Some(holder) if !keys.contains_key(holder) => {
                Err(invalid_field("reservation.holder", holder, "a registered nexus"))
            }
            holder if holder.is_some() == kind.is_all_registrants() => {
                Err(invalid_field("reservation.holder", &kept.r#type, "one, and none for the all-registrants types"))
            }
            None if keys.is_empty() => {
                Err(invalid_field("registrations", &0, "one at least where there is a reservation"))
            }
            _ => Ok(Reservation { kind: *kind, holder }),
        }
    });
    Ok((registrations, reservation.transpose()?))
}
