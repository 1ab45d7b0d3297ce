//! Resolves raw keys and values to a configuration: fills in defaults, and checks each value against the others and against the host.
//! Creates nothing.
//!
//! `endpoint` has the keys of vhost-user endpoints, `xen` those of Xen devices and hosts, `storage` those of the storage of a disk or
//! logical unit, `lun` those of a LUN, `process` those of the daemon. `saved_luns` applies a state file; `names` checks that ids and paths
//! are unique.

mod endpoint;
mod lun;
mod names;
mod process;
mod saved_luns;
mod storage;
mod xen;

use std::path::{Path, PathBuf};

use mqblk_core::disk::DiskError;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_vhost_user_server::SocketError;

use super::config::{ControllerConfig, DiskConfig, DiskEndpoint, ServeConfig, VhostUserEndpoint};
use super::cpus::Cpus;
use super::file::{RawConfig, RawLun};
use super::interfaces::Interface;
use endpoint::VhostUserKeys;
pub use lun::{LunKeys, find_controller};
pub use names::{Claim, UniqueNames, UsedAddresses, file_claim};
use names::{canonical_path, rename_subject, take_id};
use storage::{StorageKeys, take_storage_kind};
use xen::XenKeys;

/// Maximum number of virtqueues of a device in vhost-user, and of workers of the process.
const MAX_QUEUES: u16 = 256;
/// Maximum number of request queues of a controller, which also has a control and an event queue.
const MAX_SCSI_QUEUES: u16 = MAX_QUEUES - 2;
/// Minimum of a controller's default number of request queues. QEMU sets up one for each virtual CPU whatever is offered, and 10.0 does
/// not report if that is too many. Unused queues cost next to nothing.
const SCSI_QUEUES: u16 = 32;
/// Maximum length of virtio-blk's identification string (virtio 1.3 section 5.2.6, VIRTIO_BLK_T_GET_ID).
const BLK_SERIAL_BYTES: usize = 20;
/// Maximum of `coalesce-us`: 10 ms.
const MAX_COALESCE_US: u64 = 10_000;
/// `cmd-per-lun`: QEMU's default, and what its driver accepts.
const DEFAULT_CMD_PER_LUN: u16 = 128;
const MAX_CMD_PER_LUN: u16 = 1024;

/// Why a configuration cannot be served. Each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value is invalid.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The storage cannot be opened.
    #[error("{subject}: {source}")]
    Disk {
        /// The disk.
        subject: String,
        /// The cause.
        source: DiskError,
    },
    /// The admin socket cannot be created at its path.
    #[error("serve: admin: {0}")]
    Admin(#[source] SocketError),
    /// The file of reservations cannot be used.
    #[error("lun {id:?}: reservations: found {why}, expected a file that reservations were kept in, or a new one")]
    Reservations {
        /// The LUN's id.
        id: String,
        /// The cause.
        why: String,
    },
    /// A device's socket cannot be created at its path.
    #[error("{subject}: socket: {source}")]
    Socket {
        /// The disk or controller.
        subject: String,
        /// The cause.
        source: SocketError,
    },
}

/// An open disk, and the settings of its storage with all defaults filled in.
pub type OpenedDisk<D> = (D, Vec<(&'static str, String)>);

/// The storage backends, as [`resolve`] needs them.
pub trait StorageBackends {
    /// An open disk.
    type Disk;
    /// Returns the names of the backends.
    fn kinds(&self) -> Vec<&'static str>;
    /// Opens a disk. Takes the backend's own keys from `settings`.
    ///
    /// # Errors
    /// If a value is invalid or the host refuses.
    fn open(&mut self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk<Self::Disk>, DiskError>;
}

/// Resolves `raw` to a configuration and opens the storage of each disk and LUN.
///
/// # Errors
/// Returns the first invalid value.
pub fn resolve<S: StorageBackends>(
    mut raw: RawConfig,
    cpus: &Cpus,
    storages: &mut S,
) -> Result<ServeConfig<S::Disk>, ConfigError> {
    if raw.disks.is_empty() && raw.controllers.is_empty() && raw.process.peek("xen-watch").is_none() {
        let expected = "at least one --disk or --controller KEY=VALUE,..., or a [[disk]] or [[controller]] table in \
                        --config FILE, or --xen-watch";
        return Err(raw.process.error("disk", "none", expected).into());
    }
    let kinds = storages.kinds();
    let mut names = UniqueNames::default();
    let mut controllers = Vec::new();
    for (index, settings) in raw.controllers.into_iter().enumerate() {
        controllers.push(ControllerKeys::take(settings, cpus, &mut names, format!("controller #{}", index + 1))?);
    }
    let mut disks = Vec::new();
    for (index, mut settings) in raw.disks.into_iter().enumerate() {
        let owner = format!("disk #{}", index + 1);
        let interface =
            settings.choice("interface", Interface::WORDS)?.map_or(Interface::default(), Interface::from_word);
        if interface == Interface::VirtioScsi {
            let (keys, lun) = ControllerKeys::of_disk(settings, cpus, &kinds, &mut names, owner)?;
            raw.luns.push(RawLun { controller: Some(controllers.len()), settings: lun });
            controllers.push(keys);
        } else {
            disks.push(DiskKeys::take(settings, interface, cpus, &kinds, &mut names, owner)?);
        }
    }
    let mut state = saved_luns::take_state(&mut raw.process)?;
    let luns = lun::take_all(raw.luns, &controllers, &kinds, &mut names)?;
    let luns =
        saved_luns::apply_saved(luns, state.as_mut().map(|state| &mut state.saved), &controllers, &kinds, &mut names);

    let needs_xen = disks.iter().any(|disk| matches!(disk.endpoint, DiskEndpointKeys::Xen(_)));
    let xen = xen::take_host(&mut raw.process, cpus, needs_xen)?;
    let queues = disks
        .iter()
        .map(|disk| disk.endpoint.queues())
        .chain(controllers.iter().map(|controller| controller.endpoint.partial().queues));
    let mut total: u64 = queues.map(u64::from).sum();
    if xen.as_ref().is_some_and(|xen| xen.watch) {
        // Devices that are not configured have as many rings as there are CPUs.
        total = total.max(cpus.count.into());
    }
    let (workers, pin) = process::take_workers(&mut raw.process, cpus, total)?;
    let sockets = disks.iter().filter_map(|disk| match &disk.endpoint {
        DiskEndpointKeys::VhostUser(endpoint) => Some((format!("disk {:?}", disk.id), endpoint)),
        DiskEndpointKeys::Xen(_) => None,
    });
    let sockets = sockets
        .chain(controllers.iter().map(|controller| (format!("controller {:?}", controller.id), &controller.endpoint)));
    let admin = process::take_admin(&mut raw.process, sockets)?;
    let drain_timeout = process::take_drain_timeout(&mut raw.process)?;
    let hang_warning = process::take_hang_warning(&mut raw.process)?;
    raw.process.finish()?;

    let (endpoints, controller_endpoints) = assign_all_queues(&disks, &controllers, workers)?;
    let mut served = ServeConfig {
        workers,
        pin,
        hang_warning,
        admin,
        drain_timeout,
        state,
        xen,
        disks: Vec::new(),
        controllers: Vec::new(),
    };
    for (DiskKeys { settings, id, storage, .. }, endpoint) in disks.into_iter().zip(endpoints) {
        served.disks.push(DiskConfig { id, endpoint, storage: storage.open(settings, storages)? });
    }
    let luns = saved_luns::open(luns, storages)?;
    for ((keys, luns), endpoint) in controllers.into_iter().zip(luns).zip(controller_endpoints) {
        let ControllerKeys { settings, id, cmd_per_lun, incoming_luns, .. } = keys;
        settings.finish()?;
        served.controllers.push(ControllerConfig { id, endpoint, cmd_per_lun, incoming_luns, luns });
    }
    Ok(served)
}

/// Assigns all queues to workers round-robin: disks first, then controllers, each continuing after the previous device's last worker.
fn assign_all_queues(
    disks: &[DiskKeys],
    controllers: &[ControllerKeys],
    workers: u16,
) -> Result<(Vec<DiskEndpoint>, Vec<VhostUserEndpoint>), SettingError> {
    let mut next = 0;
    let disks = disks.iter().map(|disk| disk.endpoint.assign_queues(&disk.settings, &mut next, workers));
    let disks = disks.collect::<Result<_, _>>()?;
    let controllers = controllers
        .iter()
        .map(|controller| controller.endpoint.assign_queues(&controller.settings, &mut next, workers));
    Ok((disks, controllers.collect::<Result<_, _>>()?))
}

/// The keys of a disk whose storage is not open yet.
struct DiskKeys {
    settings: Settings,
    id: String,
    endpoint: DiskEndpointKeys,
    storage: StorageKeys,
}

/// The keys of a disk's guest interface, before the number of workers is known.
enum DiskEndpointKeys {
    VhostUser(VhostUserKeys),
    Xen(XenKeys),
}

impl DiskEndpointKeys {
    fn queues(&self) -> u16 {
        match self {
            DiskEndpointKeys::VhostUser(endpoint) => endpoint.partial().queues,
            DiskEndpointKeys::Xen(endpoint) => endpoint.queues(),
        }
    }

    fn assign_queues(&self, settings: &Settings, next: &mut u16, workers: u16) -> Result<DiskEndpoint, SettingError> {
        Ok(match self {
            DiskEndpointKeys::VhostUser(endpoint) => {
                DiskEndpoint::VhostUser(endpoint.assign_queues(settings, next, workers)?)
            }
            DiskEndpointKeys::Xen(endpoint) => DiskEndpoint::Xen(endpoint.assign_queues(settings, next, workers)?),
        })
    }
}

impl DiskKeys {
    fn take(
        mut settings: Settings,
        interface: Interface,
        cpus: &Cpus,
        kinds: &[&'static str],
        names: &mut UniqueNames,
        owner: String,
    ) -> Result<DiskKeys, SettingError> {
        let kind = take_storage_kind(&mut settings, kinds)?;
        let id = take_id(&mut settings, "path", kind)?;
        rename_subject(&mut settings, format!("disk {id:?}"));
        names.claim(&settings, "id", &id, owner)?;
        let endpoint = match interface {
            Interface::Xen => DiskEndpointKeys::Xen(XenKeys::take(&mut settings, cpus, names, format!("disk {id:?}"))?),
            _ => DiskEndpointKeys::VhostUser(take_endpoint(&mut settings, cpus.count, MAX_QUEUES, names)?),
        };
        let storage = StorageKeys::take(&mut settings, kind, &id, BLK_SERIAL_BYTES)?;
        Ok(DiskKeys { settings, id, endpoint, storage })
    }
}

/// The keys of a controller, without its LUNs.
pub struct ControllerKeys {
    settings: Settings,
    id: String,
    endpoint: VhostUserKeys,
    cmd_per_lun: u16,
    incoming_luns: Option<PathBuf>,
}

impl ControllerKeys {
    fn take(
        mut settings: Settings,
        cpus: &Cpus,
        names: &mut UniqueNames,
        owner: String,
    ) -> Result<ControllerKeys, SettingError> {
        let id = take_id(&mut settings, "socket", "scsi")?;
        ControllerKeys::take_rest(&mut settings, id, cpus, names, owner).map(|keys| ControllerKeys { settings, ..keys })
    }

    /// Takes the keys of a disk that is a controller with one LUN. Returns the LUN's settings too.
    fn of_disk(
        mut settings: Settings,
        cpus: &Cpus,
        kinds: &[&'static str],
        names: &mut UniqueNames,
        owner: String,
    ) -> Result<(ControllerKeys, Settings), SettingError> {
        // The key stays for the LUN; here it only supplies a default id.
        let kind = take_storage_kind(&mut settings.clone(), kinds)?;
        let id = take_id(&mut settings, "path", kind)?;
        let keys = ControllerKeys::take_rest(&mut settings, id, cpus, names, owner)?;
        Ok((keys, settings))
    }

    /// Takes all keys except the id. The result does not have the remaining settings.
    fn take_rest(
        settings: &mut Settings,
        id: String,
        cpus: &Cpus,
        names: &mut UniqueNames,
        owner: String,
    ) -> Result<ControllerKeys, SettingError> {
        rename_subject(settings, format!("controller {id:?}"));
        names.claim(settings, "id", &id, owner)?;
        let endpoint = take_endpoint(settings, cpus.count.max(SCSI_QUEUES), MAX_SCSI_QUEUES, names)?;
        let cmd_per_lun = take_u16(settings, "cmd-per-lun", 1, MAX_CMD_PER_LUN)?.unwrap_or(DEFAULT_CMD_PER_LUN);
        let incoming_luns = take_directory(settings, "incoming-luns")?;
        Ok(ControllerKeys { settings: Settings::new(settings.subject()), id, endpoint, cmd_per_lun, incoming_luns })
    }

    /// Returns its id and its socket, which its LUNs' defaults depend on.
    fn lun_defaults(&self) -> (&str, &Path) {
        (&self.id, &self.endpoint.partial().socket)
    }
}

/// Takes the vhost-user keys of the device that is the settings' subject, and claims its socket.
fn take_endpoint(
    settings: &mut Settings,
    queues: u16,
    max_queues: u16,
    names: &mut UniqueNames,
) -> Result<VhostUserKeys, SettingError> {
    let endpoint =
        VhostUserKeys::take(settings, queues, max_queues).map_err(|error| with_similar_key(error, settings))?;
    let owner = settings.subject().rsplit(": ").next().unwrap_or_default().to_owned();
    names.claim_file(settings, "socket", &endpoint.partial().socket, owner)?;
    Ok(endpoint)
}

/// Takes the path of an existing directory.
fn take_directory(settings: &mut Settings, key: &'static str) -> Result<Option<PathBuf>, SettingError> {
    let Some(path) = settings.text(key).map(PathBuf::from) else { return Ok(None) };
    let reason = match path.metadata() {
        Ok(folder) if folder.is_dir() => return Ok(Some(path)),
        Ok(_) => "no folder".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(settings.error(key, format!("{path:?} ({reason})"), "an existing folder"))
}

/// Takes a whole number.
fn take_u16(settings: &mut Settings, key: &'static str, min: u16, max: u16) -> Result<Option<u16>, SettingError> {
    let number = settings.number(key, u64::from(min)..=u64::from(max))?;
    Ok(number.and_then(|number| u16::try_from(number).ok()))
}

/// Adds a similarly spelled key to the error of a missing key, if there is one: missing keys are detected before unknown ones.
pub fn with_similar_key(mut error: SettingError, settings: &Settings) -> SettingError {
    if error.found == "nothing" {
        let close = |key: &&str| strsim::damerau_levenshtein(key, &error.key) <= 2;
        if let Some(similar) = settings.keys_left().find(close) {
            error.found = format!("nothing, but a key {similar:?}");
        }
    }
    error
}

#[cfg(test)]
mod lun_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod xen_tests;
