//! A toolstack's work: makes devices and removes them, by xenstore alone. Whoever serves them need not be asked.

mod listed;

use std::time::{Duration, Instant};

use mqblk_core::Resize;
use mqblk_memory::DomainId;
use mqblk_xen::XenError;
use mqblk_xen::store::{Access, Permission, Transaction, Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

pub use listed::{Listed, list};

use crate::name::DeviceName;
use crate::resize::{RESIZE, RESIZE_ERROR, wanted};

/// The key in a backend's directory that says who made it, and so removes it when the frontend's domain is gone.
pub(crate) const MADE_BY: &str = "made-by";
/// Its value where it was us.
pub(crate) const US: &str = "mqblk";

/// Why a toolstack could not do something.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// Xenstore refuses.
    #[error(transparent)]
    Store(#[from] XenstoreError),
    /// There is no way to xenstore.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// The domain is not there.
    #[error("domid: found {0}, expected a domain that is there")]
    NoDomain(u16),
    /// The device's number is taken.
    #[error("vdev: found {vdev}, which domain {front} has already ({what}), expected one that is free")]
    Taken {
        /// As the guest calls it.
        vdev: String,
        /// The domain.
        front: u16,
        /// What it is.
        what: String,
    },
    /// There is no such device.
    #[error("vdev: found {vdev}, which domain {front} does not have with a backend of type {type_name}")]
    NoDevice {
        /// As the guest calls it.
        vdev: String,
        /// The domain.
        front: u16,
        /// The type.
        type_name: String,
    },
    /// The backend refuses.
    #[error("{name}: the backend says: {why}")]
    Refused {
        /// The device.
        name: DeviceName,
        /// Why.
        why: String,
    },
    /// It takes too long.
    #[error(
        "{name}: found backend state {backend} and frontend state {frontend} after {waited:?}, expected {expected}{hint}"
    )]
    Late {
        /// The device.
        name: DeviceName,
        /// State of the backend.
        backend: XenbusState,
        /// State of the frontend.
        frontend: XenbusState,
        /// How long was waited.
        waited: Duration,
        /// What was waited for.
        expected: &'static str,
        /// What may be the matter.
        hint: &'static str,
    },
}

/// A device to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDevice {
    /// Which.
    pub name: DeviceName,
    /// What is behind it: the `params` key.
    pub params: String,
    /// The guest may not write.
    pub read_only: bool,
}

/// Where a device is in xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The backend's directory.
    pub backend: String,
    /// The frontend's.
    pub frontend: String,
    error: String,
}

impl Places {
    /// Of a device whose backend domain `own` has.
    pub fn of(own: DomainId, name: &DeviceName) -> Places {
        Places {
            backend: vbd::backend_path(own, &name.type_name, name.front, name.devid),
            frontend: vbd::frontend_path(name.front, name.devid),
            error: vbd::backend_error_path(own, &name.type_name, name.front, name.devid),
        }
    }
}

/// What became of a device that was to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// It was made.
    New,
    /// It was there, with the same `params`.
    Already,
}

/// Makes a device: both directories in one transaction, as each end expects to find the other.
///
/// # Errors
/// When the domain is not there, it has such a device that is something else, or xenstore refuses.
pub fn attach(store: &mut Xenstore, own: DomainId, device: &NewDevice) -> Result<Made, ToolError> {
    let NewDevice { name, params, read_only } = device;
    let Places { backend, frontend, error } = Places::of(own, name);
    enum Found {
        Made(Made),
        NoDomain,
        Taken(String),
    }
    let found = store.transaction(|transaction| {
        if transaction.list(&vbd::domain_path(name.front))?.is_none() {
            return Ok(Found::NoDomain);
        }
        if transaction.read(&format!("{backend}/{}", keys::STATE))?.is_some() {
            let there = transaction.read(&format!("{backend}/{}", keys::PARAMS))?.unwrap_or_default();
            let same = there == *params;
            return Ok(if same { Found::Made(Made::Already) } else { Found::Taken(format!("params {there}")) });
        }
        if let Some(other) = transaction.read(&format!("{frontend}/{}", keys::BACKEND))?
            && other != backend
            && transaction.read(&format!("{other}/{}", keys::STATE))?.is_some()
        {
            return Ok(Found::Taken(format!("backend {other}")));
        }
        // What somebody left there without a backend.
        for place in [&backend, &frontend, &error] {
            transaction.remove(place)?;
        }
        let (front, vdev) = (name.front, name.vdev());
        let mode = if *read_only { "r" } else { "w" };
        let pairs: [(&str, &str); 13] = [
            (MADE_BY, US),
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
        make(transaction, &backend, [own, front], &pairs)?;
        let pairs = [
            (keys::BACKEND, backend.as_str()),
            (keys::BACKEND_ID, &own.0.to_string()),
            (keys::VIRTUAL_DEVICE, &name.devid.to_string()),
            (keys::DEVICE_TYPE, "disk"),
            (keys::STATE, "1"),
        ];
        make(transaction, &frontend, [front, own], &pairs)?;
        Ok(Found::Made(Made::New))
    })?;
    match found {
        Found::Made(made) => Ok(made),
        Found::NoDomain => Err(ToolError::NoDomain(name.front.0)),
        Found::Taken(what) => Err(ToolError::Taken { vdev: name.vdev(), front: name.front.0, what }),
    }
}

/// A directory of the first domain, which the second may read.
fn make(
    transaction: &mut Transaction<'_>,
    folder: &str,
    [owner, reader]: [DomainId; 2],
    pairs: &[(&str, &str)],
) -> Result<(), XenstoreError> {
    let permissions =
        [Permission { domain: owner, access: Access::None }, Permission { domain: reader, access: Access::Read }];
    transaction.mkdir(folder)?;
    transaction.set_permissions(folder, &permissions)?;
    for (key, value) in pairs {
        let path = format!("{folder}/{key}");
        transaction.write(&path, value)?;
        transaction.set_permissions(&path, &permissions)?;
    }
    Ok(())
}

/// Both ends' states, and what the backend complains of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// The backend's; `None`: there is no such device.
    pub backend: Option<XenbusState>,
    /// The frontend's.
    pub frontend: XenbusState,
    /// The backend's `error` node.
    pub error: Option<String>,
}

fn ends(store: &mut Xenstore, places: &Places) -> Result<Ends, XenstoreError> {
    let backend = store.read(&format!("{}/{}", places.backend, keys::STATE))?;
    let frontend = read_of_guest(store, &format!("{}/{}", places.frontend, keys::STATE))?;
    Ok(Ends {
        backend: backend.map(|state| XenbusState::parse(Some(&state))),
        frontend: XenbusState::parse(frontend.as_deref()),
        error: store.read(&places.error)?,
    })
}

/// What a guest may have written; what is no text is as good as nothing.
pub(crate) fn read_of_guest(store: &mut Xenstore, path: &str) -> Result<Option<String>, XenstoreError> {
    store.read(path).or_else(|error| if error.is_lost() { Err(error) } else { Ok(None) })
}

/// Looks at a device again whenever something of it changes, until `judge` is content or time is up: then `None`.
fn wait_until<T>(
    store: &mut Xenstore,
    places: &Places,
    patience: Duration,
    mut judge: impl FnMut(&mut Xenstore, &Ends) -> Result<Option<T>, ToolError>,
) -> Result<Option<T>, ToolError> {
    const TOKEN: &str = "wait";
    let deadline = Instant::now() + patience;
    let watched = [places.backend.clone(), format!("{}/{}", places.frontend, keys::STATE), places.error.clone()];
    for path in &watched {
        store.watch(path, TOKEN)?;
    }
    let found = loop {
        let now = ends(store, places)?;
        if let Some(found) = judge(store, &now)? {
            break Some(found);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break None;
        }
        store.next_event(Some(left))?;
        // Of a burst of changes only the last matters.
        while store.next_event(Some(Duration::ZERO))?.is_some() {}
    };
    for path in &watched {
        store.unwatch(path, TOKEN)?;
    }
    Ok(found)
}

fn late(name: &DeviceName, now: Ends, waited: Duration, expected: &'static str, hint: &'static str) -> ToolError {
    let (backend, frontend) = (now.backend.unwrap_or_default(), now.frontend);
    ToolError::Late { name: name.clone(), backend, frontend, waited, expected, hint }
}

/// Waits until both ends of a device are connected.
///
/// # Errors
/// When the backend says why not, or time is up.
pub fn wait_connected(
    store: &mut Xenstore,
    own: DomainId,
    name: &DeviceName,
    patience: Duration,
) -> Result<(), ToolError> {
    let places = Places::of(own, name);
    let connected = wait_until(store, &places, patience, |_, now| match (now.backend, &now.error) {
        (Some(XenbusState::Connected), _) if now.frontend == XenbusState::Connected => Ok(Some(())),
        (Some(XenbusState::Closing | XenbusState::Closed), Some(why)) => {
            Err(ToolError::Refused { name: name.clone(), why: why.clone() })
        }
        (None, _) => Err(no_device(name)),
        _ => Ok(None),
    })?;
    if connected.is_some() {
        return Ok(());
    }
    let now = ends(store, &places)?;
    let hint = match now.backend {
        Some(XenbusState::Initialising) => " (does a backend for this type run?)",
        Some(XenbusState::InitWait) => " (does the guest have a driver?)",
        _ => "",
    };
    Err(late(name, now, patience, "both Connected (4)", hint))
}

fn no_device(name: &DeviceName) -> ToolError {
    ToolError::NoDevice { vdev: name.vdev(), front: name.front.0, type_name: name.type_name.clone() }
}

/// Has a device closed by both ends, and removes it. `force`: removes it first, whatever they do.
///
/// # Errors
/// When there is none, or the guest does not let go of it in time; then it is asked to still.
pub fn detach(
    store: &mut Xenstore,
    own: DomainId,
    name: &DeviceName,
    patience: Duration,
    force: bool,
) -> Result<(), ToolError> {
    let places = Places::of(own, name);
    let there = store.transaction(|transaction| {
        let there = transaction.read(&format!("{}/{}", places.backend, keys::STATE))?.is_some();
        if there && !force {
            transaction.write(&format!("{}/{}", places.backend, keys::ONLINE), "0")?;
            transaction.write(&format!("{}/{}", places.backend, keys::STATE), &XenbusState::Closing.to_string())?;
        }
        Ok(there)
    })?;
    if !there {
        return Err(no_device(name));
    }
    if !force {
        let closed = wait_until(store, &places, patience, |_, now| {
            Ok(matches!(now.backend, None | Some(XenbusState::Closed)).then_some(()))
        })?;
        if closed.is_none() {
            let now = ends(store, &places)?;
            let hint = " (is it in use in the guest, or does no backend run? --force removes it all the same)";
            return Err(late(name, now, patience, "a backend that is Closed (6)", hint));
        }
    }
    remove(store, &places)?;
    Ok(())
}

/// Removes both directories of a device, and what was complained of.
fn remove(store: &mut Xenstore, places: &Places) -> Result<(), XenstoreError> {
    store.transaction(|transaction| {
        for place in [&places.backend, &places.frontend, &places.error] {
            transaction.remove(place)?;
        }
        Ok(())
    })
}

/// Asks the backend to make a device's disk another size. Returns its size in units of 512 bytes.
///
/// # Errors
/// When there is no such device, the backend refuses, or does not answer in time.
pub fn resize(
    store: &mut Xenstore,
    own: DomainId,
    name: &DeviceName,
    asked: Resize,
    patience: Duration,
) -> Result<u64, ToolError> {
    let places = Places::of(own, name);
    let at = |key: &str| format!("{}/{key}", places.backend);
    let there = store.transaction(|transaction| {
        let there = transaction.read(&at(keys::STATE))?.is_some();
        if there {
            transaction.remove(&at(RESIZE_ERROR))?;
            transaction.write(&at(RESIZE), &wanted(asked))?;
        }
        Ok(there)
    })?;
    if !there {
        return Err(no_device(name));
    }
    let done = wait_until(store, &places, patience, |store, now| {
        if now.backend.is_none() {
            return Err(no_device(name));
        }
        if store.read(&at(RESIZE))?.is_some() {
            return Ok(None);
        }
        match store.read(&at(RESIZE_ERROR))? {
            Some(why) => Err(ToolError::Refused { name: name.clone(), why }),
            None => Ok(Some(number(store.read(&at(keys::SECTORS))?))),
        }
    })?;
    match done {
        Some(sectors) => Ok(sectors.unwrap_or_default()),
        None => {
            store.remove(&at(RESIZE))?;
            let now = ends(store, &places)?;
            let hint = " (does a backend for this type run?)";
            Err(late(name, now, patience, "the key resize to be gone", hint))
        }
    }
}

fn number(value: Option<String>) -> Option<u64> {
    value?.trim().parse().ok()
}
