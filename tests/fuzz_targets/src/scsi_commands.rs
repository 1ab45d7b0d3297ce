//! SCSI commands, mostly valid, each on its own part of a disk.

use arbitrary::{Result, Unstructured};

use crate::scsi_unit::{ScsiUnit, cdb_len};

/// Bytes of a command's part of a disk.
pub(crate) const PART: usize = 8192;
/// Most commands of a batch.
pub(crate) const BATCH: usize = 4;
/// Bytes of a disk.
pub(crate) const DISK: usize = PART * BATCH;

/// Commands with an LBA and a length.
const EXTENTS: [u8; 24] = [
    0x08, 0x0a, 0x28, 0x2a, 0xa8, 0xaa, 0x88, 0x8a, 0x2e, 0xae, 0x8e, 0x2f, 0xaf, 0x8f, 0x89, 0x8b, 0x41, 0x93, 0x35,
    0x91, 0x28, 0x2a, 0x88, 0x8a,
];
const OTHERS: [u8; 26] = [
    0x00, 0x00, 0x03, 0x03, 0x12, 0x12, 0x12, 0x16, 0x17, 0x1a, 0x1e, 0x25, 0x37, 0x4d, 0x56, 0x57, 0x5a, 0x5e, 0x5e,
    0x5f, 0x9e, 0x9e, 0xa0, 0xa3, 0xb7, 0xff,
];

/// A command and its buffers.
#[derive(Debug)]
pub(crate) struct ScsiCommand {
    pub(crate) cdb: [u8; 16],
    pub(crate) data_in: usize,
    pub(crate) data_out: Vec<u8>,
}

fn put(cdb: &mut [u8], at: usize, len: usize, number: u64) {
    cdb[at..at + len].copy_from_slice(&number.to_be_bytes()[8 - len..]);
}

/// Returns bytes that repeat after 256, at times with few values, so that comparisons may succeed.
fn content(u: &mut Unstructured<'_>, len: usize) -> Result<Vec<u8>> {
    let (seed, step): (u8, u8) = (u.arbitrary()?, if u.ratio(1, 3)? { 0 } else { u.arbitrary()? });
    let seed = if u.ratio(1, 4)? { 0 } else { seed };
    Ok((0..len).map(|at| seed.wrapping_add(step.wrapping_mul(at as u8)) ^ (step & (at >> 8) as u8)).collect())
}

impl ScsiCommand {
    fn new(opcode: u8) -> ScsiCommand {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        ScsiCommand { cdb, data_in: 0, data_out: vec![] }
    }

    /// Returns a READ (16) of a whole part.
    pub(crate) fn read_part(unit: &ScsiUnit, part: usize) -> ScsiCommand {
        let mut command = ScsiCommand::new(0x88);
        put(&mut command.cdb, 2, 8, (part * PART / unit.block) as u64);
        put(&mut command.cdb, 10, 4, (PART / unit.block) as u64);
        command.data_in = PART;
        command
    }

    /// Returns any command. An `alone` one may also be damaged, or change state that others depend on.
    pub(crate) fn any(u: &mut Unstructured<'_>, unit: &ScsiUnit, part: usize, alone: bool) -> Result<ScsiCommand> {
        let mut command = match u.int_in_range(0..=19)? {
            0..=11 => on_blocks(u, unit, part)?,
            12 => unmap(u, unit, part)?,
            13 if alone => mode_select(u)?,
            13 | 14 => start_stop(u, unit)?,
            _ => other(u)?,
        };
        match u.int_in_range(0..=29)? {
            // NACA.
            0 => command.cdb[cdb_len(command.cdb[0]) - 1] |= 4,
            1 => command.data_in = command.data_in.saturating_sub(u.int_in_range(1..=600)?),
            2 if command.cdb[0] != 0x5f => {
                let len = command.data_out.len().saturating_sub(u.int_in_range(1..=600)?);
                command.data_out.truncate(len);
            }
            // Room for more than is transferred.
            3 | 4 if command.data_in > 0 => command.data_in += u.int_in_range(1..=600)?,
            5 | 6 if !command.data_out.is_empty() => command.data_out.extend(vec![0x55; u.int_in_range(1..=600)?]),
            // Data in both directions.
            7 => (command.data_in, command.data_out) = (command.data_in + 1, [&command.data_out[..], &[1]].concat()),
            8 | 9 if alone => {
                let bit = u.int_in_range(0..=127)?;
                command.cdb[bit / 8] ^= 1 << (bit % 8);
                if matches!(command.cdb[0], 0x15 | 0x55) {
                    command.cdb[bit / 8] ^= 1 << (bit % 8);
                }
            }
            _ => {}
        }
        Ok(command)
    }
}

/// Returns LBA and number of blocks, mostly inside the part.
fn place(u: &mut Unstructured<'_>, unit: &ScsiUnit, part: usize) -> Result<(u64, u64)> {
    let (per_part, blocks) = ((PART / unit.block) as u64, unit.blocks());
    let at = u.int_in_range(0..=per_part - 1)?;
    let count = u.int_in_range(1..=per_part - at)?;
    let lba = part as u64 * per_part + at;
    Ok(match u.int_in_range(0..=24)? {
        24 => (blocks - u.int_in_range(0..=count - 1)?, count),
        23 => (blocks + u.int_in_range(0..=1 << 40)?, count),
        22 => (u64::MAX - u.int_in_range(0..=20)?, count),
        21 => (lba, 0),
        20 => (lba, *u.choose(&[0x1_0000, 0xffff_ffff, unit.max_transfer() + 1, unit.max_same().saturating_add(1)])?),
        _ => (lba, count),
    })
}

fn on_blocks(u: &mut Unstructured<'_>, unit: &ScsiUnit, part: usize) -> Result<ScsiCommand> {
    let opcode = *u.choose(&EXTENTS)?;
    let (mut lba, mut count) = place(u, unit, part)?;
    let mut command = ScsiCommand::new(opcode);
    let (lba_at, lba_len, at, len) = match (opcode, cdb_len(opcode)) {
        (0x89, _) => (2, 8, 13, 1),
        (_, 6) => (1, 3, 4, 1),
        (_, 10) => (2, 4, 7, 2),
        (_, 12) => (2, 4, 6, 4),
        _ => (2, 8, 10, 4),
    };
    // A value that does not fit becomes the largest that does, which is out of range.
    lba = lba.min(if lba_len == 3 { 0x1f_ffff } else { u64::MAX >> (64 - lba_len * 8) });
    count = count.min((1 << (len * 8)) - 1);
    put(&mut command.cdb, lba_at, lba_len, lba);
    put(&mut command.cdb, at, len, count);
    if at == 4 && count == 0 {
        count = 256;
    }
    let bytes = (count as usize * unit.block).min(PART);
    let held = |u: &mut Unstructured<'_>, len: usize| -> Result<Vec<u8>> {
        let start = usize::try_from(lba).unwrap_or(usize::MAX).saturating_mul(unit.block);
        let mut bytes = start.checked_add(len).and_then(|end| unit.bytes.get(start..end)).unwrap_or_default().to_vec();
        bytes.resize(len, 0);
        if len > 0 && u.ratio(1, 3)? {
            bytes[u.int_in_range(0..=len - 1)?] ^= 0x10;
        }
        Ok(bytes)
    };
    match opcode {
        0x08 | 0x28 | 0xa8 | 0x88 => command.data_in = bytes,
        0x0a | 0x2a | 0xaa | 0x8a | 0x8b => command.data_out = content(u, bytes)?,
        0x2e | 0xae | 0x8e => {
            command.data_out = content(u, bytes)?;
            command.cdb[1] |= *u.choose(&[0, 0, 2, 2, 4, 6])?;
        }
        0x2f | 0xaf | 0x8f => {
            let check = *u.choose(&[0, 2, 2, 2, 6, 6, 4])?;
            command.cdb[1] |= check;
            command.data_out = held(u, if check == 2 { bytes } else { unit.block })?;
        }
        0x89 => {
            command.data_out = held(u, bytes)?;
            let new = content(u, bytes)?;
            command.data_out.extend(new);
        }
        0x41 | 0x93 => {
            command.data_out = content(u, unit.block)?;
            if opcode == 0x93 && u.ratio(1, 3)? {
                command.cdb[1] |= 1;
                command.data_out.clear();
            }
            command.cdb[1] |= *u.choose(&[0, 0, 0, 8, 8, 0x10, 2])?;
        }
        _ => {}
    }
    if at != 4 && u.ratio(1, 3)? {
        // DPO and FUA, or PROTECT.
        let read_or_write = !matches!(opcode, 0x2e | 0xae | 0x8e | 0x41 | 0x93);
        command.cdb[1] |= if u.ratio(1, 6)? {
            0x20
        } else if read_or_write {
            0x18
        } else {
            0
        };
    }
    Ok(command)
}

fn unmap(u: &mut Unstructured<'_>, unit: &ScsiUnit, part: usize) -> Result<ScsiCommand> {
    let mut command = ScsiCommand::new(0x42);
    let count = if u.ratio(1, 10)? { u.int_in_range(200..=260)? } else { u.int_in_range(0..=4)? };
    let mut list = vec![0; 8];
    for _ in 0..count {
        let (lba, blocks) = place(u, unit, part)?;
        list.extend(lba.to_be_bytes());
        list.extend((blocks as u32).to_be_bytes());
        list.extend([0; 4]);
    }
    let descriptors = count * 16 + if u.ratio(1, 12)? { u.int_in_range(0..=40)? } else { 0 };
    put(&mut list, 0, 2, descriptors + 6);
    put(&mut list, 2, 2, descriptors);
    let len = match u.int_in_range(0..=15)? {
        0 => u.int_in_range(0..=list.len() as u64)?,
        _ => list.len() as u64,
    };
    put(&mut command.cdb, 7, 2, len);
    command.cdb[1] = u8::from(u.ratio(1, 20)?);
    command.data_out = list;
    Ok(command)
}

/// MODE SELECT of the control mode page: D_SENSE and SWP.
fn mode_select(u: &mut Unstructured<'_>) -> Result<ScsiCommand> {
    let six: bool = u.arbitrary()?;
    let mut command = ScsiCommand::new(if six { 0x15 } else { 0x55 });
    let (descriptor, protected) = (u8::from(u.arbitrary::<bool>()?) << 2, u8::from(u.ratio(1, 4)?) << 3);
    let page = [0x0a, 0x0a, descriptor, 0x10, protected, 0, 0, 0, 0, 0, 0, 0];
    command.data_out = [&[0; 8][..if six { 4 } else { 8 }], &page].concat();
    let len = command.data_out.len() as u8;
    command.cdb[if six { 4 } else { 8 }] = if u.ratio(1, 10)? { 0 } else { len };
    command.cdb[1] = *u.choose(&[0x10, 0x10, 0x10, 0x10, 0x11, 0])?;
    Ok(command)
}

fn start_stop(u: &mut Unstructured<'_>, unit: &ScsiUnit) -> Result<ScsiCommand> {
    let mut command = ScsiCommand::new(0x1b);
    // A stopped logical unit fails most commands, so it is started soon.
    command.cdb[4] = if unit.stopped { 1 } else { *u.choose(&[0, 1, 1, 1, 4, 2, 0x10, 0xf3])? };
    Ok(command)
}

/// Commands without blocks, and unsupported ones.
fn other(u: &mut Unstructured<'_>) -> Result<ScsiCommand> {
    let mut command = ScsiCommand::new(*u.choose(&OTHERS)?);
    command.data_in = *u.choose(&[0, 8, 18, 32, 255, 1000])?;
    let allocation: u16 = if u.ratio(1, 4)? { u.int_in_range(0..=300)? } else { command.data_in as u16 };
    let cdb = &mut command.cdb;
    match cdb[0] {
        0x03 => (cdb[1], cdb[4]) = (u8::from(u.arbitrary::<bool>()?), allocation as u8),
        0x12 => {
            let vital: bool = u.arbitrary()?;
            cdb[1] = if u.ratio(1, 20)? { 2 } else { u8::from(vital) };
            cdb[2] = if vital { *u.choose(&[0, 0x80, 0x83, 0xb0, 0xb1, 0xb2, 0x84])? } else { 0 };
            put(cdb, 3, 2, allocation.into());
        }
        0x16 | 0x17 | 0x56 | 0x57 => cdb[1] = *u.choose(&[0, 0, 0, 1, 0x10])?,
        0x1a | 0x5a => {
            (cdb[1], cdb[2]) = (*u.choose(&[0, 8, 0x10])?, *u.choose(&[8, 0x0a, 0x3f, 0x4a, 0x88, 0xca, 1])?);
            (cdb[4], cdb[8]) = (allocation as u8, allocation as u8);
        }
        0x25 => (cdb[5], cdb[8]) = (u8::from(u.ratio(1, 6)?), u8::from(u.ratio(1, 6)?)),
        0x5e => (cdb[1], cdb[8]) = (u.int_in_range(0..=4)?, allocation as u8),
        0x5f => {
            (cdb[1], cdb[2], cdb[8]) = (u.int_in_range(0..=7)?, *u.choose(&[1, 3, 5, 6, 7, 8, 0, 2])?, 24);
            let mut list = vec![0; 24];
            (list[7], list[15], list[20]) = (u.int_in_range(0..=2)?, u.int_in_range(0..=2)?, u8::from(u.ratio(1, 9)?));
            command.data_out = list;
            command.data_in = 0;
        }
        0x9e => {
            cdb[1] = *u.choose(&[0x10, 0x10, 0x10, 0x12, 0x12, 0x13, 0])?;
            put(cdb, 10, 4, allocation.into());
        }
        0xa0 => {
            cdb[2] = *u.choose(&[0, 0, 0, 1, 2, 3])?;
            put(cdb, 6, 4, allocation.into());
        }
        0xa3 => {
            (cdb[1], cdb[2]) = (*u.choose(&[0x0c, 0x0c, 0x0d, 0x01])?, *u.choose(&[0, 1, 2, 3, 0x80, 0x83])?);
            cdb[3] = u.arbitrary()?;
            put(cdb, 6, 4, allocation.into());
        }
        0xff => cdb[0] = *u.choose(&[0x04, 0x07, 0x36, 0x3e, 0x50, 0x90, 0x9f, 0xc0, 0xff, 0x7f, 0x60, 0x29])?,
        _ => u.fill_buffer(&mut cdb[1..10])?,
    }
    Ok(command)
}
