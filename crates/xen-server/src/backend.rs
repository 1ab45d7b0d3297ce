//! The thread that watches xenstore for devices. It only observes and decides; slow work is done on a thread per
//! device.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mqblk_blkif::GrantBudget;
use mqblk_core::lock::RankedMutex;
use mqblk_core::thread::spawn;
use mqblk_core::{RateLimit, TokenBucket};
use mqblk_engine::{Engine, EventFd};
use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, BackendPath, keys};
use mqblk_xen::{Xen, XenError};
use rustix::event::{PollFd, PollFlags};

use crate::device::{BackendShared, Device, DeviceTask, TaskResult};
use crate::device_stats::DeviceStats;
use crate::journal_dir::JournalDir;
use crate::leave_state::{LEAVE_RETRY, LeaveState, WatchMode};
use crate::name::DeviceName;
use crate::observe::observe;
use crate::params::Params;
use crate::registry::DeviceRegistry;
use crate::resize_key::RESIZE_KEY;
use crate::state_machine::{DevicePhase, next_transition};
use crate::storage::Opener;

/// The default of [`BackendOptions::rate_limit`]. A device that starts and ends needs about ten checks; a flooding
/// guest gets 100 a second.
pub const DEVICE_CHECKS: RateLimit = RateLimit { burst: 200, per_second: 100 };
/// Maximum of devices. Only a toolstack creates devices.
const MAX_DEVICES: usize = 4096;
/// Maximum of events read before devices are checked.
const MAX_EVENTS: usize = 256;
/// Interval of attempts to reconnect to xenstore.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);
/// Time of the watcher for a stop, besides its waits for storage.
const STOP_SLACK: Duration = Duration::from_secs(5);
/// Interval at which idle rings release unused pages.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(1);
/// Token of the watch of the backend directory. Watches of frontends have their own tokens.
const BACKENDS_TOKEN: &str = "backends";
/// Token of the special watch for released domains.
const RELEASE_TOKEN: &str = "release";

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
    /// Directory of the journals. `None`: no journals; rings that were in use when the process was killed are resumed
    /// from their content.
    pub journal_dir: Option<PathBuf>,
    /// True if the backend serves every device of the type: no other process may do the same with this journal
    /// directory.
    pub exclusive: bool,
    /// Rate limit of the checks of one device.
    pub rate_limit: RateLimit,
    /// Longest wait of a stop for storage. Requests in flight after that get no response; with journals, the next
    /// process replays them.
    pub drain_timeout: Duration,
}

/// Error of starting a backend.
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
    pub(crate) shared: Arc<BackendShared>,
    stop: Arc<AtomicBool>,
    pub(crate) wakeup: EventFd,
    /// Disconnected when the watcher's thread has ended. `None` after the wait for it.
    thread: RankedMutex<Option<Receiver<()>>>,
}

impl Backend {
    /// Starts the watcher thread.
    ///
    /// # Errors
    /// [`BackendError`].
    pub fn start(xen: Arc<dyn Xen>, options: BackendOptions) -> Result<Backend, BackendError> {
        let mut watcher = Watcher::new(xen, options)?;
        let store = watcher.connect()?;
        let (end, ended) = channel();
        let (shared, stop, wakeup) = (Arc::clone(&watcher.shared), Arc::clone(&watcher.stop), watcher.wakeup.clone());
        spawn("xen-watch", move || {
            // Dropped at the end, also after a panic.
            let _end: Sender<()> = end;
            watcher.run(store);
        })?;
        Ok(Backend { shared, stop, wakeup, thread: RankedMutex::leaf(Some(ended)) })
    }

    /// Returns the devices with open disks, sorted by name.
    pub fn devices(&self) -> Vec<Arc<DeviceStats>> {
        self.shared.registry.list()
    }

    /// Returns the number of device checks so far, over all devices.
    pub fn device_checks(&self) -> u64 {
        self.shared.device_checks.load(Ordering::Relaxed)
    }

    /// Searches for devices that the opener has not accepted before. Does not wait.
    pub fn scan(&self) {
        self.shared.is_scan_due.store(true, Ordering::SeqCst);
        self.wakeup.signal();
    }

    /// Starts to detach all rings and to close the disks. Does not wait.
    pub fn begin_stop(&self) {
        self.shared.stop_deadline.get_or_init(|| Instant::now() + self.shared.drain_timeout);
        self.stop.store(true, Ordering::SeqCst);
        self.wakeup.signal();
    }

    /// Detaches all rings and closes the disks. Xenstore is unchanged: frontends notice nothing, and the next process
    /// resumes the rings. Requests that storage has not completed within the drain timeout are left to it; so are
    /// disks whose flush takes as long again.
    pub fn stop(&self) {
        let Some(ended) = self.thread.lock().take() else { return };
        self.begin_stop();
        let left = self.shared.stop_end().saturating_duration_since(Instant::now()) + STOP_SLACK;
        if ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("the thread that watches xenstore does not stop: it is left behind");
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A device, as the watcher thread tracks it.
pub(crate) struct WatchedDevice {
    pub(crate) name: DeviceName,
    backend_path: String,
    pub(crate) frontend_path: String,
    pub(crate) phase: DevicePhase,
    /// True if the device may have changed since its last check.
    dirty: bool,
    bucket: TokenBucket,
    /// True if the device's thread runs, and holds `device`.
    pub(crate) busy: bool,
    /// `None` while busy, and permanently after its thread has panicked: the state of its rings is unknown.
    pub(crate) device: Option<Device>,
    pub(crate) stats: Option<Arc<DeviceStats>>,
    /// As [`Device::is_journaled`] when its last task ended.
    pub(crate) was_journaled: bool,
    /// Set while another process has its lock, or another user its disk: the time of the next attempt, and the
    /// interval.
    pub(crate) retry: Option<(Instant, Duration)>,
    /// True if it stops, or has stopped.
    pub(crate) is_stopped: bool,
}

impl WatchedDevice {
    /// Returns true if it must be checked and can be.
    fn is_ready(&self, now: Instant) -> bool {
        self.dirty && self.device.is_some() && self.retry.is_none_or(|(at, _)| now >= at)
    }

    /// As [`Device::is_journaled`].
    pub(crate) fn is_journaled(&self, shared: &BackendShared) -> bool {
        self.device.as_ref().map_or(self.was_journaled, |device| device.is_journaled(shared))
    }
}

pub(crate) struct Watcher {
    pub(crate) shared: Arc<BackendShared>,
    type_name: String,
    /// Path of the watched directory.
    backends_dir: String,
    rate_limit: RateLimit,
    pub(crate) devices: BTreeMap<(DomainId, u32), WatchedDevice>,
    pub(crate) results: Receiver<TaskResult>,
    pub(crate) result_sender: Sender<TaskResult>,
    /// True if only one process serves the type.
    exclusive: bool,
    /// Lock of the device type, if it is [exclusive](Self::exclusive), held until the devices are left.
    lock: Option<File>,
    pub(crate) wakeup: EventFd,
    stop: Arc<AtomicBool>,
    last_reclaim: Instant,
}

impl Watcher {
    /// Creates a watcher without devices.
    pub(crate) fn new(xen: Arc<dyn Xen>, options: BackendOptions) -> Result<Watcher, BackendError> {
        let BackendOptions {
            type_name,
            engine,
            opener,
            budget,
            journal_dir: journals,
            exclusive: alone,
            rate_limit: pace,
            drain_timeout,
        } = options;
        let journals = journals
            .map(|path| JournalDir::open_or_create(&path).map_err(|source| BackendError::Journals { path, source }));
        let journals = journals.transpose()?;
        let lock = journals.as_ref().filter(|_| alone).map(|journals| journals.lock(&type_name)).transpose();
        let lock = lock.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => BackendError::Busy(type_name.clone()),
            _ => BackendError::Os(error),
        })?;
        let shared = Arc::new(BackendShared {
            xen,
            engine,
            opener,
            budget,
            journal_dir: journals,
            registry: DeviceRegistry::default(),
            device_checks: AtomicU64::new(0),
            is_scan_due: AtomicBool::new(false),
            drain_timeout,
            stop_deadline: OnceLock::new(),
            leaving: LeaveState::default(),
        });
        let (wakeup, stop) = (EventFd::new()?, Arc::new(AtomicBool::new(false)));
        let folder = vbd::backends_path(shared.xen.domain(), &type_name);
        let (sender, ended) = channel();
        Ok(Watcher {
            shared,
            type_name,
            backends_dir: folder,
            rate_limit: pace,
            devices: BTreeMap::new(),
            results: ended,
            result_sender: sender,
            exclusive: alone && lock.is_some(),
            lock,
            wakeup,
            stop,
            last_reclaim: Instant::now(),
        })
    }

    /// Connects to xenstore and sets the watches, including those of watched devices.
    pub(crate) fn connect(&mut self) -> Result<Xenstore, BackendError> {
        let mut store = self.shared.xen.store()?;
        store.watch(&self.backends_dir, BACKENDS_TOKEN)?;
        // A driver domain may not set this watch; frontends that disappear are detected without it.
        if let Err(error) = store.watch("@releaseDomain", RELEASE_TOKEN) {
            tracing::debug!(%error, "domains that end are not watched for");
        }
        for (key, watched) in &mut self.devices {
            store.watch(&format!("{}/{}", watched.frontend_path, keys::STATE), &watch_token(*key))?;
            watched.dirty = true;
        }
        Ok(store)
    }

    fn run(&mut self, store: Xenstore) {
        let mut store = Some(store);
        while !self.stop.load(Ordering::SeqCst) {
            if catch_unwind(AssertUnwindSafe(|| self.watch(&mut store))).is_err() {
                // All devices depend on this thread. Its data of them may be wrong: it reads them again.
                tracing::error!("the thread that watches xenstore panicked, which is a bug: it connects again");
                store = None;
                wait(None, &self.wakeup, Some(RECONNECT_INTERVAL));
            }
        }
        self.stop_devices();
    }

    /// Connects if necessary, handles pending work, and waits.
    fn watch(&mut self, store: &mut Option<Xenstore>) {
        self.wakeup.take();
        while let Ok(ended) = self.results.try_recv() {
            self.finish_task(store.as_mut(), ended);
        }
        let mode = self.shared.leaving.mode();
        if mode != WatchMode::Serves {
            // Another process may serve the devices. Their changes are read again afterwards.
            (*store, self.lock) = (None, None);
            let is_waiting = self.leave_devices(mode);
            return wait(None, &self.wakeup, is_waiting.then_some(LEAVE_RETRY));
        }
        if !self.lock_type() {
            return wait(None, &self.wakeup, Some(RECONNECT_INTERVAL));
        }
        let Some(connected) = store else {
            *store = self.connect().inspect_err(|error| tracing::error!(%error, "xenstore")).ok();
            if store.is_none() {
                wait(None, &self.wakeup, Some(RECONNECT_INTERVAL));
            }
            return;
        };
        let is_due = self.shared.is_scan_due.swap(false, Ordering::SeqCst);
        let scanned = if is_due { self.scan(connected) } else { Ok(()) };
        if scanned.is_err() {
            self.shared.is_scan_due.store(true, Ordering::SeqCst);
        }
        match scanned.and_then(|()| self.turn(connected)) {
            Ok(pause) => wait(Some(connected), &self.wakeup, pause),
            Err(error) if error.is_lost() => {
                tracing::error!(%error, "the connection to xenstore is lost: rings continue to be served while it reconnects");
                *store = None;
            }
            Err(error) => {
                tracing::error!(%error, "xenstore");
                wait(Some(connected), &self.wakeup, Some(RECONNECT_INTERVAL));
            }
        }
    }

    /// Acquires the lock of the device type again. Returns false while another process has it.
    fn lock_type(&mut self) -> bool {
        let Some(journals) = self.shared.journal_dir.as_ref().filter(|_| self.exclusive && self.lock.is_none()) else {
            return true;
        };
        match journals.lock(&self.type_name) {
            Ok(lock) => self.lock = Some(lock),
            Err(error) => tracing::error!(r#type = self.type_name, "devices of the type are not served yet: {error}"),
        }
        self.lock.is_some()
    }

    /// Reads events and checks devices. Returns how long to wait for the next event; `None`: without a limit.
    pub(crate) fn turn(&mut self, store: &mut Xenstore) -> Result<Option<Duration>, XenstoreError> {
        // Events that arrive with a reply are queued in `store`, which does not make its descriptor readable.
        let mut again = true;
        for _ in 0..MAX_EVENTS {
            match store.next_event(Some(Duration::ZERO))? {
                Some(event) => self.handle_event(store, &event.path, &event.token)?,
                None => {
                    again = false;
                    break;
                }
            }
        }
        let now = Instant::now();
        let waiting = self.devices.values().filter(|watched| watched.dirty && watched.device.is_some());
        let waiting = waiting.filter_map(|watched| watched.retry.map(|(at, _)| at.saturating_duration_since(now)));
        let mut pause = waiting.filter(|wait| !wait.is_zero()).min();
        let keys_to_check: Vec<_> =
            self.devices.iter().filter(|(_, watched)| watched.is_ready(now)).map(|(key, _)| *key).collect();
        for key in keys_to_check {
            let Some(watched) = self.devices.get_mut(&key) else { continue };
            match watched.bucket.take(self.rate_limit, now) {
                Ok(()) => {
                    self.check_device(store, key)?;
                    again = true;
                }
                Err(wait) => pause = Some(pause.map_or(wait, |pause: Duration| pause.min(wait))),
            }
        }
        let reclaim = self.reclaim_idle(now);
        Ok(if again { Some(Duration::ZERO) } else { [pause, reclaim].into_iter().flatten().min() })
    }

    /// Lets idle rings release unused pages. Returns the time until the next call; `None` if no device has rings.
    fn reclaim_idle(&mut self, now: Instant) -> Option<Duration> {
        let mut stats = self.devices.values().filter_map(|watched| watched.stats.as_ref()).peekable();
        stats.peek()?;
        let elapsed = now.saturating_duration_since(self.last_reclaim);
        if elapsed < RECLAIM_INTERVAL {
            return Some(RECLAIM_INTERVAL - elapsed);
        }
        self.last_reclaim = now;
        stats.for_each(|stats| stats.reclaim());
        Some(RECLAIM_INTERVAL)
    }

    /// Handles a watch event: marks the devices that may have changed.
    fn handle_event(&mut self, store: &mut Xenstore, path: &str, token: &str) -> Result<(), XenstoreError> {
        if token == RELEASE_TOKEN {
            self.devices.values_mut().for_each(|watched| watched.dirty = true);
            return Ok(());
        }
        if token != BACKENDS_TOKEN {
            if let Some(watched) = parse_token(token).and_then(|key| self.devices.get_mut(&key)) {
                watched.dirty = true;
            }
            return Ok(());
        }
        match BackendPath::parse(path, &self.backends_dir) {
            Some(BackendPath { front, devid: Some(devid), key }) => {
                match self.devices.get_mut(&(front, devid)) {
                    // The other keys are mostly written by this backend.
                    Some(watched) => watched.dirty |= ["", keys::STATE, keys::ONLINE, RESIZE_KEY].contains(&key),
                    None => self.add_device(store, front, devid)?,
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
        for name in store.list(&self.backends_dir)?.unwrap_or_default() {
            if let Ok(front) = name.parse() {
                self.scan_domain(store, DomainId(front))?;
            }
        }
        Ok(())
    }

    fn scan_domain(&mut self, store: &mut Xenstore, front: DomainId) -> Result<(), XenstoreError> {
        let all = (front, 0)..=(front, u32::MAX);
        self.devices.range_mut(all).for_each(|(_, watched)| watched.dirty = true);
        for name in store.list(&format!("{}/{}", self.backends_dir, front.0))?.unwrap_or_default() {
            if let Ok(devid) = name.parse()
                && !self.devices.contains_key(&(front, devid))
            {
                self.add_device(store, front, devid)?;
            }
        }
        Ok(())
    }

    /// Adds a new device, if its directory is complete and the opener accepts it.
    pub(crate) fn add_device(
        &mut self,
        store: &mut Xenstore,
        front: DomainId,
        devid: u32,
    ) -> Result<(), XenstoreError> {
        let name = DeviceName { type_name: self.type_name.clone(), frontend_id: front, devid };
        let backend = vbd::backend_path(self.shared.xen.domain(), &self.type_name, front, devid);
        let mut read = |key: &str| store.read(&format!("{backend}/{key}"));
        let Some(text) = read(keys::STATE)?.and(read(keys::PARAMS)?) else { return Ok(()) };
        // Invalid params are reported later, in the device's `error` node.
        if let Ok(params) = Params::parse(&text)
            && !self.shared.opener.serves(&params)
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
        if let Err(error) = store.watch(&format!("{frontend}/{}", keys::STATE), &watch_token(key)) {
            tracing::warn!(device = %name, %error, "not served: its frontend cannot be watched");
            return if error.is_lost() { Err(error) } else { Ok(()) };
        }
        tracing::debug!(device = %name, frontend, "found");
        let device = Some(Device::new(&self.shared, name.clone(), frontend.clone(), text));
        let bucket = TokenBucket::new(self.rate_limit, Instant::now());
        let phase = DevicePhase::Discovered;
        let watched = WatchedDevice {
            name,
            backend_path: backend,
            frontend_path: frontend,
            phase,
            dirty: true,
            bucket,
            busy: false,
            device,
            stats: None,
            was_journaled: true,
            retry: None,
            is_stopped: false,
        };
        self.devices.insert(key, watched);
        Ok(())
    }

    /// Checks a device, and starts its next task.
    fn check_device(&mut self, store: &mut Xenstore, key: (DomainId, u32)) -> Result<(), XenstoreError> {
        let Some(watched) = self.devices.get_mut(&key) else { return Ok(()) };
        watched.dirty = false;
        self.shared.device_checks.fetch_add(1, Ordering::Relaxed);
        let observed = observe(store, &watched.backend_path, (key.0, &watched.frontend_path));
        watched.dirty |= observed.is_err();
        let (state, resize) = observed?;
        let task = match (next_transition(watched.phase, state), resize) {
            (Some(transition), _) => DeviceTask::Transition(transition),
            (None, Some(size)) if watched.phase.has_storage() => DeviceTask::Resize(size),
            (None, _) => return Ok(()),
        };
        // Checked again when the task has ended.
        watched.dirty = true;
        let phase = watched.phase;
        if let Some(device) = watched.device.take() {
            watched.busy = true;
            self.start_task(key, device, phase, task);
        }
        Ok(())
    }

    /// Returns true if a device must be checked.
    pub(crate) fn has_work(&self) -> bool {
        self.devices.values().any(|watched| watched.dirty && watched.device.is_some())
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
pub(crate) fn watch_token((front, devid): (DomainId, u32)) -> String {
    format!("{}/{devid}", front.0)
}

fn parse_token(token: &str) -> Option<(DomainId, u32)> {
    let (front, devid) = token.split_once('/')?;
    Some((DomainId(front.parse().ok()?), devid.parse().ok()?))
}
