//! Interface between a command and its caller.
//!
//! The caller holds the command's data buffers, submits requests to the disk, and passes their outcomes back. Most
//! commands complete at once or are one request with the command's own data; the others are a
//! [`MultiStepCommand`](crate::MultiStepCommand).

use mqblk_core::{ByteLen, ByteOffset, Op, Outcome};

use crate::sense::{Sense, SenseKey, Status};

/// Data-out buffer of a command: a parameter list, or blocks. Each byte is copied once, and the copy is validated.
pub trait DataOut {
    /// Returns the length in bytes.
    fn len(&self) -> u64;
    /// Returns true if the buffer is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies from offset `at` into private memory. Returns false, and copies nothing, if there are fewer bytes.
    fn copy(&self, at: u64, into: &mut [u8]) -> bool;
}

impl<D: DataOut + ?Sized> DataOut for &D {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn copy(&self, at: u64, into: &mut [u8]) -> bool {
        (**self).copy(at, into)
    }
}

impl DataOut for [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn copy(&self, at: u64, into: &mut [u8]) -> bool {
        let found = usize::try_from(at).ok().and_then(|at| self.get(at..)?.get(..into.len()));
        found.map(|found| into.copy_from_slice(found)).is_some()
    }
}

/// A command as the caller received it, in private memory.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// The command descriptor block. Bytes missing from the length of its operation code count as zero.
    pub cdb: &'a [u8],
    /// Length of the data-in buffer in bytes.
    pub data_in_len: u64,
}

/// Buffers that the caller lends to commands. They are reused, so that commands do not allocate.
#[derive(Debug, Default)]
pub struct CommandBuffers {
    /// Data-in bytes of a command that completed at once, already cut to its allocation length.
    pub data_in: Vec<u8>,
    /// Disk ranges of [`CommandAction::Ranges`](crate::CommandAction::Ranges).
    pub ranges: Vec<(ByteOffset, ByteLen)>,
}

/// Completion of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandCompletion {
    /// Status byte.
    pub status: Status,
    /// Sense data, for [`Status::CheckCondition`].
    pub sense: Option<Sense>,
    /// Data bytes transferred in either direction; the rest of the buffer is the residual.
    pub transferred: u64,
}

impl CommandCompletion {
    /// Returns GOOD status.
    pub const fn good(transferred: u64) -> CommandCompletion {
        CommandCompletion { status: Status::Good, sense: None, transferred }
    }

    /// Returns the completion of a [`CommandAction::Disk`](crate::CommandAction::Disk) or
    /// [`CommandAction::Ranges`](crate::CommandAction::Ranges), or of a multi-step command whose step failed.
    /// `transferred` applies if the request succeeded; a failed command has transferred nothing.
    pub const fn from_outcome(op: Op, outcome: Outcome, transferred: u64) -> CommandCompletion {
        let sense = match outcome {
            Outcome::Done(_) => return CommandCompletion::good(transferred),
            Outcome::OutOfRange => Sense::LBA_OUT_OF_RANGE,
            Outcome::ReadOnly => Sense::WRITE_PROTECTED,
            Outcome::Unsupported => Sense::INVALID_OPCODE,
            // SPACE ALLOCATION FAILED WRITE PROTECT.
            Outcome::NoSpace => Sense::new(SenseKey::DataProtect, 0x27, 0x07),
            // I/O PROCESS TERMINATED.
            Outcome::Aborted => Sense::new(SenseKey::AbortedCommand, 0x00, 0x06),
            Outcome::Failed(_) => match op {
                // UNRECOVERED READ ERROR.
                Op::Read => Sense::new(SenseKey::MediumError, 0x11, 0x00),
                // WRITE ERROR, also if data that was written before is not durable.
                Op::Write { .. } | Op::WriteZeroes { .. } | Op::Flush => Sense::new(SenseKey::MediumError, 0x0c, 0x00),
                Op::Discard { .. } => Sense::INTERNAL_TARGET_FAILURE,
            },
        };
        CommandCompletion::check_condition(sense)
    }

    /// RESERVATION CONFLICT: another nexus holds a reservation.
    pub const RESERVATION_CONFLICT: CommandCompletion =
        CommandCompletion { status: Status::ReservationConflict, sense: None, transferred: 0 };

    /// Returns CHECK CONDITION with this sense data and no data transferred.
    pub const fn check_condition(sense: Sense) -> CommandCompletion {
        CommandCompletion { status: Status::CheckCondition, sense: Some(sense), transferred: 0 }
    }
}

/// The next step of a [`MultiStepCommand`](crate::MultiStepCommand). The caller lends it `scratch`, private memory of
/// [`MultiStepCommand::SCRATCH`](crate::MultiStepCommand::SCRATCH) bytes.
#[derive(Debug)]
pub enum NextStep {
    /// Read the range into the first `len` bytes of `scratch`.
    Read {
        /// Offset on the disk.
        start: ByteOffset,
        /// Length, at most the size of `scratch`.
        len: ByteLen,
    },
    /// Write the first `len` bytes of `scratch`, which the command has filled.
    Write {
        /// Offset on the disk.
        start: ByteOffset,
        /// Length.
        len: ByteLen,
        /// True if the write must be durable before it completes.
        fua: bool,
    },
    /// Submit a request with the first `len` bytes of the command's own data buffer, or without data.
    Disk {
        /// Operation.
        op: Op,
        /// Offset on the disk.
        start: ByteOffset,
        /// Length.
        len: ByteLen,
    },
    /// Wait: the command's waker is woken when the step must be retried.
    Wait,
    /// Complete the command; data-in bytes, if any, are in [`CommandBuffers::data_in`].
    Complete(CommandCompletion),
}
