//! Commands of several steps: VERIFY, WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE, WRITE SAME with a pattern, PERSISTENT
//! RESERVE OUT that waits for its state to be kept.

mod compare;
mod orwrite;
mod reserve;
mod same;
mod verify;

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset, Op, Outcome, Wake};

use crate::sense::Sense;
use crate::step::{DataOut, Ending, Next, Work};

pub(crate) use compare::Compare;
pub(crate) use orwrite::OrWrite;
pub(crate) use reserve::{Relay, Settle};
pub(crate) use same::Same;
pub(crate) use verify::{Check, Verify};

/// A command of several steps, between two of them. Dropping it gives up what it holds: where commands are done again after a crash, do so
/// when the answer is visible, and not before. A command that sees what this one wrote could else be answered before it, and undone
/// when this one is done again.
#[derive(Debug)]
pub struct Sequence {
    kind: Kind,
    /// What the last step asked of the disk.
    asked: Op,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Verify(Verify),
    Same(Same),
    Compare(Compare),
    OrWrite(OrWrite),
    Settle(Settle),
}

/// What a sequence is lent for a step.
pub(crate) struct Lent<'a> {
    pub(crate) scratch: &'a mut [u8],
    pub(crate) data_out: &'a dyn DataOut,
    pub(crate) waker: &'a Arc<dyn Wake>,
}

impl Sequence {
    /// Bytes of scratch memory that a driver lends: a multiple of every logical block size.
    pub const SCRATCH: usize = 64 << 10;

    pub(crate) fn new(kind: Kind) -> Box<Sequence> {
        Box::new(Sequence { kind, asked: Op::Flush })
    }

    /// Whether a COMPARE AND WRITE has compared equal, so that it writes from here on. Whoever takes the command up after a crash must
    /// know: by then the blocks may hold what it writes.
    pub fn has_compared(&self) -> bool {
        matches!(&self.kind, Kind::Compare(compare) if compare.has_compared())
    }

    /// Whether it is about to ask for its section: nothing has been read or written yet.
    pub fn is_before_section(&self) -> bool {
        match &self.kind {
            Kind::Compare(compare) => compare.is_fresh(),
            Kind::OrWrite(or) => or.is_fresh(),
            Kind::Verify(_) | Kind::Same(_) | Kind::Settle(_) => false,
        }
    }

    /// A COMPARE AND WRITE goes on with its write: it [has compared](Self::has_compared) equal before.
    pub fn skip_compare(&mut self) {
        if let Kind::Compare(compare) = &mut self.kind {
            compare.skip_compare();
        }
    }

    /// The next step. `before`: how the step before ended; `None` at the first one and after [`Next::Wait`].
    pub fn next<D: DataOut + ?Sized>(
        &mut self,
        before: Option<Outcome>,
        scratch: &mut [u8],
        data_out: &D,
        waker: &Arc<dyn Wake>,
        work: &mut Work,
    ) -> Next {
        work.reply.clear();
        if let Some(outcome) = before
            && !outcome.is_done()
        {
            return Next::End(Ending::of(self.asked, outcome, 0));
        }
        // A driver that lends less than it should gets smaller steps refused, not a panic.
        if scratch.len() < Sequence::SCRATCH {
            return Next::End(Ending::check(Sense::INTERNAL));
        }
        let mut lent = Lent { scratch: &mut scratch[..Sequence::SCRATCH], data_out: &data_out, waker };
        let next = match &mut self.kind {
            Kind::Verify(verify) => verify.next(&mut lent),
            Kind::Same(same) => same.next(&mut lent),
            Kind::Compare(compare) => compare.next(&mut lent),
            Kind::OrWrite(or) => or.next(&mut lent),
            Kind::Settle(settle) => settle.next(&lent),
        };
        self.asked = match &next {
            Next::Read { .. } => Op::Read,
            Next::Write { fua, .. } => Op::Write { fua: *fua },
            Next::Disk { op, .. } => *op,
            Next::Wait | Next::End(_) => self.asked,
        };
        next
    }
}

/// A range that is worked through in pieces of the scratch memory's size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    start: ByteOffset,
    len: u64,
    done: u64,
}

impl Walk {
    pub(crate) fn new(start: ByteOffset, len: ByteLen) -> Walk {
        Walk { start, len: len.0, done: 0 }
    }

    /// The current piece; `None` at the end.
    pub(crate) fn piece(&self) -> Option<(ByteOffset, usize)> {
        let len = (self.len - self.done).min(Sequence::SCRATCH as u64) as usize;
        (len > 0).then_some((ByteOffset(self.start.0.saturating_add(self.done)), len))
    }

    /// Bytes before the current piece.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn advance(&mut self) {
        if let Some((_, len)) = self.piece() {
            self.done += len as u64;
        }
    }
}
