//! Reservations: which nexuses may use a unit. RESERVE and RELEASE of SPC-2, persistent reservations of SPC-4 (section 5.12).
//!
//! [`Reservations`] belongs to a unit; a nexus gets its [`Party`] by joining. What a nexus may do is worked out whenever something changes
//! and lies in one byte of its own, so that a READ or WRITE costs one relaxed load. `state` is what the standard says, without locks;
//! `out` and `report` are PERSISTENT RESERVE OUT and IN; `kept` is the state as text, which a [`Keeper`] keeps where APTPL asks for it;
//! `carried` is what goes with a guest that is migrated, and `executed` what a process leaves that is killed.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::Wake;

use crate::attention::Attentions;
use crate::sense::{Sense, Status};
use crate::step::{DataOut, Ending};

mod access;
mod carried;
mod executed;
mod file;
mod keeper;
mod kept;
mod out;
mod report;
mod state;
mod transport_id;

pub use access::{Access, Kind};
pub use carried::{Carried, Judged};
pub use file::FileKeeper;
pub use keeper::{Keeper, Ticket};
pub use kept::RestoreError;
pub use transport_id::locally_assigned;

use access::Rights;
use out::{Action, Request};
use state::{Effects, State};

/// Bytes of the longest name of an initiator port.
pub const LONGEST_NAME: usize = 255;

/// An I_T nexus: an initiator port and a target port. Ordered and kept by name, so it must be the same after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NexusName {
    /// Name of the initiator port; its SAS address in TransportIDs is made from it ([`locally_assigned`]).
    pub initiator: Arc<str>,
    /// Relative target port identifier.
    pub port: u16,
}

impl NexusName {
    fn address(&self) -> u64 {
        locally_assigned(&self.initiator)
    }
}

impl fmt::Display for NexusName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}", self.initiator, self.port)
    }
}

/// Why a command was not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// RESERVATION CONFLICT status.
    Conflict,
    /// CHECK CONDITION status.
    Check(Sense),
    /// The initiator sent less than the parameter list length says: [`Step::Overrun`](crate::Step::Overrun).
    Overrun,
}

impl Refusal {
    /// The command's ending; `None` for [`Refusal::Overrun`], which each transport answers in its own way.
    pub const fn ending(self) -> Option<Ending> {
        match self {
            Refusal::Conflict => Some(Ending { status: Status::ReservationConflict, sense: None, transferred: 0 }),
            Refusal::Check(sense) => Some(Ending::check(sense)),
            Refusal::Overrun => None,
        }
    }
}

/// A PERSISTENT RESERVE OUT that was executed.
#[derive(Debug)]
pub struct Accepted {
    /// Answer when this says that the state is on stable storage. When it could not be kept the state is changed nevertheless.
    pub kept: Option<Arc<Ticket>>,
    /// Nexuses other than the sender whose commands PREEMPT AND ABORT ends, before it is answered.
    pub abort: Vec<NexusName>,
    /// Bytes of the parameter list.
    pub transferred: u64,
}

/// Why a nexus could not join.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum JoinError {
    /// It is there already.
    #[error("nexus {0}: the unit has a nexus of this name already")]
    Twice(NexusName),
    /// Its initiator port's address is that of another name.
    #[error("nexus {name}: its initiator port gets the same address as {other}; choose another name")]
    SameAddress {
        /// Who joins.
        name: NexusName,
        /// Who has that address.
        other: NexusName,
    },
    /// No name, or too long a one.
    #[error("nexus {0}: the initiator port's name must have 1 to {LONGEST_NAME} bytes")]
    Name(NexusName),
}

/// The reservations of one unit.
pub struct Reservations {
    keeper: Option<Arc<dyn Keeper>>,
    inner: Mutex<Inner>,
}

struct Inner {
    state: State,
    seats: Vec<Arc<Seat>>,
}

/// What one nexus's commands look at.
#[derive(Debug)]
struct Seat {
    name: NexusName,
    rights: AtomicU8,
    attentions: Arc<Attentions>,
}

impl fmt::Debug for Reservations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.lock();
        f.debug_struct("Reservations").field("state", &inner.state).field("seats", &inner.seats).finish_non_exhaustive()
    }
}

impl Inner {
    /// Gives effect to a change: the rights first, so that nobody hears of it before it holds.
    fn settle(&self, effects: &Effects) {
        for seat in &self.seats {
            seat.rights.store(self.state.rights(&seat.name).0, Ordering::Relaxed);
        }
        for (nexus, attention) in &effects.told {
            if let Some(seat) = self.seats.iter().find(|seat| seat.name == *nexus) {
                seat.attentions.raise(*attention);
            }
        }
    }

    fn execute(&mut self, from: &NexusName, request: Request) -> Result<Effects, Refusal> {
        let known: Vec<NexusName> = self.seats.iter().map(|seat| seat.name.clone()).collect();
        let (state, presented) = (&mut self.state, request.presented);
        match request.action {
            Action::Register(ask) => state.register(from, &ask, &known),
            Action::Reserve(kind) => state.reserve(from, presented, kind),
            Action::Release(kind) => state.release(from, presented, kind),
            Action::Clear => state.clear(from, presented),
            Action::Preempt { victim, kind, abort } => state.preempt(from, presented, victim, kind, abort),
            Action::Move(ask) => state.register_and_move(from, presented, &ask, &known),
        }
    }
}

impl Reservations {
    /// None yet. Without a keeper APTPL is refused.
    pub fn new(keeper: Option<Arc<dyn Keeper>>) -> Arc<Reservations> {
        Reservations::of(State::default(), keeper)
    }

    /// Those that a keeper kept.
    ///
    /// # Errors
    /// When the text is not what was given to a keeper. It must not be replaced by an empty state then: the disk's users rely
    /// on their reservations.
    pub fn restore(kept: &[u8], keeper: Option<Arc<dyn Keeper>>) -> Result<Arc<Reservations>, RestoreError> {
        Ok(Reservations::of(kept::read(kept)?, keeper))
    }

    fn of(state: State, keeper: Option<Arc<dyn Keeper>>) -> Arc<Reservations> {
        Arc::new(Reservations { keeper, inner: Mutex::new(Inner { state, seats: Vec::new() }) })
    }

    /// A nexus appears. If it was registered before, it is again. Its unit attentions about reservations are raised in `attentions`.
    ///
    /// # Errors
    /// When its name cannot be told from another one's.
    pub fn join(self: &Arc<Reservations>, name: NexusName, attentions: Arc<Attentions>) -> Result<Party, JoinError> {
        if name.initiator.is_empty() || name.initiator.len() > LONGEST_NAME {
            return Err(JoinError::Name(name));
        }
        let mut inner = self.lock();
        if inner.seats.iter().any(|seat| seat.name == name) {
            return Err(JoinError::Twice(name));
        }
        let registered = inner.state.registrations.iter().map(|held| &held.nexus);
        let same_address = |other: &&NexusName| other.initiator != name.initiator && other.address() == name.address();
        if let Some(other) = inner.seats.iter().map(|seat| &seat.name).chain(registered).find(same_address) {
            return Err(JoinError::SameAddress { other: other.clone(), name });
        }
        let rights = AtomicU8::new(inner.state.rights(&name).0);
        let seat = Arc::new(Seat { name, rights, attentions });
        inner.seats.push(Arc::clone(&seat));
        Ok(Party { reservations: Arc::clone(self), seat })
    }

    /// The unit was reset: RESERVE ends, persistent reservations stay (SPC-2 section 5.5.1, SPC-4 section 5.12.5).
    pub fn reset(&self) {
        let mut inner = self.lock();
        inner.state.reserved = None;
        inner.settle(&Effects::default());
    }

    /// Commands that a process before this one had under way have been executed again, or never will be: from here on a conflict is one.
    pub fn resume_ended(&self) {
        self.lock().state.executed.forget_earlier();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each action leaves a whole state or does nothing; it cannot panic half way.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a RESERVE of this nexus.
    fn lose(&self, name: &NexusName, leaves: bool) {
        let mut inner = self.lock();
        if inner.state.reserved.as_ref() == Some(name) {
            inner.state.reserved = None;
        }
        if leaves {
            inner.seats.retain(|seat| seat.name != *name);
        }
        inner.settle(&Effects::default());
    }
}

/// One nexus among those of a unit. Dropping it takes the nexus away: its registration stays, a RESERVE ends.
#[derive(Debug)]
pub struct Party {
    reservations: Arc<Reservations>,
    seat: Arc<Seat>,
}

impl Party {
    /// Its name.
    pub fn name(&self) -> &NexusName {
        &self.seat.name
    }

    /// Those of the unit that it is one of.
    pub(crate) fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// Whether a command of this class may be executed now; else its status is RESERVATION CONFLICT. One relaxed load.
    pub fn allows(&self, class: Access) -> bool {
        Rights(self.seat.rights.load(Ordering::Relaxed)).allows(class)
    }

    /// The nexus was reset: a RESERVE of it ends.
    pub fn lost(&self) {
        self.reservations.lose(&self.seat.name, false);
    }

    /// RESERVE(6) and (10), RELEASE(6) and (10).
    ///
    /// # Errors
    /// Reserved by another nexus, or something that was made obsolete with SPC-2: extents, third parties.
    pub fn reserve_or_release(&self, cdb: &[u8]) -> Result<(), Refusal> {
        const THIRD_PARTY: u8 = 0x10;
        let ten = byte(cdb, 0) & 0x40 != 0;
        let flags = byte(cdb, 1);
        // Bit 0 is EXTENT; of the forms with 10 bytes bit 1 is LONGID.
        for (mask, bit) in [(THIRD_PARTY, 4), (u8::from(ten) << 1, 1), (1, 0)] {
            if flags & mask != 0 {
                return Err(state::bad_command(1, Some(bit)));
            }
        }
        let mut inner = self.reservations.lock();
        match byte(cdb, 0) & 0x1f {
            0x16 => inner.state.reserve_unit(&self.seat.name)?,
            _ => inner.state.release_unit(&self.seat.name)?,
        }
        inner.settle(&Effects::default());
        Ok(())
    }

    /// PERSISTENT RESERVE IN. The answer in `reply` is cut to its allocation length.
    ///
    /// # Errors
    /// An unknown service action, or a RESERVE by any nexus (SPC-2 section 5.5.1).
    pub fn persistent_in(&self, cdb: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let inner = self.reservations.lock();
        if inner.state.reserved.is_some() {
            return Err(Refusal::Conflict);
        }
        report::answer(&inner.state, cdb, self.reservations.keeper.is_some(), reply)
    }

    /// PERSISTENT RESERVE OUT. `done` rings when a ticket among what is returned is decided.
    ///
    /// # Errors
    /// What SPC-4 says: nothing has changed then.
    pub fn persistent_out<D: DataOut + ?Sized>(
        &self,
        cdb: &[u8],
        data: &D,
        done: &Arc<dyn Wake>,
    ) -> Result<Accepted, Refusal> {
        let keeper = self.reservations.keeper.as_ref();
        let request = out::parse(cdb, data, keeper.is_some());
        let mut inner = self.reservations.lock();
        if inner.state.reserved.is_some() {
            return Err(Refusal::Conflict);
        }
        let (request, digest) = request?;
        let (transferred, persisted) = (request.length, inner.state.persist);
        let name = &self.seat.name;
        let effects = match inner.execute(name, request) {
            Err(Refusal::Conflict) if inner.state.executed.was_earlier(name, digest) => {
                // It meets its own change, which is kept, and whose effects had their time.
                return Ok(Accepted { kept: None, abort: Vec::new(), transferred });
            }
            executed => executed?,
        };
        inner.state.executed.add(name, digest);
        inner.settle(&effects);
        let state = &inner.state;
        // Under the lock, so that states are kept in the order in which they came to be. Also when nothing has changed: what
        // was changed before may not be kept yet, or was not because the keeper failed and this is another try.
        let kept = keeper
            .filter(|_| persisted || state.persist)
            .map(|keeper| keeper.save(kept::write(state), Arc::clone(done)));
        Ok(Accepted { kept, abort: effects.aborted, transferred })
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        self.reservations.lose(&self.seat.name, true);
    }
}

/// A byte of a command; those that are not there count as zero.
fn byte(cdb: &[u8], at: usize) -> u8 {
    cdb.get(at).copied().unwrap_or(0)
}

/// A big-endian number of `len` bytes, 8 at most.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    (at..at + len).fold(0, |number, index| number << 8 | u64::from(byte(bytes, index)))
}
