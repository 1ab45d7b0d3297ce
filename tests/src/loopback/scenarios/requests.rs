//! Invalid requests.

use anyhow::{Context, Result, ensure};
use mqblk_memory::GrantRef;
use mqblk_ring::blkif::{Abi, BlkifRequest, RawRequest, Segment, operation, status};

use super::transfers::SECTOR;
use crate::loopback::fixture::{
    BLOCKS_4K, DEFAULT_DISK, FEW_INDIRECT, LoopbackDisk, LoopbackFixture, MODES, NO_INDIRECT, OTHER_DOMAIN, SECTORS,
};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend};
use crate::loopback::pages::{GrantedPages, PAGE};
use crate::loopback::request::{
    PAGE_SECTORS, discard, indirect, segment, segment_table, transfer, transfer_claiming, whole_page,
};

const READ: u8 = operation::READ;
const WRITE: u8 = operation::WRITE;
/// Content of the disk where nothing was written.
const ON_DISK: u8 = 0x5d;
/// Content of the pages.
const IN_PAGES: u8 = 0xe1;

/// A frontend, data pages, and indirect segment pages; the disk is filled with [`ON_DISK`].
struct Bench {
    guest: LoopbackFrontend,
    data: GrantedPages,
    tables: GrantedPages,
    disk: LoopbackDisk,
}

impl Bench {
    fn new(fixture: &LoopbackFixture, disk: LoopbackDisk, abi: Abi) -> Result<Bench> {
        fixture.set_content(disk, &vec![ON_DISK; SECTORS as usize * SECTOR])?;
        let guest = fixture.attach(disk, FrontendConfig { abi, ..FrontendConfig::default() })?;
        let (data, tables) = (guest.pages(12)?, guest.pages(4)?);
        Ok(Bench { guest, data, tables, disk })
    }

    fn grefs(&self, count: usize) -> Vec<Segment> {
        (0..count).map(|page| whole_page(self.data.gref(page % 12))).collect()
    }

    /// Runs a request that must have this status and no effect: neither on the disk nor on any page.
    fn expect_status(&mut self, name: &str, request: &BlkifRequest, expected: i16) -> Result<()> {
        self.data.fill_all(IN_PAGES);
        let response_status = self.guest.rings[0].run(request).with_context(|| name.to_owned())?;
        ensure!(response_status == expected, "{name}: status {response_status}, expected {expected}");
        let untouched = (0..self.data.count()).all(|page| self.data.is_filled(page, IN_PAGES));
        ensure!(untouched, "{name}: a page was written to");
        Ok(())
    }

    /// Checks that a valid read works.
    fn check_valid_read(&mut self) -> Result<()> {
        let last = [segment(self.data.gref(3), 7, 7)];
        let response_status = self.guest.rings[0].run(&transfer(READ, SECTORS - 1, &last))?;
        ensure!(response_status == status::OKAY, "a read of the last sector: status {response_status}");
        let mut expected = vec![IN_PAGES; PAGE];
        expected[7 * SECTOR..].fill(ON_DISK);
        ensure!(self.data.page(3) == expected, "the last sector was not read");
        Ok(())
    }

    fn finish(self, fixture: &LoopbackFixture) -> Result<()> {
        self.guest.detach()?;
        ensure!(fixture.content(self.disk)?.iter().all(|byte| *byte == ON_DISK), "the disk was written to");
        Ok(())
    }
}

/// Returns requests, with their names, that are invalid in any layout.
fn invalid_requests(bench: &Bench) -> Vec<(String, BlkifRequest)> {
    let page = bench.data.gref(0);
    let full = bench.grefs(11);
    let table = |segments: &[Segment]| {
        bench.tables.write(0, 0, &segment_table(segments));
        bench.tables.gref(0)
    };
    let twelve = table(&bench.grefs(12));
    let mut all = vec![];
    let mut add = |name: String, request| all.push((name, request));
    for op in [READ, WRITE] {
        add(format!("{op} without segments"), transfer(op, 0, &[]));
        for count in [12, 13, 128, 255] {
            add(format!("{op} with {count} segments in the entry"), transfer_claiming(op, 0, &full, count));
        }
        for (first, last) in [(1, 0), (7, 6), (0, 8), (8, 8), (8, 7), (0, 255), (255, 255), (255, 0), (4, 0x80)] {
            add(format!("{op} of sectors {first} to {last}"), transfer(op, 0, &[segment(page, first, last)]));
            let two = [whole_page(page), segment(page, first, last)];
            add(format!("{op} of sectors {first} to {last}, second"), transfer(op, 0, &two));
        }
        let end = SECTORS;
        for (sector, sectors) in [
            (end, 1),
            (end - 7, 8),
            (end - 1, 2),
            (end + 1, 1),
            (u64::MAX, 1),
            (u64::MAX, 8),
            (u64::MAX - 7, 8),
            (u64::MAX / 512, 1),
            (u64::MAX / 512 + 1, 8),
            (1 << 55, 8),
            ((1 << 55) + 8, 8),
            (1 << 63, 8),
        ] {
            let one = [segment(page, 0, sectors - 1)];
            add(format!("{op} of {sectors} sectors at {sector}"), transfer(op, sector, &one));
        }
        let last = transfer(op, end - 11 * PAGE_SECTORS + 1, &full);
        add(format!("{op} past the end by one, in 11 segments"), last);
        for count in [0, 257, 512, 513, 4096, u16::MAX] {
            let tables: Vec<GrantRef> = (0..4).map(|_| twelve).collect();
            add(format!("indirect {op} with {count} segments"), indirect(op, 0, &tables, count));
        }
        let past = indirect(op, end - 12 * PAGE_SECTORS + 1, &[twelve], 12);
        add(format!("indirect {op} past the end by one"), past);
        for bad in [GrantRef(0), GrantRef(u32::MAX)] {
            add(format!("indirect {op} with the page {bad:?}"), indirect(op, 0, &[bad], 12));
        }
    }
    for inner in [2, 3, 4, 5, 6, 7, 255] {
        add(format!("indirect {inner}"), indirect(inner, 0, &[twelve], 12));
    }
    for op in [operation::FLUSH_DISKCACHE, operation::WRITE_BARRIER] {
        add(format!("{op} with 12 segments in the entry"), transfer_claiming(op, 0, &full, 12));
        add(format!("{op} past the end"), transfer(op, end_of(&full), &full));
        add(format!("{op} of no page"), transfer(op, 0, &[whole_page(GrantRef(u32::MAX))]));
    }
    add("discard past the end".to_owned(), discard(SECTORS - 1, 2, 0));
    all
}

fn end_of(segments: &[Segment]) -> u64 {
    SECTORS - segments.len() as u64 * PAGE_SECTORS + 1
}

/// An invalid segment among valid ones in an indirect page.
fn check_invalid_tables(bench: &mut Bench) -> Result<()> {
    let bad = [
        segment(bench.data.gref(0), 1, 0),
        segment(bench.data.gref(0), 0, 8),
        segment(bench.data.gref(0), 200, 255),
        whole_page(GrantRef(u32::MAX)),
    ];
    for (at, bad) in [0, 6, 11].into_iter().flat_map(|at| bad.map(|bad| (at, bad))) {
        let mut segments = bench.grefs(12);
        segments[at] = bad;
        bench.tables.write(1, 0, &segment_table(&segments));
        let request = indirect(WRITE, 0, &[bench.tables.gref(1)], 12);
        bench.expect_status(&format!("{bad:?} as segment {at}"), &request, status::ERROR)?;
    }
    Ok(())
}

pub(super) fn invalid(fixture: &mut LoopbackFixture) -> Result<()> {
    for (disk, abi) in MODES.into_iter().zip(Abi::ALL) {
        let mut bench = Bench::new(fixture, disk, abi)?;
        for (turn, (name, request)) in (0..).zip(invalid_requests(&bench)) {
            // With any handle and any id.
            let request = BlkifRequest { handle: (turn % 3) as u16 * 0x7fff, id: u64::MAX << (turn % 64), ..request };
            bench.expect_status(&name, &request, status::ERROR).with_context(|| disk.id)?;
            bench.check_valid_read().with_context(|| format!("{}, after {name}", disk.id))?;
        }
        check_invalid_tables(&mut bench).with_context(|| disk.id)?;
        bench.check_valid_read()?;
        bench.finish(fixture)?;
    }
    Ok(())
}

pub(super) fn more_segments_than_offered(fixture: &mut LoopbackFixture) -> Result<()> {
    for (disk, most) in [(FEW_INDIRECT, Some(16)), (NO_INDIRECT, None)] {
        let mut bench = Bench::new(fixture, disk, Abi::X86_64)?;
        let offered = bench.guest.front.info()?.max_segments;
        ensure!(offered == most.unwrap_or(11), "{offered} segments are offered");
        bench.tables.write(0, 0, &segment_table(&bench.grefs(40)));
        for count in [0, 1, 12, 16, 17, 40, 512] {
            let request = indirect(WRITE, 0, &[bench.tables.gref(0)], count);
            let expected = match most {
                None => status::NOT_SUPPORTED,
                Some(most) if (1..=most).contains(&count) => status::OKAY,
                Some(_) => status::ERROR,
            };
            bench.data.fill_all(ON_DISK);
            let response_status = bench.guest.rings[0].run(&request)?;
            ensure!(
                response_status == expected,
                "{}, {count} segments: status {response_status}, expected {expected}",
                disk.id
            );
        }
        bench.data.fill_all(IN_PAGES);
        bench.check_valid_read()?;
        bench.finish(fixture)?;
    }
    Ok(())
}

pub(super) fn to_a_read_only_disk(fixture: &mut LoopbackFixture) -> Result<()> {
    fixture.set_content(DEFAULT_DISK, &vec![ON_DISK; SECTORS as usize * SECTOR])?;
    let mut guest = fixture.create_with(DEFAULT_DISK, |vbd| vbd.writable = false)?;
    guest.connect(FrontendConfig::default())?;
    let info = guest.front.info()?;
    ensure!(info.read_only, "{info:?}");
    let (data, tables) = (guest.pages(12)?, guest.pages(4)?);
    let mut bench = Bench { guest, data, tables, disk: DEFAULT_DISK };
    let twelve = bench.grefs(12);
    bench.tables.write(0, 0, &segment_table(&twelve));
    let some = bench.grefs(3);
    for (name, request) in [
        ("a write", transfer(WRITE, 0, &some)),
        ("an indirect write", indirect(WRITE, 0, &[bench.tables.gref(0)], 12)),
        ("a discard", discard(0, 8, 0)),
        ("a barrier with data", transfer(operation::WRITE_BARRIER, 0, &some)),
        ("a flush with data", transfer(operation::FLUSH_DISKCACHE, 0, &some)),
    ] {
        let refused = match request.operation {
            operation::DISCARD if info.discard.is_none() => status::NOT_SUPPORTED,
            operation::WRITE_BARRIER if !info.barrier => status::NOT_SUPPORTED,
            operation::FLUSH_DISKCACHE if !info.flush => status::NOT_SUPPORTED,
            _ => status::ERROR,
        };
        bench.expect_status(name, &request, refused)?;
        bench.check_valid_read().with_context(|| name)?;
    }
    bench.finish(fixture)
}

pub(super) fn misaligned(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut bench = Bench::new(fixture, BLOCKS_4K, Abi::X86_64)?;
    let info = bench.guest.front.info()?;
    // Sizes are in 512-byte sectors, regardless of the block size.
    ensure!((info.block_size.bytes(), info.capacity.0) == (4096, SECTORS), "{info:?}");
    let page = bench.data.gref(0);
    for op in [READ, WRITE, operation::FLUSH_DISKCACHE, operation::WRITE_BARRIER] {
        for sector in [1, 4, 7, 9, SECTORS - 4] {
            bench.expect_status(
                &format!("{op} at {sector}"),
                &transfer(op, sector, &[whole_page(page)]),
                status::ERROR,
            )?;
        }
        for (first, last) in [(0, 0), (0, 6), (1, 7), (4, 7)] {
            let one = [segment(page, first, last)];
            bench.expect_status(&format!("{op} of {first} to {last}"), &transfer(op, 0, &one), status::ERROR)?;
        }
        // Each segment must be aligned, not only their sum.
        let halves = [segment(page, 0, 3), segment(page, 4, 7)];
        bench.expect_status(&format!("{op} of two halves"), &transfer(op, 0, &halves), status::ERROR)?;
    }
    for (sector, sectors) in [(1, 8), (0, 7), (0, 9), (4, 4)] {
        bench.expect_status(
            &format!("discard of {sectors} at {sector}"),
            &discard(sector, sectors, 0),
            status::ERROR,
        )?;
    }
    let response_status = bench.guest.rings[0].run(&transfer(READ, SECTORS - 8, &[whole_page(page)]))?;
    ensure!(
        response_status == status::OKAY && bench.data.is_filled(0, ON_DISK),
        "a good read: status {response_status}"
    );
    bench.finish(fixture)
}

pub(super) fn unknown_operations(fixture: &mut LoopbackFixture) -> Result<()> {
    for abi in Abi::ALL {
        let mut bench = Bench::new(fixture, DEFAULT_DISK, abi)?;
        for op in [4].into_iter().chain(7..=255) {
            let mut bytes = [0; 112];
            // Looks like a write if the operation is ignored.
            let write = RawRequest::encode(
                abi,
                &BlkifRequest { id: u64::from(op) << 40, ..transfer(WRITE, 0, &bench.grefs(3)) },
            );
            bytes.copy_from_slice(write.bytes());
            bytes[0] = op;
            let response_status = bench.guest.rings[0].run_raw(&RawRequest::from_bytes(bytes), op)?;
            ensure!(response_status == status::NOT_SUPPORTED, "{abi:?}, operation {op}: status {response_status}");
        }
        bench.data.fill_all(IN_PAGES);
        bench.check_valid_read()?;
        bench.finish(fixture)?;
    }
    Ok(())
}

pub(super) fn bad_grants(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut bench = Bench::new(fixture, disk, Abi::X86_64)?;
        let back = bench.guest.vbd.backend;
        let strangers = bench.guest.pages_for(OTHER_DOMAIN, 2, true)?;
        let read_only = bench.guest.pages_for(back, 2, false)?;
        let ended = bench.guest.pages(1)?.gref(0);
        read_only.fill_all(IN_PAGES);
        strangers.fill_all(IN_PAGES);
        let good = whole_page(bench.data.gref(0));
        for (name, bad) in [
            ("no grant", GrantRef(u32::MAX)),
            ("grant 0", GrantRef(0)),
            ("a grant that has ended", ended),
            ("a grant for another domain", strangers.gref(0)),
        ] {
            for op in [READ, WRITE] {
                bench.expect_status(&format!("{name}, {op}"), &transfer(op, 8, &[whole_page(bad)]), status::ERROR)?;
            }
            let write = transfer(WRITE, 8, &[good, whole_page(bad), good]);
            bench.expect_status(&format!("{name} among others"), &write, status::ERROR)?;
            bench.expect_status(&format!("{name} of segments"), &indirect(WRITE, 8, &[bad], 20), status::ERROR)?;
            // The read may or may not fill the valid pages.
            let response_status = bench.guest.rings[0].run(&transfer(READ, 8, &[good, whole_page(bad)]))?;
            ensure!(response_status == status::ERROR, "{name} among others, read: status {response_status}");
            bench.data.fill_all(IN_PAGES);
            bench.check_valid_read().with_context(|| name)?;
        }
        // A read-only page can be the source of data, but not its destination.
        let page = whole_page(read_only.gref(0));
        bench.expect_status("a read to a page that may not be written", &transfer(READ, 8, &[page]), status::ERROR)?;
        ensure!(read_only.is_filled(0, IN_PAGES), "a page that must not be written was");
        read_only.fill(0, ON_DISK);
        bench.expect_status(
            "a write from a page that may not be written",
            &transfer(WRITE, 8, &[page]),
            status::OKAY,
        )?;
        read_only.write(1, 0, &segment_table(&bench.grefs(12)));
        bench.data.fill_all(ON_DISK);
        let write = bench.guest.rings[0].run(&indirect(WRITE, 8, &[read_only.gref(1)], 12))?;
        ensure!(write == status::OKAY, "segments in a page that may not be written: status {write}");
        ensure!(strangers.is_filled(0, IN_PAGES), "a page for another domain was written");
        bench.finish(fixture).with_context(|| disk.id)?;
    }
    Ok(())
}

pub(super) fn grants_that_end(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut bench = Bench::new(fixture, disk, Abi::X86_64)?;
        for turn in 0..fixture.repetitions(60) {
            let pages = bench.guest.pages(8)?;
            pages.fill_all(ON_DISK);
            let ring = &mut bench.guest.rings[0];
            for at in 0..24_u64 {
                let operation = if at % 2 == 0 { WRITE } else { READ };
                let segments: Vec<_> = (0..8).map(|page| whole_page(pages.gref(page))).collect();
                ring.send(&BlkifRequest { id: at, ..transfer(operation, at * 64, &segments) })?;
            }
            // Some have completed, some are in flight, some have not been parsed.
            (0..turn % 7).try_for_each(|_| ring.poll().map(drop))?;
            drop(pages);
            for _ in turn % 7..24 {
                let response = ring.poll()?;
                ensure!([status::OKAY, status::ERROR].contains(&response.status), "{response:?}");
            }
        }
        bench.data.fill_all(IN_PAGES);
        bench.check_valid_read()?;
        // A page whose grant has ended holds zeroes, or its old content.
        bench.guest.detach()?;
        let content = fixture.content(disk)?;
        ensure!(content.iter().all(|byte| [0, ON_DISK].contains(byte)), "{}: the disk holds something else", disk.id);
    }
    Ok(())
}

pub(super) fn tables_that_are_data(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut bench = Bench::new(fixture, disk, Abi::X86_64)?;
        let guard = bench.guest.pages(1)?;
        guard.fill(0, IN_PAGES);
        // The data read over the indirect page names the guard page. The request does not.
        let evil = segment_table(&[whole_page(guard.gref(0)); 512]);
        fixture.set_content(disk, &evil.repeat(SECTORS as usize * SECTOR / PAGE))?;
        let all: Vec<Segment> = (0..24)
            .map(|at| if at % 2 == 0 { whole_page(bench.tables.gref(0)) } else { whole_page(bench.data.gref(at / 2)) })
            .collect();
        for _ in 0..fixture.repetitions(50) {
            bench.tables.write(0, 0, &segment_table(&all));
            bench.data.fill_all(IN_PAGES);
            let response_status = bench.guest.rings[0].run(&indirect(READ, 0, &[bench.tables.gref(0)], 24))?;
            ensure!(response_status == status::OKAY, "{}: status {response_status}", disk.id);
            ensure!(bench.tables.page(0) == evil, "{}: the page of segments holds something else", disk.id);
            let read = (0..12).all(|page| bench.data.page(page) == evil);
            ensure!(read && guard.is_filled(0, IN_PAGES), "{}: other pages than the request's were written", disk.id);
        }
        // The other direction: the indirect page itself is written to the disk.
        bench.tables.write(0, 0, &segment_table(&all));
        let response_status = bench.guest.rings[0].run(&indirect(WRITE, 4096, &[bench.tables.gref(0)], 24))?;
        let expected = bench.tables.page(0);
        bench.guest.detach()?;
        let content = fixture.content(disk)?;
        let at = 4096 * SECTOR;
        ensure!(
            response_status == status::OKAY && content[at..at + PAGE] == expected,
            "{}: status {response_status}",
            disk.id
        );
    }
    Ok(())
}

pub(super) fn the_ring_as_data(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let content = fixture.content(disk)?;
        let mut guest = fixture.attach(disk, FrontendConfig { rings: 2, ..FrontendConfig::default() })?;
        let data = guest.pages(1)?;
        // A write to the disk is harmless.
        let own = guest.rings[0].raw.pages.refs[0];
        let response_status = guest.rings[0].run(&transfer(WRITE, 0, &[whole_page(own)]))?;
        ensure!(response_status == status::OKAY, "{}: the ring's page was not written: {response_status}", disk.id);
        // A read over the entries, which the backend copies before it parses them.
        data.fill(0, 0xff);
        let filled = guest.rings[0].run(&transfer(WRITE, 64, &[whole_page(data.gref(0))]))?;
        ensure!(filled == status::OKAY, "{}: status {filled}", disk.id);
        let entries = segment(own, 1, 7);
        for id in 0..16 {
            guest.rings[0].send(&BlkifRequest { id, ..transfer(READ, 64, &[entries]) })?;
        }
        // A read over the indices: the ring breaks, or the frontend sees wrong indices.
        let other = guest.rings[1].raw.pages.refs[0];
        guest.rings[0].send(&transfer(READ, 64, &[whole_page(other)]))?;
        guest.rings[1].raw.notify();
        std::thread::sleep(crate::loopback::QUIET_TIME);
        guest.detach()?;
        fixture.set_content(disk, &content)?;
        fixture.check_neighbour()?;
    }
    Ok(())
}
