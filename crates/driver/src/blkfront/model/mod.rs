//! A small backend for tests, in this process: one device, with a disk in memory, and one thread. It can inject faults.
//! It copies all data, and so does not use persistent grants.

mod ring;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use mqblk_core::lock::lock;
use mqblk_core::{ByteLen, units::SECTOR_BYTES};
use mqblk_memory::{DomainId, GrantRef};
use mqblk_ring::blkif::Abi;
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::{XenbusState, keys};
use mqblk_xen::{Port, Xen};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::toolstack::Vbd;
use ring::ModelRing;

/// Longest wait for an event before the model checks everything again.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Options of the model.
#[derive(Clone, Debug)]
pub struct BlkbackBehaviour {
    /// Bytes of the disk.
    pub size: usize,
    /// Largest number of rings.
    pub queues: u16,
    /// Largest order of a ring.
    pub ring_order: u8,
    /// Largest number of segments of an indirect request.
    pub max_indirect_segments: u16,
    /// True if the disk is read-only.
    pub read_only: bool,
    /// Keys with other values than usual. `None`: the key is not written.
    pub keys: Vec<(&'static str, Option<&'static str>)>,
    /// The fault to inject.
    pub fault: BlkbackFault,
}

/// A fault that the model injects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlkbackFault {
    /// None.
    #[default]
    None,
    /// Closes the device instead of going to this state, and writes an error.
    CloseAt(XenbusState),
    /// Never goes to this state.
    StopBefore(XenbusState),
    /// Goes to this state after this many requests.
    StateAfter(u64, XenbusState),
    /// Completes no requests after this many.
    StallAfter(u64),
    /// Flips a bit of the data of every write from this request on.
    CorruptFrom(u64),
    /// Completes with BLKIF_RSP_ERROR from this request on.
    FailFrom(u64),
    /// Responds to this request with an id that is not in flight.
    WrongIdAt(u64),
    /// Responds to this request twice.
    DuplicateAt(u64),
    /// Responds to this request with another operation.
    WrongOperationAt(u64),
    /// Responds to this request with an undefined status.
    WrongStatusAt(u64),
}

impl Default for BlkbackBehaviour {
    fn default() -> Self {
        BlkbackBehaviour {
            size: 1 << 20,
            queues: 4,
            ring_order: 4,
            max_indirect_segments: 256,
            read_only: false,
            keys: vec![],
            fault: BlkbackFault::None,
        }
    }
}

/// State shared by the model's thread and the test.
struct ModelState {
    behaviour: BlkbackBehaviour,
    disk: Mutex<Vec<u8>>,
    requests: AtomicU64,
    per_queue: Vec<AtomicU64>,
    indirect: AtomicU64,
    flushes: AtomicU64,
    connections: AtomicU64,
    stop: AtomicBool,
}

impl ModelState {
    fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        lock(&self.disk)
    }
}

/// The running backend. Stopped on drop, without a state change.
pub struct BlkbackModel {
    shared: Arc<ModelState>,
    xen: Arc<dyn Xen>,
    vbd: Vbd,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl BlkbackModel {
    /// Serves the device, which the toolstack has created. `xen` is the backend's domain.
    ///
    /// # Panics
    /// If a resource cannot be allocated.
    pub fn start(xen: &Arc<dyn Xen>, vbd: &Vbd, behaviour: BlkbackBehaviour) -> BlkbackModel {
        let shared = Arc::new(ModelState {
            disk: Mutex::new(vec![0; behaviour.size]),
            per_queue: (0..behaviour.queues).map(|_| AtomicU64::new(0)).collect(),
            behaviour,
            requests: AtomicU64::new(0),
            indirect: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"));
        let mut back = ModelThread::new(Arc::clone(xen), vbd.clone(), Arc::clone(&shared));
        let woken = Arc::clone(&wake);
        let thread = std::thread::spawn(move || back.run(&woken));
        BlkbackModel { shared, xen: Arc::clone(xen), vbd: vbd.clone(), wake, thread: Some(thread) }
    }

    /// Returns the disk's content.
    pub fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        self.shared.disk()
    }

    /// Returns the number of requests of queue `index`.
    pub fn requests(&self, index: usize) -> u64 {
        self.shared.per_queue[index].load(Ordering::Relaxed)
    }

    /// Returns the number of indirect requests.
    pub fn indirect(&self) -> u64 {
        self.shared.indirect.load(Ordering::Relaxed)
    }

    /// Returns the number of completed flushes.
    pub fn flushes(&self) -> u64 {
        self.shared.flushes.load(Ordering::Relaxed)
    }

    /// Returns how often a frontend has connected.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Writes a key of the backend's directory.
    ///
    /// # Panics
    /// If xenstore fails a request.
    pub fn write(&self, key: &str, value: &str) {
        let mut store = self.xen.store().expect("xenstore");
        store.write(&format!("{}/{key}", self.vbd.backend_path()), value).expect("a key of the backend");
    }

    /// Resizes the disk, and notifies the frontend.
    pub fn resize(&self, size: usize) {
        self.disk().resize(size, 0);
        self.write(keys::SECTORS, &ByteLen(size as u64).sectors().0.to_string());
        self.write(keys::STATE, &XenbusState::Connected.to_string());
    }
}

impl Drop for BlkbackModel {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// State of the model's thread.
struct ModelThread {
    xen: Arc<dyn Xen>,
    vbd: Vbd,
    store: Xenstore,
    shared: Arc<ModelState>,
    state: XenbusState,
    rings: Vec<ModelRing>,
}

impl ModelThread {
    fn new(xen: Arc<dyn Xen>, vbd: Vbd, shared: Arc<ModelState>) -> ModelThread {
        let store = xen.store().expect("xenstore");
        ModelThread { xen, vbd, store, shared, state: XenbusState::Unknown, rings: vec![] }
    }

    fn run(&mut self, wake: &OwnedFd) {
        let state = format!("{}/{}", self.vbd.frontend_path(), keys::STATE);
        self.store.watch(&state, "front").expect("a watch");
        self.wait_for_frontend();
        while !self.shared.stop.load(Ordering::Acquire) {
            {
                let own = [wake.as_fd(), self.store.descriptor()];
                let all = own.into_iter().chain(self.rings.iter().map(|ring| ring.descriptor()));
                let mut polled: Vec<PollFd<'_>> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
                let _ = poll(&mut polled, Some(&TICK));
            }
            while self.store.next_event(Some(std::time::Duration::ZERO)).expect("xenstore").is_some() {
                let found = self.store.read(&state).expect("the frontend's state");
                self.frontend_changed(XenbusState::parse(found.as_deref()));
            }
            for (index, ring) in self.rings.iter_mut().enumerate() {
                ring.serve(&self.shared, index);
            }
            if let BlkbackFault::StateAfter(count, state) = self.shared.behaviour.fault
                && self.state == XenbusState::Connected
                && self.shared.requests.load(Ordering::Relaxed) >= count
            {
                self.set_state(state);
            }
        }
    }

    fn set_state(&mut self, state: XenbusState) {
        let mut state = state;
        match self.shared.behaviour.fault {
            BlkbackFault::CloseAt(at) if at == state => {
                let path = self.vbd.backend_path();
                let (domain, rest) = path.split_at(path.find("/backend/").expect("a backend's path"));
                let error = format!("{domain}/error{rest}/error");
                self.store.write(&error, "5 injected by the model").expect("an error's node");
                state = XenbusState::Closing;
            }
            BlkbackFault::StopBefore(at) if at == state => return,
            _ => {}
        }
        self.state = state;
        self.write(keys::STATE, &state.to_string());
    }

    fn write(&mut self, key: &'static str, value: &str) {
        let own = self.shared.behaviour.keys.iter().find(|(own, _)| *own == key);
        let value = own.map_or(Some(value), |(_, value)| *value);
        if let Some(value) = value {
            let path = format!("{}/{key}", self.vbd.backend_path());
            self.store.write(&path, value).expect("a key of the backend");
        }
    }

    fn wait_for_frontend(&mut self) {
        let BlkbackBehaviour { queues, ring_order, max_indirect_segments: indirect, .. } = self.shared.behaviour;
        self.write(keys::MULTI_QUEUE_MAX_QUEUES, &queues.to_string());
        self.write(keys::MAX_RING_PAGE_ORDER, &ring_order.to_string());
        self.write(keys::FEATURE_MAX_INDIRECT_SEGMENTS, &indirect.to_string());
        self.set_state(XenbusState::InitWait);
    }

    fn frontend_changed(&mut self, front: XenbusState) {
        match (front, self.state) {
            (XenbusState::Initialised | XenbusState::Connected, XenbusState::InitWait) => {
                self.rings = self.connect_rings();
                self.shared.connections.fetch_add(1, Ordering::Relaxed);
                self.write_properties();
                self.set_state(XenbusState::Connected);
            }
            (XenbusState::Closing, XenbusState::Connected) => self.set_state(XenbusState::Closing),
            (XenbusState::Closed, XenbusState::InitWait | XenbusState::Connected | XenbusState::Closing) => {
                self.rings.clear();
                self.set_state(XenbusState::Closed);
            }
            (XenbusState::Initialising, XenbusState::Closed) => self.wait_for_frontend(),
            _ => {}
        }
    }

    fn write_properties(&mut self) {
        let size = self.shared.disk().len() as u64;
        self.write(keys::SECTORS, &ByteLen(size).sectors().0.to_string());
        self.write(keys::SECTOR_SIZE, &SECTOR_BYTES.to_string());
        self.write(keys::INFO, if self.shared.behaviour.read_only { "4" } else { "0" });
        for key in [keys::FEATURE_FLUSH_CACHE, keys::FEATURE_BARRIER, keys::FEATURE_DISCARD, keys::FEATURE_PERSISTENT] {
            self.write(key, "1");
        }
    }

    fn connect_rings(&mut self) -> Vec<ModelRing> {
        let front = self.vbd.frontend_path();
        let mut number = |key: &str| -> Option<u32> {
            let found = self.store.read(&format!("{front}/{key}")).expect("xenstore");
            found.map(|value| value.parse().expect("a number of the frontend's"))
        };
        let order = number(keys::RING_PAGE_ORDER);
        let queues = number(keys::MULTI_QUEUE_NUM_QUEUES);
        let mut endpoints: Vec<(Vec<GrantRef>, Port)> = vec![];
        for queue in 0..queues.unwrap_or(1) {
            let own =
                |key: &str| if queues.is_some() { format!("{}/{key}", keys::queue(queue)) } else { key.to_owned() };
            let refs = match order {
                None => vec![number(&own(keys::RING_REF)).expect("a ring's page")],
                Some(order) => {
                    (0..1 << order).map(|page| number(&own(&keys::ring_ref(page))).expect("a ring's page")).collect()
                }
            };
            let port = number(&own(keys::EVENT_CHANNEL)).expect("a ring's port");
            endpoints.push((refs.into_iter().map(GrantRef).collect(), Port(port)));
        }
        let protocol = self.store.read(&format!("{front}/{}", keys::PROTOCOL)).expect("xenstore");
        let abi = Abi::from_protocol(&protocol.expect("a protocol")).expect("a protocol that is known");
        endpoints
            .iter()
            .map(|(refs, port)| ModelRing::connect(&*self.xen, self.frontend_domain(), refs, *port, abi))
            .collect()
    }

    fn frontend_domain(&self) -> DomainId {
        self.vbd.frontend
    }
}
