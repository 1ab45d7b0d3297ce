//! Virtio-scsi controllers and their logical units: creation, and LUN hot-plug, resize and unplug.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::{BudgetUse, ByteLen, DiskSlot};
use mqblk_engine::{
    AnyDisk, AttachError, DiskHealth, PlugOptions, QueueDisk, QueueId, QueueMove, QueuePolicy, QueueSettings,
    QueueStats, WorkerStats,
};
use mqblk_scsi::reservation::{FileReservationStore, LoginError, Reservations};
use mqblk_scsi::{Identity, LogicalUnit, LogicalUnitOptions, Nexus};
use mqblk_vhost_user_devices::serve_scsi;
use mqblk_vhost_user_server::{Frontend, HostState, Server, SocketError};
use mqblk_virtio_scsi::{FIXED_QUEUES, LunAddress, LunInUse, ScsiOptions, VirtioScsi};

use super::config::{ControllerConfig, FIXED_WORKER, TargetLun, UnitConfig, WORD};
use super::controller_keys;
use super::migration_gate::MigrationGate;
use crate::change::ChangeSource;
use crate::contract::ContractRecorder;
use crate::interface::HostContext;
use crate::names::{Claim, file_claim};
use crate::pair::Pair;
use crate::storage::CacheMode;
use crate::vhost_user::VhostUserEndpoint;

/// Maximum transfer length that a controller without initial LUNs reports: Linux' own limit for a device that reports
/// none. Each logical unit reports its own (VPD page B0h).
const MAX_TRANSFER: ByteLen = ByteLen(32 << 20);
/// Product revision level.
const REVISION: &str = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));

/// Errors of creating a logical unit, or of mapping it to a LUN.
#[derive(Debug, thiserror::Error)]
pub(super) enum LunError {
    /// Its reservations cannot be stored.
    #[error("reservations: {0}")]
    Reservations(String),
    /// Its disk cannot be opened on a worker.
    #[error(transparent)]
    Disk(#[from] AttachError),
    /// The logical unit accepts no more I_T nexuses of that name.
    #[error(transparent)]
    Join(#[from] LoginError),
    /// The LUN address is in use.
    #[error(transparent)]
    AddressInUse(#[from] LunInUse),
    /// The shared logical unit does not exist. The configuration check excludes this.
    #[error("its unit is not there")]
    NoUnit,
    /// Its storage serves one connection at a time, and the controller's queues are on several workers.
    #[error(
        "storage: found one connection at a time, expected one for each worker: put the controller's queues on worker 0 (queue-map), or export it by a server that offers multi-conn"
    )]
    OneChannel,
}

/// A served logical unit, which one or several LUNs map.
pub(super) struct ServedUnit {
    name: String,
    config: UnitConfig,
    logical_unit: Arc<LogicalUnit>,
    health: Arc<DiskHealth>,
    /// Held while the size changes or a LUN is mapped, so that a LUN mapped meanwhile gets the new size.
    resize_lock: RankedMutex<()>,
}

impl ServedUnit {
    /// Creates a logical unit named `name`.
    ///
    /// # Errors
    /// If its reservations cannot be stored.
    pub(super) fn new(name: &str, config: UnitConfig) -> Result<ServedUnit, LunError> {
        let disk = &config.storage.disk;
        let reservations = match &config.reservations {
            Some(path) => open_reservations(path).map_err(LunError::Reservations)?,
            None => Reservations::new(None),
        };
        let logical = LogicalUnit::new(LogicalUnitOptions {
            geometry: disk.geometry(),
            limits: disk.limits(),
            identity: Identity {
                vendor: config.vendor.clone(),
                product: config.product.clone(),
                revision: REVISION.to_owned(),
                serial: config.storage.serial.clone(),
                name: config.unit_name.clone(),
            },
            writeback: config.storage.cache == CacheMode::Writeback,
            reservations,
        });
        let health = config.storage.new_health(name);
        Ok(ServedUnit {
            name: name.to_owned(),
            logical_unit: Arc::new(logical),
            health,
            config,
            resize_lock: RankedMutex::new(LockRank::Resize, ()),
        })
    }

    /// Returns its name: the id of the LUN that it was created for.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns its unique values: no other logical unit may use them, nor a LUN its name as an id.
    pub(super) fn claims(&self) -> Vec<Claim> {
        let mut claims = vec![("id", self.name.clone()), ("unit-name", self.config.unit_name.clone())];
        claims.extend(self.config.reservations.iter().map(|path| file_claim("reservations", path)));
        claims
    }

    /// Returns its configuration.
    pub(super) fn config(&self) -> &UnitConfig {
        &self.config
    }

    pub(super) fn disk(&self) -> &Arc<AnyDisk> {
        &self.config.storage.disk
    }

    /// Returns its health: the error policy, and the stopped state.
    pub(super) fn health(&self) -> &Arc<DiskHealth> {
        &self.health
    }

    /// Returns the present plugging of its requests.
    pub(super) fn plug(&self) -> PlugOptions {
        self.health.plug().unwrap_or(self.config.storage.plug)
    }

    /// Runs `change` while holding the lock of the size and the mapped LUNs.
    pub(super) fn with_resize_lock<R>(&self, change: impl FnOnce() -> R) -> R {
        let _guard = self.resize_lock.lock();
        change()
    }

    /// Sets the size and notifies the initiators (unit attention).
    pub(super) fn set_size(&self, size: ByteLen) {
        self.logical_unit.set_size(size);
    }

    fn queue_disk(&self, slot: DiskSlot) -> QueueDisk {
        let health = Arc::clone(&self.health);
        QueueDisk { slot, disk: Arc::clone(self.disk()), plug: self.config.storage.plug, health }
    }

    /// Establishes the I_T nexus of a controller's guest. Its name must be the same after a restart: registrations are
    /// stored by it.
    fn login(self: &ServedUnit, controller: &str, address: TargetLun) -> Result<Arc<Nexus>, LoginError> {
        self.logical_unit.login(controller, u16::from(address.target) + 1)
    }
}

/// Opens a file of reservations and restores its content.
///
/// # Errors
/// If the file cannot be read, or has another format.
pub(super) fn open_reservations(path: &Path) -> Result<Arc<Reservations>, String> {
    let error = |why: &dyn std::fmt::Display| format!("{path:?}: {why}");
    let (store, saved) = FileReservationStore::open(path).map_err(|why| error(&why))?;
    let store = Arc::new(store);
    match saved {
        Some(saved) => Reservations::restore(&saved, Some(store)).map_err(|why| error(&why)),
        None => Ok(Reservations::new(Some(store))),
    }
}

/// A served controller.
pub(super) struct Controller {
    /// Its position among all controllers ever served.
    number: usize,
    id: String,
    origin: ChangeSource,
    claims: Vec<Claim>,
    migration_gate: Arc<MigrationGate>,
    /// True while it is being removed.
    removing: AtomicBool,
    endpoint: VhostUserEndpoint,
    settings: Vec<Pair>,
    device: Arc<VirtioScsi>,
    server: Arc<Server>,
    guests: Arc<ContractRecorder>,
}

/// A LUN that a controller starts with.
pub(super) struct InitialLun {
    pub address: TargetLun,
    /// The engine's slot of its disk.
    pub slot: DiskSlot,
    /// Its logical unit.
    pub unit: Arc<ServedUnit>,
}

/// Reasons why a controller cannot be served.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControllerError {
    /// Its socket cannot be created.
    #[error("controller {id:?}: socket: {source}")]
    Socket {
        /// The controller's id.
        id: String,
        /// The cause.
        source: SocketError,
    },
    /// One of its LUNs cannot be mapped.
    #[error("lun {address} of controller {id:?}: {source}")]
    Lun {
        /// The controller's id.
        id: String,
        /// The LUN's address.
        address: TargetLun,
        /// The cause.
        source: Box<LunError>,
    },
}

impl ControllerError {
    /// Returns the error of a LUN.
    pub(super) fn lun(id: &str, address: TargetLun, source: LunError) -> ControllerError {
        ControllerError::Lun { id: id.to_owned(), address, source: Box::new(source) }
    }
}

impl Controller {
    /// Serves the controller of `config` with `luns` (not those of `config`). `number` is larger than those of all
    /// controllers before. `host_state` migrates its LUNs while the gate is open.
    ///
    /// # Errors
    /// If the socket cannot be created, or a LUN cannot be mapped.
    pub(super) fn start(
        config: &ControllerConfig,
        number: usize,
        luns: &[InitialLun],
        host: &HostContext,
        (migration_gate, host_state): (Arc<MigrationGate>, Arc<dyn HostState>),
    ) -> Result<Controller, ControllerError> {
        let ControllerConfig { id, endpoint, cmd_per_lun, origin, .. } = config;
        let max_transfer = luns.iter().map(|lun| lun.unit.disk().limits().max_transfer).min();
        let device = Arc::new(VirtioScsi::new(ScsiOptions {
            queues: endpoint.queues,
            queue_size: endpoint.queue_size,
            cmd_per_lun: (*cmd_per_lun).into(),
            max_transfer: max_transfer.unwrap_or(MAX_TRANSFER),
        }));
        for InitialLun { address, slot, unit } in luns {
            map(&device, id, *address, *slot, unit).map_err(|error| ControllerError::lun(id, *address, error))?;
        }
        let disks = luns.iter().map(|lun| lun.unit.queue_disk(lun.slot)).collect();
        let given = luns.iter().map(|lun| (lun.address.to_string(), lun.unit.config.contract())).collect();
        let guests = endpoint.record_guests(WORD, given, host);
        let mut options = endpoint.server_options(id, disks, &guests, host);
        options.queue_map.splice(..0, [usize::from(FIXED_WORKER); FIXED_QUEUES as usize]);
        options.host_state = Some(host_state);
        tracing::info!(controller = %id, luns = luns.len(), queues = endpoint.queues, poll = %endpoint.policy.poll, "serving");
        let refused = |source| ControllerError::Socket { id: id.clone(), source };
        let server = serve_scsi(Arc::clone(&device), options).map_err(refused)?;
        Ok(Controller {
            number,
            id: id.clone(),
            origin: *origin,
            claims: std::iter::once(("id", id.clone())).chain(endpoint.claims()).collect(),
            migration_gate,
            removing: AtomicBool::new(false),
            endpoint: endpoint.clone(),
            settings: controller_keys::controller_pairs(config),
            device,
            server: Arc::new(server),
            guests,
        })
    }

    /// Returns its position among all controllers ever served.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn origin(&self) -> ChangeSource {
        self.origin
    }

    /// Returns its unique values.
    pub(super) fn claims(&self) -> &[Claim] {
        &self.claims
    }

    /// Returns the gate that is open while its LUNs migrate with its guest.
    pub(super) fn migration_gate(&self) -> &MigrationGate {
        &self.migration_gate
    }

    /// Returns true if it is being removed. Read and written while the table of LUNs is locked.
    pub(super) fn is_removing(&self) -> bool {
        self.removing.load(Ordering::Relaxed)
    }

    /// Marks it as being removed.
    pub(super) fn set_removing(&self) {
        self.removing.store(true, Ordering::Relaxed);
    }

    /// Returns its vhost-user endpoint.
    pub(super) fn endpoint(&self) -> &VhostUserEndpoint {
        &self.endpoint
    }

    /// Returns its settings, all defaults filled in.
    pub(super) fn settings(&self) -> &[Pair] {
        &self.settings
    }

    /// Maps a logical unit to a LUN and notifies the guest. Undoes all of it on an error.
    ///
    /// # Errors
    /// If a worker cannot open the disk, or the logical unit refuses the nexus.
    pub(super) fn map(&self, address: TargetLun, slot: DiskSlot, unit: &ServedUnit) -> Result<(), LunError> {
        if unit.disk().max_channels() == Some(1)
            && self.queue_settings().map.iter().any(|worker| *worker != usize::from(FIXED_WORKER))
        {
            return Err(LunError::OneChannel);
        }
        self.server.open_disk(unit.queue_disk(slot))?;
        let mapped = map(&self.device, &self.id, address, slot, unit);
        match mapped {
            Ok(()) => self.record(address, unit),
            Err(_) => self.server.close_disk(slot),
        }
        mapped
    }

    /// Records what guests are given of a LUN now.
    pub(super) fn record(&self, address: TargetLun, unit: &ServedUnit) {
        self.guests.set_disk(&address.to_string(), Some(unit.config.contract()));
    }

    /// Unmaps a LUN and notifies the guest. Waits for its commands to complete.
    pub(super) fn unmap(&self, address: TargetLun) {
        if let Some(slot) = self.device.unmap(device_address(address)) {
            self.guests.set_disk(&address.to_string(), None);
            self.server.close_disk(slot);
        }
    }

    /// Makes the queues re-read the size of the disk in a slot.
    pub(super) fn refresh(&self, slot: DiskSlot) {
        self.server.refresh_disk(slot);
    }

    /// Notifies the guest that the size of a LUN has changed.
    pub(super) fn resized(&self, address: TargetLun) {
        self.device.notify_resized(device_address(address));
    }

    /// Moves a request queue to another worker: see [`Server::move_queue`].
    ///
    /// # Errors
    /// If the worker refuses the queue.
    pub(super) fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        self.server.move_queue(queue.saturating_add(FIXED_QUEUES), worker, timeout)
    }

    /// Returns the request queues that are served now, each by its number.
    pub(super) fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        let queues = self.server.attached_queues().into_iter();
        queues.filter_map(|(queue, id)| Some((queue.checked_sub(FIXED_QUEUES)?, id))).collect()
    }

    /// Returns the settings of its request queues.
    pub(super) fn queue_settings(&self) -> QueueSettings {
        let mut settings = self.server.queue_settings();
        settings.map.drain(..usize::from(FIXED_QUEUES));
        settings
    }

    /// Changes the polling and the coalescing of its request queues: see [`Server::set_policy`].
    ///
    /// # Errors
    /// If a worker does not respond.
    pub(super) fn set_policy(&self, policy: QueuePolicy) -> Result<(), String> {
        self.server.set_policy(policy)
    }

    /// Returns true if its VMM has set an in-flight region: see [`Server::has_inflight_region`].
    pub(super) fn in_flight_region(&self) -> Option<bool> {
        self.server.has_inflight_region()
    }

    /// Starts to drain its queues: see [`Server::begin_stop`].
    pub(super) fn begin_stop(&self) {
        self.server.begin_stop();
    }

    /// Waits for its requests in flight, for the drain timeout at most, and stops serving it.
    pub(super) fn stop(&self) {
        self.server.stop();
    }

    /// Forgets what its guest was given: the controller is removed.
    pub(super) fn forget_guest(&self) {
        self.guests.forget();
    }

    /// Returns the connected frontend.
    pub(super) fn frontend(&self) -> Option<Frontend> {
        self.server.frontend()
    }

    pub(super) fn server(&self) -> Arc<Server> {
        Arc::clone(&self.server)
    }

    /// Returns true if a guest is connected.
    pub(super) fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// Returns its VMM's use of its budget.
    pub(super) fn budget(&self) -> BudgetUse {
        self.server.budget()
    }

    /// Returns the statistics of each queue, control and event queue first: see [`Server::stats`].
    pub(super) fn stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        self.server.stats(workers)
    }
}

/// Maps a logical unit, whose disk is open in `slot`, to a LUN of the controller `id`.
fn map(
    device: &Arc<VirtioScsi>,
    id: &str,
    address: TargetLun,
    slot: DiskSlot,
    unit: &ServedUnit,
) -> Result<(), LunError> {
    let nexus = unit.login(id, address)?;
    Ok(device.map(device_address(address), slot, nexus)?)
}

fn device_address(address: TargetLun) -> LunAddress {
    LunAddress { target: address.target, lun: address.lun }
}
