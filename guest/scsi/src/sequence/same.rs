//! WRITE SAME with a pattern that has to be written as data.

use mqblk_core::{ByteLen, ByteOffset};

use super::{Lent, Walk};
use crate::step::{Ending, Next};

#[derive(Debug)]
pub(crate) struct Same {
    walk: Walk,
    pattern: Vec<u8>,
    fua: bool,
    transferred: u64,
    writing: bool,
}

impl Same {
    /// Returns the command; `pattern` is one block.
    pub(crate) fn new(range: (ByteOffset, ByteLen), pattern: Vec<u8>, fua: bool, transferred: u64) -> Same {
        Same { walk: Walk::new(range.0, range.1), pattern, fua, transferred, writing: false }
    }

    pub(super) fn next(&mut self, context: &mut Lent<'_>) -> Next {
        if std::mem::replace(&mut self.writing, true) {
            self.walk.advance();
        }
        let Some((start, len)) = self.walk.piece() else {
            return Next::End(Ending::good(self.transferred));
        };
        // The scratch memory is only lent for one step, so it is filled each time.
        for block in context.scratch[..len].chunks_exact_mut(self.pattern.len()) {
            block.copy_from_slice(&self.pattern);
        }
        Next::Write { start, len: ByteLen(len as u64), fua: self.fua }
    }
}
