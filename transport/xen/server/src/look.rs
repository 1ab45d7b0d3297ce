//! Reads the state of a device from xenstore.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

use crate::life::Seen;
use crate::resize::RESIZE;
use crate::toolstack::{MADE_BY, US, read_of_guest};

/// Reads the `online` key: false if the toolstack wants to remove the device.
pub(crate) fn online(
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
    if read(&format!("{backend}/{MADE_BY}"))?.as_deref() != Some(US) {
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
pub(crate) fn look(
    store: &mut Xenstore,
    backend: &str,
    (front, frontend): (DomainId, &str),
) -> Result<(Seen, Option<String>), XenstoreError> {
    let state = store.read(&format!("{backend}/{}", keys::STATE))?;
    let online = online(|path| store.read(path), backend)?;
    let resize = store.read(&format!("{backend}/{RESIZE}"))?;
    let value = read_of_guest(store, &format!("{frontend}/{}", keys::STATE))?;
    let abandoned = value.is_none() && is_abandoned(|path| store.read(path), backend, front)?;
    let backend = state.map(|state| XenbusState::parse(Some(&state)));
    Ok((Seen { backend, frontend: XenbusState::parse(value.as_deref()), online, abandoned }, resize))
}
