//! State machine of a request in the ring: its current and its next operation.

use mqblk_core::{ByteLen, ByteOffset, Completion, Errno, Op, Outcome, Tag};
use mqblk_memory::Buffer;

use super::small_blocks::{HeldUnits, Slice};

/// Maximum number of consecutive EINTR or EAGAIN results before the request fails.
const MAX_RETRIES: u8 = 64;
const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
pub(super) const CANCELED: i32 = 125;
/// Outcome of a write that makes no progress without an error.
const NO_PROGRESS: Outcome = Outcome::Failed(Errno(5)); // EIO

/// The operation that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpStage {
    /// A transfer between guest memory and the file.
    Transfer,
    /// A slice of a transfer, between a bounce slot and the file.
    Bounce,
    /// `fdatasync`, the last stage of flushes and durable zeroes.
    Sync,
    /// `fallocate(PUNCH_HOLE)`.
    Punch,
    /// `fallocate(ZERO_RANGE)`.
    ZeroRange,
    /// A write of zeroes.
    ZeroWrite,
}

/// The next step after a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Issue the operation of the current stage.
    Issue,
    /// Complete the request.
    Complete(Outcome),
}

/// The operation of a slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SliceStep {
    /// The transfer itself.
    #[default]
    Transfer,
    /// A read of a unit that will change in part.
    ReadUnit,
    /// The write of that unit.
    WriteUnit,
}

/// The slice of a request that is in a kernel operation, or waits for one with the unit read.
#[derive(Debug, Default)]
pub(super) struct SliceState {
    pub(super) step: SliceStep,
    /// `None` before the first one.
    pub(super) slice: Option<Slice>,
    /// The unit with its changes, whose write was refused.
    pub(super) unit: Option<(Buffer, u32)>,
}

/// Operations that the host does not support, so that each channel tries them only once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UnsupportedOps {
    pub(super) punch: bool,
    pub(super) zero_range: bool,
}

/// A request in a channel's table.
#[derive(Debug)]
pub(super) struct InflightRequest {
    pub(super) op: Op,
    pub(super) stage: OpStage,
    pub(super) start: ByteOffset,
    pub(super) len: ByteLen,
    /// Bytes from the start that are done. A multiple of the offset alignment.
    pub(super) done: u64,
    pub(super) tag: Tag,
    /// True if cancelled: no further operation is issued for it.
    pub(super) cancelled: bool,
    /// The request's buffer while it is not in a kernel operation.
    pub(super) buffer: Option<Buffer>,
    /// The bounce slot whose buffer is in a kernel operation.
    pub(super) slot: Option<u32>,
    /// True if its guest memory was lost when the last slice was copied.
    pub(super) faulted: bool,
    /// True if a kernel thread executes its transfer: the first one to its region of the file, or a long copy.
    pub(super) in_thread: bool,
    /// Its operation between the file and the daemon's own memory.
    pub(super) slice: SliceState,
    /// Units of the file held by it.
    pub(super) held: Option<HeldUnits>,
    retries: u8,
}

impl InflightRequest {
    pub(super) fn new(request: mqblk_core::Request<Buffer>, stage: OpStage, done: u64) -> InflightRequest {
        let mqblk_core::Request { start, len, tag, buffer, op } = request;
        InflightRequest {
            op,
            stage,
            start,
            len,
            done,
            tag,
            cancelled: false,
            buffer,
            slot: None,
            faulted: false,
            in_thread: false,
            slice: SliceState::default(),
            held: None,
            retries: 0,
        }
    }

    /// Returns the file offset of the next slice.
    #[inline]
    pub(super) fn at(&self) -> ByteOffset {
        ByteOffset(self.start.0 + self.done)
    }

    /// Returns true if the kernel operation that the request waits for may be cancelled: data transfers. Flushes and
    /// `fallocate` are not: they are short and atomic.
    pub(super) fn is_cancellable(&self) -> bool {
        matches!(self.stage, OpStage::Transfer | OpStage::Bounce | OpStage::ZeroWrite)
    }

    /// Returns the remaining length.
    #[inline]
    pub(super) fn left(&self) -> ByteLen {
        ByteLen(self.len.0 - self.done)
    }

    /// Returns true if the request must be durable when it completes.
    fn fua(&self) -> bool {
        matches!(self.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. })
    }

    #[inline]
    pub(super) fn complete(self, outcome: Outcome) -> Completion<Buffer> {
        Completion { outcome, tag: self.tag, buffer: self.buffer }
    }

    /// Processes the stage's result: bytes transferred or a negative errno. `unit` is the alignment of offsets.
    #[inline]
    pub(super) fn advance(&mut self, result: i32, unit: u32, unsupported: &mut UnsupportedOps) -> NextStep {
        if self.cancelled {
            return self.advance_cancelled(result, unit, unsupported);
        }
        if result < 0 {
            return self.failed(-result, unsupported);
        }
        self.retries = 0;
        match self.stage {
            OpStage::Sync => NextStep::Complete(Outcome::Done(ByteLen::ZERO)),
            OpStage::Punch | OpStage::ZeroRange => self.zeroes_done(),
            OpStage::Transfer | OpStage::Bounce | OpStage::ZeroWrite => self.data_moved(result as u64, unit),
        }
    }

    /// Like [`advance`](Self::advance), for a cancelled request: it is aborted if it is not finished.
    fn advance_cancelled(&mut self, result: i32, unit: u32, unsupported: &mut UnsupportedOps) -> NextStep {
        self.cancelled = false;
        let next = if result == -CANCELED { NextStep::Issue } else { self.advance(result, unit, unsupported) };
        match next {
            NextStep::Issue => NextStep::Complete(Outcome::Aborted),
            end @ NextStep::Complete(_) => end,
        }
    }

    #[inline]
    fn data_moved(&mut self, bytes: u64, unit: u32) -> NextStep {
        let reached = self.done + bytes;
        if reached >= self.len.0 {
            return match self.stage {
                OpStage::ZeroWrite => self.zeroes_done(),
                _ => NextStep::Complete(Outcome::Done(self.len)),
            };
        }
        // Direct I/O can only continue at an aligned offset; the unaligned rest is transferred again.
        let reached = reached - reached % u64::from(unit);
        if reached <= self.done {
            // A read of 0 bytes is at the end of a file that has shrunk.
            return NextStep::Complete(if self.op == Op::Read { Outcome::OutOfRange } else { NO_PROGRESS });
        }
        self.done = reached;
        NextStep::Issue
    }

    fn zeroes_done(&mut self) -> NextStep {
        if self.fua() {
            self.stage = OpStage::Sync;
            return NextStep::Issue;
        }
        NextStep::Complete(Outcome::Done(ByteLen::ZERO))
    }

    fn failed(&mut self, errno: i32, unsupported: &mut UnsupportedOps) -> NextStep {
        if (errno == EINTR || errno == EAGAIN) && self.retries < MAX_RETRIES {
            self.retries += 1;
            return NextStep::Issue;
        }
        let outcome = Outcome::from_errno(errno);
        if outcome == Outcome::Unsupported {
            match self.stage {
                OpStage::Punch => unsupported.punch = true,
                OpStage::ZeroRange => unsupported.zero_range = true,
                _ => return NextStep::Complete(outcome),
            }
            if let Op::WriteZeroes { .. } = self.op {
                self.stage = if unsupported.zero_range { OpStage::ZeroWrite } else { OpStage::ZeroRange };
                return NextStep::Issue;
            }
        }
        NextStep::Complete(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(op: Op, stage: OpStage, len: u64) -> InflightRequest {
        let request =
            mqblk_core::Request { start: ByteOffset(0), len: ByteLen(len), tag: Tag::new(0, 0), buffer: None, op };
        InflightRequest::new(request, stage, 0)
    }

    #[test]
    fn short_transfers_continue_at_an_aligned_offset() {
        let mut read = running(Op::Read, OpStage::Transfer, 8192);
        let unsupported = &mut UnsupportedOps::default();
        assert_eq!(read.advance(1000, 512, unsupported), NextStep::Issue);
        assert_eq!((read.at(), read.left()), (ByteOffset(512), ByteLen(7680)));
        assert_eq!(read.advance(7680, 512, unsupported), NextStep::Complete(Outcome::Done(ByteLen(8192))));
    }

    #[test]
    fn a_transfer_without_progress_fails() {
        let unsupported = &mut UnsupportedOps::default();
        for (op, want) in [(Op::Read, Outcome::OutOfRange), (Op::Write { fua: false }, NO_PROGRESS)] {
            for moved in [0, 511] {
                assert_eq!(
                    running(op, OpStage::Transfer, 8192).advance(moved, 512, unsupported),
                    NextStep::Complete(want)
                );
            }
        }
    }

    #[test]
    fn retries_are_bounded() {
        for errno in [EINTR, EAGAIN] {
            let mut read = running(Op::Read, OpStage::Transfer, 512);
            let unsupported = &mut UnsupportedOps::default();
            let tries = (0..1000).take_while(|_| read.advance(-errno, 1, unsupported) == NextStep::Issue).count();
            assert_eq!(tries, usize::from(MAX_RETRIES));
        }
    }

    #[test]
    fn zeroes_fall_back_from_holes_to_zeroed_extents_to_writes() {
        const EOPNOTSUPP: i32 = 95;
        let unsupported = &mut UnsupportedOps::default();
        let mut zeroes = running(Op::WriteZeroes { may_unmap: true, fua: true }, OpStage::Punch, 4096);
        assert_eq!(zeroes.advance(-EOPNOTSUPP, 1, unsupported), NextStep::Issue);
        assert_eq!(zeroes.stage, OpStage::ZeroRange);
        assert_eq!(zeroes.advance(-EOPNOTSUPP, 1, unsupported), NextStep::Issue);
        assert_eq!(zeroes.stage, OpStage::ZeroWrite);
        assert_eq!(zeroes.advance(1024, 1, unsupported), NextStep::Issue);
        assert_eq!(zeroes.at(), ByteOffset(1024));
        assert_eq!(zeroes.advance(3072, 1, unsupported), NextStep::Issue);
        assert_eq!(zeroes.stage, OpStage::Sync);
        assert_eq!(zeroes.advance(0, 1, unsupported), NextStep::Complete(Outcome::Done(ByteLen::ZERO)));
        assert!(unsupported.punch && unsupported.zero_range);
    }

    #[test]
    fn a_cancelled_request_completes_with_its_current_operation() {
        let unsupported = &mut UnsupportedOps::default();
        let zeroes = Op::WriteZeroes { may_unmap: true, fua: true };
        let done = Outcome::Done(ByteLen(8192));
        for (op, stage, result, want) in [
            (Op::Read, OpStage::Transfer, -CANCELED, Outcome::Aborted),
            (Op::Read, OpStage::Transfer, -EINTR, Outcome::Aborted),
            (Op::Read, OpStage::Bounce, -EAGAIN, Outcome::Aborted),
            (Op::Read, OpStage::Transfer, 4096, Outcome::Aborted),
            (Op::Read, OpStage::Transfer, 8192, done),
            (Op::Read, OpStage::Transfer, -5, Outcome::Failed(Errno(5))),
            (Op::Read, OpStage::Transfer, 0, Outcome::OutOfRange),
            (zeroes, OpStage::Punch, 0, Outcome::Aborted),
            (zeroes, OpStage::Punch, -95, Outcome::Aborted),
            (zeroes, OpStage::Sync, 0, Outcome::Done(ByteLen::ZERO)),
            (Op::Flush, OpStage::Sync, 0, Outcome::Done(ByteLen::ZERO)),
        ] {
            let mut request = running(op, stage, 8192);
            request.cancelled = true;
            assert_eq!(
                request.advance(result, 512, unsupported),
                NextStep::Complete(want),
                "{op:?} {stage:?} {result}"
            );
        }
        assert!(unsupported.punch, "unsupported operations are recorded all the same");
    }

    #[test]
    fn a_discard_does_not_fall_back_to_zeroes() {
        let mut discard = running(Op::Discard { secure: false }, OpStage::Punch, 4096);
        assert_eq!(discard.advance(-95, 1, &mut UnsupportedOps::default()), NextStep::Complete(Outcome::Unsupported));
        assert_eq!(
            running(Op::Flush, OpStage::Sync, 0).advance(-5, 1, &mut UnsupportedOps::default()),
            NextStep::Complete(Outcome::Failed(Errno(5)))
        );
    }
}
