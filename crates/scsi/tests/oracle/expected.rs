//! Errors that a command may have, and its effect if it has none. Sources: SBC-3 clause 5, SPC-4 clause 6.

use crate::model::{Class, CommandInput, Effect, Failure, Model, field, illegal, number};

/// Errors found.
struct Failures(Vec<Failure>);

impl Failures {
    fn when(&mut self, wrong: bool, failure: Failure) {
        if wrong {
            self.0.push(failure);
        }
    }
}

/// A command of 6, 10, 12 or 16 bytes with an LBA and a length.
struct Extent {
    lba: u64,
    count: u64,
    /// Offset of the length.
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
    let (mut lba, mut count) = (number(lba), number(count));
    if cdb[0] >> 5 == 0 {
        lba &= 0x1f_ffff;
        count = if count == 0 { 256 } else { count };
    }
    Extent { lba, count, at }
}

fn length(cdb: &[u8; 16]) -> usize {
    match cdb[0] >> 5 {
        0 => 6,
        1 | 2 => 10,
        5 => 12,
        _ => 16,
    }
}

impl Model {
    /// Returns the effect of the command, or the errors that it has.
    pub(crate) fn expected_effect(&self, input: &CommandInput<'_>) -> Result<Effect, Vec<Failure>> {
        let mut cdb = [0; 16];
        let given = input.cdb.len().min(16);
        cdb[..given].copy_from_slice(&input.cdb[..given]);
        let mut found = Failures(Vec::new());
        let control = length(&cdb) - 1;
        found.when(cdb[control] & 0x04 != 0, field(control as u16, Some(2)));
        let act = match cdb[0] {
            0x08 | 0x28 | 0xa8 | 0x88 => self.read(input, &cdb, &mut found),
            0x0a | 0x2a | 0xaa | 0x8a => self.write(input, &cdb, &mut found),
            0x2e | 0xae | 0x8e => self.write_and_verify(input, &cdb, &mut found),
            0x2f | 0xaf | 0x8f => self.verify(input, &cdb, &mut found),
            0x89 => self.compare_and_write(input, &cdb, &mut found),
            0x8b => self.orwrite(input, &cdb, &mut found),
            0x41 | 0x93 => self.write_same(input, &cdb, &mut found),
            0x42 => self.unmap(input, &cdb, &mut found),
            0x35 | 0x91 => {
                self.medium(input, Class::Write, false, &mut found);
                self.in_range(&extent(&cdb), u64::MAX, &mut found);
                Some(Effect::Sync)
            }
            0x00 => {
                self.medium(input, Class::Look, false, &mut found);
                Some(Effect::Nothing { transferred: 0 })
            }
            0x25 => self.read_capacity(input, &cdb, &mut found),
            0x9e if cdb[1] & 0x1f == 0x10 => self.read_capacity(input, &cdb, &mut found),
            0x9e if cdb[1] & 0x1f == 0x12 => self.lba_status(input, &cdb, &mut found),
            0x9e => {
                found.0.push(field(1, Some(4)));
                None
            }
            0x15 | 0x55 => self.mode_select(input, &cdb, &mut found),
            0x1b => self.start_stop(input, &cdb, &mut found),
            0x16 | 0x17 | 0x56 | 0x57 => self.reserve_release(input, &cdb, &mut found),
            0x5f => self.persistent(input, &cdb, &mut found),
            _ => {
                found.0 = vec![illegal(0x20)];
                None
            }
        };
        match act {
            Some(act) if found.0.is_empty() => Ok(act),
            _ => Err(found.0),
        }
    }

    /// Checks that all commands with medium access share.
    fn medium(&self, input: &CommandInput<'_>, class: Class, writes: bool, found: &mut Failures) {
        found.when(self.barred(input.nexus, class), Failure::Conflict);
        found.when(self.stopped, Failure::Check((2, 4, 2, None, None)));
        found.when(writes && self.read_only, Failure::Check((7, 0x27, 0, None, None)));
        found.when(writes && self.protected, Failure::Check((7, 0x27, 2, None, None)));
    }

    /// Returns true if the blocks exist, and are not more than `most`.
    fn in_range(&self, extent: &Extent, most: u64, found: &mut Failures) -> bool {
        let before = found.0.len();
        found.when(extent.count > most, field(extent.at, None));
        let end = extent.lba.checked_add(extent.count);
        found.when(end.is_none_or(|end| end > self.blocks()), illegal(0x21));
        found.0.len() == before
    }

    /// Returns the first `count` blocks of the data-out buffer.
    fn sent(&self, input: &CommandInput<'_>, count: u64, found: &mut Failures) -> Vec<u8> {
        let sent =
            usize::try_from(count).ok().and_then(|count| input.data_out.get(..count.checked_mul(self.limits.block)?));
        found.when(sent.is_none(), Failure::Overrun);
        sent.unwrap_or_default().to_vec()
    }

    fn protection(&self, cdb: &[u8; 16], found: &mut Failures) {
        found.when(length(cdb) > 6 && cdb[1] & 0xe0 != 0, field(1, Some(7)));
    }

    fn read(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let extent = extent(cdb);
        self.medium(input, Class::Read, false, found);
        self.protection(cdb, found);
        if self.in_range(&extent, self.limits.transfer, found) {
            found.when((input.data_in as u64) < extent.count * self.limits.block as u64, Failure::Overrun);
        }
        Some(Effect::Read { lba: extent.lba, count: extent.count })
    }

    fn write(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let extent = extent(cdb);
        self.medium(input, Class::Write, true, found);
        self.protection(cdb, found);
        if !self.in_range(&extent, self.limits.transfer, found) {
            return None;
        }
        let data = self.sent(input, extent.count, found);
        Some(Effect::Write { lba: extent.lba, data, durable: length(cdb) > 6 && cdb[1] & 0x08 != 0 })
    }

    fn write_and_verify(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let extent = extent(cdb);
        self.medium(input, Class::Write, true, found);
        self.protection(cdb, found);
        found.when(cdb[1] & 0x04 != 0, field(1, Some(2)));
        if !self.in_range(&extent, self.limits.transfer, found) {
            return None;
        }
        let data = self.sent(input, extent.count, found);
        Some(Effect::Write { lba: extent.lba, data, durable: true })
    }

    fn verify(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let extent = extent(cdb);
        self.medium(input, Class::Read, false, found);
        self.protection(cdb, found);
        let check = (cdb[1] & 0x06) >> 1;
        found.when(check == 2, field(1, Some(2)));
        if !self.in_range(&extent, self.limits.transfer, found) {
            return None;
        }
        let data = match check {
            // Nothing to compare.
            _ if extent.count == 0 => Vec::new(),
            1 => self.sent(input, extent.count, found),
            3 => self.sent(input, 1, found),
            _ => Vec::new(),
        };
        Some(Effect::Verify { lba: extent.lba, count: extent.count, data })
    }

    fn compare_and_write(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let extent = extent(cdb);
        self.medium(input, Class::Write, true, found);
        self.protection(cdb, found);
        if !self.in_range(&extent, self.limits.compare, found) {
            return None;
        }
        let data = self.sent(input, 2 * extent.count, found);
        Some(Effect::Compare { lba: extent.lba, data, durable: cdb[1] & 0x08 != 0 })
    }

    fn orwrite(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let extent = extent(cdb);
        self.medium(input, Class::Write, true, found);
        self.protection(cdb, found);
        if !self.in_range(&extent, self.limits.transfer, found) {
            return None;
        }
        let data = self.sent(input, extent.count, found);
        Some(Effect::Or { lba: extent.lba, data, durable: cdb[1] & 0x08 != 0 })
    }

    fn write_same(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let Extent { lba, count, at } = extent(cdb);
        self.medium(input, Class::Write, true, found);
        self.protection(cdb, found);
        found.when(cdb[1] & 0x10 != 0, field(1, Some(4)));
        found.when(cdb[1] & 0x06 != 0, field(1, Some(2)));
        found.when(cdb[1] & 0x08 != 0 && !self.limits.zeroes, field(1, Some(3)));
        // WSNZ: zero blocks do not mean all.
        found.when(count == 0, field(at, None));
        let there = self.in_range(&Extent { lba, count, at }, self.limits.same, found);
        let no_data = cdb[0] == 0x93 && cdb[1] & 0x01 != 0;
        let pattern = if no_data { vec![0; self.limits.block] } else { self.sent(input, 1, found) };
        let transferred = if no_data { 0 } else { self.limits.block as u64 };
        there.then_some(Effect::Same { lba, count, pattern, transferred })
    }

    fn unmap(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        if !self.limits.unmaps {
            found.0.push(illegal(0x20));
        }
        self.medium(input, Class::Write, true, found);
        found.when(cdb[1] & 0x01 != 0, field(1, Some(0)));
        let len = number(&cdb[7..9]) as usize;
        if len == 0 {
            return Some(Effect::Nothing { transferred: 0 });
        }
        let wrong_length = Failure::Check((5, 0x1a, 0, Some((true, 7, None)), None));
        found.when(len < 8, wrong_length.clone());
        found.when(len > input.data_out.len(), Failure::Overrun);
        if !found.0.is_empty() {
            return None;
        }
        let list = &input.data_out[..len];
        let (data, descriptors) = (number(&list[..2]) as usize, number(&list[2..4]) as usize);
        found.when(data + 2 > len || descriptors + 8 > len, wrong_length);
        let count = descriptors / 16;
        found.when(count as u64 > self.limits.descriptors, Failure::Check((5, 0x26, 0, Some((false, 2, None)), None)));
        if !found.0.is_empty() {
            return None;
        }
        let mut ranges = Vec::new();
        let mut total = 0;
        for (at, one) in (8u16..).step_by(16).zip(list[8..].chunks_exact(16).take(count)) {
            let range = Extent { lba: number(&one[..8]), count: number(&one[8..12]), at: 0 };
            if range.count > 0 {
                total += range.count;
                found.when(total > self.limits.unmap, Failure::Check((5, 0x26, 0, Some((false, at + 8, None)), None)));
                self.in_range(&range, u64::MAX, found);
                ranges.push((range.lba, range.count));
            }
        }
        Some(Effect::Unmap { ranges, transferred: len as u64 })
    }

    fn read_capacity(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        // A stopped logical unit still reports its size.
        found.when(self.barred(input.nexus, Class::Always), Failure::Conflict);
        let last = self.blocks() - 1;
        let block = (self.limits.block as u32).to_be_bytes();
        let mut reply = Vec::new();
        let allocation = if cdb[0] == 0x25 {
            found.when(cdb[8] & 1 == 0 && number(&cdb[2..6]) != 0, field(2, None));
            reply.extend(u32::try_from(last).unwrap_or(u32::MAX).to_be_bytes());
            reply.extend(block);
            8
        } else {
            reply.extend(last.to_be_bytes());
            reply.extend(block);
            reply.extend([
                0,
                self.limits.exponent,
                u8::from(self.limits.unmaps) << 7 | u8::from(self.limits.zeroes) << 6,
                0,
            ]);
            reply.resize(32, 0);
            number(&cdb[10..14]) as usize
        };
        reply.truncate(allocation);
        found.when(reply.len() > input.data_in, Failure::Overrun);
        Some(Effect::Reply(reply))
    }

    /// All blocks from the LBA on are mapped.
    fn lba_status(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let lba = number(&cdb[2..10]);
        self.medium(input, Class::Read, false, found);
        found.when(lba >= self.blocks(), illegal(0x21));
        let mut reply = vec![0, 0, 0, 20, 0, 0, 0, 0];
        reply.extend(lba.to_be_bytes());
        reply.extend((self.blocks().saturating_sub(lba) as u32).to_be_bytes());
        reply.extend([0; 4]);
        reply.truncate(number(&cdb[10..14]) as usize);
        found.when(reply.len() > input.data_in, Failure::Overrun);
        Some(Effect::Reply(reply))
    }

    /// Only lists with one caching or control page, or none, without block descriptor: table tests cover others.
    fn mode_select(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        found.when(self.barred(input.nexus, Class::Write), Failure::Conflict);
        found.when(cdb[1] & 0x01 != 0, field(1, Some(0)));
        found.when(cdb[1] & 0x10 == 0, field(1, Some(4)));
        let (len, header, at) =
            if cdb[0] == 0x15 { (cdb[4].into(), 4, 4) } else { (number(&cdb[7..9]) as usize, 8, 7) };
        let unchanged =
            Effect::Mode { write_through: self.write_through, protected: self.protected, transferred: len as u64 };
        if len == 0 {
            return Some(unchanged);
        }
        found.when(len > input.data_out.len(), Failure::Overrun);
        let wrong_length = Failure::Check((5, 0x1a, 0, Some((true, at, None)), None));
        found.when(len < header, wrong_length.clone());
        if !found.0.is_empty() || len == header {
            return Some(unchanged);
        }
        let page = &input.data_out[header..len];
        let whole = if page[0] == 0x08 { 20 } else { 12 };
        found.when(page.len() < whole, wrong_length);
        let wrong = |byte: usize, bit| Failure::Check((5, 0x26, 0, Some((false, (header + byte) as u16, bit)), None));
        found.when(page.len() > 1 && usize::from(page[1]) != whole - 2, wrong(1, None));
        if !found.0.is_empty() {
            return None;
        }
        let (mut write_through, mut protected) = (self.write_through, self.protected);
        if page[0] == 0x08 {
            found.when(page[2] & 0x01 != 0, wrong(2, Some(0)));
            write_through = page[2] & 0x04 == 0;
        } else {
            protected = page[4] & 0x08 != 0;
        }
        Some(Effect::Mode { write_through, protected, transferred: len as u64 })
    }

    fn start_stop(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        let start = cdb[4] & 0x01 != 0;
        let class = if start && cdb[4] & 0xf0 == 0 { Class::Always } else { Class::Write };
        found.when(self.barred(input.nexus, class), Failure::Conflict);
        found.when(cdb[4] & 0xf0 != 0, field(4, Some(7)));
        found.when(cdb[4] & 0x02 != 0, field(4, Some(1)));
        Some(Effect::Start(start))
    }

    fn reserve_release(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        found.when(cdb[1] & 0x10 != 0, field(1, Some(4)));
        found.when(cdb[1] & 0x01 != 0, field(1, Some(0)));
        found.when(cdb[0] >= 0x56 && cdb[1] & 0x02 != 0, field(1, Some(1)));
        let release = cdb[0] & 1 != 0;
        let fine =
            self.held.is_some_and(|held| held.holder == input.nexus || held.kind >= 5 && self.keys[input.nexus] != 0);
        let registered = self.keys.iter().any(|key| *key != 0);
        found.when(registered && !fine, Failure::Conflict);
        let another = self.reserved.is_some_and(|holder| holder != input.nexus);
        found.when(!registered && !release && another, Failure::Conflict);
        Some(Effect::Reserve { release })
    }

    /// REGISTER AND IGNORE EXISTING KEY, RESERVE, RELEASE, with a list of 24 bytes.
    fn persistent(&self, input: &CommandInput<'_>, cdb: &[u8; 16], found: &mut Failures) -> Option<Effect> {
        found.when(self.reserved.is_some(), Failure::Conflict);
        let (action, kind) = (cdb[1] & 0x1f, cdb[2]);
        let (presented, key) = (number(&input.data_out[..8]), number(&input.data_out[8..16]));
        // A truncated command.
        found.when(number(&cdb[5..9]) != 24, illegal(0x1a));
        found.when(action == 1 && kind == 0, field(2, Some(3)));
        let own = self.keys[input.nexus];
        if action != 6 {
            found.when(own == 0 || own != presented, Failure::Conflict);
        }
        let mine = self.held.filter(|held| held.holder == input.nexus);
        match action {
            1 => found.when(self.held.is_some() && mine.is_none_or(|held| held.kind != kind), Failure::Conflict),
            2 => found.when(mine.is_some_and(|held| held.kind != kind), Failure::Check((5, 0x26, 4, None, None))),
            _ => {}
        }
        Some(Effect::Persist { action, kind, key })
    }
}
