//! From what was given to what will be done: takes each key, fills in defaults, and checks each value against the others and
//! against the host. Nothing is created here.
//!
//! `front` has the keys of how guests reach a device, `xen` those of how Xen guests do, `backing` those of what a disk or a unit is, `lun` those of a LUN,
//! `process` those of the daemon, `kept` is what a state file changes; `names` is what may be there only once.

mod backing;
mod front;
mod kept;
mod lun;
mod names;
mod process;
mod xen;

use std::path::{Path, PathBuf};

use mqblk_core::disk::DiskError;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_vhost_user_server::SocketError;

use super::config::{ControllerConfig, DiskConfig, DiskFront, Front, ServeConfig};
use super::cpus::Cpus;
use super::file::{Given, GivenLun};
use super::interfaces::Interface;
use backing::{BackingKeys, take_storage};
use front::FrontKeys;
pub use lun::{LunKeys, find_controller};
pub use names::{Claim, Names, Places, file_claim};
use names::{call, same_place, take_id};
use xen::XenKeys;

/// Most virtqueues of one device, as vhost-user counts them, and most workers of one process.
const MAX_QUEUES: u16 = 256;
/// Most request queues of a controller: it has a control and an event queue besides.
const MAX_SCSI_QUEUES: u16 = MAX_QUEUES - 2;
/// Request queues of a controller, at least, where the user does not say. QEMU sets one up for each virtual CPU whatever is offered, and
/// 10.0 says nothing when they are too many; queues that nobody sets up cost next to nothing.
const SCSI_QUEUES: u16 = 32;
/// Longest identification string that virtio-blk carries (virtio 1.3 section 5.2.6, VIRTIO_BLK_T_GET_ID).
const BLK_SERIAL_BYTES: usize = 20;
/// Longest `coalesce-us`: a hundredth of a second is an age already.
const MAX_COALESCE_US: u64 = 10_000;
/// `cmd-per-lun`: QEMU's default, and what its driver accepts.
const DEFAULT_CMD_PER_LUN: u16 = 128;
const MAX_CMD_PER_LUN: u16 = 1024;

/// A configuration that cannot be served. One line each.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value is wrong.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The storage cannot be opened.
    #[error("{subject}: {source}")]
    Disk {
        /// Which disk.
        subject: String,
        /// Why.
        source: DiskError,
    },
    /// The admin socket cannot be where it was asked for.
    #[error("serve: admin: {0}")]
    Admin(#[source] SocketError),
    /// Reservations cannot be kept where it was asked for.
    #[error("lun {id:?}: reservations: found {why}, expected a file that reservations were kept in, or a new one")]
    Reservations {
        /// Which LUN.
        id: String,
        /// Why.
        why: String,
    },
    /// A device's socket cannot be where it was asked for.
    #[error("{subject}: socket: {source}")]
    Socket {
        /// Which disk or controller.
        subject: String,
        /// Why.
        source: SocketError,
    },
}

/// An open disk and its storage's settings as they came to be.
pub type Opened<D> = (D, Vec<(&'static str, String)>);

/// The kinds of storage, and how one is opened. What [`resolve`] needs to know of storage.
pub trait Storages {
    /// What an open disk is.
    type Disk;
    /// The kinds' names.
    fn kinds(&self) -> Vec<&'static str>;
    /// Opens a disk, taking its own keys from `settings`.
    ///
    /// # Errors
    /// When a value is wrong or the host refuses.
    fn open(&mut self, kind: &str, settings: &mut Settings) -> Result<Opened<Self::Disk>, DiskError>;
}

/// Turns `given` into a configuration, opening the storage of each disk and LUN.
///
/// # Errors
/// At the first value that cannot be used.
pub fn resolve<S: Storages>(
    mut given: Given,
    cpus: &Cpus,
    storages: &mut S,
) -> Result<ServeConfig<S::Disk>, ConfigError> {
    if given.disks.is_empty() && given.controllers.is_empty() && given.process.peek("xen-watch").is_none() {
        let expected = "at least one --disk or --controller KEY=VALUE,..., or a [[disk]] or [[controller]] table in \
                        --config FILE, or --xen-watch";
        return Err(given.process.error("disk", "none", expected).into());
    }
    let kinds = storages.kinds();
    let mut names = Names::default();
    let mut controllers = Vec::new();
    for (index, settings) in given.controllers.into_iter().enumerate() {
        controllers.push(ControllerKeys::take(settings, cpus, &mut names, format!("controller #{}", index + 1))?);
    }
    let mut disks = Vec::new();
    for (index, mut settings) in given.disks.into_iter().enumerate() {
        let owner = format!("disk #{}", index + 1);
        let interface =
            settings.choice("interface", Interface::WORDS)?.map_or(Interface::default(), Interface::from_word);
        if interface == Interface::VirtioScsi {
            let (keys, lun) = ControllerKeys::of_disk(settings, cpus, &kinds, &mut names, owner)?;
            given.luns.push(GivenLun { controller: Some(controllers.len()), settings: lun });
            controllers.push(keys);
        } else {
            disks.push(DiskKeys::take(settings, interface, cpus, &kinds, &mut names, owner)?);
        }
    }
    let mut state = kept::take_state(&mut given.process)?;
    let luns = lun::take_all(given.luns, &controllers, &kinds, &mut names)?;
    let luns = kept::choose(luns, state.as_mut().map(|state| &mut state.kept), &controllers, &kinds, &mut names);

    let needs_xen = disks.iter().any(|disk| matches!(disk.front, DiskFrontKeys::Xen(_)));
    let xen = xen::take_host(&mut given.process, cpus, needs_xen)?;
    let queues =
        disks.iter().map(|disk| disk.front.queues()).chain(controllers.iter().map(|one| one.front.known().queues));
    let mut total: u64 = queues.map(u64::from).sum();
    if xen.as_ref().is_some_and(|xen| xen.watch) {
        // Whatever comes has as many as there are CPUs.
        total = total.max(cpus.count.into());
    }
    let (workers, pin) = process::take_workers(&mut given.process, cpus, total)?;
    let sockets = disks.iter().filter_map(|disk| match &disk.front {
        DiskFrontKeys::VhostUser(front) => Some((format!("disk {:?}", disk.id), front)),
        DiskFrontKeys::Xen(_) => None,
    });
    let sockets = sockets.chain(controllers.iter().map(|one| (format!("controller {:?}", one.id), &one.front)));
    let admin = process::take_admin(&mut given.process, sockets)?;
    let drain_timeout = process::take_drain_timeout(&mut given.process)?;
    let hang_warning = process::take_hang_warning(&mut given.process)?;
    given.process.finish()?;

    let (fronts, controller_fronts) = deal_all(&disks, &controllers, workers)?;
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
    for (DiskKeys { settings, id, backing, .. }, front) in disks.into_iter().zip(fronts) {
        served.disks.push(DiskConfig { id, front, backing: backing.open(settings, storages)? });
    }
    let luns = kept::open(luns, storages)?;
    for ((keys, luns), front) in controllers.into_iter().zip(luns).zip(controller_fronts) {
        let ControllerKeys { settings, id, cmd_per_lun, incoming_luns, .. } = keys;
        settings.finish()?;
        served.controllers.push(ControllerConfig { id, front, cmd_per_lun, incoming_luns, luns });
    }
    Ok(served)
}

/// Deals all queues to the workers: of the disks first, in the order given; each device goes on where the one before has stopped.
fn deal_all(
    disks: &[DiskKeys],
    controllers: &[ControllerKeys],
    workers: u16,
) -> Result<(Vec<DiskFront>, Vec<Front>), SettingError> {
    let mut next = 0;
    let disks = disks.iter().map(|disk| disk.front.deal(&disk.settings, &mut next, workers));
    let disks = disks.collect::<Result<_, _>>()?;
    let controllers = controllers.iter().map(|one| one.front.deal(&one.settings, &mut next, workers));
    Ok((disks, controllers.collect::<Result<_, _>>()?))
}

/// A disk before its storage is opened.
struct DiskKeys {
    settings: Settings,
    id: String,
    front: DiskFrontKeys,
    backing: BackingKeys,
}

/// A disk's front before the number of workers is known.
enum DiskFrontKeys {
    VhostUser(FrontKeys),
    Xen(XenKeys),
}

impl DiskFrontKeys {
    fn queues(&self) -> u16 {
        match self {
            DiskFrontKeys::VhostUser(front) => front.known().queues,
            DiskFrontKeys::Xen(front) => front.queues(),
        }
    }

    fn deal(&self, settings: &Settings, next: &mut u16, workers: u16) -> Result<DiskFront, SettingError> {
        Ok(match self {
            DiskFrontKeys::VhostUser(front) => DiskFront::VhostUser(front.deal(settings, next, workers)?),
            DiskFrontKeys::Xen(front) => DiskFront::Xen(front.deal(settings, next, workers)?),
        })
    }
}

impl DiskKeys {
    fn take(
        mut settings: Settings,
        interface: Interface,
        cpus: &Cpus,
        kinds: &[&'static str],
        names: &mut Names,
        owner: String,
    ) -> Result<DiskKeys, SettingError> {
        let storage = take_storage(&mut settings, kinds)?;
        let id = take_id(&mut settings, "path", storage)?;
        call(&mut settings, format!("disk {id:?}"));
        names.claim(&settings, "id", &id, owner)?;
        let front = match interface {
            Interface::Xen => DiskFrontKeys::Xen(XenKeys::take(&mut settings, cpus, names, format!("disk {id:?}"))?),
            _ => DiskFrontKeys::VhostUser(take_front(&mut settings, cpus.count, MAX_QUEUES, names)?),
        };
        let backing = BackingKeys::take(&mut settings, storage, &id, BLK_SERIAL_BYTES)?;
        Ok(DiskKeys { settings, id, front, backing })
    }
}

/// A controller before its LUNs are looked at.
pub struct ControllerKeys {
    settings: Settings,
    id: String,
    front: FrontKeys,
    cmd_per_lun: u16,
    incoming_luns: Option<PathBuf>,
}

impl ControllerKeys {
    fn take(
        mut settings: Settings,
        cpus: &Cpus,
        names: &mut Names,
        owner: String,
    ) -> Result<ControllerKeys, SettingError> {
        let id = take_id(&mut settings, "socket", "scsi")?;
        ControllerKeys::named(&mut settings, id, cpus, names, owner).map(|keys| ControllerKeys { settings, ..keys })
    }

    /// A disk that is a controller with one LUN. Returns the LUN's keys too.
    fn of_disk(
        mut settings: Settings,
        cpus: &Cpus,
        kinds: &[&'static str],
        names: &mut Names,
        owner: String,
    ) -> Result<(ControllerKeys, Settings), SettingError> {
        // The LUN takes it; here it is what the disk is called after.
        let storage = take_storage(&mut settings.clone(), kinds)?;
        let id = take_id(&mut settings, "path", storage)?;
        let keys = ControllerKeys::named(&mut settings, id, cpus, names, owner)?;
        Ok((keys, settings))
    }

    /// The keys but for the id. What is left of the settings is not in the result.
    fn named(
        settings: &mut Settings,
        id: String,
        cpus: &Cpus,
        names: &mut Names,
        owner: String,
    ) -> Result<ControllerKeys, SettingError> {
        call(settings, format!("controller {id:?}"));
        names.claim(settings, "id", &id, owner)?;
        let front = take_front(settings, cpus.count.max(SCSI_QUEUES), MAX_SCSI_QUEUES, names)?;
        let cmd_per_lun = take_u16(settings, "cmd-per-lun", 1, MAX_CMD_PER_LUN)?.unwrap_or(DEFAULT_CMD_PER_LUN);
        let incoming_luns = take_folder(settings, "incoming-luns")?;
        Ok(ControllerKeys { settings: Settings::new(settings.subject()), id, front, cmd_per_lun, incoming_luns })
    }

    /// What its LUNs need to know of it: its id, and its socket.
    fn seen_by_luns(&self) -> (&str, &Path) {
        (&self.id, &self.front.known().socket)
    }
}

/// The front of whatever the settings are now called; its socket is nobody else's.
fn take_front(
    settings: &mut Settings,
    queues: u16,
    max_queues: u16,
    names: &mut Names,
) -> Result<FrontKeys, SettingError> {
    let front = FrontKeys::take(settings, queues, max_queues).map_err(|error| with_likely_slip(error, settings))?;
    let owner = settings.subject().rsplit(": ").next().unwrap_or_default().to_owned();
    names.claim_file(settings, "socket", &front.known().socket, owner)?;
    Ok(front)
}

/// Takes a folder.
fn take_folder(settings: &mut Settings, key: &'static str) -> Result<Option<PathBuf>, SettingError> {
    let Some(path) = settings.text(key).map(PathBuf::from) else { return Ok(None) };
    let why = match path.metadata() {
        Ok(folder) if folder.is_dir() => return Ok(Some(path)),
        Ok(_) => "no folder".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(settings.error(key, format!("{path:?} ({why})"), "an existing folder"))
}

/// Takes a whole number.
fn take_u16(settings: &mut Settings, key: &'static str, min: u16, max: u16) -> Result<Option<u16>, SettingError> {
    let number = settings.number(key, u64::from(min)..=u64::from(max))?;
    Ok(number.and_then(|number| u16::try_from(number).ok()))
}

/// When a key is missing, names one that was given and looks like it: a missing key is found before unknown ones are.
pub fn with_likely_slip(mut error: SettingError, settings: &Settings) -> SettingError {
    if error.found == "nothing" {
        let close = |key: &&str| strsim::damerau_levenshtein(key, &error.key) <= 2;
        if let Some(slip) = settings.keys_left().find(close) {
            error.found = format!("nothing, but a key {slip:?}");
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
