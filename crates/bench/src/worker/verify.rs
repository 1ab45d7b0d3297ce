//! Verified blocks: filled before a write, recorded after it, read back at the end.

use mqblk_memory::GuestAddress;

use super::{DiskJob, IoSlot, Worker, WorkerSettings};
use crate::device::{IoOp, ThreadQueues};
use crate::verification;

impl<Q: ThreadQueues> Worker<Q> {
    /// Returns the blocks of a slot's I/O, and the offset of each in its buffer.
    fn blocks(&self, slot: &IoSlot<Q::Status>) -> impl Iterator<Item = (u64, usize)> + use<Q> {
        let (first, bs) = (slot.block, self.settings.bs as usize);
        (0..slot.len as usize / bs).map(move |index| (first + index as u64, index * bs))
    }

    /// Records the completion of an I/O, and checks what was read.
    pub(super) fn record_completion(&mut self, slot: IoSlot<Q::Status>, failed: bool) {
        for (block, at) in self.blocks(&slot) {
            let Some(generations) = self.jobs[usize::from(slot.job)].generations.as_mut() else { return };
            if slot.op == IoOp::Write && !failed {
                generations.record_write(block, slot.generation);
                continue;
            }
            let expected = generations.generation_of(block);
            generations.release(block, slot.op == IoOp::Read);
            if let (false, Some(generation)) = (failed, expected) {
                self.check_slot(&slot, block, at, generation);
            }
        }
    }

    /// Checks `block`, which was read to offset `at` of the slot's buffer.
    fn check_slot(&mut self, slot: &IoSlot<Q::Status>, block: u64, at: usize, generation: u32) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let bytes = &mut scratch[..self.settings.bs as usize];
        let read = self.memory.read(GuestAddress(slot.address.0 + at as u64), bytes);
        let offset = self.offset(block);
        if read.is_none() {
            self.record_error(slot, block, format_args!("the buffer cannot be read"));
        } else if let Err(difference) = verification::check_block(bytes, offset, generation) {
            self.record_error(slot, block, format_args!("{difference}"));
        }
        self.scratch = scratch;
    }

    /// Fills a slot's buffer with verifiable blocks.
    pub(super) fn fill_buffer(&mut self, slot: IoSlot<Q::Status>) {
        let mut bytes = std::mem::take(&mut self.scratch);
        for (block, at) in self.blocks(&slot) {
            let content = &mut bytes[at..at + self.settings.bs as usize];
            verification::fill_block(content, self.offset(block), slot.generation);
        }
        self.memory.write(slot.address, &bytes[..slot.len as usize]).expect("a buffer lies in shared memory");
        self.scratch = bytes;
    }

    /// Makes the thread that reads back and checks all blocks that `jobs` have written: a load of its own.
    pub(crate) fn reading_back(self, jobs: Vec<DiskJob>) -> Worker<Q> {
        let jobs = jobs.into_iter().map(|job| DiskJob { read_back: Some(job.pattern.blocks.first), ..job });
        let settings = WorkerSettings { rate: None, fsync: 0, series: None, ..self.settings };
        let Worker { set, stats, done, progress, .. } = self;
        Worker { stats, done, ..Worker::new(set, jobs.collect(), settings, progress) }
    }
}
