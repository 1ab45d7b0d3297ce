//! Valid requests of unusual shapes.

use anyhow::{Context, Result, ensure};
use mqblk_core::units::SECTOR_BYTES;
use mqblk_memory::GrantRef;
use mqblk_ring::blkif::request::{DISCARD_SECURE, MAX_SEGMENTS};
use mqblk_ring::blkif::{Abi, BlkifRequest, Segment, operation, status};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::loopback::fixture::{DEFAULT_DISK, LoopbackDisk, LoopbackFixture, MAX_RING_PAGE_ORDER, MODES, SECTORS};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend};
use crate::loopback::pages::{GrantedPages, PAGE};
use crate::loopback::request::{PAGE_SECTORS, discard, indirect, segment, segment_table, transfer, whole_page};

/// Bytes of a sector.
pub(super) const SECTOR: usize = SECTOR_BYTES as usize;
/// Data pages, in addition to those of segments.
const DATA: usize = 40;

/// A frontend, and the expected content of its disk.
struct VerifyingFrontend {
    guest: LoopbackFrontend,
    data: GrantedPages,
    tables: GrantedPages,
    expected_content: Vec<u8>,
    random: SmallRng,
}

impl VerifyingFrontend {
    fn new(
        fixture: &LoopbackFixture,
        disk: LoopbackDisk,
        config: FrontendConfig,
        data: usize,
    ) -> Result<VerifyingFrontend> {
        let guest = fixture.attach(disk, config)?;
        let (data, tables) = (guest.pages(data as u32)?, guest.pages(1)?);
        Ok(VerifyingFrontend {
            guest,
            data,
            tables,
            expected_content: fixture.content(disk)?,
            random: SmallRng::seed_from_u64(11),
        })
    }

    /// Returns segments with random sectors, each in a page of its own.
    fn segments(&mut self, count: usize) -> Vec<Segment> {
        let skip = self.random.random_range(0..=self.data.count() - count);
        (skip..skip + count)
            .map(|page| {
                let first = self.random.random_range(0..PAGE_SECTORS as u8);
                segment(self.data.gref(page), first, self.random.random_range(first..PAGE_SECTORS as u8))
            })
            .collect()
    }

    fn page_of(&self, gref: GrantRef) -> usize {
        (0..self.data.count()).find(|page| self.data.gref(*page) == gref).expect("a page of ours")
    }

    /// Returns the request for these segments: direct if they fit and `direct` is true, else indirect.
    fn request(&self, operation: u8, sector: u64, segments: &[Segment], direct: bool) -> BlkifRequest {
        if direct && segments.len() <= MAX_SEGMENTS {
            return transfer(operation, sector, segments);
        }
        self.tables.write(0, 0, &segment_table(segments));
        indirect(operation, sector, &[self.tables.gref(0)], segments.len() as u16)
    }

    /// Runs one write or read of `count` segments and verifies the disk and all pages, including bytes outside of the
    /// segments.
    fn run_one(&mut self, ring: usize, write: bool, count: usize, direct: bool) -> Result<()> {
        let segments = self.segments(count);
        let sectors: u64 = segments.iter().map(|s| u64::from(s.last_sect - s.first_sect) + 1).sum();
        let sector = self.random.random_range(0..=SECTORS - sectors);
        for segment in &segments {
            let mut bytes = vec![0; PAGE];
            self.random.fill(&mut bytes[..]);
            self.data.write(self.page_of(segment.gref), 0, &bytes);
        }
        let before: Vec<Vec<u8>> = (0..self.data.count()).map(|page| self.data.page(page)).collect();
        let operation = if write { operation::WRITE } else { operation::READ };
        let request = self.request(operation, sector, &segments, direct);
        let response_status = self.guest.rings[ring].run(&BlkifRequest { id: self.random.random(), ..request })?;
        ensure!(response_status == status::OKAY, "{request:?}: status {response_status}");
        let mut at = sector as usize * SECTOR;
        let mut expected = before;
        for segment in &segments {
            let len = usize::from(segment.last_sect - segment.first_sect + 1) * SECTOR;
            let from = usize::from(segment.first_sect) * SECTOR;
            let page = &mut expected[self.page_of(segment.gref)][from..from + len];
            match write {
                true => self.expected_content[at..at + len].copy_from_slice(page),
                false => page.copy_from_slice(&self.expected_content[at..at + len]),
            }
            at += len;
        }
        for (page, expected) in expected.iter().enumerate() {
            ensure!(self.data.page(page) == *expected, "page {page} holds something else after {request:?}");
        }
        Ok(())
    }

    fn finish(self, fixture: &LoopbackFixture, disk: LoopbackDisk) -> Result<()> {
        self.guest.detach()?;
        ensure!(fixture.content(disk)? == self.expected_content, "the disk holds something else than was written");
        Ok(())
    }
}

pub(super) fn every_layout(fixture: &mut LoopbackFixture) -> Result<()> {
    for abi in Abi::ALL {
        for disk in MODES {
            let rings = if disk.id == "copy" { 4 } else { 1 };
            let order = if abi == Abi::Arm { MAX_RING_PAGE_ORDER } else { 0 };
            let config = FrontendConfig { abi, rings, ring_page_order: order, ..FrontendConfig::default() };
            let mut player = VerifyingFrontend::new(fixture, disk, config, DATA)?;
            for turn in 0..fixture.repetitions(120) as usize {
                let count = player.random.random_range(1..=if turn % 2 == 0 { MAX_SEGMENTS } else { DATA });
                let direct = turn % 3 != 0;
                let result = player.run_one(turn % rings as usize, turn % 4 < 2, count, direct);
                result.with_context(|| format!("{abi:?}, {}, turn {turn}", disk.id))?;
            }
            check_grant_mode(fixture, disk)?;
            player.finish(fixture, disk)?;
        }
    }
    Ok(())
}

/// Checks that the grants were used in the disk's mode.
fn check_grant_mode(fixture: &LoopbackFixture, disk: LoopbackDisk) -> Result<()> {
    let grants = fixture.grants(disk)?;
    let right = match disk.id {
        "copy" => grants.copies > 0 && grants.maps == 0,
        "map" => grants.maps > 0 && grants.maps == grants.unmaps && grants.mapped_pages == 0,
        _ => grants.persistent_hits > 0 && grants.copies == 0 && grants.mapped_pages == grants.maps - grants.unmaps,
    };
    ensure!(right && grants.indirect_requests > 0, "{}: {grants:?}", disk.id);
    ensure!((grants.copy_errors, grants.map_errors) == (0, 0), "{}: {grants:?}", disk.id);
    Ok(())
}

pub(super) fn many_segments(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut player = VerifyingFrontend::new(fixture, disk, FrontendConfig::default(), 256)?;
        ensure!(player.guest.front.info()?.max_segments == 256, "{:?}", player.guest.front.info()?);
        for write in [true, false, true, false] {
            player.run_one(0, write, 256, false).with_context(|| disk.id)?;
        }
        player.finish(fixture, disk)?;
    }
    Ok(())
}

pub(super) fn flushes_and_barriers(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut player =
            VerifyingFrontend::new(fixture, disk, FrontendConfig { rings: 2, ..FrontendConfig::default() }, DATA)?;
        let info = player.guest.front.info()?;
        ensure!(info.flush && info.barrier, "{info:?}");
        for (op, ring) in
            [(operation::FLUSH_DISKCACHE, 0), (operation::WRITE_BARRIER, 1), (operation::WRITE_BARRIER, 0)]
        {
            // The sector of a request without data has no meaning.
            for sector in [0, u64::MAX] {
                let response_status = player.guest.rings[ring].run(&transfer(op, sector, &[]))?;
                ensure!(response_status == status::OKAY, "operation {op} without data: status {response_status}");
            }
            for count in [1, MAX_SEGMENTS] {
                let segments: Vec<_> = (0..count).map(|page| whole_page(player.data.gref(page))).collect();
                (0..count).for_each(|page| player.data.fill(page, op + page as u8 + 10));
                let response_status = player.guest.rings[ring].run(&transfer(op, 16, &segments))?;
                ensure!(
                    response_status == status::OKAY,
                    "operation {op} with {count} segments: status {response_status}"
                );
                for page in 0..count {
                    let at = 16 * SECTOR + page * PAGE;
                    player.expected_content[at..at + PAGE].fill(op + page as u8 + 10);
                }
                ensure!(fixture.content(disk)? == player.expected_content, "operation {op} has not written its data");
            }
        }
        player.finish(fixture, disk)?;
    }
    Ok(())
}

pub(super) fn discards(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut content = vec![0x77; (SECTORS * SECTOR_BYTES) as usize];
    fixture.set_content(DEFAULT_DISK, &content)?;
    let mut guest = fixture.attach(DEFAULT_DISK, FrontendConfig { abi: Abi::X86_32, ..FrontendConfig::default() })?;
    let offered = guest.front.info()?.discard.context("discard is not offered")?;
    ensure!(!offered.secure, "secure discard is offered: {offered:?}");
    let end = SECTORS;
    for (sector, sectors, flag, expected) in [
        (8, 8, 0, status::OKAY),
        // A secure discard that the device does not offer is executed as a normal one.
        (24, 8, DISCARD_SECURE, status::OKAY),
        (end - 8, 8, 0xfe, status::OKAY),
        (0, 0, 0, status::OKAY),
        (end, 0, 0, status::OKAY),
        (end, 1, 0, status::ERROR),
        (end - 8, 9, 0, status::ERROR),
        (end + 1, 0, 0, status::ERROR),
        (0, end + 1, 0, status::ERROR),
        (0, u64::MAX, 0, status::ERROR),
        (u64::MAX, 1, 0, status::ERROR),
        (u64::MAX, u64::MAX, 0, status::ERROR),
        (8, u64::MAX - 7, 0, status::ERROR),
        (1 << 55, 8, 0, status::ERROR),
        (0, 1 << 55, 0, status::ERROR),
    ] {
        let response_status = guest.rings[0].run(&discard(sector, sectors, flag))?;
        ensure!(
            response_status == expected,
            "discard of {sectors} sectors at {sector}: status {response_status}, expected {expected}"
        );
        if response_status == status::OKAY {
            let range = sector as usize * SECTOR..(sector + sectors) as usize * SECTOR;
            content[range].fill(0);
        }
        ensure!(
            fixture.content(DEFAULT_DISK)? == content,
            "discard of {sectors} sectors at {sector}: the disk holds something else"
        );
    }
    guest.detach()?;
    let mut guest = fixture.create_with(DEFAULT_DISK, |vbd| vbd.discard = false)?;
    guest.connect(FrontendConfig::default())?;
    ensure!(guest.front.info()?.discard.is_none(), "discard is offered although the toolstack forbids it");
    let response_status = guest.rings[0].run(&discard(40, 8, 0))?;
    ensure!(response_status == status::NOT_SUPPORTED, "discard that is not offered: status {response_status}");
    guest.detach()?;
    ensure!(fixture.content(DEFAULT_DISK)? == content, "a discard that is not offered was done");
    Ok(())
}
