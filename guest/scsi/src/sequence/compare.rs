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
    /// What to compare with, then what to write: copied once, when the section is entered.
    data: Vec<u8>,
}

#[derive(Debug)]
enum State {
    Fresh,
    InLine(Section),
    Reading(Section),
    Writing(#[expect(dead_code, reason = "held until the write has ended")] Section),
    Over,
}

impl Compare {
    /// `len` fits in the scratch memory.
    pub(crate) fn new(range: (ByteOffset, ByteLen), fua: bool, sections: Arc<Sections>) -> Compare {
        Compare { start: range.0, len: range.1.0 as usize, fua, sections, state: State::Fresh, data: Vec::new() }
    }

    pub(super) fn next(&mut self, lent: &mut Lent<'_>) -> Next {
        let len = ByteLen(self.len as u64);
        match std::mem::replace(&mut self.state, State::Over) {
            State::Fresh => {
                let section = self.sections.enter(self.start, len, lent.waker);
                self.enter(section, lent)
            }
            State::InLine(section) => self.enter(section, lent),
            State::Reading(section) => {
                let (expected, new) = self.data.split_at(self.len);
                let found = &mut lent.scratch[..self.len];
                if let Some(offset) = expected.iter().zip(found.iter()).position(|(expected, found)| expected != found)
                {
                    return Next::End(Ending::check(Sense::miscompare(offset as u64)));
                }
                found.copy_from_slice(new);
                self.state = State::Writing(section);
                Next::Write { start: self.start, len, fua: self.fua }
            }
            State::Writing(_) | State::Over => Next::End(Ending::good(2 * len.0)),
        }
    }

    fn enter(&mut self, section: Section, lent: &Lent<'_>) -> Next {
        if !section.entered() {
            self.state = State::InLine(section);
            return Next::Wait;
        }
        self.data.resize(2 * self.len, 0);
        if !lent.data_out.copy(0, &mut self.data) {
            return Next::End(Ending::check(Sense::DATA_GONE));
        }
        self.state = State::Reading(section);
        Next::Read { start: self.start, len: ByteLen(self.len as u64) }
    }
}
