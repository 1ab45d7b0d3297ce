//! Fixture: a caller of commands, over a disk in memory.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mqblk_core::{BlockSize, ByteLen, ByteOffset, DiscardLimits, Errno, Geometry, Limits, Op, Outcome, Wake};
use mqblk_scsi::reservation::Reservations;
use mqblk_scsi::{
    Command, CommandAction, CommandBuffers, CommandCompletion, Identity, LogicalUnit, LogicalUnitOptions,
    MultiStepCommand, NextStep, Nexus, Sense, SenseKey, Status,
};

/// Blocks of the disk.
pub(crate) const BLOCKS: u64 = 2048;
pub(crate) const BLOCK: usize = 512;
/// Maximum transfer length, in blocks.
pub(crate) const TRANSFER: u32 = 512;
/// Maximum lengths of UNMAP and WRITE SAME.
pub(crate) const UNMAP: u32 = 64;
pub(crate) const SAME: u32 = 256;

#[derive(Default)]
pub(crate) struct WakeCounter(pub AtomicU32);

impl Wake for WakeCounter {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RunResult {
    Ended { ending: CommandCompletion, data: Vec<u8> },
    Overrun,
    Waiting,
}

pub(crate) struct Rig {
    pub unit: Arc<LogicalUnit>,
    pub nexus: Arc<Nexus>,
    pub disk: RefCell<Vec<u8>>,
    /// Disk requests since the last time.
    pub requests: RefCell<Vec<(Op, u64, u64)>>,
    /// Outcome of all requests from the n-th on, if they fail.
    pub fails: Cell<Option<(usize, Outcome)>>,
    pub wakes: Arc<WakeCounter>,
}

pub(crate) fn geometry() -> Geometry {
    Geometry {
        size: ByteLen(BLOCKS * BLOCK as u64),
        logical_block: BlockSize::B512,
        physical_block: BlockSize::B4096,
        alignment_offset: 3,
        min_io: ByteLen(8192),
        opt_io: ByteLen(65536),
        read_only: false,
    }
}

pub(crate) fn limits() -> Limits {
    Limits {
        max_transfer: ByteLen(u64::from(TRANSFER) * 512),
        max_segments: 128,
        discard: Some(DiscardLimits { granularity: ByteLen(4096), max_len: ByteLen(u64::from(UNMAP) * 512) }),
        write_zeroes: Some(ByteLen(u64::from(SAME) * 512)),
        volatile_cache: true,
        cost_per_request: false,
        pins_memory: false,
    }
}

pub(crate) fn options(geometry: Geometry, limits: Limits) -> LogicalUnitOptions {
    let identity = Identity {
        vendor: "MQBLK".into(),
        product: "disk".into(),
        revision: "0.1".into(),
        serial: "serial-7".into(),
        name: "vm0-disk7".into(),
    };
    LogicalUnitOptions { geometry, limits, identity, writeback: true, reservations: Reservations::new(None) }
}

impl Rig {
    pub(crate) fn new() -> Rig {
        Rig::of(geometry(), limits())
    }

    pub(crate) fn of(geometry: Geometry, limits: Limits) -> Rig {
        Rig::from(options(geometry, limits))
    }

    /// Returns a fixture whose nexus has taken POWER ON.
    pub(crate) fn from(options: LogicalUnitOptions) -> Rig {
        let size = options.geometry.size.0 as usize;
        let unit = Arc::new(LogicalUnit::new(options));
        let nexus = unit.login("vm0", 1).unwrap();
        let rig = Rig {
            unit,
            nexus,
            disk: RefCell::new((0..size).map(pattern).collect()),
            requests: RefCell::default(),
            fails: Cell::new(None),
            wakes: Arc::default(),
        };
        rig.expect(&[0; 6], sense(SenseKey::UnitAttention, 0x29, 0x01));
        rig
    }

    pub(crate) fn other(&self, name: &str) -> Arc<Nexus> {
        let nexus = self.unit.login(name, 1).unwrap();
        assert!(
            matches!(self.run_on(&nexus, &[0; 6], &[], 0), RunResult::Ended { ending, .. } if ending.sense.is_some())
        );
        nexus
    }

    /// Executes one request on a range of the disk with this data.
    fn execute(&self, op: Op, start: ByteOffset, len: ByteLen, data: &mut [u8]) -> Outcome {
        let mut asked = self.requests.borrow_mut();
        asked.push((op, start.0, len.0));
        if let Some((from, outcome)) = self.fails.get()
            && asked.len() > from
        {
            return outcome;
        }
        let mut disk = self.disk.borrow_mut();
        let range = start.0 as usize..(start.0 + len.0) as usize;
        match op {
            Op::Read => data.copy_from_slice(&disk[range]),
            Op::Write { .. } => disk[range].copy_from_slice(data),
            Op::WriteZeroes { .. } | Op::Discard { .. } => disk[range].fill(0),
            Op::Flush => assert_eq!((start.0, len.0), (0, 0)),
        }
        Outcome::Done(len)
    }

    pub(crate) fn run(&self, cdb: &[u8], out: &[u8], room: usize) -> RunResult {
        self.run_on(&self.nexus, cdb, out, room)
    }

    pub(crate) fn run_on(&self, nexus: &Nexus, cdb: &[u8], out: &[u8], room: usize) -> RunResult {
        let mut work = CommandBuffers::default();
        let command = Command { cdb: &field(cdb), data_in_len: room as u64 };
        let step = nexus.begin(&command, out, &mut work);
        self.finish(step, out, room, work)
    }

    pub(crate) fn finish(&self, step: CommandAction, out: &[u8], room: usize, mut work: CommandBuffers) -> RunResult {
        let mut out_copy = out.to_vec();
        let mut data = Vec::new();
        match step {
            CommandAction::Overrun => RunResult::Overrun,
            CommandAction::Complete(ending) => {
                if ending.status == Status::Good && out.is_empty() {
                    assert_eq!(ending.transferred, work.data_in.len() as u64);
                }
                RunResult::Ended { ending, data: work.data_in }
            }
            CommandAction::Disk { op, start, len, transferred } => {
                assert!(len.0 > 0 || op == Op::Flush, "an empty {op:?}");
                let outcome = self.transfer(op, start, len, &mut out_copy, &mut data, room);
                RunResult::Ended { ending: CommandCompletion::from_outcome(op, outcome, transferred), data }
            }
            CommandAction::Ranges { op, transferred } => {
                assert!(!work.ranges.is_empty() && !op.has_data());
                let outcomes: Vec<_> =
                    work.ranges.iter().map(|(start, len)| self.execute(op, *start, *len, &mut [])).collect();
                let failed = outcomes.into_iter().find(|outcome| !outcome.is_done());
                let ending =
                    CommandCompletion::from_outcome(op, failed.unwrap_or(Outcome::Done(ByteLen::ZERO)), transferred);
                RunResult::Ended { ending, data }
            }
            CommandAction::MultiStep(mut sequence) => {
                let ending = self.drive(&mut sequence, &mut out_copy, room, &mut work);
                ending.map_or(RunResult::Waiting, |ending| RunResult::Ended { ending, data: work.data_in })
            }
        }
    }

    fn transfer(
        &self,
        op: Op,
        start: ByteOffset,
        len: ByteLen,
        out: &mut [u8],
        data: &mut Vec<u8>,
        room: usize,
    ) -> Outcome {
        match op {
            Op::Read => {
                assert!(len.0 as usize <= room);
                data.resize(len.0 as usize, 0);
                self.execute(op, start, len, data)
            }
            Op::Write { .. } => self.execute(op, start, len, &mut out[..len.0 as usize]),
            _ => self.execute(op, start, len, &mut []),
        }
    }

    /// Runs the command until it completes, or waits (`None`).
    pub(crate) fn drive(
        &self,
        sequence: &mut MultiStepCommand,
        out: &mut [u8],
        room: usize,
        work: &mut CommandBuffers,
    ) -> Option<CommandCompletion> {
        let mut before = None;
        let waker: Arc<dyn Wake> = self.wakes.clone();
        // Filled with garbage before each step: nothing may rely on it.
        let mut scratch = vec![0x5a; MultiStepCommand::SCRATCH];
        for _ in 0..10_000 {
            let next = sequence.next(before, &mut scratch, out, &waker, work);
            before = Some(match next {
                NextStep::Complete(ending) => return Some(ending),
                NextStep::Wait => return None,
                NextStep::Read { start, len } => {
                    scratch.fill(0x5a);
                    self.execute(Op::Read, start, len, &mut scratch[..len.0 as usize])
                }
                NextStep::Write { start, len, fua } => {
                    let outcome = self.execute(Op::Write { fua }, start, len, &mut scratch[..len.0 as usize]);
                    scratch.fill(0x5a);
                    outcome
                }
                NextStep::Disk { op, start, len } => self.transfer(op, start, len, out, &mut Vec::new(), room),
            });
        }
        panic!("the command does not end");
    }

    /// Returns the data-in of a command that succeeds, with a buffer of `room` bytes.
    pub(crate) fn reads(&self, cdb: &[u8], room: usize) -> Vec<u8> {
        match self.run(cdb, &[], room) {
            RunResult::Ended { ending, data } => {
                assert_eq!(ending, CommandCompletion::good(data.len() as u64), "{cdb:02x?}");
                data
            }
            other => panic!("{cdb:02x?}: {other:?}"),
        }
    }

    /// Runs a command that succeeds and transfers `transferred` bytes of `out`.
    pub(crate) fn writes(&self, cdb: &[u8], out: &[u8], transferred: usize) {
        let expected = RunResult::Ended { ending: CommandCompletion::good(transferred as u64), data: Vec::new() };
        assert_eq!(self.run(cdb, out, 0), expected, "{cdb:02x?}");
    }

    /// Runs a command that fails with this sense data, with 512 KiB of data in and out.
    pub(crate) fn expect(&self, cdb: &[u8], sense: Sense) {
        self.expect_with(cdb, &vec![0; 1 << 19], sense);
    }

    pub(crate) fn expect_with(&self, cdb: &[u8], out: &[u8], sense: Sense) {
        let expected = RunResult::Ended { ending: CommandCompletion::check_condition(sense), data: Vec::new() };
        let answer = match self.run(cdb, out, 1 << 19) {
            RunResult::Ended { ending, .. } => RunResult::Ended { ending, data: Vec::new() },
            other => other,
        };
        assert_eq!(answer, expected, "{cdb:02x?}");
    }

    /// Returns and clears the disk requests.
    pub(crate) fn take_requests(&self) -> Vec<(Op, u64, u64)> {
        self.requests.take()
    }

    pub(crate) fn fail_from(&self, request: usize, outcome: Outcome) {
        self.requests.borrow_mut().clear();
        self.fails.set(Some((request, outcome)));
    }
}

/// Initial content of the disk.
pub(crate) fn pattern(at: usize) -> u8 {
    (at / BLOCK) as u8 ^ (at * 7) as u8
}

pub(crate) const EIO: Outcome = Outcome::Failed(Errno(5));

pub(crate) fn sense(key: SenseKey, asc: u8, ascq: u8) -> Sense {
    Sense::new(key, asc, ascq)
}

/// 5/24/00 with a pointer.
pub(crate) fn in_command(byte: u16, bit: impl Into<Option<u8>>) -> Sense {
    Sense::invalid_cdb_field(byte, bit.into())
}

/// 5/26/00 with a pointer.
pub(crate) fn in_parameters(byte: u16, bit: impl Into<Option<u8>>) -> Sense {
    Sense::invalid_parameter_field(byte, bit.into())
}

/// Returns a command in a transport's CDB field.
pub(crate) fn field(cdb: &[u8]) -> [u8; 32] {
    let mut field = [0; 32];
    field[..cdb.len()].copy_from_slice(cdb);
    field
}

/// Returns a 10-byte CDB with an LBA and a length.
pub(crate) fn ten(opcode: u8, flags: u8, lba: u32, count: u16) -> [u8; 10] {
    let (lba, count) = (lba.to_be_bytes(), count.to_be_bytes());
    [opcode, flags, lba[0], lba[1], lba[2], lba[3], 0, count[0], count[1], 0]
}

pub(crate) fn twelve(opcode: u8, flags: u8, lba: u32, count: u32) -> [u8; 12] {
    let mut cdb = [0; 12];
    cdb[..2].copy_from_slice(&[opcode, flags]);
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[6..10].copy_from_slice(&count.to_be_bytes());
    cdb
}

pub(crate) fn sixteen(opcode: u8, flags: u8, lba: u64, count: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[..2].copy_from_slice(&[opcode, flags]);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&count.to_be_bytes());
    cdb
}
