//! The handshake of states in xenstore, as far as both ends of a device take part in it. Source: Xen's `public/io/xenbus.h`, and
//! the order in which Linux's `xen-blkfront` goes through the states.

use std::time::{Duration, Instant};

use mqblk_memory::DomainId;
use mqblk_xen::Xen;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{XenbusState, keys, parse_number};

use super::keys::{Keys, is_left_over};
use crate::DriverError;

/// What events of the back-end's state are told apart by.
const STATE_TOKEN: &str = "state";
/// The same for the own directory.
const OWN_TOKEN: &str = "own";
/// Longest part of a back-end's message that is passed on.
const MESSAGE: usize = 200;

/// Both directories of a device, from its frontend's side.
#[derive(Debug)]
pub(super) struct Bus {
    store: Xenstore,
    front: String,
    back: String,
    backend: DomainId,
    /// How long each step of the back-end may take.
    limit: Duration,
    /// The frontend's state, as last written here.
    state: XenbusState,
    /// It says that it is closed when it is dropped.
    polite: bool,
}

impl Bus {
    /// Waits until the toolstack has made the frontend's directory `front`.
    pub(super) fn open(xen: &dyn Xen, front: &str, patience: Duration, limit: Duration) -> Result<Bus, DriverError> {
        let mut store = xen.store()?;
        let key = format!("{front}/{}", keys::BACKEND);
        store.watch(&key, OWN_TOKEN)?;
        let deadline = Instant::now() + patience;
        let back = loop {
            match store.read(&key)? {
                Some(back) if !back.is_empty() => break back,
                _ if Instant::now() >= deadline => return Err(DriverError::NoDevice(key)),
                _ => drop(store.next_event(Some(deadline.saturating_duration_since(Instant::now())))?),
            }
        };
        store.unwatch(&key, OWN_TOKEN)?;
        let id = store.read(&format!("{front}/{}", keys::BACKEND_ID))?;
        let id = id.ok_or(DriverError::MissingKey(keys::BACKEND_ID))?;
        let backend = DomainId(parse_number(keys::BACKEND_ID, &id, u16::MAX.into())? as u16);
        store.watch(&format!("{back}/{}", keys::STATE), STATE_TOKEN)?;
        Ok(Bus { store, front: front.to_owned(), back, backend, limit, state: XenbusState::Unknown, polite: true })
    }

    /// From now on it ends without a word, like a frontend that is killed.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn be_silent(&mut self) {
        self.polite = false;
    }

    /// The back-end's domain.
    pub(super) fn backend(&self) -> DomainId {
        self.backend
    }

    /// The back-end's directory.
    pub(super) fn back(&self) -> &str {
        &self.back
    }

    fn state_of(&mut self, directory: &str) -> Result<XenbusState, DriverError> {
        Ok(read_state(&mut self.store, &format!("{directory}/{}", keys::STATE))?)
    }

    /// The back-end's state.
    pub(super) fn back_state(&mut self) -> Result<XenbusState, DriverError> {
        let back = self.back.clone();
        self.state_of(&back)
    }

    pub(super) fn set_state(&mut self, state: XenbusState) -> Result<(), DriverError> {
        self.store.write(&format!("{}/{}", self.front, keys::STATE), &state.to_string())?;
        self.state = state;
        Ok(())
    }

    /// What of `names` the back-end has written.
    pub(super) fn keys(&mut self, names: &[&'static str]) -> Result<Keys, DriverError> {
        let mut found = Keys::default();
        for name in names {
            if let Some(value) = self.store.read(&format!("{}/{name}", self.back))? {
                found.0.insert(name, value);
            }
        }
        Ok(found)
    }

    /// The next event of the back-end's state within `limit`; whether one came.
    pub(super) fn event(&mut self, limit: Option<Duration>) -> Result<bool, DriverError> {
        Ok(self.store.next_event(limit)?.is_some())
    }

    /// Waits until the back-end is in one of these states.
    pub(super) fn wait(&mut self, step: &'static str, wanted: &[XenbusState]) -> Result<XenbusState, DriverError> {
        let deadline = Instant::now() + self.limit;
        loop {
            let found = self.back_state()?;
            if wanted.contains(&found) {
                return Ok(found);
            }
            if matches!(found, XenbusState::Closing | XenbusState::Closed) && !wanted.contains(&XenbusState::Closed) {
                return Err(self.gave_up(step, found));
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(DriverError::BackendState { step, found, why: "no change in time".to_owned() });
            }
            self.event(Some(rest))?;
        }
    }

    /// The back-end has given the device up; it may have told why.
    fn gave_up(&mut self, step: &'static str, found: XenbusState) -> DriverError {
        let own = self.back.find("/backend/").map(|at| self.back.split_at(at));
        let told = own.and_then(|(domain, rest)| self.store.read(&format!("{domain}/error{rest}/error")).ok()?);
        let why = told.map_or_else(|| "it does not say why".into(), |text| text.chars().take(MESSAGE).collect());
        DriverError::BackendState { step, found, why }
    }

    /// Brings both ends to where a connection starts, from wherever an earlier one has left them.
    pub(super) fn begin(&mut self) -> Result<(), DriverError> {
        use XenbusState::{Closed, Closing, Connected, InitWait, Initialised, Initialising, Unknown};
        let front = self.front.clone();
        let own = self.state_of(&front)?;
        if own == Initialising {
            self.state = Initialising;
            // A back-end that has closed before sees that somebody is here again only by a change.
            if self.back_state()? == Closed {
                self.set_state(Initialising)?;
            }
        } else {
            if matches!(self.back_state()?, Connected | Initialised) && !matches!(own, Closed | Unknown) {
                self.set_state(Closing)?;
                self.wait("let go of an earlier connection", &[Closing, Closed, InitWait])?;
            }
            if !matches!(self.back_state()?, InitWait | Closed) {
                // A state that is written over before the back-end has read it was never there for it.
                if own != Closed {
                    self.set_state(Closed)?;
                }
                self.wait("let go of an earlier connection", &[Closed, InitWait])?;
            }
            self.set_state(Initialising)?;
        }
        // A moment ago it may still have been closed.
        let deadline = Instant::now() + self.limit;
        loop {
            match self.wait("wait for its frontend", &[InitWait, Closed])? {
                InitWait => return Ok(()),
                found if Instant::now() >= deadline => return Err(self.gave_up("wait for its frontend", found)),
                _ => drop(self.event(Some(deadline.saturating_duration_since(Instant::now())))?),
            }
        }
    }

    /// Tells the back-end of the rings, all at once, and waits until it is connected to them.
    pub(super) fn connect(&mut self, told: &[(String, String)]) -> Result<(), DriverError> {
        let front = &self.front;
        self.store.transaction(|transaction| {
            let present = transaction.list(front)?.unwrap_or_default();
            for name in present.iter().filter(|name| is_left_over(name)) {
                transaction.remove(&format!("{front}/{name}"))?;
            }
            for (key, value) in told {
                transaction.write(&format!("{front}/{key}"), value)?;
            }
            let state = format!("{front}/{}", keys::STATE);
            transaction.write(&state, &XenbusState::Initialised.to_string())
        })?;
        self.state = XenbusState::Initialised;
        self.wait("connect to the rings", &[XenbusState::Connected]).map(|_| ())
    }

    /// Ends the connection: when this returns without an error the back-end uses nothing of ours any more.
    pub(super) fn close(&mut self) -> Result<(), DriverError> {
        self.set_state(XenbusState::Closing)?;
        // What the toolstack has removed is not there any more.
        let gone = [XenbusState::Closing, XenbusState::Closed, XenbusState::Unknown];
        self.wait("close", &gone)?;
        self.set_state(XenbusState::Closed)?;
        self.wait("close", &gone[1..]).map(|_| ())
    }

    /// A new watch on the back-end's state, for another thread.
    pub(super) fn lifeline(&self, xen: &dyn Xen) -> Result<Lifeline, DriverError> {
        let mut store = xen.store()?;
        let key = format!("{}/{}", self.back, keys::STATE);
        store.watch(&key, STATE_TOKEN)?;
        Ok(Lifeline { store, key, gone: false })
    }
}

/// The state at `key`; unknown where it cannot be read. What has been removed is not for all domains to know.
fn read_state(store: &mut Xenstore, key: &str) -> Result<XenbusState, XenstoreError> {
    match store.read(key) {
        Ok(value) => Ok(XenbusState::parse(value.as_deref())),
        Err(error) if error.errno() == "EACCES" => Ok(XenbusState::Unknown),
        Err(error) => Err(error),
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        if self.polite && matches!(self.state, XenbusState::Initialised | XenbusState::Connected | XenbusState::Closing)
        {
            // Nobody is left to tell that it fails.
            let _ = self.set_state(XenbusState::Closed);
        }
    }
}

/// Sees the back-end's end.
#[derive(Debug)]
pub struct Lifeline {
    store: Xenstore,
    key: String,
    gone: bool,
}

impl Lifeline {
    /// Waits until the back-end lets go of the device or is removed, for at most `limit`. Whether it has.
    pub fn wait_gone(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.gone {
            match self.look(deadline.saturating_duration_since(Instant::now())) {
                // The others mean nothing to a frontend that is connected.
                Ok(Some(state)) => {
                    self.gone = matches!(state, XenbusState::Closing | XenbusState::Closed | XenbusState::Unknown)
                }
                Ok(None) => return false,
                // Without xenstore nobody can say; what is in flight is told by the rings.
                Err(error) => {
                    tracing::debug!(%error, "no more is known of the back-end's state");
                    std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
                    return false;
                }
            }
        }
        true
    }

    fn look(&mut self, limit: Duration) -> Result<Option<XenbusState>, XenstoreError> {
        match self.store.next_event(Some(limit))? {
            Some(_) => read_state(&mut self.store, &self.key).map(Some),
            None => Ok(None),
        }
    }
}
