//! Model of a logical unit, written from the standards' text: a flat byte array that shares only the types of its
//! results with the code under test.
//!
//! A command with several errors may fail with any of them; one without errors must succeed, exactly.

use mqblk_core::{Op, Outcome};
use mqblk_scsi::{CommandCompletion, Status};

use crate::ram::{DISCARDED, Ended};

/// Sense key, ASC, ASCQ; field pointer (in the CDB, byte, bit); INFORMATION.
pub(crate) type SenseFields = (u8, u8, u8, Option<(bool, u16, Option<u8>)>, Option<u64>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Check(SenseFields),
    Conflict,
    Overrun,
}

pub(crate) fn failure(ended: &Ended) -> Option<Failure> {
    let Ended::With(ending, data) = ended else { return Some(Failure::Overrun) };
    let told = ending.sense.map(|sense| {
        let field = sense.field.map(|field| (field.in_cdb, field.byte, field.bit));
        (sense.key as u8, sense.asc, sense.ascq, field, sense.information)
    });
    let failure = match (ending.status, told) {
        (Status::Good, None) => return None,
        (Status::CheckCondition, Some(told)) => Failure::Check(told),
        (Status::ReservationConflict, None) => Failure::Conflict,
        other => panic!("no such answer: {other:?}"),
    };
    assert!(ending.transferred == 0 && data.is_empty(), "a failed command transfers nothing that counts");
    Some(failure)
}

/// Limits of the logical unit from VPD pages and READ CAPACITY, used to validate its commands.
#[derive(Clone, Debug)]
pub(crate) struct ReportedLimits {
    pub block: usize,
    /// Maximum number of blocks: of a transfer, of COMPARE AND WRITE, of WRITE SAME, of UNMAP in all its descriptors.
    pub transfer: u64,
    pub compare: u64,
    pub same: u64,
    pub unmap: u64,
    pub descriptors: u64,
    /// Unmapped blocks read as zeroes; WRITE SAME with UNMAP is supported.
    pub zeroes: bool,
    pub unmaps: bool,
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT.
    pub exponent: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub kind: u8,
    pub holder: usize,
}

pub(crate) struct Model {
    pub limits: ReportedLimits,
    pub bytes: Vec<u8>,
    pub read_only: bool,
    pub write_through: bool,
    pub protected: bool,
    pub stopped: bool,
    /// ASC and ASCQ of the unit attentions of each nexus, in order.
    pub attentions: Vec<Vec<(u8, u8)>>,
    pub reserved: Option<usize>,
    pub keys: Vec<u64>,
    pub held: Option<Held>,
}

/// Effect of a valid command.
#[derive(Debug)]
pub(crate) enum Effect {
    Nothing { transferred: u64 },
    Reply(Vec<u8>),
    Read { lba: u64, count: u64 },
    Write { lba: u64, data: Vec<u8>, durable: bool },
    Same { lba: u64, count: u64, pattern: Vec<u8>, transferred: u64 },
    Or { lba: u64, data: Vec<u8>, durable: bool },
    Compare { lba: u64, data: Vec<u8>, durable: bool },
    Verify { lba: u64, count: u64, data: Vec<u8> },
    Unmap { ranges: Vec<(u64, u64)>, transferred: u64 },
    Sync,
    Mode { write_through: bool, protected: bool, transferred: u64 },
    Start(bool),
    Reserve { release: bool },
    Persist { action: u8, kind: u8, key: u64 },
}

/// Blocks that must be durable after a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Durable {
    Unsaid,
    Blocks(u64, u64),
    All,
}

pub(crate) struct CommandInput<'a> {
    pub nexus: usize,
    pub cdb: &'a [u8],
    pub data_in: usize,
    pub data_out: &'a [u8],
}

pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

pub(crate) fn illegal(asc: u8) -> Failure {
    Failure::Check((5, asc, 0, None, None))
}

/// INVALID FIELD IN CDB.
pub(crate) fn field(byte: u16, bit: Option<u8>) -> Failure {
    Failure::Check((5, 0x24, 0, Some((true, byte, bit)), None))
}

impl Model {
    pub(crate) fn blocks(&self) -> u64 {
        (self.bytes.len() / self.limits.block) as u64
    }

    pub(crate) fn range(&self, lba: u64, count: u64) -> std::ops::Range<usize> {
        lba as usize * self.limits.block..(lba + count) as usize * self.limits.block
    }

    pub(crate) fn raise(&mut self, nexus: usize, told: (u8, u8)) {
        let held = &mut self.attentions[nexus];
        // Resets come first; a stronger one covers the weaker.
        const RESETS: [(u8, u8); 3] = [(0x29, 1), (0x29, 3), (0x29, 7)];
        let rank = |told: &(u8, u8)| RESETS.iter().position(|reset| reset == told);
        match rank(&told) {
            None if !held.contains(&told) => held.push(told),
            None => {}
            Some(rank_of_new) => {
                let stronger = held.first().and_then(rank).is_some_and(|first| first <= rank_of_new);
                if !stronger {
                    held.retain(|other| rank_of_new > 0 && rank(other).is_none());
                    held.insert(0, told);
                }
            }
        }
    }

    pub(crate) fn raise_others(&mut self, but: usize, told: (u8, u8)) {
        (0..self.attentions.len()).filter(|nexus| *nexus != but).for_each(|nexus| self.raise(nexus, told));
    }

    /// Returns true if reservations exclude the nexus from commands of a class.
    pub(crate) fn barred(&self, nexus: usize, class: Class) -> bool {
        if let Some(holder) = self.reserved {
            return holder != nexus && class != Class::Always;
        }
        let Some(Held { kind, holder }) = self.held else { return false };
        if holder == nexus || kind >= 5 && self.keys[nexus] != 0 {
            return false;
        }
        match class {
            Class::Always | Class::Look => false,
            Class::Read => matches!(kind, 3 | 6),
            Class::Write => true,
        }
    }

    /// Compares the result with the expected one and applies the effect. Returns the blocks that must be durable.
    pub(crate) fn check(&mut self, input: &CommandInput<'_>, ended: &Ended) -> Durable {
        let found = failure(ended);
        let exempt = matches!(input.cdb.first(), Some(0x03 | 0x12 | 0xa0));
        if !exempt && !self.attentions[input.nexus].is_empty() {
            let (asc, ascq) = self.attentions[input.nexus].remove(0);
            assert_eq!(found, Some(Failure::Check((6, asc, ascq, None, None))), "a unit attention was pending");
            return Durable::Unsaid;
        }
        match self.expected_effect(input) {
            Err(failures) => {
                let found = found.unwrap_or_else(|| panic!("succeeded, expected one of {failures:?}"));
                assert!(failures.contains(&found), "found {found:?}, expected one of {failures:?}");
                Durable::Unsaid
            }
            Ok(act) => self.perform(input.nexus, act, found, ended),
        }
    }

    /// As [`check`](Self::check), for a command with a failed disk request: it must report the failure and leave all
    /// other blocks unchanged. `left` is the content of the disk.
    pub(crate) fn check_failed(
        &mut self,
        input: &CommandInput<'_>,
        ended: &Ended,
        (op, outcome): (Op, Outcome),
        left: &[u8],
    ) {
        assert!(self.attentions[input.nexus].is_empty(), "a unit attention comes before any request");
        let sense = match (outcome, op) {
            (Outcome::Aborted, _) => (0xb, 0x00, 0x06),
            (Outcome::NoSpace, _) => (7, 0x27, 0x07),
            (Outcome::Failed(_), Op::Read) => (3, 0x11, 0),
            (Outcome::Failed(_), Op::Discard { .. }) => (4, 0x44, 0),
            (Outcome::Failed(_), _) => (3, 0x0c, 0),
            (other, _) => panic!("not one that is tried: {other:?}"),
        };
        let expected = Failure::Check((sense.0, sense.1, sense.2, None, None));
        assert_eq!(failure(ended), Some(expected), "the disk answered {outcome:?} to {op:?}");
        let act = self.expected_effect(input).expect("a request for a command with mistakes");
        let ranges = match act {
            Effect::Write { lba, data, .. } | Effect::Or { lba, data, .. } => {
                vec![(lba, (data.len() / self.limits.block) as u64)]
            }
            Effect::Compare { lba, data, .. } => vec![(lba, (data.len() / self.limits.block / 2) as u64)],
            Effect::Same { lba, count, .. } => vec![(lba, count)],
            Effect::Unmap { ranges, .. } => ranges,
            // The pages have changed, although the flush failed.
            Effect::Mode { write_through, protected, .. } => {
                (self.write_through, self.protected) = (write_through, protected);
                self.raise_others(input.nexus, (0x2a, 1));
                vec![]
            }
            Effect::Start(start) => {
                self.stopped = !start;
                vec![]
            }
            _ => vec![],
        };
        for (lba, count) in ranges {
            let range = self.range(lba, count);
            self.bytes[range.clone()].copy_from_slice(&left[range]);
        }
    }

    fn perform(&mut self, nexus: usize, act: Effect, found: Option<Failure>, ended: &Ended) -> Durable {
        let miscompare = |information| Some(Failure::Check((0xe, 0x1d, 0, None, Some(information))));
        let good = |transferred: u64, data: &[u8]| {
            assert_eq!(*ended, Ended::With(CommandCompletion::good(transferred), data.to_vec()), "expected success");
        };
        let write_through = self.write_through;
        let after = |durable: bool, lba, count| {
            if durable || write_through { Durable::Blocks(lba, count) } else { Durable::Unsaid }
        };
        let block = self.limits.block as u64;
        match act {
            Effect::Nothing { transferred } => good(transferred, &[]),
            Effect::Reply(reply) => good(reply.len() as u64, &reply),
            Effect::Read { lba, count } => good(count * block, &self.bytes[self.range(lba, count)]),
            Effect::Write { lba, data, durable } => {
                let count = data.len() as u64 / block;
                let range = self.range(lba, count);
                self.bytes[range].copy_from_slice(&data);
                good(data.len() as u64, &[]);
                return after(durable, lba, count);
            }
            Effect::Same { lba, count, pattern, transferred } => {
                let range = self.range(lba, count);
                self.bytes[range].chunks_mut(block as usize).for_each(|one| one.copy_from_slice(&pattern));
                good(transferred, &[]);
                return after(false, lba, count);
            }
            Effect::Or { lba, data, durable } => {
                let count = data.len() as u64 / block;
                let range = self.range(lba, count);
                self.bytes[range].iter_mut().zip(&data).for_each(|(held, sent)| *held |= sent);
                good(data.len() as u64, &[]);
                return after(durable, lba, count);
            }
            Effect::Compare { lba, data, durable } => {
                let (expected, new) = data.split_at(data.len() / 2);
                let count = new.len() as u64 / block;
                let range = self.range(lba, count);
                if let Some(at) = expected.iter().zip(&self.bytes[range.clone()]).position(|(sent, held)| sent != held)
                {
                    assert_eq!(found, miscompare(at as u64));
                    return Durable::Unsaid;
                }
                self.bytes[range].copy_from_slice(new);
                good(data.len() as u64, &[]);
                return after(durable, lba, count);
            }
            Effect::Verify { lba, count, data } => {
                let held = &self.bytes[self.range(lba, count)];
                let sent = data.chunks(block as usize).cycle();
                if !data.is_empty()
                    && let Some(at) = held.chunks(block as usize).zip(sent).position(|(held, sent)| held != sent)
                {
                    assert_eq!(found, miscompare(lba + at as u64));
                    return Durable::Unsaid;
                }
                good(data.len() as u64, &[]);
            }
            Effect::Unmap { ranges, transferred } => {
                let unmapped = if self.limits.zeroes { 0 } else { DISCARDED };
                for (lba, count) in &ranges {
                    let range = self.range(*lba, *count);
                    self.bytes[range].fill(unmapped);
                }
                good(transferred, &[]);
            }
            Effect::Sync => {
                good(0, &[]);
                return Durable::All;
            }
            Effect::Mode { write_through, protected, transferred } => {
                good(transferred, &[]);
                let through_now = write_through && !self.write_through;
                if (write_through, protected) != (self.write_through, self.protected) {
                    self.raise_others(nexus, (0x2a, 1));
                }
                (self.write_through, self.protected) = (write_through, protected);
                return if through_now { Durable::All } else { Durable::Unsaid };
            }
            Effect::Start(start) => {
                good(0, &[]);
                self.stopped = !start;
            }
            Effect::Reserve { release } => {
                good(0, &[]);
                self.reserve(nexus, release);
            }
            Effect::Persist { action, kind, key } => {
                good(24, &[]);
                self.persist(nexus, action, kind, key);
            }
        }
        Durable::Unsaid
    }

    fn reserve(&mut self, nexus: usize, release: bool) {
        if self.held.is_some() {
            return;
        }
        match release {
            true if self.reserved == Some(nexus) => self.reserved = None,
            true => {}
            false => self.reserved = Some(nexus),
        }
    }

    /// REGISTER AND IGNORE EXISTING KEY, RESERVE and RELEASE; other service actions have their own model.
    fn persist(&mut self, nexus: usize, action: u8, kind: u8, key: u64) {
        let ends = match action {
            6 => {
                self.keys[nexus] = key;
                key == 0 && self.held.is_some_and(|held| held.holder == nexus)
            }
            1 => {
                self.held = Some(Held { kind, holder: nexus });
                false
            }
            _ => self.held.is_some_and(|held| held.holder == nexus),
        };
        if ends {
            if self.held.is_some_and(|held| held.kind >= 5) {
                let told = (0..self.keys.len()).filter(|other| *other != nexus && self.keys[*other] != 0);
                told.collect::<Vec<_>>().into_iter().for_each(|other| self.raise(other, (0x2a, 4)));
            }
            self.held = None;
        }
    }
}

/// Class of a command under a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Always,
    Look,
    Read,
    Write,
}
