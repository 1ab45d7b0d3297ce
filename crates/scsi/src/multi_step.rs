//! Multi-step commands: VERIFY, WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE, WRITE SAME with a pattern, and
//! PERSISTENT RESERVE OUT that waits for its state to be durable.

mod compare_and_write;
mod orwrite;
mod reserve_out;
mod step;
mod verify;
mod write_same;

use std::sync::Arc;

use mqblk_core::{Op, Outcome, Wake};

use crate::command::{CommandBuffers, CommandCompletion, DataOut, NextStep};
use crate::sense::Sense;
use step::{SCRATCH, StepContext};

pub(crate) use compare_and_write::CompareAndWrite;
pub(crate) use orwrite::OrWrite;
pub(crate) use reserve_out::{AwaitReserveOut, RelayWaker};
pub(crate) use verify::{Verify, VerifyMode};
pub(crate) use write_same::WriteSame;

/// A multi-step command, between two of its steps. Dropping it releases its range lock. If commands are replayed after
/// a crash, drop it only when its completion is visible to the guest. Otherwise a command that saw this one's data
/// could complete first, and be undone by the replay of this one.
#[derive(Debug)]
pub struct MultiStepCommand {
    kind: MultiStepKind,
    /// Operation of the last disk request.
    last_op: Op,
}

#[derive(Debug)]
pub(crate) enum MultiStepKind {
    Verify(Verify),
    WriteSame(WriteSame),
    CompareAndWrite(CompareAndWrite),
    OrWrite(OrWrite),
    PersistentReserveOut(AwaitReserveOut),
}

impl MultiStepCommand {
    /// Size of the scratch memory that the caller lends, in bytes: a multiple of every logical block size.
    pub const SCRATCH: usize = SCRATCH;

    pub(crate) fn new(kind: MultiStepKind) -> Box<MultiStepCommand> {
        Box::new(MultiStepCommand { kind, last_op: Op::Flush })
    }

    /// Returns true if this is a COMPARE AND WRITE that has compared equal, so that it writes from here on. The
    /// caller records this, as the blocks may hold the written data when the command is replayed after a crash.
    pub fn has_compared(&self) -> bool {
        matches!(&self.kind, MultiStepKind::CompareAndWrite(compare) if compare.has_compared())
    }

    /// Returns true if the command has not requested its range lock yet: nothing has been read or written.
    pub fn is_before_range_lock(&self) -> bool {
        match &self.kind {
            MultiStepKind::CompareAndWrite(compare) => compare.is_new(),
            MultiStepKind::OrWrite(or) => or.is_new(),
            MultiStepKind::Verify(_) | MultiStepKind::WriteSame(_) | MultiStepKind::PersistentReserveOut(_) => false,
        }
    }

    /// Makes a COMPARE AND WRITE continue with its write: it [compared equal](Self::has_compared) before a crash.
    pub fn skip_compare(&mut self) {
        if let MultiStepKind::CompareAndWrite(compare) = &mut self.kind {
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
        buffers: &mut CommandBuffers,
    ) -> NextStep {
        buffers.data_in.clear();
        if let Some(outcome) = before
            && !outcome.is_done()
        {
            return NextStep::Complete(CommandCompletion::from_outcome(self.last_op, outcome, 0));
        }
        // If the caller lends too little, the command fails instead of panicking.
        if scratch.len() < MultiStepCommand::SCRATCH {
            return NextStep::Complete(CommandCompletion::check_condition(Sense::INTERNAL_TARGET_FAILURE));
        }
        let mut context =
            StepContext { scratch: &mut scratch[..MultiStepCommand::SCRATCH], data_out: &data_out, waker };
        let next = match &mut self.kind {
            MultiStepKind::Verify(verify) => verify.next(&mut context),
            MultiStepKind::WriteSame(same) => same.next(&mut context),
            MultiStepKind::CompareAndWrite(compare) => compare.next(&mut context),
            MultiStepKind::OrWrite(or) => or.next(&mut context),
            MultiStepKind::PersistentReserveOut(settle) => settle.next(&context),
        };
        self.last_op = match &next {
            NextStep::Read { .. } => Op::Read,
            NextStep::Write { fua, .. } => Op::Write { fua: *fua },
            NextStep::Disk { op, .. } => *op,
            NextStep::Wait | NextStep::Complete(_) => self.last_op,
        };
        next
    }
}
