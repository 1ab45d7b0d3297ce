//! The disks of an interface whose devices have one disk each: the stages of [`interface`](crate::interface) that these
//! interfaces share. Each supplies an [`Endpoint`] for the keys and a [`DiskExport`] for the served disk.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mqblk_admin::model::DiskStat;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::{Geometry, Resize};
use mqblk_engine::{
    AnyDisk, Coalesce, DiskHealth, PlugOptions, PollPolicy, QueueId, QueueMove, QueuePlacement, QueueSettings,
    QueueStats, WorkerStats,
};

use mqblk_vhost_user_server::{Frontend, Server};

use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::contract::DiskContract;
use crate::interface::{
    DeviceDescription, DeviceKeys, DeviceStat, DiskTable, Export, FIXED_QUEUES, INTERFACE, ListPosition,
    ResolveContext, ServedDevice, StatDetail,
};
use crate::limits::current_limit_pairs;
use crate::limits::{LIMIT_GROUP, is_limit_key};
use crate::names::{Claim, ID, rename_subject, take_id};
use crate::out::OutDisk;
use crate::pair::{Pair, Section};
use crate::queues::queue_settings_pairs;
use crate::report as wire;
use crate::report::DiskInfo;
use crate::resize::ResizeOutcome;
use crate::storage::StorageConfig;
use crate::storage::backend_pairs;
use crate::storage::{STORAGE, StorageKeys, plug_pairs, storage_pairs, take_storage_kind};
use crate::storage_backends::StorageBackends;

/// The way of guests to a disk over one interface: the interface's own keys.
pub trait Endpoint: Clone + Send + Sync + 'static {
    /// Maximum length of the serial number that guests read, in bytes.
    const SERIAL_BYTES: usize;

    /// Takes the keys of the disk `id`, which is the settings' subject.
    ///
    /// # Errors
    /// If a value is invalid or claimed already.
    fn take(settings: &mut Settings, id: &str, context: &mut ResolveContext<'_>) -> Result<Self, SettingError>;

    /// Returns the number of queues offered.
    fn queues(&self) -> u16;

    /// Assigns the queues to workers.
    ///
    /// # Errors
    /// If the queue map is invalid.
    fn assign_queues(&mut self, settings: &Settings, placement: &mut QueuePlacement) -> Result<(), SettingError>;

    /// Assigns all queues to one worker: the disk's storage has one channel.
    ///
    /// # Errors
    /// If the queue map conflicts, or the interface cannot.
    fn keep_on_one_worker(&mut self, settings: &Settings) -> Result<(), SettingError> {
        let map = self.queue_map();
        if map.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(());
        }
        let found = format!("{} of an interface that has no queue-map", self.queues());
        Err(settings.error("queues", found, "1: this storage serves one connection at a time"))
    }

    /// Forgets the queue map.
    fn forget_queue_map(&mut self) {}

    /// Returns the worker of each queue.
    fn queue_map(&self) -> &[u16];

    /// Returns the keys with their values.
    fn pairs(&self) -> Vec<Pair>;

    /// Returns its unique values.
    fn claims(&self) -> Vec<Claim> {
        Vec::new()
    }

    /// Returns the disk as an earlier daemon gave it to a guest.
    fn given(&self) -> Option<&DiskContract> {
        None
    }
}

/// The keys of a disk whose storage is not open yet.
pub struct DiskKeys<E> {
    position: ListPosition,
    /// As given, with the id.
    given: Settings,
    settings: Settings,
    id: String,
    endpoint: E,
    storage: StorageKeys,
}

impl<E: Endpoint> DiskKeys<E> {
    /// Takes all keys except those of the storage backend.
    ///
    /// # Errors
    /// Returns the first invalid value.
    pub fn take(disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<DiskKeys<E>, SettingError> {
        let DiskTable { mut settings, owner, position } = disk;
        let mut given = settings.clone();
        let kind = take_storage_kind(&mut settings, context.kinds)?;
        let id = take_id(&mut settings, "path", kind)?;
        if given.peek(&ID).is_none() {
            given.insert(&ID, &id)?;
        }
        rename_subject(&mut settings, format!("disk {id:?}"));
        context.names.claim(&settings, ID.name, &id, owner)?;
        let endpoint = E::take(&mut settings, &id, context)?;
        let storage = StorageKeys::take(&mut settings, kind, &id, E::SERIAL_BYTES)?;
        Ok(DiskKeys { position, given, settings, id, endpoint, storage })
    }

    /// Returns the id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the unique values that it has claimed.
    pub fn claims(&self) -> Vec<Claim> {
        std::iter::once((ID.name, self.id.clone())).chain(self.endpoint.claims()).collect()
    }

    /// Returns the device with its position.
    pub fn device(&mut self) -> (ListPosition, &mut dyn DeviceKeys) {
        (self.position, self)
    }

    /// Returns the disk's name for messages.
    pub fn subject(&self) -> String {
        self.settings.subject().to_owned()
    }

    /// Returns the endpoint.
    pub fn endpoint(&self) -> &E {
        &self.endpoint
    }

    /// Returns the endpoint alone.
    #[cfg(test)]
    pub fn into_endpoint(self) -> E {
        self.endpoint
    }

    /// Returns the record of a disk that `why` keeps out.
    pub fn out(&self, interface: &'static str, origin: ChangeSource, why: &dyn std::error::Error) -> OutDisk {
        let mut settings = self.given.clone();
        if settings.peek(&INTERFACE).is_none() {
            // Absent, so the insertion cannot fail.
            let _ = settings.insert(&INTERFACE, interface);
        }
        OutDisk::new(self.id.clone(), interface, settings, origin, why)
    }

    /// Opens the storage, and fails if a key is left.
    ///
    /// # Errors
    /// If the storage cannot be opened, or a key is unknown.
    pub fn open(&self, storages: &dyn StorageBackends) -> Result<DiskConfig<E>, ConfigError> {
        let DiskKeys { position, given, settings, id, endpoint, storage } = self;
        let (position, given, id, mut endpoint) = (*position, given.clone(), id.clone(), endpoint.clone());
        let (settings, storage) = (settings.clone(), storage.clone());
        let subject = Settings::new(settings.subject());
        let storage = storage.open(settings, storages, endpoint.given())?;
        if storage.disk.max_channels() == Some(1) {
            endpoint.keep_on_one_worker(&subject)?;
        }
        Ok(DiskConfig { position, given, id, endpoint, storage })
    }
}

impl<E: Endpoint> DeviceKeys for DiskKeys<E> {
    fn queues(&self) -> u16 {
        self.endpoint.queues()
    }

    fn assign_queues(&mut self, placement: &mut QueuePlacement) -> Result<(), SettingError> {
        self.endpoint.assign_queues(&self.settings, placement)
    }

    fn forget_queue_map(&mut self) -> bool {
        self.endpoint.forget_queue_map();
        matches!(self.position, ListPosition::Added(_))
    }
}

/// A disk of the configuration.
pub struct DiskConfig<E> {
    /// Its position in lists.
    pub position: ListPosition,
    /// Its keys as given, with the id.
    pub given: Settings,
    /// Names the disk in logs and metrics.
    pub id: String,
    /// Its endpoint.
    pub endpoint: E,
    /// Its storage.
    pub storage: StorageConfig,
}

impl<E: Endpoint> DiskConfig<E> {
    /// Returns the table that configures it. `interface` is the word of its interface, unless that is the default.
    pub fn section(&self, interface: Option<&str>) -> (ListPosition, Vec<Section>) {
        let mut pairs = vec![(ID.name, crate::pair::string(&self.id))];
        pairs.extend(backend_pairs(&self.storage));
        pairs.extend(interface.map(|word| (INTERFACE.name, crate::pair::string(word))));
        pairs.extend(self.endpoint.pairs());
        pairs.extend(storage_pairs(&self.storage));
        (self.position, vec![Section { heading: "disk", pairs }])
    }

    /// Returns its id, with the noun for messages.
    pub fn named(&self) -> (&'static str, String) {
        ("disk", self.id.clone())
    }

    /// Returns its disk, with its name for messages.
    pub fn flush_target(&self) -> (String, Arc<AnyDisk>) {
        (format!("disk {:?}", self.id), Arc::clone(&self.storage.disk))
    }

    /// Returns its description for reports. `interface` is the word of its interface.
    pub fn info(&self, interface: &'static str, health: &Arc<DiskHealth>) -> DiskInfo {
        let own = [ID.name, STORAGE.name, INTERFACE.name];
        let sections = self.section(None).1.into_iter().flat_map(|section| section.pairs);
        DiskInfo {
            id: self.id.clone(),
            interface,
            storage: self.storage.kind.clone(),
            plug: self.storage.plug,
            health: Arc::clone(health),
            disk: Some(Arc::downgrade(&self.storage.disk)),
            queue_map: self.endpoint.queue_map().to_vec(),
            // Limits may be changed while it is served.
            settings: sections
                .filter(|(key, _)| !own.contains(key) && !is_limit_key(key) && *key != LIMIT_GROUP.name)
                .collect(),
        }
    }
}

/// The guest side of a served disk.
pub trait DiskExport: Send + Sync {
    /// Returns the statistics of each queue, from those of the workers. `None` if a queue was attached or detached
    /// meanwhile.
    fn queue_stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>>;

    /// Returns the connected frontend: see [`ServedDevice::frontend`].
    fn frontend(&self) -> Option<Frontend> {
        None
    }

    /// Adds the members that only this interface has.
    fn annotate(&self, _stat: &mut DiskStat) {}

    /// Resizes the disk and notifies its guest.
    ///
    /// # Errors
    /// If the disk cannot have that size.
    fn resize(&self, request: Resize) -> Result<ResizeOutcome, ChangeError>;

    /// Returns true if a guest is connected to it.
    fn is_connected(&self) -> bool;

    /// Returns its disk, if the size of its storage is watched.
    fn watched(&self) -> Option<Arc<AnyDisk>>;

    /// Returns the settings of its queues: see [`ServedDevice::queue_settings`].
    fn queue_settings(&self) -> Option<QueueSettings> {
        None
    }

    /// Changes the polling of its queues: see [`ServedDevice::set_polling`].
    ///
    /// # Errors
    /// If that cannot be changed, or a worker does not respond.
    fn set_polling(&self, _poll: PollPolicy, _coalesce: Coalesce) -> Result<(), String> {
        Err(FIXED_QUEUES.to_owned())
    }

    /// Returns its server: see [`ServedDevice::server`].
    fn server(&self) -> Option<Arc<Server>> {
        None
    }

    /// Moves a queue to another worker: see [`ServedDevice::move_queue`].
    ///
    /// # Errors
    /// If queues of this interface cannot move, or the worker refuses the queue.
    fn move_queue(&self, _queue: u16, _worker: usize, _timeout: Duration) -> Result<QueueMove, String> {
        Err(FIXED_QUEUES.to_owned())
    }

    /// Returns the queues that its guest uses now: see [`ServedDevice::attached_queues`].
    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        Vec::new()
    }
}

/// A served disk: its description for reports, and its guest side.
pub struct ServedDisk<X: ?Sized> {
    info: Arc<DiskInfo>,
    export: Arc<X>,
}

impl<X: DiskExport + ?Sized + 'static> ServedDisk<X> {
    /// Creates the served disk of an export.
    pub fn new(info: DiskInfo, export: Arc<X>) -> Arc<ServedDisk<X>> {
        Arc::new(ServedDisk { info: Arc::new(info), export })
    }

    /// Returns its id.
    pub fn id(&self) -> &str {
        &self.info.id
    }

    /// Returns its guest side.
    pub fn export(&self) -> &Arc<X> {
        &self.export
    }
}

impl<X: ?Sized> Clone for ServedDisk<X> {
    fn clone(&self) -> Self {
        ServedDisk { info: Arc::clone(&self.info), export: Arc::clone(&self.export) }
    }
}

impl<X: DiskExport + ?Sized + 'static> ServedDevice for ServedDisk<X> {
    fn describe(&self) -> DeviceDescription {
        let DiskInfo { id, interface, storage, mut settings, health, .. } = DiskInfo::clone(&self.info);
        // These may have changed while it is served.
        let mut current = plug_pairs(&self.info.current_plug());
        current.extend(self.export.queue_settings().iter().flat_map(queue_settings_pairs));
        settings.retain(|(key, _)| !current.iter().any(|(other, _)| other == key));
        settings.extend(current);
        settings.extend(current_limit_pairs(health.limits()));
        DeviceDescription { id, interface, storage: Some(storage), settings }
    }

    fn stat(&self, workers: &[WorkerStats], detail: StatDetail) -> Option<DeviceStat> {
        let fixed = || self.info.queue_map.iter().map(|worker| usize::from(*worker)).collect();
        let map = self.export.queue_settings().map_or_else(fixed, |queues| queues.map);
        let mut stat = wire::disk(&self.info, &map, &self.export.queue_stats(workers)?, detail);
        self.export.annotate(&mut stat);
        Some(DeviceStat::Disk(Box::new(stat)))
    }

    fn exports(&self) -> Vec<Arc<dyn Export>> {
        vec![Arc::new(self.clone())]
    }

    fn id(&self) -> String {
        self.info.id.clone()
    }

    fn frontend(&self) -> Option<Frontend> {
        self.export.frontend()
    }

    fn is_connected(&self) -> bool {
        self.export.is_connected()
    }

    fn server(&self) -> Option<Arc<Server>> {
        self.export.server()
    }

    fn queue_settings(&self) -> Option<QueueSettings> {
        self.export.queue_settings()
    }

    fn set_polling(&self, poll: PollPolicy, coalesce: Coalesce) -> Result<(), String> {
        self.export.set_polling(poll, coalesce)
    }

    fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        self.export.move_queue(queue, worker, timeout)
    }

    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        self.export.attached_queues()
    }
}

impl<X: DiskExport + ?Sized + 'static> Export for ServedDisk<X> {
    fn id(&self) -> &str {
        &self.info.id
    }

    fn health(&self) -> Option<Arc<DiskHealth>> {
        Some(Arc::clone(&self.info.health))
    }

    fn plug(&self) -> Option<PlugOptions> {
        Some(self.info.current_plug())
    }

    fn has_one_channel(&self) -> bool {
        self.info.disk.as_ref().and_then(Weak::upgrade).is_some_and(|disk| disk.max_channels() == Some(1))
    }

    fn geometry(&self) -> Option<Geometry> {
        self.info.disk.as_ref()?.upgrade().map(|disk| disk.geometry())
    }

    fn watched(&self) -> Option<Arc<AnyDisk>> {
        self.export.watched()
    }

    fn resize(&self, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        self.export.resize(request)
    }
}
