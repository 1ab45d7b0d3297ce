//! Malformed and odd rings, one by one, against a real daemon: the right answer for each, the disk unharmed, and a good disk
//! on the same worker verified all through.

use mqblk_tests::hostile::case::{Case, DATA, Expect, HEADER, NOWHERE, STATUS, TABLE, content, fill};
use mqblk_tests::hostile::daemon::Daemon;
use mqblk_tests::hostile::load::Neighbour;
use mqblk_tests::hostile::memory::{END, SEAM, START};
use mqblk_tests::hostile::request::{IOERR, OK, SECTOR, UNSUPP, header, kind, range, readable, writable};
use mqblk_tests::hostile::ring::{Desc, INDIRECT, NEXT, WRITE};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use Expect::{Answer, Anything, Retired, Returned};

/// Bytes of each disk.
const DISK: usize = 1 << 20;
/// Its sectors.
const SECTORS: u64 = (DISK / SECTOR) as u64;
/// Used length of a successful read of one sector.
const READ: u32 = SECTOR as u32 + 1;

/// Its name, how it is built, and what must come of it.
type Row = (&'static str, fn(&mut Case<'_>), Expect);

/// Content that tells every byte from its neighbours.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

/// Runs a table against the disk `id`.
fn run(id: &str, settings: &str, writable: bool, rows: &[Row]) {
    let disk = format!("storage=ram,size=1M,queues=2,queue-size=256{settings}");
    let good = "storage=ram,size=1M,queues=1";
    let mut daemon = Daemon::start(1, &[(id, &disk), ("good", good)]);
    let neighbour = Neighbour::start(daemon.socket("good"), 1, 1);
    let socket = daemon.socket(id);
    let mut model = if writable { pattern(7, DISK) } else { vec![0; DISK] };
    if writable {
        fill(&socket, &model);
    }
    let mut failed = Vec::new();
    for (name, build, expect) in rows {
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut case = Case::new(&socket, &mut model);
            build(&mut case);
            case.check(*expect);
        }));
        daemon.assert_alive(name);
        neighbour.assert_goes_on(name);
        let found = content(&socket, DISK);
        if checked.is_err() {
            failed.push(format!("{name}: see above"));
        } else if found != model {
            failed.push(format!("{name}: the disk's content is not what it should be"));
        }
        model = found;
    }
    assert!(failed.is_empty(), "{} of {} rings:\n{}", failed.len(), rows.len(), failed.join("\n"));
    assert!(neighbour.finish() > 0);
    let retired = rows.iter().filter(|row| row.2 == Retired).count();
    let lines = daemon.complaints(id).iter().filter(|line| line.contains("queue retired")).count();
    assert!(lines >= retired, "{lines} log lines for {retired} retired queues");
    daemon.stop();
}

#[test]
fn layouts_that_are_odd_but_right() {
    let rows: &[Row] = &[
        (
            "header in 17 descriptors",
            |c| {
                let bytes = header(kind::IN, 3);
                let mut pieces: Vec<_> =
                    (0..16).map(|at| c.out(HEADER + at * 100, &bytes[at as usize..at as usize + 1])).collect();
                pieces.insert(7, readable(HEADER + 0x2000, 0));
                let data = c.room(DATA, 512);
                pieces.extend([data, c.status()]);
                c.reads = Some((3, vec![data]));
                c.direct(&pieces);
            },
            Answer(OK, READ),
        ),
        (
            "header and data in one descriptor",
            |c| {
                let data = pattern(1, 1024);
                let all = c.out(DATA, &[&header(kind::OUT, 9)[..], &data].concat());
                c.direct(&[all, c.status()]);
                c.stored(9, &data);
            },
            Answer(OK, 1),
        ),
        (
            "header, data and their end each astride descriptors",
            |c| {
                let data = pattern(2, 1024);
                let all = [&header(kind::OUT, 11)[..], &data].concat();
                let pieces =
                    [c.out(DATA, &all[..5]), c.out(DATA + 0x1001, &all[5..700]), c.out(DATA + 0x2003, &all[700..])];
                c.direct(&[&pieces[..], &[c.status()]].concat());
                c.stored(11, &data);
            },
            Answer(OK, 1),
        ),
        (
            "status in the data's descriptor",
            |c| {
                let all = c.room(DATA, 513);
                c.status = DATA + 512;
                c.reads = Some((5, vec![readable(DATA, 512)]));
                let head = c.header(kind::IN, 5);
                c.direct(&[head, all]);
            },
            Answer(OK, READ),
        ),
        (
            "status after a descriptor of length 0",
            |c| {
                let all = c.room(DATA, 513);
                c.status = DATA + 512;
                c.reads = Some((5, vec![readable(DATA, 512)]));
                let head = c.header(kind::IN, 5);
                c.direct(&[head, all, writable(NOWHERE, 0)]);
            },
            Answer(OK, READ),
        ),
        (
            "descriptors of length 0 everywhere, at unmapped addresses",
            |c| {
                let (head, data, nothing) = (c.header(kind::IN, 6), c.room(DATA, 512), readable(NOWHERE, 0));
                c.reads = Some((6, vec![data]));
                let status = c.status();
                c.direct(&[nothing, head, nothing, writable(u64::MAX, 0), data, writable(0, 0), status]);
            },
            Answer(OK, READ),
        ),
        (
            "a read in pieces of 1 byte, indirect",
            |c| {
                let pieces: Vec<_> = (0..512).map(|at| c.room(DATA + 3 * at, 1)).collect();
                c.reads = Some((8, pieces.clone()));
                let all = [&[c.header(kind::IN, 8)][..], &pieces, &[c.status()]].concat();
                c.indirect(&all);
            },
            Answer(OK, READ),
        ),
        (
            "a write in pieces of 1 byte, indirect",
            |c| {
                let data = pattern(3, 512);
                let pieces: Vec<_> = (0..).zip(&data).map(|(at, byte)| c.out(DATA + 5 * at, &[*byte])).collect();
                let all = [&[c.header(kind::OUT, 13)][..], &pieces, &[c.status()]].concat();
                c.indirect(&all);
                c.stored(13, &data);
            },
            Answer(OK, 1),
        ),
        (
            "direct descriptors, then an indirect table",
            |c| {
                let data = c.room(DATA, 512);
                c.reads = Some((4, vec![data]));
                let (head, status) = (c.header(kind::IN, 4), c.status());
                c.put(9, head.address, 7, NEXT, 2);
                c.put(2, head.address + 7, 9, NEXT, 5);
                let entries = [
                    Desc { address: DATA, len: 512, flags: WRITE | NEXT, next: 1 },
                    Desc { address: status.address, len: 1, flags: WRITE, next: 0 },
                ];
                for (at, entry) in (0..).zip(entries) {
                    c.write(TABLE + 16 * at, &entry.bytes());
                }
                c.put(5, TABLE, 32, INDIRECT | WRITE, 0);
                c.offer(9);
            },
            Answer(OK, READ),
        ),
        (
            "an indirect table in an order of its own, with entries left over, not aligned",
            |c| {
                let data = c.room(DATA, 512);
                c.reads = Some((4, vec![data]));
                let (head, status) = (c.header(kind::IN, 4), c.status());
                let entries = [
                    Desc { address: head.address, len: 16, flags: NEXT, next: 3 },
                    Desc { address: status.address, len: 1, flags: WRITE, next: 7 },
                    Desc { address: NOWHERE, len: 77, flags: INDIRECT | NEXT, next: 99 },
                    Desc { address: DATA, len: 512, flags: WRITE | NEXT, next: 1 },
                ];
                for (at, entry) in (0..).zip(entries) {
                    c.write(TABLE + 3 + 16 * at, &entry.bytes());
                }
                c.put(0, TABLE + 3, 64, INDIRECT, 0);
                c.offer(0);
            },
            Answer(OK, READ),
        ),
        (
            "an indirect chain longer than the ring",
            |c| {
                let pieces: Vec<_> = (0..128).map(|at| c.room(DATA + 64 * at, 8)).collect();
                c.reads = Some((2, pieces.clone()));
                let all = [&[c.header(kind::IN, 2)][..], &pieces, &[c.status()]].concat();
                c.indirect(&all);
            },
            Answer(OK, 1025),
        ),
        (
            "a chain as long as the ring",
            |c| {
                let pieces: Vec<_> = (0..62).map(|at| c.room(DATA + 1024 * at, 512)).collect();
                c.reads = Some((2, pieces.clone()));
                let all = [&[c.header(kind::IN, 2)][..], &pieces, &[c.status()]].concat();
                c.direct(&all);
            },
            Answer(OK, 62 * 512 + 1),
        ),
        (
            "data across two memory regions",
            |c| {
                let data = c.room(SEAM - 100, 1024);
                c.reads = Some((7, vec![data]));
                c.request(kind::IN, 7, &[data]);
            },
            Answer(OK, 1025),
        ),
        (
            "a header across two memory regions",
            |c| {
                c.write(SEAM - 6, &header(kind::IN, 7));
                let data = c.room(DATA, 512);
                c.reads = Some((7, vec![data]));
                c.direct(&[readable(SEAM - 6, 16), data, c.status()]);
            },
            Answer(OK, READ),
        ),
        (
            "an indirect table across two memory regions",
            |c| {
                let data = c.room(DATA, 512);
                c.reads = Some((7, vec![data]));
                let (head, status) = (c.header(kind::IN, 7), c.status());
                let entries = [
                    Desc { address: head.address, len: 16, flags: NEXT, next: 1 },
                    Desc { address: DATA, len: 512, flags: WRITE | NEXT, next: 2 },
                    Desc { address: status.address, len: 1, flags: WRITE, next: 0 },
                ];
                for (at, entry) in (0..).zip(entries) {
                    c.write(SEAM - 24 + 16 * at, &entry.bytes());
                }
                c.put(0, SEAM - 24, 48, INDIRECT, 0);
                c.offer(0);
            },
            Answer(OK, READ),
        ),
        (
            "data and status at the very end of memory",
            |c| {
                let all = c.room(END - 513, 513);
                c.status = END - 1;
                c.reads = Some((5, vec![readable(END - 513, 512)]));
                let head = c.header(kind::IN, 5);
                c.direct(&[head, all]);
            },
            Answer(OK, READ),
        ),
        (
            "status on top of the data",
            |c| {
                let data = c.room(DATA, 512);
                c.status = DATA + 17;
                c.reads = Some((5, vec![data]));
                let head = c.header(kind::IN, 5);
                c.direct(&[head, data, writable(DATA + 17, 1)]);
            },
            Answer(OK, READ),
        ),
        (
            "the same memory in all data pieces",
            |c| {
                let data = pattern(4, 512);
                let piece = c.out(DATA, &data);
                c.request(kind::OUT, 30, &[piece, piece, piece]);
                c.stored(30, &[&data[..], &data, &data].concat());
            },
            Answer(OK, 1),
        ),
        (
            "the last sector",
            |c| {
                let data = c.room(DATA, 512);
                c.reads = Some((SECTORS - 1, vec![data]));
                c.request(kind::IN, SECTORS - 1, &[data]);
            },
            Answer(OK, READ),
        ),
        ("a read of nothing", |c| c.request(kind::IN, 1, &[]), Answer(OK, 1)),
        ("a write of nothing", |c| c.request(kind::OUT, 1, &[]), Answer(OK, 1)),
        ("a flush", |c| c.request(kind::FLUSH, 0, &[]), Answer(OK, 1)),
        (
            "a flush with an ioprio and a sector",
            |c| {
                c.write(HEADER, &[&header(kind::FLUSH, 77)[..4], &[9; 12]].concat());
                c.direct(&[readable(HEADER, 16), c.status()]);
            },
            Answer(OK, 1),
        ),
        (
            "identification",
            |c| {
                let room = c.room(DATA, 20);
                c.request(kind::GET_ID, 0, &[room]);
            },
            Answer(OK, 21),
        ),
        (
            "identification in a short buffer",
            |c| {
                let room = c.room(DATA, 5);
                c.request(kind::GET_ID, 0, &[room]);
            },
            Answer(OK, 6),
        ),
        (
            "identification in a long buffer",
            |c| {
                let room = c.room(DATA, 20);
                c.request(kind::GET_ID, 0, &[room, writable(DATA + 20, 80)]);
            },
            Answer(OK, 21),
        ),
        (
            "identification in several pieces",
            |c| {
                let pieces = [c.room(DATA, 7), c.room(DATA + 100, 1), c.room(DATA + 200, 12)];
                c.request(kind::GET_ID, 0, &pieces);
            },
            Answer(OK, 21),
        ),
        ("identification without a buffer", |c| c.request(kind::GET_ID, 0, &[]), Answer(OK, 1)),
        (
            "a discard of 64 ranges",
            |c| {
                let list: Vec<u8> = (0..64).flat_map(|at| range(100 + 2 * at, 1, 0)).collect();
                c.ranges(kind::DISCARD, &list);
                (0..64).for_each(|at| c.stored(100 + 2 * at, &[0; 512]));
            },
            Answer(OK, 1),
        ),
        ("a discard of no sectors", |c| c.ranges(kind::DISCARD, &range(5, 0, 0)), Answer(OK, 1)),
        (
            "a discard whose list is in pieces",
            |c| {
                let list = [range(300, 8, 0), range(310, 1, 0)].concat();
                let pieces = [c.out(DATA, &list[..3]), c.out(DATA + 64, &list[3..17]), c.out(DATA + 256, &list[17..])];
                c.request(kind::DISCARD, 0, &pieces);
                c.stored(300, &[0; 8 * 512]);
                c.stored(310, &[0; 512]);
            },
            Answer(OK, 1),
        ),
        (
            "zeroes written, one range to be unmapped and one not",
            |c| {
                c.ranges(kind::WRITE_ZEROES, &[range(400, 8, 1), range(410, 3, 0)].concat());
                c.stored(400, &[0; 8 * 512]);
                c.stored(410, &[0; 3 * 512]);
            },
            Answer(OK, 1),
        ),
    ];
    run("odd", ",serial=hostile", true, rows);
}

#[test]
fn requests_that_are_wrong() {
    let rows: &[Row] = &[
        ("data outside memory", |c| c.request(kind::OUT, 0, &[readable(NOWHERE, 512)]), Answer(IOERR, 1)),
        ("data at address 0", |c| c.request(kind::IN, 0, &[writable(0, 512)]), Answer(IOERR, 1)),
        (
            "data that runs past the end of memory",
            |c| {
                c.request(kind::IN, 0, &[writable(END - 511, 512)]);
            },
            Answer(IOERR, 1),
        ),
        ("data below the start of memory", |c| c.request(kind::IN, 0, &[writable(START - 1, 512)]), Answer(IOERR, 1)),
        (
            "data that wraps around the address space",
            |c| {
                c.request(kind::OUT, 0, &[readable(u64::MAX - 100, 512)]);
            },
            Answer(IOERR, 1),
        ),
        (
            "the second data piece outside memory",
            |c| {
                let first = c.out(DATA, &[1; 512]);
                c.request(kind::OUT, 0, &[first, readable(NOWHERE, 512)]);
            },
            Answer(IOERR, 1),
        ),
        ("data of 4 GiB less 512", |c| c.request(kind::OUT, 0, &[readable(DATA, 0xffff_fe00)]), Answer(IOERR, 1)),
        (
            "62 pieces of 4 GiB less 1",
            |c| {
                c.request(kind::IN, 0, &[writable(DATA, u32::MAX); 61]);
            },
            Answer(IOERR, 1),
        ),
        (
            "1022 pieces of 1 MiB, indirect",
            |c| {
                let mut all = vec![c.header(kind::OUT, 0)];
                all.extend([readable(START, 1 << 20); 1022]);
                all.push(c.status());
                c.indirect(&all);
            },
            Answer(IOERR, 1),
        ),
        (
            "header outside memory",
            |c| {
                let status = c.status();
                c.direct(&[readable(NOWHERE, 16), writable(DATA, 512), status]);
            },
            Answer(IOERR, 1),
        ),
        (
            "half a header outside memory",
            |c| {
                let status = c.status();
                c.direct(&[readable(END - 8, 16), writable(DATA, 512), status]);
            },
            Answer(IOERR, 1),
        ),
        (
            "header too short",
            |c| {
                let head = c.header(kind::FLUSH, 0);
                c.direct(&[readable(head.address, 15), c.status()]);
            },
            Answer(IOERR, 1),
        ),
        ("no header", |c| c.direct(&[writable(DATA, 512), c.status()]), Answer(IOERR, 1)),
        ("status alone", |c| c.direct(&[c.status()]), Answer(IOERR, 1)),
        (
            "status outside memory",
            |c| {
                let head = c.header(kind::OUT, 0);
                let data = c.out(DATA, &[1; 512]);
                c.direct(&[head, data, writable(NOWHERE, 1)]);
            },
            Returned,
        ),
        (
            "status at the end of the address space",
            |c| {
                let head = c.header(kind::FLUSH, 0);
                c.direct(&[head, writable(u64::MAX, 1)]);
            },
            Returned,
        ),
        (
            "status past the end of the address space",
            |c| {
                let head = c.header(kind::FLUSH, 0);
                c.direct(&[head, writable(u64::MAX, u32::MAX)]);
            },
            Returned,
        ),
        (
            "status not writable",
            |c| {
                let head = c.header(kind::OUT, 0);
                let data = c.out(DATA, &[1; 512]);
                c.direct(&[head, data, readable(STATUS, 1)]);
            },
            Returned,
        ),
        (
            "no writable descriptor",
            |c| {
                let head = c.header(kind::FLUSH, 0);
                c.direct(&[head]);
            },
            Returned,
        ),
        ("one descriptor of length 0", |c| c.direct(&[writable(DATA, 0)]), Returned),
        ("only descriptors of length 0", |c| c.direct(&[writable(DATA, 0); 64]), Returned),
        (
            "indirect table outside memory",
            |c| {
                c.put(0, NOWHERE, 48, INDIRECT, 0);
                c.offer(0);
            },
            Returned,
        ),
        (
            "indirect table past the end of the address space",
            |c| {
                c.put(0, u64::MAX - 7, 48, INDIRECT, 0);
                c.offer(0);
            },
            Returned,
        ),
        (
            "an indirect table of 1025 entries",
            |c| {
                let mut all = vec![c.header(kind::OUT, 0)];
                all.extend([readable(DATA, 1); 1023]);
                all.push(c.status());
                c.indirect(&all);
            },
            Returned,
        ),
        ("sector at the end of the disk", |c| c.request(kind::IN, SECTORS, &[writable(DATA, 512)]), Answer(IOERR, 1)),
        (
            "a read across the end of the disk",
            |c| {
                c.request(kind::IN, SECTORS - 1, &[writable(DATA, 1024)]);
            },
            Answer(IOERR, 1),
        ),
        (
            "a write across the end of the disk",
            |c| {
                let data = c.out(DATA, &[1; 1024]);
                c.request(kind::OUT, SECTORS - 1, &[data]);
            },
            Answer(IOERR, 1),
        ),
        ("nothing read past the end of the disk", |c| c.request(kind::IN, SECTORS + 1, &[]), Answer(IOERR, 1)),
        (
            "a sector that is 0 in 64 bits of bytes",
            |c| {
                let data = c.out(DATA, &[1; 512]);
                c.request(kind::OUT, 1 << 55, &[data]);
            },
            Answer(IOERR, 1),
        ),
        (
            "a sector that is 512 in 64 bits of bytes",
            |c| {
                c.request(kind::IN, (1 << 55) + 1, &[writable(DATA, 512)]);
            },
            Answer(IOERR, 1),
        ),
        ("the largest sector", |c| c.request(kind::IN, u64::MAX, &[writable(DATA, 512)]), Answer(IOERR, 1)),
        (
            "the largest sector whose end fits",
            |c| {
                c.request(kind::IN, (u64::MAX >> 9) - 1, &[writable(DATA, 1024)]);
            },
            Answer(IOERR, 1),
        ),
        ("a read of 511 bytes", |c| c.request(kind::IN, 0, &[writable(DATA, 511)]), Answer(IOERR, 1)),
        (
            "a write of 513 bytes",
            |c| {
                let data = c.out(DATA, &[1; 513]);
                c.request(kind::OUT, 0, &[data]);
            },
            Answer(IOERR, 1),
        ),
        (
            "a read with data to read",
            |c| {
                let data = c.out(DATA, &[1; 512]);
                c.request(kind::IN, 0, &[data, writable(DATA + 4096, 512)]);
            },
            Answer(IOERR, 1),
        ),
        (
            "a write with room to write",
            |c| {
                let data = c.out(DATA, &[1; 512]);
                c.request(kind::OUT, 0, &[data, writable(DATA + 4096, 512)]);
            },
            Answer(IOERR, 1),
        ),
        ("an unknown type", |c| c.request(99, 0, &[]), Answer(UNSUPP, 1)),
        (
            "an unknown type with data both ways",
            |c| {
                let data = c.out(DATA, &[1; 512]);
                c.request(0x8000_0001, 0, &[data, writable(DATA + 4096, 512)]);
            },
            Answer(UNSUPP, 1),
        ),
        ("the legacy SCSI type", |c| c.request(2, 0, &[writable(DATA, 96)]), Answer(UNSUPP, 1)),
        ("secure erase, not offered", |c| c.ranges(kind::SECURE_ERASE, &range(0, 8, 0)), Answer(UNSUPP, 1)),
        (
            "identification with data to read",
            |c| {
                let data = c.out(DATA, &[1; 20]);
                c.request(kind::GET_ID, 0, &[data]);
            },
            Answer(IOERR, 1),
        ),
        ("a discard of 0 ranges", |c| c.request(kind::DISCARD, 0, &[]), Answer(IOERR, 1)),
        ("a discard of 65 ranges", |c| c.ranges(kind::DISCARD, &range(0, 1, 0).repeat(65)), Answer(IOERR, 1)),
        (
            "a discard of 65536 ranges",
            |c| {
                c.request(kind::DISCARD, 0, &[readable(START, 1 << 20)]);
            },
            Answer(IOERR, 1),
        ),
        ("a discard of 15 bytes", |c| c.ranges(kind::DISCARD, &range(0, 1, 0)[..15]), Answer(IOERR, 1)),
        (
            "a discard of 17 bytes",
            |c| {
                c.ranges(kind::DISCARD, &[range(0, 1, 0), vec![0]].concat());
            },
            Answer(IOERR, 1),
        ),
        ("a discard with an unknown flag", |c| c.ranges(kind::DISCARD, &range(0, 1, 2)), Answer(UNSUPP, 1)),
        ("a discard with UNMAP", |c| c.ranges(kind::DISCARD, &range(0, 1, 1)), Answer(UNSUPP, 1)),
        ("a discard past the end", |c| c.ranges(kind::DISCARD, &range(SECTORS - 1, 2, 0)), Answer(IOERR, 1)),
        (
            "a discard of no sectors past the end",
            |c| {
                c.ranges(kind::DISCARD, &range(SECTORS + 1, 0, 0));
            },
            Answer(IOERR, 1),
        ),
        ("a discard whose sector overflows", |c| c.ranges(kind::DISCARD, &range(1 << 55, 1, 0)), Answer(IOERR, 1)),
        ("a discard of the most sectors", |c| c.ranges(kind::DISCARD, &range(0, u32::MAX, 0)), Answer(IOERR, 1)),
        (
            "a discard with one good and one bad range",
            |c| {
                c.ranges(kind::DISCARD, &[range(0, 8, 0), range(u64::MAX, 8, 0)].concat());
            },
            Answer(IOERR, 1),
        ),
        (
            "a discard with room to write",
            |c| {
                let list = c.out(DATA, &range(0, 1, 0));
                c.request(kind::DISCARD, 0, &[list, writable(DATA + 4096, 16)]);
            },
            Answer(IOERR, 1),
        ),
        (
            "a discard whose list is outside memory",
            |c| {
                c.request(kind::DISCARD, 0, &[readable(NOWHERE, 16)]);
            },
            Answer(IOERR, 1),
        ),
        ("zeroes with an unknown flag", |c| c.ranges(kind::WRITE_ZEROES, &range(0, 1, 3)), Answer(UNSUPP, 1)),
        ("zeroes past the end", |c| c.ranges(kind::WRITE_ZEROES, &range(SECTORS, 1, 1)), Answer(IOERR, 1)),
        ("zeroes in 65 ranges", |c| c.ranges(kind::WRITE_ZEROES, &range(0, 1, 0).repeat(65)), Answer(IOERR, 1)),
        (
            "zeroes with one good and one unknown range",
            |c| {
                c.ranges(kind::WRITE_ZEROES, &[range(0, 8, 0), range(8, 8, 0x8000_0000)].concat());
            },
            Answer(UNSUPP, 1),
        ),
    ];
    run("wrong", "", true, rows);
}

#[test]
fn rings_that_are_broken() {
    let rows: &[Row] = &[
        (
            "a descriptor that follows itself",
            |c| {
                c.put(0, DATA, 1, NEXT, 0);
                c.offer(0);
            },
            Retired,
        ),
        (
            "two descriptors that follow each other",
            |c| {
                c.put(0, HEADER, 16, NEXT, 1);
                c.put(1, DATA, 512, NEXT, 0);
                c.offer(0);
            },
            Retired,
        ),
        (
            "a loop at the end of a chain",
            |c| {
                for at in 0..64 {
                    c.put(at, DATA, 8, NEXT | WRITE, if at == 63 { 62 } else { at + 1 });
                }
                c.offer(0);
            },
            Retired,
        ),
        (
            "a loop of empty descriptors",
            |c| {
                c.put(0, DATA, 0, NEXT, 1);
                c.put(1, DATA, 0, NEXT, 0);
                c.offer(0);
            },
            Retired,
        ),
        (
            "a loop in an indirect table",
            |c| {
                let entry = |next| Desc { address: DATA, len: 4, flags: NEXT, next };
                c.table(&[entry(1), entry(2), entry(0)], 48, INDIRECT);
            },
            Retired,
        ),
        (
            "an indirect entry that follows itself",
            |c| {
                c.table(&[Desc { address: DATA, len: 0, flags: NEXT, next: 0 }], 16, INDIRECT);
            },
            Retired,
        ),
        ("a head outside the table", |c| c.offer(64), Retired),
        ("the largest head", |c| c.offer(u16::MAX), Retired),
        (
            "a next outside the table",
            |c| {
                c.put(0, HEADER, 16, NEXT, 64);
                c.offer(0);
            },
            Retired,
        ),
        (
            "the largest next",
            |c| {
                c.put(0, HEADER, 16, NEXT, u16::MAX);
                c.offer(0);
            },
            Retired,
        ),
        (
            "an indirect next outside its table",
            |c| {
                c.table(&[Desc { address: DATA, len: 16, flags: NEXT, next: 3 }; 3], 48, INDIRECT);
            },
            Retired,
        ),
        ("more available than the ring holds", |c| c.publish_now(65), Retired),
        ("an available index that goes back", |c| c.publish_now(u16::MAX), Retired),
        ("the farthest available index", |c| c.publish_now(0x8000), Retired),
        (
            "a head offered twice",
            |c| {
                let head = c.header(kind::FLUSH, 0);
                c.direct(&[head, c.status()]);
                c.offer(0);
            },
            Retired,
        ),
        (
            "a ring full of the same head",
            |c| {
                let head = c.header(kind::FLUSH, 0);
                c.direct(&[head, c.status()]);
                (0..63).for_each(|_| c.offer(0));
            },
            Retired,
        ),
        (
            "an indirect table that names another",
            |c| {
                c.table(&[Desc { address: TABLE + 64, len: 48, flags: INDIRECT, next: 0 }], 16, INDIRECT);
            },
            Retired,
        ),
        (
            "an indirect table that names itself in its second entry",
            |c| {
                let first = Desc { address: HEADER, len: 16, flags: NEXT, next: 1 };
                c.table(&[first, Desc { address: TABLE, len: 32, flags: INDIRECT | WRITE, next: 0 }], 32, INDIRECT);
            },
            Retired,
        ),
        (
            "INDIRECT and NEXT together",
            |c| {
                c.table(&[Desc { address: STATUS, len: 1, flags: WRITE, next: 0 }], 16, INDIRECT | NEXT);
            },
            Retired,
        ),
        ("an indirect table of length 0", |c| c.table(&[], 0, INDIRECT), Retired),
        ("an indirect table of 15 bytes", |c| c.table(&[Desc::default()], 15, INDIRECT), Retired),
        ("an indirect table of 17 bytes", |c| c.table(&[Desc::default(); 2], 17, INDIRECT), Retired),
        ("an indirect table of 4 GiB less 16", |c| c.table(&[Desc::default()], 0xffff_fff0, INDIRECT), Retired),
        ("an indirect table of 32769 entries", |c| c.table(&[Desc::default()], 32769 * 16, INDIRECT), Retired),
        (
            "a writable descriptor before a readable one",
            |c| {
                let (head, status) = (c.header(kind::FLUSH, 0), c.status());
                c.direct(&[status, head]);
            },
            Retired,
        ),
        (
            "a readable descriptor among the writable ones, in a table",
            |c| {
                let (head, status) = (c.header(kind::IN, 0), c.status());
                c.indirect(&[head, writable(DATA, 256), readable(DATA + 512, 8), writable(DATA + 256, 256), status]);
            },
            Retired,
        ),
        (
            "a read into the descriptor table",
            |c| {
                c.request(kind::IN, 0, &[writable(START, 1024)]);
            },
            Anything,
        ),
        (
            "a read into the available ring",
            |c| {
                c.request(kind::IN, 0, &[writable(START + 0x1000, 512)]);
            },
            Anything,
        ),
        (
            "a read into the used ring",
            |c| {
                c.request(kind::IN, 0, &[writable(START + 0x2000, 1024)]);
            },
            Anything,
        ),
        (
            "a status byte in the available index",
            |c| {
                let head = c.header(99, 0);
                c.direct(&[head, writable(START + 0x1003, 1)]);
            },
            Anything,
        ),
    ];
    run("broken", "", true, rows);
}

#[test]
fn a_read_only_disk() {
    let rows: &[Row] = &[
        (
            "a read",
            |c| {
                let data = c.room(DATA, 512);
                c.reads = Some((0, vec![data]));
                c.request(kind::IN, 0, &[data]);
            },
            Answer(OK, READ),
        ),
        (
            "a write",
            |c| {
                let data = c.out(DATA, &[1; 512]);
                c.request(kind::OUT, 0, &[data]);
            },
            Answer(IOERR, 1),
        ),
        (
            "a write past the end",
            |c| {
                let data = c.out(DATA, &[1; 512]);
                c.request(kind::OUT, SECTORS, &[data]);
            },
            Answer(IOERR, 1),
        ),
        ("a discard, not offered", |c| c.ranges(kind::DISCARD, &range(0, 1, 0)), Answer(UNSUPP, 1)),
        ("zeroes, not offered", |c| c.ranges(kind::WRITE_ZEROES, &range(0, 1, 0)), Answer(UNSUPP, 1)),
        ("a flush", |c| c.request(kind::FLUSH, 0, &[]), Answer(OK, 1)),
    ];
    run("readonly", ",readonly=on", false, rows);
}

#[test]
fn a_disk_of_4096_byte_blocks() {
    let rows: &[Row] = &[
        (
            "a block",
            |c| {
                let data = c.room(DATA, 4096);
                c.reads = Some((8, vec![data]));
                c.request(kind::IN, 8, &[data]);
            },
            Answer(OK, 4097),
        ),
        (
            "a block in pieces of 512 and less",
            |c| {
                let pieces = [c.room(DATA, 512), c.room(DATA + 4096, 3), c.room(DATA + 8192, 3581)];
                c.reads = Some((8, pieces.to_vec()));
                c.request(kind::IN, 8, &pieces);
            },
            Answer(OK, 4097),
        ),
        ("a sector at a block's start", |c| c.request(kind::IN, 8, &[writable(DATA, 512)]), Answer(IOERR, 1)),
        ("a block at a sector's start", |c| c.request(kind::IN, 1, &[writable(DATA, 4096)]), Answer(IOERR, 1)),
        (
            "a write of a sector",
            |c| {
                let data = c.out(DATA, &[1; 512]);
                c.request(kind::OUT, 0, &[data]);
            },
            Answer(IOERR, 1),
        ),
        (
            "a write at a sector",
            |c| {
                let data = c.out(DATA, &[1; 4096]);
                c.request(kind::OUT, 3, &[data]);
            },
            Answer(IOERR, 1),
        ),
        ("nothing read between blocks", |c| c.request(kind::IN, 3, &[]), Answer(IOERR, 1)),
        ("a discard of a sector", |c| c.ranges(kind::DISCARD, &range(0, 1, 0)), Answer(IOERR, 1)),
        ("a discard at a sector", |c| c.ranges(kind::DISCARD, &range(1, 8, 0)), Answer(IOERR, 1)),
        ("zeroes of a sector", |c| c.ranges(kind::WRITE_ZEROES, &range(8, 7, 1)), Answer(IOERR, 1)),
        (
            "zeroes of a block",
            |c| {
                c.ranges(kind::WRITE_ZEROES, &range(16, 8, 1));
                c.stored(16, &[0; 4096]);
            },
            Answer(OK, 1),
        ),
    ];
    run("large", ",block-size=4096", false, rows);
}
