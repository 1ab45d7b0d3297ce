//! Finding logical units: every target is asked for its list of them, and each of those what it is.
//!
//! Many commands are in flight at a time, so 256 targets that are not there cost a few round trips and not 256.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::ByteLen;
use mqblk_memory::{GuestAddress, GuestMemory};

use super::answer::{Ending, Sense};
use super::cdb::Cdb;
use super::command::{Command, Data};
use super::inquiry::{self, Unit};
use super::set::QueueSet;
use super::wire::{Address, Config, Response};
use crate::{DriverError, Piece, Refused};

/// Commands in flight at a time.
const AT_ONCE: usize = 32;
/// Bytes of a command's data.
const BUFFER: u32 = 4096;
/// Bytes of the longest list of logical units: one for each number.
const LONGEST_LIST: u32 = (8 + 8 * (Address::MAX_LUN as u32 + 1)).next_multiple_of(4096);
/// Memory of a scan.
pub(crate) const MEMORY: ByteLen = ByteLen(AT_ONCE as u64 * BUFFER as u64 + LONGEST_LIST as u64);
/// Times that a command is given to a unit that says it should come again: each unit attention costs one, and more than one
/// may be waiting.
const TRIES: u8 = 16;
/// Pages of vital product data that are read where the unit has them.
const PAGES: [u8; 3] = [0x80, 0x83, 0xb0];

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// REPORT LUNS of a target.
    Luns,
    /// The same where the list was longer than the buffer.
    LongLuns,
    Standard,
    Pages,
    Page(u8),
    Capacity,
    Mode,
}

impl Question {
    fn cdb(self) -> Cdb {
        match self {
            Question::Luns => Cdb::report_luns(BUFFER),
            Question::LongLuns => Cdb::report_luns(LONGEST_LIST),
            Question::Standard => Cdb::inquiry(self.len() as u16),
            Question::Pages => Cdb::vital_product_data(0, self.len() as u16),
            Question::Page(page) => Cdb::vital_product_data(page, self.len() as u16),
            Question::Capacity => Cdb::read_capacity(self.len()),
            Question::Mode => Cdb::mode_sense(0x08, self.len() as u8),
        }
    }

    /// Bytes that it asks for.
    fn len(self) -> u32 {
        match self {
            Question::LongLuns => LONGEST_LIST,
            Question::Standard => 96,
            Question::Capacity => 32,
            Question::Mode => 252,
            Question::Luns | Question::Pages | Question::Page(_) => BUFFER,
        }
    }
}

/// A question to a unit, and what is known of it.
#[derive(Debug)]
struct Task {
    question: Question,
    unit: Unit,
    /// Pages still to read.
    pages: VecDeque<u8>,
    tries: u8,
}

impl Task {
    fn new(at: Address, question: Question) -> Task {
        Task { question, unit: Unit::new(at), pages: VecDeque::new(), tries: TRIES }
    }
}

/// What comes of an answer.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// So many bytes of data.
    Data(usize),
    Again,
    /// There is nothing at the address.
    Absent,
    Failed,
}

fn judge(ending: Ending, len: u32) -> Outcome {
    match ending {
        Ending::Good => Outcome::Data(len as usize),
        Ending::Short { residual } => Outcome::Data((len - residual) as usize),
        Ending::Check(Sense { key: Sense::UNIT_ATTENTION | Sense::ABORTED_COMMAND, .. }) => Outcome::Again,
        // Busy, task set full.
        Ending::Status(0x08 | 0x28) => Outcome::Again,
        Ending::Response(Response::Busy | Response::Reset | Response::Aborted) => Outcome::Again,
        // Logical unit not supported.
        Ending::Check(Sense { asc: 0x25, .. }) => Outcome::Absent,
        Ending::Response(Response::BadTarget) => Outcome::Absent,
        _ => Outcome::Failed,
    }
}

struct Scan<'a> {
    config: &'a Config,
    memory: Arc<GuestMemory>,
    base: GuestAddress,
    waiting: VecDeque<Task>,
    found: Vec<Unit>,
}

/// Finds all direct-access logical units of all targets, in the order of their addresses. Nothing is steered: all goes over
/// the set's first queue.
pub(super) fn scan(
    set: &mut QueueSet,
    config: &Config,
    base: GuestAddress,
    limit: Duration,
) -> Result<Vec<Unit>, DriverError> {
    let memory = Arc::clone(set.queues()[0].memory());
    let target = |target: u16| Task::new(Address { target: target as u8, lun: 0 }, Question::Luns);
    let waiting = (0..=config.max_target).map(target).collect();
    let mut scan = Scan { config, memory, base, waiting, found: vec![] };
    let mut asked: [Option<Task>; AT_ONCE] = std::array::from_fn(|_| None);
    let mut heard = Instant::now();
    loop {
        for slot in 0..AT_ONCE {
            if asked[slot].is_some() {
                continue;
            }
            // There is memory for one long list.
            let long = asked.iter().flatten().any(|task| task.question == Question::LongLuns);
            let Some(task) = scan.next(long) else { break };
            let command = scan.command(slot, &task);
            match set.queues()[0].submit(slot as u32, 0, &command) {
                Ok(()) => asked[slot] = Some(task),
                Err(Refused::Full) if set.queues()[0].in_flight() != 0 => {
                    scan.waiting.push_front(task);
                    break;
                }
                Err(refused) => unreachable!("an empty ring has room for a command: {refused}"),
            }
        }
        let queue = &mut set.queues()[0];
        queue.publish().map_err(DriverError::event)?;
        if queue.in_flight() == 0 {
            break;
        }
        queue.ring.poll_used()?;
        let mut any = false;
        while let Some((_, done)) = queue.reap()? {
            any = true;
            let slot = done.user as usize;
            let task = asked[slot].take().expect("the driver gives back what it was given");
            scan.answered(slot, task, done.ending);
        }
        if any {
            heard = Instant::now();
        } else {
            let left = limit.saturating_sub(heard.elapsed());
            if left.is_zero() {
                return Err(DriverError::NoAnswer("scan for logical units"));
            }
            set.wait_for(1, Some(left.max(Duration::from_millis(1))))?;
        }
    }
    scan.found.sort_by_key(|unit| unit.at);
    Ok(scan.found)
}

impl Scan<'_> {
    fn buffer(&self, slot: usize, question: Question) -> GuestAddress {
        let slot = if question == Question::LongLuns { AT_ONCE } else { slot };
        GuestAddress(self.base.0 + slot as u64 * u64::from(BUFFER))
    }

    /// The next task; `long`: another one than a long list.
    fn next(&mut self, long: bool) -> Option<Task> {
        let at = self.waiting.iter().position(|task| !long || task.question != Question::LongLuns)?;
        self.waiting.remove(at)
    }

    fn command(&self, slot: usize, task: &Task) -> Command {
        let piece = Piece { address: self.buffer(slot, task.question), len: task.question.len() };
        Command { to: task.unit.at, cdb: task.question.cdb(), data: Data::In(piece) }
    }

    fn answered(&mut self, slot: usize, mut task: Task, ending: Ending) {
        match judge(ending, task.question.len()) {
            Outcome::Data(len) => {
                let mut data = vec![0; len];
                let at = self.buffer(slot, task.question);
                self.memory.read(at, &mut data).expect("buffers lie in shared memory");
                self.learned(task, &data);
            }
            Outcome::Again if task.tries > 1 => {
                task.tries -= 1;
                self.waiting.push_back(task);
            }
            Outcome::Absent => {}
            Outcome::Again | Outcome::Failed => self.failed(task, ending),
        }
    }

    fn ask(&mut self, mut task: Task, question: Question) {
        (task.question, task.tries) = (question, TRIES);
        // What was begun is ended first, so that few tasks are half done.
        self.waiting.push_front(task);
    }

    fn learned(&mut self, mut task: Task, data: &[u8]) {
        match task.question {
            Question::Luns | Question::LongLuns => {
                let (luns, len) = inquiry::luns(data);
                if len > data.len() && task.question == Question::Luns {
                    return self.ask(task, Question::LongLuns);
                }
                let target = task.unit.at.target;
                let most = self.config.max_lun;
                let within = luns.into_iter().filter(|lun| u32::from(*lun) <= most);
                let units = within.map(|lun| Task::new(Address { target, lun }, Question::Standard));
                self.waiting.extend(units);
            }
            Question::Standard => {
                if task.unit.standard(data) {
                    self.ask(task, Question::Pages);
                }
            }
            Question::Pages => {
                let pages = inquiry::pages(data);
                task.pages = PAGES.into_iter().filter(|page| pages.contains(page)).collect();
                self.next_page(task);
            }
            Question::Page(_) => {
                task.unit.page(data);
                self.next_page(task);
            }
            Question::Capacity => match task.unit.capacity_data(data) {
                true => self.ask(task, Question::Mode),
                false => tracing::warn!(at = %task.unit.at, "capacity data that makes no sense, expected a size"),
            },
            Question::Mode => {
                task.unit.mode(data);
                self.found.push(task.unit);
            }
        }
    }

    fn next_page(&mut self, mut task: Task) {
        match task.pages.pop_front() {
            Some(page) => self.ask(task, Question::Page(page)),
            None => self.ask(task, Question::Capacity),
        }
    }

    /// A question that the unit does not answer.
    fn failed(&mut self, task: Task, ending: Ending) {
        tracing::debug!(at = %task.unit.at, question = ?task.question, ?ending, "scan");
        match task.question {
            // A target without lists has its unit 0.
            Question::Luns | Question::LongLuns => self.ask(task, Question::Standard),
            Question::Standard => {}
            Question::Pages => self.ask(task, Question::Capacity),
            Question::Page(_) => self.next_page(task),
            Question::Capacity => tracing::warn!(at = %task.unit.at, ?ending, "no capacity: it is left out"),
            // A unit need not have a caching page.
            Question::Mode => self.found.push(task.unit),
        }
    }
}
