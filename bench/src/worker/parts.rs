//! I/Os and the requests that they are: one each, unless the device takes less at once.

use mqblk_core::ByteLen;
use mqblk_driver::virtio_blk::{Completion, Piece, Refused, Status};
use mqblk_memory::GuestAddress;

use super::{Settings, Worker, WorkerError};

impl Worker {
    /// Submits a unit's I/O, and publishes when a batch is full.
    #[inline]
    pub(super) fn send(&mut self, index: usize) -> Result<(), WorkerError> {
        let Settings { bs, part, iodepth, .. } = self.settings;
        let unit = &mut self.units[index];
        let queue = usize::from(unit.queue);
        unit.status = Status::Ok;
        unit.waiting = if bs <= part { 1 } else { bs.div_ceil(part) };
        if self.rotate {
            unit.queue = ((queue + usize::from(iodepth)) % self.backlog.len()) as u16;
        }
        match self.backlog[queue].is_empty() {
            true => self.submit(queue, index, 0),
            // Behind those that came before.
            false => {
                self.backlog[queue].push_back((index as u32, 0));
                Ok(())
            }
        }
    }

    /// Submits the parts of a unit's I/O from byte `from` on, as far as the queue has room; the others wait in the backlog.
    #[inline]
    fn submit(&mut self, queue_index: usize, index: usize, mut from: u32) -> Result<(), WorkerError> {
        let Settings { bs, part, .. } = self.settings;
        loop {
            let len = part.min(bs - from);
            match self.request(queue_index, index, from, len) {
                Ok(()) => {}
                Err(Refused::Full) if self.set.queues()[queue_index].in_flight() != 0 => {
                    // What is in flight makes room, and whoever submits publishes it at the end of the round.
                    self.backlog[queue_index].push_front((index as u32, from));
                    return Ok(());
                }
                Err(refused) => return Err(refused.into()),
            }
            let queue = &mut self.set.queues()[queue_index];
            if queue.unpublished() >= self.settings.batch {
                queue.publish()?;
            }
            from += len;
            if from == bs {
                return Ok(());
            }
        }
    }

    /// Puts one request into the ring.
    #[inline]
    fn request(&mut self, queue: usize, index: usize, from: u32, len: u32) -> Result<(), Refused> {
        let unit = self.units[index];
        let piece_max = self.settings.piece_max;
        let mut sector = self.sector(unit.block);
        // The part is a multiple of the disk's block.
        sector.0 += ByteLen(from.into()).sectors().0;
        let address = |at: u32| GuestAddress(unit.address.0 + u64::from(from) + u64::from(at));
        let user = index as u32;
        let queue = &mut self.set.queues()[queue];
        if len <= piece_max {
            let data = Piece { address: address(0), len };
            return if unit.write { queue.write(user, sector, data) } else { queue.read(user, sector, data) };
        }
        let pieces =
            (0..len).step_by(piece_max as usize).map(|at| Piece { address: address(at), len: piece_max.min(len - at) });
        if unit.write { queue.write_pieces(user, sector, pieces) } else { queue.read_pieces(user, sector, pieces) }
    }

    /// A request was answered. Returns how its I/O ended, with the answer to its last part.
    #[inline]
    pub(super) fn answered(&mut self, completion: Completion) -> Option<Status> {
        let unit = &mut self.units[completion.user as usize];
        unit.waiting -= 1;
        if unit.status == Status::Ok {
            unit.status = completion.status;
        }
        (unit.waiting == 0).then_some(unit.status)
    }

    /// Submits what waits for room on a queue, as far as there is some.
    #[inline]
    pub(super) fn catch_up(&mut self, queue: usize) -> Result<(), WorkerError> {
        if self.backlog[queue].is_empty() {
            return Ok(());
        }
        self.submit_backlog(queue)
    }

    #[cold]
    fn submit_backlog(&mut self, queue: usize) -> Result<(), WorkerError> {
        // Each round submits one I/O wholly, or puts it back and ends.
        while let Some((index, from)) = self.backlog[queue].pop_front() {
            let before = self.backlog[queue].len();
            self.submit(queue, index as usize, from)?;
            if self.backlog[queue].len() > before {
                break;
            }
        }
        Ok(())
    }
}
