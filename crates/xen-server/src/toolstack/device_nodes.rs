//! A device's nodes in xenstore.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

use crate::name::DeviceName;

/// Paths of a device in xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePaths {
    /// The backend's directory.
    pub backend: String,
    /// The frontend's directory.
    pub frontend: String,
    pub(super) error: String,
}

impl DevicePaths {
    /// Returns the paths of a device whose backend is in domain `own`.
    pub fn new(own: DomainId, name: &DeviceName) -> DevicePaths {
        DevicePaths {
            backend: vbd::backend_path(own, &name.type_name, name.frontend_id, name.devid),
            frontend: vbd::frontend_path(name.frontend_id, name.devid),
            error: vbd::backend_error_path(own, &name.type_name, name.frontend_id, name.devid),
        }
    }
}

/// The states of both ends, and the backend's error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndStates {
    /// The backend's state; `None`: the device does not exist.
    pub backend: Option<XenbusState>,
    /// The frontend's state.
    pub frontend: XenbusState,
    /// The backend's `error` node.
    pub error: Option<String>,
}

pub(super) fn read_end_states(store: &mut Xenstore, paths: &DevicePaths) -> Result<EndStates, XenstoreError> {
    let backend = store.read(&format!("{}/{}", paths.backend, keys::STATE))?;
    let frontend = read_guest_key(store, &format!("{}/{}", paths.frontend, keys::STATE))?;
    Ok(EndStates {
        backend: backend.map(|state| XenbusState::parse(Some(&state))),
        frontend: XenbusState::parse(frontend.as_deref()),
        error: store.read(&paths.error)?,
    })
}

/// Reads a key that a guest writes. An unreadable value counts as missing.
pub(crate) fn read_guest_key(store: &mut Xenstore, path: &str) -> Result<Option<String>, XenstoreError> {
    store.read(path).or_else(|error| if error.is_lost() { Err(error) } else { Ok(None) })
}

/// Parses a number; `None` if it is missing or none.
pub(super) fn parse_optional(value: Option<String>) -> Option<u64> {
    value?.trim().parse().ok()
}
