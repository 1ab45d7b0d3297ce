//! COMPARE AND WRITE: a range lock keeps commands of its kind from the blocks between its read and its write.

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset};

use super::step::StepContext;
use crate::command::{CommandCompletion, NextStep};
use crate::range_lock::{RangeLock, RangeLocks};
use crate::sense::Sense;

#[derive(Debug)]
pub(crate) struct CompareAndWrite {
    start: ByteOffset,
    len: usize,
    fua: bool,
    locks: Arc<RangeLocks>,
    state: ComparePhase,
    /// True if it compared equal in a previous process: the write may have happened, entirely or in part.
    has_compared_before: bool,
    /// The data to compare with, then the data to write: copied once, when the lock is granted.
    data: Vec<u8>,
}

#[derive(Debug)]
enum ComparePhase {
    New,
    WaitingForLock(RangeLock),
    Reading(RangeLock),
    Writing(RangeLock),
    /// The lock is kept until the command's completion is visible.
    Done(Option<RangeLock>),
}

impl CompareAndWrite {
    /// Returns the command; the range fits in the scratch memory.
    pub(crate) fn new(range: (ByteOffset, ByteLen), fua: bool, locks: Arc<RangeLocks>) -> CompareAndWrite {
        CompareAndWrite {
            start: range.0,
            len: range.1.0 as usize,
            fua,
            locks,
            state: ComparePhase::New,
            has_compared_before: false,
            data: Vec::new(),
        }
    }

    /// See [`MultiStepCommand::skip_compare`](super::MultiStepCommand::skip_compare).
    pub(super) fn skip_compare(&mut self) {
        self.has_compared_before = true;
    }

    /// Returns true if it has not requested its range lock.
    pub(super) fn is_new(&self) -> bool {
        matches!(self.state, ComparePhase::New)
    }

    /// Returns true if it has compared equal and writes.
    pub(super) fn has_compared(&self) -> bool {
        matches!(self.state, ComparePhase::Writing(_))
    }

    pub(super) fn next(&mut self, context: &mut StepContext<'_>) -> NextStep {
        let len = ByteLen(self.len as u64);
        match std::mem::replace(&mut self.state, ComparePhase::Done(None)) {
            ComparePhase::New => {
                let lock = self.locks.lock(self.start, len, context.waker);
                self.continue_with_lock(lock, context)
            }
            ComparePhase::WaitingForLock(lock) => self.continue_with_lock(lock, context),
            ComparePhase::Reading(lock) => {
                let expected = &self.data[..self.len];
                let found = &context.scratch[..self.len];
                if let Some(offset) = expected.iter().zip(found.iter()).position(|(expected, found)| expected != found)
                {
                    return NextStep::Complete(CommandCompletion::check_condition(Sense::miscompare(offset as u64)));
                }
                self.write(lock, context)
            }
            ComparePhase::Writing(lock) => {
                self.state = ComparePhase::Done(Some(lock));
                NextStep::Complete(CommandCompletion::good(2 * len.0))
            }
            ComparePhase::Done(lock) => {
                self.state = ComparePhase::Done(lock);
                NextStep::Complete(CommandCompletion::good(2 * len.0))
            }
        }
    }

    fn write(&mut self, lock: RangeLock, context: &mut StepContext<'_>) -> NextStep {
        context.scratch[..self.len].copy_from_slice(&self.data[self.len..]);
        self.state = ComparePhase::Writing(lock);
        NextStep::Write { start: self.start, len: ByteLen(self.len as u64), fua: self.fua }
    }

    fn continue_with_lock(&mut self, lock: RangeLock, context: &mut StepContext<'_>) -> NextStep {
        if !lock.is_granted() {
            self.state = ComparePhase::WaitingForLock(lock);
            return NextStep::Wait;
        }
        self.data.resize(2 * self.len, 0);
        if !context.data_out.copy(0, &mut self.data) {
            return NextStep::Complete(CommandCompletion::check_condition(Sense::DATA_PHASE_ERROR));
        }
        if self.has_compared_before {
            return self.write(lock, context);
        }
        self.state = ComparePhase::Reading(lock);
        NextStep::Read { start: self.start, len: ByteLen(self.len as u64) }
    }
}
