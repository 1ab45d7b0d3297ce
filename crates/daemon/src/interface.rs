//! The traits between the daemon and the guest interfaces.
//!
//! An interface has four stages. [`GuestInterface`] is a row of the table of interfaces and lists its keys.
//! [`InterfaceKeys`] takes these keys from the configuration. [`ConfiguredInterface`] has all defaults filled in and
//! its storage open. [`ServedInterface`] is served to guests, with a [`ServedDevice`] for each device. The rest of the
//! daemon knows no interface by name.

use std::error::Error;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mqblk_admin::Verb;
use mqblk_admin::model::{ControllerStat, DiskStat};
use mqblk_core::lock::RankedMutex;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::{Geometry, Resize};
use mqblk_engine::{
    AnyDisk, DiskHealth, Engine, PlugOptions, QueueId, QueueMove, QueuePlacement, QueuePolicy, QueueSettings,
    WorkerStats,
};
use mqblk_vhost_user_server::{Frontend, Server};

use crate::change::{ChangeError, ChangeSource};
use crate::config_error::ConfigError;
use crate::contract::{Contracts, KeptContracts};
use crate::cpus::Cpus;
use crate::file_use::FileUse;
use crate::key_values::RawTable;
use crate::names::UniqueNames;
use crate::out::{Admission, OutDisk, OutDisks};
use crate::pair::{Pair, Section};
use crate::queues::QueueMap;
use crate::resize::ResizeOutcome;
use crate::saved_changes::KeptChanges;
use crate::sockets::PlannedSocket;
use crate::state_file::{SavedState, StateFile};
use crate::storage_backends::StorageBackends;

/// The interface of a disk.
pub static INTERFACE: Key =
    Key::text("interface", "WORD", "`virtio-blk`, `virtio-scsi`, `xen`").default("virtio-blk").about(
        "guest interface: virtio-blk; virtio-scsi (a controller with this LUN, with the keys of both); or xen",
        "Keys of [controllers](#a-controller), of [LUNs](#a-lun), of [Xen disks](xen.md).",
    );

/// The error of a change of queues that this interface does not support.
pub const FIXED_QUEUES: &str = "queues of this interface are served as they were set up";

/// The error of an interface's start.
pub type StartFailure = Box<dyn Error + Send + Sync>;

/// A guest interface: a way of guests to disks.
pub trait GuestInterface: Sync {
    /// Returns its word: the value of the key `interface`. Unique.
    fn word(&self) -> &'static str;

    /// Returns the top-level keys that it owns. Each is also an option of the command line.
    fn process_keys(&self) -> &'static [&'static Key] {
        &[]
    }

    /// Returns the one of its top-level keys that suffices to run a daemon without any disk.
    fn serving_key(&self) -> Option<&'static Key> {
        None
    }

    /// Returns the keys of its disks, besides the common ones.
    fn disk_keys(&self) -> &'static [&'static [&'static Key]] {
        &[]
    }

    /// Returns the tables that it owns, besides `[[disk]]`. Each is also an option of the command line.
    fn tables(&self) -> &'static [ConfigTable] {
        &[]
    }

    /// Returns the keys of each of its tables with its identity filled in: `id`, and for an inner table also the id of
    /// the outer one, under the outer table's name. A configuration that is read again is compared by these.
    ///
    /// # Errors
    /// If one has no valid id.
    fn identify(&self, tables: &[RawTable]) -> Result<Vec<Settings>, SettingError> {
        Ok(tables.iter().map(|table| table.settings.clone()).collect())
    }

    /// Starts to take the keys of a configuration.
    fn keys(&self) -> Box<dyn InterfaceKeys>;
}

/// An array of tables of the configuration, and option of the command line.
#[derive(Clone, Copy, Debug)]
pub struct ConfigTable {
    /// The name; the option is `--NAME`.
    pub name: &'static str,
    /// The placeholder of the option's value.
    pub value_name: &'static str,
    /// The help text of the option.
    pub about: &'static str,
    /// Its keys.
    pub keys: &'static [&'static [&'static Key]],
    /// True if a table describes a storage: it has the keys of the storage's backend too.
    pub has_storage: bool,
    /// The tables inside each of its tables.
    pub inner: &'static [ConfigTable],
}

/// The context that keys are checked against.
pub struct ResolveContext<'a> {
    /// The CPUs of the host.
    pub cpus: &'a Cpus,
    /// The names of the storage backends.
    pub kinds: &'a [&'static str],
    /// The unique values that are already claimed.
    pub names: &'a mut UniqueNames,
    /// The saved changes at run time; `None`: they are not saved.
    pub saved: Option<&'a SavedState>,
    /// The devices as guests were given them.
    pub given: &'a Contracts,
}

/// The position of a device in lists: reports and printed configurations sort by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ListPosition {
    /// A disk of the configuration, by number.
    Disk(usize),
    /// A disk that is not in the configuration.
    Added(usize),
    /// A controller, by number.
    Controller(usize),
}

/// The keys of a `[[disk]]` table.
pub struct DiskTable {
    /// Its keys, without `interface`.
    pub settings: Settings,
    /// Its name in errors, until it has an id.
    pub owner: String,
    /// Its position.
    pub position: ListPosition,
}

/// The keys of one interface, while a configuration is resolved. The methods are called in this order.
pub trait InterfaceKeys {
    /// Takes its own tables.
    ///
    /// # Errors
    /// Returns the first invalid value.
    fn take_tables(&mut self, _tables: Vec<RawTable>, _context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        Ok(())
    }

    /// Takes the keys of a disk, except those of its storage backend.
    ///
    /// # Errors
    /// Returns the first invalid value.
    fn take_disk(&mut self, disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<(), SettingError>;

    /// Takes its top-level keys, after all tables and disks.
    ///
    /// # Errors
    /// Returns the first invalid value.
    fn take_process(&mut self, _process: &mut Settings, _context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        Ok(())
    }

    /// Returns the expected number of queues of disks outside the configuration.
    fn expected_queues(&self, _cpus: &Cpus) -> u64 {
        0
    }

    /// Returns the queues of each device.
    fn queues(&mut self) -> Vec<UnassignedQueues<'_>>;

    /// Returns the sockets that VMMs of guests will connect to.
    fn sockets(&self) -> Vec<PlannedSocket> {
        Vec::new()
    }

    /// Opens the storage. Reports disks that cannot be served now to `admission`, which decides about serving the
    /// others.
    ///
    /// # Errors
    /// If a key is unknown or wrong, or a disk cannot be served and all must be.
    fn open(
        self: Box<Self>,
        storages: &dyn StorageBackends,
        admission: &mut Admission,
    ) -> Result<ConfiguredInterface, ConfigError>;
}

/// The request queues of a device, before they are assigned to workers.
pub struct UnassignedQueues<'a> {
    /// The device's position.
    pub position: ListPosition,
    /// Their number.
    pub count: u16,
    /// Their workers, once they are assigned.
    pub map: &'a mut QueueMap,
    /// The device's keys, which errors name.
    pub settings: &'a Settings,
    /// True if the device is not of the configuration.
    pub is_added: bool,
}

impl UnassignedQueues<'_> {
    /// Assigns them to workers.
    ///
    /// # Errors
    /// If the queue map is invalid.
    pub fn assign(&mut self, placement: &mut QueuePlacement) -> Result<(), SettingError> {
        self.map.assign(self.settings, self.count, placement)
    }
}

/// A check that creates nothing.
pub type Check = Box<dyn Fn() -> Result<(), ConfigError> + Send>;

/// The start of an interface. Everything is undone when it fails.
pub type Start = Box<dyn FnOnce(&HostContext) -> Result<Arc<dyn ServedInterface>, StartFailure> + Send>;

/// An interface with all defaults filled in, and its storage open.
pub struct ConfiguredInterface {
    /// Its top-level keys with their values.
    pub process_pairs: Vec<Pair>,
    /// Its disks and tables with their keys and values.
    pub sections: Vec<(ListPosition, Vec<Section>)>,
    /// The ids of its disks and controllers, each with the noun for messages.
    pub ids: Vec<(&'static str, String)>,
    /// The number of its request queues.
    pub queues: usize,
    /// True if it will serve disks outside the configuration.
    pub expects_more: bool,
    /// The files that it opens by path while it serves. The sandbox allows no others.
    pub files: Vec<FileUse>,
    /// Checks as far as possible that it can be started.
    pub check: Check,
    /// Starts to serve.
    pub start: Start,
}

impl ConfiguredInterface {
    /// Returns an interface without disks.
    pub fn new(
        start: impl FnOnce(&HostContext) -> Result<Arc<dyn ServedInterface>, StartFailure> + Send + 'static,
    ) -> ConfiguredInterface {
        ConfiguredInterface {
            process_pairs: Vec::new(),
            sections: Vec::new(),
            ids: Vec::new(),
            queues: 0,
            expects_more: false,
            files: Vec::new(),
            check: Box::new(|| Ok(())),
            start: Box::new(start),
        }
    }
}

/// The context in which an interface serves.
#[derive(Clone)]
pub struct HostContext {
    /// The workers.
    pub engine: Arc<Engine>,
    /// Longest wait of a stop for storage.
    pub drain_timeout: Duration,
    /// The ids and sockets of all disks and controllers.
    pub names: Arc<RankedMutex<UniqueNames>>,
    /// The workers of their queues.
    pub placement: Arc<RankedMutex<QueuePlacement>>,
    /// The state file with changes at run time, for the next daemon; `None`: there is none.
    pub state: Option<Arc<StateFile>>,
    /// Saved changes of settings. The interface forgets those of devices that it adds or removes.
    pub kept: Arc<KeptChanges>,
    /// The record of what guests are given, for the next daemon.
    pub contracts: Arc<KeptContracts>,
    /// The storage backends, for disks that are added.
    pub storages: Arc<dyn StorageBackends>,
    /// The disks that are out.
    pub out: Arc<OutDisks>,
    /// True until the previous process has handed over: devices that VMMs connect to stand by.
    pub stands_by: Arc<AtomicBool>,
}

/// Returns true if a device, disk or LUN of any interface has this id.
pub type IsTaken<'a> = &'a dyn Fn(&str) -> bool;

/// An interface that is served.
pub trait ServedInterface: Send + Sync {
    /// Returns its devices, each with its position: those of the configuration, and those that guests have now.
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)>;

    /// Returns true if `settings` has a key that only disks of this interface have: it adds the disk then. Disks of
    /// other interfaces are added by the key `interface`.
    fn adds(&self, _settings: &Settings) -> bool {
        false
    }

    /// Returns a number that changes if a device, disk or LUN is added or removed, or a guest connects or disconnects.
    /// `None`: not counted, so the devices must be queried.
    fn changes(&self) -> Option<u64> {
        self.devices().is_empty().then_some(0)
    }

    /// Returns true if a device, disk or LUN of this interface has this id.
    fn has_id(&self, id: &str) -> bool {
        let has =
            |device: &Arc<dyn ServedDevice>| device.id() == id || device.exports().iter().any(|export| export.id == id);
        self.devices().iter().any(|(_, device)| has(device))
    }

    /// Adds the disk of `settings` while it serves, like a table of the configuration.
    ///
    /// # Errors
    /// If a value is invalid or already claimed, the storage cannot be opened, or disks of this interface are added in
    /// another way.
    fn add_disk(
        &self,
        settings: Settings,
        _is_taken: IsTaken<'_>,
        _source: ChangeSource,
    ) -> Result<String, ChangeError> {
        let expected =
            "one whose disks are added here; those of others are configured, or attached by the guest's tools";
        Err(ChangeError::Setting(settings.error("interface", "an interface that adds none", expected)))
    }

    /// Removes the disk or LUN of this id: takes it from its guest, waits for its requests in flight, flushes and
    /// closes its storage. `force`: also while a guest is connected. `None`: it has no such disk or LUN.
    fn remove_disk(&self, _id: &str, _force: bool, _source: ChangeSource) -> Option<Result<(), ChangeError>> {
        None
    }

    /// Records that the next daemon does not serve this disk or LUN, which is out, if it belongs to this interface.
    fn give_up(&self, _disk: &OutDisk) {}

    /// Adds the controller of `settings`, like a table of the configuration, without LUNs. `None`: the interface has no
    /// controllers.
    fn add_controller(
        &self,
        _settings: &Settings,
        _is_taken: IsTaken<'_>,
        _source: ChangeSource,
    ) -> Option<Result<String, ChangeError>> {
        None
    }

    /// Removes the controller of this id with its LUNs, in the way of [`remove_disk`](Self::remove_disk). `None`: it
    /// has no such controller.
    fn remove_controller(&self, _id: &str, _force: bool, _source: ChangeSource) -> Option<Result<(), ChangeError>> {
        None
    }

    /// Returns its own verbs of the admin socket.
    fn verbs(self: Arc<Self>) -> Vec<Verb> {
        Vec::new()
    }

    /// Offers its devices to guests, as the last step of the start.
    ///
    /// # Errors
    /// If the host refuses. Withdraws the devices then.
    fn publish(&self) -> Result<(), StartFailure> {
        Ok(())
    }

    /// Starts to drain its queues, as the first step of a stop. Changes at run time have ended.
    fn begin_stop(&self);

    /// Waits until its queues are drained, until `deadline` at most, and stops serving. Logs the reason for the wait.
    fn stop(&self, deadline: Instant);

    /// Prepares to leave the devices without a [server](ServedDevice::server) to another process, as the last step of a
    /// takeover: they do not change from now on. Drains devices with requests in flight that the other process could
    /// not know, until `end` or until `is_over` is true at most. The others are served meanwhile.
    ///
    /// # Errors
    /// Names the devices that have not drained. [`serve_on`](Self::serve_on) follows then.
    fn prepare_leave(&self, _end: Instant, _is_over: &dyn Fn() -> bool) -> Result<(), String> {
        Ok(())
    }

    /// Leaves these devices to the other process, which serves each once it has nothing in flight here. Does not wait.
    fn leave(&self) {}

    /// Waits until these devices are left, until `is_over` is true at most. Returns those that are not.
    fn wait_left(&self, _is_over: &dyn Fn() -> bool) -> Vec<String> {
        Vec::new()
    }

    /// Continues to serve these devices: the other process has given up.
    fn serve_on(&self) {}

    /// Returns the disks to flush at the end, each with its name for messages.
    fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)>;
}

/// A served device: a disk, or a controller with its LUNs.
pub trait ServedDevice: Send + Sync {
    /// Returns its description for the verb `disks`.
    fn describe(&self) -> DeviceDescription;

    /// Returns its statistics, from those of the workers. `None` if a queue was attached or detached meanwhile.
    fn stat(&self, workers: &[WorkerStats], detail: StatDetail) -> Option<DeviceStat>;

    /// Returns the storage that guests reach through it.
    fn exports(&self) -> Vec<Export>;

    /// Resizes the storage of the [export](Self::exports) `id` and notifies the guests.
    ///
    /// # Errors
    /// If the storage cannot have that size.
    fn resize(&self, id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError>;

    /// Returns its id.
    fn id(&self) -> String {
        self.describe().id
    }

    /// Returns the connected frontend. `None`: there is none, or frontends of its interface do not connect.
    fn frontend(&self) -> Option<Frontend> {
        None
    }

    /// Returns true if a guest is connected to it.
    fn is_connected(&self) -> bool;

    /// Returns the server that VMMs connect to. Another process can take it over with its connections. `None` if its
    /// interface has none.
    fn server(&self) -> Option<Arc<Server>> {
        None
    }

    /// Returns the settings of its request queues; `None`: they cannot be changed.
    fn queue_settings(&self) -> Option<QueueSettings> {
        None
    }

    /// Changes the polling of its request queues and the coalescing of their calls, while its guest uses them.
    ///
    /// # Errors
    /// If that cannot be changed, or a worker does not respond.
    fn set_policy(&self, _policy: QueuePolicy) -> Result<(), String> {
        Err(FIXED_QUEUES.to_owned())
    }

    /// Moves one of its request queues to another worker while its guest uses it, unless its requests in flight take
    /// longer than `timeout`. The queue stays on that worker when it is set up again.
    ///
    /// # Errors
    /// If queues of this interface cannot move, or the worker refuses the queue.
    fn move_queue(&self, _queue: u16, _worker: usize, _timeout: Duration) -> Result<QueueMove, String> {
        Err(FIXED_QUEUES.to_owned())
    }

    /// Returns the request queues that its guest uses now, each by its number. Empty if its queues cannot move.
    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        Vec::new()
    }
}

/// Storage that guests reach under an id, at the time of the listing: a disk or a LUN.
#[derive(Clone)]
pub struct Export {
    /// Its id.
    pub id: String,
    /// The storage backend, if it differs from the device's.
    pub storage: Option<String>,
    /// The health of its storage; `None` while the storage is being opened.
    pub health: Option<Arc<DiskHealth>>,
    /// The configured plugging of its requests.
    pub configured_plug: PlugOptions,
    /// Its storage, which a listing does not keep open. `None` while it is not open.
    pub disk: Option<Weak<AnyDisk>>,
    /// True if the size of its storage is watched.
    pub is_watched: bool,
}

impl Export {
    fn open_disk(&self) -> Option<Arc<AnyDisk>> {
        self.disk.as_ref().and_then(Weak::upgrade)
    }

    /// Returns the present plugging of its requests; `None` while the storage is being opened.
    pub fn plug(&self) -> Option<PlugOptions> {
        self.health.as_ref().map(|health| health.plug().unwrap_or(self.configured_plug))
    }

    /// Returns true if its storage can be open on one worker only.
    pub fn has_one_channel(&self) -> bool {
        self.open_disk().is_some_and(|disk| disk.max_channels() == Some(1))
    }

    /// Returns the geometry of the disk; `None` while its storage is not open.
    pub fn geometry(&self) -> Option<Geometry> {
        self.open_disk().map(|disk| disk.geometry())
    }

    /// Returns the disk, if the size of its storage is watched.
    pub fn watched(&self) -> Option<Arc<AnyDisk>> {
        self.open_disk().filter(|_| self.is_watched)
    }
}

/// A device, as the verb `disks` reports it.
#[derive(Clone, Debug)]
pub struct DeviceDescription {
    /// Its id.
    pub id: String,
    /// Its interface.
    pub interface: &'static str,
    /// Its storage backend; `None` for a controller.
    pub storage: Option<String>,
    /// Its settings, without id, interface and storage.
    pub settings: Vec<Pair>,
}

/// The level of detail of statistics.
#[derive(Clone, Copy, Debug)]
pub struct StatDetail {
    /// True to include each queue.
    pub queues: bool,
    /// True to include the buckets of latency histograms.
    pub latency: bool,
}

/// The statistics of a device.
#[derive(Clone, Debug)]
pub enum DeviceStat {
    /// Of a disk.
    Disk(Box<DiskStat>),
    /// Of a controller.
    Controller(Box<ControllerStat>),
}

impl DeviceStat {
    /// Returns the device's id.
    pub fn id(&self) -> &str {
        match self {
            DeviceStat::Disk(disk) => &disk.id,
            DeviceStat::Controller(controller) => &controller.id,
        }
    }
}

/// The guest interfaces of a program, in the order of messages. The first is the default.
#[derive(Clone, Copy)]
pub struct Interfaces(pub &'static [&'static dyn GuestInterface]);

impl fmt::Debug for Interfaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.words()).finish()
    }
}

impl Interfaces {
    /// Returns the words of all interfaces.
    pub fn words(&self) -> Vec<&'static str> {
        self.0.iter().map(|interface| interface.word()).collect()
    }

    /// Takes `interface` from a disk's keys. Returns the index in the table.
    ///
    /// # Errors
    /// If it is not the word of an interface.
    pub fn take(&self, settings: &mut Settings) -> Result<usize, SettingError> {
        let Some(text) = settings.text(&INTERFACE) else { return Ok(0) };
        let words = self.words();
        let found = words.iter().position(|word| *word == text);
        found.ok_or_else(|| settings.error(&INTERFACE, format!("{text:?}"), format!("one of {}", words.join(", "))))
    }

    /// Returns the top-level keys that suffice to run a daemon without any disk.
    pub fn serving_keys(&self) -> impl Iterator<Item = &'static Key> {
        self.0.iter().filter_map(|interface| interface.serving_key())
    }

    /// Returns the outermost tables of all interfaces, each with the index of its interface.
    pub fn tables(&self) -> impl Iterator<Item = (usize, &'static ConfigTable)> {
        self.0
            .iter()
            .enumerate()
            .flat_map(|(index, interface)| interface.tables().iter().map(move |table| (index, table)))
    }
}
