//! The thread that watches xenstore for devices. It only observes and decides; slow work is done on a thread per device.

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

/// Maximum of devices. Only a toolstack creates devices.
const MAX_DEVICES: usize = 4096;
/// Maximum of events read before devices are checked.
const EVENTS: usize = 256;
/// Interval of attempts to reconnect to xenstore.
const RECONNECT: Duration = Duration::from_secs(1);
/// Interval at which idle rings release unused pages.
const TEND: Duration = Duration::from_secs(1);
/// Token of the watch of the backend directory. Watches of frontends have tokens of their own.
const BACKENDS: &str = "backends";
/// Token of the special watch for released domains.
const RELEASE: &str = "release";

/// Options of a backend.
pub struct BackendOptions {
    /// Device type: the name of the watched directory.
    pub type_name: String,
    /// The engine whose workers run the rings.
    pub engine: Arc<Engine>,
    /// Opens disks.
    pub opener: Arc<dyn Opener>,
    /// Budget of mapped pages of other domains, over all disks.
    pub budget: Arc<GrantBudget>,
    /// Directory of the journals. `None`: no journals; rings that were in use when the process was killed are resumed from their
    /// content.
    pub journals: Option<PathBuf>,
    /// The backend serves every device of the type: no other process may do the same with this journal directory.
    pub alone: bool,
    /// Rate limit of the checks of one device.
    pub pace: Pace,
    /// How long a stop waits for storage. Requests in flight after that get no response; with journals, the next process replays
    /// them.
    pub drain_timeout: Duration,
}

/// Why a backend could not be started.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Xen is not available or has refused.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// Xenstore has refused.
    #[error(transparent)]
    Store(#[from] XenstoreError),
    /// The journal directory cannot be created.
    #[error("journals: found {path:?}: {source}, expected a folder that can be made or written to")]
    Journals {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process serves the device type.
    #[error("found another process that serves every device of type {0:?}, expected none")]
    Busy(String),
    /// A thread or a descriptor cannot be created.
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
    /// Starts the watcher thread.
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
        let shared = Arc::new(Host {
            xen,
            engine,
            opener,
            budget,
            journals,
            registry: Registry::default(),
            looks: AtomicU64::new(0),
            stop_end: OnceLock::new(),
        });
        let (wakeup, stop) = (EventFd::new()?, Arc::new(AtomicBool::new(false)));
        let folder = vbd::backends_path(shared.xen.domain(), &type_name);
        let (sender, ended) = channel();
        let mut watcher = Watcher {
            host: Arc::clone(&shared),
            type_name,
            folder,
            pace,
            devices: BTreeMap::new(),
            ended,
            sender,
            _lock: lock,
            bell: wakeup.clone(),
            stop: Arc::clone(&stop),
            tended: Instant::now(),
        };
        let store = watcher.connect()?;
        let thread = std::thread::Builder::new().name("xen-watch".to_owned()).spawn(move || watcher.run(store))?;
        Ok(Backend { host: shared, stop, bell: wakeup, drain_timeout, thread: Mutex::new(Some(thread)) })
    }

    /// Returns the devices with open disks, sorted by name.
    pub fn devices(&self) -> Vec<Arc<Figures>> {
        self.host.registry.list()
    }

    /// Returns the number of device checks so far, over all devices.
    pub fn looks(&self) -> u64 {
        self.host.looks.load(Ordering::Relaxed)
    }

    /// Detaches all rings and closes the disks. Xenstore is unchanged: frontends notice nothing, and the next process resumes the
    /// rings. Requests that storage has not completed within the drain timeout are left to it.
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

/// A device, as the watcher thread tracks it.
struct Known {
    backend: String,
    frontend: String,
    phase: Phase,
    /// The device may have changed since its last check.
    dirty: bool,
    bucket: Bucket,
    /// The device's thread runs, and holds `device`.
    busy: bool,
    /// `None` while busy, and permanently after its thread has panicked: the state of its rings is unknown.
    device: Option<Device>,
    figures: Option<Arc<Figures>>,
}

/// Result of a device's thread. `device` is `None` if it has panicked.
struct Ended {
    place: (DomainId, u32),
    phase: Option<Phase>,
    device: Option<Device>,
}

struct Watcher {
    host: Arc<Host>,
    type_name: String,
    /// Path of the watched directory.
    folder: String,
    pace: Pace,
    devices: BTreeMap<(DomainId, u32), Known>,
    ended: Receiver<Ended>,
    sender: Sender<Ended>,
    /// Lock of the device type, held until the thread ends.
    _lock: Option<File>,
    bell: EventFd,
    stop: Arc<AtomicBool>,
    tended: Instant,
}

impl Watcher {
    /// Connects to xenstore and sets the watches, including those of watched devices.
    fn connect(&mut self) -> Result<Xenstore, BackendError> {
        let mut store = self.host.xen.store()?;
        store.watch(&self.folder, BACKENDS)?;
        // A driver domain may not set this watch; frontends that disappear are detected without it.
        if let Err(error) = store.watch("@releaseDomain", RELEASE) {
            tracing::debug!(%error, "domains that end are not watched for");
        }
        for (key, watched) in &mut self.devices {
            store.watch(&format!("{}/{}", watched.frontend, keys::STATE), &token(*key))?;
            watched.dirty = true;
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
                    tracing::error!(%error, "the connection to xenstore is lost: rings continue to be served while it reconnects");
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

    /// Reads events and checks devices. Returns how long to wait for the next event; `None`: without a limit.
    fn turn(&mut self, store: &mut Xenstore) -> Result<Option<Duration>, XenstoreError> {
        // Events that arrive with a reply are queued in `store`, which does not make its descriptor readable.
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
        let dirty = |watched: &Known| watched.dirty && watched.device.is_some();
        let keys_to_check: Vec<_> =
            self.devices.iter().filter(|(_, watched)| dirty(watched)).map(|(key, _)| *key).collect();
        for key in keys_to_check {
            let Some(watched) = self.devices.get_mut(&key) else { continue };
            match watched.bucket.spend(self.pace, now) {
                Ok(()) => {
                    self.look_at(store, key)?;
                    again = true;
                }
                Err(wait) => pause = Some(pause.map_or(wait, |pause: Duration| pause.min(wait))),
            }
        }
        let reclaim = self.tend(now);
        Ok(if again { Some(Duration::ZERO) } else { [pause, reclaim].into_iter().flatten().min() })
    }

    /// Lets idle rings release unused pages. Returns the time until the next call; `None` if no device has rings.
    fn tend(&mut self, now: Instant) -> Option<Duration> {
        let mut stats = self.devices.values().filter_map(|watched| watched.figures.as_ref()).peekable();
        stats.peek()?;
        let elapsed = now.saturating_duration_since(self.tended);
        if elapsed < TEND {
            return Some(TEND - elapsed);
        }
        self.tended = now;
        stats.for_each(|stats| stats.tend());
        Some(TEND)
    }

    /// Handles a watch event: marks the devices that may have changed.
    fn note(&mut self, store: &mut Xenstore, path: &str, token: &str) -> Result<(), XenstoreError> {
        if token == RELEASE {
            self.devices.values_mut().for_each(|watched| watched.dirty = true);
            return Ok(());
        }
        if token != BACKENDS {
            if let Some(watched) = place_of(token).and_then(|key| self.devices.get_mut(&key)) {
                watched.dirty = true;
            }
            return Ok(());
        }
        match BackendPath::parse(path, &self.folder) {
            Some(BackendPath { front, devid: Some(devid), key }) => {
                match self.devices.get_mut(&(front, devid)) {
                    // The other keys are mostly written by this backend.
                    Some(watched) => watched.dirty |= ["", keys::STATE, keys::ONLINE, RESIZE].contains(&key),
                    None => self.found(store, front, devid)?,
                }
                Ok(())
            }
            Some(BackendPath { front, devid: None, .. }) => self.scan_domain(store, front),
            // The directory itself: anything below it may have changed.
            None => self.scan(store),
        }
    }

    fn scan(&mut self, store: &mut Xenstore) -> Result<(), XenstoreError> {
        self.devices.values_mut().for_each(|watched| watched.dirty = true);
        for name in store.list(&self.folder)?.unwrap_or_default() {
            if let Ok(front) = name.parse() {
                self.scan_domain(store, DomainId(front))?;
            }
        }
        Ok(())
    }

    fn scan_domain(&mut self, store: &mut Xenstore, front: DomainId) -> Result<(), XenstoreError> {
        let all = (front, 0)..=(front, u32::MAX);
        self.devices.range_mut(all).for_each(|(_, watched)| watched.dirty = true);
        for name in store.list(&format!("{}/{}", self.folder, front.0))?.unwrap_or_default() {
            if let Ok(devid) = name.parse()
                && !self.devices.contains_key(&(front, devid))
            {
                self.found(store, front, devid)?;
            }
        }
        Ok(())
    }

    /// Adds a new device, if its directory is complete and the opener accepts it.
    fn found(&mut self, store: &mut Xenstore, front: DomainId, devid: u32) -> Result<(), XenstoreError> {
        let name = DeviceName { type_name: self.type_name.clone(), front, devid };
        let backend = vbd::backend_path(self.host.xen.domain(), &self.type_name, front, devid);
        let mut read = |key: &str| store.read(&format!("{backend}/{key}"));
        let Some(params) = read(keys::STATE)?.and(read(keys::PARAMS)?) else { return Ok(()) };
        // Invalid params are reported later, in the device's `error` node.
        if let Ok(params) = Params::parse(&params)
            && !self.host.opener.serves(&params)
        {
            tracing::debug!(device = %name, %params, "not for this program");
            return Ok(());
        }
        let frontend = read(keys::FRONTEND)?.unwrap_or_else(|| vbd::frontend_path(front, devid));
        if self.devices.len() >= MAX_DEVICES {
            tracing::error!(device = %name, "not served: there are {MAX_DEVICES} devices already");
            return Ok(());
        }
        let key = (front, devid);
        if let Err(error) = store.watch(&format!("{frontend}/{}", keys::STATE), &token(key)) {
            tracing::warn!(device = %name, %error, "not served: its frontend cannot be watched");
            return if error.is_lost() { Err(error) } else { Ok(()) };
        }
        tracing::debug!(device = %name, frontend, "found");
        let device = Some(Device::new(&self.host, name, frontend.clone()));
        let bucket = Bucket::new(self.pace, Instant::now());
        let phase = Phase::Found;
        let watched = Known { backend, frontend, phase, dirty: true, bucket, busy: false, device, figures: None };
        self.devices.insert(key, watched);
        Ok(())
    }

    /// Checks a device, and starts its next task.
    fn look_at(&mut self, store: &mut Xenstore, key: (DomainId, u32)) -> Result<(), XenstoreError> {
        let Some(watched) = self.devices.get_mut(&key) else { return Ok(()) };
        watched.dirty = false;
        self.host.looks.fetch_add(1, Ordering::Relaxed);
        let observed = look(store, &watched.backend, (key.0, &watched.frontend));
        watched.dirty |= observed.is_err();
        let (state, resize) = observed?;
        let task = match (next(watched.phase, state), resize) {
            (Some(transition), _) => Task::Step(transition),
            (None, Some(size)) if watched.phase.has_storage() => Task::Resize(size),
            (None, _) => return Ok(()),
        };
        // Checked again when the task has ended.
        watched.dirty = true;
        let phase = watched.phase;
        if let Some(device) = watched.device.take() {
            watched.busy = true;
            self.begin(key, device, phase, task);
        }
        Ok(())
    }

    /// Runs a device's task on a thread. A device has one task at a time.
    fn begin(&mut self, key: (DomainId, u32), device: Device, phase: Phase, task: Task) {
        let (shared, sender, wakeup) = (Arc::clone(&self.host), self.sender.clone(), self.bell.clone());
        let name = format!("vbd-{}-{}", key.0.0, key.1);
        // Recovers the device if the thread cannot be started.
        let slot = Arc::new(Mutex::new(Some(device)));
        let inner = Arc::clone(&slot);
        let work = move || {
            let taken = inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(mut device) = taken else { return };
            let run = std::panic::AssertUnwindSafe(|| device.run(&shared, phase, &task));
            let ended = match std::panic::catch_unwind(run) {
                Ok(phase) => Ended { place: key, phase, device: Some(device) },
                Err(_) => Ended { place: key, phase: None, device: None },
            };
            // Fails only after the backend has stopped.
            let _ = sender.send(ended);
            wakeup.signal();
        };
        if let Err(error) = std::thread::Builder::new().name(name).spawn(work) {
            tracing::error!(%error, "a device's thread cannot be started: will retry");
            let device = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(watched) = self.devices.get_mut(&key) {
                (watched.device, watched.busy) = (device, false);
            }
        }
    }

    /// Handles the result of a device's task.
    fn ended(&mut self, store: Option<&mut Xenstore>, ended: Ended) {
        let Ended { place: key, phase, device } = ended;
        let Entry::Occupied(mut entry) = self.devices.entry(key) else { return };
        entry.get_mut().busy = false;
        let Some(device) = device else {
            tracing::error!(device = ?key, "a device's thread had panicked: its state is left as it is");
            return;
        };
        if let Some(phase) = phase {
            let watched = entry.get_mut();
            watched.figures = device.figures().filter(|_| phase.has_rings()).cloned();
            (watched.phase, watched.device) = (phase, Some(device));
            return;
        }
        let watched = entry.remove();
        let Some(store) = store else { return };
        let unwatched = store.unwatch(&format!("{}/{}", watched.frontend, keys::STATE), &token(key));
        // It may have been created again meanwhile, for which no further event arrives.
        if let Err(error) = unwatched.and_then(|()| self.found(store, key.0, key.1)) {
            tracing::warn!(device = ?key, %error, "xenstore");
        }
    }

    /// Waits for running tasks, and stops all devices.
    fn leave(&mut self) {
        let running = self.devices.values().filter(|watched| watched.busy).count();
        for _ in 0..running {
            let Ok(ended) = self.ended.recv() else { break };
            self.ended(None, ended);
        }
        let all: Vec<_> = self
            .devices
            .iter_mut()
            .filter_map(|(key, watched)| Some((*key, watched.device.take()?, watched.phase)))
            .collect();
        let stopping = all.len();
        for (key, device, phase) in all {
            self.begin(key, device, phase, Task::Stop);
        }
        for _ in 0..stopping {
            if self.ended.recv().is_err() {
                break;
            }
        }
    }
}

/// Waits for xenstore or a wakeup, at most for `pause`.
fn wait(store: Option<&mut Xenstore>, wakeup: &EventFd, pause: Option<Duration>) {
    let wakeup = PollFd::from_borrowed_fd(wakeup.as_fd(), PollFlags::IN);
    let mut ready = vec![wakeup];
    if let Some(store) = &store {
        ready.push(PollFd::from_borrowed_fd(store.descriptor(), PollFlags::IN));
    }
    let timeout = pause.and_then(|pause| rustix::time::Timespec::try_from(pause).ok());
    // An interrupted wait only returns early.
    let _ = rustix::event::poll(&mut ready, timeout.as_ref());
}

/// Returns the token of the watch of a frontend.
fn token((front, devid): (DomainId, u32)) -> String {
    format!("{}/{devid}", front.0)
}

fn place_of(token: &str) -> Option<(DomainId, u32)> {
    let (front, devid) = token.split_once('/')?;
    Some((DomainId(front.parse().ok()?), devid.parse().ok()?))
}
