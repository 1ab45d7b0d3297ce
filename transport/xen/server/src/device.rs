//! One device: carries out what `life` decides, on a thread of the device's own.

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

/// What all devices of a backend share.
pub(crate) struct Host {
    pub(crate) xen: Arc<dyn Xen>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) opener: Arc<dyn Opener>,
    pub(crate) budget: Arc<GrantBudget>,
    pub(crate) journals: Option<Journals>,
    pub(crate) registry: Registry,
    /// How often a device was looked at.
    pub(crate) looks: AtomicU64,
    /// Until when a stop waits for storage; empty before a stop.
    pub(crate) stop_end: OnceLock<Instant>,
}

/// Why an effect could not be had.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The device's directory is gone.
    Gone,
    /// Something is wrong: Linux's number for it, and what, for people.
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

/// EINVAL, ENODEV and EIO, as `error` nodes begin.
pub(crate) const INVALID: u16 = 22;
const NO_DEVICE: u16 = 19;

/// One device's own: what its thread works with.
pub(crate) struct Device {
    pub(crate) name: DeviceName,
    /// Directories in xenstore.
    pub(crate) backend: String,
    pub(crate) frontend: String,
    error: String,
    pub(crate) opened: Option<Opened>,
    /// Of the disk that was open last, which most often is the next one too.
    figures: Option<Arc<Figures>>,
    /// What the connected frontend was offered.
    offered: Option<Offer>,
    /// The `params` that were read last.
    params: Option<String>,
    /// A state was written since the directory was found.
    announced: bool,
}

/// What a device's thread is to do.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// What `life` decided.
    Step(Step),
    /// Make the disk another size.
    Resize(String),
    /// The process ends: rings are taken back, and everything else is left for a process after this one.
    Stop,
}

impl Device {
    pub(crate) fn new(host: &Host, name: DeviceName, frontend: String) -> Device {
        let own = host.xen.domain();
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

    /// What is counted of it, if it has an open disk.
    pub(crate) fn figures(&self) -> Option<&Arc<Figures>> {
        self.opened.as_ref().map(|opened| &opened.figures)
    }

    /// The figures of a disk: they go on where the same disk was open before.
    fn figures_of(&mut self, host: &Host, backing: &Backing) -> Arc<Figures> {
        let queues = usize::from(backing.settings.bounds.queues);
        if let Some(figures) = &self.figures
            && (figures.id == backing.id && figures.queue_map.len() == queues)
        {
            return Arc::clone(figures);
        }
        self.forget_figures(host);
        let queue_map = host.registry.queue_map(&backing.settings, host.engine.workers());
        let (id, storage) = (backing.id.clone(), backing.storage.clone());
        let figures = Arc::new(Figures::new(
            self.name.clone(),
            id,
            storage,
            backing.plug,
            Arc::clone(&backing.health),
            queue_map,
        ));
        host.registry.add(&figures);
        Arc::clone(self.figures.insert(figures))
    }

    fn forget_figures(&mut self, host: &Host) {
        if let Some(figures) = self.figures.take() {
            host.registry.remove(&figures);
        }
    }

    /// Does a task. Where that leads: the phase, `None` when the device is forgotten.
    pub(crate) fn run(&mut self, host: &Host, phase: Phase, task: &Task) -> Option<Phase> {
        match task {
            Task::Step(step) => self.step(host, *step),
            Task::Resize(size) => {
                let resized = self.store(host).and_then(|mut store| self.resize(&mut store, phase, size));
                if let Err(Failure::Error(_, why)) = resized {
                    tracing::warn!(device = %self.name, "resize: {why}");
                }
                Some(phase)
            }
            Task::Stop => {
                self.tear_down(host, None);
                self.close_storage();
                Some(phase)
            }
        }
    }

    fn store(&self, host: &Host) -> Result<Xenstore, Failure> {
        host.xen.store().map_err(|error| Failure::Error(5, error.to_string()))
    }

    fn step(&mut self, host: &Host, step: Step) -> Option<Phase> {
        let mut store = None;
        for effect in step.effects {
            match self.effect(host, &mut store, *effect) {
                Ok(()) => {}
                Err(Failure::Gone) => return self.rescue(host, &mut store, GONE),
                Err(Failure::Error(errno, why)) => {
                    self.complain(store.as_mut(), errno, &why);
                    return self.rescue(host, &mut store, FAILED);
                }
            }
        }
        if step.then == Some(Phase::Found) {
            self.announced = false;
        }
        match step.then {
            Some(phase) => tracing::debug!(device = %self.name, ?phase, "step"),
            None => {
                self.forget_figures(host);
                tracing::info!(device = %self.name, "forgotten");
            }
        }
        step.then
    }

    /// The way out after a failure. What fails of it is only told.
    fn rescue(&mut self, host: &Host, store: &mut Option<Xenstore>, step: Step) -> Option<Phase> {
        let mut then = step.then;
        for effect in step.effects {
            match self.effect(host, store, *effect) {
                Ok(()) => {}
                Err(Failure::Gone) => then = None,
                Err(Failure::Error(_, why)) => tracing::warn!(device = %self.name, ?effect, "{why}"),
            }
        }
        if then.is_none() {
            self.forget_figures(host);
        }
        then
    }

    fn effect(&mut self, host: &Host, store: &mut Option<Xenstore>, effect: Effect) -> Result<(), Failure> {
        match effect {
            Effect::TearDown => {
                self.tear_down(host, host.journals.as_ref());
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
            None => store.insert(self.store(host)?),
        };
        match effect {
            Effect::OpenStorage => self.open_storage(host, store),
            Effect::Offer => {
                let offer = self.opened()?.offer();
                self.offered = Some(offer);
                self.write(store, XenbusState::InitWait, &offer.before_waiting())
            }
            Effect::Connect { resume } => self.connect(host, store, resume),
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
        let fresh = || self.opened.as_ref().map(Opened::offer);
        self.offered.or_else(fresh).unwrap_or(Offer {
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

    /// Whether the directory is the one that was found: not gone, and not gone and made anew, which only a toolstack's state 1 tells.
    fn is_same(&self, transaction: &mut Transaction<'_>, state: &str) -> Result<bool, XenstoreError> {
        if XenbusState::parse(Some(state)) != XenbusState::Initialising {
            return Ok(true);
        }
        Ok(!self.announced && transaction.read(&self.key(keys::PARAMS))? == self.params)
    }

    /// Writes keys and a state at once. A directory that is gone is not made anew, one that was made anew is left for another look, and
    /// a toolstack that wants the device to go is not written over.
    fn write(&mut self, store: &mut Xenstore, state: XenbusState, pairs: &[Pair]) -> Result<(), Failure> {
        let there = store.transaction(|transaction| {
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
            let to_go = XenbusState::parse(Some(&now)) == XenbusState::Closing
                && !online(|path| transaction.read(path), &self.backend)?;
            if !to_go || matches!(state, XenbusState::Closing | XenbusState::Closed) {
                transaction.write(&self.key(keys::STATE), &state.to_string())?;
            }
            Ok(true)
        })?;
        self.announced |= there;
        if there { Ok(()) } else { Err(Failure::Gone) }
    }

    /// Removes what was made for a domain that is gone.
    fn remove(&self, store: &mut Xenstore) -> Result<(), Failure> {
        let of_domain = self.backend.rsplit_once('/').map_or("", |(folder, _)| folder);
        store.transaction(|transaction| {
            if !is_abandoned(|path| transaction.read(path), &self.backend, self.name.front)? {
                return Ok(());
            }
            for place in [&self.backend, &self.error] {
                transaction.remove(place)?;
            }
            if transaction.list(of_domain)?.is_some_and(|left| left.is_empty()) {
                transaction.remove(of_domain)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Says where people look for it why the device does not work.
    /// (Of a device that is gone meanwhile nobody wants to know.)
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

    fn open_storage(&mut self, host: &Host, store: &mut Xenstore) -> Result<(), Failure> {
        const READ: [&str; 6] =
            [keys::STATE, keys::PARAMS, keys::MODE, keys::DISCARD_ENABLE, keys::DEVICE_TYPE, keys::REMOVABLE];
        // All as of one moment: a toolstack may remove them meanwhile.
        let read = store.transaction(|transaction| {
            let mut values: [Option<String>; READ.len()] = Default::default();
            for (value, key) in values.iter_mut().zip(READ) {
                *value = transaction.read(&self.key(key))?;
            }
            Ok(values)
        });
        let [state, params, mode, discard, kind, removable] = read?;
        if state.is_none() {
            return Err(Failure::Gone);
        }
        self.params = params.clone();
        let Some(params) = params else {
            return Err(Failure::Error(2, "params: found nothing, expected what the disk is".to_owned()));
        };
        let params = Params::parse(&params).map_err(|why| Failure::Error(INVALID, why))?;
        // As in Linux: whoever may not write must say so.
        let read_only = mode.is_some_and(|mode| !mode.contains('w'));
        let discard = parse_number_or(keys::DISCARD_ENABLE, discard.as_deref(), 1, 1);
        let discard = discard.map_err(|error| Failure::Error(INVALID, error.to_string()))? == 1;
        let (cdrom, removable) = (kind.as_deref() == Some("cdrom"), removable.as_deref() == Some("1"));
        let backing = host.opener.open(&params, &self.name, read_only);
        let backing = backing.map_err(|why| Failure::Error(NO_DEVICE, why))?;
        let geometry = backing.disk.geometry();
        let figures = self.figures_of(host, &backing);
        figures.opened(&backing.disk);
        tracing::info!(
            device = %self.name,
            disk = backing.id,
            %params,
            size = %geometry.size,
            read_only = geometry.read_only || read_only,
            queues = figures.queue_map.len(),
            "serving"
        );
        self.opened = Some(Opened { backing, figures, read_only, discard, cdrom, removable });
        Ok(())
    }

    fn close_storage(&mut self) {
        self.offered = None;
        let Some(opened) = self.opened.take() else { return };
        if let Err(error) = opened.backing.disk.sync() {
            tracing::error!(device = %self.name, %error, "flush");
        }
    }

    /// Takes the rings back. `journals`: from where theirs are removed, because no process is to take them up.
    fn tear_down(&mut self, host: &Host, journals: Option<&Journals>) {
        let Some(opened) = &self.opened else { return };
        let journaled = host.journals.is_some() && opened.backing.settings.journal;
        let rings = opened.figures.tear_down(&host.stop_end, journals.is_none() && journaled);
        if let Some(journals) = journals {
            journals.remove(&self.name, rings);
        }
    }

    fn connect(&mut self, host: &Host, store: &mut Xenstore, resume: bool) -> Result<(), Failure> {
        let offer = if resume { self.offer_of_before(store)? } else { self.offered() };
        self.offered = Some(offer);
        // All keys as of one moment: a frontend may write others while they are read.
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
            pages_may_be_pinned: host.xen.pages_may_be_pinned(),
            pool: settings.pool,
            budget: Arc::clone(&host.budget),
            persistent_max: settings.persistent_max,
            persistent_idle: settings.persistent_idle,
            rings: published.rings.len() as u16,
        });
        let connect = Connect {
            xen: &*host.xen,
            engine: &host.engine,
            name: &self.name,
            backing: &opened.backing,
            queue_map: &opened.figures.queue_map,
            journals: host.journals.as_ref().filter(|_| settings.journal),
            resume,
            on_broken: self.tell_broken(host),
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

    /// What the process before this one told the frontend, which goes by it.
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

    /// Called on a worker's thread, which must not wait for xenstore.
    fn tell_broken(&self, host: &Host) -> TellBroken {
        let (name, error, xen) = (self.name.clone(), self.error.clone(), Arc::clone(&host.xen));
        Arc::new(move |ring, why| {
            tracing::warn!(device = %name, ring, "ring retired: {why}");
            let (error, xen, text) = (error.clone(), Arc::clone(&xen), format!("{INVALID} ring {ring}: {why}"));
            let told = std::thread::Builder::new().name("vbd-error".to_owned()).spawn(move || {
                let written = xen.store().map_err(|error| error.to_string());
                let written =
                    written.and_then(|mut store| store.write(&error, &text).map_err(|error| error.to_string()));
                if let Err(error) = written {
                    tracing::warn!("cannot write the error node: {error}");
                }
            });
            if let Err(error) = told {
                tracing::warn!("cannot write the error node: {error}");
            }
        })
    }
}
