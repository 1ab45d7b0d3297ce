//! Multi-step commands on a request queue: each step is a request to the disk with private memory or the command's
//! own data, or a wait.

use mqblk_core::{Intake, Op, Outcome};
use mqblk_memory::{Buffer, BufferPool};
use mqblk_scsi::{CommandCompletion, MultiStepCommand, NextStep, Status};
use virtio_bindings::virtio_scsi as b;

use super::multi_step_state::{BlockedCommand, BounceSlot, MultiStepCommands, MultiStepState};
use super::{DataOutBuffer, RequestQueue};
use crate::token::{CommandState, ScsiToken};

/// Step recorded in the in-flight region for a command that has compared equal: see
/// [`MultiStepCommand::has_compared`].
const COMPARED: u8 = 1;

impl RequestQueue {
    /// Begins a multi-step command.
    pub(crate) fn begin_multi_step<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: CommandState,
        mut command: Box<MultiStepCommand>,
        (data, data_out): (Buffer, u64),
        into: &mut I,
    ) {
        self.multi_step.scratch.resize(MultiStepCommand::SCRATCH, 0);
        let compared = self.ring.device.take_recorded_step(token.head) == COMPARED;
        if compared {
            command.skip_compare();
        }
        let waits = !compared && self.device.is_replaying() && command.is_before_range_lock();
        token.is_multi_step = true;
        let state = MultiStepState { command, data: Some(data), data_out, bounce: None };
        self.multi_step.states.insert(token.head, state);
        if waits {
            // Woken when all commands that had compared have requested their range locks.
            return self.multi_step.blocked.push_back(BlockedCommand { token, step: None });
        }
        self.advance(pool, token, None, into);
        if compared {
            self.device.replayed_command_locked();
        }
    }

    /// Drops a command without completing it: see [`GuestQueue::abandon`](mqblk_core::GuestQueue::abandon).
    pub(crate) fn forget(&mut self, pool: &mut BufferPool, mut token: CommandState, buffer: Option<Buffer>) {
        match (self.multi_step.state(&token).and_then(|state| state.bounce.take()), buffer) {
            (Some(slot), Some(buffer)) => {
                if let Some(bounce) = &mut self.multi_step.bounce_pool {
                    bounce.release(pool, buffer, slot.slot);
                }
            }
            (_, Some(own)) => pool.release(own),
            (_, None) => {}
        }
        // Its range lock is held for as long as the queue exists: nothing more is published.
        self.multi_step.end(pool, &mut token);
        token.response.release(pool);
    }

    /// Handles the end of a step.
    pub(crate) fn step_ended<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: CommandState,
        outcome: Outcome,
        buffer: Option<Buffer>,
        into: &mut I,
    ) {
        let Some(state) = self.multi_step.state(&token) else { return };
        match (state.bounce.take(), buffer) {
            (Some(slot), Some(buffer)) => {
                if let Some(len) = slot.reads {
                    // A failed read copies stale bytes: the command checks the outcome first.
                    let _ = pool.copy_out(&buffer, 0, &mut self.multi_step.scratch[..len.0 as usize]);
                }
                if let Some(bounce) = &mut self.multi_step.bounce_pool {
                    bounce.release(pool, buffer, slot.slot);
                }
            }
            (_, Some(own)) => state.data = Some(own),
            (_, None) => {}
        }
        if token.abort_marks != 0 || outcome == Outcome::Aborted {
            self.multi_step.end(pool, &mut token);
            self.abort(pool, token);
        } else {
            self.advance(pool, token, Some(outcome), into);
        }
        self.retry_starved(pool, into);
    }

    /// Gets the next step of a command and starts it.
    fn advance<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        token: CommandState,
        before: Option<Outcome>,
        into: &mut I,
    ) {
        let MultiStepCommands { states, scratch, .. } = &mut self.multi_step;
        let Some(MultiStepState { command, data: Some(data), data_out, .. }) = states.get_mut(&token.head) else {
            return;
        };
        let out = DataOutBuffer { pool, buffer: data, len: *data_out };
        self.buffers.data_in.clear();
        let next = command.next(before, scratch, &out, &self.waker, &mut self.buffers);
        if command.has_compared() {
            // Recorded before the write is submitted: a replay after a crash must not compare with the data of its
            // own write.
            self.ring.device.record_step(token.head, COMPARED);
        }
        self.issue_step(pool, token, next, None, into);
    }

    /// Starts one step. `filled`: the bytes to write, if the scratch memory no longer holds them.
    fn issue_step<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        token: CommandState,
        step: NextStep,
        filled: Option<Vec<u8>>,
        into: &mut I,
    ) {
        let unit = token.unit;
        let (op, start, len) = match step {
            NextStep::Read { start, len } => (Op::Read, start, len),
            NextStep::Write { start, len, fua } => (Op::Write { fua }, start, len),
            NextStep::Disk { op, start, len } => {
                let state = self.multi_step.state(&token).filter(|_| op.has_data());
                let own = state.and_then(|state| state.data.take());
                if let Some(own) = &own {
                    pool.truncate(own, len);
                }
                return into.admit(token.token(), unit, op, start, len, own);
            }
            NextStep::Wait => return self.multi_step.blocked.push_back(BlockedCommand { token, step: None }),
            NextStep::Complete(ending) => return self.complete_multi_step(pool, token, &ending),
        };
        let (buffer, slot) = match self.multi_step.take_bounce(pool, len) {
            Ok(Some(taken)) => taken,
            Ok(None) => {
                let bytes = filled.unwrap_or_else(|| self.multi_step.scratch[..len.0 as usize].to_vec());
                return self.multi_step.blocked.push_back(BlockedCommand { token, step: Some((step, bytes)) });
            }
            Err(_) => {
                let busy = CommandCompletion { status: Status::Busy, sense: None, transferred: 0 };
                return self.complete_multi_step(pool, token, &busy);
            }
        };
        let reads = (op == Op::Read).then_some(len);
        if reads.is_none() {
            let bytes = filled.as_deref().unwrap_or(&self.multi_step.scratch[..len.0 as usize]);
            let copied = pool.copy_in(&buffer, 0, bytes);
            debug_assert!(copied, "private memory has the requested length");
        }
        if let Some(state) = self.multi_step.state(&token) {
            state.bounce = Some(BounceSlot { slot, reads });
        }
        into.admit(token.token(), unit, op, start, len, Some(buffer));
    }

    fn complete_multi_step(&mut self, pool: &mut BufferPool, mut token: CommandState, ending: &CommandCompletion) {
        if let Some(data) = self.multi_step.state(&token).and_then(|state| state.data.as_ref()) {
            let replied = token.has_data_in && !self.buffers.data_in.is_empty();
            let _ = replied && pool.copy_in(data, 0, &self.buffers.data_in);
        }
        self.multi_step.end(pool, &mut token);
        self.complete(pool, token, b::VIRTIO_SCSI_S_OK, ending);
    }

    /// Retries all blocked commands.
    pub(crate) fn retry_blocked<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) {
        for _ in 0..self.multi_step.blocked.len() {
            match self.multi_step.blocked.pop_front() {
                Some(held) if self.device.is_replaying() && self.multi_step.is_before_range_lock(&held.token) => {
                    self.multi_step.blocked.push_back(held);
                }
                Some(BlockedCommand { token, step: None }) => self.advance(pool, token, None, into),
                Some(BlockedCommand { token, step: Some((step, bytes)) }) => {
                    self.issue_step(pool, token, step, Some(bytes), into)
                }
                None => return,
            }
        }
    }

    /// Continues the first command that waits for private memory, some of which became free.
    fn retry_starved<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) {
        let starved = self.multi_step.blocked.iter().position(|held| held.step.is_some());
        if let Some(BlockedCommand { token, step: Some((step, bytes)) }) =
            starved.and_then(|at| self.multi_step.blocked.remove(at))
        {
            self.issue_step(pool, token, step, Some(bytes), into);
        }
    }
}
