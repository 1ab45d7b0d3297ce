//! A virtio-scsi controller over split rings: three logical units in memory on a stepped worker, and a guest with
//! batches of commands of any layout, and task management functions between them. The oracle is exact for all commands
//! that access the medium and for earlier failures; for a few others the answer only has to be legal. It checks every
//! byte of guest memory, the used elements, calls and the disks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arbitrary::{Result, Unstructured};
use mqblk_memory::GuestAddress;

use crate::ring_guest::{MEMORY, Piece, RingGuest, cut};
use crate::scsi_commands::{BATCH, DISK, PART, ScsiCommand};
use crate::scsi_controller::{ADDRESSES, Controller, Queue};
use crate::scsi_unit::{Answer, Expected, ExpectedSense, ScsiInput, ScsiUnit, check, field, number, reply};

/// Guest memory of each command: the part that the device reads, the part that it writes, and an indirect table.
const ROOM: u64 = 0x1_0000;
pub(crate) const FIRST: u64 = 0x8000;
pub(crate) const WRITES: u64 = 0x6000;
pub(crate) const TABLE: u64 = 0xc000;
/// Turns within which a batch must be complete.
pub(crate) const TURNS: usize = 1000;
pub(crate) const POISON: u8 = 0xee;
/// Bytes of a request before its CDB, and of a response before its sense data. Source: virtio 1.3 section 5.6.6.1.
const REQUEST: usize = 19;
const RESPONSE: usize = 12;

/// Response codes. Source: virtio 1.3 section 5.6.6.1.
pub(crate) const OK: u8 = 0;
const OVERRUN: u8 = 1;
pub(crate) const BAD_TARGET: u8 = 3;
const FAILURE: u8 = 9;

/// The destination of a `lun` field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Unit(usize),
    /// A target with logical units, but none at this LUN.
    NoUnit(u8),
    BadTarget,
}

/// The expected outcome of a chain.
#[derive(Debug)]
enum Fate {
    /// Nothing is written.
    NoResponse,
    /// This response code, and no data.
    Refused(u8),
    /// A logical unit, or a target, answers.
    Answered { unit: Option<usize>, expected: Expected },
}

struct Laid {
    head: u16,
    fate: Fate,
    command: ScsiCommand,
    /// Address of the response and its length.
    response: u64,
    capacity: usize,
}

pub(crate) struct Machine {
    pub(crate) controller: Controller,
    guest: RingGuest,
    pub(crate) control: RingGuest,
    calls: Arc<AtomicU64>,
    pub(crate) units: Vec<ScsiUnit>,
    sense_len: usize,
    cdb_len: usize,
}

/// Draws a `lun` field.
pub(crate) fn place(u: &mut Unstructured<'_>) -> Result<([u8; 8], Place)> {
    let at = u.int_in_range(0..=ADDRESSES.len() - 1)?;
    let (target, lun) = ADDRESSES[at];
    let [high, low] = lun.to_be_bytes();
    let flat = [1, target, high | 0x40, low, 0, 0, 0, 0];
    Ok(match u.int_in_range(0..=31)? {
        31 => ([1, target, 0x80, low, 0, 0, 0, 0], Place::NoUnit(target)),
        30 => ([1, target, high | 0x40, low, 0, 0, 0, 1], Place::NoUnit(target)),
        29 => ([1, target, 0, 9, 0, 0, 0, 0], Place::NoUnit(target)),
        28 => ([1, 77, 0, 0, 0, 0, 0, 0], Place::BadTarget),
        27 => ([*u.choose(&[0, 2, 0xc1])?, target, high | 0x40, low, 0, 0, 0, 0], Place::BadTarget),
        20..=26 if lun < 256 => ([1, target, 0, low, 0, 0, 0, 0], Place::Unit(at)),
        _ => (flat, Place::Unit(at)),
    })
}

/// Returns the expected answer to REPORT LUNS.
fn report_luns(target: u8, input: &ScsiInput<'_>) -> Vec<Answer> {
    let allocation = number(&input.cdb[6..10]);
    let mut faults = vec![];
    crate::scsi_unit::when(&mut faults, allocation < 16, field(6, None));
    crate::scsi_unit::when(&mut faults, input.cdb[2] > 2, field(2, None));
    if !faults.is_empty() {
        return faults;
    }
    let mut luns = vec![];
    for (_, lun) in ADDRESSES.iter().filter(|(of, _)| *of == target && input.cdb[2] != 1) {
        luns.extend(if *lun < 256 { *lun } else { 0x4000 | lun }.to_be_bytes());
        luns.extend([0; 6]);
    }
    let data = [&(luns.len() as u32).to_be_bytes()[..], &[0; 4], &luns].concat();
    vec![reply(data, allocation, input.data_in)]
}

/// Returns the expected answer of a target for a LUN without a logical unit.
fn without_unit(target: u8, input: &ScsiInput<'_>) -> Vec<Answer> {
    let absent = ExpectedSense { code: (5, 0x25, 0), field: None, information: None };
    match input.cdb[0] {
        0xa0 => report_luns(target, input),
        0x12 => vec![Answer::Any],
        0x03 => vec![reply(absent.encode(input.cdb[1] & 1 != 0), input.cdb[4].into(), input.data_in)],
        _ => vec![check(absent.code)],
    }
}

impl Machine {
    fn new(u: &mut Unstructured<'_>) -> Result<Machine> {
        let event_idx: bool = u.arbitrary()?;
        let block = if u.ratio(1, 3)? { 4096 } else { 512 };
        let (mut sense_len, mut cdb_len) = (96, 32);
        if u.ratio(1, 3)? {
            (sense_len, cdb_len) = (u.int_in_range(0..=252)?, u.int_in_range(16..=260)?);
        }
        let (guest, control, calls) = (RingGuest::new(), RingGuest::new(), Arc::default());
        let mut controller = Controller::new(block, (sense_len as u32, cdb_len as u32), event_idx);
        controller.attach(Queue::Control, &control, &calls);
        controller.attach(Queue::Requests, &guest, &calls);
        let units = (0..ADDRESSES.len()).map(|at| controller.model(at)).collect();
        Ok(Machine { controller, guest, control, calls, units, sense_len, cdb_len })
    }

    /// Returns the expected outcome of a well-formed command. Changes the states of the logical units as it does.
    fn execute(&mut self, place: Place, command: &ScsiCommand) -> Fate {
        let input = ScsiInput { cdb: command.cdb, data_in: command.data_in, data_out: &command.data_out };
        match place {
            Place::BadTarget => Fate::Refused(BAD_TARGET),
            Place::NoUnit(target) => Fate::Answered {
                unit: None,
                expected: Expected { answers: without_unit(target, &input), stored: vec![] },
            },
            Place::Unit(at) if input.cdb[0] == 0xa0 => {
                let answers = report_luns(ADDRESSES[at].0, &input);
                if let [Answer::Good { .. }] = answers[..] {
                    self.units[at].attentions.retain(|told| *told != (0x3f, 0x0e));
                }
                Fate::Answered { unit: Some(at), expected: Expected { answers, stored: vec![] } }
            }
            Place::Unit(at) => Fate::Answered { unit: Some(at), expected: self.units[at].execute(&input) },
        }
    }

    /// Writes a command to guest memory in any layout.
    fn lay(
        &mut self,
        u: &mut Unstructured<'_>,
        part: usize,
        lun: ([u8; 8], Place),
        command: ScsiCommand,
    ) -> Result<Laid> {
        let at = FIRST + part as u64 * ROOM;
        let (read, write) = (at + u.int_in_range(0..=63)?, at + WRITES + u.int_in_range(0..=63)?);
        let mut command = command;
        let mut header = vec![0; REQUEST + self.cdb_len];
        header[..8].copy_from_slice(&lun.0);
        header[8..16].copy_from_slice(&(part as u64).to_le_bytes());
        header[REQUEST..REQUEST + 16].copy_from_slice(&command.cdb);
        let mut capacity = RESPONSE + self.sense_len;
        let mut fault = false;
        match u.int_in_range(0..=49)? {
            // A truncated header.
            0 => {
                header.truncate(u.int_in_range(0..=header.len() - 1)?);
                command.data_out.clear();
                fault = true;
            }
            // A truncated response buffer.
            1 => {
                capacity = u.int_in_range(0..=capacity)?;
                command.data_in = 0;
            }
            _ => {}
        }
        let readable = [&header[..], &command.data_out].concat();
        let writable = capacity + command.data_in;
        self.guest.put(read, &readable);
        self.guest.put(write, &vec![POISON; writable]);
        let mut pieces = cut(u, read, readable.len(), false)?;
        let mut residual = command.data_in + command.data_out.len();
        // Unmapped data.
        if !fault && u.ratio(1, 50)? {
            let address = *u.choose(&[MEMORY, MEMORY - 1, u64::MAX - 1, u64::MAX, 1 << 40])?;
            let len = u.int_in_range(2..=4096)?;
            pieces.push(Piece { address, len, writable: false });
            residual += len as usize;
            fault = true;
        }
        pieces.extend(cut(u, write, writable, true)?);
        let direct = u.int_in_range(0..=pieces.len())?;
        let head = self.guest.put_chain(&pieces, direct, at + TABLE);
        let both = command.data_in > 0 && !command.data_out.is_empty();
        let fate = if capacity < RESPONSE {
            Fate::NoResponse
        } else if fault || both {
            // The residual depends on the lengths of both buffers.
            command.data_out.resize(residual - command.data_in, 0);
            Fate::Refused(FAILURE)
        } else {
            self.execute(lun.1, &command)
        };
        Ok(Laid { head, fate, command, response: write, capacity })
    }

    /// Runs a batch to its completion and checks it.
    fn batch(&mut self, u: &mut Unstructured<'_>, commands: Vec<(([u8; 8], Place), ScsiCommand)>) -> Result<()> {
        let mut laid = vec![];
        for (part, (lun, command)) in commands.into_iter().enumerate() {
            let one = self.lay(u, part, lun, command)?;
            self.guest.offer(one.head);
            laid.push(one);
        }
        let call_wanted: bool = u.arbitrary()?;
        self.guest.request_call(call_wanted);
        self.guest.publish(0);
        let before = self.calls.load(Ordering::Relaxed);
        let mut turns = 0;
        while usize::from(self.guest.used_count()) < laid.len() {
            self.controller.turn();
            turns += 1;
            assert!(turns < TURNS, "{} of {} used", self.guest.used_count(), laid.len());
        }
        let called = self.calls.load(Ordering::Relaxed) - before;
        assert_eq!(called > 0, call_wanted, "{called} calls");
        for (head, used) in self.guest.take_used() {
            let at = laid.iter().position(|one| u32::from(one.head) == head);
            let one = laid.remove(at.expect("a chain that was offered and not yet used"));
            self.check_used(&one, used as usize);
        }
        self.guest.check();
        Ok(())
    }

    fn found(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.guest.memory.read(GuestAddress(at), &mut bytes).expect("mapped");
        bytes
    }

    /// Checks a used chain, and takes over its changes.
    fn check_used(&mut self, laid: &Laid, used: usize) {
        let Laid { fate, command, response, capacity, .. } = laid;
        let buffers = command.data_in + command.data_out.len();
        match fate {
            Fate::NoResponse => assert_eq!(used, 0, "the used length of {command:x?}"),
            Fate::Refused(code) => {
                assert_eq!(used, RESPONSE, "the used length of {command:x?}");
                self.guest.expect(*response, &header(0, buffers, 0, *code));
            }
            Fate::Answered { unit, expected } => {
                let found = self.found(*response, *capacity);
                let descriptor = unit.is_some_and(|unit| self.units[unit].descriptor_sense);
                let encode = |answer: &Answer| answered(answer, descriptor, buffers, *capacity);
                let matching = expected.answers.iter().map(|answer| (answer, encode(answer)));
                let matching: Vec<_> = matching.filter(|(_, (bytes, _))| found.starts_with(bytes)).collect();
                let Some((answer, (bytes, transferred))) = matching.first() else {
                    panic!("{command:x?}: found {found:x?}, expected one of {:x?}", expected.answers);
                };
                if **answer == Answer::Any {
                    return self.check_any(laid, used, &found);
                }
                let counted = if command.data_in > 0 { *transferred } else { 0 };
                assert_eq!(used, capacity + counted, "the used length of {command:x?}, {answer:x?}");
                self.guest.expect(*response, bytes);
                if let Answer::Good { data, .. } = answer {
                    self.guest.expect(response + *capacity as u64, data);
                }
                for (at, content) in &expected.stored {
                    if let (Some(unit), Answer::Good { .. }) = (unit, answer) {
                        self.units[*unit].bytes[*at..at + content.len()].copy_from_slice(content);
                    }
                }
            }
        }
    }

    /// Checks that an answer is legal.
    fn check_any(&mut self, laid: &Laid, used: usize, found: &[u8]) {
        let Laid { command, response, capacity, .. } = laid;
        let buffers = command.data_in + command.data_out.len();
        let word = |at: usize| u32::from_le_bytes([found[at], found[at + 1], found[at + 2], found[at + 3]]) as usize;
        let (sense, residual, status, code) = (word(0), word(4), found[10], found[11]);
        let text = format!("{command:x?}: {found:x?}");
        assert!(residual <= buffers && found[8..10] == [0, 0], "{text}");
        // An overrun transfers nothing and leaves no residual.
        let transferred = if code == OVERRUN { 0 } else { buffers - residual };
        let counted = if command.data_in > 0 { transferred } else { 0 };
        assert_eq!(used, capacity + counted, "{text}");
        match (code, status) {
            (OVERRUN, 0) => assert!(sense == 0 && residual == 0, "{text}"),
            (OK, 0) => assert_eq!(sense, 0, "{text}"),
            (OK, 0x18) => assert!(sense == 0 && transferred == 0, "{text}"),
            (OK, 2) => {
                assert!(transferred == 0 && RESPONSE + sense <= *capacity, "{text}");
                assert!(sense == (*capacity - RESPONSE).min(18) || (sense > 7 && found[RESPONSE] == 0x72), "{text}");
                if sense > 2 && found[RESPONSE] & 0x7f == 0x70 {
                    assert!(matches!(found[RESPONSE + 2], 2 | 4 | 5 | 7 | 0xb), "{text}");
                }
            }
            _ => panic!("{text}"),
        }
        self.guest.expect(*response, &found[..RESPONSE + sense]);
        let data = self.found(response + *capacity as u64, counted);
        self.guest.expect(response + *capacity as u64, &data);
    }
}

/// Encodes the fixed part of a response.
fn header(sense: usize, residual: usize, status: u8, code: u8) -> Vec<u8> {
    [&(sense as u32).to_le_bytes()[..], &(residual as u32).to_le_bytes(), &[0, 0, status, code]].concat()
}

/// Returns the bytes of a response, and the number of transferred bytes.
fn answered(answer: &Answer, descriptor: bool, buffers: usize, capacity: usize) -> (Vec<u8>, usize) {
    match answer {
        Answer::Good { transferred, .. } => (header(0, buffers - *transferred as usize, 0, OK), *transferred as usize),
        Answer::Overrun => (header(0, 0, 0, OVERRUN), 0),
        Answer::Any => (vec![], 0),
        Answer::Check(sense) => {
            let mut sense = sense.encode(descriptor);
            sense.truncate(capacity - RESPONSE);
            ([header(sense.len(), buffers, 2, OK), sense].concat(), 0)
        }
    }
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut machine = Machine::new(u)?;
    for _ in 0..24 {
        if u.is_empty() {
            break;
        }
        if u.ratio(1, 6)? {
            machine.control(u)?;
        }
        let count = u.int_in_range(1..=BATCH)?;
        let mut commands = vec![];
        for part in 0..count {
            let lun = place(u)?;
            let unit = if let Place::Unit(at) = lun.1 { at } else { 0 };
            commands.push((lun, ScsiCommand::any(u, &machine.units[unit], part, count == 1)?));
        }
        machine.batch(u, commands)?;
    }
    for (at, (target, lun)) in ADDRESSES.into_iter().enumerate() {
        let unit = &mut machine.units[at];
        let [high, low] = lun.to_be_bytes();
        let field = ([1, target, high | 0x40, low, 0, 0, 0, 0], Place::Unit(at));
        machine.controller.start_unit(at);
        (unit.stopped, unit.attentions) = (false, vec![]);
        let all = (0..BATCH).map(|part| (field, ScsiCommand::read_part(&machine.units[at], part))).collect();
        machine.batch(u, all)?;
    }
    Ok(())
}

const _: () =
    assert!(2 * PART + 1024 < WRITES as usize && FIRST + ROOM * BATCH as u64 <= MEMORY && DISK == PART * BATCH);

/// Runs the target.
///
/// # Panics
/// When the device violates the specification.
pub fn target(data: &[u8]) {
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
