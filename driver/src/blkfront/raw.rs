//! A frontend that does whatever a test wants: any bytes in a ring, any index, any grants, any state at any time. It checks nothing
//! and says no goodbye.

use std::time::Duration;

use mqblk_memory::{DomainId, GuestAddress, PAGE_BYTES};
use mqblk_ring::blkif::{Abi, BackendError, BlkifRequest, BlkifResponse, BlkifRing, FrontRing, RawRequest};
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::{XenbusState, keys};
use mqblk_xen::{EventPort, SharedPages, Xen};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::keys::{BackendOffer, BlkfrontInfo, RingEndpoint, XenstoreValues, frontend_keys};
use super::xenbus::XenbusDevice;
use crate::DriverError;

/// One end of a ring, and the pages that it lies in.
pub struct RawRing {
    /// Its pages; the header is in the first one.
    pub pages: SharedPages,
    /// Its event channel.
    pub port: EventPort,
    /// The frontend's end.
    pub front: FrontRing,
}

impl RawRing {
    /// A fresh ring of `pages` pages that `backend` may use.
    ///
    /// # Errors
    /// When Xen refuses, or no ring has so many pages.
    pub fn new(xen: &dyn Xen, backend: DomainId, pages: u32, abi: Abi) -> Result<RawRing, DriverError> {
        let pages = xen.share(backend, pages, true)?;
        let ring = BlkifRing::resolve(&pages.memory, GuestAddress(0), pages.refs.len() as u32, abi)?;
        Ok(RawRing { front: FrontRing::init(ring), port: xen.alloc_unbound(backend)?, pages })
    }

    /// Puts a request on, makes it visible, and sends an event whether one is wanted or not. Whether there was room.
    pub fn send(&mut self, request: &BlkifRequest) -> bool {
        self.send_raw(&RawRequest::encode(self.front.abi(), request))
    }

    /// The same with any bytes.
    pub fn send_raw(&mut self, request: &RawRequest) -> bool {
        let put = self.front.put(request);
        let _ = self.front.publish();
        self.notify();
        put
    }

    /// Sends an event.
    pub fn notify(&self) {
        self.port.channel.notify();
    }

    /// Writes anywhere into the ring's pages: the header, an entry that was taken already.
    pub fn overwrite(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.pages.refs.len() as u64 * u64::from(PAGE_BYTES), "outside of the ring");
        self.pages.memory.write(GuestAddress(at), bytes).expect("the ring's pages are mapped");
    }

    /// Waits for a response, for at most `limit`; `None`: none came.
    ///
    /// # Errors
    /// When the backend claims more responses than there were requests.
    pub fn receive(&mut self, limit: Duration) -> Result<Option<BlkifResponse>, BackendError> {
        let deadline = std::time::Instant::now() + limit;
        loop {
            if self.front.poll_responses()? > 0 || self.front.arm(1)? > 0 {
                return Ok(self.front.take());
            }
            let rest = deadline.saturating_duration_since(std::time::Instant::now());
            if rest.is_zero() || !self.sleep(rest) {
                return Ok(None);
            }
        }
    }

    /// Waits for an event, for at most `limit`. Whether one came.
    pub fn sleep(&self, limit: Duration) -> bool {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut polled = [PollFd::new(&self.port.descriptor, PollFlags::IN)];
        let came = poll(&mut polled, Some(&limit)).is_ok_and(|count| count > 0);
        if came {
            self.port.channel.take();
            self.port.channel.unmask();
        }
        came
    }
}

/// A frontend's directory, and nothing that keeps it in order.
pub struct RawFrontend {
    xenbus: XenbusDevice,
    store: Xenstore,
    path: String,
}

impl RawFrontend {
    /// Waits for the toolstack to make the frontend's directory. `limit`: for each step of the backend.
    ///
    /// # Errors
    /// When it does not, or xenstore refuses.
    pub fn open(xen: &dyn Xen, path: &str, limit: Duration) -> Result<RawFrontend, DriverError> {
        let mut bus = XenbusDevice::open(xen, path, limit, limit)?;
        bus.disable_close();
        Ok(RawFrontend { xenbus: bus, store: xen.store()?, path: path.to_owned() })
    }

    /// The backend's domain.
    pub fn backend(&self) -> DomainId {
        self.xenbus.backend()
    }

    /// The backend's directory.
    pub fn backend_path(&self) -> &str {
        self.xenbus.backend_path()
    }

    /// The connection to xenstore.
    pub fn store(&mut self) -> &mut Xenstore {
        &mut self.store
    }

    /// Goes to state 1 and waits until the backend waits, as a frontend in order does.
    ///
    /// # Errors
    /// When it does not.
    pub fn initialise(&mut self) -> Result<(), DriverError> {
        self.xenbus.initialise()
    }

    /// What a frontend in order tells of these rings.
    pub fn ring_keys(abi: Abi, persistent: bool, rings: &[&RawRing]) -> Vec<(String, String)> {
        let ring = |ring: &&RawRing| RingEndpoint { refs: ring.pages.refs.clone(), port: ring.port.port };
        frontend_keys(abi, persistent, &rings.iter().map(ring).collect::<Vec<_>>())
    }

    /// Tells the backend these, in place of what was told before, and waits until it is connected.
    ///
    /// # Errors
    /// When it does not connect.
    pub fn connect(&mut self, told: &[(String, String)]) -> Result<(), DriverError> {
        self.xenbus.connect(told)?;
        self.xenbus.set_state(XenbusState::Connected)
    }

    /// Writes a key of the own directory.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn write(&mut self, key: &str, value: &str) -> Result<(), DriverError> {
        Ok(self.store.write(&format!("{}/{key}", self.path), value)?)
    }

    /// Removes a key of the own directory.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn remove(&mut self, key: &str) -> Result<(), DriverError> {
        Ok(self.store.remove(&format!("{}/{key}", self.path))?)
    }

    /// Says that it is in a state.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn set_state(&mut self, state: XenbusState) -> Result<(), DriverError> {
        self.write(keys::STATE, &state.to_string())
    }

    /// The backend's state.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn backend_state(&mut self) -> Result<XenbusState, DriverError> {
        self.xenbus.backend_state()
    }

    /// Waits until the backend is in one of these states.
    ///
    /// # Errors
    /// When it is not in time.
    pub fn wait(&mut self, wanted: &[XenbusState]) -> Result<XenbusState, DriverError> {
        self.xenbus.wait_state("get there", wanted)
    }

    /// What the backend says of the disk.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn info(&mut self) -> Result<BlkfrontInfo, DriverError> {
        let offered = self.xenbus.read_keys(&BackendOffer::KEYS)?;
        let found: XenstoreValues = self.xenbus.read_keys(&BlkfrontInfo::KEYS)?;
        BlkfrontInfo::parse(&found, &BackendOffer::parse(&offered)?.accepted())
    }
}
