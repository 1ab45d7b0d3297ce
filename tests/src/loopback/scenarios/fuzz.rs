//! Entries of random bytes, with an exact oracle for the response.

use anyhow::{Context, Result, ensure};
use mqblk_memory::GrantRef;
use mqblk_ring::blkif::{Abi, BlkifRequest, RawRequest, RequestBody, operation, status};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::transfers::SECTOR;
use crate::loopback::fixture::{DEFAULT_DISK, LoopbackFixture, MODES, SECTORS};
use crate::loopback::frontend::FrontendConfig;
use crate::loopback::pages::GrantedPages;
use crate::loopback::request::{
    PAGE_SECTORS, discard, indirect, response_operation, segment, segment_table, transfer, whole_page,
};

/// Computes the status of an entry by the protocol. The device supports everything and has blocks of 512 bytes.
struct Oracle<'a> {
    data: &'a GrantedPages,
    /// Page 0 of it holds [`TABLE`] valid segments, the other pages are filled with 0xff.
    tables: &'a GrantedPages,
}

const TABLE: u16 = 64;

impl Oracle<'_> {
    fn is_data(&self, gref: GrantRef) -> bool {
        (0..self.data.count()).any(|page| self.data.gref(page) == gref)
    }

    /// Returns true if these sectors are on the disk.
    fn in_range(sector: u64, sectors: u64) -> bool {
        sector.checked_add(sectors).is_some_and(|end| end <= SECTORS)
    }

    fn status(&self, request: &BlkifRequest) -> i16 {
        let good = match &request.body {
            RequestBody::Unknown => return status::NOT_SUPPORTED,
            RequestBody::Discard { sector, sectors, .. } => Self::in_range(sector.0, *sectors),
            RequestBody::Rw(transfer) => match (request.operation, transfer.nr_segments) {
                (operation::FLUSH_DISKCACHE | operation::WRITE_BARRIER, 0) => true,
                (_, count @ 1..=11) => {
                    let segments = &transfer.segments[..usize::from(count)];
                    let right = |s: &mqblk_ring::blkif::Segment| {
                        s.first_sect <= s.last_sect && s.last_sect <= 7 && self.is_data(s.gref)
                    };
                    let sectors = segments.iter().map(|s| u64::from(s.last_sect.wrapping_sub(s.first_sect)) + 1).sum();
                    segments.iter().all(right) && Self::in_range(transfer.sector.0, sectors)
                }
                _ => false,
            },
            RequestBody::Indirect(wanted) => {
                matches!(wanted.operation, operation::READ | operation::WRITE)
                    && (1..=TABLE).contains(&wanted.nr_segments)
                    && wanted.pages[0] == self.tables.gref(0)
                    && Self::in_range(wanted.sector.0, u64::from(wanted.nr_segments) * PAGE_SECTORS)
            }
        };
        if good { status::OKAY } else { status::ERROR }
    }
}

pub(super) fn random_entries(fixture: &mut LoopbackFixture) -> Result<()> {
    for abi in Abi::ALL {
        let mut guest = fixture.attach(DEFAULT_DISK, FrontendConfig { abi, ..FrontendConfig::default() })?;
        let (data, tables) = (guest.pages(1)?, guest.pages(1)?);
        let oracle = Oracle { data: &data, tables: &tables };
        let mut random = SmallRng::seed_from_u64(abi.entry_bytes().into());
        for turn in 0..fixture.repetitions(3000) {
            let mut bytes = [0; 112];
            random.fill(&mut bytes[..]);
            // Half of them with an existing operation.
            if turn % 2 == 0 {
                bytes[0] = random.random_range(0..8);
            }
            bytes[108..].fill(0);
            let raw = RawRequest::from_bytes(bytes);
            let request = raw.decode(abi);
            let found =
                guest.rings[0].run_raw(&raw, response_operation(&request)).with_context(|| format!("{request:?}"))?;
            let expected = oracle.status(&request);
            ensure!(found == expected, "{request:?}: status {found}, expected {expected}");
        }
        guest.detach()?;
    }
    Ok(())
}

/// Returns true if a byte is in the lower half of a grant reference. A change only there may name a page of the ring,
/// or of another device of the domain.
fn is_in_gref(abi: Abi, request: &BlkifRequest, at: usize) -> bool {
    let (first, distance) = match (request.operation, abi) {
        (operation::INDIRECT, Abi::X86_32) => (24, 4),
        (operation::INDIRECT, _) => (28, 4),
        (operation::DISCARD, _) => return false,
        (_, Abi::X86_32) => (20, 8),
        _ => (24, 8),
    };
    at >= first && (at - first) % distance < 2
}

pub(super) fn flipped_bits(fixture: &mut LoopbackFixture) -> Result<()> {
    for (disk, abi) in MODES.into_iter().zip([Abi::X86_32, Abi::X86_64, Abi::Arm]) {
        fixture.set_content(disk, &vec![0; SECTORS as usize * SECTOR])?;
        let mut guest = fixture.attach(disk, FrontendConfig { abi, ..FrontendConfig::default() })?;
        let (data, tables) = (guest.pages(11)?, guest.pages(2)?);
        let all: Vec<_> = (0..usize::from(TABLE)).map(|at| whole_page(data.gref(at % 11))).collect();
        tables.write(0, 0, &segment_table(&all));
        tables.fill(1, 0xff);
        let oracle = Oracle { data: &data, tables: &tables };
        let mut random = SmallRng::seed_from_u64(71);
        let (mut right, mut wrong) = (0, 0);
        for _ in 0..fixture.repetitions(4000) {
            let op = random.random_range(0..4);
            let sector = random.random_range(0..SECTORS - 128);
            let count = random.random_range(1..=11);
            let segments: Vec<_> = (0..count).map(|at| segment(data.gref(at), 1, 5)).collect();
            let request = match random.random_range(0..4) {
                0 => discard(sector, 16, 0),
                1 => indirect(op % 2, sector, &[tables.gref(0)], random.random_range(1..=TABLE)),
                _ => transfer(op, sector, &segments),
            };
            let request = BlkifRequest { id: random.random(), ..request };
            let mut bytes = *RawRequest::encode(abi, &request).bytes();
            for _ in 0..random.random_range(0..3) {
                let at = random.random_range(0..abi.entry_bytes() as usize);
                if !is_in_gref(abi, &request, at) {
                    bytes[at] ^= 1 << random.random_range(0..8);
                }
            }
            let raw = RawRequest::from_bytes(bytes);
            let request = raw.decode(abi);
            let found =
                guest.rings[0].run_raw(&raw, response_operation(&request)).with_context(|| format!("{request:?}"))?;
            let expected = oracle.status(&request);
            ensure!(found == expected, "{}: {request:?}: status {found}, expected {expected}", disk.id);
            if expected == status::OKAY { right += 1 } else { wrong += 1 }
        }
        ensure!(right > 0 && wrong > 0, "{right} right ones, {wrong} wrong ones");
        guest.detach()?;
    }
    Ok(())
}
