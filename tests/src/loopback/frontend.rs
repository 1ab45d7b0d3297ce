//! A hostile frontend: its device, its rings, and its xenstore keys.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use mqblk_driver::blkfront::raw::{RawFrontend, RawRing};
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_memory::{DomainId, GuestAddress};
use mqblk_ring::blkif::{Abi, BlkifRequest, BlkifResponse, RawRequest, status};
use mqblk_xen::Xen;
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::{self, XenbusState};

use super::pages::GrantedPages;
use super::request::response_operation;
use super::{QUIET_TIME, TIMEOUT, wait_for};

/// Options of a frontend's connection.
#[derive(Clone, Copy, Debug)]
pub struct FrontendConfig {
    /// Layout of its requests.
    pub abi: Abi,
    /// Announces persistent grants.
    pub persistent: bool,
    /// Number of rings.
    pub rings: u32,
    /// log2 of the pages of a ring.
    pub ring_page_order: u8,
}

impl Default for FrontendConfig {
    fn default() -> FrontendConfig {
        FrontendConfig { abi: Abi::X86_64, persistent: true, rings: 1, ring_page_order: 0 }
    }
}

/// A ring, and the number of responses taken.
pub struct LoopbackRing {
    /// Its pages, its event channel, its indices.
    pub raw: RawRing,
    taken: u32,
}

/// Bytes before a ring's first entry.
pub const RING_HEADER_BYTES: u64 = 64;

impl LoopbackRing {
    /// Returns the offset of the next request's entry, when all before it have responses.
    fn next_entry(&self) -> u64 {
        let front = &self.raw.front;
        RING_HEADER_BYTES + u64::from(self.taken & (front.size() - 1)) * u64::from(front.abi().entry_bytes())
    }

    /// Reads bytes of the ring's pages.
    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.raw.pages.memory.read(GuestAddress(at), &mut bytes).expect("the ring's pages are mapped");
        bytes
    }

    /// Reads a field of the header.
    pub fn read_field(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.read(at, 4).try_into().expect("4 bytes"))
    }

    /// Puts a request on the ring, and always notifies the backend.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn send(&mut self, request: &BlkifRequest) -> Result<()> {
        ensure!(self.raw.send(request), "the ring is full");
        Ok(())
    }

    /// Waits for the next response.
    ///
    /// # Errors
    /// When none comes, or the backend's index is wrong.
    pub fn receive(&mut self) -> Result<BlkifResponse> {
        let response = self.raw.receive(TIMEOUT.time())?.context("no response came")?;
        self.taken = self.taken.wrapping_add(1);
        Ok(response)
    }

    /// Polls for the next response.
    ///
    /// # Errors
    /// When none comes, or the backend's index is wrong.
    pub fn poll(&mut self) -> Result<BlkifResponse> {
        let response = wait_for("a response", || {
            self.raw.front.poll_responses()?;
            Ok(self.raw.front.take())
        })?;
        self.taken = self.taken.wrapping_add(1);
        Ok(response)
    }

    /// Checks that no response comes.
    ///
    /// # Errors
    /// When one does.
    pub fn must_have_no_response(&mut self) -> Result<()> {
        let found = self.raw.receive(QUIET_TIME)?;
        ensure!(found.is_none(), "found {found:?}, expected no response");
        Ok(())
    }

    /// Runs a request on an idle ring, and checks every byte of the response's entry. Returns the status.
    ///
    /// # Errors
    /// When none comes or one of its bytes is wrong.
    pub fn run(&mut self, request: &BlkifRequest) -> Result<i16> {
        let abi = self.raw.front.abi();
        self.run_raw(&RawRequest::encode(abi, request), response_operation(request))
    }

    /// Runs an entry of any bytes. `operation` is that of the response.
    ///
    /// # Errors
    /// When none comes or one of its bytes is wrong.
    pub fn run_raw(&mut self, raw: &RawRequest, operation: u8) -> Result<i16> {
        let (abi, at) = (self.raw.front.abi(), self.next_entry());
        let entry = abi.entry_bytes() as usize;
        let id = raw.decode(abi).id;
        ensure!(self.raw.send_raw(raw), "the ring is full");
        let response = self.receive()?;
        ensure!(
            (response.id, response.operation) == (id, operation),
            "found {response:?}, expected id {id} and operation {operation}"
        );
        let known = [status::OKAY, status::ERROR, status::NOT_SUPPORTED];
        ensure!(known.contains(&response.status), "found {response:?}, expected one of the statuses {known:?}");
        // The padding is zero, and the rest of the entry is unchanged: no memory of the backend leaks.
        let [low, high] = response.status.to_le_bytes();
        let mut expected = raw.bytes()[..entry].to_vec();
        expected[..8].copy_from_slice(&id.to_le_bytes());
        expected[8..12].copy_from_slice(&[operation, 0, low, high]);
        if abi != Abi::X86_32 {
            expected[12..16].fill(0);
        }
        let found = self.read(at, entry);
        ensure!(found == expected, "the entry of the response: found {found:x?}, expected {expected:x?}");
        Ok(response.status)
    }
}

/// A device with its frontend and its toolstack. Dropped without [`detach`](Self::detach), it is removed by force.
pub struct LoopbackFrontend {
    /// The device that the toolstack has created.
    pub vbd: Vbd,
    /// The frontend's keys.
    pub front: RawFrontend,
    /// Its rings.
    pub rings: Vec<LoopbackRing>,
    xen: Arc<dyn Xen>,
    /// The toolstack's xenstore connection.
    pub toolstack_store: Xenstore,
    removed: bool,
}

impl LoopbackFrontend {
    /// Creates a device through the toolstack, and waits for its backend's InitWait.
    ///
    /// # Errors
    /// When it does not.
    pub fn create(front: &Arc<dyn Xen>, tool: &dyn Xen, vbd: Vbd) -> Result<LoopbackFrontend> {
        let mut tool = tool.store()?;
        vbd.create(&mut tool)?;
        let mut raw = RawFrontend::open(&**front, &vbd.frontend_path(), TIMEOUT.time())?;
        let begun = raw.initialise().with_context(|| format!("device {}", vbd.backend_path()));
        let guest = LoopbackFrontend {
            vbd,
            front: raw,
            rings: vec![],
            xen: Arc::clone(front),
            toolstack_store: tool,
            removed: false,
        };
        begun.map(|()| guest)
    }

    /// Returns the Xen interface of the frontend's domain.
    pub fn xen(&self) -> &Arc<dyn Xen> {
        &self.xen
    }

    /// Grants new pages to the backend.
    ///
    /// # Errors
    /// When Xen refuses.
    pub fn pages(&self, count: u32) -> Result<GrantedPages> {
        GrantedPages::new(&*self.xen, self.vbd.backend, count, true)
    }

    /// Grants new pages to the domain `with`, read-only unless `writable`.
    ///
    /// # Errors
    /// When Xen refuses.
    pub fn pages_for(&self, with: DomainId, count: u32, writable: bool) -> Result<GrantedPages> {
        GrantedPages::new(&*self.xen, with, count, writable)
    }

    /// Replaces the rings. Returns the keys that a correct frontend writes for them.
    ///
    /// # Errors
    /// When Xen refuses.
    pub fn make_rings(&mut self, config: FrontendConfig) -> Result<Vec<(String, String)>> {
        self.rings.clear();
        for _ in 0..config.rings {
            let raw = RawRing::new(&*self.xen, self.vbd.backend, 1 << config.ring_page_order, config.abi)?;
            self.rings.push(LoopbackRing { raw, taken: 0 });
        }
        let rings: Vec<_> = self.rings.iter().map(|ring| &ring.raw).collect();
        Ok(RawFrontend::ring_keys(config.abi, config.persistent, &rings))
    }

    /// Connects with new rings.
    ///
    /// # Errors
    /// When the backend does not.
    pub fn connect(&mut self, config: FrontendConfig) -> Result<()> {
        let keys = self.make_rings(config)?;
        self.front.connect(&keys).with_context(|| format!("connecting {config:?} to {}", self.vbd.backend_path()))
    }

    /// Writes the keys one by one, without a transaction, then Initialised. Returns the backend's next state: it
    /// connects, or fails the device.
    ///
    /// # Errors
    /// When it does neither.
    pub fn write_keys(&mut self, keys: &[(String, String)]) -> Result<XenbusState> {
        for (key, value) in keys {
            self.front.write(key, value)?;
        }
        self.front.set_state(XenbusState::Initialised)?;
        wait_for("the backend connects, or does not", || {
            let state = self.backend_state()?;
            Ok((!matches!(state, XenbusState::InitWait | XenbusState::Initialised)).then_some(state))
        })
    }

    /// Closes as a correct frontend does, and waits until the backend has released everything.
    ///
    /// # Errors
    /// When the backend does not follow.
    pub fn close(&mut self) -> Result<()> {
        self.front.set_state(XenbusState::Closing)?;
        self.front.wait(&[XenbusState::Closing, XenbusState::Closed]).context("closing")?;
        self.front.set_state(XenbusState::Closed)?;
        self.front.wait(&[XenbusState::Closed]).context("closed")?;
        self.rings.clear();
        Ok(())
    }

    /// Restarts after [`close`](Self::close) or an error, and connects with new rings.
    ///
    /// # Errors
    /// When the backend does not follow.
    pub fn reconnect(&mut self, config: FrontendConfig) -> Result<()> {
        self.front.initialise().context("restarting")?;
        self.connect(config)
    }

    /// Returns the backend's current state.
    ///
    /// # Errors
    /// When xenstore fails.
    pub fn backend_state(&mut self) -> Result<XenbusState> {
        let path = format!("{}/state", self.vbd.backend_path());
        Ok(XenbusState::parse(self.toolstack_store.read(&path)?.as_deref()))
    }

    /// Returns the backend's error node.
    ///
    /// # Errors
    /// When xenstore fails.
    pub fn backend_error(&mut self) -> Result<Option<String>> {
        let Vbd { backend, type_name, frontend: front, devid, .. } = &self.vbd;
        let path = vbd::backend_error_path(*backend, type_name, *front, *devid);
        Ok(self.toolstack_store.read(&path)?)
    }

    /// Waits until the backend has failed the device with an error that contains `words`.
    ///
    /// # Errors
    /// When it has not, or with another error.
    pub fn must_fail(&mut self, words: &str) -> Result<()> {
        let state = wait_for("the backend gives the device up", || {
            let state = self.backend_state()?;
            Ok((!matches!(state, XenbusState::InitWait | XenbusState::Initialised)).then_some(state))
        })?;
        ensure!(
            matches!(state, XenbusState::Closing | XenbusState::Closed),
            "the backend is in state {state}, expected 5"
        );
        let error = self.backend_error()?.unwrap_or_default();
        ensure!(error.contains(words), "error node: found {error:?}, expected {words:?} in it");
        Ok(())
    }

    /// Removes the device through the toolstack; the frontend follows.
    ///
    /// # Errors
    /// When the backend does not.
    pub fn detach(mut self) -> Result<()> {
        self.vbd.detach(&mut self.toolstack_store)?;
        self.front.set_state(XenbusState::Closed)?;
        wait_for("the backend closes", || match self.backend_state()? {
            XenbusState::Closed | XenbusState::Unknown => Ok(Some(())),
            _ => Ok(None),
        })
        .context("detaching")?;
        self.remove()
    }

    /// Removes both directories through the toolstack, in any state.
    ///
    /// # Errors
    /// When xenstore fails, or a part of the device reappears.
    pub fn remove(&mut self) -> Result<()> {
        self.removed = true;
        self.vbd.remove(&mut self.toolstack_store)?;
        let Vbd { backend, type_name, frontend: front, devid, .. } = &self.vbd;
        let error = vbd::backend_error_path(*backend, type_name, *front, *devid);
        let node = error.trim_end_matches("/error");
        if self.toolstack_store.read(node)?.is_some() {
            self.toolstack_store.remove(node)?;
        }
        if let Some(state) = self.toolstack_store.read(&format!("{}/state", self.vbd.backend_path()))? {
            bail!("the backend's directory is there again, with state {state}");
        }
        Ok(())
    }
}

impl Drop for LoopbackFrontend {
    fn drop(&mut self) {
        if !self.removed {
            // The test has failed already, with an error.
            let _ = self.vbd.remove(&mut self.toolstack_store);
        }
    }
}
