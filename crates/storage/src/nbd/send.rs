//! Sending side of a channel: all waiting commands in one operation.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_core::{ByteLen, Errno, Op};
use mqblk_memory::{BouncePool, Buffer};
use mqblk_uring::{ClientId, IoCompletion, Message, RefusedMessage, RingFile, UringContext};

use super::negotiate::ExportInfo;
use super::requests::{MAX_INFLIGHT, Requests, STAGING, Stage};
use super::server::NbdServer;
use crate::admission;

/// Payloads up to this many bytes are copied, so that other commands share the operation. Longer ones are sent from
/// guest memory: a copy of 16 KiB takes about as long as an operation.
const MAX_COPY: u64 = 16 << 10;

/// EFAULT in the form of a completion: a request's memory was lost.
pub(super) const FAULT: i32 = -Errno::FAULT.0;

/// A message being sent.
#[derive(Debug)]
struct SentMessage {
    /// Its length, and the bytes already sent.
    len: u64,
    sent: u64,
    slot: u32,
    /// The request whose payload is sent from its own buffer.
    payload_of: Option<u16>,
}

/// Reason of a lost connection.
pub(super) type Lost = String;

/// The sending side of a channel.
#[derive(Debug)]
pub(super) struct Sender {
    /// `None` once it is closed.
    socket: Option<RingFile>,
    descriptor: Arc<OwnedFd>,
    /// Requests whose command waits.
    queue: VecDeque<u16>,
    message: Option<SentMessage>,
    /// A message to send again: the context had no room.
    refused: Option<Message>,
}

impl Sender {
    pub(super) fn new(socket: RingFile, descriptor: Arc<OwnedFd>) -> Sender {
        let queue = VecDeque::with_capacity(MAX_INFLIGHT);
        Sender { socket: Some(socket), descriptor, queue, message: None, refused: None }
    }

    pub(super) fn socket(&self) -> Option<&RingFile> {
        self.socket.as_ref()
    }

    pub(super) fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    pub(super) fn push(&mut self, index: u16) {
        self.queue.push_back(index);
    }

    pub(super) fn retain(&mut self, keep: impl FnMut(u16) -> bool) {
        let mut keep = keep;
        self.queue.retain(|index| keep(*index));
    }

    /// Sends waiting commands, unless a message is being sent.
    pub(super) fn send(
        &mut self,
        context: &mut UringContext,
        (client, cookie): (ClientId, u64),
        staging: &mut BouncePool,
        requests: &mut Requests,
        (server, export): (&NbdServer, &ExportInfo),
    ) {
        let message = match self.refused.take() {
            Some(message) => message,
            None if self.message.is_some() => return,
            None => match self.fill(context, staging, requests, server, export) {
                Some(message) => message,
                None => return,
            },
        };
        let Some(socket) = &self.socket else { return };
        if let Err(RefusedMessage(message)) = context.send(client, cookie, socket, message) {
            // Other channels fill the context: the next turn tries again.
            self.refused = Some(message);
        }
    }

    /// Fills a message with commands.
    fn fill(
        &mut self,
        context: &mut UringContext,
        staging: &mut BouncePool,
        requests: &mut Requests,
        server: &NbdServer,
        export: &ExportInfo,
    ) -> Option<Message> {
        self.queue.front()?;
        let (buffer, slot) = staging.take(&mut context.buffers, ByteLen(STAGING))?;
        let header_bytes = export.headers.request_bytes() as u64;
        let (mut filled, mut payload, mut payload_of) = (0, None, None);
        while let Some(index) = self.queue.front().copied() {
            let Some(pending) = requests.get(index) else {
                self.queue.pop_front();
                continue;
            };
            let is_write = matches!(pending.request.op, Op::Write { .. }) && pending.stage == Stage::Command;
            let len = if is_write { pending.request.len.0 } else { 0 };
            let copied = if len <= MAX_COPY { len } else { 0 };
            if filled + header_bytes + copied > STAGING {
                break;
            }
            self.queue.pop_front();
            let Some(header) = requests.command(index, server, export) else { continue };
            let Some(pending) = requests.get(index) else { continue };
            if copied > 0 {
                let from = pending.request.buffer.as_ref();
                let at = filled + header_bytes;
                let is_copied =
                    from.is_some_and(|from| context.buffers.copy_range(from, 0, &buffer, at, ByteLen(copied)));
                if !is_copied {
                    requests.end(index, admission::FAULT);
                    continue;
                }
            }
            let bytes = header.encode(export.headers);
            let is_copied = context.buffers.copy_in(&buffer, filled, &bytes[..header_bytes as usize]);
            debug_assert!(is_copied, "private memory is not lost");
            filled += header_bytes + copied;
            if len > copied {
                (payload, payload_of) = (pending_buffer(requests, index), Some(index));
                break;
            }
        }
        if filled == 0 {
            staging.release(&mut context.buffers, buffer, slot);
            return None;
        }
        context.buffers.truncate(&buffer, ByteLen(filled));
        let len = filled + payload.as_ref().map_or(0, |payload| context.buffers.len(payload).0);
        self.message = Some(SentMessage { len, sent: 0, slot, payload_of });
        Some(Message { header: Some(buffer), payload, whole: true, ..Message::default() })
    }

    /// Handles the end of an operation.
    pub(super) fn has_sent(
        &mut self,
        context: &mut UringContext,
        staging: &mut BouncePool,
        done: IoCompletion,
        requests: &mut Requests,
        is_lost: bool,
    ) -> Result<(), Lost> {
        let Some(message) = &mut self.message else { return Ok(()) };
        let IoCompletion { result, buffer, header, .. } = done;
        message.sent += u64::try_from(result).unwrap_or(0);
        if result > 0 && message.sent < message.len && !is_lost {
            self.refused =
                Some(Message { header, payload: buffer, skip: message.sent, whole: true, ..Message::default() });
            return Ok(());
        }
        let SentMessage { slot, payload_of, .. } = *message;
        self.message = None;
        if let Some(header) = header {
            staging.release(&mut context.buffers, header, slot);
        }
        if let Some(index) = payload_of {
            if let Some(pending) = requests.get(index) {
                pending.request.buffer = buffer;
            }
            if result == FAULT {
                // The connection is lost too, because the server waits for the rest.
                requests.end(index, admission::FAULT);
            }
        }
        if result > 0 {
            return Ok(());
        }
        Err(format!("send: {}", std::io::Error::from_raw_os_error(-result)))
    }

    /// Stops sending: the connection is lost. An operation may be in flight.
    pub(super) fn abandon(&mut self, context: &mut UringContext, staging: &mut BouncePool, requests: &mut Requests) {
        self.queue.clear();
        let Some(Message { header, payload, .. }) = self.refused.take() else { return };
        let Some(SentMessage { slot, payload_of, .. }) = self.message.take() else { return };
        if let Some(header) = header {
            staging.release(&mut context.buffers, header, slot);
        }
        if let Some(pending) = payload_of.and_then(|index| requests.get(index)) {
            pending.request.buffer = payload;
        }
    }

    /// Closes it, with nothing being sent.
    pub(super) fn close(&mut self, context: &mut UringContext) {
        if let Some(socket) = self.socket.take() {
            context.unregister_file(socket);
        }
    }
}

fn pending_buffer(requests: &mut Requests, index: u16) -> Option<Buffer> {
    requests.get(index).and_then(|pending| pending.request.buffer.take())
}
