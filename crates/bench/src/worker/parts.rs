//! The requests of an I/O: one, unless the device takes less at once.

use mqblk_core::ByteLen;
use mqblk_driver::SubmitError;
use mqblk_memory::GuestAddress;

use super::{Worker, WorkerError, WorkerSettings};
use crate::device::{CompletedTransfer, ThreadQueues, Transfer, TransferStatus};

impl<Q: ThreadQueues> Worker<Q> {
    /// Submits a slot's I/O. Publishes when a batch is full.
    #[inline]
    pub(super) fn submit_io<const MIXED: bool>(&mut self, index: usize) -> Result<(), WorkerError> {
        let WorkerSettings { bs, request_len: part, iodepth, .. } = self.settings;
        let slot = &mut self.slots[index];
        let len = if MIXED { slot.len } else { bs };
        let queue = usize::from(slot.queue);
        slot.status = Q::Status::GOOD;
        slot.pending_parts = if len <= part { 1 } else { len.div_ceil(part) };
        if self.rotates_queues {
            slot.queue = ((queue + usize::from(iodepth)) % self.backlog.len()) as u16;
        }
        match self.backlog[queue].is_empty() {
            true => self.submit_parts::<MIXED>(queue, index, 0),
            // Behind earlier I/Os.
            false => {
                self.backlog[queue].push_back((index as u32, 0));
                Ok(())
            }
        }
    }

    /// Submits the requests of a slot's I/O from byte `from` on, as long as the queue has space; the rest waits in the
    /// backlog.
    #[inline]
    fn submit_parts<const MIXED: bool>(
        &mut self,
        queue: usize,
        index: usize,
        mut from: u32,
    ) -> Result<(), WorkerError> {
        let WorkerSettings { bs, request_len: part, .. } = self.settings;
        let end = if MIXED { self.slots[index].len } else { bs };
        loop {
            let len = part.min(end - from);
            match self.submit_request::<MIXED>(queue, index, from, len) {
                Ok(()) => {}
                Err(SubmitError::Full) if self.set.will_have_space(queue) => {
                    // Completions will free space. The caller publishes at the end of the round.
                    self.backlog[queue].push_front((index as u32, from));
                    return Ok(());
                }
                Err(refused) => return Err(refused.into()),
            }
            self.set.publish_batch(queue, self.settings.batch)?;
            from += len;
            if from == end {
                return Ok(());
            }
        }
    }

    /// Puts one request on the ring.
    #[inline]
    fn submit_request<const MIXED: bool>(
        &mut self,
        queue: usize,
        index: usize,
        from: u32,
        len: u32,
    ) -> Result<(), SubmitError> {
        let slot = &self.slots[index];
        let mut start = self.sector(slot.block);
        // `request_len` is a multiple of the disk's block.
        start.0 += ByteLen(from.into()).sectors().0;
        let transfer = Transfer {
            user: index as u32,
            part: if from == 0 { 0 } else { from / self.settings.request_len },
            op: slot.op,
            disk: if MIXED { slot.disk } else { 0 },
            start,
            address: GuestAddress(slot.address.0 + u64::from(from)),
            len,
        };
        self.set.submit(queue, transfer)
    }

    /// Records the completion of a request. Returns true if it was the last of its I/O, whose status is then in the
    /// slot.
    #[inline]
    pub(super) fn part_completed(&mut self, done: &CompletedTransfer<Q::Status>) -> bool {
        let slot = &mut self.slots[done.user as usize];
        slot.pending_parts -= 1;
        let is_last = slot.pending_parts == 0;
        // The initial status is good: not copied.
        if done.status != Q::Status::GOOD {
            slot.part_failed(&done.status);
        }
        is_last
    }

    /// Submits the backlog of a queue, as long as it has space.
    #[inline]
    pub(super) fn drain_backlog<const MIXED: bool>(&mut self, queue: usize) -> Result<(), WorkerError> {
        if Q::HANDS_OVER {
            // A completion may have freed space for another queue's I/Os.
            return (0..self.backlog.len()).try_for_each(|queue| match self.backlog[queue].is_empty() {
                true => Ok(()),
                false => self.submit_backlog::<MIXED>(queue),
            });
        }
        if self.backlog[queue].is_empty() {
            return Ok(());
        }
        self.submit_backlog::<MIXED>(queue)
    }

    #[cold]
    fn submit_backlog<const MIXED: bool>(&mut self, queue: usize) -> Result<(), WorkerError> {
        // Each round submits all of one I/O, or puts it back and ends.
        while let Some((index, from)) = self.backlog[queue].pop_front() {
            let before = self.backlog[queue].len();
            self.submit_parts::<MIXED>(queue, index as usize, from)?;
            if self.backlog[queue].len() > before {
                break;
            }
        }
        Ok(())
    }
}
