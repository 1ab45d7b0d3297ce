//! COMPARE AND WRITE: nothing that compares and writes the same blocks comes between its read and its write.

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
    sections: Arc<Sections>,
    state: State,
    /// It compared equal before the process that began it died: the write may have happened, or a part of it.
    compared: bool,
    /// What to compare with, then what to write: copied once, when the section is entered.
    data: Vec<u8>,
}

#[derive(Debug)]
enum State {
    Fresh,
    InLine(Section),
    Reading(Section),
    Writing(Section),
    /// The section is left with the sequence: it is held until the answer is visible.
    Over(Option<Section>),
}

impl Compare {
    /// `len` fits in the scratch memory.
    pub(crate) fn new(range: (ByteOffset, ByteLen), fua: bool, sections: Arc<Sections>) -> Compare {
        Compare {
            start: range.0,
            len: range.1.0 as usize,
            fua,
            sections,
            state: State::Fresh,
            compared: false,
            data: Vec::new(),
        }
    }

    /// See [`Sequence::skip_compare`](super::Sequence::skip_compare).
    pub(super) fn skip_compare(&mut self) {
        self.compared = true;
    }

    /// Whether it has not got in line for its section.
    pub(super) fn is_fresh(&self) -> bool {
        matches!(self.state, State::Fresh)
    }

    /// Whether it has compared equal, and writes.
    pub(super) fn has_compared(&self) -> bool {
        matches!(self.state, State::Writing(_))
    }

    pub(super) fn next(&mut self, lent: &mut Lent<'_>) -> Next {
        let len = ByteLen(self.len as u64);
        match std::mem::replace(&mut self.state, State::Over(None)) {
            State::Fresh => {
                let section = self.sections.enter(self.start, len, lent.waker);
                self.enter(section, lent)
            }
            State::InLine(section) => self.enter(section, lent),
            State::Reading(section) => {
                let expected = &self.data[..self.len];
                let found = &lent.scratch[..self.len];
                if let Some(offset) = expected.iter().zip(found.iter()).position(|(expected, found)| expected != found)
                {
                    return Next::End(Ending::check(Sense::miscompare(offset as u64)));
                }
                self.write(section, lent)
            }
            State::Writing(section) => {
                self.state = State::Over(Some(section));
                Next::End(Ending::good(2 * len.0))
            }
            State::Over(section) => {
                self.state = State::Over(section);
                Next::End(Ending::good(2 * len.0))
            }
        }
    }

    fn write(&mut self, section: Section, lent: &mut Lent<'_>) -> Next {
        lent.scratch[..self.len].copy_from_slice(&self.data[self.len..]);
        self.state = State::Writing(section);
        Next::Write { start: self.start, len: ByteLen(self.len as u64), fua: self.fua }
    }

    fn enter(&mut self, section: Section, lent: &mut Lent<'_>) -> Next {
        if !section.entered() {
            self.state = State::InLine(section);
            return Next::Wait;
        }
        self.data.resize(2 * self.len, 0);
        if !lent.data_out.copy(0, &mut self.data) {
            return Next::End(Ending::check(Sense::DATA_GONE));
        }
        if self.compared {
            return self.write(section, lent);
        }
        self.state = State::Reading(section);
        Next::Read { start: self.start, len: ByteLen(self.len as u64) }
    }
}
