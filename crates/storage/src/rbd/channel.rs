//! A worker's channel: requests go to the library by the table of `mqblk-rbd`, and return through the worker's port.

use std::io;
use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset, Completion, DiskChannel, Geometry, Op, Outcome, Request};
use mqblk_memory::Buffer;
use mqblk_rbd::{Image, Operation, Requests};
use mqblk_uring::UringContext;

use super::state::RbdState;
use crate::observers::Traffic;
use crate::remote_requests::{MAX_INFLIGHT, RemoteRequests};

pub(super) struct RbdChannel {
    /// With the library, by index.
    started: Requests,
    requests: RemoteRequests,
    state: Arc<RbdState>,
    traffic: Arc<Traffic>,
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
            started: Requests::new(image, MAX_INFLIGHT),
            requests: RemoteRequests::new(geometry, discards, context),
            state: Arc::clone(state),
            traffic: state.observers.traffic(),
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
        let size = self.state.size.get().min(self.state.found.get());
        let started = &self.started;
        self.requests.submit(context, size, batch, completions, |request, io| {
            started.submit(request.index as usize, operation(request.op, request.start, request.len), io);
        })
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        let (state, traffic) = (&self.state, &self.traffic);
        self.requests.reap(context, completions, |result, submitted| match result {
            failed if failed < 0 => {
                state.check_errno(-failed);
                state.observers.error(&format!("{:?}: {}", submitted.op, io::Error::from_raw_os_error(-failed)));
                Outcome::from_errno(-failed)
            }
            // The image has shrunk.
            read if submitted.is_read() && u64::from(read.unsigned_abs()) < submitted.transferred.0 => {
                Outcome::OutOfRange
            }
            _ => {
                let count = if submitted.is_read() { Traffic::add_received } else { Traffic::add_sent };
                count(traffic, submitted.transferred.0);
                Outcome::Done(submitted.transferred)
            }
        })
    }

    fn outstanding(&self) -> u32 {
        self.requests.outstanding()
    }

    fn close(&mut self, context: &mut UringContext) {
        self.requests.close(context);
    }
}
