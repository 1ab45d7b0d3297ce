//! Messages on sockets: a header of the backend's own and a request's data in one operation, straight from and to guest
//! memory.

use std::os::fd::AsRawFd;

use io_uring::{opcode, squeue, types};
use mqblk_memory::Buffer;

use crate::completion::ClientId;
use crate::context::UringContext;
use crate::pieces::{MAX_PIECES, append_range};
use crate::tables::RingFile;

/// Order of a message's parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MessageOrder {
    /// The header, then the payload.
    #[default]
    HeaderFirst,
    /// The payload, then the header: the data of a received reply, then the header of the next reply.
    PayloadFirst,
}

/// A message, or the space for one. The operation owns its buffers until it completes.
#[derive(Debug, Default)]
pub struct Message {
    /// Memory of the backend's own: a slot of a [`BouncePool`](mqblk_memory::BouncePool).
    pub header: Option<Buffer>,
    /// A request's data.
    pub payload: Option<Buffer>,
    /// Their order.
    pub order: MessageOrder,
    /// Bytes at the start that a shorter transfer has already moved.
    pub skip: u64,
    /// End of the payload, if not its buffer's end.
    pub payload_end: Option<u64>,
    /// True if the operation goes on until all is transferred, and is shorter only if the connection ends, or there
    /// are more than 1024 pieces.
    pub whole: bool,
}

/// The in-flight table is full: try again after completions were taken. The buffers are returned.
#[derive(Debug)]
pub struct RefusedMessage(pub Message);

impl UringContext {
    /// Sends a message on a stream socket. The completion returns both buffers and the number of bytes sent, which may
    /// be smaller. A closed connection is an error (EPIPE), not a signal.
    ///
    /// # Errors
    /// [`RefusedMessage`] when the in-flight table is full.
    pub fn send(
        &mut self,
        client: ClientId,
        cookie: u64,
        socket: &RingFile,
        message: Message,
    ) -> Result<(), RefusedMessage> {
        let flags = libc::MSG_NOSIGNAL as u32 | whole_flag(&message);
        self.transfer_message(client, cookie, socket, message, |target, message| match target {
            Target::Fixed(index) => opcode::SendMsg::new(types::Fixed(index), message).flags(flags).build(),
            Target::Plain(fd) => opcode::SendMsg::new(types::Fd(fd), message).flags(flags).build(),
        })
    }

    /// Receives into a message from a stream socket. The completion returns both buffers and the number of bytes
    /// received, which may be smaller; 0 bytes: the peer has closed the connection.
    ///
    /// # Errors
    /// [`RefusedMessage`] when the in-flight table is full.
    pub fn receive(
        &mut self,
        client: ClientId,
        cookie: u64,
        socket: &RingFile,
        message: Message,
    ) -> Result<(), RefusedMessage> {
        debug_assert!(message.payload.as_ref().is_none_or(|payload| self.buffers.will_be_logged(payload)));
        let flags = whole_flag(&message);
        self.transfer_message(client, cookie, socket, message, |target, message| match target {
            Target::Fixed(index) => opcode::RecvMsg::new(types::Fixed(index), message).flags(flags).build(),
            Target::Plain(fd) => opcode::RecvMsg::new(types::Fd(fd), message).flags(flags).build(),
        })
    }

    fn transfer_message(
        &mut self,
        client: ClientId,
        cookie: u64,
        socket: &RingFile,
        message: Message,
        entry: impl FnOnce(Target, *mut libc::msghdr) -> squeue::Entry,
    ) -> Result<(), RefusedMessage> {
        let Some(index) = self.in_flight.take(client, cookie) else { return Err(RefusedMessage(message)) };
        let Message { header, payload, order, mut skip, payload_end, .. } = message;
        let payload_end = payload_end.unwrap_or(u64::MAX);
        let list = self.in_flight.pieces(index);
        list.iovecs.clear();
        let parts = match order {
            MessageOrder::HeaderFirst => [(&header, u64::MAX), (&payload, payload_end)],
            MessageOrder::PayloadFirst => [(&payload, payload_end), (&header, u64::MAX)],
        };
        for (buffer, end) in parts.into_iter().filter_map(|(buffer, end)| Some((buffer.as_ref()?, end))) {
            let len = self.buffers.len(buffer).0.min(end);
            append_range(&mut list.iovecs, self.buffers.segments(buffer), skip.min(len), len);
            skip -= skip.min(len);
        }
        list.message.msg_iov = list.iovecs.as_mut_ptr();
        // The kernel refuses a longer list. A shorter transfer is continued by its owner.
        list.message.msg_iovlen = list.iovecs.len().min(MAX_PIECES);
        list.header = header;
        let pointer = &raw mut list.message;
        let slot = self.in_flight.slot(index);
        slot.buffer = payload;
        slot.file = socket.keep();
        let target = match socket {
            RingFile::Fixed(index) => Target::Fixed(*index),
            RingFile::Plain(fd) => Target::Plain(fd.as_raw_fd()),
        };
        self.push(entry(target, pointer), index);
        Ok(())
    }
}

/// A socket as an entry names it.
enum Target {
    Fixed(u32),
    Plain(i32),
}

fn whole_flag(message: &Message) -> u32 {
    if message.whole { libc::MSG_WAITALL as u32 } else { 0 }
}

#[cfg(test)]
mod tests;
