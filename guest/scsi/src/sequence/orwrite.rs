//! ORWRITE: each chunk is read, combined with the data sent, and written, all under one range lock.

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset};

use super::{Lent, Walk};
use crate::atomic::{Section, Sections};
use crate::sense::Sense;
use crate::step::{Ending, Next};

#[derive(Debug)]
pub(crate) struct OrWrite {
    start: ByteOffset,
    len: ByteLen,
    walk: Walk,
    fua: bool,
    sections: Arc<Sections>,
    section: Option<Section>,
    state: State,
    copy: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Outside,
    Reading,
    Writing,
}

impl OrWrite {
    pub(crate) fn new(range: (ByteOffset, ByteLen), fua: bool, sections: Arc<Sections>) -> OrWrite {
        let (start, len) = range;
        let walk = Walk::new(start, len);
        OrWrite { start, len, walk, fua, sections, section: None, state: State::Outside, copy: Vec::new() }
    }

    /// Returns true if it has not requested its range lock.
    pub(super) fn is_fresh(&self) -> bool {
        self.section.is_none() && self.state == State::Outside
    }

    pub(super) fn next(&mut self, context: &mut Lent<'_>) -> Next {
        match self.state {
            State::Outside => {
                let lock = self.section.get_or_insert_with(|| self.sections.enter(self.start, self.len, context.waker));
                if !lock.entered() {
                    return Next::Wait;
                }
            }
            State::Reading => return self.write(context),
            State::Writing => self.walk.advance(),
        }
        let Some((start, len)) = self.walk.piece() else {
            // The command keeps the lock until it is dropped.
            return Next::End(Ending::good(self.len.0));
        };
        self.state = State::Reading;
        Next::Read { start, len: ByteLen(len as u64) }
    }

    fn write(&mut self, context: &mut Lent<'_>) -> Next {
        self.state = State::Writing;
        // A chunk was read, so there is one.
        let (start, len) = self.walk.piece().unwrap_or((self.start, 0));
        self.copy.resize(len, 0);
        if !context.data_out.copy(self.walk.done(), &mut self.copy) {
            return Next::End(Ending::check(Sense::DATA_GONE));
        }
        for (found, sent) in context.scratch[..len].iter_mut().zip(&self.copy) {
            *found |= sent;
        }
        Next::Write { start, len: ByteLen(len as u64), fua: self.fua }
    }
}
