//! The thread that waits for frontends, for all devices of the process that have none.
//!
//! A device is watched for one event at a time: [`Registration::watch`] allows the next one. So a device with a control
//! thread, which polls the socket itself, costs nothing here.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::thread::spawn;
use mqblk_engine::EventFd;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

/// The events of one turn.
const BATCH: usize = 64;
/// The key of the thread's own eventfd.
const OWN_KEY: u64 = 0;
/// The pause after a failure that has no known end.
const FAILURE_PAUSE: Duration = Duration::from_millis(100);

/// Locked while the thread is started.
static CURRENT: RankedMutex<Weak<EventLoop>> = RankedMutex::new(LockRank::EventLoop, Weak::new());

/// A device that is watched.
pub(crate) trait WatchedDevice: Send + Sync {
    /// Called when a frontend may have arrived. Returns when to call this again without an event; `None`: the device
    /// [watches](Registration::watch) for the next frontend, or needs none. Never blocks.
    fn frontend_arrives(&self) -> Option<Instant>;
}

/// The thread and its watched devices. Ends with the last reference.
pub(crate) struct EventLoop {
    state: Arc<LoopState>,
    thread: Option<JoinHandle<()>>,
}

struct LoopState {
    epoll: OwnedFd,
    wakeup: EventFd,
    stopped: AtomicBool,
    devices: RankedMutex<Devices>,
}

#[derive(Default)]
struct Devices {
    by_key: HashMap<u64, Arc<dyn WatchedDevice>>,
    last_key: u64,
}

/// A device's place in the event loop. It is not watched before [`watch`](Self::watch), and not after this is dropped.
pub(crate) struct Registration {
    events: Arc<EventLoop>,
    key: u64,
    listener: Arc<UnixListener>,
}

impl EventLoop {
    /// Returns the event loop of the process. Starts its thread, if there is none.
    ///
    /// # Errors
    /// When the host refuses a descriptor or the thread.
    pub(crate) fn of_this_process() -> io::Result<Arc<EventLoop>> {
        let mut current = CURRENT.lock();
        if let Some(running) = current.upgrade() {
            return Ok(running);
        }
        let started = Arc::new(EventLoop::start()?);
        *current = Arc::downgrade(&started);
        Ok(started)
    }

    fn start() -> io::Result<EventLoop> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wakeup = EventFd::new()?;
        epoll::add(&epoll, &wakeup, epoll::EventData::new_u64(OWN_KEY), epoll::EventFlags::IN)?;
        let state = Arc::new(LoopState {
            epoll,
            wakeup,
            stopped: AtomicBool::new(false),
            devices: RankedMutex::new(LockRank::WatchedDevices, Devices::default()),
        });
        let of_thread = Arc::clone(&state);
        let thread = spawn("listener", move || of_thread.run())?;
        Ok(EventLoop { state, thread: Some(thread) })
    }

    /// Adds a device, not watched yet. Its listening socket must not block.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn register(
        self: &Arc<Self>,
        listener: Arc<UnixListener>,
        device: Arc<dyn WatchedDevice>,
    ) -> io::Result<Registration> {
        let mut devices = self.state.devices.lock();
        devices.last_key += 1;
        let key = devices.last_key;
        let nothing = epoll::EventFlags::ONESHOT;
        epoll::add(&self.state.epoll, &*listener, epoll::EventData::new_u64(key), nothing)?;
        devices.by_key.insert(key, device);
        Ok(Registration { events: Arc::clone(self), key, listener })
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        self.state.wakeup.signal();
        // A device may have had the last reference, on the thread itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Registration {
    /// Watches for the next frontend.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn watch(&self) -> io::Result<()> {
        self.events.state.watch(self.key, &self.listener)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let state = &self.events.state;
        // The listener may stay open in another process, and would still be reported here.
        let _ = epoll::delete(&state.epoll, &*self.listener);
        let device = state.devices.lock().by_key.remove(&self.key);
        // Outside of the lock: it may be the last reference.
        drop(device);
    }
}

impl LoopState {
    fn watch(&self, key: u64, listener: &UnixListener) -> io::Result<()> {
        let next = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        Ok(epoll::modify(&self.epoll, listener, epoll::EventData::new_u64(key), next)?)
    }

    fn run(&self) {
        let mut retries: BTreeSet<(Instant, u64)> = BTreeSet::new();
        let mut events: Vec<epoll::Event> = Vec::with_capacity(BATCH);
        while !self.stopped.load(Ordering::SeqCst) {
            let left = retries.first().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            // Rounded up by the system call.
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("frontends are not waited for, which is a bug: {error}");
                    std::thread::sleep(FAILURE_PAUSE);
                }
            }
            for event in &events {
                match event.data.u64() {
                    OWN_KEY => _ = self.wakeup.take(),
                    key => self.arrives(key, &mut retries),
                }
            }
            let now = Instant::now();
            while let Some((_, key)) = retries.first().copied().filter(|(at, _)| *at <= now) {
                retries.pop_first();
                self.arrives(key, &mut retries);
            }
        }
    }

    fn arrives(&self, key: u64, retries: &mut BTreeSet<(Instant, u64)>) {
        let Some(device) = self.devices.lock().by_key.get(&key).cloned() else { return };
        let retry = catch_unwind(AssertUnwindSafe(|| device.frontend_arrives())).unwrap_or_else(|_| {
            tracing::error!("the thread of all listening sockets panicked, which is a bug: a frontend waits");
            Some(Instant::now() + FAILURE_PAUSE)
        });
        retries.extend(retry.map(|at| (at, key)));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Only a failing test waits that long.
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);

    /// Reports each event, and returns the configured time.
    struct ToldDevice {
        told: Mutex<Sender<()>>,
        retry: Mutex<Option<Duration>>,
    }

    impl WatchedDevice for ToldDevice {
        fn frontend_arrives(&self) -> Option<Instant> {
            let retry = self.retry.lock().unwrap().take();
            self.told.lock().unwrap().send(()).unwrap();
            if retry == Some(Duration::MAX) {
                panic!("as the test wants it");
            }
            retry.map(|after| Instant::now() + after)
        }
    }

    fn device(events: &Arc<EventLoop>, path: &std::path::Path) -> (Arc<ToldDevice>, Registration, Receiver<()>) {
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (told, events_of_device) = channel();
        let device = Arc::new(ToldDevice { told: Mutex::new(told), retry: Mutex::default() });
        let registration = events.register(Arc::new(listener), Arc::clone(&device) as _).unwrap();
        (device, registration, events_of_device)
    }

    #[test]
    fn a_device_is_told_once_for_each_time_that_it_watches() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("first"), folder.path().join("second"));
        let events = Arc::new(EventLoop::start().unwrap());
        let (device, registration, told) = device(&events, &first);
        let _frontends: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(&first).unwrap()).collect();
        assert!(told.recv_timeout(SHORT).is_err(), "it does not watch yet");
        for _ in 0..2 {
            registration.watch().unwrap();
            told.recv_timeout(LONG).unwrap();
            assert!(told.recv_timeout(SHORT).is_err(), "frontends are there, and it watches for none");
        }
        // Tried again without an event, also after a panic.
        for retry in [SHORT, Duration::MAX] {
            *device.retry.lock().unwrap() = Some(retry);
            registration.watch().unwrap();
            told.recv_timeout(LONG).unwrap();
            told.recv_timeout(LONG).unwrap();
            assert!(told.recv_timeout(SHORT).is_err());
        }
        // Another one is notified meanwhile.
        let (_other, of_second, second_told) = super::tests::device(&events, &second);
        *device.retry.lock().unwrap() = Some(LONG);
        registration.watch().unwrap();
        told.recv_timeout(LONG).unwrap();
        of_second.watch().unwrap();
        let _frontend = UnixStream::connect(&second).unwrap();
        second_told.recv_timeout(LONG).unwrap();
        // A duplicate of the listener, as another process has it, would still be reported.
        let _elsewhere = registration.listener.try_clone().unwrap();
        registration.watch().unwrap();
        told.recv_timeout(LONG).unwrap();
        registration.watch().unwrap();
        told.recv_timeout(LONG).unwrap();
        drop(registration);
        // The loop's thread holds a reference while it notifies the device, and briefly afterwards.
        let until = Instant::now() + LONG;
        while Arc::strong_count(&device) > 1 {
            assert!(Instant::now() < until, "the event loop keeps a device that is gone");
            std::thread::yield_now();
        }
        let _frontend = UnixStream::connect(&first).unwrap();
        assert!(told.recv_timeout(SHORT).is_err(), "it is gone");
    }
}
