//! How a virtio-scsi controller and its units are built, and how a LUN comes, changes and goes while it is served.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mqblk_core::{ByteLen, DiskSlot};
use mqblk_engine::{AnyDisk, AttachError, DiskHealth, Engine, QueueDisk, QueueReport, WorkerReport};
use mqblk_scsi::reservation::{FileKeeper, JoinError, Reservations};
use mqblk_scsi::{Identity, LogicalUnit, Nexus, UnitOptions};
use mqblk_vhost_user_server::{HostState, Server, ServerOptions, SocketError};
use mqblk_virtio_scsi::{FIXED_QUEUES, Place, PlaceTaken, ScsiOptions, VirtioScsi};

use super::config::{CacheMode, ControllerConfig, Front, LunPlace, UnitConfig};
use super::print::{self, Pair};
use super::resolve::{Claim, file_claim};

/// The worker of the control and the event queue. Both seldom have anything to do.
const FIXED_WORKER: usize = 0;
/// The longest transfer that a driver is told of by a controller whose first LUNs are still to come: what Linux asks for when
/// it is told nothing. Each unit tells its own (VPD page B0h).
const MAX_TRANSFER: ByteLen = ByteLen(32 << 20);
/// Product revision level.
const REVISION: &str = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));

/// Why a unit cannot be reached, or made.
#[derive(Debug, thiserror::Error)]
pub enum LunError {
    /// Its reservations cannot be kept.
    #[error("reservations: {0}")]
    Reservations(String),
    /// Its disk cannot be opened on a worker.
    #[error(transparent)]
    Disk(#[from] AttachError),
    /// The unit takes no more initiators of that name.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The device has a LUN there.
    #[error(transparent)]
    Place(#[from] PlaceTaken),
    /// Whoever checked the configuration let it pass.
    #[error("its unit is not there")]
    NoUnit,
}

/// A unit: what LUNs lead to.
pub struct Unit {
    name: String,
    config: UnitConfig<Arc<AnyDisk>>,
    logical: Arc<LogicalUnit>,
    health: Arc<DiskHealth>,
    /// Held while its size changes or a LUN begins to lead to it, so that neither misses the other.
    shape: Mutex<()>,
}

impl Unit {
    /// A unit named `name`.
    ///
    /// # Errors
    /// When its reservations cannot be kept.
    pub fn new(name: &str, config: UnitConfig<Arc<AnyDisk>>) -> Result<Unit, LunError> {
        let disk = &config.backing.disk;
        let reservations = match &config.reservations {
            Some(path) => open_reservations(path).map_err(LunError::Reservations)?,
            None => Reservations::new(None),
        };
        let logical = LogicalUnit::new(UnitOptions {
            geometry: disk.geometry(),
            limits: disk.limits(),
            identity: Identity {
                vendor: config.vendor.clone(),
                product: config.product.clone(),
                revision: REVISION.to_owned(),
                serial: config.backing.serial.clone(),
                name: config.unit_name.clone(),
            },
            writeback: config.backing.cache == CacheMode::Writeback,
            reservations,
        });
        let health = Arc::new(DiskHealth::new(name, config.backing.errors));
        Ok(Unit { name: name.to_owned(), logical: Arc::new(logical), health, config, shape: Mutex::new(()) })
    }

    /// The id of the LUN that it was made for.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What no other unit may have, nor a LUN as its id.
    pub fn claims(&self) -> Vec<Claim> {
        let mut claims = vec![("id", self.name.clone()), ("unit-name", self.config.unit_name.clone())];
        claims.extend(self.config.reservations.iter().map(|path| file_claim("reservations", path)));
        claims
    }

    /// How it was configured.
    pub fn config(&self) -> &UnitConfig<Arc<AnyDisk>> {
        &self.config
    }

    /// Its disk.
    pub fn disk(&self) -> &Arc<AnyDisk> {
        &self.config.backing.disk
    }

    /// What becomes of its failed requests, and whether it is stopped.
    pub fn health(&self) -> &Arc<DiskHealth> {
        &self.health
    }

    /// Runs `change` while no other one changes the unit's size or who leads to it.
    pub fn alone<R>(&self, change: impl FnOnce() -> R) -> R {
        let _held = self.shape.lock().unwrap_or_else(PoisonError::into_inner);
        change()
    }

    /// The disk's size is another: initiators hear of it.
    pub fn resized(&self, size: ByteLen) {
        self.logical.resized(size);
    }

    fn queue_disk(&self, slot: DiskSlot) -> QueueDisk {
        let health = Arc::clone(&self.health);
        QueueDisk { slot, disk: Arc::clone(self.disk()), plug: self.config.backing.plug, health }
    }

    /// The way of a controller's guest to it. Must be the same after a restart: registrations are kept by it.
    fn login(self: &Unit, controller: &str, place: LunPlace) -> Result<Arc<Nexus>, JoinError> {
        self.logical.login(controller, u16::from(place.target) + 1)
    }
}

/// Opens the file where reservations are kept, with those that it has.
///
/// # Errors
/// When it cannot be read, or is something else.
pub fn open_reservations(path: &Path) -> Result<Arc<Reservations>, String> {
    let wrong = |why: &dyn std::fmt::Display| format!("{path:?}: {why}");
    let (keeper, held) = FileKeeper::open(path).map_err(|error| wrong(&error))?;
    let keeper = Arc::new(keeper);
    match held {
        Some(held) => Reservations::restore(&held, Some(keeper)).map_err(|error| wrong(&error)),
        None => Ok(Reservations::new(Some(keeper))),
    }
}

/// A controller that is served.
pub struct Controller {
    id: String,
    front: Front,
    settings: Vec<Pair>,
    device: Arc<VirtioScsi>,
    server: Server,
}

/// A LUN that a controller begins with.
pub struct FirstLun {
    /// Where.
    pub place: LunPlace,
    /// The engine's name for its disk.
    pub slot: DiskSlot,
    /// What it leads to.
    pub unit: Arc<Unit>,
}

/// Why a controller cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// Its socket cannot be made.
    #[error("controller {id:?}: socket: {source}")]
    Socket {
        /// Which.
        id: String,
        /// Why.
        source: SocketError,
    },
    /// One of its LUNs cannot be there.
    #[error("lun {place} of controller {id:?}: {source}")]
    Lun {
        /// The controller.
        id: String,
        /// Where.
        place: LunPlace,
        /// Why.
        source: Box<LunError>,
    },
}

impl ControllerError {
    /// That of a LUN.
    pub fn lun(id: &str, place: LunPlace, source: LunError) -> ControllerError {
        ControllerError::Lun { id: id.to_owned(), place, source: Box::new(source) }
    }
}

impl Controller {
    /// Serves `config`, with these LUNs in place of the configuration's. `host_state` goes with a guest that is migrated.
    ///
    /// # Errors
    /// When the host refuses the socket, or a LUN cannot be there.
    pub fn start<D>(
        config: &ControllerConfig<D>,
        luns: &[FirstLun],
        (engine, drain_timeout): (&Arc<Engine>, Duration),
        host_state: Arc<dyn HostState>,
    ) -> Result<Controller, ControllerError> {
        let ControllerConfig { id, front, cmd_per_lun, .. } = config;
        let max_transfer = luns.iter().map(|lun| lun.unit.disk().limits().max_transfer).min();
        let device = Arc::new(VirtioScsi::new(ScsiOptions {
            queues: front.queues,
            queue_size: front.queue_size,
            cmd_per_lun: (*cmd_per_lun).into(),
            max_transfer: max_transfer.unwrap_or(MAX_TRANSFER),
        }));
        for FirstLun { place, slot, unit } in luns {
            map(&device, id, *place, *slot, unit).map_err(|error| ControllerError::lun(id, *place, error))?;
        }
        let workers = front.queue_map.iter().map(|worker| usize::from(*worker));
        let options = ServerOptions {
            name: id.clone(),
            socket: front.socket.clone(),
            socket_mode: front.socket_mode.bits(),
            queue_map: [FIXED_WORKER; FIXED_QUEUES as usize].into_iter().chain(workers).collect(),
            poll: front.poll,
            coalesce: front.coalesce,
            fixed: front.fixed_buffers,
            drain_timeout,
            disks: luns.iter().map(|lun| lun.unit.queue_disk(lun.slot)).collect(),
            engine: Arc::clone(engine),
            host_state: Some(host_state),
        };
        tracing::info!(controller = %id, luns = luns.len(), queues = front.queues, poll = %front.poll, "serving");
        let refused = |source| ControllerError::Socket { id: id.clone(), source };
        let server = Server::start(Arc::clone(&device), options).map_err(refused)?;
        Ok(Controller {
            id: id.clone(),
            front: front.clone(),
            settings: print::controller_pairs(config),
            device,
            server,
        })
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// How guests reach it.
    pub fn front(&self) -> &Front {
        &self.front
    }

    /// Its settings, every default filled in.
    pub fn settings(&self) -> &[Pair] {
        &self.settings
    }

    /// Puts a unit at a place, and tells the guest. When it fails nothing is left behind.
    ///
    /// # Errors
    /// When a worker cannot open the disk, or the unit does not know the guest.
    pub fn map(&self, place: LunPlace, slot: DiskSlot, unit: &Unit) -> Result<(), LunError> {
        self.server.open_disk(unit.queue_disk(slot))?;
        let mapped = map(&self.device, &self.id, place, slot, unit);
        if mapped.is_err() {
            self.server.close_disk(slot);
        }
        mapped
    }

    /// Takes the unit at a place away, and tells the guest. Waits for its commands.
    pub fn unmap(&self, place: LunPlace) {
        if let Some(slot) = self.device.unmap(device_place(place)) {
            self.server.close_disk(slot);
        }
    }

    /// Has the queues see the size of the disk in a slot.
    pub fn refresh(&self, slot: DiskSlot) {
        self.server.refresh_disk(slot);
    }

    /// Tells the guest that the unit at a place has another size.
    pub fn resized(&self, place: LunPlace) {
        self.device.resized(device_place(place));
    }

    /// Whether its VMM keeps an in-flight region: see [`Server::in_flight_region`].
    pub fn in_flight_region(&self) -> Option<bool> {
        self.server.in_flight_region()
    }

    /// Begins to drain its queues: see [`Server::begin_stop`].
    pub fn begin_stop(&self) {
        self.server.begin_stop();
    }

    /// Whether a guest is connected.
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// What each of its queues counted, control and event queue first: see [`Server::report`].
    pub fn report(&self, workers: &[WorkerReport]) -> Option<Vec<QueueReport>> {
        self.server.report(workers)
    }
}

/// Puts a unit, whose disk is open in `slot`, at a place of the controller `id`.
fn map(device: &Arc<VirtioScsi>, id: &str, place: LunPlace, slot: DiskSlot, unit: &Unit) -> Result<(), LunError> {
    let nexus = unit.login(id, place)?;
    Ok(device.map(device_place(place), slot, nexus)?)
}

fn device_place(place: LunPlace) -> Place {
    Place { target: place.target, lun: place.lun }
}
