//! Reservations of a logical unit by nexuses. RESERVE and RELEASE of SPC-2, persistent reservations of SPC-4 (section
//! 5.12).
//!
//! [`Reservations`] belongs to a logical unit; each nexus has a [`ReservationHandle`]. The access rights of a nexus are
//! computed on each change and stored in one byte of its own, so that READ and WRITE cost one relaxed load. `state`
//! implements the standard, without locks; `reserve_out` and `reserve_in` are PERSISTENT RESERVE OUT and IN; `stored`
//! is the state as text, which a [`ReservationStore`] holds if APTPL is set; `snapshot` moves with a migrating guest,
//! and `executed` serves the process after a killed one.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use mqblk_core::Wake;
use mqblk_core::lock::lock;

use crate::command::DataOut;
use crate::unit_attention::UnitAttentionQueue;

mod access;
mod error;
mod executed;
mod fields;
mod file_store;
mod nexus_name;
mod reserve_in;
mod reserve_out;
mod snapshot;
mod state;
mod store;
mod stored;
mod transport_id;

pub use access::{AccessClass, ReservationType};
pub use error::ReservationError;
pub use file_store::FileReservationStore;
pub use nexus_name::{MAX_NAME_LEN, NexusName};
pub use snapshot::{ReservationSnapshot, ValidatedReservations};
pub use store::{ReservationStore, Ticket};
pub use stored::RestoreError;
pub use transport_id::locally_assigned;

use access::AccessRights;
use fields::byte;
use reserve_out::{ReserveOutRequest, ServiceAction};
use state::{Effects, ReservationState};

/// Result of a PERSISTENT RESERVE OUT that was executed.
#[derive(Debug)]
pub struct ReserveOutResult {
    /// Resolved when the state is on stable storage; the command completes then. The state is changed even if it
    /// cannot be saved.
    pub saved: Option<Arc<Ticket>>,
    /// Other nexuses whose commands PREEMPT AND ABORT aborts before it completes.
    pub abort: Vec<NexusName>,
    /// Bytes of the parameter list.
    pub transferred: u64,
}

/// Reason why a nexus cannot be added.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LoginError {
    /// The name is in use.
    #[error("nexus {0}: the unit has a nexus of this name already")]
    DuplicateName(NexusName),
    /// The initiator port's address is that of another name.
    #[error("nexus {name}: its initiator port gets the same address as {other}; choose another name")]
    AddressCollision {
        /// The new nexus.
        name: NexusName,
        /// The nexus with that address.
        other: NexusName,
    },
    /// The name is empty or too long.
    #[error("nexus {0}: the initiator port's name must have 1 to {MAX_NAME_LEN} bytes")]
    InvalidName(NexusName),
}

/// Reservations of one logical unit.
pub struct Reservations {
    store: Option<Arc<dyn ReservationStore>>,
    inner: Mutex<Inner>,
}

struct Inner {
    state: ReservationState,
    nexuses: Vec<Arc<NexusEntry>>,
}

/// State of one nexus that its commands check.
#[derive(Debug)]
struct NexusEntry {
    name: NexusName,
    rights: AtomicU8,
    attentions: Arc<UnitAttentionQueue>,
}

impl fmt::Debug for Reservations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.lock();
        f.debug_struct("Reservations")
            .field("state", &inner.state)
            .field("seats", &inner.nexuses)
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Applies the effects of a change: the rights first, so that no unit attention precedes the change.
    fn apply_effects(&self, effects: &Effects) {
        for entry in &self.nexuses {
            entry.rights.store(self.state.rights(&entry.name).0, Ordering::Relaxed);
        }
        for (nexus, attention) in &effects.attentions {
            if let Some(entry) = self.nexuses.iter().find(|entry| entry.name == *nexus) {
                entry.attentions.raise(*attention);
            }
        }
    }

    fn execute(&mut self, from: &NexusName, request: ReserveOutRequest) -> Result<Effects, ReservationError> {
        let known: Vec<NexusName> = self.nexuses.iter().map(|entry| entry.name.clone()).collect();
        let (state, presented) = (&mut self.state, request.presented);
        match request.action {
            ServiceAction::Register(params) => state.register(from, &params, &known),
            ServiceAction::Reserve(kind) => state.reserve(from, presented, kind),
            ServiceAction::Release(kind) => state.release(from, presented, kind),
            ServiceAction::Clear => state.clear(from, presented),
            ServiceAction::Preempt { victim, kind, abort } => state.preempt(from, presented, victim, kind, abort),
            ServiceAction::RegisterAndMove(params) => state.register_and_move(from, presented, &params, &known),
        }
    }
}

impl Reservations {
    /// Returns an empty set. Without a store APTPL is rejected.
    pub fn new(store: Option<Arc<dyn ReservationStore>>) -> Arc<Reservations> {
        Reservations::with_state(ReservationState::default(), store)
    }

    /// Restores reservations from a store.
    ///
    /// # Errors
    /// If the text is not a saved state. It must then not be replaced by an empty state: the disk's users rely on their
    /// reservations.
    pub fn restore(saved: &[u8], store: Option<Arc<dyn ReservationStore>>) -> Result<Arc<Reservations>, RestoreError> {
        Ok(Reservations::with_state(stored::decode(saved)?, store))
    }

    fn with_state(state: ReservationState, store: Option<Arc<dyn ReservationStore>>) -> Arc<Reservations> {
        Arc::new(Reservations { store, inner: Mutex::new(Inner { state, nexuses: Vec::new() }) })
    }

    /// Adds a nexus, with the registration of its name. Unit attentions about reservations are raised in `attentions`.
    ///
    /// # Errors
    /// If the name or its address is in use, or the name is invalid.
    pub fn add_nexus(
        self: &Arc<Reservations>,
        name: NexusName,
        attentions: Arc<UnitAttentionQueue>,
    ) -> Result<ReservationHandle, LoginError> {
        if name.initiator.is_empty() || name.initiator.len() > MAX_NAME_LEN {
            return Err(LoginError::InvalidName(name));
        }
        let mut inner = self.lock();
        if inner.nexuses.iter().any(|entry| entry.name == name) {
            return Err(LoginError::DuplicateName(name));
        }
        let registered = inner.state.registrations.iter().map(|held| &held.nexus);
        let same_address = |other: &&NexusName| other.initiator != name.initiator && other.address() == name.address();
        if let Some(other) = inner.nexuses.iter().map(|entry| &entry.name).chain(registered).find(same_address) {
            return Err(LoginError::AddressCollision { other: other.clone(), name });
        }
        let rights = AtomicU8::new(inner.state.rights(&name).0);
        let entry = Arc::new(NexusEntry { name, rights, attentions });
        inner.nexuses.push(Arc::clone(&entry));
        Ok(ReservationHandle { reservations: Arc::clone(self), entry })
    }

    /// Handles a reset of the logical unit: RESERVE ends, persistent reservations stay (SPC-2 section 5.5.1, SPC-4
    /// section 5.12.5).
    pub fn reset(&self) {
        let mut inner = self.lock();
        inner.state.reserve_holder = None;
        inner.apply_effects(&Effects::default());
    }

    /// Ends the replay of commands that a previous process had in flight: from here on a conflict is real.
    pub fn end_replay(&self) {
        self.lock().state.executed.end_replay();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each action is complete or has no effect; it cannot panic half way.
        lock(&self.inner)
    }

    /// Ends a RESERVE of this nexus, and removes the nexus if `leaves`.
    fn nexus_lost(&self, name: &NexusName, leaves: bool) {
        let mut inner = self.lock();
        if inner.state.reserve_holder.as_ref() == Some(name) {
            inner.state.reserve_holder = None;
        }
        if leaves {
            inner.nexuses.retain(|entry| entry.name != *name);
        }
        inner.apply_effects(&Effects::default());
    }
}

/// Handle of one nexus to the reservations of its logical unit. Dropping it removes the nexus: its registration
/// stays, a RESERVE ends.
#[derive(Debug)]
pub struct ReservationHandle {
    reservations: Arc<Reservations>,
    entry: Arc<NexusEntry>,
}

impl ReservationHandle {
    /// Returns the name of the nexus.
    pub fn name(&self) -> &NexusName {
        &self.entry.name
    }

    /// Returns the reservations of the logical unit.
    pub(crate) fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// Returns true if commands of this class are allowed; otherwise they end with RESERVATION CONFLICT. One relaxed
    /// load.
    pub fn allows(&self, class: AccessClass) -> bool {
        AccessRights(self.entry.rights.load(Ordering::Relaxed)).allows(class)
    }

    /// Handles a loss of the nexus: ends a RESERVE of it.
    pub fn nexus_lost(&self) {
        self.reservations.nexus_lost(&self.entry.name, false);
    }

    /// RESERVE(6) and (10), RELEASE(6) and (10).
    ///
    /// # Errors
    /// If another nexus has reserved the logical unit, or the command uses extents or third parties, which SPC-2 made
    /// obsolete.
    pub fn reserve_or_release(&self, cdb: &[u8]) -> Result<(), ReservationError> {
        const THIRD_PARTY: u8 = 0x10;
        let ten = byte(cdb, 0) & 0x40 != 0;
        let flags = byte(cdb, 1);
        // Bit 0 is EXTENT; of the forms with 10 bytes bit 1 is LONGID.
        for (mask, bit) in [(THIRD_PARTY, 4), (u8::from(ten) << 1, 1), (1, 0)] {
            if flags & mask != 0 {
                return Err(state::invalid_cdb_field(1, Some(bit)));
            }
        }
        let mut inner = self.reservations.lock();
        match byte(cdb, 0) & 0x1f {
            0x16 => inner.state.reserve_unit(&self.entry.name)?,
            _ => inner.state.release_unit(&self.entry.name)?,
        }
        inner.apply_effects(&Effects::default());
        Ok(())
    }

    /// PERSISTENT RESERVE IN. The data-in bytes are cut to its allocation length.
    ///
    /// # Errors
    /// If the service action is unknown, or any nexus holds a RESERVE (SPC-2 section 5.5.1).
    pub fn persistent_in(&self, cdb: &[u8], data_in: &mut Vec<u8>) -> Result<(), ReservationError> {
        let inner = self.reservations.lock();
        if inner.state.reserve_holder.is_some() {
            return Err(ReservationError::Conflict);
        }
        reserve_in::encode(&inner.state, cdb, self.reservations.store.is_some(), data_in)
    }

    /// PERSISTENT RESERVE OUT. `done` is woken when a returned ticket is resolved.
    ///
    /// # Errors
    /// As SPC-4 specifies; nothing has changed then.
    pub fn persistent_out<D: DataOut + ?Sized>(
        &self,
        cdb: &[u8],
        data: &D,
        done: &Arc<dyn Wake>,
    ) -> Result<ReserveOutResult, ReservationError> {
        let store = self.reservations.store.as_ref();
        let request = reserve_out::parse(cdb, data, store.is_some());
        let mut inner = self.reservations.lock();
        if inner.state.reserve_holder.is_some() {
            return Err(ReservationError::Conflict);
        }
        let (request, digest) = request?;
        let (transferred, persisted) = (request.length, inner.state.aptpl);
        let name = &self.entry.name;
        let effects = match inner.execute(name, request) {
            Err(ReservationError::Conflict) if inner.state.executed.take_replayed(name, digest) => {
                // The conflict is with its own change, which is saved, and whose effects have taken place.
                return Ok(ReserveOutResult { saved: None, abort: Vec::new(), transferred });
            }
            executed => executed?,
        };
        inner.state.executed.add(name, digest);
        inner.apply_effects(&effects);
        let state = &inner.state;
        // Under the lock, so that states are saved in order. Also if nothing has changed: an earlier change may not be
        // saved yet, or this is a retry after a failure.
        let saved =
            store.filter(|_| persisted || state.aptpl).map(|store| store.save(stored::encode(state), Arc::clone(done)));
        Ok(ReserveOutResult { saved, abort: effects.aborted, transferred })
    }
}

impl Drop for ReservationHandle {
    fn drop(&mut self) {
        self.reservations.nexus_lost(&self.entry.name, true);
    }
}
