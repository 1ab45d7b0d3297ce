//! WRITE SAME with a pattern that has to be written as data.

use mqblk_core::{ByteLen, ByteOffset};

use super::step::{ChunkCursor, StepContext};
use crate::command::{CommandCompletion, NextStep};

#[derive(Debug)]
pub(crate) struct WriteSame {
    walk: ChunkCursor,
    pattern: Vec<u8>,
    fua: bool,
    transferred: u64,
    writing: bool,
}

impl WriteSame {
    /// Returns the command; `pattern` is one block.
    pub(crate) fn new(range: (ByteOffset, ByteLen), pattern: Vec<u8>, fua: bool, transferred: u64) -> WriteSame {
        WriteSame { walk: ChunkCursor::new(range.0, range.1), pattern, fua, transferred, writing: false }
    }

    pub(super) fn next(&mut self, context: &mut StepContext<'_>) -> NextStep {
        if std::mem::replace(&mut self.writing, true) {
            self.walk.advance();
        }
        let Some((start, len)) = self.walk.chunk() else {
            return NextStep::Complete(CommandCompletion::good(self.transferred));
        };
        // The scratch memory is only lent for one step, so it is filled each time.
        for block in context.scratch[..len].chunks_exact_mut(self.pattern.len()) {
            block.copy_from_slice(&self.pattern);
        }
        NextStep::Write { start, len: ByteLen(len as u64), fua: self.fua }
    }
}
