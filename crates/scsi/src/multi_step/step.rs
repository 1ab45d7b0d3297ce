//! A step's memory, and the range that a command processes step by step.

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset, Wake};

use crate::command::DataOut;

/// See [`MultiStepCommand::SCRATCH`](super::MultiStepCommand::SCRATCH).
pub(super) const SCRATCH: usize = 64 << 10;

/// The caller's memory for a step.
pub(crate) struct StepContext<'a> {
    pub(crate) scratch: &'a mut [u8],
    pub(crate) data_out: &'a dyn DataOut,
    pub(crate) waker: &'a Arc<dyn Wake>,
}

/// A range that is processed in chunks of the scratch memory's size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkCursor {
    start: ByteOffset,
    len: u64,
    done: u64,
}

impl ChunkCursor {
    pub(crate) fn new(start: ByteOffset, len: ByteLen) -> ChunkCursor {
        ChunkCursor { start, len: len.0, done: 0 }
    }

    /// Returns the current chunk; `None` at the end.
    pub(crate) fn chunk(&self) -> Option<(ByteOffset, usize)> {
        let len = (self.len - self.done).min(SCRATCH as u64) as usize;
        (len > 0).then_some((ByteOffset(self.start.0.saturating_add(self.done)), len))
    }

    /// Returns the number of bytes before the current chunk.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn advance(&mut self) {
        if let Some((_, len)) = self.chunk() {
            self.done += len as u64;
        }
    }
}
