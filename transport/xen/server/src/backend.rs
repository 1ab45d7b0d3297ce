//! The thread that watches for devices. It only looks and decides; what takes time is done on a thread of the device's own.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_blkif::GrantBudget;
use mqblk_engine::{Engine, EventFd};
use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, BackendPath, keys};
use mqblk_xen::{Xen, XenError};
use rustix::event::{PollFd, PollFlags};

use crate::device::{Device, Host, Task};
use crate::figures::Figures;
use crate::journals::Journals;
use crate::life::{Phase, next};
use crate::look::look;
use crate::name::DeviceName;
use crate::pace::{Bucket, Pace};
use crate::params::Params;
use crate::registry::Registry;
use crate::resize::RESIZE;
use crate::storage::Opener;

/// Most devices. Only a toolstack makes any.
const MAX_DEVICES: usize = 4096;
/// Most events read before devices are looked at.
const EVENTS: usize = 256;
/// How soon xenstore is tried again when the connection was lost.
const RECONNECT: Duration = Duration::from_secs(1);
/// How often idle rings let go of what they do not use.
const TEND: Duration = Duration::from_secs(1);
/// Token of the watch of the backend directory; frontends have theirs.
const BACKENDS: &str = "backends";
/// Token of the special watch for domains that end.
const RELEASE: &str = "release";

/// What a backend needs.
pub struct BackendOptions {
    /// The type of devices: the name of the directory that is watched.
    pub type_name: String,
    /// The workers.
    pub engine: Arc<Engine>,
    /// Where disks come from.
    pub opener: Arc<dyn Opener>,
    /// How many pages of other domains all the disks together may keep mapped.
    pub budget: Arc<GrantBudget>,
    /// Where journals are kept; `None`: there are none, and rings that were in use when the process was killed are taken up by what lies
    /// in them.
    pub journals: Option<PathBuf>,
    /// Every device of the type is served: no other process that keeps journals there may do the same.
    pub alone: bool,
    /// How often one device is looked at.
    pub pace: Pace,
    /// How long a stop waits for storage. What is in flight after that stays unanswered: where there are journals the process after this
    /// one does it again.
    pub drain_timeout: Duration,
}

/// Why a backend could not be started.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// There is no Xen, or it refuses.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// Xenstore refuses.
    #[error(transparent)]
    Store(#[from] XenstoreError),
    /// The folder of the journals cannot be had.
    #[error("journals: found {path:?}: {source}, expected a folder that can be made or written to")]
    Journals {
        /// The folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Another process serves the type.
    #[error("found another process that serves every device of type {0:?}, expected none")]
    Busy(String),
    /// The system refuses a thread or a descriptor.
    #[error("xen backend: {0}")]
    Os(#[from] io::Error),
}

/// A backend that watches for devices and serves them. Stopped by [`stop`](Self::stop) or by dropping it.
pub struct Backend {
    host: Arc<Host>,
    stop: Arc<AtomicBool>,
    bell: EventFd,
    drain_timeout: Duration,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Backend {
    /// Starts to watch.
    ///
    /// # Errors
    /// [`BackendError`].
    pub fn start(xen: Arc<dyn Xen>, options: BackendOptions) -> Result<Backend, BackendError> {
        let BackendOptions { type_name, engine, opener, budget, journals, alone, pace, drain_timeout } = options;
        let journals =
            journals.map(|path| Journals::in_folder(&path).map_err(|source| BackendError::Journals { path, source }));
        let journals = journals.transpose()?;
        let lock = journals.as_ref().filter(|_| alone).map(|journals| journals.lock(&type_name)).transpose();
        let lock = lock.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => BackendError::Busy(type_name.clone()),
            _ => BackendError::Os(error),
        })?;
        let host = Arc::new(Host {
            xen,
            engine,
            opener,
            budget,
            journals,
            registry: Registry::default(),
            looks: AtomicU64::new(0),
            stop_end: OnceLock::new(),
        });
        let (bell, stop) = (EventFd::new()?, Arc::new(AtomicBool::new(false)));
        let folder = vbd::backends_path(host.xen.domain(), &type_name);
        let (sender, ended) = channel();
        let mut watcher = Watcher {
            host: Arc::clone(&host),
            type_name,
            folder,
            pace,
            devices: BTreeMap::new(),
            ended,
            sender,
            _lock: lock,
            bell: bell.clone(),
            stop: Arc::clone(&stop),
            tended: Instant::now(),
        };
        let store = watcher.connect()?;
        let thread = std::thread::Builder::new().name("xen-watch".to_owned()).spawn(move || watcher.run(store))?;
        Ok(Backend { host, stop, bell, drain_timeout, thread: Mutex::new(Some(thread)) })
    }

    /// The devices whose disks are open, by name.
    pub fn devices(&self) -> Vec<Arc<Figures>> {
        self.host.registry.list()
    }

    /// How often a device was looked at, of all devices.
    pub fn looks(&self) -> u64 {
        self.host.looks.load(Ordering::Relaxed)
    }

    /// Takes all rings back and closes the disks. Xenstore is left as it is: frontends notice nothing, and a process after this one takes
    /// the rings up. What storage has not answered within the drain's time is left to that one.
    pub fn stop(&self) {
        let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        self.host.stop_end.get_or_init(|| Instant::now() + self.drain_timeout);
        self.stop.store(true, Ordering::SeqCst);
        self.bell.signal();
        if thread.join().is_err() {
            tracing::error!("the thread that watches xenstore had panicked");
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A device as the watching thread knows it.
struct Known {
    backend: String,
    frontend: String,
    phase: Phase,
    /// Something may have changed since it was looked at.
    dirty: bool,
    bucket: Bucket,
    /// Its thread is at work, and has the device.
    busy: bool,
    /// `None` for ever when its thread panicked: nobody knows what state its rings are in.
    device: Option<Device>,
    figures: Option<Arc<Figures>>,
}

/// A device's thread has ended. `None` instead of a device: it panicked.
struct Ended {
    place: (DomainId, u32),
    phase: Option<Phase>,
    device: Option<Device>,
}

struct Watcher {
    host: Arc<Host>,
    type_name: String,
    /// The watched directory.
    folder: String,
    pace: Pace,
    devices: BTreeMap<(DomainId, u32), Known>,
    ended: Receiver<Ended>,
    sender: Sender<Ended>,
    /// Of the type, until the thread ends.
    _lock: Option<File>,
    bell: EventFd,
    stop: Arc<AtomicBool>,
    tended: Instant,
}

impl Watcher {
    /// Connects to xenstore and watches, all that is known already too.
    fn connect(&mut self) -> Result<Xenstore, BackendError> {
        let mut store = self.host.xen.store()?;
        store.watch(&self.folder, BACKENDS)?;
        // A driver domain may not have it; frontends that vanish are seen all the same.
        if let Err(error) = store.watch("@releaseDomain", RELEASE) {
            tracing::debug!(%error, "domains that end are not watched for");
        }
        for (place, known) in &mut self.devices {
            store.watch(&format!("{}/{}", known.frontend, keys::STATE), &token(*place))?;
            known.dirty = true;
        }
        Ok(store)
    }

    fn run(&mut self, store: Xenstore) {
        let mut store = Some(store);
        while !self.stop.load(Ordering::SeqCst) {
            self.bell.take();
            while let Ok(ended) = self.ended.try_recv() {
                self.ended(store.as_mut(), ended);
            }
            let Some(connected) = &mut store else {
                store = self.connect().inspect_err(|error| tracing::error!(%error, "xenstore")).ok();
                if store.is_none() {
                    wait(None, &self.bell, Some(RECONNECT));
                }
                continue;
            };
            match self.turn(connected) {
                Ok(pause) => wait(Some(connected), &self.bell, pause),
                Err(error) if error.is_lost() => {
                    tracing::error!(%error, "the connection to xenstore is lost: rings are served on, it is tried again");
                    store = None;
                }
                Err(error) => {
                    tracing::error!(%error, "xenstore");
                    wait(Some(connected), &self.bell, Some(RECONNECT));
                }
            }
        }
        self.leave();
    }

    /// Reads events, looks at devices. How long nothing more is to be done, unless something comes.
    fn turn(&mut self, store: &mut Xenstore) -> Result<Option<Duration>, XenstoreError> {
        // What comes with the answer to a request waits in `store`, and its descriptor does not tell of it.
        let mut again = true;
        for _ in 0..EVENTS {
            match store.next_event(Some(Duration::ZERO))? {
                Some(event) => self.note(store, &event.path, &event.token)?,
                None => {
                    again = false;
                    break;
                }
            }
        }
        let now = Instant::now();
        let mut pause = None;
        let dirty = |known: &Known| known.dirty && known.device.is_some();
        let places: Vec<_> = self.devices.iter().filter(|(_, known)| dirty(known)).map(|(place, _)| *place).collect();
        for place in places {
            let Some(known) = self.devices.get_mut(&place) else { continue };
            match known.bucket.spend(self.pace, now) {
                Ok(()) => {
                    self.look_at(store, place)?;
                    again = true;
                }
                Err(wait) => pause = Some(pause.map_or(wait, |pause: Duration| pause.min(wait))),
            }
        }
        let tend = self.tend(now);
        Ok(if again { Some(Duration::ZERO) } else { [pause, tend].into_iter().flatten().min() })
    }

    /// Has idle rings let go of what they do not use. When to come again.
    fn tend(&mut self, now: Instant) -> Option<Duration> {
        let mut rings = self.devices.values().filter_map(|known| known.figures.as_ref()).peekable();
        rings.peek()?;
        let passed = now.saturating_duration_since(self.tended);
        if passed < TEND {
            return Some(TEND - passed);
        }
        self.tended = now;
        rings.for_each(|figures| figures.tend());
        Some(TEND)
    }

    /// Notes what an event is about.
    fn note(&mut self, store: &mut Xenstore, path: &str, of: &str) -> Result<(), XenstoreError> {
        if of == RELEASE {
            self.devices.values_mut().for_each(|known| known.dirty = true);
            return Ok(());
        }
        if of != BACKENDS {
            if let Some(known) = place_of(of).and_then(|place| self.devices.get_mut(&place)) {
                known.dirty = true;
            }
            return Ok(());
        }
        match BackendPath::parse(path, &self.folder) {
            Some(BackendPath { front, devid: Some(devid), key }) => {
                match self.devices.get_mut(&(front, devid)) {
                    // Of the others most are written by ourselves.
                    Some(known) => known.dirty |= ["", keys::STATE, keys::ONLINE, RESIZE].contains(&key),
                    None => self.found(store, front, devid)?,
                }
                Ok(())
            }
            Some(BackendPath { front, devid: None, .. }) => self.scan_domain(store, front),
            // The directory itself: anything may have changed below it.
            None => self.scan(store),
        }
    }

    fn scan(&mut self, store: &mut Xenstore) -> Result<(), XenstoreError> {
        self.devices.values_mut().for_each(|known| known.dirty = true);
        for name in store.list(&self.folder)?.unwrap_or_default() {
            if let Ok(front) = name.parse() {
                self.scan_domain(store, DomainId(front))?;
            }
        }
        Ok(())
    }

    fn scan_domain(&mut self, store: &mut Xenstore, front: DomainId) -> Result<(), XenstoreError> {
        let all = (front, 0)..=(front, u32::MAX);
        self.devices.range_mut(all).for_each(|(_, known)| known.dirty = true);
        for name in store.list(&format!("{}/{}", self.folder, front.0))?.unwrap_or_default() {
            if let Ok(devid) = name.parse()
                && !self.devices.contains_key(&(front, devid))
            {
                self.found(store, front, devid)?;
            }
        }
        Ok(())
    }

    /// Takes on a device that is new, if it is whole and for us.
    fn found(&mut self, store: &mut Xenstore, front: DomainId, devid: u32) -> Result<(), XenstoreError> {
        let name = DeviceName { type_name: self.type_name.clone(), front, devid };
        let backend = vbd::backend_path(self.host.xen.domain(), &self.type_name, front, devid);
        let mut read = |key: &str| store.read(&format!("{backend}/{key}"));
        let Some(params) = read(keys::STATE)?.and(read(keys::PARAMS)?) else { return Ok(()) };
        // What cannot be read is told to whoever made it, in the device's `error` node.
        if let Ok(params) = Params::parse(&params)
            && !self.host.opener.serves(&params)
        {
            tracing::debug!(device = %name, %params, "left to others");
            return Ok(());
        }
        let frontend = read(keys::FRONTEND)?.unwrap_or_else(|| vbd::frontend_path(front, devid));
        if self.devices.len() >= MAX_DEVICES {
            tracing::error!(device = %name, "not served: there are {MAX_DEVICES} devices already");
            return Ok(());
        }
        let place = (front, devid);
        if let Err(error) = store.watch(&format!("{frontend}/{}", keys::STATE), &token(place)) {
            tracing::warn!(device = %name, %error, "not served: its frontend cannot be watched");
            return if error.is_lost() { Err(error) } else { Ok(()) };
        }
        tracing::debug!(device = %name, frontend, "found");
        let device = Some(Device::new(&self.host, name, frontend.clone()));
        let bucket = Bucket::new(self.pace, Instant::now());
        let phase = Phase::Found;
        let known = Known { backend, frontend, phase, dirty: true, bucket, busy: false, device, figures: None };
        self.devices.insert(place, known);
        Ok(())
    }

    /// Looks at a device, and begins what there is to do.
    fn look_at(&mut self, store: &mut Xenstore, place: (DomainId, u32)) -> Result<(), XenstoreError> {
        let Some(known) = self.devices.get_mut(&place) else { return Ok(()) };
        known.dirty = false;
        self.host.looks.fetch_add(1, Ordering::Relaxed);
        let looked = look(store, &known.backend, (place.0, &known.frontend));
        known.dirty |= looked.is_err();
        let (seen, resize) = looked?;
        let task = match (next(known.phase, seen), resize) {
            (Some(step), _) => Task::Step(step),
            (None, Some(size)) if known.phase.has_storage() => Task::Resize(size),
            (None, _) => return Ok(()),
        };
        // Whatever it leads to is looked at when it has ended.
        known.dirty = true;
        let phase = known.phase;
        if let Some(device) = known.device.take() {
            known.busy = true;
            self.begin(place, device, phase, task);
        }
        Ok(())
    }

    /// Has a device's task done on a thread of its own. There is one at a time.
    fn begin(&mut self, place: (DomainId, u32), device: Device, phase: Phase, task: Task) {
        let (host, sender, bell) = (Arc::clone(&self.host), self.sender.clone(), self.bell.clone());
        let name = format!("vbd-{}-{}", place.0.0, place.1);
        // What is to be told when the thread ends, whichever way.
        let slot = Arc::new(Mutex::new(Some(device)));
        let inner = Arc::clone(&slot);
        let work = move || {
            let taken = inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(mut device) = taken else { return };
            let run = std::panic::AssertUnwindSafe(|| device.run(&host, phase, &task));
            let ended = match std::panic::catch_unwind(run) {
                Ok(phase) => Ended { place, phase, device: Some(device) },
                Err(_) => Ended { place, phase: None, device: None },
            };
            // Nobody listens when the backend has stopped.
            let _ = sender.send(ended);
            bell.signal();
        };
        if let Err(error) = std::thread::Builder::new().name(name).spawn(work) {
            tracing::error!(%error, "a device's thread cannot be started: it is tried again");
            let device = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(known) = self.devices.get_mut(&place) {
                (known.device, known.busy) = (device, false);
            }
        }
    }

    /// A device's thread has ended.
    fn ended(&mut self, store: Option<&mut Xenstore>, ended: Ended) {
        let Ended { place, phase, device } = ended;
        let Entry::Occupied(mut entry) = self.devices.entry(place) else { return };
        entry.get_mut().busy = false;
        let Some(device) = device else {
            tracing::error!(?place, "a device's thread had panicked: its state is left as it is");
            return;
        };
        if let Some(phase) = phase {
            let known = entry.get_mut();
            known.figures = device.figures().filter(|_| phase.has_rings()).cloned();
            (known.phase, known.device) = (phase, Some(device));
            return;
        }
        let known = entry.remove();
        let Some(store) = store else { return };
        let unwatched = store.unwatch(&format!("{}/{}", known.frontend, keys::STATE), &token(place));
        // It may have been made anew while it was being forgotten, which no event tells of any more.
        if let Err(error) = unwatched.and_then(|()| self.found(store, place.0, place.1)) {
            tracing::warn!(?place, %error, "xenstore");
        }
    }

    /// Waits for what is under way, and takes all rings back.
    fn leave(&mut self) {
        let away = self.devices.values().filter(|known| known.busy).count();
        for _ in 0..away {
            let Ok(ended) = self.ended.recv() else { break };
            self.ended(None, ended);
        }
        let all: Vec<_> = self
            .devices
            .iter_mut()
            .filter_map(|(place, known)| Some((*place, known.device.take()?, known.phase)))
            .collect();
        let stopping = all.len();
        for (place, device, phase) in all {
            self.begin(place, device, phase, Task::Stop);
        }
        for _ in 0..stopping {
            if self.ended.recv().is_err() {
                break;
            }
        }
    }
}

/// Waits until something comes, or `pause` is over.
fn wait(store: Option<&mut Xenstore>, bell: &EventFd, pause: Option<Duration>) {
    let bell = PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN);
    let mut ready = vec![bell];
    if let Some(store) = &store {
        ready.push(PollFd::from_borrowed_fd(store.descriptor(), PollFlags::IN));
    }
    let timeout = pause.and_then(|pause| rustix::time::Timespec::try_from(pause).ok());
    // An interrupted wait is a short one.
    let _ = rustix::event::poll(&mut ready, timeout.as_ref());
}

/// Token of the watch of a frontend.
fn token((front, devid): (DomainId, u32)) -> String {
    format!("{}/{devid}", front.0)
}

fn place_of(token: &str) -> Option<(DomainId, u32)> {
    let (front, devid) = token.split_once('/')?;
    Some((DomainId(front.parse().ok()?), devid.parse().ok()?))
}
