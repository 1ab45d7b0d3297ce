//! Counts of completed I/Os, and the time that they belong to.

use std::time::Duration;

use mqblk_core::{ByteOffset, Sector512};

use super::slot::IoSlot;
use super::{Worker, WorkerError};
use crate::control::{Phase, PhaseControl};
use crate::cpu;
use crate::device::{IoOp, ThreadQueues, TransferStatus};

/// Messages that are kept; further errors are only counted.
const MAX_MESSAGES: usize = 5;

impl<Q: ThreadQueues> Worker<Q> {
    /// Moves the time series on to `now`. Returns false if there is none.
    #[inline]
    pub(super) fn seek_series(&mut self, now: u64) -> bool {
        match &mut self.series {
            // Before the measurement it has no intervals.
            Some(series) if self.measurement_start.is_some() => {
                series.seek(now);
                true
            }
            _ => false,
        }
    }

    /// Counts a completed I/O; a failed one only as an error. `SERIES`: there may be a time series.
    #[inline]
    pub(super) fn io_completed<const VERIFY: bool, const MIXED: bool, const SERIES: bool>(
        &mut self,
        index: usize,
        now: u64,
    ) {
        // Field by field: a copy of the whole would wait for the store of the status.
        let IoSlot { op: kind, start_ns, len, disk, .. } = self.slots[index];
        self.done += match MIXED {
            true if kind == IoOp::Flush => 0,
            true => u64::from(len / self.settings.bs),
            false => 1,
        };
        let mut failed = self.slots[index].status != Q::Status::GOOD;
        if failed {
            self.record_failure(index);
        }
        if VERIFY && kind != IoOp::Flush {
            let before = self.stats.errors;
            self.record_completion(self.slots[index], failed);
            failed |= self.stats.errors != before;
        }
        if !failed && self.measurement_start.is_some() {
            let op = &mut self.stats.ops[kind as usize];
            let latency_ns = now.saturating_sub(start_ns);
            op.ios += 1;
            op.latency.saturating_record(latency_ns);
            if let (true, Some(series)) = (SERIES, &mut self.series) {
                series.record(kind, latency_ns);
            }
            if MIXED && kind != IoOp::Flush {
                op.bytes += u64::from(len);
                self.stats.bytes[usize::from(disk)] += u64::from(len);
            }
        }
    }

    #[cold]
    fn record_failure(&mut self, index: usize) {
        let slot = self.slots[index];
        let verifying = self.jobs[usize::from(slot.job)].read_back.is_some();
        let place = if verifying { " while verifying" } else { "" };
        self.record_error(&slot, slot.block, format_args!("{:?}{place}", slot.status));
    }

    /// Returns the byte offset of a block.
    pub(super) fn offset(&self, block: u64) -> ByteOffset {
        // The run has checked that the whole range lies on the disk.
        self.sector(block).to_offset().unwrap_or_default()
    }

    /// Returns the sector of a block.
    #[inline]
    pub(super) fn sector(&self, block: u64) -> Sector512 {
        Sector512(self.settings.base.0 + block * self.settings.bs_sectors.0)
    }

    /// Counts a failure, and keeps the first messages.
    #[cold]
    pub(super) fn record_error(&mut self, slot: &IoSlot<Q::Status>, block: u64, what: std::fmt::Arguments<'_>) {
        self.stats.errors += 1;
        if self.stats.messages.len() < MAX_MESSAGES {
            let offset = self.offset(block).0;
            let disk = if self.settings.disks > 1 { format!("disk {}: ", slot.disk) } else { String::new() };
            let place = if slot.op == IoOp::Flush { "flush".into() } else { format!("block at offset {offset}") };
            self.stats.messages.push(format!("{disk}{place}: {what}"));
        }
    }

    /// Starts the measurement: resets all counters.
    pub(super) fn begin_measurement(&mut self, control: &PhaseControl) -> Result<(), WorkerError> {
        self.stats.reset();
        (self.stats.kicks, self.stats.calls) = (self.set.kicks(), self.set.calls()?);
        self.stats.handed_over = self.set.handed_over();
        let now = self.now_ns();
        if let Some(pacer) = &mut self.pacer {
            pacer.restart(now);
        }
        if let (Some(series), Some(start)) = (&mut self.series, control.entered(Phase::Measure)) {
            series.begin(self.origin, start);
        }
        self.measurement_start = Some((now, cpu::thread_time()));
        Ok(())
    }

    /// Ends the measurement. Later completions are not counted.
    pub(super) fn end_measurement(&mut self) -> Result<(), WorkerError> {
        let Some((start_ns, start_cpu)) = self.measurement_start.take() else { return Ok(()) };
        let now = self.now_ns();
        self.stats.elapsed = Duration::from_nanos(now - start_ns);
        self.stats.series = self.series.take().map(|series| series.end(now));
        self.stats.pace = self.pacer.as_ref().map(|pacer| pacer.stats(now)).unwrap_or_default();
        self.stats.cpu = cpu::thread_time().saturating_sub(start_cpu);
        self.stats.kicks = self.set.kicks() - self.stats.kicks;
        self.stats.calls = self.set.calls()? - self.stats.calls;
        self.stats.handed_over = self.set.handed_over() - self.stats.handed_over;
        Ok(())
    }
}
