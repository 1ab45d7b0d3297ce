//! Lists the devices of a type, from xenstore.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

use super::device_nodes::{DevicePaths, parse_optional, read_end_states, read_guest_key};
use crate::name::DeviceName;

/// A device, as read from xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    /// The device.
    pub name: DeviceName,
    /// The backend's state.
    pub backend: XenbusState,
    /// The frontend's state.
    pub frontend: XenbusState,
    /// The `online` key: false if the device is being removed.
    pub online: bool,
    /// Its storage: the `params` key.
    pub params: String,
    /// `w` or `r`.
    pub mode: String,
    /// Size in units of 512 bytes, once the backend has published it.
    pub sectors: Option<u64>,
    /// Number of rings, once the frontend has published them.
    pub queues: Option<u64>,
    /// Maximum number of rings.
    pub max_queues: Option<u64>,
    /// The backend's error.
    pub error: Option<String>,
}

/// Returns all devices with a backend of a type in domain `own`, sorted by name.
///
/// # Errors
/// When xenstore refuses.
pub fn list(store: &mut Xenstore, own: DomainId, type_name: &str) -> Result<Vec<ListedDevice>, XenstoreError> {
    let dir = vbd::backends_path(own, type_name);
    let mut found = Vec::new();
    for front in store.list(&dir)?.unwrap_or_default() {
        let Ok(front) = front.parse().map(DomainId) else { continue };
        for devid in store.list(&format!("{dir}/{}", front.0))?.unwrap_or_default() {
            let Ok(devid) = devid.parse() else { continue };
            let name = DeviceName { type_name: type_name.to_owned(), frontend_id: front, devid };
            found.extend(read_device(store, own, name)?);
        }
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

fn read_device(store: &mut Xenstore, own: DomainId, name: DeviceName) -> Result<Option<ListedDevice>, XenstoreError> {
    let paths = DevicePaths::new(own, &name);
    let now = read_end_states(store, &paths)?;
    let Some(backend) = now.backend else { return Ok(None) };
    let mut read = |key: &str| store.read(&format!("{}/{key}", paths.backend));
    let (params, mode) = (read(keys::PARAMS)?.unwrap_or_default(), read(keys::MODE)?.unwrap_or_default());
    let online = read(keys::ONLINE)?.is_none_or(|value| value.trim() != "0");
    let (sectors, max_queues) =
        (parse_optional(read(keys::SECTORS)?), parse_optional(read(keys::MULTI_QUEUE_MAX_QUEUES)?));
    let published = matches!(now.frontend, XenbusState::Initialised | XenbusState::Connected);
    let queues = match published {
        true => {
            let key = format!("{}/{}", paths.frontend, keys::MULTI_QUEUE_NUM_QUEUES);
            Some(parse_optional(read_guest_key(store, &key)?).unwrap_or(1))
        }
        false => None,
    };
    let (frontend, error) = (now.frontend, now.error);
    Ok(Some(ListedDevice { name, backend, frontend, online, params, mode, sectors, queues, max_queues, error }))
}
