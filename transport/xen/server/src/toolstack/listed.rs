//! The devices of a type, as xenstore tells of them.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

use super::{Places, ends, number, read_of_guest};
use crate::name::DeviceName;

/// A device, as xenstore tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Which.
    pub name: DeviceName,
    /// The backend's state.
    pub backend: XenbusState,
    /// The frontend's state.
    pub frontend: XenbusState,
    /// Whether it is to stay.
    pub online: bool,
    /// What is behind it.
    pub params: String,
    /// `w` or `r`.
    pub mode: String,
    /// Size in units of 512 bytes, once the backend has told it.
    pub sectors: Option<u64>,
    /// Rings that the frontend has, once it has published some.
    pub queues: Option<u64>,
    /// Rings that it may have.
    pub max_queues: Option<u64>,
    /// What the backend complains of.
    pub error: Option<String>,
}

/// All devices with a backend of a type in domain `own`.
///
/// # Errors
/// When xenstore refuses.
pub fn list(store: &mut Xenstore, own: DomainId, type_name: &str) -> Result<Vec<Listed>, XenstoreError> {
    let folder = vbd::backends_path(own, type_name);
    let mut found = Vec::new();
    for front in store.list(&folder)?.unwrap_or_default() {
        let Ok(front) = front.parse().map(DomainId) else { continue };
        for devid in store.list(&format!("{folder}/{}", front.0))?.unwrap_or_default() {
            let Ok(devid) = devid.parse() else { continue };
            let name = DeviceName { type_name: type_name.to_owned(), front, devid };
            found.extend(listed(store, own, name)?);
        }
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

fn listed(store: &mut Xenstore, own: DomainId, name: DeviceName) -> Result<Option<Listed>, XenstoreError> {
    let places = Places::of(own, &name);
    let now = ends(store, &places)?;
    let Some(backend) = now.backend else { return Ok(None) };
    let mut read = |key: &str| store.read(&format!("{}/{key}", places.backend));
    let (params, mode) = (read(keys::PARAMS)?.unwrap_or_default(), read(keys::MODE)?.unwrap_or_default());
    let online = read(keys::ONLINE)?.is_none_or(|value| value.trim() != "0");
    let (sectors, max_queues) = (number(read(keys::SECTORS)?), number(read(keys::MULTI_QUEUE_MAX_QUEUES)?));
    let published = matches!(now.frontend, XenbusState::Initialised | XenbusState::Connected);
    let queues = match published {
        true => {
            let key = format!("{}/{}", places.frontend, keys::MULTI_QUEUE_NUM_QUEUES);
            Some(number(read_of_guest(store, &key)?).unwrap_or(1))
        }
        false => None,
    };
    let (frontend, error) = (now.frontend, now.error);
    Ok(Some(Listed { name, backend, frontend, online, params, mode, sectors, queues, max_queues, error }))
}
