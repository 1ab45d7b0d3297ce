//! Blocks that are checked: composed before a write, booked after it, read back at the end.

use std::sync::atomic::Ordering;

use mqblk_driver::virtio_blk::Status;

use super::{Unit, Worker, WorkerError};
use crate::control::{Control, Phase};
use crate::ledger;

impl Worker {
    /// Books a request's end in the ledger, and checks what was read.
    pub(super) fn settle(&mut self, unit: Unit, failed: bool) {
        let Some(ledger) = self.jobs[usize::from(unit.job)].ledger.as_mut() else { return };
        if unit.write && !failed {
            ledger.written(unit.block, unit.generation);
            return;
        }
        let expected = ledger.expected(unit.block);
        ledger.release(unit.block, !unit.write);
        if let (false, Some(generation)) = (failed, expected) {
            self.check(unit, generation);
        }
    }

    fn check(&mut self, unit: Unit, generation: u32) {
        let mut bytes = std::mem::take(&mut self.scratch);
        let read = self.memory.read(unit.address, &mut bytes);
        let offset = self.offset(unit.block);
        if read.is_none() {
            self.complain(unit.block, format_args!("the buffer cannot be read"));
        } else if let Err(difference) = ledger::check(&mut bytes, offset, generation) {
            self.complain(unit.block, format_args!("{difference}"));
        }
        self.scratch = bytes;
    }

    /// Fills a unit's buffer with a block that can be checked.
    pub(super) fn compose(&mut self, unit: Unit) {
        let mut bytes = std::mem::take(&mut self.scratch);
        ledger::fill(&mut bytes, self.offset(unit.block), unit.generation);
        self.memory.write(unit.address, &bytes).expect("a buffer lies in shared memory");
        self.scratch = bytes;
    }

    /// Reads all that the jobs in `jobs` have written, and checks it.
    ///
    /// # Errors
    /// [`WorkerError`]: the queues are of no more use.
    pub fn verify(&mut self, control: &Control) -> Result<(), WorkerError> {
        let mut places: Vec<(usize, u64)> =
            self.jobs.iter().enumerate().filter_map(|(at, job)| Some((at, job.ledger.as_ref()?.first()))).collect();
        let mut idle = 0;
        for unit in 0..self.units.len() {
            self.look_up(unit, &mut places)?;
        }
        self.publish_all()?;
        while self.set.queues().iter().any(|queue| queue.in_flight() != 0) {
            if control.get() == Phase::Abandon {
                return Err(WorkerError::Abandoned);
            }
            let mut worked = false;
            for index in 0..self.set.queues().len() {
                self.set.queues()[index].look()?;
                while let Some(completion) = self.set.queues()[index].reap()? {
                    worked = true;
                    let at = completion.user as usize;
                    if let Some(status) = self.answered(completion) {
                        self.done += 1;
                        let unit = self.units[at];
                        match status {
                            Status::Ok => self.check(unit, unit.generation),
                            status => self.complain(unit.block, format_args!("{status:?} while verifying")),
                        }
                        self.look_up(at, &mut places)?;
                    }
                    self.catch_up(index)?;
                }
            }
            self.publish_all()?;
            self.progress.0.store(self.done, Ordering::Relaxed);
            if !worked {
                self.idle(&mut idle)?;
            }
        }
        Ok(())
    }

    /// Submits a read of the next block that was written.
    fn look_up(&mut self, index: usize, places: &mut Vec<(usize, u64)>) -> Result<(), WorkerError> {
        while let Some((job, from)) = places.last_mut() {
            let pattern = self.jobs[*job].pattern.blocks();
            let end = pattern.first + pattern.count;
            let ledger = self.jobs[*job].ledger.as_ref();
            let Some((block, generation)) =
                ledger.filter(|_| *from < end).and_then(|ledger| ledger.next_written(*from))
            else {
                places.pop();
                continue;
            };
            *from = block + 1;
            let unit = &mut self.units[index];
            (unit.block, unit.generation, unit.write) = (block, generation, false);
            return self.send(index);
        }
        Ok(())
    }
}
