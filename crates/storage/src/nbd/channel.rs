//! A worker's connection: its requests, from the first byte sent to the last byte received.

use std::sync::Arc;

use mqblk_core::{ByteLen, Completion, DiskChannel, DiskError, Geometry, Op, Outcome, Request, Tag};
use mqblk_memory::{BouncePool, Buffer};
use mqblk_uring::{ClientId, UringContext};
use rustix::net::SendFlags;

use super::connect::Session;
use super::negotiate::ExportInfo;
use super::protocol::{RequestHeader, command, export_flag};
use super::receive::Receiver;
use super::requests::{MAX_INFLIGHT, Requests, STAGING};
use super::send::Sender;
use super::server::{NbdServer, OnlyConnection};
use crate::admission;
use crate::connection::{ConnectionHandle, SessionChannel};
use crate::observers::Traffic;

/// Cookies of the two operations that a channel has in flight.
const SEND: u64 = 0;
const RECEIVE: u64 = 1;

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
        let room = if self.is_lost { 0 } else { self.requests.room() };
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
