//! One device: executes the transitions that `state_machine` decides, on a thread per device.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mqblk_blkif::{GrantBudget, Vbd, VbdOptions};
use mqblk_core::GuestObserver;
use mqblk_core::thread_role::spawn_connector;
use mqblk_engine::{Engine, QueueFault};
use mqblk_memory::DomainId;
use mqblk_xen::Xen;
use mqblk_xen::store::{Transaction, Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys, parse_number_or};

use crate::connection::{RingConnector, RingFaultHandler};
use crate::device_stats::{DetachResult, DeviceStats};
use crate::frontend::{FrontendConfig, FrontendConfigError, RingLimits};
use crate::journal_dir::JournalDir;
use crate::leave_state::LeaveState;
use crate::name::DeviceName;
use crate::observe::{is_abandoned, read_online};
use crate::offer::{FeatureOffer, KeyValue};
use crate::open_disk::OpenDisk;
use crate::ownership::{DeviceOwnership, Wait};
use crate::params::Params;
use crate::registry::DeviceRegistry;
use crate::state_machine::{DevicePhase, Effect, FAILED, GONE, Transition};
use crate::storage::{ActivationError, DiskBacking, Opener};
use crate::succession::is_succeeded;

/// State that all devices of a backend share.
pub(crate) struct BackendShared {
    pub(crate) xen: Arc<dyn Xen>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) opener: Arc<dyn Opener>,
    pub(crate) budget: Arc<GrantBudget>,
    pub(crate) journal_dir: Option<JournalDir>,
    pub(crate) registry: DeviceRegistry,
    /// Number of device checks, over all devices.
    pub(crate) device_checks: AtomicU64,
    /// True if the opener may accept devices that it has not accepted before.
    pub(crate) is_scan_due: AtomicBool,
    /// Longest wait of a stop for storage, once for requests in flight and once for flushes.
    pub(crate) drain_timeout: Duration,
    /// Time at which a stop ends its wait for requests in flight; empty before a stop.
    pub(crate) stop_deadline: OnceLock<Instant>,
    /// The watcher's mode and progress.
    pub(crate) leaving: LeaveState,
}

impl BackendShared {
    /// Returns when a stop ends its wait for flushes, and so all its waits for storage. One that has not begun begins
    /// now.
    pub(crate) fn stop_end(&self) -> Instant {
        self.drain_end().unwrap_or_else(Instant::now) + self.drain_timeout
    }

    /// Returns when a stop ends its wait for requests in flight; `None` before a stop.
    pub(crate) fn drain_end(&self) -> Option<Instant> {
        self.stop_deadline.get().copied()
    }
}

/// Error of an effect.
#[derive(Debug)]
pub(crate) enum EffectError {
    /// The device's directory is gone.
    Gone,
    /// Another user has the disk: tried again later. The reason, for users.
    InUse(String),
    /// An error: its errno, and the text for users.
    Failed(u16, String),
}

impl From<XenstoreError> for EffectError {
    fn from(error: XenstoreError) -> EffectError {
        EffectError::Failed(5, error.to_string())
    }
}

impl From<FrontendConfigError> for EffectError {
    fn from(error: FrontendConfigError) -> EffectError {
        EffectError::Failed(error.errno(), error.to_string())
    }
}

/// Errno values, with which the text of an `error` node starts.
pub(crate) const EINVAL: u16 = 22;
const EBUSY: u16 = 16;
const ENODEV: u16 = 19;

/// A time from now that never passes.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// One device.
pub(crate) struct Device {
    pub(crate) name: DeviceName,
    /// Directories in xenstore.
    pub(crate) backend_path: String,
    pub(crate) frontend_path: String,
    error_path: String,
    pub(crate) open_disk: Option<OpenDisk>,
    /// Held while the device has rings or open storage, and during actions on it.
    lock: DeviceOwnership,
    /// A wait for another user of the disk.
    disk_wait: Wait,
    /// Statistics of the last open disk, which is usually the next one too.
    last_stats: Option<Arc<DeviceStats>>,
    /// Features offered to the connected frontend.
    last_offer: Option<FeatureOffer>,
    /// The last value of `params`.
    params: Option<String>,
    /// True if this process has written a state since it discovered the directory.
    state_written: bool,
    /// True if a guest was connected, and has not left.
    has_guest: bool,
}

/// The end of a device's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskEnd {
    /// The device is in this phase.
    Phase(DevicePhase),
    /// The device is dropped.
    Dropped,
    /// The device is in the same phase: another process has its lock, or another user its disk.
    Waits,
}

/// Result of a device's thread. `device` is `None` if it has panicked.
pub(crate) struct TaskResult {
    pub(crate) key: (DomainId, u32),
    pub(crate) end: TaskEnd,
    pub(crate) device: Option<Device>,
}

impl From<Option<DevicePhase>> for TaskEnd {
    fn from(phase: Option<DevicePhase>) -> TaskEnd {
        phase.map_or(TaskEnd::Dropped, TaskEnd::Phase)
    }
}

/// A task of a device's thread.
#[derive(Clone, Debug)]
pub(crate) enum DeviceTask {
    /// Execute a transition of the state machine.
    Transition(Transition),
    /// Resize the disk.
    Resize(String),
    /// Detach the rings and close the disk because the process ends. Xenstore and journals stay for the next process.
    Stop,
    /// Leave the device to another process, which has the same storage open: as [`Stop`](Self::Stop), without a limit
    /// of the time and without a flush.
    Leave,
}

impl Device {
    /// `params`: the value of this key when the device was discovered.
    pub(crate) fn new(shared: &BackendShared, name: DeviceName, frontend_path: String, params: String) -> Device {
        let own = shared.xen.domain();
        let backend_path = vbd::backend_path(own, &name.type_name, name.frontend_id, name.devid);
        let error_path = vbd::backend_error_path(own, &name.type_name, name.frontend_id, name.devid);
        Device {
            name,
            backend_path,
            frontend_path,
            error_path,
            open_disk: None,
            lock: DeviceOwnership::default(),
            disk_wait: Wait::None,
            last_stats: None,
            last_offer: None,
            params: Some(params),
            state_written: false,
            has_guest: false,
        }
    }

    /// Returns the device's statistics, if its disk is open.
    pub(crate) fn stats(&self) -> Option<&Arc<DeviceStats>> {
        self.open_disk.as_ref().map(|opened| &opened.stats)
    }

    /// Returns the statistics for a disk: those of the previous disk if it is the same, else new ones.
    fn stats_for(&mut self, shared: &BackendShared, backing: &DiskBacking) -> Arc<DeviceStats> {
        let queues = usize::from(backing.settings.ring_limits.queues);
        if let Some(stats) = &self.last_stats
            && (stats.id == backing.id && stats.rings_offered() == queues)
        {
            return Arc::clone(stats);
        }
        self.unregister_stats(shared);
        shared.registry.assign_rings(&backing.queues, queues, shared.engine.workers());
        let (id, storage) = (backing.id.clone(), backing.storage.clone());
        let stats = Arc::new(DeviceStats::new(
            self.name.clone(),
            id,
            storage,
            backing.plug,
            Arc::clone(&backing.health),
            Arc::clone(&backing.queues),
        ));
        shared.registry.add(&stats);
        Arc::clone(self.last_stats.insert(stats))
    }

    fn unregister_stats(&mut self, shared: &BackendShared) {
        if let Some(stats) = self.last_stats.take() {
            shared.registry.remove(&stats);
        }
    }

    /// Returns true if its storage is open.
    pub(crate) fn has_storage(&self) -> bool {
        self.open_disk.is_some()
    }

    /// Returns true if the next process finds its requests in flight in journals, and knows by its lock when they have
    /// ended.
    pub(crate) fn is_journaled(&self, shared: &BackendShared) -> bool {
        let journals = |opened: &OpenDisk| opened.backing.settings.journal;
        shared.journal_dir.is_some() && self.open_disk.as_ref().is_none_or(journals)
    }

    /// Runs a task.
    pub(crate) fn run_task(&mut self, shared: &BackendShared, phase: DevicePhase, task: &DeviceTask) -> TaskEnd {
        match task {
            DeviceTask::Transition(_) if !self.lock.acquire(shared.journal_dir.as_ref(), &self.name) => TaskEnd::Waits,
            DeviceTask::Transition(transition) => {
                let end = self.execute(shared, phase, *transition);
                if !self.has_storage() {
                    self.lock.end();
                }
                end
            }
            DeviceTask::Resize(size) => {
                let resized = self.store(shared).and_then(|mut store| self.handle_resize_key(&mut store, phase, size));
                if let Err(EffectError::Failed(_, why)) = resized {
                    tracing::warn!(device = %self.name, "resize: {why}");
                }
                TaskEnd::Phase(phase)
            }
            DeviceTask::Stop => {
                self.detach_rings(shared, None);
                self.close_storage(true);
                self.lock.pass_on();
                TaskEnd::Phase(phase)
            }
            DeviceTask::Leave => {
                self.leave_rings(shared);
                // Its image may belong to another process from here on. Closing it may still wait for storage.
                self.lock.pass_on();
                self.close_storage(false);
                self.state_written = false;
                TaskEnd::Phase(DevicePhase::Discovered)
            }
        }
    }

    /// Makes the workers stop its rings without waiting for storage, and closes nothing: for a process that ends and
    /// has no thread for the device.
    pub(crate) fn abandon(mut self, shared: &BackendShared) {
        let is_journaled = self.is_journaled(shared);
        if let Some(opened) = self.open_disk.take() {
            opened.stats.detach_rings(&|| Some(Instant::now()), is_journaled);
            // Closing it may wait for storage.
            std::mem::forget(opened);
        }
    }

    fn store(&self, shared: &BackendShared) -> Result<Xenstore, EffectError> {
        shared.xen.store().map_err(|error| EffectError::Failed(5, error.to_string()))
    }

    fn execute(&mut self, shared: &BackendShared, phase: DevicePhase, transition: Transition) -> TaskEnd {
        let mut store = None;
        for effect in transition.effects {
            match self.execute_effect(shared, &mut store, *effect) {
                Ok(()) => {}
                Err(EffectError::Gone) => return self.clean_up(shared, &mut store, GONE).into(),
                Err(EffectError::InUse(why)) => {
                    if self.disk_wait.goes_on() {
                        self.write_error(store.as_mut(), EBUSY, &why);
                    }
                    if !phase.has_storage() {
                        self.close_storage(false);
                    }
                    return TaskEnd::Waits;
                }
                Err(EffectError::Failed(errno, why)) => {
                    self.write_error(store.as_mut(), errno, &why);
                    return self.clean_up(shared, &mut store, FAILED).into();
                }
            }
        }
        self.disk_wait.end();
        if transition.next_phase == Some(DevicePhase::Discovered) {
            self.state_written = false;
        }
        match transition.next_phase {
            Some(phase) => tracing::debug!(device = %self.name, ?phase, "transition"),
            None => {
                self.unregister_stats(shared);
                tracing::info!(device = %self.name, "dropped");
            }
        }
        transition.next_phase.into()
    }

    /// Executes a transition after a failure. Further errors are only logged.
    fn clean_up(
        &mut self,
        shared: &BackendShared,
        store: &mut Option<Xenstore>,
        transition: Transition,
    ) -> Option<DevicePhase> {
        let mut next_phase = transition.next_phase;
        for effect in transition.effects {
            match self.execute_effect(shared, store, *effect) {
                Ok(()) => {}
                Err(EffectError::Gone) => next_phase = None,
                Err(EffectError::InUse(why) | EffectError::Failed(_, why)) => {
                    tracing::warn!(device = %self.name, ?effect, "{why}");
                }
            }
        }
        if next_phase.is_none() {
            self.unregister_stats(shared);
        }
        next_phase
    }

    fn execute_effect(
        &mut self,
        shared: &BackendShared,
        store: &mut Option<Xenstore>,
        effect: Effect,
    ) -> Result<(), EffectError> {
        match effect {
            Effect::DetachRings => {
                self.detach_rings(shared, shared.journal_dir.as_ref());
                // Another device may have the disk, and a guest.
                if let Some(guests) = self.guests().filter(|_| self.has_guest) {
                    guests.left();
                }
                self.has_guest = false;
                return Ok(());
            }
            Effect::CloseStorage => {
                self.close_storage(true);
                return Ok(());
            }
            _ => {}
        }
        let store = match store {
            Some(store) => store,
            None => store.insert(self.store(shared)?),
        };
        match effect {
            Effect::OpenStorage => self.open_storage(shared, store),
            Effect::WriteOffer => {
                let offer = self.open_disk()?.offer();
                self.last_offer = Some(offer);
                self.write_state(store, XenbusState::InitWait, &offer.init_wait_keys())
            }
            Effect::Connect { resume } => self.connect(shared, store, resume),
            Effect::WriteDescription => {
                let (opened, offer) = (self.open_disk()?, self.current_offer());
                let pairs = offer.connected_keys(&opened.description());
                self.write_state(store, XenbusState::Connected, &pairs)?;
                store.remove(&self.error_path)?;
                tracing::info!(device = %self.name, "connected");
                Ok(())
            }
            Effect::WriteState(state) => self.write_state(store, state, &[]),
            Effect::RemoveDirectories => self.remove_directories(store),
            Effect::DetachRings | Effect::CloseStorage => Ok(()),
        }
    }

    pub(crate) fn open_disk(&self) -> Result<&OpenDisk, EffectError> {
        self.open_disk.as_ref().ok_or_else(|| EffectError::Failed(ENODEV, "its disk is not open".to_owned()))
    }

    fn current_offer(&self) -> FeatureOffer {
        let new_offer = || self.open_disk.as_ref().map(OpenDisk::offer);
        self.last_offer.or_else(new_offer).unwrap_or(FeatureOffer {
            ring_limits: RingLimits { queues: 1, ring_page_order: 0 },
            indirect_segments: 0,
            persistent: false,
            flush: false,
            barrier: false,
            discard: false,
        })
    }

    pub(crate) fn key_path(&self, key: &str) -> String {
        format!("{}/{key}", self.backend_path)
    }

    /// Returns true if the directory is the one that was discovered. One that was removed and created again has a
    /// toolstack's state 1.
    fn is_same_device(&self, transaction: &mut Transaction<'_>, state: &str) -> Result<bool, XenstoreError> {
        if XenbusState::parse(Some(state)) != XenbusState::Initialising {
            return Ok(true);
        }
        Ok(!self.state_written && transaction.read(&self.key_path(keys::PARAMS))? == self.params)
    }

    /// Writes keys and a state in one transaction. Does not create a directory that is gone, nor write to one that was
    /// created again, nor overwrite the state of a toolstack that removes the device.
    fn write_state(&mut self, store: &mut Xenstore, state: XenbusState, pairs: &[KeyValue]) -> Result<(), EffectError> {
        let exists = store.transaction(|transaction| {
            let Some(now) = transaction.read(&self.key_path(keys::STATE))? else { return Ok(false) };
            if !self.is_same_device(transaction, &now)? {
                return Ok(false);
            }
            for (key, value) in pairs {
                match value {
                    Some(value) => transaction.write(&self.key_path(key), value)?,
                    None => transaction.remove(&self.key_path(key))?,
                }
            }
            let removal_requested = XenbusState::parse(Some(&now)) == XenbusState::Closing
                && !read_online(|path| transaction.read(path), &self.backend_path)?;
            if !removal_requested || matches!(state, XenbusState::Closing | XenbusState::Closed) {
                transaction.write(&self.key_path(keys::STATE), &state.to_string())?;
            }
            Ok(true)
        })?;
        self.state_written |= exists;
        if exists { Ok(()) } else { Err(EffectError::Gone) }
    }

    /// Removes the directories of a device whose domain is gone.
    fn remove_directories(&self, store: &mut Xenstore) -> Result<(), EffectError> {
        let domain_dir = self.backend_path.rsplit_once('/').map_or("", |(dir, _)| dir);
        store.transaction(|transaction| {
            if !is_abandoned(|path| transaction.read(path), &self.backend_path, self.name.frontend_id)? {
                return Ok(());
            }
            for path in [&self.backend_path, &self.error_path] {
                transaction.remove(path)?;
            }
            if transaction.list(domain_dir)?.is_some_and(|devices| devices.is_empty()) {
                transaction.remove(domain_dir)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Logs an error and writes it to the device's xenstore `error` node, if the device still exists.
    fn write_error(&self, store: Option<&mut Xenstore>, errno: u16, why: &str) {
        tracing::warn!(device = %self.name, "{why}");
        let Some(store) = store else { return };
        let written = store.transaction(|transaction| match transaction.read(&self.key_path(keys::STATE))? {
            Some(now) if self.is_same_device(transaction, &now)? => {
                transaction.write(&self.error_path, &format!("{errno} {why}"))
            }
            _ => Ok(()),
        });
        if let Err(error) = written {
            tracing::warn!(device = %self.name, %error, "cannot write the error node");
        }
    }

    fn open_storage(&mut self, shared: &BackendShared, store: &mut Xenstore) -> Result<(), EffectError> {
        const READ: [&str; 6] =
            [keys::STATE, keys::PARAMS, keys::MODE, keys::DISCARD_ENABLE, keys::DEVICE_TYPE, keys::REMOVABLE];
        // One consistent snapshot: a toolstack may remove keys meanwhile.
        let read = store.transaction(|transaction| {
            let mut values: [Option<String>; READ.len()] = Default::default();
            for (value, key) in values.iter_mut().zip(READ) {
                *value = transaction.read(&self.key_path(key))?;
            }
            Ok(values)
        });
        let [state, params, mode, discard, device_type, removable] = read?;
        if state.is_none() {
            return Err(EffectError::Gone);
        }
        self.params = params.clone();
        let Some(params) = params else {
            return Err(EffectError::Failed(2, "params: found nothing, expected what the disk is".to_owned()));
        };
        let params = Params::parse(&params).map_err(|why| EffectError::Failed(EINVAL, why))?;
        // As in Linux: writable unless `mode` is present without `w`.
        let read_only = mode.is_some_and(|mode| !mode.contains('w'));
        let discard = parse_number_or(keys::DISCARD_ENABLE, discard.as_deref(), 1, 1);
        let discard = discard.map_err(|error| EffectError::Failed(EINVAL, error.to_string()))? == 1;
        let (cdrom, removable) = (device_type.as_deref() == Some("cdrom"), removable.as_deref() == Some("1"));
        let backing = shared.opener.open(&params, &self.name, read_only);
        let backing = backing.map_err(|why| EffectError::Failed(ENODEV, why))?;
        if let Some(other) = backing.disk_use.other_device()
            && !is_succeeded(store, shared.xen.domain(), &other, &self.name)?
        {
            return Err(EffectError::Failed(ENODEV, params.in_use_text(&other)));
        }
        let geometry = backing.disk.geometry();
        let stats = self.stats_for(shared, &backing);
        stats.set_disk(&backing.disk);
        tracing::info!(
            device = %self.name,
            disk = backing.id,
            %params,
            size = %geometry.size,
            read_only = geometry.read_only || read_only,
            queues = stats.rings_offered(),
            "serving"
        );
        self.open_disk = Some(OpenDisk { backing, stats, read_only, discard, cdrom, removable });
        Ok(())
    }

    /// Activates the disk, which another user may not have released yet.
    fn activate_disk(&mut self) -> Result<(), EffectError> {
        let Some(opened) = &mut self.open_disk else { return Ok(()) };
        opened.backing.disk_use.activate().map_err(|error| match error {
            ActivationError::InUse(why) => EffectError::InUse(why),
            ActivationError::Failed(why) => EffectError::Failed(ENODEV, why),
        })?;
        if self.disk_wait.end() {
            tracing::info!(device = %self.name, "no other user has its disk any more");
        }
        Ok(())
    }

    fn close_storage(&mut self, is_flushed: bool) {
        self.last_offer = None;
        let Some(opened) = self.open_disk.take() else { return };
        if is_flushed && let Err(error) = opened.backing.disk.sync() {
            tracing::error!(device = %self.name, %error, "flush");
        }
    }

    /// Detaches the rings. `journals`: directory from which their journals are removed; `None`: the next process
    /// resumes the rings.
    fn detach_rings(&mut self, shared: &BackendShared, journals: Option<&JournalDir>) {
        let Some(opened) = &self.open_disk else { return };
        let resumes = journals.is_none() && self.is_journaled(shared);
        let DetachResult { rings, is_frozen } = opened.stats.detach_rings(&|| shared.drain_end(), resumes);
        if let Some(journals) = journals {
            journals.remove(&self.name, rings);
        }
        self.note_detached(is_frozen);
    }

    /// Detaches the rings for another process. Only a stop ends the wait; requests do not wait for limits.
    fn leave_rings(&mut self, shared: &BackendShared) {
        let Some(opened) = &self.open_disk else { return };
        let never = Instant::now() + NEVER;
        let end = || Some(shared.drain_end().unwrap_or(never));
        let DetachResult { is_frozen, .. } = opened.stats.detach_rings(&end, self.is_journaled(shared));
        self.note_detached(is_frozen);
    }

    /// Records that rings were detached. `is_frozen`: with requests in flight, which only the end of the process ends.
    fn note_detached(&mut self, is_frozen: bool) {
        self.lock.note_detached(is_frozen);
        if let Some(opened) = self.open_disk.as_mut().filter(|_| is_frozen) {
            opened.backing.disk_use.leave_active();
        }
    }

    fn connect(&mut self, shared: &BackendShared, store: &mut Xenstore, resume: bool) -> Result<(), EffectError> {
        self.activate_disk()?;
        let offer = if resume { self.read_previous_offer(store)? } else { self.current_offer() };
        self.last_offer = Some(offer);
        // One consistent snapshot: a frontend may write keys meanwhile.
        let published = store.transaction(|transaction| {
            let mut read = |key: &str| transaction.read(&format!("{}/{key}", self.frontend_path));
            match FrontendConfig::read(&mut read, offer.ring_limits) {
                Err(FrontendConfigError::Store(error)) => Err(error),
                other => Ok(other),
            }
        })??;
        let opened = self.open_disk()?;
        let (description, settings) = (opened.description(), &opened.backing.settings);
        published.check_blocks(description.geometry.logical_block)?;
        let vbd = Vbd::new(VbdOptions {
            geometry: description.geometry,
            limits: description.limits,
            abi: published.abi,
            persistent: published.persistent && offer.persistent,
            max_indirect_segments: offer.indirect_segments,
            discard: offer.discard && description.limits.discard.is_some(),
            discard_secure: false,
            barrier: offer.barrier,
            flush: offer.flush,
            write_through: settings.write_through,
            mode: settings.mode,
            pages_may_be_pinned: shared.xen.pages_may_be_pinned(),
            pool: settings.pool,
            budget: Arc::clone(&shared.budget),
            persistent_max: settings.persistent_max,
            persistent_idle: settings.persistent_idle,
            rings: published.rings.len() as u16,
        });
        let connect = RingConnector {
            xen: &*shared.xen,
            engine: &shared.engine,
            name: &self.name,
            backing: &opened.backing,
            queues: opened.stats.queue_settings(),
            journals: shared.journal_dir.as_ref().filter(|_| settings.journal),
            lock: self.lock.file(),
            stop_deadline: &shared.stop_deadline,
            resume,
            on_fault: self.fault_handler(shared),
        };
        let handles = connect.connect_all(&vbd, &published).map_err(|why| EffectError::Failed(EINVAL, why))?;
        let connected_with = connect.queues.policy;
        tracing::info!(
            device = %self.name,
            rings = handles.len(),
            pages = published.rings.first().map_or(0, |ring| ring.grefs.len()),
            abi = published.abi.protocol(),
            grants = vbd.options().resolved_mode().word(),
            resume,
            "rings"
        );
        opened.stats.set_rings(vbd, handles, connected_with);
        // Before the guest reads the disk's description.
        self.has_guest = true;
        if let Some(guests) = self.guests() {
            guests.arrived();
        }
        Ok(())
    }

    fn guests(&self) -> Option<&Arc<dyn GuestObserver>> {
        self.open_disk.as_ref()?.backing.guests.as_ref()
    }

    /// Reads the features that the earlier process has offered, which the frontend uses.
    fn read_previous_offer(&self, store: &mut Xenstore) -> Result<FeatureOffer, EffectError> {
        let mut number = |key: &str, most: u64, absent: u64| -> Result<u64, EffectError> {
            let value = store.read(&self.key_path(key))?;
            parse_number_or(key, value.as_deref(), most, absent)
                .map_err(|error| EffectError::Failed(EINVAL, error.to_string()))
        };
        let queues = number(keys::MULTI_QUEUE_MAX_QUEUES, u16::MAX.into(), 1)?.max(1) as u16;
        let ring_order = number(keys::MAX_RING_PAGE_ORDER, 4, 0)? as u8;
        Ok(FeatureOffer {
            ring_limits: RingLimits { queues, ring_page_order: ring_order },
            indirect_segments: number(keys::FEATURE_MAX_INDIRECT_SEGMENTS, u16::MAX.into(), 0)? as u16,
            persistent: number(keys::FEATURE_PERSISTENT, 1, 0)? == 1,
            flush: number(keys::FEATURE_FLUSH_CACHE, 1, 0)? == 1,
            barrier: number(keys::FEATURE_BARRIER, 1, 0)? == 1,
            discard: number(keys::FEATURE_DISCARD, 1, 0)? == 1,
        })
    }

    /// Returns the handler for faults of the frontend. It is called on a worker's thread, which may not connect in the
    /// sandbox, so a new one writes to xenstore.
    fn fault_handler(&self, shared: &BackendShared) -> RingFaultHandler {
        let (name, error, xen) = (self.name.clone(), self.error_path.clone(), Arc::clone(&shared.xen));
        Arc::new(move |ring, fault| {
            let why = match fault {
                QueueFault::BrokenRing(why) => why,
                QueueFault::MalformedRequest(why) => {
                    tracing::warn!(device = %name, ring, "a request of the frontend is malformed, and failed: {why}");
                    return;
                }
            };
            tracing::warn!(device = %name, ring, "ring retired: {why}");
            let (error, xen, text) = (error.clone(), Arc::clone(&xen), format!("{EINVAL} ring {ring}: {why}"));
            let of_thread = name.clone();
            let spawned = spawn_connector("vbd-error", move || {
                let written = xen.store().map_err(|error| error.to_string());
                let written =
                    written.and_then(|mut store| store.write(&error, &text).map_err(|error| error.to_string()));
                if let Err(error) = written {
                    tracing::warn!(device = %of_thread, "cannot write the error node: {error}");
                }
            });
            if let Err(error) = spawned {
                tracing::warn!(device = %name, "cannot write the error node: {error}");
            }
        })
    }
}
