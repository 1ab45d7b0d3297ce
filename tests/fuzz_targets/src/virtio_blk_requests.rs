//! Requests of virtio-blk, mostly valid, and the expected outcome of each. Source: virtio 1.3 section 5.2.6.

use arbitrary::{Result, Unstructured};

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Sectors of a request's part of the disk.
pub(crate) const PART: u64 = 32;
/// Most requests of a batch.
pub(crate) const BATCH: usize = 4;
/// Sectors of the disk.
pub(crate) const SECTORS: u64 = PART * BATCH as u64;
/// Serial of the disk.
pub(crate) const SERIAL: &str = "fuzzed";

/// Request types and status values. Source: virtio 1.3 section 5.2.6.
pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;
pub(crate) const UNSUPP: u8 = 2;

/// The properties of the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskRules {
    /// Sectors of a block.
    pub(crate) block: u64,
    pub(crate) read_only: bool,
}

impl DiskRules {
    /// Returns true if `len` bytes from `sector` on are whole blocks of the disk.
    fn allow(self, sector: u64, len: usize) -> bool {
        let block = self.block * SECTOR as u64;
        let end = u128::from(sector) * SECTOR as u128 + len as u128;
        end <= u128::from(SECTORS) * SECTOR as u128
            && sector.is_multiple_of(self.block)
            && (len as u64).is_multiple_of(block)
    }
}

/// A request and its expected effects.
#[derive(Default)]
pub(crate) struct BlkRequest {
    /// Header and data that the device reads.
    pub(crate) readable: Vec<u8>,
    /// Bytes that the device may write before the status byte.
    pub(crate) room: usize,
    pub(crate) status: u8,
    pub(crate) used: u32,
    /// Data that the device writes from the start of the room.
    pub(crate) found: Vec<u8>,
    /// The change of the disk: byte offset and new content.
    pub(crate) stored: Vec<(usize, Vec<u8>)>,
}

impl BlkRequest {
    fn new(kind: u32, sector: u64, data: &[u8]) -> BlkRequest {
        let readable = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes(), data].concat();
        BlkRequest { readable, status: OK, used: 1, ..BlkRequest::default() }
    }

    /// Describes it for a message: header, and bytes in each direction.
    pub(crate) fn describe(&self) -> String {
        let header = &self.readable[..self.readable.len().min(16)];
        format!("header {header:?}, {} bytes out, {} in, status {}", self.readable.len(), self.room, self.status)
    }

    /// Makes it fail: only the status is written.
    pub(crate) fn fail(self, status: u8) -> BlkRequest {
        BlkRequest { status, used: 1, found: vec![], stored: vec![], ..self }
    }

    /// Makes it fail because of unmapped memory, or without a status byte.
    pub(crate) fn fail_unmapped(self) -> BlkRequest {
        self.fail(IOERR)
    }

    /// Returns a read of a request's whole part.
    pub(crate) fn read_part(model: &[u8], part: usize) -> BlkRequest {
        let (first, len) = (part as u64 * PART, PART as usize * SECTOR);
        let found = model[first as usize * SECTOR..][..len].to_vec();
        BlkRequest { room: len, used: len as u32 + 1, found, ..BlkRequest::new(IN, first, &[]) }
    }

    /// Returns any request in its own part of the disk.
    pub(crate) fn any(u: &mut Unstructured<'_>, rules: DiskRules, model: &[u8], part: usize) -> Result<BlkRequest> {
        let kind = match u.int_in_range(0..=15)? {
            0..=4 => IN,
            5..=8 => OUT,
            9 => FLUSH,
            10 => GET_ID,
            11 | 12 => DISCARD,
            13 | 14 => WRITE_ZEROES,
            _ => *u.choose(&[2, 3, 5, 14, 77, u32::MAX])?,
        };
        let request = match kind {
            IN | OUT => transfer(u, rules, model, kind, part)?,
            DISCARD | WRITE_ZEROES => ranges(u, rules, kind, part)?,
            GET_ID => get_id(u)?,
            FLUSH => BlkRequest::new(kind, 0, &[]),
            _ => BlkRequest::new(kind, 0, &[]).fail(UNSUPP),
        };
        // A truncated header.
        if u.ratio(1, 40)? {
            let mut request = request.fail(IOERR);
            request.readable.truncate(u.int_in_range(0..=15)?);
            return Ok(request);
        }
        Ok(request)
    }
}

fn get_id(u: &mut Unstructured<'_>) -> Result<BlkRequest> {
    let room = u.int_in_range(0..=40)?;
    let mut id = SERIAL.as_bytes().to_vec();
    id.resize(20, 0);
    id.truncate(room);
    Ok(BlkRequest { room, used: id.len() as u32 + 1, found: id, ..BlkRequest::new(GET_ID, 0, &[]) })
}

/// Returns a range: mostly inside the part, else out of range or misaligned.
fn place(u: &mut Unstructured<'_>, rules: DiskRules, part: usize) -> Result<(u64, usize)> {
    let blocks = PART / rules.block;
    let at = u.int_in_range(0..=blocks - 1)?;
    let count = u.int_in_range(1..=blocks - at)?;
    let (sector, len) = (part as u64 * PART + at * rules.block, (count * rules.block) as usize * SECTOR);
    Ok(match u.int_in_range(0..=23)? {
        23 => (SECTORS - u.int_in_range(0..=count * rules.block - 1)?, len),
        22 => (SECTORS + u.int_in_range(0..=1 << 40)?, len),
        21 => (u64::MAX - u.int_in_range(0..=100)?, len),
        20 => ((1 << 55) + sector, len),
        19 => (sector, len - u.int_in_range(1..=511)?),
        18 => (sector + u.int_in_range(0..=rules.block - 1)?, len),
        17 => (sector, 0),
        _ => (sector, len),
    })
}

/// Returns the byte offset of a sector that is on the disk.
fn offset(sector: u64) -> usize {
    sector as usize * SECTOR
}

fn transfer(u: &mut Unstructured<'_>, rules: DiskRules, model: &[u8], kind: u32, part: usize) -> Result<BlkRequest> {
    let (sector, len) = place(u, rules, part)?;
    let wrong_way = if u.ratio(1, 40)? { u.int_in_range(1..=600)? } else { 0 };
    let good = rules.allow(sector, len) && wrong_way == 0 && (kind == IN || !rules.read_only);
    if kind == IN {
        let request = BlkRequest { room: len, ..BlkRequest::new(kind, sector, &vec![1; wrong_way]) };
        if !good {
            return Ok(request.fail(IOERR));
        }
        return Ok(BlkRequest { used: len as u32 + 1, found: model[offset(sector)..][..len].to_vec(), ..request });
    }
    let (seed, step): (u8, u8) = (u.arbitrary()?, u.arbitrary()?);
    let data: Vec<u8> = (0..len).map(|at| seed.wrapping_add(step.wrapping_mul(at as u8)) ^ (at >> 8) as u8).collect();
    let request = BlkRequest { room: wrong_way, ..BlkRequest::new(kind, sector, &data) };
    if !good {
        return Ok(request.fail(IOERR));
    }
    Ok(BlkRequest { stored: vec![(offset(sector), data)], used: 1, ..request })
}

fn ranges(u: &mut Unstructured<'_>, rules: DiskRules, kind: u32, part: usize) -> Result<BlkRequest> {
    let mut list = vec![];
    let mut stored = vec![];
    // The first fault in the list decides.
    let mut fault = None;
    let most = if u.ratio(1, 20)? { 70 } else { 4 };
    for _ in 0..u.int_in_range(0..=most)? {
        let (sector, len) = place(u, rules, part)?;
        let sectors = (len / SECTOR) as u32;
        let flags: u32 = match u.int_in_range(0..=11)? {
            11 => 2,
            9 | 10 => 1,
            _ => 0,
        };
        list.extend([&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat());
        if fault.is_none() {
            let known = flags == 0 || (flags == 1 && kind == WRITE_ZEROES);
            if !known {
                fault = Some(UNSUPP);
            } else if !rules.allow(sector, sectors as usize * SECTOR) {
                fault = Some(IOERR);
            } else {
                stored.push((offset(sector), vec![0; sectors as usize * SECTOR]));
            }
        }
    }
    if u.ratio(1, 40)? {
        list.push(0);
    }
    let shaped = list.len().is_multiple_of(16) && (1..=64).contains(&(list.len() / 16));
    let request = BlkRequest::new(kind, 0, &list);
    Ok(match (rules.read_only, shaped, fault) {
        (true, ..) => request.fail(UNSUPP),
        (_, false, _) => request.fail(IOERR),
        (_, _, Some(status)) => request.fail(status),
        _ => BlkRequest { stored, ..request },
    })
}
