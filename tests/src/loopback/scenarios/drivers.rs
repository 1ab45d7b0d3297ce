//! Drivers of other systems: their spelling of the keys, and transfers over several requests of 11 segments.

use anyhow::{Context, Result, ensure};
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_ring::blkif::{Abi, BlkifRequest, operation, status};

use super::transfers::SECTOR;
use crate::loopback::fixture::{BLOCKS_4K, DEFAULT_DISK, LoopbackFixture};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend};
use crate::loopback::pages::{GrantedPages, PAGE};
use crate::loopback::request::{PAGE_SECTORS, transfer, whole_page};

/// A driver, the layout and the ring order that it uses, and its keys besides the ring's pages and its event channel.
struct Driver {
    name: &'static str,
    abi: Abi,
    order: u8,
    keys: &'static [(&'static str, &'static str)],
}

/// Sources: FreeBSD's `sys/dev/xen/blkfront/blkfront.c` (`xbd_initialize`), OpenBSD's `sys/dev/pv/xbf.c` (`xbf_init`),
/// NetBSD's `sys/arch/xen/xen/xbd_xenbus.c`. Linux before 2.6.26 wrote no `protocol`.
const DRIVERS: [Driver; 7] = [
    Driver {
        name: "FreeBSD, one page",
        abi: Abi::X86_64,
        order: 0,
        keys: &[
            ("max-requests", "32"),
            ("max-request-segments", "11"),
            ("max-request-size", "40960"),
            ("protocol", "x86_64-abi"),
        ],
    },
    Driver {
        name: "FreeBSD, four pages",
        abi: Abi::X86_64,
        order: 2,
        keys: &[
            ("num-ring-pages", "4"),
            ("ring-page-order", "2"),
            ("max-requests", "128"),
            ("max-request-segments", "11"),
            ("max-request-size", "40960"),
            ("protocol", "x86_64-abi"),
        ],
    },
    Driver {
        name: "OpenBSD",
        abi: Abi::X86_64,
        order: 2,
        keys: &[("num-ring-pages", "4"), ("ring-page-order", "2"), ("protocol", "x86_64-abi")],
    },
    Driver { name: "OpenBSD, i386", abi: Abi::X86_32, order: 0, keys: &[("protocol", "x86_32-abi")] },
    Driver { name: "NetBSD", abi: Abi::X86_64, order: 0, keys: &[("protocol", "x86_64-abi")] },
    Driver {
        name: "only the older key",
        abi: Abi::X86_64,
        order: 1,
        keys: &[("num-ring-pages", "2"), ("protocol", "x86_64-abi")],
    },
    Driver { name: "no protocol", abi: Abi::X86_32, order: 0, keys: &[] },
];

/// Requests of a transfer.
const REQUESTS: usize = 4;
/// Pages of a transfer.
const PAGES: usize = REQUESTS * MAX_SEGMENTS;

/// Returns the keys that the driver writes for the frontend's ring.
fn keys_of(driver: &Driver, guest: &LoopbackFrontend) -> Vec<(String, String)> {
    let ring = &guest.rings[0].raw;
    let mut keys: Vec<(String, String)> =
        driver.keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    for (page, gref) in ring.pages.refs.iter().enumerate() {
        let key = if ring.pages.refs.len() == 1 { "ring-ref".to_owned() } else { format!("ring-ref{page}") };
        keys.push((key, gref.0.to_string()));
    }
    keys.push(("event-channel".to_owned(), ring.port.port.0.to_string()));
    keys
}

/// Transfers all pages by requests that are in flight at once.
fn transfer_all(guest: &mut LoopbackFrontend, data: &GrantedPages, operation: u8, sector: u64) -> Result<()> {
    let ring = &mut guest.rings[0];
    for request in 0..REQUESTS {
        let first = request * MAX_SEGMENTS;
        let segments: Vec<_> = (first..first + MAX_SEGMENTS).map(|page| whole_page(data.gref(page))).collect();
        let sector = sector + first as u64 * PAGE_SECTORS;
        ring.send(&BlkifRequest { id: request as u64, ..transfer(operation, sector, &segments) })?;
    }
    for _ in 0..REQUESTS {
        let response = ring.poll()?;
        ensure!(response.status == status::OKAY && response.operation == operation, "{response:?}");
    }
    Ok(())
}

pub(super) fn keys_of_other_systems(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.create(DEFAULT_DISK)?;
    let data = guest.pages(PAGES as u32)?;
    let mut expected = fixture.content(DEFAULT_DISK)?;
    for (number, driver) in (0..).zip(&DRIVERS) {
        let (Driver { name, abi, order, .. }, sector) = (driver, number * 640);
        guest.make_rings(FrontendConfig { abi: *abi, persistent: false, rings: 1, ring_page_order: *order })?;
        let keys = keys_of(driver, &guest);
        guest.front.connect(&keys).with_context(|| (*name).to_owned())?;
        for page in 0..PAGES {
            data.fill(page, (page as u64 * 3 + number) as u8);
        }
        let written: Vec<u8> = (0..PAGES).flat_map(|page| data.page(page)).collect();
        expected[sector as usize * SECTOR..][..PAGES * PAGE].copy_from_slice(&written);
        transfer_all(&mut guest, &data, operation::WRITE, sector).with_context(|| format!("{name}, writes"))?;
        data.fill_all(0xee);
        transfer_all(&mut guest, &data, operation::READ, sector).with_context(|| format!("{name}, reads"))?;
        let read: Vec<u8> = (0..PAGES).flat_map(|page| data.page(page)).collect();
        ensure!(read == written, "{name}: something else was read");
        ensure!(fixture.content(DEFAULT_DISK)? == expected, "{name}: the disk holds something else");
        guest.close()?;
        guest.front.initialise()?;
    }
    guest.detach()?;
    counts_blocks(fixture)
}

/// A frontend that counts in blocks of 4096 bytes is refused, and the disk is unchanged.
fn counts_blocks(fixture: &LoopbackFixture) -> Result<()> {
    let content = fixture.content(BLOCKS_4K)?;
    let mut guest = fixture.create(BLOCKS_4K)?;
    let mut keys = guest.make_rings(FrontendConfig::default())?;
    keys.push(("feature-large-sector-size".to_owned(), "1".to_owned()));
    ensure!(guest.front.connect(&keys).is_err(), "it is connected");
    guest.must_fail("feature-large-sector-size: found \"1\", expected a disk with block-size=512")?;
    guest.close()?;
    guest.front.initialise()?;
    guest.front.remove("feature-large-sector-size")?;
    guest.connect(FrontendConfig::default())?;
    guest.detach()?;
    ensure!(fixture.content(BLOCKS_4K)? == content, "the disk holds something else");
    Ok(())
}
