//! A ring's part in the write barriers of its device.

use std::sync::Arc;

use mqblk_core::Wake;

use crate::barrier::{BarrierAction, BarrierGate, RingGate};

/// A ring's barrier and its gate.
pub(crate) struct RingBarrier {
    /// `None` after the queue is closed.
    gate: Option<RingGate>,
    /// Table index of the ring's barrier while it waits for earlier requests.
    waiting: Option<u16>,
    /// True if the ring's barrier is completed, and its response not published.
    completed: bool,
}

impl RingBarrier {
    pub(crate) fn new(gate: &BarrierGate, waker: Arc<dyn Wake>) -> RingBarrier {
        RingBarrier { gate: Some(gate.open_ring(waker)), waiting: None, completed: false }
    }

    /// Leaves the gate.
    pub(crate) fn close(&mut self) {
        self.gate = None;
    }

    /// Returns true if requests may be taken off the ring: no barrier is active.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.gate.as_ref().is_some_and(RingGate::is_open)
    }

    /// Returns 1 if the ring's barrier waits for earlier requests, else 0.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        usize::from(self.waiting.is_some())
    }

    /// Queues the ring's barrier at table index `at`, which has been taken off the ring, behind those of other rings.
    pub(crate) fn begin(&mut self, at: u16) {
        self.waiting = Some(at);
        if let Some(gate) = &mut self.gate {
            // Wakes this queue too, which continues in `woken`.
            gate.begin();
        }
    }

    /// Returns the next action. `in_flight`: requests of the ring, other than its waiting barrier, without a published
    /// response.
    pub(crate) fn advance(&mut self, in_flight: usize) -> BarrierAction {
        self.gate.as_mut().map_or(BarrierAction::Nothing, |gate| gate.advance(in_flight))
    }

    /// Takes the waiting barrier, for its submission.
    pub(crate) fn take_waiting(&mut self) -> Option<u16> {
        self.waiting.take()
    }

    /// Records a completed request. `barrier`: the request is the ring's barrier.
    #[inline]
    pub(crate) fn request_completed(&mut self, barrier: bool) {
        self.completed |= barrier;
    }

    /// Ends the barrier if its response is the one published last.
    pub(crate) fn response_published(&mut self) {
        if std::mem::take(&mut self.completed)
            && let Some(gate) = &mut self.gate
        {
            gate.complete();
        }
    }
}
