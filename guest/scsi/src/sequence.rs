//! Multi-step commands: VERIFY, WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE, WRITE SAME with a pattern, and
//! PERSISTENT RESERVE OUT that waits for its state to be durable.

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

/// A multi-step command, between two of its steps. Dropping it releases its range lock. Where commands are replayed
/// after a crash, drop it when its completion is visible to the guest, and not before: a command that saw what this
/// one wrote could otherwise complete first, and be undone when this one is replayed.
#[derive(Debug)]
pub struct Sequence {
    kind: Kind,
    /// Operation of the last disk request.
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

/// What the caller lends to a step.
pub(crate) struct Lent<'a> {
    pub(crate) scratch: &'a mut [u8],
    pub(crate) data_out: &'a dyn DataOut,
    pub(crate) waker: &'a Arc<dyn Wake>,
}

impl Sequence {
    /// Size of the scratch memory that the caller lends, in bytes: a multiple of every logical block size.
    pub const SCRATCH: usize = 64 << 10;

    pub(crate) fn new(kind: Kind) -> Box<Sequence> {
        Box::new(Sequence { kind, asked: Op::Flush })
    }

    /// Returns true if this is a COMPARE AND WRITE that has compared equal, so that it writes from here on. The
    /// caller records this, as the blocks may hold the written data when the command is replayed after a crash.
    pub fn has_compared(&self) -> bool {
        matches!(&self.kind, Kind::Compare(compare) if compare.has_compared())
    }

    /// Returns true if the command has yet to request its range lock: nothing has been read or written.
    pub fn is_before_section(&self) -> bool {
        match &self.kind {
            Kind::Compare(compare) => compare.is_fresh(),
            Kind::OrWrite(or) => or.is_fresh(),
            Kind::Verify(_) | Kind::Same(_) | Kind::Settle(_) => false,
        }
    }

    /// Makes a COMPARE AND WRITE continue with its write: it [compared equal](Self::has_compared) before a crash.
    pub fn skip_compare(&mut self) {
        if let Kind::Compare(compare) = &mut self.kind {
            compare.skip_compare();
        }
    }

    /// Returns the next step. `before` is the outcome of the step before; `None` at the first one and after
    /// [`NextStep::Wait`].
    pub fn next<D: DataOut + ?Sized>(
        &mut self,
        before: Option<Outcome>,
        scratch: &mut [u8],
        data_out: &D,
        waker: &Arc<dyn Wake>,
        buffers: &mut Work,
    ) -> Next {
        buffers.reply.clear();
        if let Some(outcome) = before
            && !outcome.is_done()
        {
            return Next::End(Ending::of(self.asked, outcome, 0));
        }
        // If the caller lends too little, the command fails instead of panicking.
        if scratch.len() < Sequence::SCRATCH {
            return Next::End(Ending::check(Sense::INTERNAL));
        }
        let mut context = Lent { scratch: &mut scratch[..Sequence::SCRATCH], data_out: &data_out, waker };
        let next = match &mut self.kind {
            Kind::Verify(verify) => verify.next(&mut context),
            Kind::Same(same) => same.next(&mut context),
            Kind::Compare(compare) => compare.next(&mut context),
            Kind::OrWrite(or) => or.next(&mut context),
            Kind::Settle(settle) => settle.next(&context),
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

/// A range that is processed in chunks of the scratch memory's size.
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

    /// Returns the current chunk; `None` at the end.
    pub(crate) fn piece(&self) -> Option<(ByteOffset, usize)> {
        let len = (self.len - self.done).min(Sequence::SCRATCH as u64) as usize;
        (len > 0).then_some((ByteOffset(self.start.0.saturating_add(self.done)), len))
    }

    /// Returns the number of bytes before the current chunk.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn advance(&mut self) {
        if let Some((_, len)) = self.piece() {
            self.done += len as u64;
        }
    }
}
