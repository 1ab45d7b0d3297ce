//! The queues that a worker polls, and when it may sleep. Pure: it decides, the worker acts.
//!
//! A queue is *polled* (in every turn) or armed (the guest will kick). It is polled again when requests may have come
//! unseen: when it is attached, kicked, or enabled. It leaves the poll list only in [`PollList::decide_when_idle`],
//! when it was armed and found empty, or when it is not pulled from. So no request waits in a running queue that is
//! neither polled nor armed; and a worker sleeps for longer than a moment only when no queue is polled and no
//! completion is unread.

/// A queue's phase at its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    /// It is pulled from.
    Running,
    /// Not pulled from; requests in flight complete as usual.
    Paused,
    /// Its ring is broken: never pulled from again.
    Broken,
    /// Detached as soon as nothing is in flight.
    Draining,
}

/// Result of checking an idle queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IdleResult {
    /// It is polled in the next turn: requests came while it was armed, or it is about to be armed, or it is always
    /// polled.
    Poll,
    /// Its window is open: it is polled in the next turns.
    PollInWindow,
    /// It is polled by a timer: in the turn after the worker's next short sleep.
    PollByTimer,
    /// It is armed and empty: the guest will kick.
    Armed,
}

/// The worker's decision after an idle turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IdleDecision {
    /// Another turn, at once.
    Turn,
    /// Wait for the ring for a moment: all polled queues are polled by a timer.
    Timer,
    /// Wait for the ring.
    Sleep,
}

/// Content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ListedQueue {
    /// `None` without a queue, so that one comparison shows if a queue runs.
    phase: Option<Phase>,
    polled: bool,
    /// True if the worker's ring polls its kick.
    watched: bool,
}

impl ListedQueue {
    /// A slot without a queue.
    const VACANT: ListedQueue = ListedQueue { phase: None, polled: false, watched: false };
}

/// The queues of a worker, by slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct PollList {
    queues: Vec<ListedQueue>,
    polled: Vec<u16>,
}

impl PollList {
    /// Adds a queue, its kick not watched yet. It is polled at first: a kick may have come before.
    pub(crate) fn attach(&mut self, slot: u16, phase: Phase) {
        let at = usize::from(slot);
        if self.queues.len() <= at {
            self.queues.resize(at + 1, ListedQueue::VACANT);
        }
        debug_assert!(self.queues[at].phase.is_none(), "a slot has one queue");
        self.queues[at] = ListedQueue { phase: Some(phase), polled: false, watched: false };
        self.poll(slot);
    }

    /// Removes the queue in `slot`.
    pub(crate) fn remove(&mut self, slot: u16) {
        self.queues[usize::from(slot)] = ListedQueue::VACANT;
        self.polled.retain(|polled| *polled != slot);
    }

    fn queue(&mut self, slot: u16) -> Option<&mut ListedQueue> {
        self.queues.get_mut(usize::from(slot)).filter(|queue| queue.phase.is_some())
    }

    fn poll(&mut self, slot: u16) {
        if let Some(queue) = self.queue(slot)
            && !queue.polled
        {
            queue.polled = true;
            self.polled.push(slot);
        }
    }

    /// Returns the phase of the queue in `slot`; `None` without one.
    #[inline]
    pub(crate) fn phase(&self, slot: u16) -> Option<Phase> {
        self.queues.get(usize::from(slot))?.phase
    }

    /// Returns true if the queue in `slot` is pulled from.
    #[inline]
    pub(crate) fn is_running(&self, slot: u16) -> bool {
        matches!(self.queues.get(usize::from(slot)), Some(ListedQueue { phase: Some(Phase::Running), .. }))
    }

    /// Returns the polled queues' slots.
    #[inline]
    pub(crate) fn polled(&self) -> &[u16] {
        &self.polled
    }

    /// Returns the polled queues whose kicks are not watched.
    pub(crate) fn unwatched(&self) -> impl Iterator<Item = u16> {
        self.polled.iter().copied().filter(|slot| !self.queues[usize::from(*slot)].watched)
    }

    /// Records if the worker's ring polls the queue's kick. The queue itself is polled from now on: without a watched
    /// kick it cannot be woken.
    pub(crate) fn set_watched(&mut self, slot: u16, watched: bool) {
        if let Some(queue) = self.queue(slot) {
            queue.watched = watched;
        }
        // A kick may have been missed between two watches.
        self.poll(slot);
    }

    /// Handles a guest's kick of the queue in `slot`.
    pub(crate) fn kicked(&mut self, slot: u16) {
        if self.phase(slot) == Some(Phase::Running) {
            self.poll(slot);
        }
    }

    /// Starts or stops pulling. A broken or draining queue stays so.
    pub(crate) fn enable(&mut self, slot: u16, enabled: bool) {
        let Some(queue) = self.queue(slot) else { return };
        match (queue.phase, enabled) {
            (Some(Phase::Paused), true) => queue.phase = Some(Phase::Running),
            (Some(Phase::Running), false) => queue.phase = Some(Phase::Paused),
            _ => return,
        }
        if enabled {
            // Kicks were ignored while it was paused.
            self.poll(slot);
        }
    }

    /// Marks the queue's ring as broken.
    pub(crate) fn mark_broken(&mut self, slot: u16) {
        if let Some(queue) = self.queue(slot)
            && queue.phase != Some(Phase::Draining)
        {
            queue.phase = Some(Phase::Broken);
        }
    }

    /// Marks the queue as draining.
    pub(crate) fn drain(&mut self, slot: u16) {
        if let Some(queue) = self.queue(slot) {
            queue.phase = Some(Phase::Draining);
        }
    }

    /// Returns a draining queue to its earlier phase.
    pub(crate) fn resume(&mut self, slot: u16, phase: Phase) {
        if let Some(queue) = self.queue(slot) {
            queue.phase = Some(phase);
        }
        // Kicks were ignored while it drained.
        self.poll(slot);
    }

    /// Decides after an idle turn. `unread`: untaken completions have arrived, so the worker must not sleep.
    /// `poll_or_arm` checks a queue's window and arms the queue if it has closed.
    pub(crate) fn decide_when_idle(
        &mut self,
        unread: bool,
        mut poll_or_arm: impl FnMut(u16) -> IdleResult,
    ) -> IdleDecision {
        if unread {
            return IdleDecision::Turn;
        }
        let queues = &mut self.queues;
        let mut by_timer = true;
        self.polled.retain(|slot| {
            let queue = &mut queues[usize::from(*slot)];
            let Some(phase) = queue.phase else { return false };
            let result = match phase {
                Phase::Running if queue.watched => poll_or_arm(*slot),
                Phase::Running => IdleResult::Poll,
                // It is not pulled from.
                Phase::Paused | Phase::Broken | Phase::Draining => IdleResult::Armed,
            };
            by_timer &= matches!(result, IdleResult::PollByTimer | IdleResult::Armed);
            queue.polled = result != IdleResult::Armed;
            queue.polled
        });
        match (self.polled.is_empty(), by_timer) {
            (true, _) => IdleDecision::Sleep,
            (false, true) => IdleDecision::Timer,
            (false, false) => IdleDecision::Turn,
        }
    }
}

#[cfg(test)]
mod tests;
