//! COMPARE AND WRITE: a range lock keeps commands of its kind from the blocks between its read and its write.

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset};

use super::Lent;
use crate::atomic::{Section, Sections};
use crate::sense::Sense;
use crate::step::{Ending, Next};

#[derive(Debug)]
pub(crate) struct Compare {
    start: ByteOffset,
    len: usize,
    fua: bool,
    locks: Arc<Sections>,
    state: State,
    /// It compared equal in a previous process: the write may have happened, entirely or in part.
    compared: bool,
    /// The data to compare with, then the data to write: copied once, when the lock is granted.
    data: Vec<u8>,
}

#[derive(Debug)]
enum State {
    Fresh,
    InLine(Section),
    Reading(Section),
    Writing(Section),
    /// The lock is kept until the command's completion is visible.
    Over(Option<Section>),
}

impl Compare {
    /// Returns the command; the range fits in the scratch memory.
    pub(crate) fn new(range: (ByteOffset, ByteLen), fua: bool, locks: Arc<Sections>) -> Compare {
        Compare {
            start: range.0,
            len: range.1.0 as usize,
            fua,
            locks,
            state: State::Fresh,
            compared: false,
            data: Vec::new(),
        }
    }

    /// See [`MultiStepCommand::skip_compare`](super::MultiStepCommand::skip_compare).
    pub(super) fn skip_compare(&mut self) {
        self.compared = true;
    }

    /// Returns true if it has not requested its range lock.
    pub(super) fn is_fresh(&self) -> bool {
        matches!(self.state, State::Fresh)
    }

    /// Returns true if it has compared equal and writes.
    pub(super) fn has_compared(&self) -> bool {
        matches!(self.state, State::Writing(_))
    }

    pub(super) fn next(&mut self, context: &mut Lent<'_>) -> Next {
        let len = ByteLen(self.len as u64);
        match std::mem::replace(&mut self.state, State::Over(None)) {
            State::Fresh => {
                let lock = self.locks.enter(self.start, len, context.waker);
                self.enter(lock, context)
            }
            State::InLine(lock) => self.enter(lock, context),
            State::Reading(lock) => {
                let expected = &self.data[..self.len];
                let found = &context.scratch[..self.len];
                if let Some(offset) = expected.iter().zip(found.iter()).position(|(expected, found)| expected != found)
                {
                    return Next::End(Ending::check(Sense::miscompare(offset as u64)));
                }
                self.write(lock, context)
            }
            State::Writing(lock) => {
                self.state = State::Over(Some(lock));
                Next::End(Ending::good(2 * len.0))
            }
            State::Over(lock) => {
                self.state = State::Over(lock);
                Next::End(Ending::good(2 * len.0))
            }
        }
    }

    fn write(&mut self, lock: Section, context: &mut Lent<'_>) -> Next {
        context.scratch[..self.len].copy_from_slice(&self.data[self.len..]);
        self.state = State::Writing(lock);
        Next::Write { start: self.start, len: ByteLen(self.len as u64), fua: self.fua }
    }

    fn enter(&mut self, lock: Section, context: &mut Lent<'_>) -> Next {
        if !lock.entered() {
            self.state = State::InLine(lock);
            return Next::Wait;
        }
        self.data.resize(2 * self.len, 0);
        if !context.data_out.copy(0, &mut self.data) {
            return Next::End(Ending::check(Sense::DATA_GONE));
        }
        if self.compared {
            return self.write(lock, context);
        }
        self.state = State::Reading(lock);
        Next::Read { start: self.start, len: ByteLen(self.len as u64) }
    }
}
