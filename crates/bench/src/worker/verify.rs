//! Verified blocks: filled before a write, recorded after it, read back at the end.

use std::sync::atomic::Ordering;

use mqblk_memory::GuestAddress;

use super::{IoSlot, Worker, WorkerError};
use crate::control::{Phase, PhaseControl};
use crate::device::{CompletedTransfer, IoOp, ThreadQueues, TransferStatus};
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

    /// Reads back and checks everything that `jobs` have written.
    ///
    /// # Errors
    /// [`WorkerError`]: the queues cannot be used any more.
    pub(crate) fn verify(&mut self, control: &PhaseControl) -> Result<(), WorkerError> {
        let mut cursors: Vec<(usize, u64)> =
            self.jobs.iter().enumerate().filter_map(|(at, job)| Some((at, job.generations.as_ref()?.first))).collect();
        let mut idle = 0;
        for slot in 0..self.slots.len() {
            self.read_back_next(slot, &mut cursors)?;
        }
        self.publish_all()?;
        loop {
            if control.get() == Phase::Abandon {
                return Err(WorkerError::Abandoned);
            }
            let mut worked = false;
            let mut in_flight = 0;
            if Q::HANDS_OVER && self.set.receive_handovers()? != 0 {
                while let Some(done) = self.set.next_handed_back() {
                    worked = true;
                    self.read_back_completed(done, &mut cursors)?;
                }
            }
            for index in 0..self.set.queue_count() {
                in_flight += u32::from(self.set.peek(index)?.1);
                while let Some(done) = self.set.reap(index)? {
                    worked = true;
                    self.read_back_completed(done, &mut cursors)?;
                    self.drain_backlog::<true>(index)?;
                }
            }
            self.publish_all()?;
            self.progress.0.store(self.done, Ordering::Relaxed);
            if worked {
                continue;
            }
            if in_flight + self.set.outstanding_elsewhere() == 0 && self.set.try_leave() {
                return Ok(());
            }
            self.wait_or_spin(&mut idle, false)?;
        }
    }

    /// Handles the completion of a read of the verification.
    fn read_back_completed(
        &mut self,
        done: CompletedTransfer<Q::Status>,
        cursors: &mut Vec<(usize, u64)>,
    ) -> Result<(), WorkerError> {
        let at = done.user as usize;
        if !self.part_completed(&done) {
            return Ok(());
        }
        self.done += 1;
        let slot = self.slots[at];
        match slot.status == Q::Status::GOOD {
            true => self.check_slot(&slot, slot.block, 0, slot.generation),
            false => self.record_error(&slot, slot.block, format_args!("{:?} while verifying", slot.status)),
        }
        self.read_back_next(at, cursors)
    }

    /// Submits a read of the next block that was written.
    fn read_back_next(&mut self, index: usize, cursors: &mut Vec<(usize, u64)>) -> Result<(), WorkerError> {
        while let Some((number, from)) = cursors.last_mut() {
            let job = &self.jobs[*number];
            let blocks = job.pattern.blocks;
            let end = blocks.first + blocks.count;
            let generations = job.generations.as_ref();
            let Some((block, generation)) =
                generations.filter(|_| *from < end).and_then(|generations| generations.next_written(*from))
            else {
                cursors.pop();
                continue;
            };
            *from = block + 1;
            let slot = &mut self.slots[index];
            (slot.block, slot.generation, slot.op) = (block, generation, IoOp::Read);
            (slot.disk, slot.len) = (job.disk, self.settings.bs);
            return self.submit_io::<true>(index);
        }
        Ok(())
    }
}
