//! Queues that leave their worker: they are detached, move to another worker, or freeze.

use std::sync::mpsc::SyncSender;

use super::attached_queue::with_merges;
use super::{AttachedQueue, LeavingQueue, LeftQueue, MovingParts, OnDrained, Worker};
use crate::clock::Ticks;
use crate::poll_list::Phase;

impl Worker {
    /// Drains a queue. Signals `done` when it is detached. Its parked requests fail; those that are throttled are
    /// served as the limits allow.
    pub(crate) fn drain(&mut self, slot: u16, generation: u32, done: SyncSender<LeftQueue>) {
        if self.find(slot, generation).is_some() {
            self.channels.begin_leave(slot);
            self.drain_keeping_parked(slot, generation, done);
        }
    }

    /// Drains a queue as [`drain`](Self::drain) does, but leaves parked requests to the caller.
    pub(crate) fn drain_keeping_parked(&mut self, slot: u16, generation: u32, done: SyncSender<LeftQueue>) {
        let Some((attached, _)) = self.find(slot, generation) else { return };
        attached.on_drained = Some(OnDrained::Detach(done));
        self.begin_drain(slot);
    }

    /// Lets a draining queue's throttled requests pass.
    pub(crate) fn pass_throttled(&mut self, slot: u16, generation: u32) {
        if self.find(slot, generation).is_some() {
            self.channels.begin_leave_throttles(slot);
        }
    }

    /// Drains a queue that moves to another worker, and sends it to `left`. Its parked requests stay parked; its
    /// throttled ones are served as the limits allow. Drops `left` if there is no such queue, or it drains already.
    pub(crate) fn begin_move(&mut self, slot: u16, generation: u32, left: SyncSender<LeavingQueue>) {
        let Some(phase) = self.poll_list.phase(slot) else { return };
        let Some((attached, _)) = self.find(slot, generation) else { return };
        if attached.frozen || attached.on_drained.is_some() {
            return;
        }
        attached.on_drained = Some(OnDrained::Move(phase, left));
        self.begin_drain(slot);
    }

    fn begin_drain(&mut self, slot: u16) {
        self.poll_list.drain(slot);
        self.draining.push(slot);
        self.leaving = true;
        self.end_drained();
    }

    /// Closes disks and detaches queues that have waited for requests published now.
    #[cold]
    pub(super) fn end_leaving(&mut self) {
        if self.closing {
            self.end_closing();
        }
        self.draining.retain(|slot| self.poll_list.phase(*slot) == Some(Phase::Draining));
        let is_idle = |attached: &AttachedQueue| attached.runner.in_flight() == 0;
        if self.draining.iter().any(|slot| self.queues[usize::from(*slot)].as_deref().is_some_and(is_idle)) {
            self.end_drained();
        }
        self.leaving = self.closing || !self.draining.is_empty();
    }

    /// Continues to serve a queue whose move was begun and that is still here.
    pub(crate) fn cancel_move(&mut self, slot: u16, generation: u32) {
        let Some((attached, _)) = self.find(slot, generation) else { return };
        if let Some(OnDrained::Move(phase, _)) =
            attached.on_drained.take_if(|drained| matches!(drained, OnDrained::Move(..)))
        {
            self.poll_list.resume(slot, phase);
        }
    }

    /// Freezes a draining queue: its requests are abandoned when the storage answers them. Earlier completions are
    /// published first. Returns its position.
    pub(crate) fn freeze(&mut self, slot: u16, generation: u32) -> Option<Box<dyn std::any::Any + Send>> {
        self.complete();
        let (attached, _) = self.find(slot, generation)?;
        attached.frozen = true;
        Some(attached.runner.position())
    }

    /// Abandons the completed request at `at`, of a frozen queue.
    #[cold]
    pub(super) fn abandon_completed(&mut self, at: usize) {
        let done = &mut self.completing[at];
        if let Some(attached) = self.queues[usize::from(done.tag.queue())].as_deref_mut() {
            attached.runner.abandon_part(&mut self.context, done.tag.index(), done.buffer.take());
        }
    }

    /// Detaches the draining queues that have nothing in flight.
    pub(crate) fn end_drained(&mut self) {
        for slot in 0..self.queues.len() as u16 {
            let occupant = &mut self.queues[usize::from(slot)];
            let is_drained = |attached: &AttachedQueue| {
                let idle = attached.runner.in_flight() == 0 && !attached.dirty;
                // A move takes the open disks along.
                idle && !(matches!(attached.on_drained, Some(OnDrained::Move(..))) && attached.disks.is_closing())
            };
            if !occupant.as_deref().is_some_and(is_drained) || self.poll_list.phase(slot) != Some(Phase::Draining) {
                continue;
            }
            let Some(mut attached) = occupant.take() else { continue };
            // A deferred call is due now: nothing would send it later.
            attached.runner.send_due_call(Ticks(u64::MAX));
            self.context.cancel(self.client, attached.cookie(slot));
            self.poll_list.remove(slot);
            self.deferred_calls.retain(|(deferred, _)| *deferred != slot);
            self.channels.end_leave(slot);
            self.channels.end_leave_throttles(slot);
            let disks = attached.disks.queue_disks(&self.channels);
            attached.disks.close_all(&mut self.context, &mut self.channels);
            let merges = self.channels.take_merges(slot);
            let AttachedQueue { runner, kick, waker, on_drained, .. } = *attached;
            match on_drained {
                Some(OnDrained::Detach(left)) => {
                    let report = with_merges(runner.stats(self.clock.last(), false), merges);
                    let position = runner.detach(&mut self.context);
                    // The receiver may be gone.
                    let _ = left.send(LeftQueue { position, report });
                }
                Some(OnDrained::Move(phase, left)) => {
                    let idle = runner.leave(&mut self.context);
                    let parts = MovingParts { disks, kick, phase, waker, merges };
                    // The receiver waits until the move is cancelled.
                    let _ = left.send(LeavingQueue { idle, parts });
                }
                None => {}
            }
        }
    }
}
