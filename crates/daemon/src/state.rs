//! The state of a running daemon: its workers and its served interfaces.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mqblk_admin::VerbError;
use mqblk_core::Resize;
use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex, assert_unlocked};
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{AnyDisk, Engine, QueuePlacement, WorkerStats};

use crate::broker::Broker;
use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::changes::{Alone, Change, Changes};
use crate::clock::monotonic_ns;
use crate::contract::{KeptContracts, SavedContracts};
use crate::exclusive::{ExclusiveVerbs, RunningVerb, VerbScope};
use crate::file::ConfigSource;
use crate::file::RawConfig;
use crate::interface::{DeviceStat, Export, Interfaces, ServedDevice, ServedInterface, StatDetail};
use crate::limits::LimitGroups;
use crate::listeners::ProcessListeners;
use crate::live_keys::is_queue_key;
use crate::log_level::LogLevel;
use crate::out::{OutDisk, OutDisks};
use crate::reload::{self, ConfigChange, ConfigItem};
use crate::resize::ResizeOutcome;
use crate::saved_changes::Keeping;
use crate::saved_changes::{ConfiguredValues, KeptChanges, SavedChanges};
use crate::service_notifier::ServiceNotifier;
use crate::state_file::StateFile;
use crate::storage_backends;

/// Maximum number of ids that a message lists.
const LISTED: usize = 16;
/// Longest wait of a verb for another one that changes the same object.
const VERB_WAIT: Duration = Duration::from_secs(10);
/// Number of attempts, and the pause between them, if a queue is attached or detached while statistics are read.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2);

/// The means of changes at run time, besides disks.
pub struct DaemonControl {
    /// All guest interfaces.
    pub table: Interfaces,
    /// The level of the log, if it can be changed.
    pub log: Option<Arc<dyn LogLevel>>,
    /// The state file, if there is one.
    pub file: Option<Arc<StateFile>>,
    /// The configuration as given.
    pub given: RawConfig,
    /// The source to read it from again.
    pub source: Option<Arc<dyn ConfigSource>>,
    /// Opens it in the sandbox.
    pub broker: Option<Arc<Broker>>,
    /// The groups of limits.
    pub limit_groups: LimitGroups,
    /// The workers of all queues.
    pub placement: Arc<RankedMutex<QueuePlacement>>,
    /// The saved changes of settings.
    pub kept: Arc<KeptChanges>,
    /// The disks that are out.
    pub out: Arc<OutDisks>,
    /// The record of what guests are given.
    pub contracts: Arc<KeptContracts>,
    /// Longest wait of a stop for storage.
    pub drain_timeout: Duration,
    /// Ends the wait of the program for a signal.
    pub end: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// A difference of a configuration that was read again, with the result of applying it.
pub struct AppliedChange {
    /// The difference.
    pub change: ConfigChange,
    /// The result; `None`: nothing was tried.
    pub result: Option<Result<(), String>>,
}

/// A disk whose size is watched.
pub(crate) struct WatchedDisk {
    pub(crate) id: String,
    pub(crate) disk: Arc<AnyDisk>,
    /// True if a guest is connected to it.
    pub(crate) in_use: bool,
}

/// The state of the daemon that the verbs use.
pub struct DaemonState {
    engine: Arc<Engine>,
    table: Interfaces,
    log: Option<Arc<dyn LogLevel>>,
    file: Option<Arc<StateFile>>,
    /// The daemon's configuration, and the source to read it from again.
    config: RankedMutex<RawConfig>,
    source: Option<Arc<dyn ConfigSource>>,
    broker: Option<Arc<Broker>>,
    exclusive: ExclusiveVerbs,
    placement: Arc<RankedMutex<QueuePlacement>>,
    kept: Arc<KeptChanges>,
    contracts: Arc<KeptContracts>,
    interfaces: Vec<Arc<dyn ServedInterface>>,
    limit_groups: LimitGroups,
    out: Arc<OutDisks>,
    drain_timeout: Duration,
    changes: Changes,
    listeners: RankedMutex<ProcessListeners>,
    notifier: OnceLock<Arc<ServiceNotifier>>,
    end: Option<Arc<dyn Fn() + Send + Sync>>,
    handed_over: AtomicBool,
    started_ns: u64,
}

impl DaemonState {
    /// Creates the state of a daemon that starts now. `interfaces` are those of `control.table`, served.
    pub fn new(engine: Arc<Engine>, interfaces: Vec<Arc<dyn ServedInterface>>, control: DaemonControl) -> DaemonState {
        let DaemonControl {
            table,
            log,
            file,
            given,
            source,
            broker,
            limit_groups,
            placement,
            kept,
            contracts,
            out,
            drain_timeout,
            end,
        } = control;
        DaemonState {
            engine,
            table,
            log,
            file,
            config: RankedMutex::new(LockRank::Configuration, given),
            source,
            broker,
            exclusive: ExclusiveVerbs::default(),
            placement,
            kept,
            contracts,
            interfaces,
            limit_groups,
            out,
            drain_timeout,
            changes: Changes::default(),
            listeners: RankedMutex::leaf(ProcessListeners::default()),
            notifier: OnceLock::new(),
            end,
            handed_over: AtomicBool::new(false),
            started_ns: monotonic_ns(),
        }
    }

    /// Begins a change at run time.
    ///
    /// # Errors
    /// If the daemon hands over to another process, which already has its state.
    pub fn begin_change(&self) -> Result<Change, String> {
        self.changes.begin(true)
    }

    /// Begins a change that the next daemon need not know.
    ///
    /// # Errors
    /// As [`begin_change`](Self::begin_change).
    pub(crate) fn begin_passing_change(&self) -> Result<Change, String> {
        self.changes.begin(false)
    }

    /// Excludes changes, for a takeover. Waits for running ones.
    ///
    /// # Errors
    /// If one takes long, or a takeover runs already.
    pub(crate) fn begin_hand_over(&self) -> Result<Alone, String> {
        self.changes.begin_alone()
    }

    /// Returns true if the next daemon does not know a change at run time.
    pub(crate) fn loses_changes(&self) -> bool {
        self.changes.has_any() && !self.keeps_changes()
    }

    /// Refuses new takeovers, and waits for one that cannot end any more.
    pub(crate) fn end_hand_over(&self) {
        // Each device may take its drain timeout.
        self.changes.end(self.drain_timeout.saturating_mul(2), || self.is_handed_over());
    }

    /// Returns the longest wait of a stop for storage.
    pub(crate) fn drain_timeout(&self) -> Duration {
        self.drain_timeout
    }

    /// Returns the listening sockets of the process.
    pub(crate) fn listeners(&self) -> RankedGuard<'_, ProcessListeners> {
        self.listeners.lock()
    }

    pub(crate) fn state_file(&self) -> Option<&StateFile> {
        self.file.as_deref()
    }

    /// Sets the notifier of the service manager.
    pub(crate) fn set_notifier(&self, notifier: Arc<ServiceNotifier>) {
        // Set once.
        let _ = self.notifier.set(notifier);
    }

    /// Returns the socket of the service manager, and the time in which it expects signs of life.
    pub(crate) fn service_manager(&self) -> Option<(OwnedFd, Option<Duration>)> {
        self.notifier.get()?.handed()
    }

    /// Sends a message to the service manager.
    pub(crate) fn tell_service_manager(&self, message: &str) {
        if let Some(notifier) = self.notifier.get() {
            notifier.send(message);
        }
    }

    /// Ends the program: another process serves all.
    pub(crate) fn set_handed_over(&self) {
        self.handed_over.store(true, Ordering::SeqCst);
        if let Some(end) = &self.end {
            end();
        }
    }

    /// Returns true if another process serves all.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::SeqCst)
    }

    /// Returns true if the configuration can be read again.
    pub fn reads_config(&self) -> bool {
        self.source.is_some()
    }

    /// Reads the configuration again, from `file` if given, else from the one of the start, and returns the
    /// differences. `apply`: applies them as far as possible.
    ///
    /// # Errors
    /// If it cannot be read. Nothing is changed then.
    pub fn apply_config(&self, file: Option<&Path>, apply: bool) -> Result<Vec<AppliedChange>, SettingError> {
        let Some(source) = &self.source else { return Ok(Vec::new()) };
        // Before others are excluded: reading the file may be slow.
        let new = source.read(file, &|path| self.open_config(path))?;
        let refused = |why| Settings::new("config").error("config", why, "a daemon that stays");
        let _change = apply.then(|| self.begin_change()).transpose().map_err(refused)?;
        let alone = apply.then(|| self.exclusive.begin(VerbScope::Configuration, "config.apply", VERB_WAIT));
        let _alone = alone.transpose().map_err(|why| Settings::new("config").error("config", why, "its end"))?;
        let kinds = storage_backends::kinds();
        let changes = reload::plan(&self.config.lock(), &new, self.table, &kinds)?;
        let applied = changes.into_iter().map(|change| {
            let result = match &change {
                _ if !apply => None,
                ConfigChange::Add { item: ConfigItem::Table(..), settings, .. } => {
                    Some(self.add_controller(settings, ChangeSource::Configuration).map(|_| ()))
                }
                ConfigChange::Add { settings, .. } => {
                    Some(self.add_disk(settings.clone(), ChangeSource::Configuration).map(|_| ()))
                }
                ConfigChange::Remove { item: ConfigItem::Table(..), id } => {
                    Some(self.remove_controller(id, false, ChangeSource::Configuration))
                }
                ConfigChange::Remove { id, .. } => Some(self.remove_disk(id, false, ChangeSource::Configuration)),
                ConfigChange::Set { item, id, .. } => Some(self.apply_set(*item, id, &change)),
                ConfigChange::Workers(count) => Some(self.set_workers(*count, &[], Keeping::Forget)),
                ConfigChange::Unchangeable { .. } => None,
            };
            AppliedChange { change, result: result.map(|result| result.map_err(|error| error.to_string())) }
        });
        let applied: Vec<AppliedChange> = applied.collect();
        let done = applied.iter().filter(|applied| applied.result == Some(Ok(()))).map(|applied| &applied.change);
        // The comparison has succeeded before, so this does.
        let _ = reload::record(&mut self.config.lock(), &done.collect::<Vec<_>>(), self.table, &kinds);
        Ok(applied)
    }

    /// Opens a configuration file. In the sandbox only that of the start can be opened.
    fn open_config(&self, path: &Path) -> io::Result<File> {
        let Some(broker) = &self.broker else { return crate::file_use::open_for_reading(path) };
        let started = self.source.as_ref().and_then(|source| source.file());
        if started.as_deref() != Some(path) {
            let why = "the sandbox reads only the file that the daemon was started with";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok(broker.open_config()?)
    }

    /// Applies a difference of settings.
    fn apply_set(&self, item: ConfigItem, id: &str, change: &ConfigChange) -> Result<(), ChangeError> {
        let settings = change.live_settings()?;
        let target = match item {
            ConfigItem::LimitGroup => return self.set_limit_group(id, settings, Keeping::Forget),
            ConfigItem::Table(..) => self.live_controller(id)?,
            ConfigItem::Disk if self.live_disk(id).is_err() => return self.set_disk_behind_controller(id, &settings),
            ConfigItem::Disk | ConfigItem::InnerTable(..) => self.live_disk(id)?,
        };
        self.set_live(&target, settings, Keeping::Forget)
    }

    /// Sets keys of a controller that was configured as a disk, and of its LUN.
    fn set_disk_behind_controller(&self, id: &str, settings: &Settings) -> Result<(), ChangeError> {
        let controller = self.live_controller(id).map_err(|_| self.no_such("id", id))?;
        let (mut of_queues, mut of_lun) = (Settings::new(id), Settings::new(id));
        for (key, value) in settings.pairs() {
            let own = if is_queue_key(key) { &mut of_queues } else { &mut of_lun };
            own.insert(key, value)?;
        }
        let luns = controller.luns();
        if of_lun.pairs().next().is_some()
            && let Some(lun) = luns.first()
        {
            self.set_live(&self.live_disk(lun)?, of_lun, Keeping::Forget)?;
        }
        self.set_live(&controller, of_queues, Keeping::Forget)
    }

    /// Excludes other changes of the same object until the result is dropped. Waits for a running one.
    ///
    /// # Errors
    /// If the running one does not end: names it.
    pub(crate) fn change_alone(&self, scope: VerbScope, verb: &'static str) -> Result<RunningVerb, ChangeError> {
        self.exclusive.begin(scope, verb, VERB_WAIT).map_err(ChangeError::Failed)
    }

    /// Returns the workers of all queues.
    pub(crate) fn placement(&self) -> RankedGuard<'_, QueuePlacement> {
        self.placement.lock()
    }

    /// Returns the saved changes of settings. [`write_saved`](Self::write_saved) writes them.
    pub(crate) fn saved(&self) -> RankedGuard<'_, SavedChanges> {
        self.kept.lock()
    }

    /// Writes the saved changes of settings to the state file, if there is one.
    pub(crate) fn write_saved(&self) {
        self.kept.write();
    }

    /// Returns the records that guests rely on now, for a daemon that takes over without a state file.
    pub(crate) fn given_to_guests(&self) -> SavedContracts {
        self.contracts.saved()
    }

    /// Returns the configured settings of a disk, LUN or controller.
    pub(crate) fn configured_settings(&self, id: &str) -> ConfiguredValues {
        let config = self.config.lock();
        let identified = reload::identified(&config, self.table, &storage_backends::kinds());
        let own = identified.unwrap_or_default().into_iter().find(|(other, _)| other == id);
        own.map(|(_, settings)| reload::keys_of(&settings)).unwrap_or_default()
    }

    /// Returns the configured number of workers, as written.
    pub(crate) fn configured_workers(&self) -> Option<String> {
        self.config.lock().process.peek("workers").map(str::to_owned)
    }

    /// Returns the configured settings of a group of limits.
    pub(crate) fn configured_group(&self, name: &str) -> ConfiguredValues {
        let config = self.config.lock();
        let own = config.limit_groups.iter().find(|group| group.peek("name") == Some(name));
        own.map(reload::keys_of).unwrap_or_default()
    }

    /// Returns the controllers: the devices without storage of their own.
    pub(crate) fn controllers(&self) -> Vec<Arc<dyn ServedDevice>> {
        self.devices().into_iter().filter(|device| device.describe().storage.is_none()).collect()
    }

    /// Returns the error that no controller has this id.
    pub(crate) fn no_such_controller(&self, key: &str, id: &str) -> SettingError {
        let ids: Vec<String> = self.controllers().iter().map(|controller| controller.id()).collect();
        let expected = match ids.len() {
            0 => "the id of a controller, of which there is none".to_owned(),
            1..=LISTED => format!("one of {}", ids.join(", ")),
            many => format!("the id of one of the {many} controllers that disks lists"),
        };
        Settings::new("controller").error(key, format!("{id:?}"), expected)
    }

    /// Returns the error that no disk or controller has this id.
    pub(crate) fn no_such_device(&self, id: &str) -> SettingError {
        let ids: Vec<String> = self.devices().iter().map(|device| device.id()).collect();
        let expected = match ids.len() {
            0 => "the id of a disk or controller, of which there is none".to_owned(),
            1..=LISTED => format!("one of {}", ids.join(", ")),
            many => format!("the id of one of the {many} disks and controllers that disks lists"),
        };
        Settings::new("queue").error("id", format!("{id:?}"), expected)
    }

    /// Returns true if the next daemon will serve disks that are added now.
    pub fn keeps_changes(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.is_written())
    }

    /// Returns the level of the log, if it can be changed.
    pub fn log(&self) -> Option<&dyn LogLevel> {
        self.log.as_deref()
    }

    /// Returns the groups of limits.
    pub fn limit_groups(&self) -> &LimitGroups {
        &self.limit_groups
    }

    /// Returns the workers.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the served interfaces.
    pub fn interfaces(&self) -> &[Arc<dyn ServedInterface>] {
        assert_unlocked();
        &self.interfaces
    }

    /// Returns the daemon's start in nanoseconds of the monotonic clock.
    pub fn started_ns(&self) -> u64 {
        self.started_ns
    }

    /// Returns the devices of all interfaces, sorted by position.
    pub fn devices(&self) -> Vec<Arc<dyn ServedDevice>> {
        let mut devices: Vec<_> = self.interfaces().iter().flat_map(|interface| interface.devices()).collect();
        devices.sort_by_key(|(position, _)| *position);
        devices.into_iter().map(|(_, device)| device).collect()
    }

    /// Returns all disks and LUNs, sorted by their devices' positions.
    pub fn exports(&self) -> Vec<Export> {
        self.devices().iter().flat_map(|device| device.exports()).collect()
    }

    /// Resizes the disk or LUN of this id.
    ///
    /// # Errors
    /// If nothing has this id, or it cannot have that size.
    pub fn resize(&self, id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        // The size watch calls this too.
        let _change = self.begin_change().map_err(ChangeError::Failed)?;
        let exports = |device: &Arc<dyn ServedDevice>| device.exports().iter().any(|export| export.id == id);
        match self.devices().iter().find(|device| exports(device)) {
            Some(device) => device.resize(id, request),
            None => Err(ChangeError::Setting(self.no_such("id", id))),
        }
    }

    /// Returns numbers that stay the same as long as no device, disk or LUN is added or removed and no guest connects
    /// or disconnects. `None`: unknown.
    pub(crate) fn device_changes(&self) -> Option<Vec<u64>> {
        self.interfaces().iter().map(|interface| interface.changes()).collect()
    }

    /// Returns the disks whose storage size is watched, without duplicates, each with an id that
    /// [`resize`](Self::resize) accepts.
    pub(crate) fn watched_disks(&self) -> Vec<WatchedDisk> {
        let mut places: HashMap<*const (), usize> = HashMap::new();
        let mut watched: Vec<WatchedDisk> = Vec::new();
        for device in self.devices() {
            let in_use = device.is_connected();
            for export in device.exports() {
                let Some(disk) = export.watched() else { continue };
                match places.entry(Arc::as_ptr(&disk).cast()) {
                    // A LUN under two controllers.
                    Entry::Occupied(place) => watched[*place.get()].in_use |= in_use,
                    Entry::Vacant(place) => {
                        place.insert(watched.len());
                        watched.push(WatchedDisk { id: export.id, disk, in_use });
                    }
                }
            }
        }
        watched
    }

    /// Adds the disk of `settings`: a `[[disk]]` table, or a LUN if it has the key `controller`. Returns its id.
    ///
    /// # Errors
    /// If a value is invalid, or the disk cannot be served.
    pub fn add_disk(&self, settings: Settings, source: ChangeSource) -> Result<String, ChangeError> {
        let id = self.serve_disk(settings, source)?;
        // Saved settings of this id are another disk's.
        self.kept.forget(&id);
        self.out.remove(&id);
        Ok(id)
    }

    /// Returns the disks that are out.
    pub fn out(&self) -> &OutDisks {
        &self.out
    }

    /// Tries to serve a disk or LUN that is out.
    ///
    /// # Errors
    /// If no disk or LUN of this id is out, or it still cannot be served.
    pub fn retry_disk(&self, id: &str) -> Result<(), ChangeError> {
        let _one = self.change_alone(VerbScope::Target(id.to_owned()), "disk.retry")?;
        let Some(disk) = self.out.find(id) else {
            let ids: Vec<String> = self.out.list().into_iter().map(|disk| disk.id).collect();
            let expected = match ids.len() {
                0 => "the id of a disk or LUN that is out, of which there is none".to_owned(),
                _ => format!("one of those that are out: {}", ids.join(", ")),
            };
            return Err(ChangeError::Setting(Settings::new("disk").error("id", format!("{id:?}"), expected)));
        };
        if let Err(error) = self.serve_disk(disk.settings, disk.origin) {
            self.out.failed(id, &error.to_string());
            return Err(error);
        }
        self.out.remove(id);
        self.restore_device(id);
        self.write_saved();
        tracing::info!(disk = id, tries = disk.tries, "served again");
        Ok(())
    }

    fn serve_disk(&self, mut settings: Settings, source: ChangeSource) -> Result<String, ChangeError> {
        let is_taken = |id: &str| self.has_id(id);
        let word = settings.peek("interface").unwrap_or_default().to_owned();
        let interface = match self.interfaces().iter().find(|interface| interface.adds(&settings)) {
            Some(interface) => interface,
            None => {
                let given = settings.clone();
                let at = self.table.take(&mut settings)?;
                let Some(interface) = self.interfaces().get(at) else {
                    let expected = "an interface of this daemon";
                    return Err(ChangeError::Setting(given.error(
                        "interface",
                        self.table.words().join(", "),
                        expected,
                    )));
                };
                interface
            }
        };
        interface.add_disk(settings, &is_taken, source).map_err(|error| match error {
            ChangeError::Setting(error) if error.key == "interface" => {
                ChangeError::Setting(SettingError { found: format!("{word:?}"), ..error })
            }
            error => error,
        })
    }

    /// Removes the disk or LUN of this id, with `force` also while a guest is connected.
    ///
    /// # Errors
    /// If nothing has this id, a guest is connected, or its storage cannot be flushed.
    pub fn remove_disk(&self, id: &str, force: bool, source: ChangeSource) -> Result<(), ChangeError> {
        if let Some(disk) = self.out.find(id) {
            self.give_up_disk(&disk, source);
            return Ok(());
        }
        if let Some(removed) = self.interfaces().iter().find_map(|interface| interface.remove_disk(id, force, source)) {
            return removed;
        }
        if let Some(device) = self.devices().iter().find(|device| device.id() == id) {
            let interface = device.describe().interface;
            return Err(ChangeError::Failed(format!("{id:?}: it is of {interface}, which does not remove it here")));
        }
        Err(ChangeError::Setting(self.no_such("id", id)))
    }

    /// Stops retrying a disk that is out.
    fn give_up_disk(&self, disk: &OutDisk, source: ChangeSource) {
        self.out.remove(&disk.id);
        self.kept.forget(&disk.id);
        if source == ChangeSource::RunTime {
            self.interfaces().iter().for_each(|interface| interface.give_up(disk));
        }
        tracing::info!(disk = disk.id, "disk removed, which was out");
    }

    /// Adds the controller of `settings`, without LUNs. Returns its id.
    ///
    /// # Errors
    /// If a value is invalid, or it cannot be served.
    pub fn add_controller(&self, settings: &Settings, source: ChangeSource) -> Result<String, ChangeError> {
        let is_taken = |id: &str| self.has_id(id);
        let added =
            self.interfaces().iter().find_map(|interface| interface.add_controller(settings, &is_taken, source));
        added.unwrap_or_else(|| Err(ChangeError::Failed("no interface has controllers".to_owned())))
    }

    /// Removes the controller of this id with its LUNs, with `force` also while a guest is connected.
    ///
    /// # Errors
    /// If no controller has this id, a guest is connected, or storage cannot be flushed.
    pub fn remove_controller(&self, id: &str, force: bool, source: ChangeSource) -> Result<(), ChangeError> {
        let removed = self.interfaces().iter().find_map(|interface| interface.remove_controller(id, force, source));
        removed.unwrap_or_else(|| Err(self.no_such_controller("id", id).into()))
    }

    /// Returns true if a device, disk or LUN has this id.
    fn has_id(&self, id: &str) -> bool {
        self.interfaces().iter().any(|interface| interface.has_id(id))
    }

    /// Returns the error that no disk or LUN has this id.
    pub(crate) fn no_such(&self, key: &str, id: &str) -> SettingError {
        let exports = self.exports();
        let ids: Vec<_> = exports.iter().map(|export| export.id.as_str()).collect();
        let expected = match ids.len() {
            0 => "the id of a disk or LUN, of which there is none".to_owned(),
            1..=LISTED => format!("one of {}", ids.join(", ")),
            many => format!("the id of one of the {many} disks and LUNs that disks and lun.list list"),
        };
        Settings::new("disk").error(key, format!("{id:?}"), expected)
    }

    /// Logs the number of requests that failed since the last such line, for each disk for which that is due; with
    /// `all` for all disks. Returns true if there is more to log later.
    pub fn log_failures(&self, all: bool) -> bool {
        let healths = self.exports().into_iter().filter_map(|export| export.health);
        // No short circuit: each logs its own.
        healths.map(|health| health.log_failures(all)).fold(false, |any, one| any | one)
    }

    /// Returns the disks to flush when the daemon stops, each with its name for messages.
    pub fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        self.interfaces().iter().flat_map(|interface| interface.flush_targets()).collect()
    }

    /// Returns the statistics of the workers and of each device at one moment.
    ///
    /// # Errors
    /// If a worker has ended, or queues are attached and detached all the time.
    pub fn snapshot(&self, detail: StatDetail) -> Result<(Vec<WorkerStats>, Vec<DeviceStat>), VerbError> {
        for _ in 0..ATTEMPTS {
            let workers = self.engine.stats().map_err(|gone| VerbError::Failed(gone.to_string()))?;
            let stats: Option<Vec<_>> = self.devices().iter().map(|device| device.stat(&workers, detail)).collect();
            if let Some(stats) = stats {
                return Ok((workers, stats));
            }
            std::thread::sleep(PAUSE);
        }
        Err(VerbError::Failed("queues are attached and detached all the time; try again".to_owned()))
    }
}
