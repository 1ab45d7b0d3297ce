//! Toolstack functions: create and remove devices through xenstore alone, without the process that serves them.

mod device_list;
mod device_nodes;

use std::time::{Duration, Instant};

use mqblk_core::Resize;
use mqblk_memory::DomainId;
use mqblk_xen::XenError;
use mqblk_xen::store::{Access, Permission, Transaction, Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

pub use device_list::{ListedDevice, list};
pub(crate) use device_nodes::read_guest_key;
pub use device_nodes::{DevicePaths, EndStates};

use crate::name::DeviceName;
use crate::resize_key::{RESIZE_ERROR_KEY, RESIZE_KEY, format_request};
use device_nodes::{parse_optional, read_end_states};

/// Key in a backend's directory: the program that has created it, and removes it when the frontend's domain is gone.
pub(crate) const MADE_BY_KEY: &str = "made-by";
/// Value of [`MADE_BY_KEY`] for this program.
pub(crate) const OUR_NAME: &str = "mqblk";

/// Error of a toolstack function.
#[derive(Debug, thiserror::Error)]
pub enum ToolstackError {
    /// Xenstore has refused.
    #[error(transparent)]
    Store(#[from] XenstoreError),
    /// Xenstore cannot be reached.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// The domain does not exist.
    #[error("domid: found {0}, expected a domain that is there")]
    NoSuchDomain(u16),
    /// The device's number is in use.
    #[error("vdev: found {vdev}, which domain {front} has already ({what}), expected one that is free")]
    VdevInUse {
        /// The guest's device name.
        vdev: String,
        /// The domain.
        front: u16,
        /// The user of the number.
        what: String,
    },
    /// The device does not exist.
    #[error("vdev: found {vdev}, which domain {front} does not have with a backend of type {type_name}")]
    NoSuchDevice {
        /// The guest's device name.
        vdev: String,
        /// The domain.
        front: u16,
        /// The backend type.
        type_name: String,
    },
    /// The backend has reported an error.
    #[error("{name}: the backend says: {why}")]
    BackendFailed {
        /// The device.
        name: DeviceName,
        /// The error.
        why: String,
    },
    /// The timeout has expired.
    #[error(
        "{name}: found backend state {backend} and frontend state {frontend} after {waited:?}, expected {expected}{hint}"
    )]
    TimedOut {
        /// The device.
        name: DeviceName,
        /// State of the backend.
        backend: XenbusState,
        /// State of the frontend.
        frontend: XenbusState,
        /// The timeout.
        waited: Duration,
        /// The expected state.
        expected: &'static str,
        /// A possible cause.
        hint: &'static str,
    },
}

/// A device to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDevice {
    /// The device.
    pub name: DeviceName,
    /// Its storage: the `params` key.
    pub params: String,
    /// The disk is read-only.
    pub read_only: bool,
}

/// Result of [`attach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachResult {
    /// The device was created.
    Created,
    /// The device existed, with the same `params`.
    Existing,
}

/// Creates a device: both directories in one transaction, because each end expects the other's.
///
/// # Errors
/// When the domain does not exist, has another device of this number, or xenstore refuses.
pub fn attach(store: &mut Xenstore, own: DomainId, device: &NewDevice) -> Result<AttachResult, ToolstackError> {
    let NewDevice { name, params, read_only } = device;
    let DevicePaths { backend, frontend, error } = DevicePaths::new(own, name);
    enum Found {
        Made(AttachResult),
        NoDomain,
        Taken(String),
    }
    let found = store.transaction(|transaction| {
        if transaction.list(&vbd::domain_path(name.frontend_id))?.is_none() {
            return Ok(Found::NoDomain);
        }
        if transaction.read(&format!("{backend}/{}", keys::STATE))?.is_some() {
            let existing = transaction.read(&format!("{backend}/{}", keys::PARAMS))?.unwrap_or_default();
            let same = existing == *params;
            return Ok(if same {
                Found::Made(AttachResult::Existing)
            } else {
                Found::Taken(format!("params {existing}"))
            });
        }
        if let Some(other) = transaction.read(&format!("{frontend}/{}", keys::BACKEND))?
            && other != backend
            && transaction.read(&format!("{other}/{}", keys::STATE))?.is_some()
        {
            return Ok(Found::Taken(format!("backend {other}")));
        }
        // Remains of a device without a backend.
        for path in [&backend, &frontend, &error] {
            transaction.remove(path)?;
        }
        let (front, vdev) = (name.frontend_id, name.vdev());
        let mode = if *read_only { "r" } else { "w" };
        let pairs: [(&str, &str); 13] = [
            (MADE_BY_KEY, OUR_NAME),
            (keys::FRONTEND, &frontend),
            (keys::FRONTEND_ID, &front.0.to_string()),
            (keys::ONLINE, "1"),
            (keys::REMOVABLE, "0"),
            (keys::BOOTABLE, "1"),
            (keys::DEV, &vdev),
            (keys::TYPE, &name.type_name),
            (keys::PARAMS, params),
            (keys::MODE, mode),
            (keys::DEVICE_TYPE, "disk"),
            (keys::SPECIFICATION, "xen"),
            (keys::STATE, "1"),
        ];
        create_directory(transaction, &backend, [own, front], &pairs)?;
        let pairs = [
            (keys::BACKEND, backend.as_str()),
            (keys::BACKEND_ID, &own.0.to_string()),
            (keys::VIRTUAL_DEVICE, &name.devid.to_string()),
            (keys::DEVICE_TYPE, "disk"),
            (keys::STATE, "1"),
        ];
        create_directory(transaction, &frontend, [front, own], &pairs)?;
        Ok(Found::Made(AttachResult::Created))
    })?;
    match found {
        Found::Made(made) => Ok(made),
        Found::NoDomain => Err(ToolstackError::NoSuchDomain(name.frontend_id.0)),
        Found::Taken(what) => Err(ToolstackError::VdevInUse { vdev: name.vdev(), front: name.frontend_id.0, what }),
    }
}

/// Creates a directory that the first domain owns and the second may read, with its keys.
fn create_directory(
    transaction: &mut Transaction<'_>,
    dir: &str,
    [owner, reader]: [DomainId; 2],
    pairs: &[(&str, &str)],
) -> Result<(), XenstoreError> {
    let permissions =
        [Permission { domain: owner, access: Access::None }, Permission { domain: reader, access: Access::Read }];
    transaction.mkdir(dir)?;
    transaction.set_permissions(dir, &permissions)?;
    for (key, value) in pairs {
        let path = format!("{dir}/{key}");
        transaction.write(&path, value)?;
        transaction.set_permissions(&path, &permissions)?;
    }
    Ok(())
}

/// Reads a device's states whenever it changes, until `check` returns a result. `None` after the timeout.
fn wait_until<T>(
    store: &mut Xenstore,
    paths: &DevicePaths,
    timeout: Duration,
    mut check: impl FnMut(&mut Xenstore, &EndStates) -> Result<Option<T>, ToolstackError>,
) -> Result<Option<T>, ToolstackError> {
    const TOKEN: &str = "wait";
    let deadline = Instant::now() + timeout;
    let watched = [paths.backend.clone(), format!("{}/{}", paths.frontend, keys::STATE), paths.error.clone()];
    for path in &watched {
        store.watch(path, TOKEN)?;
    }
    let found = loop {
        let now = read_end_states(store, paths)?;
        if let Some(found) = check(store, &now)? {
            break Some(found);
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            break None;
        }
        store.next_event(Some(remaining))?;
        // Only the last of a burst of changes matters.
        while store.next_event(Some(Duration::ZERO))?.is_some() {}
    };
    for path in &watched {
        store.unwatch(path, TOKEN)?;
    }
    Ok(found)
}

fn timeout_error(
    name: &DeviceName,
    now: EndStates,
    waited: Duration,
    expected: &'static str,
    hint: &'static str,
) -> ToolstackError {
    let (backend, frontend) = (now.backend.unwrap_or_default(), now.frontend);
    ToolstackError::TimedOut { name: name.clone(), backend, frontend, waited, expected, hint }
}

/// Waits until both ends of a device are connected.
///
/// # Errors
/// When the backend reports an error, or the timeout expires.
pub fn wait_connected(
    store: &mut Xenstore,
    own: DomainId,
    name: &DeviceName,
    timeout: Duration,
) -> Result<(), ToolstackError> {
    let paths = DevicePaths::new(own, name);
    let connected = wait_until(store, &paths, timeout, |_, now| match (now.backend, &now.error) {
        (Some(XenbusState::Connected), _) if now.frontend == XenbusState::Connected => Ok(Some(())),
        (Some(XenbusState::Closing | XenbusState::Closed), Some(why)) => {
            Err(ToolstackError::BackendFailed { name: name.clone(), why: why.clone() })
        }
        (None, _) => Err(no_such_device(name)),
        _ => Ok(None),
    })?;
    if connected.is_some() {
        return Ok(());
    }
    let now = read_end_states(store, &paths)?;
    if let Some(why) = now.error {
        return Err(ToolstackError::BackendFailed { name: name.clone(), why });
    }
    let hint = match now.backend {
        Some(XenbusState::Initialising) => " (does a backend for this type run?)",
        Some(XenbusState::InitWait) => " (does the guest have a driver?)",
        _ => "",
    };
    Err(timeout_error(name, now, timeout, "both Connected (4)", hint))
}

fn no_such_device(name: &DeviceName) -> ToolstackError {
    ToolstackError::NoSuchDevice { vdev: name.vdev(), front: name.frontend_id.0, type_name: name.type_name.clone() }
}

/// Requests both ends to close a device, waits for that and removes it. `force`: removes it at once.
///
/// # Errors
/// When the device does not exist, or the guest does not close it in time; the request to close it stays.
pub fn detach(
    store: &mut Xenstore,
    own: DomainId,
    name: &DeviceName,
    timeout: Duration,
    force: bool,
) -> Result<(), ToolstackError> {
    let paths = DevicePaths::new(own, name);
    let exists = store.transaction(|transaction| {
        let exists = transaction.read(&format!("{}/{}", paths.backend, keys::STATE))?.is_some();
        if exists && !force {
            transaction.write(&format!("{}/{}", paths.backend, keys::ONLINE), "0")?;
            transaction.write(&format!("{}/{}", paths.backend, keys::STATE), &XenbusState::Closing.to_string())?;
        }
        Ok(exists)
    })?;
    if !exists {
        return Err(no_such_device(name));
    }
    if !force {
        let closed = wait_until(store, &paths, timeout, |_, now| {
            Ok(matches!(now.backend, None | Some(XenbusState::Closed)).then_some(()))
        })?;
        if closed.is_none() {
            let now = read_end_states(store, &paths)?;
            let hint = " (is it in use in the guest, or does no backend run? --force removes it all the same)";
            return Err(timeout_error(name, now, timeout, "a backend that is Closed (6)", hint));
        }
    }
    remove(store, &paths)?;
    Ok(())
}

/// Removes both directories and the error node of a device.
fn remove(store: &mut Xenstore, paths: &DevicePaths) -> Result<(), XenstoreError> {
    store.transaction(|transaction| {
        for path in [&paths.backend, &paths.frontend, &paths.error] {
            transaction.remove(path)?;
        }
        Ok(())
    })
}

/// Requests the backend to resize a device's disk. Returns the new size in units of 512 bytes.
///
/// # Errors
/// When the device does not exist, the backend refuses, or the timeout expires.
pub fn resize(
    store: &mut Xenstore,
    own: DomainId,
    name: &DeviceName,
    request: Resize,
    timeout: Duration,
) -> Result<u64, ToolstackError> {
    let paths = DevicePaths::new(own, name);
    let key_path = |key: &str| format!("{}/{key}", paths.backend);
    let exists = store.transaction(|transaction| {
        let exists = transaction.read(&key_path(keys::STATE))?.is_some();
        if exists {
            transaction.remove(&key_path(RESIZE_ERROR_KEY))?;
            transaction.write(&key_path(RESIZE_KEY), &format_request(request))?;
        }
        Ok(exists)
    })?;
    if !exists {
        return Err(no_such_device(name));
    }
    let done = wait_until(store, &paths, timeout, |store, now| {
        if now.backend.is_none() {
            return Err(no_such_device(name));
        }
        if store.read(&key_path(RESIZE_KEY))?.is_some() {
            return Ok(None);
        }
        match store.read(&key_path(RESIZE_ERROR_KEY))? {
            Some(why) => Err(ToolstackError::BackendFailed { name: name.clone(), why }),
            None => Ok(Some(parse_optional(store.read(&key_path(keys::SECTORS))?))),
        }
    })?;
    match done {
        Some(sectors) => Ok(sectors.unwrap_or_default()),
        None => {
            store.remove(&key_path(RESIZE_KEY))?;
            let now = read_end_states(store, &paths)?;
            let hint = " (does a backend for this type run?)";
            Err(timeout_error(name, now, timeout, "the key resize to be gone", hint))
        }
    }
}
