//! Layouts of requests that are odd but right: each must work.

use mqblk_tests::hostile::case::Expect::Answer;
use mqblk_tests::hostile::case::{DATA, HEADER, NOWHERE, TABLE};
use mqblk_tests::hostile::memory::{END, SEAM};
use mqblk_tests::hostile::request::{OK, header, kind, range, readable, writable};
use mqblk_tests::hostile::ring::{Desc, INDIRECT, NEXT, WRITE};
use mqblk_tests::hostile::table::{READ, Row, SECTORS, pattern, run};

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
