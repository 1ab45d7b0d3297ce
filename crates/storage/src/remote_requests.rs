//! The requests of a channel that other threads execute: they leave as [`RemoteIo`]s and return through the worker's
//! port.

use mqblk_core::{ByteLen, ByteOffset, Completion, Geometry, Op, Outcome, Request, Tag};
use mqblk_memory::Buffer;
use mqblk_uring::{ClientId, IoCompletion, Refused, RemoteIo, UringContext};

use crate::admission;

/// Most requests in a channel.
pub(crate) const MAX_INFLIGHT: usize = 1024;

/// A request handed out, without its buffer.
pub(crate) struct RemoteRequest {
    /// Below [`MAX_INFLIGHT`]; no other request has it until this one has returned.
    pub(crate) index: u32,
    pub(crate) op: Op,
    pub(crate) start: ByteOffset,
    pub(crate) len: ByteLen,
    pub(crate) tag: Tag,
}

/// A submitted request's data for its completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Submitted {
    tag: Tag,
    /// Bytes reported on success.
    pub(crate) transferred: ByteLen,
    pub(crate) op: Op,
}

impl Submitted {
    pub(crate) fn is_read(&self) -> bool {
        self.op == Op::Read
    }
}

/// The requests of a channel, by their cookies.
pub(crate) struct RemoteRequests {
    /// With the size as of the last batch.
    geometry: Geometry,
    discards: bool,
    client: ClientId,
    submitted: Vec<Submitted>,
    free: Vec<u32>,
}

impl RemoteRequests {
    pub(crate) fn new(geometry: Geometry, discards: bool, context: &mut UringContext) -> RemoteRequests {
        RemoteRequests {
            geometry,
            discards,
            client: context.add_client(),
            submitted: Vec::with_capacity(MAX_INFLIGHT),
            free: Vec::with_capacity(MAX_INFLIGHT),
        }
    }

    /// Takes requests from `batch`, as far as there is room, on a disk of `size` bytes: passes each request to
    /// `hand_out`, or completes one that must not be executed. Returns the number of taken requests.
    pub(crate) fn submit(
        &mut self,
        context: &mut UringContext,
        size: ByteLen,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
        mut hand_out: impl FnMut(RemoteRequest, RemoteIo),
    ) -> usize {
        self.geometry.size = size;
        let free = MAX_INFLIGHT - self.outstanding() as usize;
        let taken = batch.len().min(free).min(context.room());
        for request in batch.drain(..taken) {
            completions.extend(self.start(context, request, &mut hand_out));
        }
        taken
    }

    fn start(
        &mut self,
        context: &mut UringContext,
        request: Request<Buffer>,
        hand_out: &mut impl FnMut(RemoteRequest, RemoteIo),
    ) -> Option<Completion<Buffer>> {
        let refusal = self.refusal(context, &request);
        let Request { start, len, tag, buffer, op } = request;
        if let Some(outcome) = refusal {
            return Some(Completion { outcome, tag, buffer });
        }
        let transferred = if op.has_data() { len } else { ByteLen::ZERO };
        let submitted = Submitted { tag, transferred, op };
        let index = match self.free.pop() {
            Some(index) => {
                self.submitted[index as usize] = submitted;
                index
            }
            None => {
                self.submitted.push(submitted);
                self.submitted.len() as u32 - 1
            }
        };
        match context.submit_remote(self.client, u64::from(index), buffer) {
            Ok(io) => {
                hand_out(RemoteRequest { index, op, start, len, tag }, io);
                None
            }
            Err(Refused(buffer)) => {
                debug_assert!(false, "no more is taken than the context has room for");
                self.free.push(index);
                Some(Completion { outcome: Outcome::Aborted, tag, buffer })
            }
        }
    }

    /// Returns the outcome of a request that must not be executed.
    fn refusal(&self, context: &UringContext, request: &Request<Buffer>) -> Option<Outcome> {
        if let Some(outcome) = admission::check_request(&self.geometry, request) {
            return Some(outcome);
        }
        match (request.op, &request.buffer) {
            (Op::Read | Op::Write { .. }, Some(buffer)) if context.buffers.len(buffer) != request.len => {
                Some(admission::INVALID)
            }
            (Op::Discard { .. }, _) if !self.discards => Some(Outcome::Unsupported),
            _ => None,
        }
    }

    /// Collects returned requests; `outcome` maps results. Returns their number.
    pub(crate) fn reap(
        &mut self,
        context: &mut UringContext,
        completions: &mut Vec<Completion<Buffer>>,
        outcome: impl Fn(i32, Submitted) -> Outcome,
    ) -> usize {
        let before = completions.len();
        while let Some(IoCompletion { cookie, result, buffer, .. }) = context.next(self.client) {
            let submitted = self.submitted[cookie as usize];
            self.free.push(cookie as u32);
            completions.push(Completion { outcome: outcome(result, submitted), tag: submitted.tag, buffer });
        }
        completions.len() - before
    }

    pub(crate) fn outstanding(&self) -> u32 {
        (self.submitted.len() - self.free.len()) as u32
    }

    pub(crate) fn close(&mut self, context: &mut UringContext) {
        debug_assert_eq!(self.outstanding(), 0, "a channel is drained before it is closed");
        context.remove_client(self.client);
    }
}
