//! Registrations and reservations as text, for a [`ReservationStore`](super::ReservationStore): JSON with a version
//! and a checksum over its content. A file that is damaged, or has another format, is never read as "no
//! reservations".

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::access::Kind;
use super::executed::{self, Command, Executed};
use super::state::{MOST_REGISTRATIONS, Registration, Reservation, State};
use super::transport_id::fnv1a;
use super::{LONGEST_NAME, NexusName};

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
    Foreign(String),
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
    Impossible {
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
struct File {
    format: String,
    version: u32,
    checksum: String,
    state: Content,
}

/// Fields that identify a file; read first.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    /// The last APTPL bit. If false nothing else is stored.
    aptpl: bool,
    registrations: Vec<KeptRegistration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reservation: Option<KeptReservation>,
    /// Commands whose changes the state has, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    executed: Vec<KeptCommand>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptCommand {
    nexus: KeptNexus,
    /// In hexadecimal.
    digest: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeptRegistration {
    nexus: KeptNexus,
    /// In hexadecimal, as tools print it.
    key: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeptNexus {
    initiator: String,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeptReservation {
    r#type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<KeptNexus>,
}

/// Names of the reservation types in the file.
const KINDS: [(Kind, &str); 6] = [
    (Kind::WriteExclusive, "write-exclusive"),
    (Kind::ExclusiveAccess, "exclusive-access"),
    (Kind::WriteExclusiveRegistrantsOnly, "write-exclusive-registrants-only"),
    (Kind::ExclusiveAccessRegistrantsOnly, "exclusive-access-registrants-only"),
    (Kind::WriteExclusiveAllRegistrants, "write-exclusive-all-registrants"),
    (Kind::ExclusiveAccessAllRegistrants, "exclusive-access-all-registrants"),
];

impl From<&NexusName> for KeptNexus {
    fn from(name: &NexusName) -> KeptNexus {
        KeptNexus { initiator: name.initiator.to_string(), port: name.port }
    }
}

fn checksum(content: &Content) -> String {
    // Over the text without whitespace, so that a file may be reformatted.
    let text = serde_json::to_vec(content).unwrap_or_default();
    format!("{:016x}", fnv1a(&text))
}

/// Encodes a state. PRGENERATION, RESERVE(6) and RESERVE(10) do not persist through power loss.
pub(super) fn write(state: &State) -> Vec<u8> {
    let (registrations, reservation, executed) = match state.persist {
        true => (registrations(state), reservation(state), executed(state)),
        false => (Vec::new(), None, Vec::new()),
    };
    let content = Content { aptpl: state.persist, registrations, reservation, executed };
    let file = File { format: FORMAT.into(), version: VERSION, checksum: checksum(&content), state: content };
    let mut text = serde_json::to_vec_pretty(&file).unwrap_or_default();
    text.push(b'\n');
    text
}

fn executed(state: &State) -> Vec<KeptCommand> {
    let kept = |command: &Command| KeptCommand {
        nexus: KeptNexus::from(&command.nexus),
        digest: format!("{:#018x}", command.digest),
    };
    state.executed.commands.iter().map(kept).collect()
}

pub(super) fn registrations(state: &State) -> Vec<KeptRegistration> {
    let kept = |held: &Registration| KeptRegistration {
        nexus: KeptNexus::from(&held.nexus),
        key: format!("{:#018x}", held.key),
    };
    state.registrations.iter().map(kept).collect()
}

pub(super) fn reservation(state: &State) -> Option<KeptReservation> {
    state.reservation.as_ref().map(|held| KeptReservation {
        r#type: KINDS.iter().find(|(kind, _)| *kind == held.kind).map_or("", |(_, name)| name).into(),
        holder: held.holder.as_ref().map(KeptNexus::from),
    })
}

/// Decodes a state.
pub(super) fn read(text: &[u8]) -> Result<State, RestoreError> {
    let unreadable = |error: serde_json::Error| RestoreError::Unreadable(error.to_string());
    let head: Head = serde_json::from_slice(text).map_err(unreadable)?;
    if head.format != FORMAT {
        return Err(RestoreError::Foreign(head.format));
    }
    if head.version != u64::from(VERSION) {
        return Err(RestoreError::Version(head.version));
    }
    let file: File = serde_json::from_slice(text).map_err(unreadable)?;
    let expected = checksum(&file.state);
    if file.checksum != expected {
        return Err(RestoreError::Checksum { found: file.checksum, expected });
    }
    judge(file.state)
}

pub(super) fn impossible<T: ToString + ?Sized>(field: &'static str, found: &T, expected: &'static str) -> RestoreError {
    RestoreError::Impossible { field, found: found.to_string(), expected }
}

pub(super) fn nexus(kept: KeptNexus, field: &'static str) -> Result<NexusName, RestoreError> {
    if kept.initiator.is_empty() || kept.initiator.len() > LONGEST_NAME {
        return Err(impossible(field, &kept.initiator, "a name of 1 to 255 bytes"));
    }
    Ok(NexusName { initiator: kept.initiator.into(), port: kept.port })
}

fn judge(content: Content) -> Result<State, RestoreError> {
    if !content.aptpl && (!content.registrations.is_empty() || content.reservation.is_some()) {
        return Err(impossible("aptpl", &false, "true where there are registrations or a reservation"));
    }
    let (registrations, reservation) = judge_held(content.registrations, content.reservation)?;
    let executed = judge_executed(content.executed)?;
    Ok(State { persist: content.aptpl, registrations, reservation, executed, ..State::default() })
}

fn judge_executed(kept: Vec<KeptCommand>) -> Result<Executed, RestoreError> {
    if kept.len() > executed::MOST {
        return Err(impossible("executed", &kept.len(), "16 at most"));
    }
    let command = |kept: KeptCommand| {
        let digest = hexadecimal(&kept.digest);
        let digest =
            digest.ok_or_else(|| impossible("executed.digest", &kept.digest, "a number in hexadecimal with 0x"))?;
        Ok(Command { nexus: nexus(kept.nexus, "executed.nexus")?, digest, earlier: true })
    };
    Ok(Executed { commands: kept.into_iter().map(command).collect::<Result<_, _>>()? })
}

fn hexadecimal(text: &str) -> Option<u64> {
    text.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok())
}

/// Validates registrations and the reservation that goes with them.
pub(super) fn judge_held(
    kept: Vec<KeptRegistration>,
    reservation: Option<KeptReservation>,
) -> Result<(Vec<Registration>, Option<Reservation>), RestoreError> {
    let count = kept.len();
    if count > MOST_REGISTRATIONS {
        return Err(impossible("registrations", &count, "1024 at most"));
    }
    let mut keys = BTreeMap::new();
    let mut registrations = Vec::with_capacity(count);
    for kept in kept {
        let nexus = nexus(kept.nexus, "registrations.nexus")?;
        let Some(key) = hexadecimal(&kept.key).filter(|key| *key != 0) else {
            return Err(impossible("registrations.key", &kept.key, "a number other than 0 in hexadecimal with 0x"));
        };
        if keys.insert(nexus.clone(), key).is_some() {
            return Err(impossible("registrations", &nexus, "each nexus once"));
        }
        registrations.push(Registration { nexus, key });
    }
    let reservation = reservation.map(|kept| {
        let found = KINDS.iter().find(|(_, name)| *name == kept.r#type);
        let Some((kind, _)) = found else {
            return Err(impossible("reservation.type", &kept.r#type, "a type of persistent reservation"));
        };
        let holder = kept.holder.map(|holder| nexus(holder, "reservation.holder")).transpose()?;
        match &holder {
            Some(holder) if !keys.contains_key(holder) => {
                Err(impossible("reservation.holder", holder, "a registered nexus"))
            }
            holder if holder.is_some() == kind.all_registrants() => {
                Err(impossible("reservation.holder", &kept.r#type, "one, and none for the all-registrants types"))
            }
            None if keys.is_empty() => {
                Err(impossible("registrations", &0, "one at least where there is a reservation"))
            }
            _ => Ok(Reservation { kind: *kind, holder }),
        }
    });
    Ok((registrations, reservation.transpose()?))
}
