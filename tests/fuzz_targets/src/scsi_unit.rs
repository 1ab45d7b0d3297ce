//! Expected answers of a SCSI logical unit to any command, written from the standards' text. Sources: SPC-4 clauses 4.5
//! and 6, SBC-3 clause 5, SAM-5 section 5.14.
//!
//! A command with several errors may fail with any of them; one without must succeed, exactly.

/// Expected sense data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedSense {
    /// Sense key, ASC, ASCQ.
    pub(crate) code: (u8, u8, u8),
    /// Field pointer: in the CDB, byte, bit.
    pub(crate) field: Option<(bool, u16, Option<u8>)>,
    pub(crate) information: Option<u64>,
}

impl ExpectedSense {
    /// Encodes it. Source: SPC-4 sections 4.5.2 and 4.5.3.
    pub(crate) fn encode(&self, descriptor: bool) -> Vec<u8> {
        let (key, asc, ascq) = self.code;
        let pointer = self.field.map(|(in_cdb, byte, bit)| {
            let [high, low] = byte.to_be_bytes();
            [0x80 | u8::from(in_cdb) << 6 | bit.map_or(0, |bit| 8 | bit), high, low]
        });
        if !descriptor {
            // The field has 32 bits. No LBA of these disks needs more.
            let information = self.information.unwrap_or_default() as u32;
            let first = 0x70 | u8::from(self.information.is_some()) << 7;
            let head = [&[first, 0, key][..], &information.to_be_bytes(), &[10, 0, 0, 0, 0, asc, ascq, 0]].concat();
            return [&head[..], &pointer.unwrap_or_default()].concat();
        }
        let mut descriptors = vec![];
        if let Some(information) = self.information {
            descriptors.extend([0, 0x0a, 0x80, 0]);
            descriptors.extend(information.to_be_bytes());
        }
        if let Some([first, high, low]) = pointer {
            descriptors.extend([2, 6, 0, 0, first, high, low, 0]);
        }
        [&[0x72, key, asc, ascq, 0, 0, 0, descriptors.len() as u8][..], &descriptors].concat()
    }
}

/// An answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// GOOD, with the data that was read and the number of transferred bytes.
    Good { data: Vec<u8>, transferred: u64 },
    /// CHECK CONDITION.
    Check(ExpectedSense),
    /// More data than the buffers have.
    Overrun,
    /// Any legal answer.
    Any,
}

/// The answers that a command may get, and its change of the disk: byte offset and new content.
#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) answers: Vec<Answer>,
    pub(crate) stored: Vec<(usize, Vec<u8>)>,
}

/// A command and its buffers.
pub(crate) struct ScsiInput<'a> {
    pub(crate) cdb: [u8; 16],
    pub(crate) data_in: usize,
    pub(crate) data_out: &'a [u8],
}

/// A logical unit.
#[derive(Debug)]
pub(crate) struct ScsiUnit {
    pub(crate) block: usize,
    pub(crate) read_only: bool,
    /// The expected content of the disk.
    pub(crate) bytes: Vec<u8>,
    pub(crate) stopped: bool,
    /// SWP and D_SENSE of the control mode page, and WCE = 0 of the caching mode page.
    pub(crate) protected: bool,
    pub(crate) descriptor_sense: bool,
    /// ASC and ASCQ of the pending unit attentions, in order.
    pub(crate) attentions: Vec<(u8, u8)>,
    /// INQUIRY data: `None` is the standard data, the others are VPD pages.
    pub(crate) pages: Vec<(Option<u8>, Vec<u8>)>,
    /// READ CAPACITY (16) data.
    pub(crate) capacity: Vec<u8>,
}

/// Faults of a command.
pub(crate) type Answers = Vec<Answer>;

pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

pub(crate) fn check(code: (u8, u8, u8)) -> Answer {
    Answer::Check(ExpectedSense { code, field: None, information: None })
}

/// INVALID FIELD IN CDB.
pub(crate) fn field(byte: u16, bit: Option<u8>) -> Answer {
    Answer::Check(ExpectedSense { code: (5, 0x24, 0), field: Some((true, byte, bit)), information: None })
}

pub(crate) fn when(faults: &mut Answers, wrong: bool, answer: Answer) {
    if wrong {
        faults.push(answer);
    }
}

/// Returns the data of a reply, cut to its allocation length, or an overrun.
pub(crate) fn reply(mut data: Vec<u8>, allocation: u64, room: usize) -> Answer {
    data.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
    let transferred = data.len() as u64;
    if data.len() > room { Answer::Overrun } else { Answer::Good { data, transferred } }
}

/// Length of a CDB by the group of its operation code.
pub(crate) fn cdb_len(opcode: u8) -> usize {
    [6, 10, 10, 16, 16, 12, 16, 16][usize::from(opcode >> 5)]
}

/// RESETS that unit attentions report, strongest first.
const RESETS: [(u8, u8); 3] = [(0x29, 1), (0x29, 3), (0x29, 7)];

/// Commands whose answers only have to be legal.
const ANY: [u8; 13] = [0x16, 0x17, 0x1a, 0x1e, 0x37, 0x4d, 0x56, 0x57, 0x5a, 0x5e, 0x5f, 0xa3, 0xb7];

impl ScsiUnit {
    /// Raises a unit attention.
    pub(crate) fn raise(&mut self, told: (u8, u8)) {
        let rank = |told: &(u8, u8)| RESETS.iter().position(|reset| reset == told);
        let held = &mut self.attentions;
        match rank(&told) {
            None if !held.contains(&told) => held.push(told),
            None => {}
            Some(new) if held.first().and_then(rank).is_some_and(|first| first <= new) => {}
            Some(_) => {
                held.retain(|other| rank(other).is_none());
                held.insert(0, told);
            }
        }
    }

    /// Resets it (LOGICAL UNIT RESET).
    pub(crate) fn reset(&mut self) {
        (self.stopped, self.protected, self.descriptor_sense) = (false, false, false);
        self.raise(RESETS[1]);
    }

    pub(crate) fn blocks(&self) -> u64 {
        (self.bytes.len() / self.block) as u64
    }

    /// Returns a field of a VPD page.
    fn reported(&self, page: u8, at: std::ops::Range<usize>) -> u64 {
        let found = self.pages.iter().find(|(code, _)| *code == Some(page)).and_then(|(_, data)| data.get(at));
        found.map_or(0, number)
    }

    pub(crate) fn max_transfer(&self) -> u64 {
        self.reported(0xb0, 8..12)
    }

    pub(crate) fn max_compare(&self) -> u64 {
        self.reported(0xb0, 5..6)
    }

    pub(crate) fn max_same(&self) -> u64 {
        self.reported(0xb0, 36..44)
    }

    /// Maximum number of blocks and of descriptors of UNMAP.
    pub(crate) fn max_unmap(&self) -> (u64, u64) {
        (self.reported(0xb0, 20..24), self.reported(0xb0, 24..28))
    }

    pub(crate) fn unmaps(&self) -> bool {
        self.reported(0xb2, 5..6) & 0x80 != 0
    }

    pub(crate) fn unmapped_is_zero(&self) -> bool {
        self.reported(0xb2, 5..6) & 0x04 != 0
    }

    /// Executes a command that reaches the logical unit. The change of the disk is only returned.
    pub(crate) fn execute(&mut self, input: &ScsiInput<'_>) -> Expected {
        let cdb = &input.cdb;
        let only = |answer| Expected { answers: vec![answer], stored: vec![] };
        if !matches!(cdb[0], 0x03 | 0x12 | 0xa0) && !self.attentions.is_empty() {
            let (asc, ascq) = self.attentions.remove(0);
            return only(check((6, asc, ascq)));
        }
        if ANY.contains(&cdb[0]) || (cdb[0] == 0x9e && cdb[1] & 0x1f == 0x12) {
            return only(Answer::Any);
        }
        let mut faults = vec![];
        let control = cdb_len(cdb[0]) - 1;
        when(&mut faults, cdb[control] & 0x04 != 0, field(control as u16, Some(2)));
        let mut stored = vec![];
        let answer = match cdb[0] {
            0x00 => {
                when(&mut faults, self.stopped, check((2, 4, 2)));
                Answer::Good { data: vec![], transferred: 0 }
            }
            0x03 => self.request_sense(input, &faults),
            0x12 => self.inquiry(input, &mut faults),
            0x1b => self.start_stop(cdb, &mut faults),
            0x25 => {
                when(&mut faults, cdb[8] & 1 == 0 && number(&cdb[2..6]) != 0, field(2, None));
                let last = (self.blocks() - 1) as u32;
                reply([last.to_be_bytes(), (self.block as u32).to_be_bytes()].concat(), 8, input.data_in)
            }
            0x9e if cdb[1] & 0x1f == 0x10 => reply(self.capacity.clone(), number(&cdb[10..14]), input.data_in),
            0x9e => {
                faults.push(field(1, Some(4)));
                Answer::Any
            }
            opcode if self.supports(opcode) => self.medium_command(input, &mut faults, &mut stored),
            _ => return only(check((5, 0x20, 0))),
        };
        if faults.is_empty() {
            Expected { answers: vec![answer], stored }
        } else {
            Expected { answers: faults, stored: vec![] }
        }
    }

    fn request_sense(&mut self, input: &ScsiInput<'_>, faults: &Answers) -> Answer {
        let code = match self.attentions.first() {
            Some((asc, ascq)) => (6, *asc, *ascq),
            None if self.stopped => (2, 4, 2),
            None => (0, 0, 0),
        };
        let sense = ExpectedSense { code, field: None, information: None };
        let answer = reply(sense.encode(input.cdb[1] & 1 != 0), input.cdb[4].into(), input.data_in);
        if faults.is_empty() && answer != Answer::Overrun && !self.attentions.is_empty() {
            self.attentions.remove(0);
        }
        answer
    }

    fn inquiry(&self, input: &ScsiInput<'_>, faults: &mut Answers) -> Answer {
        let cdb = &input.cdb;
        when(faults, cdb[1] & 2 != 0, field(1, Some(1)));
        when(faults, cdb[1] & 1 == 0 && cdb[2] != 0, field(2, None));
        let wanted = (cdb[1] & 1 != 0).then_some(cdb[2]);
        match self.pages.iter().find(|(code, _)| *code == wanted) {
            Some((_, data)) => reply(data.clone(), number(&cdb[3..5]), input.data_in),
            None => {
                faults.push(field(2, None));
                Answer::Any
            }
        }
    }

    fn start_stop(&mut self, cdb: &[u8; 16], faults: &mut Answers) -> Answer {
        when(faults, cdb[4] & 0xf0 != 0, field(4, Some(7)));
        when(faults, cdb[4] & 0x02 != 0, field(4, Some(1)));
        if faults.is_empty() {
            self.stopped = cdb[4] & 1 == 0;
        }
        Answer::Good { data: vec![], transferred: 0 }
    }

    fn supports(&self, opcode: u8) -> bool {
        match opcode {
            0x42 => self.unmaps(),
            0x89 => self.max_compare() > 0,
            0x08 | 0x28 | 0xa8 | 0x88 | 0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e | 0x2f | 0xaf | 0x8f => true,
            _ => matches!(opcode, 0x8b | 0x41 | 0x93 | 0x35 | 0x91 | 0x15 | 0x55),
        }
    }
}
