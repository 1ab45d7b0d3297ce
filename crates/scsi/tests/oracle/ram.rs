//! Runs commands on a disk in memory as a transport would: executes steps, passes outcomes back, and tracks blocks
//! that are not durable.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mqblk_core::{BlockSize, ByteLen, ByteOffset, Limits, Op, Outcome, Wake};
use mqblk_scsi::{Command, CommandAction, CommandBuffers, CommandCompletion, MultiStepCommand, NextStep, Nexus};

/// Content of a discarded block on a disk that leaves it undefined.
pub(crate) const DISCARDED: u8 = 0xdd;

pub(crate) struct Ram {
    pub bytes: Vec<u8>,
    /// One flag for each logical block: written, and not durable yet.
    pub dirty: Vec<bool>,
    block: usize,
    limits: Limits,
    read_only: bool,
    /// Outcome of a request that fails, once, after this many that succeed.
    pub fails: Option<(u32, Outcome)>,
    /// The request that failed.
    pub failed: Option<(Op, Outcome)>,
}

impl Ram {
    pub(crate) fn new(bytes: Vec<u8>, block: BlockSize, limits: Limits, read_only: bool) -> Ram {
        let block = block.bytes() as usize;
        let dirty = vec![false; bytes.len().div_ceil(block)];
        Ram { dirty, bytes, block, limits, read_only, fails: None, failed: None }
    }

    pub(crate) fn resize(&mut self, size: usize) {
        self.bytes.resize(size, 0);
        self.dirty.resize(size.div_ceil(self.block), false);
    }

    /// Returns the range, which the command must have checked.
    fn range(&self, start: ByteOffset, len: ByteLen, most: ByteLen) -> Range<usize> {
        let (start, len) = (start.0 as usize, len.0 as usize);
        assert!(len > 0 && start % self.block == 0 && len % self.block == 0, "{len} bytes at {start}");
        assert!(start + len <= self.bytes.len(), "{len} bytes at {start} of {}", self.bytes.len());
        assert!(len as u64 <= most.0, "{len} bytes, and the disk takes {most:?}");
        start..start + len
    }

    fn mark(&mut self, range: &Range<usize>, fua: bool) {
        assert!(!self.read_only, "a read-only disk is written");
        self.dirty[range.start / self.block..range.end / self.block].fill(!fua);
    }

    /// Returns the outcome if this request fails.
    fn fails(&mut self, op: Op) -> Option<Outcome> {
        let (before, outcome) = self.fails.take()?;
        if before > 0 {
            self.fails = Some((before - 1, outcome));
            return None;
        }
        self.failed = Some((op, outcome));
        Some(outcome)
    }

    fn read(&mut self, start: ByteOffset, into: &mut [u8]) -> Outcome {
        if let Some(outcome) = self.fails(Op::Read) {
            return outcome;
        }
        let len = ByteLen(into.len() as u64);
        into.copy_from_slice(&self.bytes[self.range(start, len, self.limits.max_transfer)]);
        Outcome::Done(len)
    }

    fn write(&mut self, start: ByteOffset, from: &[u8], fua: bool) -> Outcome {
        if let Some(outcome) = self.fails(Op::Write { fua }) {
            return outcome;
        }
        let len = ByteLen(from.len() as u64);
        let range = self.range(start, len, self.limits.max_transfer);
        self.mark(&range, fua);
        self.bytes[range].copy_from_slice(from);
        Outcome::Done(len)
    }

    /// Executes a request without data.
    fn manage(&mut self, op: Op, start: ByteOffset, len: ByteLen) -> Outcome {
        if let Some(outcome) = self.fails(op) {
            return outcome;
        }
        match op {
            Op::Flush => self.dirty.fill(false),
            Op::Discard { .. } => {
                let range = self.range(start, len, self.limits.discard.expect("discard is offered").max_len);
                self.mark(&range, true);
                self.bytes[range].fill(DISCARDED);
            }
            Op::WriteZeroes { fua, .. } => {
                let range = self.range(start, len, self.limits.write_zeroes.expect("write-zeroes is offered"));
                self.mark(&range, fua);
                self.bytes[range].fill(0);
            }
            Op::Read | Op::Write { .. } => panic!("{op:?} has data"),
        }
        Outcome::Done(len)
    }
}

/// Result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Overrun,
    /// The completion and the data-in bytes.
    With(CommandCompletion, Vec<u8>),
}

#[derive(Default)]
pub(crate) struct FlagWaker(AtomicBool);

impl Wake for FlagWaker {
    fn wake(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A command in flight.
pub(crate) struct Task {
    data_out: Vec<u8>,
    data_in: Vec<u8>,
    state: State,
    work: CommandBuffers,
    waker: Arc<FlagWaker>,
    /// Lent for each step. Only data read is kept until the next one.
    scratch: Vec<u8>,
}

enum State {
    Ended(Ended),
    Sequence { sequence: Box<MultiStepCommand>, before: Option<Outcome>, waits: bool },
}

impl Task {
    /// Begins a command. A single disk request is executed at once.
    pub(crate) fn begin(ram: &mut Ram, nexus: &Nexus, cdb: &[u8], data_in: usize, data_out: &[u8]) -> Task {
        let mut work = CommandBuffers::default();
        let mut data_in = vec![0xee; data_in];
        let command = Command { cdb, data_in_len: data_in.len() as u64 };
        let state = match nexus.begin(&command, data_out, &mut work) {
            CommandAction::Complete(ending) => State::Ended(Ended::With(ending, work.data_in.clone())),
            CommandAction::Overrun => State::Ended(Ended::Overrun),
            CommandAction::Disk { op, start, len, transferred } => {
                let outcome = request(ram, op, start, len, &mut data_in, data_out);
                let filled =
                    if op == Op::Read && outcome.is_done() { data_in[..len.0 as usize].to_vec() } else { Vec::new() };
                State::Ended(Ended::With(CommandCompletion::from_outcome(op, outcome, transferred), filled))
            }
            CommandAction::Ranges { op, transferred } => {
                assert!(!work.ranges.is_empty(), "at least one range");
                let mut end = CommandCompletion::good(transferred);
                for (start, len) in &work.ranges {
                    let one = CommandCompletion::from_outcome(op, ram.manage(op, *start, *len), transferred);
                    // Only one fails.
                    end = if one.sense.is_some() { one } else { end };
                }
                State::Ended(Ended::With(end, Vec::new()))
            }
            CommandAction::MultiStep(sequence) => State::Sequence { sequence, before: None, waits: false },
        };
        Task { data_out: data_out.to_vec(), data_in, state, work, waker: Arc::default(), scratch: Vec::new() }
    }

    pub(crate) fn ended(&self) -> Option<&Ended> {
        match &self.state {
            State::Ended(ended) => Some(ended),
            State::Sequence { .. } => None,
        }
    }

    /// Returns true if it waits and has not been woken.
    pub(crate) fn waits(&self) -> bool {
        matches!(self.state, State::Sequence { waits: true, .. }) && !self.waker.0.load(Ordering::SeqCst)
    }

    /// Runs one step of a multi-step command.
    pub(crate) fn step(&mut self, ram: &mut Ram) {
        let scratch = &mut self.scratch;
        scratch.resize(MultiStepCommand::SCRATCH, 0x77);
        let State::Sequence { sequence, before, waits } = &mut self.state else { return };
        self.waker.0.store(false, Ordering::SeqCst);
        *waits = false;
        let waker = Arc::clone(&self.waker) as Arc<dyn Wake>;
        let next = sequence.next(before.take(), scratch, &self.data_out[..], &waker, &mut self.work);
        *before = Some(match next {
            NextStep::Read { start, len } => ram.read(start, &mut scratch[..len.0 as usize]),
            NextStep::Write { start, len, fua } => {
                let outcome = ram.write(start, &scratch[..len.0 as usize], fua);
                scratch[..len.0 as usize].fill(0x77);
                outcome
            }
            NextStep::Disk { op, start, len } => request(ram, op, start, len, &mut self.data_in, &self.data_out),
            NextStep::Wait => {
                *waits = true;
                *before = None;
                return;
            }
            NextStep::Complete(ending) => {
                self.state = State::Ended(Ended::With(ending, self.work.data_in.clone()));
                return;
            }
        });
    }
}

fn request(ram: &mut Ram, op: Op, start: ByteOffset, len: ByteLen, data_in: &mut [u8], data_out: &[u8]) -> Outcome {
    match op {
        Op::Read => ram.read(start, &mut data_in[..len.0 as usize]),
        Op::Write { fua } => ram.write(start, &data_out[..len.0 as usize], fua),
        _ => ram.manage(op, start, len),
    }
}

/// Runs a command to its end, without others.
pub(crate) fn run(ram: &mut Ram, nexus: &Nexus, cdb: &[u8], data_in: usize, data_out: &[u8]) -> Ended {
    let mut task = Task::begin(ram, nexus, cdb, data_in, data_out);
    for _ in 0..10_000 {
        if let Some(ended) = task.ended() {
            return ended.clone();
        }
        assert!(!task.waits(), "nobody else is there to wait for");
        task.step(ram);
    }
    panic!("it does not end: {cdb:02x?}");
}
