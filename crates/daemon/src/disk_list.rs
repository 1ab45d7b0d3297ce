//! The disks of an interface whose devices have one disk each: the stages of [`interface`](crate::interface) that these
//! interfaces share. Each supplies an [`Endpoint`] for the keys. A served disk keeps a [`DiskInfo`] for its reports.

use std::sync::Arc;

use mqblk_admin::model::DiskStat;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{AnyDisk, DiskHealth, QueueSettings, QueueStats};

use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::contract::DiskContract;
use crate::interface::{
    DeviceDescription, DiskTable, Export, INTERFACE, ListPosition, ResolveContext, StatDetail, UnassignedQueues,
};
use crate::limits::current_limit_pairs;
use crate::limits::{LIMIT_GROUP, is_limit_key};
use crate::names::{Claim, ID, rename_subject, take_id};
use crate::out::OutDisk;
use crate::pair::{Pair, Section};
use crate::queues::{QueueMap, queue_settings_pairs};
use crate::report::{self, DiskInfo};
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

    /// Returns the worker of each queue.
    fn queue_map(&self) -> &QueueMap;

    /// As [`queue_map`](Self::queue_map), to assign workers.
    fn queue_map_mut(&mut self) -> &mut QueueMap;

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

    /// Returns its queues.
    pub fn queues(&mut self) -> UnassignedQueues<'_> {
        UnassignedQueues {
            position: self.position,
            count: self.endpoint.queues(),
            map: self.endpoint.queue_map_mut(),
            settings: &self.settings,
            is_added: matches!(self.position, ListPosition::Added(_)),
        }
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
            endpoint.queue_map_mut().keep_on_one_worker(&subject, None)?;
        }
        Ok(DiskConfig { position, given, id, endpoint, storage })
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
            watch_size: self.storage.watch_size,
            queue_map: self.endpoint.queue_map().workers().to_vec(),
            // Limits may be changed while it is served.
            settings: sections
                .filter(|(key, _)| !own.contains(key) && !is_limit_key(key) && *key != LIMIT_GROUP.name)
                .collect(),
        }
    }
}

impl DiskInfo {
    /// Returns the disk as the verb `disks` reports it. `queues`: the settings of its queues, if they can be changed.
    pub fn describe(&self, queues: Option<&QueueSettings>) -> DeviceDescription {
        let DiskInfo { id, interface, storage, mut settings, health, .. } = self.clone();
        // These may have changed while it is served.
        let mut current = plug_pairs(&self.current_plug());
        current.extend(queues.into_iter().flat_map(queue_settings_pairs));
        settings.retain(|(key, _)| !current.iter().any(|(other, _)| other == key));
        settings.extend(current);
        settings.extend(current_limit_pairs(health.limits()));
        DeviceDescription { id, interface, storage: Some(storage), settings }
    }

    /// Returns the disk's statistics, from those of its queues in order. `queues`: as of [`describe`](Self::describe).
    pub fn stat(&self, queues: Option<QueueSettings>, stats: &[QueueStats], detail: StatDetail) -> DiskStat {
        let fixed = || self.queue_map.iter().map(|worker| usize::from(*worker)).collect();
        report::disk(self, &queues.map_or_else(fixed, |queues| queues.map), stats, detail)
    }

    /// Returns the storage that its guest reaches.
    pub fn export(&self) -> Export {
        Export {
            id: self.id.clone(),
            storage: None,
            health: Some(Arc::clone(&self.health)),
            configured_plug: self.plug,
            disk: self.disk.clone(),
            is_watched: self.watch_size,
        }
    }
}
