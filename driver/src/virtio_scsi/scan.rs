//! Finding logical units: every target is asked for its list of them, and each of those what it is.
//!
//! Many commands are in flight at a time, so 256 targets that are not there cost a few round trips and not 256.

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

/// Commands in flight at a time.
const MAX_IN_FLIGHT: usize = 32;
/// Bytes of a command's data.
const BUFFER_BYTES: u32 = 4096;
/// Bytes of the longest list of logical units: one for each number.
const LONG_LIST_BYTES: u32 = (8 + 8 * (LunAddress::MAX_LUN as u32 + 1)).next_multiple_of(4096);
/// Memory of a scan.
pub(crate) const SCAN_MEMORY: ByteLen = ByteLen(MAX_IN_FLIGHT as u64 * BUFFER_BYTES as u64 + LONG_LIST_BYTES as u64);
/// Times that a command is given to a unit that says it should come again: each unit attention costs one, and more than one
/// may be waiting.
const MAX_TRIES: u8 = 16;
/// Pages of vital product data that are read where the unit has them.
const VPD_PAGES: [u8; 3] = [0x80, 0x83, 0xb0];

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Query {
    /// REPORT LUNS of a target.
    Luns,
    /// The same where the list was longer than the buffer.
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

    /// Bytes that it asks for.
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

/// A question to a unit, and what is known of it.
#[derive(Debug)]
struct Probe {
    query: Query,
    unit: LogicalUnit,
    /// Pages still to read.
    pages: VecDeque<u8>,
    tries: u8,
}

impl Probe {
    fn new(at: LunAddress, query: Query) -> Probe {
        Probe { query, unit: LogicalUnit::new(at), pages: VecDeque::new(), tries: MAX_TRIES }
    }
}

/// What comes of an answer.
#[derive(Debug, PartialEq, Eq)]
enum QueryResult {
    /// So many bytes of data.
    Data(usize),
    Retry,
    /// There is nothing at the address.
    Absent,
    Failed,
}

fn classify(ending: CommandOutcome, len: u32) -> QueryResult {
    match ending {
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

/// Finds all direct-access logical units of all targets, in the order of their addresses. Nothing is steered: all goes over
/// the set's first queue.
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
    let mut asked: [Option<Probe>; MAX_IN_FLIGHT] = std::array::from_fn(|_| None);
    let mut heard = Instant::now();
    loop {
        for slot in 0..MAX_IN_FLIGHT {
            if asked[slot].is_some() {
                continue;
            }
            // There is memory for one long list.
            let long = asked.iter().flatten().any(|task| task.query == Query::LongLuns);
            let Some(task) = scan.next_probe(long) else { break };
            let command = scan.command(slot, &task);
            match set.queues_mut()[0].submit(slot as u32, 0, &command) {
                Ok(()) => asked[slot] = Some(task),
                Err(SubmitError::Full) if set.queues_mut()[0].in_flight() != 0 => {
                    scan.waiting.push_front(task);
                    break;
                }
                Err(refused) => unreachable!("an empty ring has room for a command: {refused}"),
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
            let task = asked[slot].take().expect("the driver gives back what it was given");
            scan.handle_completion(slot, task, done.outcome);
        }
        if any {
            heard = Instant::now();
        } else {
            let left = limit.saturating_sub(heard.elapsed());
            if left.is_zero() {
                return Err(DriverError::Timeout("scan for logical units"));
            }
            set.wait_timeout(1, Some(left.max(Duration::from_millis(1))))?;
        }
    }
    scan.units.sort_by_key(|unit| unit.address);
    Ok(scan.units)
}

impl Scan<'_> {
    fn buffer(&self, slot: usize, question: Query) -> GuestAddress {
        let slot = if question == Query::LongLuns { MAX_IN_FLIGHT } else { slot };
        GuestAddress(self.base.0 + slot as u64 * u64::from(BUFFER_BYTES))
    }

    /// The next task; `long`: another one than a long list.
    fn next_probe(&mut self, long: bool) -> Option<Probe> {
        let at = self.waiting.iter().position(|task| !long || task.query != Query::LongLuns)?;
        self.waiting.remove(at)
    }

    fn command(&self, slot: usize, task: &Probe) -> Command {
        let piece = DataSegment { address: self.buffer(slot, task.query), len: task.query.len() };
        Command { address: task.unit.address, cdb: task.query.cdb(), data: CommandData::In(piece) }
    }

    fn handle_completion(&mut self, slot: usize, mut task: Probe, ending: CommandOutcome) {
        match classify(ending, task.query.len()) {
            QueryResult::Data(len) => {
                let mut data = vec![0; len];
                let at = self.buffer(slot, task.query);
                self.memory.read(at, &mut data).expect("buffers lie in shared memory");
                self.handle_data(task, &data);
            }
            QueryResult::Retry if task.tries > 1 => {
                task.tries -= 1;
                self.waiting.push_back(task);
            }
            QueryResult::Absent => {}
            QueryResult::Retry | QueryResult::Failed => self.handle_failure(task, ending),
        }
    }

    fn requeue(&mut self, mut task: Probe, question: Query) {
        (task.query, task.tries) = (question, MAX_TRIES);
        // What was begun is ended first, so that few tasks are half done.
        self.waiting.push_front(task);
    }

    fn handle_data(&mut self, mut task: Probe, data: &[u8]) {
        match task.query {
            Query::Luns | Query::LongLuns => {
                let (luns, len) = inquiry::parse_luns(data);
                if len > data.len() && task.query == Query::Luns {
                    return self.requeue(task, Query::LongLuns);
                }
                let target = task.unit.address.target;
                let most = self.config.max_lun;
                let within = luns.into_iter().filter(|lun| u32::from(*lun) <= most);
                let units = within.map(|lun| Probe::new(LunAddress { target, lun }, Query::StandardInquiry));
                self.waiting.extend(units);
            }
            Query::StandardInquiry => {
                if task.unit.set_inquiry(data) {
                    self.requeue(task, Query::SupportedPages);
                }
            }
            Query::SupportedPages => {
                let pages = inquiry::supported_pages(data);
                task.pages = VPD_PAGES.into_iter().filter(|page| pages.contains(page)).collect();
                self.next_page(task);
            }
            Query::VpdPage(_) => {
                task.unit.set_vpd_page(data);
                self.next_page(task);
            }
            Query::Capacity => match task.unit.set_capacity(data) {
                true => self.requeue(task, Query::Mode),
                false => tracing::warn!(at = %task.unit.address, "capacity data that makes no sense, expected a size"),
            },
            Query::Mode => {
                task.unit.set_mode(data);
                self.units.push(task.unit);
            }
        }
    }

    fn next_page(&mut self, mut task: Probe) {
        match task.pages.pop_front() {
            Some(page) => self.requeue(task, Query::VpdPage(page)),
            None => self.requeue(task, Query::Capacity),
        }
    }

    /// A question that the unit does not answer.
    fn handle_failure(&mut self, task: Probe, ending: CommandOutcome) {
        tracing::debug!(at = %task.unit.address, question = ?task.query, ?ending, "scan");
        match task.query {
            // A target without lists has its unit 0.
            Query::Luns | Query::LongLuns => self.requeue(task, Query::StandardInquiry),
            Query::StandardInquiry => {}
            Query::SupportedPages => self.requeue(task, Query::Capacity),
            Query::VpdPage(_) => self.next_page(task),
            Query::Capacity => tracing::warn!(at = %task.unit.address, ?ending, "no capacity: it is left out"),
            // A unit need not have a caching page.
            Query::Mode => self.units.push(task.unit),
        }
    }
}
