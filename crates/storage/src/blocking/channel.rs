//! A worker's channel to blocking storage: queues requests for the threads, and collects their completions.

use std::sync::Arc;

use mqblk_core::{Completion, DiskChannel, Geometry, Outcome, Request, Tag};
use mqblk_memory::Buffer;
use mqblk_uring::UringContext;

use super::pool::{QueuedRequest, RequestQueue};
use crate::admission::DiskSize;
use crate::remote_requests::{MAX_INFLIGHT, RemoteRequest, RemoteRequests};

pub(super) struct BlockingChannel {
    queue: Arc<RequestQueue>,
    number: u64,
    size: Arc<DiskSize>,
    requests: RemoteRequests,
    /// The batch in preparation; kept for its capacity.
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
            size,
            requests: RemoteRequests::new(geometry, discards, context),
            batch: Vec::with_capacity(MAX_INFLIGHT),
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
        let (size, channel, queued) = (self.size.get(), self.number, &mut self.batch);
        let taken = self.requests.submit(context, size, batch, completions, |request, io| {
            let RemoteRequest { op, start, len, tag, .. } = request;
            queued.push(QueuedRequest { channel, tag, op, start, len, io });
        });
        if !self.batch.is_empty() {
            self.queue.submit(&mut self.batch);
        }
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        self.requests.reap(context, completions, |result, submitted| match result {
            failed if failed < 0 => Outcome::from_errno(-failed),
            _ => Outcome::Done(submitted.transferred),
        })
    }

    fn cancel(&mut self, _context: &mut UringContext, tags: &[Tag], _completions: &mut Vec<Completion<Buffer>>) {
        // Cancelled requests return through the port, like all others.
        self.queue.cancel(self.number, tags);
    }

    fn outstanding(&self) -> u32 {
        self.requests.outstanding()
    }

    fn close(&mut self, context: &mut UringContext) {
        self.requests.close(context);
    }
}
