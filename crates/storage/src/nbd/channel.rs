//! A worker's connection: its requests, from the first byte sent to the last byte received.

use std::sync::Arc;

use mqblk_core::{ByteLen, Completion, DiskChannel, DiskError, Geometry, Op, Outcome, Request, Tag};
use mqblk_memory::{BouncePool, Buffer};
use mqblk_uring::{ClientId, UringContext};
use rustix::net::SendFlags;

use super::connect::Session;
use super::negotiate::ExportInfo;
use super::protocol::{RequestHeader, command, command_flag, export_flag};
use super::receive::Receiver;
use super::send::Sender;
use super::{NbdServer, OnlyConnection};
use crate::admission;
use crate::connection::{ConnectionHandle, SessionChannel};
use crate::observers::Traffic;

/// Most requests in a channel.
pub(super) const MAX_INFLIGHT: usize = 256;
/// Bytes of the buffers that collect small requests and replies.
pub(super) const STAGING: u64 = 256 << 10;

/// Cookies of the two operations that a channel has in flight.
const SEND: u64 = 0;
const RECEIVE: u64 = 1;

/// Next command of a request at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its own command.
    Command,
    /// A flush that makes it durable, of a server without FUA.
    Flush,
}

/// A taken request.
#[derive(Debug)]
pub(super) struct Pending {
    pub request: Request<Buffer>,
    pub stage: Stage,
    /// The last cookie sent to the server; `None` before.
    pub cookie: Option<u64>,
    /// Finished bytes of a command without payload, which is split by the server's limit.
    pub done: u64,
    /// Bytes of the current command.
    pub piece: u64,
    /// Received bytes of a read.
    pub received: u64,
    /// The first error; the reply may continue after it.
    pub error: Option<Outcome>,
    /// Its outcome. The request is completed when its buffer is back.
    pub outcome: Option<Outcome>,
}

impl Pending {
    fn new(request: Request<Buffer>) -> Pending {
        Pending {
            request,
            stage: Stage::Command,
            cookie: None,
            done: 0,
            piece: 0,
            received: 0,
            error: None,
            outcome: None,
        }
    }

    /// Returns true if the kernel has none of its memory.
    fn is_back(&self) -> bool {
        self.request.buffer.is_some() || !self.request.op.has_data()
    }
}

/// The requests of a channel, by index.
#[derive(Debug)]
pub(super) struct Requests {
    places: Vec<Option<Pending>>,
    free: Vec<u16>,
    /// Indexes of requests that have an outcome.
    ended: Vec<u16>,
    /// Distinguishes the cookies of an index.
    serial: u64,
}

impl Requests {
    fn new() -> Requests {
        Requests {
            places: (0..MAX_INFLIGHT).map(|_| None).collect(),
            free: (0..MAX_INFLIGHT as u16).rev().collect(),
            ended: Vec::with_capacity(MAX_INFLIGHT),
            serial: 0,
        }
    }

    pub(super) fn get(&mut self, index: u16) -> Option<&mut Pending> {
        self.places.get_mut(usize::from(index))?.as_mut()
    }

    /// Returns the index of the request with this cookie.
    pub(super) fn find(&self, cookie: u64) -> Option<u16> {
        let index = cookie as u16;
        let pending = self.places.get(usize::from(index))?.as_ref()?;
        (pending.cookie == Some(cookie) && pending.outcome.is_none()).then_some(index)
    }

    /// Makes a request's next command.
    pub(super) fn command(&mut self, index: u16, server: &NbdServer, export: &ExportInfo) -> Option<RequestHeader> {
        self.serial = (self.serial + 1) & (u64::MAX >> 16);
        let cookie = self.serial << 16 | u64::from(index);
        let pending = self.get(index)?;
        pending.cookie = Some(cookie);
        let Request { start, len, op, .. } = pending.request;
        let (mut flags, mut offset) = (0, start.0 + pending.done);
        let mut set = |flag, on: bool| flags |= if on { flag } else { 0 };
        pending.piece = if op.has_data() { len.0 } else { (len.0 - pending.done).min(max_piece(server, export)) };
        let command = match (pending.stage, op) {
            (Stage::Flush, _) | (_, Op::Flush) => {
                (pending.piece, offset) = (0, 0);
                command::FLUSH
            }
            (_, Op::Read) => command::READ,
            (_, Op::Write { fua }) => {
                set(command_flag::FUA, fua && export.has(export_flag::SEND_FUA));
                command::WRITE
            }
            (_, Op::Discard { .. }) => command::TRIM,
            (_, Op::WriteZeroes { may_unmap, fua }) => {
                set(command_flag::NO_HOLE, !may_unmap);
                set(command_flag::FUA, fua && export.has(export_flag::SEND_FUA));
                set(command_flag::FAST_ZERO, server.fast_zeroes);
                command::WRITE_ZEROES
            }
        };
        Some(RequestHeader { flags, command, cookie, offset, len: pending.piece })
    }

    /// Sets a request's outcome, unless it has one.
    pub(super) fn end(&mut self, index: u16, outcome: Outcome) {
        if let Some(pending) = self.get(index)
            && pending.outcome.is_none()
        {
            pending.outcome = Some(outcome);
            self.ended.push(index);
        }
    }

    /// Handles the end of a reply. Returns true if the request has another command to send.
    pub(super) fn replied(&mut self, index: u16, export: &ExportInfo) -> bool {
        let Some(pending) = self.get(index) else { return false };
        pending.cookie = None;
        let Request { len, op, .. } = pending.request;
        if let Some(error) = pending.error {
            self.end(index, error);
            return false;
        }
        if pending.stage == Stage::Command && !op.has_data() && op != Op::Flush {
            pending.done += pending.piece;
            if pending.done < len.0 {
                return true;
            }
        }
        let fua = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
        if fua
            && pending.stage == Stage::Command
            && !export.has(export_flag::SEND_FUA)
            && export.has(export_flag::SEND_FLUSH)
        {
            pending.stage = Stage::Flush;
            return true;
        }
        self.end(index, Outcome::Done(if op.has_data() { len } else { ByteLen::ZERO }));
        false
    }

    fn insert(&mut self, request: Request<Buffer>) -> Result<u16, Request<Buffer>> {
        let Some(index) = self.free.pop() else { return Err(request) };
        self.places[usize::from(index)] = Some(Pending::new(request));
        Ok(index)
    }

    fn remove(&mut self, index: u16) -> Option<Pending> {
        let pending = self.places.get_mut(usize::from(index))?.take()?;
        self.free.push(index);
        Some(pending)
    }

    fn complete(&mut self, completions: &mut Vec<Completion<Buffer>>) {
        for at in (0..self.ended.len()).rev() {
            let index = self.ended[at];
            let is_back = self.get(index).is_none_or(|pending| pending.is_back());
            if !is_back {
                continue;
            }
            self.ended.swap_remove(at);
            if let Some(Pending { request, outcome: Some(outcome), .. }) = self.remove(index) {
                completions.push(Completion { outcome, tag: request.tag, buffer: request.buffer });
            }
        }
    }

    fn outstanding(&self) -> usize {
        MAX_INFLIGHT - self.free.len()
    }
}

/// Returns the most bytes of a command without payload: aligned, and within the header's field.
fn max_piece(server: &NbdServer, export: &ExportInfo) -> u64 {
    let block = u64::from(server.geometry.logical_block.bytes());
    export.headers.max_len() / block * block
}

/// A connection's channel.
pub(super) struct NbdChannel {
    server: Arc<NbdServer>,
    export: ExportInfo,
    /// With the size as of the last batch.
    geometry: Geometry,
    connection: ConnectionHandle,
    client: ClientId,
    requests: Requests,
    sender: Sender,
    receiver: Receiver,
    /// `None` once it is closed.
    staging: Option<BouncePool>,
    is_lost: bool,
    traffic: Arc<Traffic>,
    _only: Option<OnlyConnection>,
}

impl NbdChannel {
    /// Starts to receive.
    pub(super) fn new(
        server: Arc<NbdServer>,
        session: Session,
        only: Option<OnlyConnection>,
        connection: ConnectionHandle,
        context: &mut UringContext,
    ) -> Result<NbdChannel, DiskError> {
        let os = |source| DiskError::Os { what: "memory for messages".to_owned(), source };
        let mut staging = BouncePool::new(&mut context.buffers, 2, ByteLen(STAGING)).map_err(os)?;
        let Some((buffer, slot)) = staging.take(&mut context.buffers, ByteLen(STAGING)) else {
            return Err(os(std::io::ErrorKind::OutOfMemory.into()));
        };
        let socket = Arc::new(session.socket);
        let export = session.export;
        let mut channel = NbdChannel {
            geometry: server.geometry,
            export,
            connection,
            client: context.add_client(),
            requests: Requests::new(),
            sender: Sender::new(context.register_file(Arc::clone(&socket)), socket),
            receiver: Receiver::new(export.headers, buffer, slot),
            staging: Some(staging),
            is_lost: false,
            traffic: server.observers.traffic(),
            _only: only,
            server,
        };
        channel.receive(context);
        Ok(channel)
    }

    fn send(&mut self, context: &mut UringContext) {
        let Some(staging) = &mut self.staging else { return };
        if !self.is_lost {
            let to = (self.client, SEND);
            self.sender.send(context, to, staging, &mut self.requests, (&self.server, &self.export));
        }
    }

    fn receive(&mut self, context: &mut UringContext) {
        if !self.is_lost {
            self.receiver.receive(context, (self.client, RECEIVE), self.sender.socket(), &mut self.requests);
        }
    }

    fn lose(&mut self, context: &mut UringContext, why: &str) {
        if !std::mem::replace(&mut self.is_lost, true) {
            self.connection.lost(&format!("{}: {why}", self.server.dialer.address));
            context.cancel_picked(self.client, |_| true);
            if let Some(staging) = &mut self.staging {
                self.sender.abandon(context, staging, &mut self.requests);
            }
        }
    }

    /// Returns the outcome of a request that is not sent.
    fn refusal(&self, context: &UringContext, request: &Request<Buffer>) -> Option<Outcome> {
        if let Some(outcome) = admission::check_request(&self.geometry, request) {
            return Some(outcome);
        }
        let has = |flag| self.export.has(flag);
        let is_wrong = |buffer: &Buffer| {
            context.buffers.len(buffer) != request.len || request.len.0 > u64::from(self.export.max_payload)
        };
        match request.op {
            Op::Read | Op::Write { .. } => request.buffer.as_ref().is_some_and(is_wrong).then_some(admission::INVALID),
            Op::Flush => (!has(export_flag::SEND_FLUSH)).then_some(Outcome::Done(ByteLen::ZERO)),
            Op::Discard { .. } => (!has(export_flag::SEND_TRIM)).then_some(Outcome::Unsupported),
            Op::WriteZeroes { .. } => (!has(export_flag::SEND_WRITE_ZEROES)).then_some(Outcome::Unsupported),
        }
    }
}

impl DiskChannel<UringContext> for NbdChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.geometry.size = self.server.size.get();
        let room = if self.is_lost { 0 } else { self.requests.free.len() };
        let taken = batch.len().min(room);
        for request in batch.drain(..taken) {
            if let Some(outcome) = self.refusal(context, &request) {
                completions.push(Completion { outcome, tag: request.tag, buffer: request.buffer });
                continue;
            }
            match self.requests.insert(request) {
                Ok(index) => self.sender.push(index),
                Err(Request { tag, buffer, .. }) => {
                    debug_assert!(false, "no more is taken than there is room for");
                    completions.push(Completion { outcome: Outcome::Aborted, tag, buffer });
                }
            }
        }
        self.receive(context);
        self.send(context);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        while let Some(done) = context.next(self.client) {
            let Some(staging) = &mut self.staging else { break };
            let bytes = u64::try_from(done.result).unwrap_or(0);
            if done.cookie == SEND {
                self.traffic.add_sent(bytes);
                if let Err(why) = self.sender.has_sent(context, staging, done, &mut self.requests, self.is_lost) {
                    self.lose(context, &why);
                }
                continue;
            }
            self.traffic.add_received(bytes);
            let received = self.receiver.has_received(done, &mut self.requests, self.is_lost);
            let parsed = received.and_then(|()| {
                self.receiver.parse(context, &mut self.requests, &self.export, &self.server, &mut self.sender)
            });
            if let Err(why) = parsed {
                self.lose(context, &why);
            }
        }
        self.receive(context);
        self.send(context);
        let before = completions.len();
        self.requests.complete(completions);
        completions.len() - before
    }

    fn cancel(&mut self, _: &mut UringContext, tags: &[Tag], completions: &mut Vec<Completion<Buffer>>) {
        let requests = &mut self.requests;
        // Sent requests complete with their replies.
        self.sender.retain(|index| {
            let picked = requests
                .get(index)
                .is_some_and(|pending| pending.cookie.is_none() && tags.binary_search(&pending.request.tag).is_ok());
            if picked {
                requests.end(index, Outcome::Aborted);
            }
            !picked
        });
        self.requests.complete(completions);
    }

    fn outstanding(&self) -> u32 {
        self.requests.outstanding() as u32
    }

    fn close(&mut self, context: &mut UringContext) {
        if !self.is_lost {
            // Nothing is being sent, so it cannot come between other bytes. The server may ignore it.
            let header = RequestHeader { flags: 0, command: command::DISCONNECT, cookie: 0, offset: 0, len: 0 };
            let bytes = header.encode(self.export.headers);
            let bytes = &bytes[..self.export.headers.request_bytes()];
            let _ = rustix::net::send(self.sender.descriptor(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        // Including the receive that waits for the server.
        context.remove_client(self.client);
        self.sender.close(context);
        if let Some(mut staging) = self.staging.take() {
            if let Some((buffer, slot)) = self.receiver.take_buffer() {
                staging.release(&mut context.buffers, buffer, slot);
            }
            staging.close(&mut context.buffers);
        }
    }
}

impl SessionChannel for NbdChannel {
    fn take_unfinished(&mut self, requests: &mut Vec<Request<Buffer>>) {
        for index in 0..MAX_INFLIGHT as u16 {
            let is_unfinished =
                self.requests.get(index).is_some_and(|pending| pending.outcome.is_none() && pending.is_back());
            if is_unfinished && let Some(pending) = self.requests.remove(index) {
                requests.push(pending.request);
            }
        }
    }
}
