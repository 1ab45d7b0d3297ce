//! Expected answers of a SCSI logical unit to commands that access its medium, and to MODE SELECT. Source: SBC-3 clause
//! 5, by the names of the commands.

use crate::scsi_unit::{Answer, Answers, ExpectedSense, ScsiInput, ScsiUnit, check, field, number, when};

/// Blocks that a command addresses, and the offset of their number in the CDB.
struct Extent {
    lba: u64,
    count: u64,
    at: u16,
}

fn extent(cdb: &[u8; 16]) -> Extent {
    let (lba, count, at) = match (cdb[0], cdb[0] >> 5) {
        (0x89, _) => (&cdb[2..10], &cdb[13..14], 13),
        (_, 0) => (&cdb[1..4], &cdb[4..5], 4),
        (_, 1 | 2) => (&cdb[2..6], &cdb[7..9], 7),
        (_, 5) => (&cdb[2..6], &cdb[6..10], 6),
        _ => (&cdb[2..10], &cdb[10..14], 10),
    };
    match (number(lba), number(count)) {
        (lba, 0) if at == 4 => Extent { lba: lba & 0x1f_ffff, count: 256, at },
        (lba, count) if at == 4 => Extent { lba: lba & 0x1f_ffff, count, at },
        (lba, count) => Extent { lba, count, at },
    }
}

fn good(transferred: usize) -> Answer {
    Answer::Good { data: vec![], transferred: transferred as u64 }
}

fn miscompare(information: u64) -> Answer {
    Answer::Check(ExpectedSense { code: (0xe, 0x1d, 0), field: None, information: Some(information) })
}

/// PARAMETER LIST LENGTH ERROR, in the field at `byte` of the CDB.
fn list_length(byte: u16) -> Answer {
    Answer::Check(ExpectedSense { code: (5, 0x1a, 0), field: Some((true, byte, None)), information: None })
}

/// INVALID FIELD IN PARAMETER LIST.
fn list_field(byte: usize) -> Answer {
    Answer::Check(ExpectedSense { code: (5, 0x26, 0), field: Some((false, byte as u16, None)), information: None })
}

impl ScsiUnit {
    /// Executes a command. Answer and stored data count only without faults.
    pub(crate) fn medium_command(
        &mut self,
        input: &ScsiInput<'_>,
        faults: &mut Answers,
        stored: &mut Vec<(usize, Vec<u8>)>,
    ) -> Answer {
        let cdb = &input.cdb;
        let opcode = cdb[0];
        if matches!(opcode, 0x15 | 0x55) {
            return self.mode_select(input, faults);
        }
        when(faults, self.stopped, check((2, 4, 2)));
        if !matches!(opcode, 0x08 | 0x28 | 0xa8 | 0x88 | 0x2f | 0xaf | 0x8f | 0x35 | 0x91) {
            when(faults, self.read_only, check((7, 0x27, 0)));
            when(faults, self.protected, check((7, 0x27, 2)));
        }
        if opcode == 0x42 {
            return self.unmap(input, faults, stored);
        }
        let Extent { lba, count, at } = extent(cdb);
        let most = match opcode {
            0x89 => self.max_compare(),
            0x41 | 0x93 => self.max_same(),
            0x35 | 0x91 => u64::MAX,
            _ => self.max_transfer(),
        };
        when(faults, count > most || (count == 0 && matches!(opcode, 0x41 | 0x93)), field(at, None));
        when(faults, at != 4 && !matches!(opcode, 0x35 | 0x91) && cdb[1] & 0xe0 != 0, field(1, Some(7)));
        let end = lba.checked_add(count);
        when(faults, end.is_none_or(|end| end > self.blocks()), check((5, 0x21, 0)));
        let check_bytes = (cdb[1] >> 1) & 3;
        match opcode {
            0x2f | 0xaf | 0x8f => when(faults, check_bytes == 2, field(1, Some(2))),
            0x2e | 0xae | 0x8e => when(faults, check_bytes > 1, field(1, Some(2))),
            0x41 | 0x93 => {
                when(faults, cdb[1] & if opcode == 0x41 { 7 } else { 6 } != 0, field(1, Some(2)));
                when(faults, cdb[1] & 0x10 != 0, field(1, Some(4)));
                when(faults, cdb[1] & 8 != 0 && !self.unmapped_is_zero(), field(1, Some(3)));
            }
            _ => {}
        }
        if !faults.is_empty() {
            // An overrun is an additional error, if the length counts.
            return Answer::Any;
        }
        let (start, len) = (lba as usize * self.block, count as usize * self.block);
        let wanted_out = match opcode {
            0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e | 0x8b => len,
            0x89 => 2 * len,
            0x2f | 0xaf | 0x8f if count > 0 => [0, len, 0, self.block][usize::from(check_bytes)],
            0x41 => self.block,
            0x93 if cdb[1] & 1 == 0 => self.block,
            _ => 0,
        };
        let wanted_in = if matches!(opcode, 0x08 | 0x28 | 0xa8 | 0x88) { len } else { 0 };
        let Some(sent) = input.data_out.get(..wanted_out).filter(|_| wanted_in <= input.data_in) else {
            return Answer::Overrun;
        };
        self.transfer(opcode, (start, len), sent, stored)
    }

    /// Executes a command without a fault.
    fn transfer(
        &self,
        opcode: u8,
        (start, len): (usize, usize),
        sent: &[u8],
        stored: &mut Vec<(usize, Vec<u8>)>,
    ) -> Answer {
        let held = &self.bytes[start..start + len];
        let done = good(sent.len());
        match opcode {
            0x08 | 0x28 | 0xa8 | 0x88 => return Answer::Good { data: held.to_vec(), transferred: len as u64 },
            0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e => stored.push((start, sent.to_vec())),
            0x8b => stored.push((start, held.iter().zip(sent).map(|(held, sent)| held | sent).collect())),
            0x89 => {
                let (expected, new) = sent.split_at(len);
                if let Some(at) = held.iter().zip(expected).position(|(held, expected)| held != expected) {
                    return miscompare(at as u64);
                }
                stored.push((start, new.to_vec()));
            }
            0x41 | 0x93 => {
                let pattern = if sent.is_empty() { vec![0; self.block] } else { sent.to_vec() };
                stored.push((start, pattern.repeat(len / self.block)));
            }
            0x2f | 0xaf | 0x8f if !sent.is_empty() => {
                let pairs = held.chunks(self.block).zip(sent.chunks(self.block).cycle());
                if let Some(at) = pairs.into_iter().position(|(held, sent)| held != sent) {
                    return miscompare((start / self.block + at) as u64);
                }
            }
            _ => {}
        }
        done
    }

    fn unmap(&self, input: &ScsiInput<'_>, faults: &mut Answers, stored: &mut Vec<(usize, Vec<u8>)>) -> Answer {
        let list_len = number(&input.cdb[7..9]) as usize;
        when(faults, input.cdb[1] & 1 != 0, field(1, Some(0)));
        if list_len == 0 {
            return good(0);
        }
        if list_len < 8 {
            faults.push(list_length(7));
        }
        let Some(list) = input.data_out.get(..list_len).filter(|list| list.len() >= 8) else {
            return Answer::Overrun;
        };
        let (data_len, descriptors_len) = (number(&list[..2]) as usize, number(&list[2..4]) as usize);
        if data_len + 2 > list_len || descriptors_len + 8 > list_len {
            faults.push(list_length(7));
            return Answer::Any;
        }
        let (most, most_descriptors) = self.max_unmap();
        when(faults, (descriptors_len / 16) as u64 > most_descriptors, list_field(2));
        let mut total = 0;
        for (index, descriptor) in list[8..8 + descriptors_len].chunks_exact(16).enumerate() {
            let (lba, count) = (number(&descriptor[..8]), number(&descriptor[8..12]));
            total += count;
            when(faults, total > most, list_field(16 + index * 16));
            let inside = lba.checked_add(count).is_some_and(|end| end <= self.blocks());
            when(faults, count > 0 && !inside, check((5, 0x21, 0)));
            if count > 0 && inside {
                stored.push((lba as usize * self.block, vec![0; count as usize * self.block]));
            }
        }
        good(list_len)
    }

    /// MODE SELECT of the control mode page, in a valid list. Source: SPC-4 section 7.5.8.
    fn mode_select(&mut self, input: &ScsiInput<'_>, faults: &mut Answers) -> Answer {
        let cdb = &input.cdb;
        let (list_len, header) = if cdb[0] == 0x15 { (number(&cdb[4..5]), 4) } else { (number(&cdb[7..9]), 8) };
        when(faults, cdb[1] & 0x01 != 0, field(1, Some(0)));
        when(faults, cdb[1] & 0x10 == 0, field(1, Some(4)));
        if list_len == 0 {
            return good(0);
        }
        let Some(list) = input.data_out.get(..list_len as usize) else { return Answer::Overrun };
        if faults.is_empty() {
            self.descriptor_sense = list[header + 2] & 4 != 0;
            self.protected = list[header + 4] & 8 != 0;
        }
        good(list.len())
    }
}
