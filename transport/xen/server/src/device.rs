//! One device: executes the transitions that `state_machine` decides, on a thread per device.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use mqblk_blkif::{GrantBudget, Vbd, VbdOptions};
use mqblk_engine::Engine;
use mqblk_xen::Xen;
use mqblk_xen::store::{Transaction, Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys, parse_number_or};

use crate::connection::{Connect, TellBroken};
use crate::figures::Figures;
use crate::frontend::{Bounds, Published, PublishedError};
use crate::journals::Journals;
use crate::life::{Effect, FAILED, GONE, Phase, Step};
use crate::look::{is_abandoned, online};
use crate::name::DeviceName;
use crate::offer::{Offer, Pair};
use crate::opened::Opened;
use crate::params::Params;
use crate::registry::Registry;
use crate::storage::{Backing, Opener};

/// State that all devices of a backend share.
pub(crate) struct Host {
    pub(crate) xen: Arc<dyn Xen>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) opener: Arc<dyn Opener>,
    pub(crate) budget: Arc<GrantBudget>,
    pub(crate) journals: Option<Journals>,
    pub(crate) registry: Registry,
    /// Number of device checks, over all devices.
    pub(crate) looks: AtomicU64,
    /// When a stop ends its wait for storage; empty before a stop.
    pub(crate) stop_end: OnceLock<Instant>,
}

/// Why an effect failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The device's directory is gone.
    Gone,
    /// An error: its errno, and the text for users.
    Error(u16, String),
}

impl From<XenstoreError> for Failure {
    fn from(error: XenstoreError) -> Failure {
        Failure::Error(5, error.to_string())
    }
}

impl From<PublishedError> for Failure {
    fn from(error: PublishedError) -> Failure {
        Failure::Error(error.errno(), error.to_string())
    }
}

/// Errno values, with which the text of an `error` node starts.
pub(crate) const INVALID: u16 = 22;
const NO_DEVICE: u16 = 19;

/// One device.
pub(crate) struct Device {
    pub(crate) name: DeviceName,
    /// Directories in xenstore.
    pub(crate) backend: String,
    pub(crate) frontend: String,
    error: String,
    pub(crate) opened: Option<Opened>,
    /// Statistics of the last open disk, which is usually the next one too.
    figures: Option<Arc<Figures>>,
    /// Features offered to the connected frontend.
    offered: Option<Offer>,
    /// The last value of `params`.
    params: Option<String>,
    /// This process has written a state since it discovered the directory.
    announced: bool,
}

/// A task of a device's thread.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Execute a transition of the state machine.
    Step(Step),
    /// Resize the disk.
    Resize(String),
    /// Detach the rings and close the disk because the process ends. Xenstore and journals stay for the next process.
    Stop,
}

impl Device {
    pub(crate) fn new(shared: &Host, name: DeviceName, frontend: String) -> Device {
        let own = shared.xen.domain();
        let backend = vbd::backend_path(own, &name.type_name, name.front, name.devid);
        let error = vbd::backend_error_path(own, &name.type_name, name.front, name.devid);
        Device {
            name,
            backend,
            frontend,
            error,
            opened: None,
            figures: None,
            offered: None,
            params: None,
            announced: false,
        }
    }

    /// Returns the device's statistics, if its disk is open.
    pub(crate) fn figures(&self) -> Option<&Arc<Figures>> {
        self.opened.as_ref().map(|opened| &opened.figures)
    }

    /// Returns the statistics for a disk: those of the previous disk if it is the same, else new ones.
    fn figures_of(&mut self, shared: &Host, backing: &Backing) -> Arc<Figures> {
        let queues = usize::from(backing.settings.bounds.queues);
        if let Some(stats) = &self.figures
            && (stats.id == backing.id && stats.queue_map.len() == queues)
        {
            return Arc::clone(stats);
        }
        self.forget_figures(shared);
        let queue_map = shared.registry.queue_map(&backing.settings, shared.engine.workers());
        let (id, storage) = (backing.id.clone(), backing.storage.clone());
        let stats = Arc::new(Figures::new(
            self.name.clone(),
            id,
            storage,
            backing.plug,
            Arc::clone(&backing.health),
            queue_map,
        ));
        shared.registry.add(&stats);
        Arc::clone(self.figures.insert(stats))
    }

    fn forget_figures(&mut self, shared: &Host) {
        if let Some(stats) = self.figures.take() {
            shared.registry.remove(&stats);
        }
    }

    /// Runs a task. Returns the next phase; `None`: the device is dropped.
    pub(crate) fn run(&mut self, shared: &Host, phase: Phase, task: &Task) -> Option<Phase> {
        match task {
            Task::Step(transition) => self.step(shared, *transition),
            Task::Resize(size) => {
                let resized = self.store(shared).and_then(|mut store| self.resize(&mut store, phase, size));
                if let Err(Failure::Error(_, why)) = resized {
                    tracing::warn!(device = %self.name, "resize: {why}");
                }
                Some(phase)
            }
            Task::Stop => {
                self.tear_down(shared, None);
                self.close_storage();
                Some(phase)
            }
        }
    }

    fn store(&self, shared: &Host) -> Result<Xenstore, Failure> {
        shared.xen.store().map_err(|error| Failure::Error(5, error.to_string()))
    }

    fn step(&mut self, shared: &Host, transition: Step) -> Option<Phase> {
        let mut store = None;
        for effect in transition.effects {
            match self.effect(shared, &mut store, *effect) {
                Ok(()) => {}
                Err(Failure::Gone) => return self.rescue(shared, &mut store, GONE),
                Err(Failure::Error(errno, why)) => {
                    self.complain(store.as_mut(), errno, &why);
                    return self.rescue(shared, &mut store, FAILED);
                }
            }
        }
        if transition.then == Some(Phase::Found) {
            self.announced = false;
        }
        match transition.then {
            Some(phase) => tracing::debug!(device = %self.name, ?phase, "transition"),
            None => {
                self.forget_figures(shared);
                tracing::info!(device = %self.name, "dropped");
            }
        }
        transition.then
    }

    /// Executes a transition after a failure. Further errors are only logged.
    fn rescue(&mut self, shared: &Host, store: &mut Option<Xenstore>, transition: Step) -> Option<Phase> {
        let mut next_phase = transition.then;
        for effect in transition.effects {
            match self.effect(shared, store, *effect) {
                Ok(()) => {}
                Err(Failure::Gone) => next_phase = None,
                Err(Failure::Error(_, why)) => tracing::warn!(device = %self.name, ?effect, "{why}"),
            }
        }
        if next_phase.is_none() {
            self.forget_figures(shared);
        }
        next_phase
    }

    fn effect(&mut self, shared: &Host, store: &mut Option<Xenstore>, effect: Effect) -> Result<(), Failure> {
        match effect {
            Effect::TearDown => {
                self.tear_down(shared, shared.journals.as_ref());
                return Ok(());
            }
            Effect::CloseStorage => {
                self.close_storage();
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
            Effect::Offer => {
                let offer = self.opened()?.offer();
                self.offered = Some(offer);
                self.write(store, XenbusState::InitWait, &offer.before_waiting())
            }
            Effect::Connect { resume } => self.connect(shared, store, resume),
            Effect::Describe => {
                let (opened, offer) = (self.opened()?, self.offered());
                let pairs = offer.before_connected(&opened.description());
                self.write(store, XenbusState::Connected, &pairs)?;
                store.remove(&self.error)?;
                tracing::info!(device = %self.name, "connected");
                Ok(())
            }
            Effect::Announce(state) => self.write(store, state, &[]),
            Effect::Remove => self.remove(store),
            Effect::TearDown | Effect::CloseStorage => Ok(()),
        }
    }

    pub(crate) fn opened(&self) -> Result<&Opened, Failure> {
        self.opened.as_ref().ok_or_else(|| Failure::Error(NO_DEVICE, "its disk is not open".to_owned()))
    }

    fn offered(&self) -> Offer {
        let new_offer = || self.opened.as_ref().map(Opened::offer);
        self.offered.or_else(new_offer).unwrap_or(Offer {
            bounds: Bounds { queues: 1, ring_order: 0 },
            indirect_segments: 0,
            persistent: false,
            flush: false,
            barrier: false,
            discard: false,
        })
    }

    pub(crate) fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.backend)
    }

    /// Returns true if the directory is the one that was discovered. One that was removed and created again has a toolstack's state 1.
    fn is_same(&self, transaction: &mut Transaction<'_>, state: &str) -> Result<bool, XenstoreError> {
        if XenbusState::parse(Some(state)) != XenbusState::Initialising {
            return Ok(true);
        }
        Ok(!self.announced && transaction.read(&self.key(keys::PARAMS))? == self.params)
    }

    /// Writes keys and a state in one transaction. Does not create a directory that is gone, nor write to one that was created again,
    /// nor overwrite the state of a toolstack that removes the device.
    fn write(&mut self, store: &mut Xenstore, state: XenbusState, pairs: &[Pair]) -> Result<(), Failure> {
        let exists = store.transaction(|transaction| {
            let Some(now) = transaction.read(&self.key(keys::STATE))? else { return Ok(false) };
            if !self.is_same(transaction, &now)? {
                return Ok(false);
            }
            for (key, value) in pairs {
                match value {
                    Some(value) => transaction.write(&self.key(key), value)?,
                    None => transaction.remove(&self.key(key))?,
                }
            }
            let removal_requested = XenbusState::parse(Some(&now)) == XenbusState::Closing
                && !online(|path| transaction.read(path), &self.backend)?;
            if !removal_requested || matches!(state, XenbusState::Closing | XenbusState::Closed) {
                transaction.write(&self.key(keys::STATE), &state.to_string())?;
            }
            Ok(true)
        })?;
        self.announced |= exists;
        if exists { Ok(()) } else { Err(Failure::Gone) }
    }

    /// Removes the directories of a device whose domain is gone.
    fn remove(&self, store: &mut Xenstore) -> Result<(), Failure> {
        let domain_dir = self.backend.rsplit_once('/').map_or("", |(dir, _)| dir);
        store.transaction(|transaction| {
            if !is_abandoned(|path| transaction.read(path), &self.backend, self.name.front)? {
                return Ok(());
            }
            for path in [&self.backend, &self.error] {
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
    fn complain(&self, store: Option<&mut Xenstore>, errno: u16, why: &str) {
        tracing::warn!(device = %self.name, "{why}");
        let Some(store) = store else { return };
        let written = store.transaction(|transaction| match transaction.read(&self.key(keys::STATE))? {
            Some(now) if self.is_same(transaction, &now)? => transaction.write(&self.error, &format!("{errno} {why}")),
            _ => Ok(()),
        });
        if let Err(error) = written {
            tracing::warn!(device = %self.name, %error, "cannot write the error node");
        }
    }

    fn open_storage(&mut self, shared: &Host, store: &mut Xenstore) -> Result<(), Failure> {
        const READ: [&str; 6] =
            [keys::STATE, keys::PARAMS, keys::MODE, keys::DISCARD_ENABLE, keys::DEVICE_TYPE, keys::REMOVABLE];
        // One consistent snapshot: a toolstack may remove keys meanwhile.
        let read = store.transaction(|transaction| {
            let mut values: [Option<String>; READ.len()] = Default::default();
            for (value, key) in values.iter_mut().zip(READ) {
                *value = transaction.read(&self.key(key))?;
            }
            Ok(values)
        });
        let [state, params, mode, discard, device_type, removable] = read?;
        if state.is_none() {
            return Err(Failure::Gone);
        }
        self.params = params.clone();
        let Some(params) = params else {
            return Err(Failure::Error(2, "params: found nothing, expected what the disk is".to_owned()));
        };
        let params = Params::parse(&params).map_err(|why| Failure::Error(INVALID, why))?;
        // As in Linux: writable unless `mode` is present without `w`.
        let read_only = mode.is_some_and(|mode| !mode.contains('w'));
        let discard = parse_number_or(keys::DISCARD_ENABLE, discard.as_deref(), 1, 1);
        let discard = discard.map_err(|error| Failure::Error(INVALID, error.to_string()))? == 1;
        let (cdrom, removable) = (device_type.as_deref() == Some("cdrom"), removable.as_deref() == Some("1"));
        let backing = shared.opener.open(&params, &self.name, read_only);
        let backing = backing.map_err(|why| Failure::Error(NO_DEVICE, why))?;
        let geometry = backing.disk.geometry();
        let stats = self.figures_of(shared, &backing);
        stats.opened(&backing.disk);
        tracing::info!(
            device = %self.name,
            disk = backing.id,
            %params,
            size = %geometry.size,
            read_only = geometry.read_only || read_only,
            queues = stats.queue_map.len(),
            "serving"
        );
        self.opened = Some(Opened { backing, figures: stats, read_only, discard, cdrom, removable });
        Ok(())
    }

    fn close_storage(&mut self) {
        self.offered = None;
        let Some(opened) = self.opened.take() else { return };
        if let Err(error) = opened.backing.disk.sync() {
            tracing::error!(device = %self.name, %error, "flush");
        }
    }

    /// Detaches the rings. `journals`: directory from which their journals are removed; `None`: the next process resumes the rings.
    fn tear_down(&mut self, shared: &Host, journals: Option<&Journals>) {
        let Some(opened) = &self.opened else { return };
        let journaled = shared.journals.is_some() && opened.backing.settings.journal;
        let rings = opened.figures.tear_down(&shared.stop_end, journals.is_none() && journaled);
        if let Some(journals) = journals {
            journals.remove(&self.name, rings);
        }
    }

    fn connect(&mut self, shared: &Host, store: &mut Xenstore, resume: bool) -> Result<(), Failure> {
        let offer = if resume { self.offer_of_before(store)? } else { self.offered() };
        self.offered = Some(offer);
        // One consistent snapshot: a frontend may write keys meanwhile.
        let published = store.transaction(|transaction| {
            let mut read = |key: &str| transaction.read(&format!("{}/{key}", self.frontend));
            match Published::read(&mut read, offer.bounds) {
                Err(PublishedError::Store(error)) => Err(error),
                other => Ok(other),
            }
        })??;
        let opened = self.opened()?;
        let (description, settings) = (opened.description(), &opened.backing.settings);
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
        let connect = Connect {
            xen: &*shared.xen,
            engine: &shared.engine,
            name: &self.name,
            backing: &opened.backing,
            queue_map: &opened.figures.queue_map,
            journals: shared.journals.as_ref().filter(|_| settings.journal),
            resume,
            on_broken: self.tell_broken(shared),
        };
        let handles = connect.all(&vbd, &published).map_err(|why| Failure::Error(INVALID, why))?;
        tracing::info!(
            device = %self.name,
            rings = handles.len(),
            pages = published.rings.first().map_or(0, |ring| ring.refs.len()),
            abi = published.abi.protocol(),
            grants = vbd.options().resolved_mode().word(),
            resume,
            "rings"
        );
        opened.figures.connected(vbd, handles);
        Ok(())
    }

    /// Reads the features that the earlier process has offered, which the frontend uses.
    fn offer_of_before(&self, store: &mut Xenstore) -> Result<Offer, Failure> {
        let mut number = |key: &str, most: u64, absent: u64| -> Result<u64, Failure> {
            let value = store.read(&self.key(key))?;
            parse_number_or(key, value.as_deref(), most, absent)
                .map_err(|error| Failure::Error(INVALID, error.to_string()))
        };
        let queues = number(keys::MULTI_QUEUE_MAX_QUEUES, u16::MAX.into(), 1)?.max(1) as u16;
        let ring_order = number(keys::MAX_RING_PAGE_ORDER, 4, 0)? as u8;
        Ok(Offer {
            bounds: Bounds { queues, ring_order },
            indirect_segments: number(keys::FEATURE_MAX_INDIRECT_SEGMENTS, u16::MAX.into(), 0)? as u16,
            persistent: number(keys::FEATURE_PERSISTENT, 1, 0)? == 1,
            flush: number(keys::FEATURE_FLUSH_CACHE, 1, 0)? == 1,
            barrier: number(keys::FEATURE_BARRIER, 1, 0)? == 1,
            discard: number(keys::FEATURE_DISCARD, 1, 0)? == 1,
        })
    }

    /// Returns the handler for broken rings. It is called on a worker's thread, so it writes to xenstore on a new thread.
    fn tell_broken(&self, shared: &Host) -> TellBroken {
        let (name, error, xen) = (self.name.clone(), self.error.clone(), Arc::clone(&shared.xen));
        Arc::new(move |ring, why| {
            tracing::warn!(device = %name, ring, "ring retired: {why}");
            let (error, xen, text) = (error.clone(), Arc::clone(&xen), format!("{INVALID} ring {ring}: {why}"));
            let spawned = std::thread::Builder::new().name("vbd-error".to_owned()).spawn(move || {
                let written = xen.store().map_err(|error| error.to_string());
                let written =
                    written.and_then(|mut store| store.write(&error, &text).map_err(|error| error.to_string()));
                if let Err(error) = written {
                    tracing::warn!("cannot write the error node: {error}");
                }
            });
            if let Err(error) = spawned {
                tracing::warn!("cannot write the error node: {error}");
            }
        })
    }
}
