//! Multi-step commands on a request queue: each step is a request to the disk with private memory or the command's
//! own data, or a wait.

use std::collections::VecDeque;
use std::io;

use mqblk_core::{ByteLen, Intake, Op, Outcome};
use mqblk_memory::{BouncePool, Buffer, BufferPool};
use mqblk_scsi::{Ending, Next, Sequence, Status};
use virtio_bindings::virtio_scsi as b;

use crate::commands::{OutData, RequestQueue};
use crate::queue::ScsiToken;

/// Steps with private memory that one queue has in flight; further ones wait. Multi-step commands are rare, and each
/// has at most one such step.
const STEPS: u32 = 4;

/// Step recorded in the in-flight region for a command that has compared equal: see
/// [`MultiStepCommand::has_compared`].
const COMPARED: u8 = 1;

/// State of a multi-step command.
#[derive(Debug)]
pub struct Several {
    sequence: Box<Sequence>,
    /// The command's own data; `None` while a step uses it.
    data: Option<Buffer>,
    /// Length of the data-out buffer.
    data_out: u64,
    /// Private memory of the step in flight.
    private: Option<Private>,
}

/// Private memory of a step in flight.
#[derive(Clone, Copy, Debug)]
struct Private {
    slot: u32,
    /// Length of a read into it.
    reads: Option<ByteLen>,
}

/// A blocked command, between two steps.
struct Held {
    token: ScsiToken,
    /// The step that found no private memory, with the bytes it writes; `None`: the command itself waits.
    step: Option<(Next, Vec<u8>)>,
}

impl Held {
    fn is_before_section(&self) -> bool {
        self.token.several.as_ref().is_some_and(|multi_step| multi_step.sequence.is_before_section())
    }
}

/// Multi-step commands of a queue. Nothing is allocated before the first.
#[derive(Default)]
pub struct Sequences {
    /// Scratch memory lent to a step.
    scratch: Vec<u8>,
    private: Option<BouncePool>,
    held: VecDeque<Held>,
    /// Commands that have ended, with their range locks, until their responses are visible: see [`end`](Self::end).
    ended: Vec<Sequence>,
}

impl Sequences {
    /// Ends a command and releases its data. The range lock is kept until its response is [visible](Self::published):
    /// a command that saw what this one wrote, and completed first, would be undone if the process died then and this
    /// one was replayed.
    fn end(&mut self, pool: &mut BufferPool, token: &mut ScsiToken) {
        let Some(multi_step) = token.several.take() else { return };
        let Several { sequence: command, data, .. } = *multi_step;
        if let Some(data) = data {
            pool.release(data);
        }
        self.ended.push(*command);
    }

    /// Releases ended commands: all responses so far are visible.
    #[inline]
    pub(crate) fn published(&mut self) {
        if !self.ended.is_empty() {
            self.ended.clear();
        }
    }

    /// Returns the number of blocked commands.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Returns the tokens of blocked commands.
    pub fn held_tokens(&self) -> impl Iterator<Item = &ScsiToken> {
        self.held.iter().map(|held| &held.token)
    }

    /// Removes blocked commands that match; the caller completes them.
    pub fn take_held(&mut self, pool: &mut BufferPool, matches: impl Fn(&ScsiToken) -> bool) -> Vec<ScsiToken> {
        let mut taken = Vec::new();
        for at in (0..self.held.len()).rev() {
            if matches(&self.held[at].token)
                && let Some(Held { mut token, .. }) = self.held.remove(at)
            {
                self.end(pool, &mut token);
                taken.push(token);
            }
        }
        taken
    }

    /// Closes the queue.
    pub fn close(&mut self, pool: &mut BufferPool) {
        if let Some(bounce) = self.private.take() {
            bounce.close(pool);
        }
    }

    /// Returns a buffer of private memory, or `None` if all are in use.
    fn take(&mut self, pool: &mut BufferPool, len: ByteLen) -> io::Result<Option<(Buffer, u32)>> {
        let bounce = match self.private.take() {
            Some(bounce) => bounce,
            None => BouncePool::new(pool, STEPS, ByteLen(Sequence::SCRATCH as u64))?,
        };
        Ok(self.private.insert(bounce).take(pool, len))
    }
}

impl RequestQueue {
    /// Begins a multi-step command.
    #[cold]
    pub(crate) fn begin_sequence<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: ScsiToken,
        mut command: Box<Sequence>,
        (data, data_out): (Buffer, u64),
        into: &mut I,
    ) {
        self.sequences.scratch.resize(Sequence::SCRATCH, 0);
        let compared = self.ring.device.take_step(token.head) == COMPARED;
        if compared {
            command.skip_compare();
        }
        let waits = !compared && self.device.is_resuming() && command.is_before_section();
        token.several = Some(Box::new(Several { sequence: command, data: Some(data), data_out, private: None }));
        if waits {
            // Woken when all commands that had compared have requested their range locks.
            return self.sequences.held.push_back(Held { token, step: None });
        }
        self.advance(pool, token, None, into);
        if compared {
            self.device.compared_is_back();
        }
    }

    /// Drops a command without completing it: see [`VirtioQueue::forget`](mqblk_virtio::VirtioQueue::forget).
    pub(crate) fn forget(&mut self, pool: &mut BufferPool, mut token: ScsiToken, buffer: Option<Buffer>) {
        match (token.several.as_mut().and_then(|multi_step| multi_step.private.take()), buffer) {
            (Some(slot), Some(buffer)) => {
                if let Some(bounce) = &mut self.sequences.private {
                    bounce.release(pool, buffer, slot.slot);
                }
            }
            (_, Some(own)) => pool.release(own),
            (_, None) => {}
        }
        // Its range lock is held for as long as the queue exists: nothing more is published.
        self.sequences.end(pool, &mut token);
        token.answer.release(pool);
    }

    /// Handles the end of a step.
    #[cold]
    pub(crate) fn step_ended<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: ScsiToken,
        outcome: Outcome,
        buffer: Option<Buffer>,
        into: &mut I,
    ) {
        let Some(multi_step) = token.several.as_mut() else { return };
        match (multi_step.private.take(), buffer) {
            (Some(slot), Some(buffer)) => {
                if let Some(len) = slot.reads {
                    // A failed read copies stale bytes: the command checks the outcome first.
                    let _ = pool.copy_out(&buffer, 0, &mut self.sequences.scratch[..len.0 as usize]);
                }
                if let Some(bounce) = &mut self.sequences.private {
                    bounce.release(pool, buffer, slot.slot);
                }
            }
            (_, Some(own)) => multi_step.data = Some(own),
            (_, None) => {}
        }
        if token.marks != 0 || outcome == Outcome::Aborted {
            self.sequences.end(pool, &mut token);
            self.abort(pool, token);
        } else {
            self.advance(pool, token, Some(outcome), into);
        }
        self.resume_starved(pool, into);
    }

    /// Gets the next step of a command and starts it.
    fn advance<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: ScsiToken,
        before: Option<Outcome>,
        into: &mut I,
    ) {
        let Some(multi_step) = token.several.as_mut() else { return };
        let Some(data) = &multi_step.data else { return };
        let out = OutData { pool, buffer: data, len: multi_step.data_out };
        let scratch = &mut self.sequences.scratch[..];
        self.work.reply.clear();
        let next = multi_step.sequence.next(before, scratch, &out, &self.waker, &mut self.work);
        if multi_step.sequence.has_compared() {
            // Recorded before the write is submitted: a replay after a crash must not compare with the data of its
            // own write.
            self.ring.device.note_step(token.head, COMPARED);
        }
        self.issue(pool, token, next, None, into);
    }

    /// Starts one step. `filled`: the bytes to write, if the scratch memory does not hold them any more.
    fn issue<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: ScsiToken,
        step: Next,
        filled: Option<Vec<u8>>,
        into: &mut I,
    ) {
        let unit = token.unit;
        let (op, start, len) = match step {
            Next::Read { start, len } => (Op::Read, start, len),
            Next::Write { start, len, fua } => (Op::Write { fua }, start, len),
            Next::Disk { op, start, len } => {
                let own =
                    token.several.as_mut().filter(|_| op.has_data()).and_then(|multi_step| multi_step.data.take());
                if let Some(own) = &own {
                    pool.truncate(own, len);
                }
                return into.admit(token, unit, op, start, len, own);
            }
            Next::Wait => return self.sequences.held.push_back(Held { token, step: None }),
            Next::End(ending) => return self.end_sequence(pool, token, &ending),
        };
        let (buffer, slot) = match self.sequences.take(pool, len) {
            Ok(Some(taken)) => taken,
            Ok(None) => {
                let bytes = filled.unwrap_or_else(|| self.sequences.scratch[..len.0 as usize].to_vec());
                return self.sequences.held.push_back(Held { token, step: Some((step, bytes)) });
            }
            Err(_) => {
                let busy = Ending { status: Status::Busy, sense: None, transferred: 0 };
                return self.end_sequence(pool, token, &busy);
            }
        };
        let reads = (op == Op::Read).then_some(len);
        if reads.is_none() {
            let bytes = filled.as_deref().unwrap_or(&self.sequences.scratch[..len.0 as usize]);
            let copied = pool.copy_in(&buffer, 0, bytes);
            debug_assert!(copied, "private memory has the requested length");
        }
        if let Some(multi_step) = token.several.as_mut() {
            multi_step.private = Some(Private { slot, reads });
        }
        into.admit(token, unit, op, start, len, Some(buffer));
    }

    fn end_sequence(&mut self, pool: &mut BufferPool, mut token: ScsiToken, ending: &Ending) {
        if let Some(data) = token.several.as_ref().and_then(|multi_step| multi_step.data.as_ref()) {
            let replied = token.data_in && !self.work.reply.is_empty();
            let _ = replied && pool.copy_in(data, 0, &self.work.reply);
        }
        self.sequences.end(pool, &mut token);
        self.answer(pool, token, b::VIRTIO_SCSI_S_OK, ending);
    }

    /// Retries all blocked commands.
    pub(crate) fn resume_held<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) {
        for _ in 0..self.sequences.held.len() {
            match self.sequences.held.pop_front() {
                Some(held) if self.device.is_resuming() && held.is_before_section() => {
                    self.sequences.held.push_back(held);
                }
                Some(Held { token, step: None }) => self.advance(pool, token, None, into),
                Some(Held { token, step: Some((step, bytes)) }) => self.issue(pool, token, step, Some(bytes), into),
                None => return,
            }
        }
    }

    /// Continues the first command that waits for private memory, some of which became free.
    fn resume_starved<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) {
        let starved = self.sequences.held.iter().position(|held| held.step.is_some());
        if let Some(Held { token, step: Some((step, bytes)) }) = starved.and_then(|at| self.sequences.held.remove(at)) {
            self.issue(pool, token, step, Some(bytes), into);
        }
    }
}
