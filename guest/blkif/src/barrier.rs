//! How a write barrier holds for all rings of a disk. The ring that has one shuts the gate; every ring takes what lies in it at that
//! moment, which may have been put there before the barrier, and nothing more, reports when all that it took is answered visibly,
//! and with the last report the barrier's own ring writes and flushes. When that is answered the gate opens, or the next barrier is on.
//!
//! What a frontend puts on one ring before it puts a barrier on another is done before the barrier; what it puts on any ring after the
//! barrier was answered is done after it. In between rings have no order. Barriers of several rings go one at a time, in the order in
//! which they are taken off, and what lies behind one waits for it. A ring that is closed has nothing: what still lies in it is not
//! waited for.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_core::Wake;

/// What a ring does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing; it is woken when that changes.
    Nothing,
    /// A barrier is on. The requests that lie in the ring now come before it: they are to be taken, up to a barrier among them, and
    /// no others. Said once for each barrier; then [`RingGate::settle`] is to be called again.
    TakeEarlier,
    /// The ring's own barrier is on, and all that comes before it on any ring is answered visibly. Said until [`RingGate::end`].
    Go,
}

/// A ring, as the others see it.
struct Member {
    id: u64,
    waker: Arc<dyn Wake>,
    /// It has been told of the barrier that is on.
    told: bool,
    /// It has nothing that comes before the barrier that is on.
    reported: bool,
    /// Its waker is to ring.
    due: bool,
}

/// Whose turn it is. The rules of the gate, without the sharing.
#[derive(Default)]
pub struct Turns {
    members: Vec<Member>,
    /// Rings that have a barrier, each at most one, in the order in which they were begun. The first is on.
    barriers: VecDeque<u64>,
    /// Rings that are still to open.
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
        // One that was waited for may have been left requests by an owner before us. Any other has nothing that comes before a barrier.
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

    /// The first barrier is on now, or none is.
    fn start(&mut self) {
        let on = self.barriers.front().copied();
        for member in &mut self.members {
            member.told = on == Some(member.id);
            member.reported = false;
            member.due = true;
        }
    }

    fn all_reported(&self) -> bool {
        self.absent == 0 && self.members.iter().all(|member| member.reported)
    }

    /// Wakes the ring whose barrier is on if nothing holds it up any more.
    fn call_owner(&mut self) {
        if self.all_reported()
            && let Some(on) = self.barriers.front().copied()
            && let Some(owner) = self.member(on)
        {
            owner.due = true;
        }
    }

    /// A barrier is on.
    pub fn is_shut(&self) -> bool {
        !self.barriers.is_empty()
    }

    /// Wakes the rings for which a change meant something.
    pub fn ring_wakers(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.due) {
            member.due = false;
            member.waker.wake();
        }
    }

    fn settle(&mut self, id: u64, in_flight: usize) -> Step {
        let Some(on) = self.barriers.front().copied() else { return Step::Nothing };
        let has_barrier = self.barriers.contains(&id);
        let Some(member) = self.member(id) else { return Step::Nothing };
        if !member.told {
            member.told = true;
            // What lies behind its own barrier comes after this one too.
            if !has_barrier {
                return Step::TakeEarlier;
            }
        }
        if in_flight == 0 && !member.reported {
            member.reported = true;
            self.call_owner();
        }
        if on == id && self.all_reported() { Step::Go } else { Step::Nothing }
    }

    fn end(&mut self, id: u64) {
        debug_assert_eq!(self.barriers.front(), Some(&id), "only the barrier that is on ends");
        self.withdraw(id);
    }

    /// The ring has no barrier any more.
    fn withdraw(&mut self, id: u64) {
        let was_on = self.barriers.front() == Some(&id);
        self.barriers.retain(|other| *other != id);
        if was_on {
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

/// How rings on several threads share the rules.
pub trait Sharing: Send + Sync {
    /// Shared rules.
    fn new(turns: Turns) -> Self;
    /// Changes them, one thread at a time.
    fn with<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R;
    /// Whether a barrier is on, as last [set](Self::set_shut).
    fn is_shut(&self) -> bool;
    /// Says whether a barrier is on.
    fn set_shut(&self, shut: bool);

    /// Changes the rules, and lets those know who wait for that.
    fn change<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R {
        self.with(|turns| {
            let was_shut = turns.is_shut();
            let result = change(turns);
            // Before anybody is woken: who is woken looks at it first.
            if turns.is_shut() != was_shut {
                self.set_shut(!was_shut);
            }
            turns.ring_wakers();
            result
        })
    }
}

/// Rules shared by threads of this process.
pub struct Threads {
    /// On a line that is only written when barriers come and go: every pull reads it.
    shut: AtomicBool,
    turns: Mutex<Turns>,
}

impl Sharing for Threads {
    fn new(turns: Turns) -> Self {
        Threads { shut: AtomicBool::new(false), turns: Mutex::new(turns) }
    }

    fn with<R>(&self, change: impl FnOnce(&mut Turns) -> R) -> R {
        change(&mut self.turns.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[inline]
    fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Acquire)
    }

    fn set_shut(&self, shut: bool) {
        self.shut.store(shut, Ordering::Release);
    }
}

/// The gate of one disk.
pub struct Gate<S: Sharing = Threads>(Arc<S>);

impl<S: Sharing> Gate<S> {
    /// A gate for so many rings. No barrier passes before they have all opened: a ring that is taken up again may have requests that
    /// come before it.
    pub fn new(rings: u16) -> Gate<S> {
        Gate(Arc::new(S::new(Turns::with_absent(rings))))
    }

    /// A ring begins to be served. `waker` rings when it is to [settle](RingGate::settle), and when it may take requests again.
    pub fn open_ring(&self, waker: Arc<dyn Wake>) -> RingGate<S> {
        let id = self.0.change(|turns| turns.open(waker));
        RingGate { shared: Arc::clone(&self.0), id }
    }

    /// The rings that have not opened will not: nothing waits for them.
    pub fn forget_absent(&self) {
        self.0.change(Turns::forget_absent);
    }
}

/// One ring's way through the gate. Dropped when the ring has nothing in flight and takes nothing more, and counts no more then; a barrier
/// of its own that has not ended is forgotten.
pub struct RingGate<S: Sharing = Threads> {
    shared: Arc<S>,
    id: u64,
}

impl<S: Sharing> RingGate<S> {
    /// No barrier is on: requests may be taken. For every pull.
    #[inline]
    pub fn may_take(&self) -> bool {
        !self.shared.is_shut()
    }

    /// The ring took a barrier, behind which it takes nothing. From now on no ring does, but what comes before it.
    pub fn begin(&mut self) {
        self.change(|turns, id| turns.begin(id));
    }

    /// What to do now. To be called when the ring was woken, when a publish has shown the last of its responses, and after
    /// [`Step::TakeEarlier`]. `in_flight` are its requests that come before the barrier and have no visible response, in whatever state:
    /// not taken yet, held, with the storage, answered and not published; its own barrier is not one of them.
    #[inline]
    pub fn settle(&mut self, in_flight: usize) -> Step {
        if self.may_take() { Step::Nothing } else { self.change(|turns, id| turns.settle(id, in_flight)) }
    }

    /// The ring's barrier has been written, flushed and answered, and the frontend sees that: not before, so that what comes after
    /// a barrier is never taken while the barrier may have to be done again.
    pub fn end(&mut self) {
        self.change(|turns, id| turns.end(id));
    }

    fn change<R>(&self, change: impl FnOnce(&mut Turns, u64) -> R) -> R {
        self.shared.change(|turns| change(turns, self.id))
    }
}

impl<S: Sharing> Drop for RingGate<S> {
    fn drop(&mut self) {
        self.change(|turns, id| turns.close(id));
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
