//! Reads the state of a device from xenstore.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

use crate::resize_key::RESIZE_KEY;
use crate::state_machine::ObservedState;
use crate::toolstack::{MADE_BY_KEY, OUR_NAME, read_guest_key};

/// Reads the `online` key: false if the toolstack wants to remove the device.
pub(crate) fn read_online(
    mut read: impl FnMut(&str) -> Result<Option<String>, XenstoreError>,
    backend: &str,
) -> Result<bool, XenstoreError> {
    let value = read(&format!("{backend}/{}", keys::ONLINE))?;
    Ok(value.is_none_or(|value| value.trim() != "0"))
}

/// Returns true if this program has created the device's directory and the frontend's domain is gone.
pub(crate) fn is_abandoned(
    mut read: impl FnMut(&str) -> Result<Option<String>, XenstoreError>,
    backend: &str,
    front: DomainId,
) -> Result<bool, XenstoreError> {
    if read(&format!("{backend}/{MADE_BY_KEY}"))?.as_deref() != Some(OUR_NAME) {
        return Ok(false);
    }
    match read(&vbd::domain_path(front)) {
        Ok(name) => Ok(name.is_none()),
        Err(error) if error.is_lost() => Err(error),
        // A driver domain may not read this directory.
        Err(_) => Ok(false),
    }
}

/// Reads the state of a device and its pending resize request.
pub(crate) fn observe(
    store: &mut Xenstore,
    backend: &str,
    (front, frontend): (DomainId, &str),
) -> Result<(ObservedState, Option<String>), XenstoreError> {
    let state = store.read(&format!("{backend}/{}", keys::STATE))?;
    let online = read_online(|path| store.read(path), backend)?;
    let resize = store.read(&format!("{backend}/{RESIZE_KEY}"))?;
    let value = read_guest_key(store, &format!("{frontend}/{}", keys::STATE))?;
    let abandoned = value.is_none() && is_abandoned(|path| store.read(path), backend, front)?;
    let backend = state.map(|state| XenbusState::parse(Some(&state)));
    Ok((ObservedState { backend, frontend: XenbusState::parse(value.as_deref()), online, abandoned }, resize))
}
