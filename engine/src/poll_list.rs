//! Which queues a worker looks at in each turn, and when it may sleep. Pure: it decides, the worker acts.
//!
//! A queue is *polled* (looked at in every turn) or armed (it will kick). It becomes polled whenever work may have come
//! unseen: when it is attached, kicked, or enabled again. It leaves the poll list only by [`Roster::rest`], when it was armed
//! and found empty, or when it is not to be pulled from anyway. So no work waits in a running queue that is neither polled
//! nor armed; and a worker sleeps only when no queue is polled and no signal that has arrived is left unread.

/// What a queue is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    /// Served.
    Running,
    /// Not pulled from; requests in flight end as usual.
    Paused,
    /// Its ring is broken: never pulled from again.
    Broken,
    /// Leaves as soon as nothing is in flight.
    Draining,
}

/// What a look at an idle queue gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IdleResult {
    /// Its window is still open, or work came while it was armed: look again in the next turn.
    Poll,
    /// It is armed and empty: it will kick.
    Armed,
}

/// What the worker does after a turn in which nothing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IdleDecision {
    /// Another turn, at once.
    Turn,
    /// Wait for the ring.
    Sleep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    phase: Phase,
    polled: bool,
    /// Kicks reach the worker's ring.
    watched: bool,
}

/// The queues of a worker, by slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct PollList {
    places: Vec<Option<Place>>,
    polled: Vec<u16>,
}

impl PollList {
    /// A queue takes `slot`, not watched yet. It is polled at first: a kick may have come before.
    pub(crate) fn attached(&mut self, slot: u16, phase: Phase) {
        let at = usize::from(slot);
        if self.places.len() <= at {
            self.places.resize(at + 1, None);
        }
        debug_assert!(self.places[at].is_none(), "a slot has one queue");
        self.places[at] = Some(Place { phase, polled: false, watched: false });
        self.poll(slot);
    }

    /// The queue in `slot` is gone.
    pub(crate) fn leave(&mut self, slot: u16) {
        self.places[usize::from(slot)] = None;
        self.polled.retain(|polled| *polled != slot);
    }

    fn place(&mut self, slot: u16) -> Option<&mut Place> {
        self.places.get_mut(usize::from(slot))?.as_mut()
    }

    fn poll(&mut self, slot: u16) {
        if let Some(place) = self.place(slot)
            && !place.polled
        {
            place.polled = true;
            self.polled.push(slot);
        }
    }

    /// What the queue in `slot` is doing; `None` without one.
    #[inline]
    pub(crate) fn phase(&self, slot: u16) -> Option<Phase> {
        self.places.get(usize::from(slot)).copied().flatten().map(|place| place.phase)
    }

    /// Polled queues.
    #[inline]
    pub(crate) fn polled(&self) -> &[u16] {
        &self.polled
    }

    /// Polled queues whose kicks do not reach the ring.
    pub(crate) fn unwatched(&self) -> impl Iterator<Item = u16> {
        self.polled.iter().copied().filter(|slot| self.places[usize::from(*slot)].is_some_and(|place| !place.watched))
    }

    /// Whether kicks of the queue in `slot` reach the worker's ring from now on. If not it is polled from now on: it could
    /// not say that it has work.
    pub(crate) fn watch(&mut self, slot: u16, watched: bool) {
        if let Some(place) = self.place(slot) {
            place.watched = watched;
        }
        // Kicks may have been lost between two watches.
        self.poll(slot);
    }

    /// The queue in `slot` kicked.
    pub(crate) fn kicked(&mut self, slot: u16) {
        if self.phase(slot) == Some(Phase::Running) {
            self.poll(slot);
        }
    }

    /// Starts or stops pulling. A queue that is broken or leaves stays so.
    pub(crate) fn enable(&mut self, slot: u16, enabled: bool) {
        let Some(place) = self.place(slot) else { return };
        match (place.phase, enabled) {
            (Phase::Paused, true) => place.phase = Phase::Running,
            (Phase::Running, false) => place.phase = Phase::Paused,
            _ => return,
        }
        if enabled {
            // Kicks were not followed while it was paused.
            self.poll(slot);
        }
    }

    /// The queue's ring is broken.
    pub(crate) fn retire(&mut self, slot: u16) {
        if let Some(place) = self.place(slot)
            && place.phase != Phase::Draining
        {
            place.phase = Phase::Broken;
        }
    }

    /// The queue leaves as soon as nothing is in flight.
    pub(crate) fn drain(&mut self, slot: u16) {
        if let Some(place) = self.place(slot) {
            place.phase = Phase::Draining;
        }
    }

    /// After a turn in which nothing happened. `unread`: signals have arrived that nobody has looked at, so the worker must
    /// not sleep. `look` polls on or arms a queue.
    pub(crate) fn rest(&mut self, unread: bool, mut look: impl FnMut(u16) -> IdleResult) -> IdleDecision {
        if unread {
            return IdleDecision::Turn;
        }
        let places = &mut self.places;
        self.polled.retain(|slot| {
            let Some(place) = places[usize::from(*slot)].as_mut() else { return false };
            place.polled = place.phase == Phase::Running && (!place.watched || look(*slot) == IdleResult::Poll);
            place.polled
        });
        if self.polled.is_empty() { IdleDecision::Sleep } else { IdleDecision::Turn }
    }
}

#[cfg(test)]
mod tests;
