//! Write barriers across all rings of a disk. A ring that takes a barrier off closes the gate. Every ring then takes
//! only the requests that it holds at that moment, which may be older than the barrier. It reports when all of them are
//! completed and published. After the last report the barrier's own ring writes and flushes. When the barrier's
//! response is published, the gate opens or the next barrier becomes active.
//!
//! A request that a frontend puts on one ring before it puts a barrier on another is executed before the barrier; a
//! request that it puts on any ring after the barrier's response is executed after it. Otherwise rings are not ordered.
//! Barriers of several rings are executed one at a time, in the order in which they are taken off; requests behind a
//! barrier wait for it. Barriers do not wait for requests on a closed ring.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::Wake;
use mqblk_core::lock::lock;

/// The next action of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierAction {
    /// Nothing; the ring is woken when this changes.
    Nothing,
    /// A barrier is active. Take the requests that the ring holds now, up to a barrier among them, and no others: they
    /// come before the active barrier. Returned once per barrier; call [`RingGate::advance`] again afterwards.
    TakeEarlier,
    /// The ring's own barrier is active, and all earlier requests on all rings are completed and published: submit the
    /// barrier. Returned until [`RingGate::complete`].
    Submit,
}

/// The state of one ring in the sequence.
struct Member {
    id: u64,
    waker: Arc<dyn Wake>,
    /// True if the ring is notified of the active barrier.
    notified: bool,
    /// True if the ring has no requests left that come before the active barrier.
    drained: bool,
    /// True if the ring must be woken.
    wake_pending: bool,
}

/// The order of barriers: the rules of the gate, without synchronisation.
#[derive(Default)]
pub struct BarrierSequence {
    members: Vec<Member>,
    /// Rings that have a barrier, at most one each, in the order of [`RingGate::begin`]. The first is active.
    barriers: VecDeque<u64>,
    /// Number of rings that are not open yet.
    unopened: u16,
    next_id: u64,
}

impl BarrierSequence {
    fn with_unopened(rings: u16) -> BarrierSequence {
        BarrierSequence { unopened: rings, ..BarrierSequence::default() }
    }

    fn member(&mut self, id: u64) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    fn open(&mut self, waker: Arc<dyn Wake>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        // A ring that barriers wait for may have requests left by the previous backend process. Any other has none
        // older than a barrier.
        let late = self.unopened == 0;
        self.unopened = self.unopened.saturating_sub(1);
        let due = self.has_active_barrier();
        self.members.push(Member { id, waker, notified: late, drained: late, wake_pending: due });
        id
    }

    fn begin(&mut self, id: u64) {
        debug_assert!(!self.barriers.contains(&id), "a ring takes nothing after a barrier");
        self.barriers.push_back(id);
        if self.barriers.len() == 1 {
            self.activate_next();
        }
    }

    /// Activates the first barrier, if there is one.
    fn activate_next(&mut self) {
        let active = self.barriers.front().copied();
        for member in &mut self.members {
            member.notified = active == Some(member.id);
            member.drained = false;
            member.wake_pending = true;
        }
    }

    fn all_drained(&self) -> bool {
        self.unopened == 0 && self.members.iter().all(|member| member.drained)
    }

    /// Wakes the ring of the active barrier if all rings have reported.
    fn wake_owner_if_drained(&mut self) {
        if self.all_drained()
            && let Some(active) = self.barriers.front().copied()
            && let Some(owner) = self.member(active)
        {
            owner.wake_pending = true;
        }
    }

    /// Returns true if a barrier is active.
    pub fn has_active_barrier(&self) -> bool {
        !self.barriers.is_empty()
    }

    /// Wakes the rings that a change affects.
    pub fn send_wakeups(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.wake_pending) {
            member.wake_pending = false;
            member.waker.wake();
        }
    }

    fn advance(&mut self, id: u64, in_flight: usize) -> BarrierAction {
        let Some(active) = self.barriers.front().copied() else { return BarrierAction::Nothing };
        let has_barrier = self.barriers.contains(&id);
        let Some(member) = self.member(id) else { return BarrierAction::Nothing };
        if !member.notified {
            member.notified = true;
            // Requests behind the ring's own barrier come after this one too.
            if !has_barrier {
                return BarrierAction::TakeEarlier;
            }
        }
        if in_flight == 0 && !member.drained {
            member.drained = true;
            self.wake_owner_if_drained();
        }
        if active == id && self.all_drained() { BarrierAction::Submit } else { BarrierAction::Nothing }
    }

    fn complete(&mut self, id: u64) {
        debug_assert_eq!(self.barriers.front(), Some(&id), "only the active barrier completes");
        self.remove_barrier(id);
    }

    /// Removes the ring's barrier.
    fn remove_barrier(&mut self, id: u64) {
        let was_active = self.barriers.front() == Some(&id);
        self.barriers.retain(|other| *other != id);
        if was_active {
            self.activate_next();
        }
    }

    fn close(&mut self, id: u64) {
        self.members.retain(|member| member.id != id);
        self.remove_barrier(id);
        self.wake_owner_if_drained();
    }

    fn skip_unopened_rings(&mut self) {
        self.unopened = 0;
        self.wake_owner_if_drained();
    }
}

/// Sharing of a [`BarrierSequence`] by rings on several threads.
pub trait SharedSequence: Send + Sync {
    /// Creates the shared sequence.
    fn new(sequence: BarrierSequence) -> Self;
    /// Calls `change` with the sequence, one thread at a time.
    fn with_lock<R>(&self, change: impl FnOnce(&mut BarrierSequence) -> R) -> R;
    /// Returns true if a barrier is active, as last [set](Self::set_barrier_active).
    fn is_barrier_active(&self) -> bool;
    /// Stores the result of [`is_barrier_active`](Self::is_barrier_active).
    fn set_barrier_active(&self, active: bool);

    /// Changes the sequence, and wakes the rings that the change affects.
    fn update<R>(&self, change: impl FnOnce(&mut BarrierSequence) -> R) -> R {
        self.with_lock(|sequence| {
            let was_active = sequence.has_active_barrier();
            let result = change(sequence);
            // Before any wakeup: a woken ring checks the flag first.
            if sequence.has_active_barrier() != was_active {
                self.set_barrier_active(!was_active);
            }
            sequence.send_wakeups();
            result
        })
    }
}

/// A sequence behind a mutex.
pub struct LockedSequence {
    /// Read by every pull; its cache line is written only when a barrier begins or ends.
    barrier_active: AtomicBool,
    sequence: Mutex<BarrierSequence>,
}

impl SharedSequence for LockedSequence {
    fn new(sequence: BarrierSequence) -> Self {
        LockedSequence { barrier_active: AtomicBool::new(false), sequence: Mutex::new(sequence) }
    }

    fn with_lock<R>(&self, change: impl FnOnce(&mut BarrierSequence) -> R) -> R {
        change(&mut lock(&self.sequence))
    }

    #[inline]
    fn is_barrier_active(&self) -> bool {
        self.barrier_active.load(Ordering::Acquire)
    }

    fn set_barrier_active(&self, active: bool) {
        self.barrier_active.store(active, Ordering::Release);
    }
}

/// The gate of one disk.
pub struct BarrierGate<S: SharedSequence = LockedSequence>(Arc<S>);

impl<S: SharedSequence> BarrierGate<S> {
    /// Creates a gate for `rings` rings. No barrier is executed before all of them are open: a ring that is resumed may
    /// have earlier requests.
    pub fn new(rings: u16) -> BarrierGate<S> {
        BarrierGate(Arc::new(S::new(BarrierSequence::with_unopened(rings))))
    }

    /// Opens a ring. `waker` is woken when the ring must call [`advance`](RingGate::advance), and when it may take
    /// requests again.
    pub fn open_ring(&self, waker: Arc<dyn Wake>) -> RingGate<S> {
        let id = self.0.update(|sequence| sequence.open(waker));
        RingGate { shared: Arc::clone(&self.0), id }
    }

    /// Stops waiting for rings that are not open: they will not be opened.
    pub fn skip_unopened_rings(&self) {
        self.0.update(BarrierSequence::skip_unopened_rings);
    }
}

/// One ring's handle of the gate. Dropped when the ring has nothing in flight and takes no more requests; a barrier of
/// its own that is not complete is dropped with it.
pub struct RingGate<S: SharedSequence = LockedSequence> {
    shared: Arc<S>,
    id: u64,
}

impl<S: SharedSequence> RingGate<S> {
    /// Returns true if requests may be taken: no barrier is active. Called for every pull.
    #[inline]
    pub fn is_open(&self) -> bool {
        !self.shared.is_barrier_active()
    }

    /// Queues a barrier that the ring has taken off; the ring takes no request behind it. From now on all rings take
    /// only earlier requests.
    pub fn begin(&mut self) {
        self.update(|sequence, id| sequence.begin(id));
    }

    /// Returns the ring's next action. Called when the ring is woken, when a publish has made its last response
    /// visible, and after [`BarrierAction::TakeEarlier`]. `in_flight`: number of the ring's requests that come
    /// before the barrier and have no visible response, in any state: not taken yet, blocked, with the storage,
    /// completed and not published. Its own barrier does not count.
    #[inline]
    pub fn advance(&mut self, in_flight: usize) -> BarrierAction {
        if self.is_open() {
            BarrierAction::Nothing
        } else {
            self.update(|sequence, id| sequence.advance(id, in_flight))
        }
    }

    /// Completes the ring's barrier, after it is written, flushed and its response published. Not earlier: no request
    /// behind a barrier may be taken while the barrier may still have to be replayed.
    pub fn complete(&mut self) {
        self.update(|sequence, id| sequence.complete(id));
    }

    fn update<R>(&self, change: impl FnOnce(&mut BarrierSequence, u64) -> R) -> R {
        self.shared.update(|sequence| change(sequence, self.id))
    }
}

impl<S: SharedSequence> Drop for RingGate<S> {
    fn drop(&mut self) {
        self.update(|sequence, id| sequence.close(id));
    }
}

impl<S: SharedSequence> fmt::Debug for RingGate<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingGate").field("id", &self.id).field("may_take", &self.is_open()).finish()
    }
}

#[cfg(test)]
#[path = "barrier_tests.rs"]
mod tests;
