//! ORWRITE: each chunk is read, combined with the data sent, and written, all under one range lock.

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset};

use super::step::{ChunkCursor, StepContext};
use crate::command::{CommandCompletion, NextStep};
use crate::range_lock::{RangeLock, RangeLocks};
use crate::sense::Sense;

#[derive(Debug)]
pub(crate) struct OrWrite {
    start: ByteOffset,
    len: ByteLen,
    walk: ChunkCursor,
    fua: bool,
    locks: Arc<RangeLocks>,
    lock: Option<RangeLock>,
    state: OrWritePhase,
    copy: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OrWritePhase {
    Unlocked,
    Reading,
    Writing,
}

impl OrWrite {
    pub(crate) fn new(range: (ByteOffset, ByteLen), fua: bool, locks: Arc<RangeLocks>) -> OrWrite {
        let (start, len) = range;
        let walk = ChunkCursor::new(start, len);
        OrWrite { start, len, walk, fua, locks, lock: None, state: OrWritePhase::Unlocked, copy: Vec::new() }
    }

    /// Returns true if it has not requested its range lock.
    pub(super) fn is_new(&self) -> bool {
        self.lock.is_none() && self.state == OrWritePhase::Unlocked
    }

    pub(super) fn next(&mut self, context: &mut StepContext<'_>) -> NextStep {
        match self.state {
            OrWritePhase::Unlocked => {
                let lock = self.lock.get_or_insert_with(|| self.locks.lock(self.start, self.len, context.waker));
                if !lock.is_granted() {
                    return NextStep::Wait;
                }
            }
            OrWritePhase::Reading => return self.write(context),
            OrWritePhase::Writing => self.walk.advance(),
        }
        let Some((start, len)) = self.walk.chunk() else {
            // The command keeps the lock until it is dropped.
            return NextStep::Complete(CommandCompletion::good(self.len.0));
        };
        self.state = OrWritePhase::Reading;
        NextStep::Read { start, len: ByteLen(len as u64) }
    }

    fn write(&mut self, context: &mut StepContext<'_>) -> NextStep {
        self.state = OrWritePhase::Writing;
        // A chunk was read, so there is one.
        let (start, len) = self.walk.chunk().unwrap_or((self.start, 0));
        self.copy.resize(len, 0);
        if !context.data_out.copy(self.walk.done(), &mut self.copy) {
            return NextStep::Complete(CommandCompletion::check_condition(Sense::DATA_PHASE_ERROR));
        }
        for (found, sent) in context.scratch[..len].iter_mut().zip(&self.copy) {
            *found |= sent;
        }
        NextStep::Write { start, len: ByteLen(len as u64), fua: self.fua }
    }
}
