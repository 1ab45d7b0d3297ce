//! A worker's channel: requests go to the library by the table of `mqblk-rbd`, and come back through the worker's port.

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset, Completion, DiskChannel, Geometry, Op, Outcome, Request, Tag};
use mqblk_memory::Buffer;
use mqblk_rbd::{Image, Operation, Requests};
use mqblk_uring::{ClientId, IoCompletion, Refused, UringContext};

use super::RbdState;
use crate::admission;

/// Most requests in a channel.
const MAX_INFLIGHT: usize = 1024;

/// What a channel must know of a request to complete it.
#[derive(Clone, Copy, Debug)]
struct Submitted {
    tag: Tag,
    /// Bytes that are reported when it succeeds.
    transferred: ByteLen,
    /// Fewer bytes are no success.
    is_read: bool,
}

pub(super) struct RbdChannel {
    requests: Requests,
    state: Arc<RbdState>,
    /// With the size as of the last batch.
    geometry: Geometry,
    discards: bool,
    client: ClientId,
    /// By cookie.
    submitted: Vec<Submitted>,
    free: Vec<u32>,
}

impl RbdChannel {
    pub(super) fn new(
        image: &Image,
        state: &Arc<RbdState>,
        geometry: Geometry,
        discards: bool,
        context: &mut UringContext,
    ) -> RbdChannel {
        RbdChannel {
            requests: Requests::new(image, MAX_INFLIGHT),
            state: Arc::clone(state),
            geometry,
            discards,
            client: context.add_client(),
            submitted: Vec::with_capacity(MAX_INFLIGHT),
            free: Vec::with_capacity(MAX_INFLIGHT),
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

    /// Hands a request to the library. Completes one that is not to be carried out.
    fn start(&mut self, context: &mut UringContext, request: Request<Buffer>) -> Option<Completion<Buffer>> {
        let refusal = self.refusal(context, &request);
        let Request { start, len, tag, buffer, op } = request;
        if let Some(outcome) = refusal {
            return Some(Completion { outcome, tag, buffer });
        }
        let transferred = if op.has_data() { len } else { ByteLen::ZERO };
        let submitted = Submitted { tag, transferred, is_read: op == Op::Read };
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
                self.requests.submit(index as usize, operation(op, start, len), io);
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

fn operation(op: Op, ByteOffset(at): ByteOffset, ByteLen(len): ByteLen) -> Operation {
    match op {
        Op::Read => Operation::Read { at },
        Op::Write { fua } => Operation::Write { at, durable: fua },
        Op::Flush => Operation::Flush,
        Op::Discard { .. } => Operation::Discard { at, len },
        Op::WriteZeroes { may_unmap, fua } => Operation::WriteZeroes { at, len, allocated: !may_unmap, durable: fua },
    }
}

impl DiskChannel<UringContext> for RbdChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        // The library cuts a write off at the image's end and reports success: nothing is started beyond it.
        self.geometry.size = self.state.size.get().min(self.state.found.get());
        let free = MAX_INFLIGHT - self.outstanding() as usize;
        let taken = batch.len().min(free).min(context.room());
        for request in batch.drain(..taken) {
            completions.extend(self.start(context, request));
        }
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        let before = completions.len();
        while let Some(IoCompletion { cookie, result, buffer, .. }) = context.next(self.client) {
            let Submitted { tag, transferred, is_read } = self.submitted[cookie as usize];
            self.free.push(cookie as u32);
            let outcome = match result {
                failed if failed < 0 => {
                    self.state.check_fenced(-failed);
                    Outcome::from_errno(-failed)
                }
                // The image has shrunk.
                read if is_read && u64::from(read.unsigned_abs()) < transferred.0 => Outcome::OutOfRange,
                _ => Outcome::Done(transferred),
            };
            completions.push(Completion { outcome, tag, buffer });
        }
        completions.len() - before
    }

    fn outstanding(&self) -> u32 {
        (self.submitted.len() - self.free.len()) as u32
    }

    fn close(&mut self, context: &mut UringContext) {
        debug_assert_eq!(self.outstanding(), 0, "a channel is drained before it is closed");
        context.remove_client(self.client);
    }
}
