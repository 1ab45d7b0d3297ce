//! I/Os and the requests that they are: one each, unless the device takes less at once.

use mqblk_core::ByteLen;
use mqblk_driver::Refused;
use mqblk_memory::GuestAddress;

use super::{Settings, Worker, WorkerError};
use crate::interface::{Done, Set, Status, Transfer};

impl<Q: Set> Worker<Q> {
    /// Submits a unit's I/O, and publishes when a batch is full.
    #[inline]
    pub(super) fn send<const MIXED: bool>(&mut self, index: usize) -> Result<(), WorkerError> {
        let Settings { bs, part, iodepth, .. } = self.settings;
        let unit = &mut self.units[index];
        let len = if MIXED { unit.len } else { bs };
        let queue = usize::from(unit.queue);
        unit.status = Q::Status::GOOD;
        unit.waiting = if len <= part { 1 } else { len.div_ceil(part) };
        if self.rotate {
            unit.queue = ((queue + usize::from(iodepth)) % self.backlog.len()) as u16;
        }
        match self.backlog[queue].is_empty() {
            true => self.submit::<MIXED>(queue, index, 0),
            // Behind those that came before.
            false => {
                self.backlog[queue].push_back((index as u32, 0));
                Ok(())
            }
        }
    }

    /// Submits the parts of a unit's I/O from byte `from` on, as far as the queue has room; the others wait in the backlog.
    #[inline]
    fn submit<const MIXED: bool>(&mut self, queue: usize, index: usize, mut from: u32) -> Result<(), WorkerError> {
        let Settings { bs, part, .. } = self.settings;
        let end = if MIXED { self.units[index].len } else { bs };
        loop {
            let len = part.min(end - from);
            match self.request::<MIXED>(queue, index, from, len) {
                Ok(()) => {}
                Err(Refused::Full) if self.set.makes_room(queue) => {
                    // What is in flight makes room, and whoever submits publishes it at the end of the round.
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

    /// Puts one request into the ring.
    #[inline]
    fn request<const MIXED: bool>(&mut self, queue: usize, index: usize, from: u32, len: u32) -> Result<(), Refused> {
        let unit = &self.units[index];
        let mut start = self.sector(unit.block);
        // The part is a multiple of the disk's block.
        start.0 += ByteLen(from.into()).sectors().0;
        let transfer = Transfer {
            user: index as u32,
            part: if from == 0 { 0 } else { from / self.settings.part },
            write: unit.write,
            disk: if MIXED { unit.disk } else { 0 },
            start,
            address: GuestAddress(unit.address.0 + u64::from(from)),
            len,
        };
        self.set.submit(queue, transfer)
    }

    /// A request was answered. Returns how its I/O ended, with the answer to its last part.
    #[inline]
    pub(super) fn answered(&mut self, done: Done<Q::Status>) -> Option<Q::Status> {
        let unit = &mut self.units[done.user as usize];
        unit.waiting -= 1;
        if unit.status == Q::Status::GOOD {
            unit.status = done.status;
        }
        (unit.waiting == 0).then_some(unit.status)
    }

    /// Submits what waits for room on a queue, as far as there is some.
    #[inline]
    pub(super) fn catch_up<const MIXED: bool>(&mut self, queue: usize) -> Result<(), WorkerError> {
        if Q::HANDS_OVER {
            // What ended may have made room for another queue's.
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
        // Each round submits one I/O wholly, or puts it back and ends.
        while let Some((index, from)) = self.backlog[queue].pop_front() {
            let before = self.backlog[queue].len();
            self.submit::<MIXED>(queue, index as usize, from)?;
            if self.backlog[queue].len() > before {
                break;
            }
        }
        Ok(())
    }
}
