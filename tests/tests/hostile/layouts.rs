//! Unusual but valid layouts of requests: each must work.

use mqblk_tests::hostile::memory::{END, SEAM};
use mqblk_tests::hostile::request::{STATUS_OK, header, range, readable, request_type, writable};
use mqblk_tests::hostile::ring::{INDIRECT, NEXT, RawDescriptor, WRITE};
use mqblk_tests::hostile::ring_cases::{READ_USED_LEN, RingCase, SECTORS, pattern, run_ring_cases};
use mqblk_tests::hostile::ring_fixture::ExpectedResult::Completed;
use mqblk_tests::hostile::ring_fixture::{DATA, HEADER, TABLE, UNMAPPED};

#[test]
fn layouts_that_are_unusual_but_valid() {
    let rows: &[RingCase] = &[
        (
            "header in 17 descriptors",
            |c| {
                let bytes = header(request_type::IN, 3);
                let mut pieces: Vec<_> =
                    (0..16).map(|at| c.data_out(HEADER + at * 100, &bytes[at as usize..at as usize + 1])).collect();
                pieces.insert(7, readable(HEADER + 0x2000, 0));
                let data = c.data_in(DATA, 512);
                pieces.extend([data, c.status()]);
                c.reads = Some((3, vec![data]));
                c.direct(&pieces);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "header and data in one descriptor",
            |c| {
                let data = pattern(1, 1024);
                let all = c.data_out(DATA, &[&header(request_type::OUT, 9)[..], &data].concat());
                c.direct(&[all, c.status()]);
                c.expect_content(9, &data);
            },
            Completed(STATUS_OK, 1),
        ),
        (
            "header, data and their end each astride descriptors",
            |c| {
                let data = pattern(2, 1024);
                let all = [&header(request_type::OUT, 11)[..], &data].concat();
                let pieces = [
                    c.data_out(DATA, &all[..5]),
                    c.data_out(DATA + 0x1001, &all[5..700]),
                    c.data_out(DATA + 0x2003, &all[700..]),
                ];
                c.direct(&[&pieces[..], &[c.status()]].concat());
                c.expect_content(11, &data);
            },
            Completed(STATUS_OK, 1),
        ),
        (
            "status in the data's descriptor",
            |c| {
                let all = c.data_in(DATA, 513);
                c.status = DATA + 512;
                c.reads = Some((5, vec![readable(DATA, 512)]));
                let head = c.header(request_type::IN, 5);
                c.direct(&[head, all]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "status after a descriptor of length 0",
            |c| {
                let all = c.data_in(DATA, 513);
                c.status = DATA + 512;
                c.reads = Some((5, vec![readable(DATA, 512)]));
                let head = c.header(request_type::IN, 5);
                c.direct(&[head, all, writable(UNMAPPED, 0)]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "descriptors of length 0 everywhere, at unmapped addresses",
            |c| {
                let (head, data, nothing) =
                    (c.header(request_type::IN, 6), c.data_in(DATA, 512), readable(UNMAPPED, 0));
                c.reads = Some((6, vec![data]));
                let status = c.status();
                c.direct(&[nothing, head, nothing, writable(u64::MAX, 0), data, writable(0, 0), status]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "a read in pieces of 1 byte, indirect",
            |c| {
                let pieces: Vec<_> = (0..512).map(|at| c.data_in(DATA + 3 * at, 1)).collect();
                c.reads = Some((8, pieces.clone()));
                let all = [&[c.header(request_type::IN, 8)][..], &pieces, &[c.status()]].concat();
                c.indirect(&all);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "a write in pieces of 1 byte, indirect",
            |c| {
                let data = pattern(3, 512);
                let pieces: Vec<_> = (0..).zip(&data).map(|(at, byte)| c.data_out(DATA + 5 * at, &[*byte])).collect();
                let all = [&[c.header(request_type::OUT, 13)][..], &pieces, &[c.status()]].concat();
                c.indirect(&all);
                c.expect_content(13, &data);
            },
            Completed(STATUS_OK, 1),
        ),
        (
            "direct descriptors, then an indirect table",
            |c| {
                let data = c.data_in(DATA, 512);
                c.reads = Some((4, vec![data]));
                let (head, status) = (c.header(request_type::IN, 4), c.status());
                c.write_descriptor(9, head.address, 7, NEXT, 2);
                c.write_descriptor(2, head.address + 7, 9, NEXT, 5);
                let entries = [
                    RawDescriptor { address: DATA, len: 512, flags: WRITE | NEXT, next: 1 },
                    RawDescriptor { address: status.address, len: 1, flags: WRITE, next: 0 },
                ];
                for (at, entry) in (0..).zip(entries) {
                    c.write(TABLE + 16 * at, &entry.bytes());
                }
                c.write_descriptor(5, TABLE, 32, INDIRECT | WRITE, 0);
                c.offer(9);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "an indirect table in an order of its own, with entries left over, not aligned",
            |c| {
                let data = c.data_in(DATA, 512);
                c.reads = Some((4, vec![data]));
                let (head, status) = (c.header(request_type::IN, 4), c.status());
                let entries = [
                    RawDescriptor { address: head.address, len: 16, flags: NEXT, next: 3 },
                    RawDescriptor { address: status.address, len: 1, flags: WRITE, next: 7 },
                    RawDescriptor { address: UNMAPPED, len: 77, flags: INDIRECT | NEXT, next: 99 },
                    RawDescriptor { address: DATA, len: 512, flags: WRITE | NEXT, next: 1 },
                ];
                for (at, entry) in (0..).zip(entries) {
                    c.write(TABLE + 3 + 16 * at, &entry.bytes());
                }
                c.write_descriptor(0, TABLE + 3, 64, INDIRECT, 0);
                c.offer(0);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "an indirect chain longer than the ring",
            |c| {
                let pieces: Vec<_> = (0..128).map(|at| c.data_in(DATA + 64 * at, 8)).collect();
                c.reads = Some((2, pieces.clone()));
                let all = [&[c.header(request_type::IN, 2)][..], &pieces, &[c.status()]].concat();
                c.indirect(&all);
            },
            Completed(STATUS_OK, 1025),
        ),
        (
            "a chain as long as the ring",
            |c| {
                let pieces: Vec<_> = (0..62).map(|at| c.data_in(DATA + 1024 * at, 512)).collect();
                c.reads = Some((2, pieces.clone()));
                let all = [&[c.header(request_type::IN, 2)][..], &pieces, &[c.status()]].concat();
                c.direct(&all);
            },
            Completed(STATUS_OK, 62 * 512 + 1),
        ),
        (
            "data across two memory regions",
            |c| {
                let data = c.data_in(SEAM - 100, 1024);
                c.reads = Some((7, vec![data]));
                c.request(request_type::IN, 7, &[data]);
            },
            Completed(STATUS_OK, 1025),
        ),
        (
            "a header across two memory regions",
            |c| {
                c.write(SEAM - 6, &header(request_type::IN, 7));
                let data = c.data_in(DATA, 512);
                c.reads = Some((7, vec![data]));
                c.direct(&[readable(SEAM - 6, 16), data, c.status()]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "an indirect table across two memory regions",
            |c| {
                let data = c.data_in(DATA, 512);
                c.reads = Some((7, vec![data]));
                let (head, status) = (c.header(request_type::IN, 7), c.status());
                let entries = [
                    RawDescriptor { address: head.address, len: 16, flags: NEXT, next: 1 },
                    RawDescriptor { address: DATA, len: 512, flags: WRITE | NEXT, next: 2 },
                    RawDescriptor { address: status.address, len: 1, flags: WRITE, next: 0 },
                ];
                for (at, entry) in (0..).zip(entries) {
                    c.write(SEAM - 24 + 16 * at, &entry.bytes());
                }
                c.write_descriptor(0, SEAM - 24, 48, INDIRECT, 0);
                c.offer(0);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "data and status at the very end of memory",
            |c| {
                let all = c.data_in(END - 513, 513);
                c.status = END - 1;
                c.reads = Some((5, vec![readable(END - 513, 512)]));
                let head = c.header(request_type::IN, 5);
                c.direct(&[head, all]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "status on top of the data",
            |c| {
                let data = c.data_in(DATA, 512);
                c.status = DATA + 17;
                c.reads = Some((5, vec![data]));
                let head = c.header(request_type::IN, 5);
                c.direct(&[head, data, writable(DATA + 17, 1)]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "the same memory in all data pieces",
            |c| {
                let data = pattern(4, 512);
                let piece = c.data_out(DATA, &data);
                c.request(request_type::OUT, 30, &[piece, piece, piece]);
                c.expect_content(30, &[&data[..], &data, &data].concat());
            },
            Completed(STATUS_OK, 1),
        ),
        (
            "the last sector",
            |c| {
                let data = c.data_in(DATA, 512);
                c.reads = Some((SECTORS - 1, vec![data]));
                c.request(request_type::IN, SECTORS - 1, &[data]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        ("a read of nothing", |c| c.request(request_type::IN, 1, &[]), Completed(STATUS_OK, 1)),
        ("a write of nothing", |c| c.request(request_type::OUT, 1, &[]), Completed(STATUS_OK, 1)),
        ("a flush", |c| c.request(request_type::FLUSH, 0, &[]), Completed(STATUS_OK, 1)),
        (
            "a flush with an ioprio and a sector",
            |c| {
                c.write(HEADER, &[&header(request_type::FLUSH, 77)[..4], &[9; 12]].concat());
                c.direct(&[readable(HEADER, 16), c.status()]);
            },
            Completed(STATUS_OK, 1),
        ),
        (
            "identification",
            |c| {
                let room = c.data_in(DATA, 20);
                c.request(request_type::GET_ID, 0, &[room]);
            },
            Completed(STATUS_OK, 21),
        ),
        (
            "identification in a short buffer",
            |c| {
                let room = c.data_in(DATA, 5);
                c.request(request_type::GET_ID, 0, &[room]);
            },
            Completed(STATUS_OK, 6),
        ),
        (
            "identification in a long buffer",
            |c| {
                let room = c.data_in(DATA, 20);
                c.request(request_type::GET_ID, 0, &[room, writable(DATA + 20, 80)]);
            },
            Completed(STATUS_OK, 21),
        ),
        (
            "identification in several pieces",
            |c| {
                let pieces = [c.data_in(DATA, 7), c.data_in(DATA + 100, 1), c.data_in(DATA + 200, 12)];
                c.request(request_type::GET_ID, 0, &pieces);
            },
            Completed(STATUS_OK, 21),
        ),
        ("identification without a buffer", |c| c.request(request_type::GET_ID, 0, &[]), Completed(STATUS_OK, 1)),
        (
            "a discard of 64 ranges",
            |c| {
                let list: Vec<u8> = (0..64).flat_map(|at| range(100 + 2 * at, 1, 0)).collect();
                c.ranges(request_type::DISCARD, &list);
                (0..64).for_each(|at| c.expect_content(100 + 2 * at, &[0; 512]));
            },
            Completed(STATUS_OK, 1),
        ),
        ("a discard of no sectors", |c| c.ranges(request_type::DISCARD, &range(5, 0, 0)), Completed(STATUS_OK, 1)),
        (
            "a discard whose list is in pieces",
            |c| {
                let list = [range(300, 8, 0), range(310, 1, 0)].concat();
                let pieces = [
                    c.data_out(DATA, &list[..3]),
                    c.data_out(DATA + 64, &list[3..17]),
                    c.data_out(DATA + 256, &list[17..]),
                ];
                c.request(request_type::DISCARD, 0, &pieces);
                c.expect_content(300, &[0; 8 * 512]);
                c.expect_content(310, &[0; 512]);
            },
            Completed(STATUS_OK, 1),
        ),
        (
            "zeroes written, one range to be unmapped and one not",
            |c| {
                c.ranges(request_type::WRITE_ZEROES, &[range(400, 8, 1), range(410, 3, 0)].concat());
                c.expect_content(400, &[0; 8 * 512]);
                c.expect_content(410, &[0; 3 * 512]);
            },
            Completed(STATUS_OK, 1),
        ),
    ];
    run_ring_cases("odd", ",serial=hostile", true, rows);
}
