//! Commands of several steps on a request queue: each step is a request to the disk, over private memory or over the command's
//! own data, or a wait for something else.

use std::collections::VecDeque;
use std::io;

use mqblk_core::{ByteLen, Intake, Op, Outcome};
use mqblk_memory::{BouncePool, Buffer, BufferPool};
use mqblk_scsi::{Ending, Next, Sequence, Status};
use virtio_bindings::virtio_scsi as b;

use crate::commands::{OutData, RequestQueue};
use crate::queue::ScsiToken;

/// Steps over private memory that one queue has in flight; further ones wait. Such commands are rare, and each has only one.
const STEPS: u32 = 4;

/// The step that is noted of a command that has compared equal: see [`Sequence::has_compared`].
const COMPARED: u8 = 1;

/// The state of a command of several steps.
#[derive(Debug)]
pub struct Several {
    sequence: Box<Sequence>,
    /// The command's own data; not here while a step uses it.
    data: Option<Buffer>,
    /// How much of it the driver sent.
    data_out: u64,
    /// The step in flight uses private memory.
    private: Option<Private>,
}

/// The private memory of a step in flight.
#[derive(Clone, Copy, Debug)]
struct Private {
    slot: u32,
    /// What is read into it.
    reads: Option<ByteLen>,
}

/// A command between two steps that cannot go on now.
struct Held {
    token: ScsiToken,
    /// The step that found no private memory, with what it writes; `None`: the sequence itself waits.
    step: Option<(Next, Vec<u8>)>,
}

impl Held {
    fn is_before_section(&self) -> bool {
        self.token.several.as_ref().is_some_and(|several| several.sequence.is_before_section())
    }
}

/// What a queue keeps for such commands. Nothing is allocated before the first.
#[derive(Default)]
pub struct Sequences {
    /// What the sequence of the moment reads or fills.
    scratch: Vec<u8>,
    private: Option<BouncePool>,
    held: VecDeque<Held>,
    /// Those of commands that have ended, with their sections, until the answers are visible: see [`end`](Self::end).
    ended: Vec<Sequence>,
}

impl Sequences {
    /// A command goes no further: gives back what it holds. Its section it keeps until its answer is [visible](Self::published): one
    /// that saw what it wrote, and was answered before it, would be undone if the process died then and it was done again.
    fn end(&mut self, pool: &mut BufferPool, token: &mut ScsiToken) {
        let Some(several) = token.several.take() else { return };
        let Several { sequence, data, .. } = *several;
        if let Some(data) = data {
            pool.release(data);
        }
        self.ended.push(*sequence);
    }

    /// All answers so far are visible.
    #[inline]
    pub(crate) fn published(&mut self) {
        if !self.ended.is_empty() {
            self.ended.clear();
        }
    }

    /// Commands that wait.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// What their answers need.
    pub fn held_tokens(&self) -> impl Iterator<Item = &ScsiToken> {
        self.held.iter().map(|held| &held.token)
    }

    /// Takes out those that are meant; they are to be answered.
    pub fn take_held(&mut self, pool: &mut BufferPool, means: impl Fn(&ScsiToken) -> bool) -> Vec<ScsiToken> {
        let mut taken = Vec::new();
        for at in (0..self.held.len()).rev() {
            if means(&self.held[at].token)
                && let Some(Held { mut token, .. }) = self.held.remove(at)
            {
                self.end(pool, &mut token);
                taken.push(token);
            }
        }
        taken
    }

    /// The queue ends.
    pub fn close(&mut self, pool: &mut BufferPool) {
        if let Some(private) = self.private.take() {
            private.close(pool);
        }
    }

    /// A buffer of private memory; `None` when all are in use.
    fn take(&mut self, pool: &mut BufferPool, len: ByteLen) -> io::Result<Option<(Buffer, u32)>> {
        let private = match self.private.take() {
            Some(private) => private,
            None => BouncePool::new(pool, STEPS, ByteLen(Sequence::SCRATCH as u64))?,
        };
        Ok(self.private.insert(private).take(pool, len))
    }
}

impl RequestQueue {
    /// Begins a command of several steps.
    #[cold]
    pub(crate) fn begin_sequence<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: ScsiToken,
        mut sequence: Box<Sequence>,
        (data, data_out): (Buffer, u64),
        into: &mut I,
    ) {
        self.sequences.scratch.resize(Sequence::SCRATCH, 0);
        let compared = self.ring.device.take_step(token.head) == COMPARED;
        if compared {
            sequence.skip_compare();
        }
        let waits = !compared && self.device.is_resuming() && sequence.is_before_section();
        token.several = Some(Box::new(Several { sequence, data: Some(data), data_out, private: None }));
        if waits {
            // Woken when all that had compared are in their sections.
            return self.sequences.held.push_back(Held { token, step: None });
        }
        self.advance(pool, token, None, into);
        if compared {
            self.device.compared_is_back();
        }
    }

    /// A command stays unanswered: see [`VirtioQueue::forget`](mqblk_virtio::VirtioQueue::forget).
    pub(crate) fn forget(&mut self, pool: &mut BufferPool, mut token: ScsiToken, buffer: Option<Buffer>) {
        match (token.several.as_mut().and_then(|several| several.private.take()), buffer) {
            (Some(private), Some(buffer)) => {
                if let Some(memory) = &mut self.sequences.private {
                    memory.release(pool, buffer, private.slot);
                }
            }
            (_, Some(own)) => pool.release(own),
            (_, None) => {}
        }
        // Its section stays its own for as long as the queue is here: nothing of it is published any more.
        self.sequences.end(pool, &mut token);
        token.answer.release(pool);
    }

    /// A step has ended.
    #[cold]
    pub(crate) fn step_ended<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: ScsiToken,
        outcome: Outcome,
        buffer: Option<Buffer>,
        into: &mut I,
    ) {
        let Some(several) = token.several.as_mut() else { return };
        match (several.private.take(), buffer) {
            (Some(private), Some(buffer)) => {
                if let Some(len) = private.reads {
                    // A read that failed shows what was there: the sequence looks at the outcome first.
                    let _ = pool.copy_out(&buffer, 0, &mut self.sequences.scratch[..len.0 as usize]);
                }
                if let Some(memory) = &mut self.sequences.private {
                    memory.release(pool, buffer, private.slot);
                }
            }
            (_, Some(own)) => several.data = Some(own),
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

    /// Asks a command for its next step, and does it.
    fn advance<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        mut token: ScsiToken,
        before: Option<Outcome>,
        into: &mut I,
    ) {
        let Some(several) = token.several.as_mut() else { return };
        let Some(data) = &several.data else { return };
        let out = OutData { pool, buffer: data, len: several.data_out };
        let scratch = &mut self.sequences.scratch[..];
        self.work.reply.clear();
        let next = several.sequence.next(before, scratch, &out, &self.waker, &mut self.work);
        if several.sequence.has_compared() {
            // Before the write is handed over, or a crash would have the command compare with what it wrote itself.
            self.ring.device.note_step(token.head, COMPARED);
        }
        self.issue(pool, token, next, None, into);
    }

    /// Does one step. `filled`: what it writes, if the scratch memory does not hold it any more.
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
                let own = token.several.as_mut().filter(|_| op.has_data()).and_then(|several| several.data.take());
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
            debug_assert!(copied, "private memory is as long as it was asked for");
        }
        if let Some(several) = token.several.as_mut() {
            several.private = Some(Private { slot, reads });
        }
        into.admit(token, unit, op, start, len, Some(buffer));
    }

    fn end_sequence(&mut self, pool: &mut BufferPool, mut token: ScsiToken, ending: &Ending) {
        if let Some(data) = token.several.as_ref().and_then(|several| several.data.as_ref()) {
            let replied = token.data_in && !self.work.reply.is_empty();
            let _ = replied && pool.copy_in(data, 0, &self.work.reply);
        }
        self.sequences.end(pool, &mut token);
        self.answer(pool, token, b::VIRTIO_SCSI_S_OK, ending);
    }

    /// Tries all commands that wait again.
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

    /// Private memory became free: the first command that waits for some goes on.
    fn resume_starved<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) {
        let starved = self.sequences.held.iter().position(|held| held.step.is_some());
        if let Some(Held { token, step: Some((step, bytes)) }) = starved.and_then(|at| self.sequences.held.remove(at)) {
            self.issue(pool, token, step, Some(bytes), into);
        }
    }
}
