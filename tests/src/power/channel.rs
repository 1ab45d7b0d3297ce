//! A filter disk that records all requests in a log.

use std::sync::Arc;
use std::time::Instant;

use mqblk_core::{Completion, DiskChannel, Op, Request, Tag};
use mqblk_engine::{AnyDisk, UringContext};

use super::log::{EventId, PowerLog};
use crate::filter_disk::{AnyChannel, FilterDisk};

type Buffer = <UringContext as mqblk_core::IoContext>::Buffer;

struct LogChannel {
    inner: AnyChannel,
    log: Arc<PowerLog>,
    volume: usize,
    /// Writes and flushes in flight in the inner channel.
    in_flight: Vec<(Tag, EventId)>,
}

/// Wraps `inner` so that all writes and flushes are recorded as `volume` in the log.
pub fn record_writes(inner: Arc<AnyDisk>, log: &Arc<PowerLog>, volume: usize) -> Arc<AnyDisk> {
    let log = Arc::clone(log);
    Arc::new(FilterDisk::new(inner, move |inner| -> AnyChannel {
        Box::new(LogChannel { inner, log: Arc::clone(&log), volume, in_flight: vec![] })
    }))
}

impl LogChannel {
    fn record(&mut self, context: &UringContext, request: &Request<Buffer>) {
        let (volume, at, len) = (self.volume, request.start.0, request.len.0);
        let id = match request.op {
            Op::Read => return,
            Op::Flush => self.log.flush(volume),
            Op::Write { fua } => {
                let mut data = vec![0; len as usize];
                let buffer = request.buffer.as_ref().expect("a write has data");
                assert!(context.buffers.copy_out(buffer, 0, &mut data), "a write's data is as long as its range");
                self.log.write(volume, at, data, fua)
            }
            Op::Discard { .. } => self.log.zeroes(volume, at, len, false),
            Op::WriteZeroes { fua, .. } => self.log.zeroes(volume, at, len, fua),
        };
        self.in_flight.push((request.tag, id));
    }

    fn complete(&mut self, finished: &[Completion<Buffer>]) {
        for one in finished {
            let Some(at) = self.in_flight.iter().position(|(tag, _)| *tag == one.tag) else { continue };
            let (_, id) = self.in_flight.swap_remove(at);
            if one.outcome.is_done() {
                self.log.complete(id);
            }
        }
    }
}

impl DiskChannel<UringContext> for LogChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        // One at a time, so that only accepted requests are recorded.
        let (mut taken, before) = (0, finished.len());
        let mut one = Vec::with_capacity(1);
        while !batch.is_empty() {
            let request = batch.remove(0);
            let recorded = self.in_flight.len();
            self.record(context, &request);
            one.push(request);
            if self.inner.submit(context, &mut one, finished) == 0 {
                // The entry stays, without a completion: the write may or may not be on the disk. It is recorded again
                // when it is resubmitted.
                self.in_flight.truncate(recorded);
                batch.insert(0, one.remove(0));
                break;
            }
            taken += 1;
        }
        self.complete(&finished[before..]);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        let count = self.inner.reap(context, finished);
        self.complete(&finished[before..]);
        count
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        let before = finished.len();
        self.inner.cancel(context, tags, finished);
        self.complete(&finished[before..]);
    }

    fn outstanding(&self) -> u32 {
        self.inner.outstanding()
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }

    fn close(&mut self, context: &mut UringContext) {
        self.inner.close(context);
    }
}
