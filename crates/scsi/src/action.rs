//! A command's first request to its caller.

use mqblk_core::{ByteLen, ByteOffset, Op};

use crate::command::CommandCompletion;
use crate::multi_step::MultiStepCommand;

/// The caller's next action for a command.
#[derive(Debug)]
pub enum CommandAction {
    /// Complete the command. Its data-in bytes, if any, are in
    /// [`CommandBuffers::data_in`](crate::CommandBuffers::data_in).
    Complete(CommandCompletion),
    /// The data exceeds the initiator's buffers: complete the command with the transport's response for an overrun.
    Overrun,
    /// Submit one disk request; the command completes with [`CommandCompletion::from_outcome`]. [`Op::Read`] and
    /// [`Op::Write`] use the first `len` bytes of the command's own data buffer; the other operations have no data.
    Disk {
        /// Operation.
        op: Op,
        /// Offset on the disk.
        start: ByteOffset,
        /// Length. Only 0 for [`Op::Flush`].
        len: ByteLen,
        /// For [`CommandCompletion::from_outcome`]. It differs from `len` if the data-out buffer is a parameter list
        /// or one block for all (UNMAP, WRITE SAME).
        transferred: u64,
    },
    /// Submit one disk request for each of [`CommandBuffers::ranges`](crate::CommandBuffers::ranges) (at least one).
    /// The command completes when all have, with [`CommandCompletion::from_outcome`] of the first failure.
    Ranges {
        /// Operation.
        op: Op,
        /// For [`CommandCompletion::from_outcome`].
        transferred: u64,
    },
    /// Run the steps of a multi-step command.
    MultiStep(Box<MultiStepCommand>),
}
