//! Receiving side of a channel: several replies with one operation, and the data of long reads directly into guest
//! memory.

use mqblk_core::{ByteLen, Op, Outcome};
use mqblk_memory::Buffer;
use mqblk_uring::{ClientId, IoCompletion, Message, MessageOrder, RefusedMessage, RingFile, UringContext};

use super::negotiate::ExportInfo;
use super::protocol::{BadHeader, Headers, ReplyHeader, SHUTDOWN, be32, be64, chunk, decode_reply, outcome};
use super::requests::{Pending, Requests, Stage};
use super::send::{FAULT, Lost, Sender};
use super::server::NbdServer;
use crate::{admission, zeroes};

/// At least this much missing data is received directly into the request's buffer. A copy of less takes no longer than
/// an operation, and includes the replies behind it.
const MIN_DIRECT: u64 = 32 << 10;
/// Longest payload of an error: 4096 bytes of text, and three numbers.
const MAX_ERROR: u64 = 4096 + 14;
/// Bytes of a reply decoded at a time: a header, and the numbers of a chunk.
const WINDOW: usize = 48;

/// Content of the next bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expecting {
    Header,
    /// Data of a read: this many bytes, for this place in its buffer. With `last` it ends the reply.
    Data {
        index: u16,
        at: u64,
        left: u64,
        last: bool,
    },
}

/// The receiving side of a channel.
#[derive(Debug)]
pub(super) struct Receiver {
    headers: Headers,
    /// `None` while an operation has it.
    buffer: Option<Buffer>,
    slot: u32,
    /// Received bytes that are not parsed.
    start: u64,
    end: u64,
    expecting: Expecting,
    /// Bytes that the operation in flight receives into a request's own buffer.
    direct: Option<(u16, u64)>,
}

impl Receiver {
    pub(super) fn new(headers: Headers, buffer: Buffer, slot: u32) -> Receiver {
        let (start, end, expecting) = (0, 0, Expecting::Header);
        Receiver { headers, buffer: Some(buffer), slot, start, end, expecting, direct: None }
    }

    /// Takes the buffer, if no operation has it.
    pub(super) fn take_buffer(&mut self) -> Option<(Buffer, u32)> {
        self.buffer.take().map(|buffer| (buffer, self.slot))
    }

    /// Receives more, unless an operation is in flight.
    pub(super) fn receive(
        &mut self,
        context: &mut UringContext,
        (client, cookie): (ClientId, u64),
        socket: Option<&RingFile>,
        requests: &mut Requests,
    ) {
        let (Some(socket), Some(buffer)) = (socket, self.buffer.take()) else { return };
        let message = match self.take_direct(requests) {
            Some((index, at, left, payload)) => {
                self.direct = Some((index, left));
                let payload_end = Some(at + left);
                let order = MessageOrder::PayloadFirst;
                Message { header: Some(buffer), payload: Some(payload), order, skip: at, payload_end, whole: false }
            }
            None => {
                self.compact(context, &buffer);
                Message { header: Some(buffer), skip: self.end, ..Message::default() }
            }
        };
        if let Err(RefusedMessage(message)) = context.receive(client, cookie, socket, message) {
            // Other channels fill the context: the next turn tries again.
            self.buffer = message.header;
            if let Some((index, _)) = self.direct.take()
                && let Some(pending) = requests.get(index)
            {
                pending.request.buffer = message.payload;
            }
        }
    }

    /// Takes the buffer of the request whose data comes next, if enough of it is missing.
    fn take_direct(&mut self, requests: &mut Requests) -> Option<(u16, u64, u64, Buffer)> {
        let Expecting::Data { index, at, left, .. } = self.expecting else { return None };
        let pending = requests.get(index)?;
        if left < MIN_DIRECT || pending.error.is_some() || self.start < self.end {
            return None;
        }
        (self.start, self.end) = (0, 0);
        pending.request.buffer.take().map(|buffer| (index, at, left, buffer))
    }

    /// Moves unparsed bytes to the start of the buffer.
    fn compact(&mut self, context: &UringContext, buffer: &Buffer) {
        let len = self.end - self.start;
        if self.start > 0 && len > 0 {
            let is_copied = context.buffers.copy_range(buffer, self.start, buffer, 0, ByteLen(len));
            debug_assert!(is_copied, "private memory is not lost");
        }
        (self.start, self.end) = (0, len);
    }

    /// Handles the end of an operation.
    pub(super) fn has_received(
        &mut self,
        done: IoCompletion,
        requests: &mut Requests,
        is_lost: bool,
    ) -> Result<(), Lost> {
        let IoCompletion { result, buffer, header, .. } = done;
        self.buffer = header;
        let direct = self.direct.take();
        if let Some((index, _)) = direct
            && let Some(pending) = requests.get(index)
        {
            pending.request.buffer = buffer;
            if result == FAULT {
                pending.error = Some(admission::FAULT);
                requests.end(index, admission::FAULT);
            }
        }
        if is_lost {
            return Err(String::new());
        }
        let received = match u64::try_from(result) {
            Ok(0) => return Err("the server has ended the connection".to_owned()),
            Ok(received) => received,
            Err(_) => return Err(format!("receive: {}", std::io::Error::from_raw_os_error(-result))),
        };
        let into_request = direct.map_or(0, |(_, bytes)| bytes.min(received));
        if let Expecting::Data { at, left, .. } = &mut self.expecting {
            (*at, *left) = (*at + into_request, *left - into_request);
        }
        self.end += received - into_request;
        Ok(())
    }

    /// Handles the received bytes.
    pub(super) fn parse(
        &mut self,
        context: &UringContext,
        requests: &mut Requests,
        export: &ExportInfo,
        server: &NbdServer,
        sender: &mut Sender,
    ) -> Result<(), Lost> {
        loop {
            let ended = match self.expecting {
                Expecting::Header => self.parse_header(context, requests, server)?,
                Expecting::Data { .. } => self.parse_data(context, requests),
            };
            match ended {
                Parsed::More => return Ok(()),
                Parsed::Chunk => {}
                Parsed::Reply(index) => {
                    if requests.replied(index, export) {
                        sender.push(index);
                    }
                }
            }
        }
    }

    /// Copies data of a read to its buffer.
    fn parse_data(&mut self, context: &UringContext, requests: &mut Requests) -> Parsed {
        let Expecting::Data { index, at, left, last } = self.expecting else { return Parsed::More };
        let Some(buffer) = &self.buffer else { return Parsed::More };
        let run = left.min(self.end - self.start);
        if run > 0
            && let Some(pending) = requests.get(index)
            && pending.error.is_none()
        {
            let is_copied = pending
                .request
                .buffer
                .as_ref()
                .is_some_and(|to| context.buffers.copy_range(buffer, self.start, to, at, ByteLen(run)));
            if !is_copied {
                pending.error = Some(admission::FAULT);
            }
        }
        self.start += run;
        if run < left {
            self.expecting = Expecting::Data { index, at: at + run, left: left - run, last };
            return Parsed::More;
        }
        self.expecting = Expecting::Header;
        if last { Parsed::Reply(index) } else { Parsed::Chunk }
    }

    fn parse_header(
        &mut self,
        context: &UringContext,
        requests: &mut Requests,
        server: &NbdServer,
    ) -> Result<Parsed, Lost> {
        let mut window = [0; WINDOW];
        let there = (self.end - self.start).min(WINDOW as u64) as usize;
        let window = self.look(context, &mut window[..there])?;
        let (header, header_len) = match decode_reply(self.headers, window) {
            Ok(decoded) => decoded,
            Err(BadHeader::Short(_)) => return Ok(Parsed::More),
            Err(BadHeader::Magic(found)) => {
                let form = self.headers.word();
                return Err(format!("reply: magic: found {found:#010x}, expected that of a {form} reply"));
            }
        };
        let cookie = match header {
            ReplyHeader::Simple { cookie, .. } | ReplyHeader::Chunk { cookie, .. } => cookie,
        };
        let Some(index) = requests.find(cookie) else {
            return Err(format!("reply: cookie: found {cookie:#x}, expected that of a request in flight"));
        };
        match header {
            ReplyHeader::Simple { error, .. } => self.simple(requests, server, index, error, header_len as u64),
            ReplyHeader::Chunk { done, kind, len, .. } => {
                let numbers = &window[header_len..];
                self.chunk(
                    context,
                    requests,
                    server,
                    ChunkHeader { index, done, kind, len },
                    numbers,
                    header_len as u64,
                )
            }
        }
    }

    /// Copies the next bytes to `bytes` without taking them.
    fn look<'a>(&self, context: &UringContext, bytes: &'a mut [u8]) -> Result<&'a [u8], Lost> {
        match &self.buffer {
            Some(buffer) if context.buffers.copy_out(buffer, self.start, bytes) => Ok(bytes),
            _ => Err("no buffer to receive into".to_owned()),
        }
    }

    fn simple(
        &mut self,
        requests: &mut Requests,
        server: &NbdServer,
        index: u16,
        error: u32,
        header_len: u64,
    ) -> Result<Parsed, Lost> {
        let Some(pending) = requests.get(index) else { return Ok(Parsed::Chunk) };
        let is_read = pending.request.op == Op::Read;
        if is_read && self.headers == Headers::Structured {
            return Err("reply to a read: found a simple one, expected a structured one".to_owned());
        }
        self.start += header_len;
        if error != 0 {
            fail(requests, server, index, error, "")?;
            return Ok(Parsed::Reply(index));
        }
        if !is_read {
            return Ok(Parsed::Reply(index));
        }
        let len = pending.request.len.0;
        pending.received = len;
        self.expecting = Expecting::Data { index, at: 0, left: len, last: true };
        Ok(Parsed::Chunk)
    }

    fn chunk(
        &mut self,
        context: &UringContext,
        requests: &mut Requests,
        server: &NbdServer,
        ChunkHeader { index, done, kind, len }: ChunkHeader,
        numbers: &[u8],
        header_len: u64,
    ) -> Result<Parsed, Lost> {
        let Some(pending) = requests.get(index) else { return Ok(Parsed::Chunk) };
        let start = pending.request.start.0;
        let is_read = pending.request.op == Op::Read && pending.stage == Stage::Command;
        let unexpected = |what: &str| Err(format!("chunk of type {kind} with {len} bytes: {what}"));
        let parsed = |done: bool| if done { Parsed::Reply(index) } else { Parsed::Chunk };
        match kind {
            chunk::NONE if len == 0 && done => {
                self.start += header_len;
            }
            chunk::OFFSET_DATA if is_read && len > 8 => {
                let Some(offset) = be64(numbers, 0) else { return Ok(Parsed::More) };
                let data = len - 8;
                let Some(at) = place(pending, start, offset, data) else {
                    return unexpected("the data is not of the request");
                };
                self.start += header_len + 8;
                self.expecting = Expecting::Data { index, at, left: data, last: done };
                if done {
                    check_length(pending)?;
                }
                return Ok(Parsed::Chunk);
            }
            chunk::OFFSET_HOLE if is_read && len == 12 => {
                let (Some(offset), Some(hole)) = (be64(numbers, 0), be32(numbers, 8)) else { return Ok(Parsed::More) };
                let Some(at) = place(pending, start, offset, hole.into()) else {
                    return unexpected("the hole is not of the request");
                };
                self.start += header_len + 12;
                let is_filled =
                    pending.request.buffer.as_ref().is_some_and(|to| zeroes::fill(context, to, at, hole.into()));
                if !is_filled {
                    pending.error.get_or_insert(admission::FAULT);
                }
            }
            kind if kind & chunk::ERROR != 0 => {
                if !(6..=MAX_ERROR).contains(&len) {
                    return unexpected(&format!("expected an error of 6 to {MAX_ERROR} bytes"));
                }
                if self.end - self.start < header_len + len {
                    return Ok(Parsed::More);
                }
                self.start += header_len;
                let mut bytes = vec![0; len as usize];
                let bytes = self.look(context, &mut bytes)?;
                let text_len = usize::from(u16::from_be_bytes([bytes[4], bytes[5]]));
                let Some(text) = bytes.get(6..6 + text_len) else {
                    return unexpected("the error's text is longer than the chunk");
                };
                let (error, text) = (be32(bytes, 0).unwrap_or(0), String::from_utf8_lossy(text).into_owned());
                self.start += len;
                // An error number of 0 violates the protocol, and counts as an error.
                fail(requests, server, index, if error == 0 { 22 } else { error }, &text)?;
                return Ok(parsed(done));
            }
            _ => return unexpected("not expected here"),
        }
        if done && is_read {
            check_length(pending)?;
        }
        Ok(parsed(done))
    }
}

/// The header of a chunk, with the request that it is for.
struct ChunkHeader {
    index: u16,
    done: bool,
    kind: u16,
    len: u64,
}

/// Result of parsing.
enum Parsed {
    /// Nothing: more bytes are needed.
    More,
    /// A part of a reply.
    Chunk,
    /// The reply to the request with this index has ended.
    Reply(u16),
}

/// Returns the offset of a part of a read in its buffer, and counts it. `None` if it lies outside.
fn place(pending: &mut Pending, start: u64, offset: u64, len: u64) -> Option<u64> {
    let at = offset.checked_sub(start)?;
    let end = at.checked_add(len)?;
    pending.received = pending.received.checked_add(len)?;
    (end <= pending.request.len.0 && pending.received <= pending.request.len.0).then_some(at)
}

/// Checks, at the end of its reply, that a read is complete.
fn check_length(pending: &Pending) -> Result<(), Lost> {
    let (received, expected) = (pending.received, pending.request.len.0);
    if pending.error.is_none() && received != expected {
        return Err(format!("reply to a read: found {received} bytes, expected {expected}"));
    }
    Ok(())
}

/// Records the server's error for a request.
fn fail(requests: &mut Requests, server: &NbdServer, index: u16, error: u32, text: &str) -> Result<(), Lost> {
    if error == SHUTDOWN {
        return Err("the server is shutting down".to_owned());
    }
    let Some(pending) = requests.get(index) else { return Ok(()) };
    let outcome: Outcome = outcome(error);
    if pending.error.is_none() {
        server.said(pending.request.op, pending.request.start, error, text);
    }
    pending.error.get_or_insert(outcome);
    Ok(())
}
