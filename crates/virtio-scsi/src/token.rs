//! State of a command between its admission and its completion.

use mqblk_core::{DiskSlot, Op};
use mqblk_memory::{Buffer, BufferPool};

use crate::request_chain::ResponseBuffer;
use crate::task_management::TaskManagement;

/// Token of a command, with the data for its completion.
#[derive(Debug)]
pub struct ScsiToken(pub(crate) TokenKind);

#[derive(Debug)]
pub(crate) enum TokenKind {
    Transfer(TransferState),
    Command(CommandState),
}

/// State of a READ or WRITE that transfers its whole buffer, which also has its response: the most frequent command.
/// The rest is [derived](CommandState::of_transfer) from the buffer.
#[derive(Debug)]
pub(crate) struct TransferState {
    /// The driver's identifier of the command.
    pub(crate) id: u64,
    /// The chain's used length if it succeeds.
    pub(crate) written: u32,
    pub(crate) head: u16,
    pub(crate) unit: DiskSlot,
    /// Task management functions that match it, one bit each.
    pub(crate) abort_marks: u16,
    pub(crate) target: u8,
}

/// State of any command.
#[derive(Debug)]
pub(crate) struct CommandState {
    /// The driver's identifier of the command.
    pub(crate) id: u64,
    pub(crate) response: ResponseBuffer,
    /// Length of the command's data buffers.
    pub(crate) data_len: u32,
    /// Bytes transferred if it succeeds.
    pub(crate) transferred: u32,
    pub(crate) head: u16,
    pub(crate) unit: DiskSlot,
    /// Task management functions that match it, one bit each.
    pub(crate) abort_marks: u16,
    pub(crate) target: u8,
    /// True if the command has a data-in buffer.
    pub(crate) has_data_in: bool,
    /// True if the queue has further state of it: see [`request_queue`](mod@crate::request_queue).
    pub(crate) is_multi_step: bool,
    /// Operation of the disk request.
    pub(crate) op: Op,
}

impl ScsiToken {
    /// Returns true if a task management function applies to the command.
    pub(crate) fn matches(&self, tmf: &TaskManagement) -> bool {
        match &self.0 {
            TokenKind::Transfer(TransferState { id, unit, target, .. }) => tmf.matches(*target, *unit, *id),
            TokenKind::Command(command) => command.matches(tmf),
        }
    }

    /// Marks the command as matched by the task management function at this index.
    pub(crate) fn mark(&mut self, at: usize) {
        let (TokenKind::Transfer(TransferState { abort_marks, .. })
        | TokenKind::Command(CommandState { abort_marks, .. })) = &mut self.0;
        *abort_marks |= 1 << at;
    }
}

impl CommandState {
    /// Returns the state of a command that has transferred nothing, with the lengths of its data-in and data-out
    /// buffers.
    #[inline]
    pub(crate) fn new(
        head: u16,
        (target, unit): (u8, DiskSlot),
        response: ResponseBuffer,
        (data_in, data_out): (u64, u64),
    ) -> CommandState {
        CommandState {
            id: 0,
            response,
            data_len: saturating_u32(data_in + data_out),
            transferred: 0,
            is_multi_step: false,
            head,
            unit,
            abort_marks: 0,
            target,
            has_data_in: data_in > 0,
            op: Op::Flush,
        }
    }

    /// Returns the state of a transfer with this buffer, which is released with its response.
    pub(crate) fn of_transfer(pool: &BufferPool, transfer: TransferState, buffer: Buffer) -> CommandState {
        let TransferState { id, head, unit, abort_marks, target, .. } = transfer;
        let is_read = pool.is_writable(&buffer);
        let len = pool.len(&buffer).0;
        let lengths = if is_read { (len, 0) } else { (0, len) };
        let response = ResponseBuffer::beside_data(pool, buffer);
        CommandState {
            id,
            abort_marks,
            transferred: saturating_u32(len),
            op: if is_read { Op::Read } else { Op::Write { fua: false } },
            ..CommandState::new(head, (target, unit), response, lengths)
        }
    }

    /// Returns true if a task management function applies to the command.
    pub(crate) fn matches(&self, tmf: &TaskManagement) -> bool {
        tmf.matches(self.target, self.unit, self.id)
    }

    /// Returns the token of the command's disk request.
    #[inline]
    pub(crate) fn token(self) -> ScsiToken {
        ScsiToken(TokenKind::Command(self))
    }
}

/// Limits a count of bytes to 32 bits, the size of response fields.
pub(crate) fn saturating_u32(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}
