//! Finds logical units: queries every target for its list of LUNs, and every logical unit for its properties.
//!
//! Many commands are in flight at a time, so 256 absent targets cost a few round trips and not 256.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::ByteLen;
use mqblk_memory::{GuestAddress, GuestMemory};

use super::cdb::Cdb;
use super::command::{Command, CommandData};
use super::inquiry::{self, LogicalUnit};
use super::outcome::{CommandOutcome, Sense};
use super::set::ScsiQueueSet;
use super::wire::{CommandResponse, LunAddress, ScsiConfig};
use crate::{DataSegment, DriverError, SubmitError};

/// Largest number of commands in flight.
const MAX_IN_FLIGHT: usize = 32;
/// Size of a command's data buffer.
const BUFFER_BYTES: u32 = 4096;
/// Size of the longest list of LUNs.
const LONG_LIST_BYTES: u32 = (8 + 8 * (LunAddress::MAX_LUN as u32 + 1)).next_multiple_of(4096);
/// Size of a scan's memory.
pub(crate) const SCAN_MEMORY: ByteLen = ByteLen(MAX_IN_FLIGHT as u64 * BUFFER_BYTES as u64 + LONG_LIST_BYTES as u64);
/// Tries of a command that the logical unit asks to retry. Each pending unit attention costs one.
const MAX_TRIES: u8 = 16;
/// Pages of vital product data that are read if the logical unit has them.
const VPD_PAGES: [u8; 3] = [0x80, 0x83, 0xb0];

/// A query to a target or logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Query {
    /// REPORT LUNS of a target.
    Luns,
    /// REPORT LUNS again, if the list was longer than the buffer.
    LongLuns,
    StandardInquiry,
    SupportedPages,
    VpdPage(u8),
    Capacity,
    Mode,
}

impl Query {
    fn cdb(self) -> Cdb {
        match self {
            Query::Luns => Cdb::report_luns(BUFFER_BYTES),
            Query::LongLuns => Cdb::report_luns(LONG_LIST_BYTES),
            Query::StandardInquiry => Cdb::inquiry(self.len() as u16),
            Query::SupportedPages => Cdb::vital_product_data(0, self.len() as u16),
            Query::VpdPage(page) => Cdb::vital_product_data(page, self.len() as u16),
            Query::Capacity => Cdb::read_capacity(self.len()),
            Query::Mode => Cdb::mode_sense(0x08, self.len() as u8),
        }
    }

    /// Returns the allocation length.
    fn len(self) -> u32 {
        match self {
            Query::LongLuns => LONG_LIST_BYTES,
            Query::StandardInquiry => 96,
            Query::Capacity => 32,
            Query::Mode => 252,
            Query::Luns | Query::SupportedPages | Query::VpdPage(_) => BUFFER_BYTES,
        }
    }
}

/// A query in progress, and the known properties of the logical unit.
#[derive(Debug)]
struct Probe {
    query: Query,
    unit: LogicalUnit,
    /// Pages still to read.
    pages: VecDeque<u8>,
    tries: u8,
}

impl Probe {
    fn new(address: LunAddress, query: Query) -> Probe {
        Probe { query, unit: LogicalUnit::new(address), pages: VecDeque::new(), tries: MAX_TRIES }
    }
}

/// Result of a query.
#[derive(Debug, PartialEq, Eq)]
enum QueryResult {
    /// This many bytes of data.
    Data(usize),
    Retry,
    /// There is no logical unit at the address.
    Absent,
    Failed,
}

fn classify(outcome: CommandOutcome, len: u32) -> QueryResult {
    match outcome {
        CommandOutcome::Good => QueryResult::Data(len as usize),
        CommandOutcome::Underrun { residual } => QueryResult::Data((len - residual) as usize),
        CommandOutcome::CheckCondition(Sense { key: Sense::UNIT_ATTENTION | Sense::ABORTED_COMMAND, .. }) => {
            QueryResult::Retry
        }
        // Busy, task set full.
        CommandOutcome::Status(0x08 | 0x28) => QueryResult::Retry,
        CommandOutcome::Response(CommandResponse::Busy | CommandResponse::Reset | CommandResponse::Aborted) => {
            QueryResult::Retry
        }
        // Logical unit not supported.
        CommandOutcome::CheckCondition(Sense { asc: 0x25, .. }) => QueryResult::Absent,
        CommandOutcome::Response(CommandResponse::BadTarget) => QueryResult::Absent,
        _ => QueryResult::Failed,
    }
}

struct Scan<'a> {
    config: &'a ScsiConfig,
    memory: Arc<GuestMemory>,
    base: GuestAddress,
    waiting: VecDeque<Probe>,
    units: Vec<LogicalUnit>,
}

/// Finds all direct-access logical units of all targets, in the order of their addresses. All commands use the set's
/// first queue, without steering.
pub(super) fn scan(
    set: &mut ScsiQueueSet,
    config: &ScsiConfig,
    base: GuestAddress,
    limit: Duration,
) -> Result<Vec<LogicalUnit>, DriverError> {
    let memory = Arc::clone(set.queues_mut()[0].memory());
    let target = |target: u16| Probe::new(LunAddress { target: target as u8, lun: 0 }, Query::Luns);
    let waiting = (0..=config.max_target).map(target).collect();
    let mut scan = Scan { config, memory, base, waiting, units: vec![] };
    let mut in_flight: [Option<Probe>; MAX_IN_FLIGHT] = std::array::from_fn(|_| None);
    let mut last_completion = Instant::now();
    loop {
        for slot in 0..MAX_IN_FLIGHT {
            if in_flight[slot].is_some() {
                continue;
            }
            // There is memory for one long list only.
            let long = in_flight.iter().flatten().any(|probe| probe.query == Query::LongLuns);
            let Some(probe) = scan.next_probe(long) else { break };
            let command = scan.command(slot, &probe);
            match set.queues_mut()[0].submit(slot as u32, 0, &command) {
                Ok(()) => in_flight[slot] = Some(probe),
                Err(SubmitError::Full) if set.queues_mut()[0].in_flight() != 0 => {
                    scan.waiting.push_front(probe);
                    break;
                }
                Err(error) => unreachable!("an empty ring has space for a command: {error}"),
            }
        }
        let queue = &mut set.queues_mut()[0];
        queue.publish().map_err(DriverError::eventfd)?;
        if queue.in_flight() == 0 {
            break;
        }
        queue.ring.poll_used()?;
        let mut any = false;
        while let Some((_, done)) = queue.reap()? {
            any = true;
            let slot = done.user_data as usize;
            let probe = in_flight[slot].take().expect("a command of this scan");
            scan.handle_completion(slot, probe, done.outcome);
        }
        if any {
            last_completion = Instant::now();
        } else {
            let left = limit.saturating_sub(last_completion.elapsed());
            if left.is_zero() {
                return Err(DriverError::Timeout("scan for logical units"));
            }
            set.wait_timeout(1, left.max(Duration::from_millis(1)))?;
        }
    }
    scan.units.sort_by_key(|unit| unit.address);
    Ok(scan.units)
}

impl Scan<'_> {
    fn buffer(&self, slot: usize, query: Query) -> GuestAddress {
        let slot = if query == Query::LongLuns { MAX_IN_FLIGHT } else { slot };
        GuestAddress(self.base.0 + slot as u64 * u64::from(BUFFER_BYTES))
    }

    /// Takes the next probe. `long`: skips long lists.
    fn next_probe(&mut self, long: bool) -> Option<Probe> {
        let index = self.waiting.iter().position(|probe| !long || probe.query != Query::LongLuns)?;
        self.waiting.remove(index)
    }

    fn command(&self, slot: usize, probe: &Probe) -> Command {
        let data = DataSegment { address: self.buffer(slot, probe.query), len: probe.query.len() };
        Command { address: probe.unit.address, cdb: probe.query.cdb(), data: CommandData::In(data) }
    }

    fn handle_completion(&mut self, slot: usize, mut probe: Probe, outcome: CommandOutcome) {
        match classify(outcome, probe.query.len()) {
            QueryResult::Data(len) => {
                let mut data = vec![0; len];
                let at = self.buffer(slot, probe.query);
                self.memory.read(at, &mut data).expect("buffers are in shared memory");
                self.handle_data(probe, &data);
            }
            QueryResult::Retry if probe.tries > 1 => {
                probe.tries -= 1;
                self.waiting.push_back(probe);
            }
            QueryResult::Absent => {}
            QueryResult::Retry | QueryResult::Failed => self.handle_failure(probe, outcome),
        }
    }

    fn requeue(&mut self, mut probe: Probe, query: Query) {
        (probe.query, probe.tries) = (query, MAX_TRIES);
        // Probes that have begun come first, so that few are in progress.
        self.waiting.push_front(probe);
    }

    fn handle_data(&mut self, mut probe: Probe, data: &[u8]) {
        match probe.query {
            Query::Luns | Query::LongLuns => {
                let (luns, len) = inquiry::parse_luns(data);
                if len > data.len() && probe.query == Query::Luns {
                    return self.requeue(probe, Query::LongLuns);
                }
                let target = probe.unit.address.target;
                let max_lun = self.config.max_lun;
                let within = luns.into_iter().filter(|lun| u32::from(*lun) <= max_lun);
                let units = within.map(|lun| Probe::new(LunAddress { target, lun }, Query::StandardInquiry));
                self.waiting.extend(units);
            }
            Query::StandardInquiry => {
                if probe.unit.set_inquiry(data) {
                    self.requeue(probe, Query::SupportedPages);
                }
            }
            Query::SupportedPages => {
                let pages = inquiry::supported_pages(data);
                probe.pages = VPD_PAGES.into_iter().filter(|page| pages.contains(page)).collect();
                self.next_page(probe);
            }
            Query::VpdPage(_) => {
                probe.unit.set_vpd_page(data);
                self.next_page(probe);
            }
            Query::Capacity => match probe.unit.set_capacity(data) {
                true => self.requeue(probe, Query::Mode),
                false => tracing::warn!(at = %probe.unit.address, "invalid capacity data: the logical unit is skipped"),
            },
            Query::Mode => {
                probe.unit.set_mode(data);
                self.units.push(probe.unit);
            }
        }
    }

    fn next_page(&mut self, mut probe: Probe) {
        match probe.pages.pop_front() {
            Some(page) => self.requeue(probe, Query::VpdPage(page)),
            None => self.requeue(probe, Query::Capacity),
        }
    }

    /// Handles a failed query.
    fn handle_failure(&mut self, probe: Probe, outcome: CommandOutcome) {
        tracing::debug!(at = %probe.unit.address, query = ?probe.query, ?outcome, "scan");
        match probe.query {
            // A target without REPORT LUNS has LUN 0.
            Query::Luns | Query::LongLuns => self.requeue(probe, Query::StandardInquiry),
            Query::StandardInquiry => {}
            Query::SupportedPages => self.requeue(probe, Query::Capacity),
            Query::VpdPage(_) => self.next_page(probe),
            Query::Capacity => {
                tracing::warn!(at = %probe.unit.address, ?outcome, "no capacity: the logical unit is skipped")
            }
            // The caching page is optional.
            Query::Mode => self.units.push(probe.unit),
        }
    }
}
