//! What a command asks of whoever drives it.
//!
//! A driver holds the command's data buffers, issues requests to the disk, and brings outcomes back. Most commands end at once
//! or are one request over the command's own data; the others are a [`Sequence`](crate::Sequence) of steps.

use mqblk_core::{ByteLen, ByteOffset, Op, Outcome};

use crate::sense::{Sense, SenseKey, Status};

/// Data that the initiator sent with a command: a parameter list, or blocks. Each byte is copied once and then judged.
pub trait DataOut {
    /// Bytes offered.
    fn len(&self) -> u64;
    /// Whether none are.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies from `at` on into private memory. `false` (nothing copied) when fewer bytes are there.
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

/// A command as its driver received it: private copies all.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// The command descriptor block, at least as long as its operation code says (else the rest counts as zeroes).
    pub cdb: &'a [u8],
    /// Bytes of the data-in buffer.
    pub data_in: u64,
}

/// Room that a driver lends to commands; kept from one to the next so that they allocate nothing.
#[derive(Debug, Default)]
pub struct Work {
    /// Data-in bytes of a command that ended at once, already cut to its allocation length.
    pub reply: Vec<u8>,
    /// Disk ranges of [`Step::Ranges`].
    pub ranges: Vec<(ByteOffset, ByteLen)>,
}

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Status byte.
    pub status: Status,
    /// Sense data, for [`Status::CheckCondition`].
    pub sense: Option<Sense>,
    /// Data bytes that were transferred in either direction; what is left of the buffer is the residual.
    pub transferred: u64,
}

impl Ending {
    /// All of it happened.
    pub const fn good(transferred: u64) -> Ending {
        Ending { status: Status::Good, sense: None, transferred }
    }

    /// How the command of a [`Step::Disk`] or [`Step::Ranges`] ends, or a sequence whose step failed. `transferred`: what
    /// the step said, for the case that all of it happened; a command that failed has transferred nothing that counts.
    pub const fn of(op: Op, outcome: Outcome, transferred: u64) -> Ending {
        let sense = match outcome {
            Outcome::Done(_) => return Ending::good(transferred),
            Outcome::OutOfRange => Sense::OUT_OF_RANGE,
            Outcome::ReadOnly => Sense::WRITE_PROTECTED,
            Outcome::Unsupported => Sense::INVALID_OPCODE,
            // SPACE ALLOCATION FAILED WRITE PROTECT.
            Outcome::NoSpace => Sense::new(SenseKey::DataProtect, 0x27, 0x07),
            // I/O PROCESS TERMINATED.
            Outcome::Aborted => Sense::new(SenseKey::AbortedCommand, 0x00, 0x06),
            Outcome::Failed(_) => match op {
                // UNRECOVERED READ ERROR.
                Op::Read => Sense::new(SenseKey::MediumError, 0x11, 0x00),
                // WRITE ERROR: also when data that was written before is not durable.
                Op::Write { .. } | Op::WriteZeroes { .. } | Op::Flush => Sense::new(SenseKey::MediumError, 0x0c, 0x00),
                Op::Discard { .. } => Sense::INTERNAL,
            },
        };
        Ending::check(sense)
    }

    /// Another nexus holds a reservation.
    pub const CONFLICT: Ending = Ending { status: Status::ReservationConflict, sense: None, transferred: 0 };

    /// It failed with this sense data, and no data was transferred.
    pub const fn check(sense: Sense) -> Ending {
        Ending { status: Status::CheckCondition, sense: Some(sense), transferred: 0 }
    }
}

/// What a driver must do next for a command.
#[derive(Debug)]
pub enum Step {
    /// Give the answer. Its data-in bytes, if any, are in [`Work::reply`].
    End(Ending),
    /// The command transfers more data than the initiator's buffers hold: give the transport's answer for an overrun.
    Overrun,
    /// One disk request; the command ends with [`Ending::of`] its outcome. [`Op::Read`] and [`Op::Write`] use the first
    /// `len` bytes of the command's own data buffer; the others have none.
    Disk {
        /// What to do.
        op: Op,
        /// Where.
        start: ByteOffset,
        /// How much. Not 0 but for [`Op::Flush`].
        len: ByteLen,
        /// For [`Ending::of`]. Not `len` where the command's data is a parameter list or one block for all (UNMAP, WRITE SAME).
        transferred: u64,
    },
    /// One disk request for each of [`Work::ranges`] (at least one), which end together; the command ends with [`Ending::of`]
    /// their first failure.
    Ranges {
        /// What to do.
        op: Op,
        /// For [`Ending::of`].
        transferred: u64,
    },
    /// The command has several steps.
    Sequence(Box<crate::Sequence>),
}

/// What a [`Sequence`](crate::Sequence) wants next. Its driver lends it `scratch`, private memory of
/// [`Sequence::SCRATCH`](crate::Sequence::SCRATCH) bytes.
#[derive(Debug)]
pub enum Next {
    /// Read the range; show what was read as the first `len` bytes of `scratch`.
    Read {
        /// Where.
        start: ByteOffset,
        /// How much, at most the size of `scratch`.
        len: ByteLen,
    },
    /// Write the first `len` bytes of `scratch`, which the sequence has filled.
    Write {
        /// Where.
        start: ByteOffset,
        /// How much.
        len: ByteLen,
        /// Durable before it ends.
        fua: bool,
    },
    /// A request over the first `len` bytes of the command's own data buffer, or without data.
    Disk {
        /// What to do.
        op: Op,
        /// Where.
        start: ByteOffset,
        /// How much.
        len: ByteLen,
    },
    /// Something else must end first; the waker that the sequence was given rings when it is worth another try.
    Wait,
    /// Give the answer; data-in bytes, if any, are in [`Work::reply`].
    End(Ending),
}
