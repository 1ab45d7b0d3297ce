//! A frontend for tests of hostile or broken guests: any bytes in a ring, any index, any grants, any state at any time.
//! It checks nothing and does not close the connection.

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

/// The frontend's end of a ring, and its pages.
pub struct RawRing {
    /// The ring's pages. The header is in the first one.
    pub pages: SharedPages,
    /// The ring's event channel.
    pub port: EventPort,
    /// The frontend's end.
    pub front: FrontRing,
}

impl RawRing {
    /// Creates a ring of `pages` pages, granted to `backend`.
    ///
    /// # Errors
    /// If Xen fails a request, or a ring cannot have this number of pages.
    pub fn new(xen: &dyn Xen, backend: DomainId, pages: u32, abi: Abi) -> Result<RawRing, DriverError> {
        let pages = xen.share(backend, pages, true)?;
        let ring = BlkifRing::resolve(&pages.memory, GuestAddress(0), pages.refs.len() as u32, abi)?;
        Ok(RawRing { front: FrontRing::init(ring), port: xen.alloc_unbound(backend)?, pages })
    }

    /// Adds a request, publishes it, and always sends an event. Returns false if the ring was full.
    pub fn send(&mut self, request: &BlkifRequest) -> bool {
        self.send_raw(&RawRequest::encode(self.front.abi(), request))
    }

    /// As [`send`](Self::send), with any bytes.
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

    /// Writes anywhere in the ring's pages, for example to the header or to a taken entry.
    pub fn overwrite(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.pages.refs.len() as u64 * u64::from(PAGE_BYTES), "outside of the ring");
        self.pages.memory.write(GuestAddress(at), bytes).expect("the ring's pages are mapped");
    }

    /// Waits up to `limit` for a response.
    ///
    /// # Errors
    /// If the backend claims more responses than there were requests.
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

    /// Waits up to `limit` for an event. Returns true if one came.
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

/// A frontend's directory, with unrestricted access.
pub struct RawFrontend {
    xenbus: XenbusDevice,
    store: Xenstore,
    path: String,
}

impl RawFrontend {
    /// Waits until the toolstack has created the frontend's directory. `limit`: for each step of the backend.
    ///
    /// # Errors
    /// If it does not, or xenstore fails a request.
    pub fn open(xen: &dyn Xen, path: &str, limit: Duration) -> Result<RawFrontend, DriverError> {
        let mut bus = XenbusDevice::open(xen, path, limit, limit)?;
        bus.disable_close();
        Ok(RawFrontend { xenbus: bus, store: xen.store()?, path: path.to_owned() })
    }

    /// Returns the backend's domain.
    pub fn backend(&self) -> DomainId {
        self.xenbus.backend()
    }

    /// Returns the backend's directory.
    pub fn backend_path(&self) -> &str {
        self.xenbus.backend_path()
    }

    /// Returns the connection to xenstore.
    pub fn store(&mut self) -> &mut Xenstore {
        &mut self.store
    }

    /// Goes to state 1 (Initialising) and waits until the backend is in InitWait, as a correct frontend does.
    ///
    /// # Errors
    /// If it does not get there in time.
    pub fn initialise(&mut self) -> Result<(), DriverError> {
        self.xenbus.initialise()
    }

    /// Returns the keys that a correct frontend writes for these rings.
    pub fn ring_keys(abi: Abi, persistent: bool, rings: &[&RawRing]) -> Vec<(String, String)> {
        let ring = |ring: &&RawRing| RingEndpoint { refs: ring.pages.refs.clone(), port: ring.port.port };
        frontend_keys(abi, persistent, &rings.iter().map(ring).collect::<Vec<_>>())
    }

    /// Replaces the ring keys in xenstore with `entries`, and waits until the backend is connected.
    ///
    /// # Errors
    /// If it does not connect.
    pub fn connect(&mut self, entries: &[(String, String)]) -> Result<(), DriverError> {
        self.xenbus.connect(entries)?;
        self.xenbus.set_state(XenbusState::Connected)
    }

    /// Writes a key of the frontend's directory.
    ///
    /// # Errors
    /// If xenstore fails a request.
    pub fn write(&mut self, key: &str, value: &str) -> Result<(), DriverError> {
        Ok(self.store.write(&format!("{}/{key}", self.path), value)?)
    }

    /// Removes a key of the frontend's directory.
    ///
    /// # Errors
    /// If xenstore fails a request.
    pub fn remove(&mut self, key: &str) -> Result<(), DriverError> {
        Ok(self.store.remove(&format!("{}/{key}", self.path))?)
    }

    /// Writes the frontend's state.
    ///
    /// # Errors
    /// If xenstore fails a request.
    pub fn set_state(&mut self, state: XenbusState) -> Result<(), DriverError> {
        self.write(keys::STATE, &state.to_string())
    }

    /// Reads the backend's state.
    ///
    /// # Errors
    /// If xenstore fails a request.
    pub fn backend_state(&mut self) -> Result<XenbusState, DriverError> {
        self.xenbus.backend_state()
    }

    /// Waits until the backend is in one of the `wanted` states.
    ///
    /// # Errors
    /// If it is not in time.
    pub fn wait(&mut self, wanted: &[XenbusState]) -> Result<XenbusState, DriverError> {
        self.xenbus.wait_state("get there", wanted)
    }

    /// Reads the device's properties.
    ///
    /// # Errors
    /// If they are invalid.
    pub fn info(&mut self) -> Result<BlkfrontInfo, DriverError> {
        let offered = self.xenbus.read_keys(&BackendOffer::KEYS)?;
        let found: XenstoreValues = self.xenbus.read_keys(&BlkfrontInfo::KEYS)?;
        BlkfrontInfo::parse(&found, &BackendOffer::parse(&offered)?.accepted())
    }
}
