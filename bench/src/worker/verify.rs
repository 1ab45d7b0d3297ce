//! Blocks that are checked: composed before a write, booked after it, read back at the end.

use std::sync::atomic::Ordering;

use mqblk_memory::GuestAddress;

use super::{Unit, Worker, WorkerError};
use crate::control::{Control, Phase};
use crate::interface::{Done, Set, Status};
use crate::ledger;

impl<Q: Set> Worker<Q> {
    /// The blocks of a unit's I/O, and where each lies in its buffer.
    fn blocks(&self, unit: &Unit<Q::Status>) -> impl Iterator<Item = (u64, usize)> + use<Q> {
        let (first, bs) = (unit.block, self.settings.bs as usize);
        (0..unit.len as usize / bs).map(move |index| (first + index as u64, index * bs))
    }

    /// Books a request's end in the ledger, and checks what was read.
    pub(super) fn settle(&mut self, unit: Unit<Q::Status>, failed: bool) {
        for (block, at) in self.blocks(&unit) {
            let Some(ledger) = self.jobs[usize::from(unit.job)].ledger.as_mut() else { return };
            if unit.write && !failed {
                ledger.written(block, unit.generation);
                continue;
            }
            let expected = ledger.expected(block);
            ledger.release(block, !unit.write);
            if let (false, Some(generation)) = (failed, expected) {
                self.check(&unit, block, at, generation);
            }
        }
    }

    /// Checks `block`, which was read to byte `at` of the unit's buffer.
    fn check(&mut self, unit: &Unit<Q::Status>, block: u64, at: usize, generation: u32) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let bytes = &mut scratch[..self.settings.bs as usize];
        let read = self.memory.read(GuestAddress(unit.address.0 + at as u64), bytes);
        let offset = self.offset(block);
        if read.is_none() {
            self.complain(unit, block, format_args!("the buffer cannot be read"));
        } else if let Err(difference) = ledger::check(bytes, offset, generation) {
            self.complain(unit, block, format_args!("{difference}"));
        }
        self.scratch = scratch;
    }

    /// Fills a unit's buffer with blocks that can be checked.
    pub(super) fn compose(&mut self, unit: Unit<Q::Status>) {
        let mut bytes = std::mem::take(&mut self.scratch);
        for (block, at) in self.blocks(&unit) {
            let content = &mut bytes[at..at + self.settings.bs as usize];
            ledger::fill(content, self.offset(block), unit.generation);
        }
        self.memory.write(unit.address, &bytes[..unit.len as usize]).expect("a buffer lies in shared memory");
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
        loop {
            if control.get() == Phase::Abandon {
                return Err(WorkerError::Abandoned);
            }
            let mut worked = false;
            let mut in_flight = 0;
            if Q::HANDS_OVER && self.set.collect()? != 0 {
                while let Some(done) = self.set.arrived() {
                    worked = true;
                    self.looked_up(done, &mut places)?;
                }
            }
            for index in 0..self.set.queues() {
                in_flight += u32::from(self.set.look(index)?.1);
                while let Some(done) = self.set.reap(index)? {
                    worked = true;
                    self.looked_up(done, &mut places)?;
                    self.catch_up::<true>(index)?;
                }
            }
            self.publish_all()?;
            self.progress.0.store(self.done, Ordering::Relaxed);
            if worked {
                continue;
            }
            if in_flight + self.set.away() == 0 && self.set.depart() {
                return Ok(());
            }
            self.idle(&mut idle)?;
        }
    }

    /// A block was read back.
    fn looked_up(&mut self, done: Done<Q::Status>, places: &mut Vec<(usize, u64)>) -> Result<(), WorkerError> {
        let at = done.user as usize;
        let Some(status) = self.answered(done) else { return Ok(()) };
        self.done += 1;
        let unit = self.units[at];
        match status == Q::Status::GOOD {
            true => self.check(&unit, unit.block, 0, unit.generation),
            false => self.complain(&unit, unit.block, format_args!("{status:?} while verifying")),
        }
        self.look_up(at, places)
    }

    /// Submits a read of the next block that was written.
    fn look_up(&mut self, index: usize, places: &mut Vec<(usize, u64)>) -> Result<(), WorkerError> {
        while let Some((place, from)) = places.last_mut() {
            let job = &self.jobs[*place];
            let blocks = job.pattern.blocks();
            let end = blocks.first + blocks.count;
            let ledger = job.ledger.as_ref();
            let Some((block, generation)) =
                ledger.filter(|_| *from < end).and_then(|ledger| ledger.next_written(*from))
            else {
                places.pop();
                continue;
            };
            *from = block + 1;
            let unit = &mut self.units[index];
            (unit.block, unit.generation, unit.write) = (block, generation, false);
            (unit.disk, unit.len) = (job.disk, self.settings.bs);
            return self.send::<true>(index);
        }
        Ok(())
    }
}
