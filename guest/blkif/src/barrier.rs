//! Write barriers across all rings of a disk. A ring that takes a barrier off closes the gate. Every ring then takes the requests that it
//! holds at that moment, which may be older than the barrier, and no more. It reports when all of them are completed and published. After
//! the last report the barrier's own ring writes and flushes. When the barrier's response is published, the gate opens or the next barrier
//! becomes active.
//!
//! A request that a frontend puts on one ring before it puts a barrier on another is executed before the barrier; a request that it puts on
//! any ring after the barrier's response is executed after it. Otherwise rings are not ordered. Barriers of several rings are executed one
//! at a time, in the order in which they are taken off; requests behind a barrier wait for it. Barriers do not wait for requests on a
//! closed ring.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_core::Wake;

/// The next action of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing; the ring is woken when this changes.
    Nothing,
    /// A barrier is active. Take the requests that the ring holds now, up to a barrier among them, and no others: they come before the
    /// active barrier. Returned once per barrier; call [`RingGate::advance`] again afterwards.
    TakeEarlier,
    /// The ring's own barrier is active, and all earlier requests on all rings are completed and published: submit the barrier. Returned
    /// until [`RingGate::complete`].
    Go,
}

/// The state of one ring in the sequence.
struct Member {
    id: u64,
    waker: Arc<dyn Wake>,
    /// The ring is notified of the active barrier.
    told: bool,
    /// The ring has no requests left that come before the active barrier.
    reported: bool,
    /// The ring is to be woken.
    due: bool,
}

/// The order of barriers: the rules of the gate, without synchronisation.
#[derive(Default)]
pub struct Turns {
    members: Vec<Member>,
    /// Rings that have a barrier, at most one each, in the order of [`RingGate::begin`]. The first is active.
    barriers: VecDeque<u64>,
    /// Number of rings that are not open yet.
    absent: u16,
    next: u64,
}

impl Turns {
    fn with_absent(rings: u16) -> Turns {
        Turns { absent: rings, ..Turns::default() }
    }

    fn member(&mut self, id: u64) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    fn open(&mut self, waker: Arc<dyn Wake>) -> u64 {
        let id = self.next;
        self.next += 1;
        // A ring that barriers wait for may have requests left by the previous backend process. Any other has none older than a barrier.
        let late = self.absent == 0;
        self.absent = self.absent.saturating_sub(1);
        let due = self.is_shut();
        self.members.push(Member { id, waker, told: late, reported: late, due });
        id
    }

    fn begin(&mut self, id: u64) {
        debug_assert!(!self.barriers.contains(&id), "a ring takes nothing after a barrier");
        self.barriers.push_back(id);
        if self.barriers.len() == 1 {
            self.start();
        }
    }

    /// Activates the first barrier, if there is one.
    fn start(&mut self) {
        let active = self.barriers.front().copied();
        for member in &mut self.members {
            member.told = active == Some(member.id);
            member.reported = false;
            member.due = true;
        }
    }

    fn all_reported(&self) -> bool {
        self.absent == 0 && self.members.iter().all(|member| member.reported)
    }

    /// Wakes the ring of the active barrier if all rings have reported.
    fn call_owner(&mut self) {
        if self.all_reported()
            && let Some(active) = self.barriers.front().copied()
            && let Some(owner) = self.member(active)
        {
            owner.due = true;
        }
    }

    /// Returns true if a barrier is active.
    pub fn is_shut(&self) -> bool {
        !self.barriers.is_empty()
    }

    /// Wakes the rings that a change affects.
    pub fn ring_wakers(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.due) {
            member.due = false;
            member.waker.wake();
        }
    }

    fn settle(&mut self, id: u64, in_flight: usize) -> Step {
        let Some(active) = self.barriers.front().copied() else { return Step::Nothing };
        let has_barrier = self.barriers.contains(&id);
        let Some(member) = self.member(id) else { return Step::Nothing };
        if !member.told {
            member.told = true;
            // Requests behind the ring's own barrier come after this one too.
            if !has_barrier {
                return Step::TakeEarlier;
            }
        }
        if in_flight == 0 && !member.reported {
            member.reported = true;
            self.call_owner();
        }
        if active == id && self.all_reported() { Step::Go } else { Step::Nothing }
    }

    fn end(&mut self, id: u64) {
        debug_assert_eq!(self.barriers.front(), Some(&id), "only the active barrier completes");
        self.withdraw(id);
    }

    /// Removes the ring's barrier.
    fn withdraw(&mut self, id: u64) {
        let was_active = self.barriers.front() == Some(&id);
        self.barriers.retain(|other| *other != id);
        if was_active {
            self.start();
        }
    }

    fn close(&mut self, id: u64) {
        self.members.retain(|member| member.id != id);
        self.withdraw(id);
        self.call_owner();
    }

    fn forget_absent(&mut self) {
        self.absent = 0;
        self.call_owner();
    }
}

/// How rings on several threads share a [`BarrierSequence`].
pub trait Sharing: Send + Sync {
    /// Creates the shared sequence.
    fn new(sequence: Turns) -> Self;
    /// Calls `change` with the sequence, one thread at a time.
    fn with<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R;
    /// Returns true if a barrier is active, as last [set](Self::set_barrier_active).
    fn is_shut(&self) -> bool;
    /// Stores whether a barrier is active, for [`is_barrier_active`](Self::is_barrier_active).
    fn set_shut(&self, active: bool);

    /// Changes the sequence, and wakes the rings that the change affects.
    fn change<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R {
        self.with(|sequence| {
            let was_active = sequence.is_shut();
            let result = change(sequence);
            // Before any wakeup: a woken ring checks the flag first.
            if sequence.is_shut() != was_active {
                self.set_shut(!was_active);
            }
            sequence.ring_wakers();
            result
        })
    }
}

/// A sequence behind a mutex.
pub struct Threads {
    /// Read by every pull; its cache line is written only when a barrier begins or ends.
    shut: AtomicBool,
    turns: Mutex<Turns>,
}

impl Sharing for Threads {
    fn new(sequence: Turns) -> Self {
        Threads { shut: AtomicBool::new(false), turns: Mutex::new(sequence) }
    }

    fn with<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R {
        change(&mut self.turns.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[inline]
    fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Acquire)
    }

    fn set_shut(&self, active: bool) {
        self.shut.store(active, Ordering::Release);
    }
}

/// The gate of one disk.
pub struct Gate<S: Sharing = Threads>(Arc<S>);

impl<S: Sharing> Gate<S> {
    /// Creates a gate for `rings` rings. No barrier is executed before all of them are open: a ring that is resumed may have earlier
    /// requests.
    pub fn new(rings: u16) -> Gate<S> {
        Gate(Arc::new(S::new(Turns::with_absent(rings))))
    }

    /// Opens a ring. `waker` is woken when the ring must call [`advance`](RingGate::advance), and when it may take requests again.
    pub fn open_ring(&self, waker: Arc<dyn Wake>) -> RingGate<S> {
        let id = self.0.change(|sequence| sequence.open(waker));
        RingGate { shared: Arc::clone(&self.0), id }
    }

    /// Stops waiting for rings that are not open: they will not be opened.
    pub fn forget_absent(&self) {
        self.0.change(Turns::forget_absent);
    }
}

/// One ring's handle of the gate. Dropped when the ring has nothing in flight and takes no more requests; a barrier of its own that is not
/// complete is dropped with it.
pub struct RingGate<S: Sharing = Threads> {
    shared: Arc<S>,
    id: u64,
}

impl<S: Sharing> RingGate<S> {
    /// Returns true if requests may be taken: no barrier is active. Called for every pull.
    #[inline]
    pub fn may_take(&self) -> bool {
        !self.shared.is_shut()
    }

    /// Queues a barrier that the ring has taken off; the ring takes no request behind it. From now on all rings take only earlier requests.
    pub fn begin(&mut self) {
        self.change(|sequence, id| sequence.begin(id));
    }

    /// Returns the ring's next action. Called when the ring is woken, when a publish has made its last response visible, and after
    /// [`BarrierAction::TakeEarlier`]. `in_flight`: number of the ring's requests that come before the barrier and have no visible
    /// response, in any state: not taken yet, blocked, with the storage, completed and not published. Its own barrier does not count.
    #[inline]
    pub fn settle(&mut self, in_flight: usize) -> Step {
        if self.may_take() { Step::Nothing } else { self.change(|sequence, id| sequence.settle(id, in_flight)) }
    }

    /// Completes the ring's barrier, after it is written, flushed and its response published. Not earlier: no request behind a barrier may
    /// be taken while the barrier may still have to be replayed.
    pub fn end(&mut self) {
        self.change(|sequence, id| sequence.end(id));
    }

    fn change<R>(&self, change: impl FnOnce(&mut Turns, u64) -> R) -> R {
        self.shared.change(|sequence| change(sequence, self.id))
    }
}

impl<S: Sharing> Drop for RingGate<S> {
    fn drop(&mut self) {
        self.change(|sequence, id| sequence.close(id));
    }
}

impl<S: Sharing> fmt::Debug for RingGate<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingGate").field("id", &self.id).field("may_take", &self.may_take()).finish()
    }
}

#[cfg(test)]
#[path = "barrier_tests.rs"]
mod tests;
