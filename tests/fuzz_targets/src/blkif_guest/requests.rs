//! Requests of Xen's block protocol, mostly valid, and the expected outcome of each. Source: Xen's `public/io/blkif.h`,
//! with its own copy of the offsets.

use arbitrary::{Result, Unstructured};
use mqblk_ring::blkif::Abi;

use crate::blkif_guest::{BlkifMemory, Grant, GrantAbility, MAP_ONLY, PAGES, READ_ONLY, TABLES, UNMAPPABLE};

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Sectors of a request's part of the disk: more than an indirect page has segments.
pub(crate) const PART: u64 = 528;
/// Most requests with data in a batch.
pub(crate) const BATCH: usize = 4;
/// Sectors of the disk.
pub(crate) const SECTORS: u64 = PART * BATCH as u64;
/// Segments of a ring entry.
const DIRECT: usize = 11;

const READ: u8 = 0;
const WRITE: u8 = 1;
const BARRIER: u8 = 2;
const FLUSH: u8 = 3;
const DISCARD: u8 = 5;
const INDIRECT: u8 = 6;

const OKAY: i16 = 0;
const ERROR: i16 = -1;
const UNSUPPORTED: i16 = -2;

/// The way in which pages are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageAccess {
    Copy,
    Map,
    Persistent,
    PersistentBounce,
}

/// The properties of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceRules {
    pub(crate) abi: Abi,
    /// Sectors of a block.
    pub(crate) block: u64,
    pub(crate) read_only: bool,
    pub(crate) max_indirect: u16,
    pub(crate) barrier: bool,
    pub(crate) flush: bool,
    pub(crate) discard: bool,
    pub(crate) access: PageAccess,
    /// No limit of mapped pages is ever reached.
    pub(crate) maps_enough: bool,
    /// Usable sectors.
    pub(crate) size: u64,
}

impl DeviceRules {
    /// Returns true if `sectors` sectors from `sector` on are whole blocks of the disk.
    fn allow(&self, sector: u64, sectors: u64) -> bool {
        u128::from(sector) + u128::from(sectors) <= u128::from(self.size)
            && sector.is_multiple_of(self.block)
            && sectors.is_multiple_of(self.block)
    }
}

/// Sectors of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestSegment {
    pub(crate) grant: Grant,
    pub(crate) first: u8,
    pub(crate) last: u8,
}

impl GuestSegment {
    fn bytes(&self) -> [u8; 8] {
        let [a, b, c, d] = self.grant.gref.to_le_bytes();
        [a, b, c, d, self.first, self.last, 0x5a, 0xa5]
    }

    fn sectors(&self) -> u64 {
        u64::from(self.last - self.first) + 1
    }

    /// Returns the offset and the length of its bytes in the guest's memory, if it has any.
    pub(crate) fn range(&self) -> Option<(usize, usize)> {
        let page = self.grant.page.filter(|_| self.first <= self.last && self.last < 8)?;
        Some((page * crate::xen_host::PAGE + usize::from(self.first) * SECTOR, self.sectors() as usize * SECTOR))
    }
}

/// A request as the guest intends it.
#[derive(Clone, Debug)]
pub(crate) struct GuestRequest {
    pub(crate) id: u64,
    operation: u8,
    /// For an indirect request, the operation; for a discard, its flag.
    inner: u8,
    count: u16,
    sector: u64,
    /// For a discard.
    sectors: u64,
    pub(crate) segments: Vec<GuestSegment>,
    pub(crate) tables: Vec<Grant>,
}

/// The effect of a request.
#[derive(Clone, Debug)]
pub(crate) enum Effect {
    Nothing,
    /// These bytes of the disk are in the segments.
    Read(Vec<u8>),
    /// Some of the segments may hold these bytes.
    ReadInPart(Vec<u8>),
    /// Byte offset on the disk and new content.
    Stored(usize, Vec<u8>),
}

/// The expected outcome of a request.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) operation: u8,
    pub(crate) status: i16,
    pub(crate) effect: Effect,
    /// True for an executed barrier.
    pub(crate) ordered: bool,
}

impl GuestRequest {
    fn new(id: u64, operation: u8) -> GuestRequest {
        GuestRequest { id, operation, inner: 0, count: 0, sector: 0, sectors: 0, segments: vec![], tables: vec![] }
    }

    /// Returns a direct read of a piece of a part of the disk.
    pub(crate) fn read_piece(memory: &BlkifMemory, part: usize, piece: u64) -> GuestRequest {
        let sectors = 8 * DIRECT as u64;
        let segment = |page| GuestSegment { grant: memory.data(part, page), first: 0, last: 7 };
        let segments: Vec<_> = (0..DIRECT).map(segment).collect();
        GuestRequest {
            count: DIRECT as u16,
            sector: part as u64 * PART + piece * sectors,
            segments,
            ..GuestRequest::new(part as u64, READ)
        }
    }

    /// Returns a request without data: flush, barrier, or an unknown operation.
    pub(crate) fn without_data(u: &mut Unstructured<'_>, id: u64) -> Result<GuestRequest> {
        let operation = *u.choose(&[FLUSH, FLUSH, 4, 7, 200, READ, WRITE, INDIRECT])?;
        Ok(GuestRequest::new(id, operation))
    }

    /// Returns any request in its own part of the disk and of the guest's memory.
    pub(crate) fn any(
        u: &mut Unstructured<'_>,
        rules: &DeviceRules,
        memory: &BlkifMemory,
        part: usize,
        id: u64,
    ) -> Result<GuestRequest> {
        let operation = match u.int_in_range(0..=19)? {
            0..=3 => READ,
            4..=7 => WRITE,
            8 => BARRIER,
            9 => FLUSH,
            10 | 11 => DISCARD,
            12..=17 => INDIRECT,
            18 => return GuestRequest::without_data(u, id),
            _ => return Ok(GuestRequest::new(id, *u.choose(&[BARRIER, FLUSH])?)),
        };
        let mut request = GuestRequest::new(id, operation);
        if operation == DISCARD {
            let blocks = PART / rules.block;
            let first = u.int_in_range(0..=blocks)?;
            request.sector = part as u64 * PART + first * rules.block;
            request.sectors = u.int_in_range(0..=blocks - first)? * rules.block;
            request.inner = *u.choose(&[0, 0, 1, 255])?;
            if u.ratio(1, 6)? {
                request.sectors = *u.choose(&[u64::MAX, 1 << 55, SECTORS + 1, 1, 7])?;
            }
            request.damage_sector(u, part)?;
            request.stay_in_part(part, request.sectors);
            return Ok(request);
        }
        let most = if operation == INDIRECT { usize::from(rules.max_indirect).clamp(1, 520) } else { DIRECT };
        request.inner = if operation == INDIRECT { u8::from(u.arbitrary::<bool>()?) } else { 0 };
        request.choose_segments(u, rules, memory, part, most)?;
        if operation == INDIRECT {
            request.tables = (0..TABLES).map(|table| memory.table(part, table)).collect();
        }
        if u.ratio(1, 3)? {
            request.damage(u, rules, memory, part)?;
        }
        Ok(request)
    }

    fn choose_segments(
        &mut self,
        u: &mut Unstructured<'_>,
        rules: &DeviceRules,
        memory: &BlkifMemory,
        part: usize,
        most: usize,
    ) -> Result<()> {
        let count = if u.ratio(1, 8)? { most } else { u.int_in_range(1..=most.min(24))? };
        let start = u.int_in_range(0..=PAGES - 1)?;
        // Each segment has sectors of its own, even if two are in one page.
        let single = rules.block == 1 && (count > PAGES || u.ratio(1, 6)?);
        for at in 0..count.min(if single { PAGES * 8 } else { PAGES }) {
            let (page, first, last) = if single {
                ((start + at / 8) % PAGES, (at % 8) as u8, (at % 8) as u8)
            } else if rules.block == 1 && u.ratio(1, 3)? {
                let first = u.int_in_range(0..=7)?;
                ((start + at) % PAGES, first, u.int_in_range(first..=7)?)
            } else {
                ((start + at) % PAGES, 0, 7)
            };
            self.segments.push(GuestSegment { grant: memory.data(part, page), first, last });
        }
        self.count = self.segments.len() as u16;
        let sectors: u64 = self.segments.iter().map(GuestSegment::sectors).sum();
        self.sector = part as u64 * PART + u.int_in_range(0..=(PART - sectors) / rules.block)? * rules.block;
        Ok(())
    }

    fn damage_sector(&mut self, u: &mut Unstructured<'_>, part: usize) -> Result<()> {
        self.sector = match u.int_in_range(0..=15)? {
            15 => u64::MAX - u.int_in_range(0..=1000)?,
            14 => (1 << 55) + part as u64 * PART,
            13 => SECTORS + u.int_in_range(0..=1000)?,
            12 => SECTORS - 1,
            11 => self.sector.saturating_add(1).min((part as u64 + 1) * PART - 1),
            _ => return Ok(()),
        };
        Ok(())
    }

    /// Damages one property.
    fn damage(
        &mut self,
        u: &mut Unstructured<'_>,
        rules: &DeviceRules,
        memory: &BlkifMemory,
        part: usize,
    ) -> Result<()> {
        let at = u.choose_index(self.segments.len())?;
        match u.int_in_range(0..=15)? {
            0 => (self.segments[at].first, self.segments[at].last) = (u.int_in_range(1..=7)?, 0),
            1 => self.segments[at].last = u.int_in_range(8..=255)?,
            2 => (self.segments[at].first, self.segments[at].last) = (u.arbitrary()?, u.arbitrary()?),
            3 | 4 => self.segments[at].grant = memory.missing(u)?,
            5 | 6 => self.segments[at].grant = memory.data(part, READ_ONLY),
            7 => self.segments[at].grant = memory.data(part, UNMAPPABLE),
            8 if rules.maps_enough => self.segments[at].grant = memory.data(part, MAP_ONLY),
            9 if self.operation == INDIRECT => self.tables[0] = memory.missing(u)?,
            10 if self.operation == INDIRECT => self.inner = *u.choose(&[2, 3, 4, 5, 6, 200])?,
            11 => self.count = *u.choose(&[0, 12, 255, rules.max_indirect.saturating_add(1), u16::MAX])?,
            12 => self.sector = (part as u64 * PART + PART - 1).min(SECTORS),
            13 if self.operation == INDIRECT && self.count > 512 => self.tables[1] = memory.missing(u)?,
            _ => self.damage_sector(u, part)?,
        }
        // Segments that the guest has not made.
        if usize::from(self.field_count()) > self.segments.len() && self.field_count() <= rules.max_indirect.max(11) {
            self.count = 0;
        }
        let sectors = self.segments.iter().map(|one| u64::from(one.last.saturating_sub(one.first)) + 1).sum();
        self.stay_in_part(part, sectors);
        Ok(())
    }

    /// Moves a range out of the disk if it would end in another request's part.
    fn stay_in_part(&mut self, part: usize, sectors: u64) {
        let end = u128::from(self.sector) + u128::from(sectors);
        if end > u128::from((part as u64 + 1) * PART) && end <= u128::from(SECTORS) {
            self.sector = SECTORS;
        }
    }

    /// Returns the number of segments as stored in its field.
    fn field_count(&self) -> u16 {
        if self.operation == INDIRECT { self.count } else { self.count & 0xff }
    }

    /// Encodes it. Unused bytes are `padding`.
    pub(crate) fn encode(&self, abi: Abi, padding: u8) -> Vec<u8> {
        let narrow = matches!(abi, Abi::X86_32);
        // 64-bit fields are aligned to 4 in the layout of 32-bit x86, else to 8.
        let (id_at, sector_at, rest_at) = if narrow { (4, 12, 20) } else { (8, 16, 24) };
        let mut bytes = vec![padding; if narrow { 108 } else { 112 }];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &[self.operation]);
        put(id_at, &self.id.to_le_bytes());
        match self.operation {
            READ..=FLUSH => {
                put(1, &[self.count as u8]);
                put(sector_at, &self.sector.to_le_bytes());
                for (at, segment) in self.segments.iter().enumerate().take(DIRECT) {
                    put(rest_at + at * 8, &segment.bytes());
                }
            }
            DISCARD => {
                put(1, &[self.inner]);
                put(sector_at, &self.sector.to_le_bytes());
                put(rest_at, &self.sectors.to_le_bytes());
            }
            INDIRECT => {
                put(1, &[self.inner]);
                put(2, &self.count.to_le_bytes());
                put(sector_at, &self.sector.to_le_bytes());
                for (at, table) in self.tables.iter().enumerate() {
                    put(rest_at + 4 + at * 4, &table.gref.to_le_bytes());
                }
            }
            _ => {}
        }
        bytes
    }

    /// Returns the content of its indirect pages.
    pub(crate) fn table_bytes(&self) -> Vec<u8> {
        self.segments.iter().flat_map(GuestSegment::bytes).collect()
    }

    pub(crate) fn is_barrier(&self) -> bool {
        self.operation == BARRIER
    }

    /// Returns true if the device reads data from the segments.
    pub(crate) fn is_write(&self) -> bool {
        matches!(self.operation, WRITE..=FLUSH) || self.operation == INDIRECT && self.inner == WRITE
    }

    /// Returns the segments that the device may use.
    fn used_segments(&self) -> &[GuestSegment] {
        &self.segments[..self.segments.len().min(self.field_count().into())]
    }

    /// Returns the expected outcome. `disk` is the content of the disk.
    pub(crate) fn verdict(&self, rules: &DeviceRules, memory: &BlkifMemory, disk: &[u8]) -> Verdict {
        let operation = if self.operation == INDIRECT { self.inner } else { self.operation };
        let end = |status, effect| Verdict { operation, status, effect, ordered: false };
        let offered = match self.operation {
            READ | WRITE => true,
            BARRIER => rules.barrier,
            FLUSH => rules.flush,
            DISCARD => rules.discard,
            INDIRECT => rules.max_indirect > 0,
            _ => false,
        };
        if !offered {
            return end(UNSUPPORTED, Effect::Nothing);
        }
        let writes = self.operation == DISCARD || self.is_write();
        let count = self.field_count();
        if self.operation == FLUSH && count == 0 {
            return end(OKAY, Effect::Nothing);
        }
        if writes && rules.read_only {
            return end(ERROR, Effect::Nothing);
        }
        if self.operation == BARRIER && count == 0 {
            return Verdict { ordered: true, ..end(OKAY, Effect::Nothing) };
        }
        if self.operation == DISCARD {
            if !rules.allow(self.sector, self.sectors) {
                return end(ERROR, Effect::Nothing);
            }
            let zeroes = vec![0; self.sectors as usize * SECTOR];
            return end(OKAY, Effect::Stored(self.sector as usize * SECTOR, zeroes));
        }
        let most = if self.operation == INDIRECT { rules.max_indirect } else { DIRECT as u16 };
        let shaped = (1..=most).contains(&count) && !(self.operation == INDIRECT && self.inner > WRITE);
        if !shaped || !self.reads_tables(rules) {
            return end(ERROR, Effect::Nothing);
        }
        let segments = self.used_segments();
        assert_eq!(segments.len(), usize::from(count), "the guest has made them all");
        if segments.iter().any(|one| one.first > one.last || one.last > 7 || one.sectors() % rules.block != 0) {
            return end(ERROR, Effect::Nothing);
        }
        let sectors = segments.iter().map(GuestSegment::sectors).sum();
        if !rules.allow(self.sector, sectors) {
            return end(ERROR, Effect::Nothing);
        }
        let (at, len) = (self.sector as usize * SECTOR, sectors as usize * SECTOR);
        let fill = !self.is_write();
        let content = || disk[at..at + len].to_vec();
        match (self.reaches_data(rules, fill), fill) {
            (true, true) => end(OKAY, Effect::Read(content())),
            (false, true) => end(ERROR, Effect::ReadInPart(content())),
            (false, false) => end(ERROR, Effect::Nothing),
            (true, false) => {
                let data = segments.iter().filter_map(GuestSegment::range);
                let data = data.flat_map(|(at, len)| memory.expected(at, len).to_vec()).collect();
                Verdict { ordered: self.operation == BARRIER, ..end(OKAY, Effect::Stored(at, data)) }
            }
        }
    }

    /// Returns true if the indirect pages can be read: through a persistent mapping, which is writable, or by copy.
    fn reads_tables(&self, rules: &DeviceRules) -> bool {
        let tables = self.tables.iter().take(usize::from(self.field_count()).div_ceil(512));
        let persistent = matches!(rules.access, PageAccess::Persistent | PageAccess::PersistentBounce);
        tables.map(|table| table.ability).all(|can| can.copied_from || persistent && can.mapped_writable)
    }

    /// Returns true if the data can be transferred: all pages through mappings, or else all by copy.
    fn reaches_data(&self, rules: &DeviceRules, fill: bool) -> bool {
        let all = |able: fn(&GrantAbility) -> bool| self.used_segments().iter().all(|one| able(&one.grant.ability));
        let mapped = match rules.access {
            PageAccess::Copy => false,
            PageAccess::Map if !fill => all(|can| can.mapped),
            _ => all(|can| can.mapped_writable),
        };
        mapped || all(if fill { |can| can.copied_to } else { |can| can.copied_from })
    }
}
