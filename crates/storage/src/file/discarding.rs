//! Discards of a block device that cannot write zeroes without data (dm-thin, dm-crypt). io_uring has only `fallocate`
//! for it, which such a device refuses, so a thread of the disk's own calls `BLKDISCARD`.

use std::time::Instant;

use mqblk_core::{Completion, DiskChannel, Op, Request, Tag};
use mqblk_memory::Buffer;
use mqblk_uring::UringContext;

use super::channel::FileChannel;

/// Threads of a disk for its discards. Guests send few at a time.
pub(super) const DISCARD_THREADS: u32 = 2;

/// A worker's channel: discards go to threads, all others through the ring.
pub(super) struct DiscardingChannel {
    file: FileChannel,
    threads: Box<dyn DiskChannel<UringContext>>,
    /// The next requests of one kind; kept for its capacity.
    run: Vec<Request<Buffer>>,
}

fn is_discard(request: &Request<Buffer>) -> bool {
    matches!(request.op, Op::Discard { .. })
}

impl DiscardingChannel {
    pub(super) fn new(file: FileChannel, threads: Box<dyn DiskChannel<UringContext>>) -> DiscardingChannel {
        DiscardingChannel { file, threads, run: Vec::new() }
    }
}

impl DiskChannel<UringContext> for DiscardingChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        if !batch.iter().any(is_discard) {
            return self.file.submit(context, batch, completions);
        }
        let mut taken = 0;
        while let Some(first) = batch.first().map(is_discard) {
            let count = batch.iter().take_while(|request| is_discard(request) == first).count();
            self.run.extend(batch.drain(..count));
            taken += match first {
                true => self.threads.submit(context, &mut self.run, completions),
                false => self.file.submit(context, &mut self.run, completions),
            };
            if !self.run.is_empty() {
                batch.splice(..0, self.run.drain(..));
                break;
            }
        }
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        self.file.reap(context, completions) + self.threads.reap(context, completions)
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], completions: &mut Vec<Completion<Buffer>>) {
        self.file.cancel(context, tags, completions);
        self.threads.cancel(context, tags, completions);
    }

    fn outstanding(&self) -> u32 {
        self.file.outstanding() + self.threads.outstanding()
    }

    fn deadline(&self) -> Option<Instant> {
        // The threads complete through the ring.
        if self.file.outstanding() > 0 { self.file.deadline() } else { None }
    }

    fn close(&mut self, context: &mut UringContext) {
        self.threads.close(context);
        self.file.close(context);
    }
}
