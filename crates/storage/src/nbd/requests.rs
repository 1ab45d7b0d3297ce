//! The requests of a channel: their commands at the server, and their outcomes.

use mqblk_core::{ByteLen, Completion, Op, Outcome, Request};
use mqblk_memory::Buffer;

use super::negotiate::ExportInfo;
use super::protocol::{RequestHeader, command, command_flag, export_flag};
use super::server::NbdServer;

/// Most requests in a channel.
pub(super) const MAX_INFLIGHT: usize = 256;
/// Bytes of the buffers that collect small requests and replies.
pub(super) const STAGING: u64 = 256 << 10;

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
    pub(super) fn is_back(&self) -> bool {
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
    pub(super) fn new() -> Requests {
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

    pub(super) fn insert(&mut self, request: Request<Buffer>) -> Result<u16, Request<Buffer>> {
        let Some(index) = self.free.pop() else { return Err(request) };
        self.places[usize::from(index)] = Some(Pending::new(request));
        Ok(index)
    }

    pub(super) fn remove(&mut self, index: u16) -> Option<Pending> {
        let pending = self.places.get_mut(usize::from(index))?.take()?;
        self.free.push(index);
        Some(pending)
    }

    pub(super) fn complete(&mut self, completions: &mut Vec<Completion<Buffer>>) {
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

    /// Returns the number of requests that can still be taken.
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    pub(super) fn outstanding(&self) -> usize {
        MAX_INFLIGHT - self.free.len()
    }
}

/// Returns the most bytes of a command without payload: aligned, and within the header's field.
fn max_piece(server: &NbdServer, export: &ExportInfo) -> u64 {
    let block = u64::from(server.geometry.logical_block.bytes());
    export.headers.max_len() / block * block
}
