//! A worker's channel to blocking storage: queues requests for the threads, and collects what they complete.

use std::sync::Arc;

use mqblk_core::{ByteLen, Completion, DiskChannel, Geometry, Op, Outcome, Request, Tag};
use mqblk_memory::Buffer;
use mqblk_uring::{ClientId, IoCompletion, Refused, UringContext};

use super::pool::{QueuedRequest, RequestQueue};
use crate::admission::{self, DiskSize};

/// Most requests in a channel.
const MAX_INFLIGHT: usize = 1024;

/// What a channel must know of a request to complete it.
#[derive(Clone, Copy, Debug)]
struct Submitted {
    tag: Tag,
    /// Bytes that are reported when it succeeds.
    transferred: ByteLen,
}

pub(super) struct BlockingChannel {
    queue: Arc<RequestQueue>,
    number: u64,
    /// With the size as of the last batch.
    geometry: Geometry,
    size: Arc<DiskSize>,
    discards: bool,
    client: ClientId,
    /// By cookie.
    submitted: Vec<Submitted>,
    free: Vec<u32>,
    /// The batch that is being made; kept for its capacity.
    batch: Vec<QueuedRequest>,
}

impl BlockingChannel {
    pub(super) fn new(
        queue: Arc<RequestQueue>,
        geometry: Geometry,
        size: Arc<DiskSize>,
        discards: bool,
        context: &mut UringContext,
    ) -> BlockingChannel {
        BlockingChannel {
            number: queue.channel_number(),
            queue,
            geometry,
            size,
            discards,
            client: context.add_client(),
            submitted: Vec::with_capacity(MAX_INFLIGHT),
            free: Vec::with_capacity(MAX_INFLIGHT),
            batch: Vec::with_capacity(MAX_INFLIGHT),
        }
    }

    /// Returns the outcome of a request that is not to be carried out.
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

    /// Lends a request to the threads. Completes one that is not to be carried out.
    fn start(&mut self, context: &mut UringContext, request: Request<Buffer>) -> Option<Completion<Buffer>> {
        let refusal = self.refusal(context, &request);
        let Request { start, len, tag, buffer, op } = request;
        if let Some(outcome) = refusal {
            return Some(Completion { outcome, tag, buffer });
        }
        let transferred = if op.has_data() { len } else { ByteLen::ZERO };
        let submitted = Submitted { tag, transferred };
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
        // A buffer of a request without data stays here: nobody needs it.
        match context.submit_remote(self.client, u64::from(index), buffer) {
            Ok(io) => {
                self.batch.push(QueuedRequest { channel: self.number, tag, op, start, len, io });
                None
            }
            Err(Refused(buffer)) => {
                debug_assert!(false, "no more is taken than the context has room for");
                self.free.push(index);
                Some(Completion { outcome: Outcome::Aborted, tag, buffer })
            }
        }
    }
}

impl DiskChannel<UringContext> for BlockingChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.geometry.size = self.size.get();
        let free = MAX_INFLIGHT - self.outstanding() as usize;
        let taken = batch.len().min(free).min(context.room());
        for request in batch.drain(..taken) {
            completions.extend(self.start(context, request));
        }
        if !self.batch.is_empty() {
            self.queue.submit(&mut self.batch);
        }
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        let before = completions.len();
        while let Some(IoCompletion { cookie, result, buffer, .. }) = context.next(self.client) {
            let Submitted { tag, transferred } = self.submitted[cookie as usize];
            self.free.push(cookie as u32);
            let outcome = if result < 0 { Outcome::from_errno(-result) } else { Outcome::Done(transferred) };
            completions.push(Completion { outcome, tag, buffer });
        }
        completions.len() - before
    }

    fn cancel(&mut self, _context: &mut UringContext, tags: &[Tag], _completions: &mut Vec<Completion<Buffer>>) {
        // They come back through the port, like all others.
        self.queue.cancel(self.number, tags);
    }

    fn outstanding(&self) -> u32 {
        (self.submitted.len() - self.free.len()) as u32
    }

    fn close(&mut self, context: &mut UringContext) {
        debug_assert_eq!(self.outstanding(), 0, "a channel is drained before it is closed");
        context.remove_client(self.client);
    }
}
