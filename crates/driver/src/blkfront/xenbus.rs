//! The xenbus state handshake between frontend and backend. Source: Xen's `public/io/xenbus.h`, with the states in the
//! order of Linux's `xen-blkfront`.

use std::time::{Duration, Instant};

use mqblk_memory::DomainId;
use mqblk_xen::Xen;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{XenbusState, keys, parse_number};

use super::keys::{XenstoreValues, is_stale};
use crate::DriverError;

/// Watch token of the backend's state.
const BACKEND_TOKEN: &str = "state";
/// Watch token of the frontend's directory.
const FRONTEND_TOKEN: &str = "own";
/// Largest number of characters of a backend's error that are passed on.
const MAX_ERROR_CHARS: usize = 200;

/// A device's directories in xenstore, from the frontend's side.
#[derive(Debug)]
pub(super) struct XenbusDevice {
    store: Xenstore,
    frontend_path: String,
    back_path: String,
    backend: DomainId,
    /// Longest duration of a step of the backend.
    step_timeout: Duration,
    /// The frontend's state as last written.
    state: XenbusState,
    /// True if the state becomes Closed on drop.
    closes_on_drop: bool,
}

impl XenbusDevice {
    /// Waits up to `connect_timeout` until the toolstack has created the frontend's directory `front`.
    pub(super) fn open(
        xen: &dyn Xen,
        front: &str,
        connect_timeout: Duration,
        limit: Duration,
    ) -> Result<XenbusDevice, DriverError> {
        let mut store = xen.store()?;
        let key = format!("{front}/{}", keys::BACKEND);
        store.watch(&key, FRONTEND_TOKEN)?;
        let deadline = Instant::now() + connect_timeout;
        let back = loop {
            match store.read(&key)? {
                Some(back) if !back.is_empty() => break back,
                _ if Instant::now() >= deadline => return Err(DriverError::NoDevice(key)),
                _ => drop(store.next_event(Some(deadline.saturating_duration_since(Instant::now())))?),
            }
        };
        store.unwatch(&key, FRONTEND_TOKEN)?;
        let id = store.read(&format!("{front}/{}", keys::BACKEND_ID))?;
        let id = id.ok_or(DriverError::MissingKey(keys::BACKEND_ID))?;
        let backend = DomainId(parse_number(keys::BACKEND_ID, &id, u16::MAX.into())? as u16);
        store.watch(&format!("{back}/{}", keys::STATE), BACKEND_TOKEN)?;
        Ok(XenbusDevice {
            store,
            frontend_path: front.to_owned(),
            back_path: back,
            backend,
            step_timeout: limit,
            state: XenbusState::Unknown,
            closes_on_drop: true,
        })
    }

    /// Disables the state change on drop, to simulate a frontend that is killed.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn disable_close(&mut self) {
        self.closes_on_drop = false;
    }

    /// Returns the backend's domain.
    pub(super) fn backend(&self) -> DomainId {
        self.backend
    }

    /// Returns the backend's directory.
    pub(super) fn backend_path(&self) -> &str {
        &self.back_path
    }

    fn read_state_of(&mut self, directory: &str) -> Result<XenbusState, DriverError> {
        Ok(read_state(&mut self.store, &format!("{directory}/{}", keys::STATE))?)
    }

    /// Reads the backend's state.
    pub(super) fn backend_state(&mut self) -> Result<XenbusState, DriverError> {
        let back = self.back_path.clone();
        self.read_state_of(&back)
    }

    pub(super) fn set_state(&mut self, state: XenbusState) -> Result<(), DriverError> {
        self.store.write(&format!("{}/{}", self.frontend_path, keys::STATE), &state.to_string())?;
        self.state = state;
        Ok(())
    }

    /// Reads those of `names` that the backend has written.
    pub(super) fn read_keys(&mut self, names: &[&'static str]) -> Result<XenstoreValues, DriverError> {
        let mut found = XenstoreValues::default();
        for name in names {
            if let Some(value) = self.store.read(&format!("{}/{name}", self.back_path))? {
                found.0.insert(name, value);
            }
        }
        Ok(found)
    }

    /// Waits up to `limit` for a change of the backend's state. Returns true if there was one.
    pub(super) fn wait_event(&mut self, limit: Option<Duration>) -> Result<bool, DriverError> {
        Ok(self.store.next_event(limit)?.is_some())
    }

    /// Waits until the backend is in one of the `wanted` states.
    pub(super) fn wait_state(
        &mut self,
        step: &'static str,
        wanted: &[XenbusState],
    ) -> Result<XenbusState, DriverError> {
        let deadline = Instant::now() + self.step_timeout;
        loop {
            let found = self.backend_state()?;
            if wanted.contains(&found) {
                return Ok(found);
            }
            if matches!(found, XenbusState::Closing | XenbusState::Closed) && !wanted.contains(&XenbusState::Closed) {
                return Err(self.closed_error(step, found));
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(DriverError::BackendState { step, found, why: "no change in time".to_owned() });
            }
            self.wait_event(Some(rest))?;
        }
    }

    /// Returns the error of a backend that has closed the device, with the reason from its error node if it can be
    /// read.
    fn closed_error(&mut self, step: &'static str, found: XenbusState) -> DriverError {
        let own = self.back_path.find("/backend/").map(|at| self.back_path.split_at(at));
        let error = own.and_then(|(domain, rest)| self.store.read(&format!("{domain}/error{rest}/error")).ok()?);
        let why =
            error.map_or_else(|| "it does not say why".into(), |text| text.chars().take(MAX_ERROR_CHARS).collect());
        DriverError::BackendState { step, found, why }
    }

    /// Brings both ends to the initial states, from any states of an earlier connection.
    pub(super) fn initialise(&mut self) -> Result<(), DriverError> {
        use XenbusState::{Closed, Closing, Connected, InitWait, Initialised, Initialising, Unknown};
        let front = self.frontend_path.clone();
        let own = self.read_state_of(&front)?;
        if own == Initialising {
            self.state = Initialising;
            // A backend that is closed notices a new frontend only by a change.
            if self.backend_state()? == Closed {
                self.set_state(Initialising)?;
            }
        } else {
            if matches!(self.backend_state()?, Connected | Initialised) && !matches!(own, Closed | Unknown) {
                self.set_state(Closing)?;
                self.wait_state("let go of an earlier connection", &[Closing, Closed, InitWait])?;
            }
            if !matches!(self.backend_state()?, InitWait | Closed) {
                // A state that is overwritten before the backend reads it is lost.
                if own != Closed {
                    self.set_state(Closed)?;
                }
                self.wait_state("let go of an earlier connection", &[Closed, InitWait])?;
            }
            self.set_state(Initialising)?;
        }
        // The backend may not have left Closed yet.
        let deadline = Instant::now() + self.step_timeout;
        loop {
            match self.wait_state("wait for its frontend", &[InitWait, Closed])? {
                InitWait => return Ok(()),
                found if Instant::now() >= deadline => return Err(self.closed_error("wait for its frontend", found)),
                _ => drop(self.wait_event(Some(deadline.saturating_duration_since(Instant::now())))?),
            }
        }
    }

    /// Writes the `entries` of the rings in one transaction, and waits until the backend is connected.
    pub(super) fn connect(&mut self, entries: &[(String, String)]) -> Result<(), DriverError> {
        let front = &self.frontend_path;
        self.store.transaction(|transaction| {
            let present = transaction.list(front)?.unwrap_or_default();
            for name in present.iter().filter(|name| is_stale(name)) {
                transaction.remove(&format!("{front}/{name}"))?;
            }
            for (key, value) in entries {
                transaction.write(&format!("{front}/{key}"), value)?;
            }
            let state = format!("{front}/{}", keys::STATE);
            transaction.write(&state, &XenbusState::Initialised.to_string())
        })?;
        self.state = XenbusState::Initialised;
        self.wait_state("connect to the rings", &[XenbusState::Connected]).map(|_| ())
    }

    /// Ends the connection. On success the backend does not use any of the frontend's pages any more.
    pub(super) fn close(&mut self) -> Result<(), DriverError> {
        self.set_state(XenbusState::Closing)?;
        // Unknown: the toolstack has removed the directory.
        let gone = [XenbusState::Closing, XenbusState::Closed, XenbusState::Unknown];
        self.wait_state("close", &gone)?;
        self.set_state(XenbusState::Closed)?;
        self.wait_state("close", &gone[1..]).map(|_| ())
    }

    /// Returns a monitor of the backend's state, for another thread.
    pub(super) fn backend_monitor(&self, xen: &dyn Xen) -> Result<BackendMonitor, DriverError> {
        let mut store = xen.store()?;
        let key = format!("{}/{}", self.back_path, keys::STATE);
        store.watch(&key, BACKEND_TOKEN)?;
        Ok(BackendMonitor { store, key, gone: false })
    }
}

/// Reads the state at `key`. Unknown if it cannot be read: a domain without permission cannot see that a key is
/// removed.
fn read_state(store: &mut Xenstore, key: &str) -> Result<XenbusState, XenstoreError> {
    match store.read(key) {
        Ok(value) => Ok(XenbusState::parse(value.as_deref())),
        Err(error) if error.errno() == "EACCES" => Ok(XenbusState::Unknown),
        Err(error) => Err(error),
    }
}

impl Drop for XenbusDevice {
    fn drop(&mut self) {
        if self.closes_on_drop
            && matches!(self.state, XenbusState::Initialised | XenbusState::Connected | XenbusState::Closing)
        {
            // An error cannot be reported from here.
            let _ = self.set_state(XenbusState::Closed);
        }
    }
}

/// Detects the end of the backend.
#[derive(Debug)]
pub struct BackendMonitor {
    store: Xenstore,
    key: String,
    gone: bool,
}

impl BackendMonitor {
    /// Waits up to `limit` until the backend releases the device or is removed. Returns true if it has.
    pub fn wait_gone(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.gone {
            match self.next_state(deadline.saturating_duration_since(Instant::now())) {
                // A connected frontend ignores the other states.
                Ok(Some(state)) => {
                    self.gone = matches!(state, XenbusState::Closing | XenbusState::Closed | XenbusState::Unknown)
                }
                Ok(None) => return false,
                // Without xenstore the state is unknown. Requests in flight are completed by the rings.
                Err(error) => {
                    tracing::debug!(%error, "no more is known of the backend's state");
                    std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
                    return false;
                }
            }
        }
        true
    }

    fn next_state(&mut self, limit: Duration) -> Result<Option<XenbusState>, XenstoreError> {
        match self.store.next_event(Some(limit))? {
            Some(_) => read_state(&mut self.store, &self.key).map(Some),
            None => Ok(None),
        }
    }
}
