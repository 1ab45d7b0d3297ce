//! Invalid requests: each gets the right status, and the queue continues.

use mqblk_tests::hostile::memory::{END, START};
use mqblk_tests::hostile::request::{STATUS_IOERR, STATUS_OK, STATUS_UNSUPP, range, readable, request_type, writable};
use mqblk_tests::hostile::ring::INDIRECT;
use mqblk_tests::hostile::ring_cases::{READ_USED_LEN, RingCase, SECTORS, run_ring_cases};
use mqblk_tests::hostile::ring_fixture::ExpectedResult::{Completed, Returned};
use mqblk_tests::hostile::ring_fixture::{DATA, STATUS, UNMAPPED};

#[test]
fn invalid_requests() {
    let rows: &[RingCase] = &[
        (
            "data outside memory",
            |c| c.request(request_type::OUT, 0, &[readable(UNMAPPED, 512)]),
            Completed(STATUS_IOERR, 1),
        ),
        ("data at address 0", |c| c.request(request_type::IN, 0, &[writable(0, 512)]), Completed(STATUS_IOERR, 1)),
        (
            "data that runs past the end of memory",
            |c| {
                c.request(request_type::IN, 0, &[writable(END - 511, 512)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "data below the start of memory",
            |c| c.request(request_type::IN, 0, &[writable(START - 1, 512)]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "data that wraps around the address space",
            |c| {
                c.request(request_type::OUT, 0, &[readable(u64::MAX - 100, 512)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "the second data piece outside memory",
            |c| {
                let first = c.data_out(DATA, &[1; 512]);
                c.request(request_type::OUT, 0, &[first, readable(UNMAPPED, 512)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "data of 4 GiB less 512",
            |c| c.request(request_type::OUT, 0, &[readable(DATA, 0xffff_fe00)]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "62 pieces of 4 GiB less 1",
            |c| {
                c.request(request_type::IN, 0, &[writable(DATA, u32::MAX); 61]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "1022 pieces of 1 MiB, indirect",
            |c| {
                let mut all = vec![c.header(request_type::OUT, 0)];
                all.extend([readable(START, 1 << 20); 1022]);
                all.push(c.status());
                c.indirect(&all);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "header outside memory",
            |c| {
                let status = c.status();
                c.direct(&[readable(UNMAPPED, 16), writable(DATA, 512), status]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "half a header outside memory",
            |c| {
                let status = c.status();
                c.direct(&[readable(END - 8, 16), writable(DATA, 512), status]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "header too short",
            |c| {
                let head = c.header(request_type::FLUSH, 0);
                c.direct(&[readable(head.address, 15), c.status()]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        ("no header", |c| c.direct(&[writable(DATA, 512), c.status()]), Completed(STATUS_IOERR, 1)),
        ("status alone", |c| c.direct(&[c.status()]), Completed(STATUS_IOERR, 1)),
        (
            "status outside memory",
            |c| {
                let head = c.header(request_type::OUT, 0);
                let data = c.data_out(DATA, &[1; 512]);
                c.direct(&[head, data, writable(UNMAPPED, 1)]);
            },
            Returned,
        ),
        (
            "status at the end of the address space",
            |c| {
                let head = c.header(request_type::FLUSH, 0);
                c.direct(&[head, writable(u64::MAX, 1)]);
            },
            Returned,
        ),
        (
            "status past the end of the address space",
            |c| {
                let head = c.header(request_type::FLUSH, 0);
                c.direct(&[head, writable(u64::MAX, u32::MAX)]);
            },
            Returned,
        ),
        (
            "status not writable",
            |c| {
                let head = c.header(request_type::OUT, 0);
                let data = c.data_out(DATA, &[1; 512]);
                c.direct(&[head, data, readable(STATUS, 1)]);
            },
            Returned,
        ),
        (
            "no writable descriptor",
            |c| {
                let head = c.header(request_type::FLUSH, 0);
                c.direct(&[head]);
            },
            Returned,
        ),
        ("one descriptor of length 0", |c| c.direct(&[writable(DATA, 0)]), Returned),
        ("only descriptors of length 0", |c| c.direct(&[writable(DATA, 0); 64]), Returned),
        (
            "indirect table outside memory",
            |c| {
                c.write_descriptor(0, UNMAPPED, 48, INDIRECT, 0);
                c.offer(0);
            },
            Returned,
        ),
        (
            "indirect table past the end of the address space",
            |c| {
                c.write_descriptor(0, u64::MAX - 7, 48, INDIRECT, 0);
                c.offer(0);
            },
            Returned,
        ),
        (
            "an indirect table of 2048 entries",
            |c| {
                let mut all = vec![c.header(request_type::OUT, 0)];
                all.extend([readable(DATA, 1); 2046]);
                all.push(c.status());
                c.indirect(&all);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "an indirect table of 2049 entries",
            |c| {
                let mut all = vec![c.header(request_type::OUT, 0)];
                all.extend([readable(DATA, 1); 2047]);
                all.push(c.status());
                c.indirect(&all);
            },
            Returned,
        ),
        (
            "sector at the end of the disk",
            |c| c.request(request_type::IN, SECTORS, &[writable(DATA, 512)]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a read across the end of the disk",
            |c| {
                c.request(request_type::IN, SECTORS - 1, &[writable(DATA, 1024)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a write across the end of the disk",
            |c| {
                let data = c.data_out(DATA, &[1; 1024]);
                c.request(request_type::OUT, SECTORS - 1, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "nothing read past the end of the disk",
            |c| c.request(request_type::IN, SECTORS + 1, &[]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a sector that is 0 in 64 bits of bytes",
            |c| {
                let data = c.data_out(DATA, &[1; 512]);
                c.request(request_type::OUT, 1 << 55, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a sector that is 512 in 64 bits of bytes",
            |c| {
                c.request(request_type::IN, (1 << 55) + 1, &[writable(DATA, 512)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "the largest sector",
            |c| c.request(request_type::IN, u64::MAX, &[writable(DATA, 512)]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "the largest sector whose end fits",
            |c| {
                c.request(request_type::IN, (u64::MAX >> 9) - 1, &[writable(DATA, 1024)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        ("a read of 511 bytes", |c| c.request(request_type::IN, 0, &[writable(DATA, 511)]), Completed(STATUS_IOERR, 1)),
        (
            "a write of 513 bytes",
            |c| {
                let data = c.data_out(DATA, &[1; 513]);
                c.request(request_type::OUT, 0, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a read with data to read",
            |c| {
                let data = c.data_out(DATA, &[1; 512]);
                c.request(request_type::IN, 0, &[data, writable(DATA + 4096, 512)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a write with room to write",
            |c| {
                let data = c.data_out(DATA, &[1; 512]);
                c.request(request_type::OUT, 0, &[data, writable(DATA + 4096, 512)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        ("an unknown type", |c| c.request(99, 0, &[]), Completed(STATUS_UNSUPP, 1)),
        (
            "an unknown type with data both ways",
            |c| {
                let data = c.data_out(DATA, &[1; 512]);
                c.request(0x8000_0001, 0, &[data, writable(DATA + 4096, 512)]);
            },
            Completed(STATUS_UNSUPP, 1),
        ),
        ("the legacy SCSI type", |c| c.request(2, 0, &[writable(DATA, 96)]), Completed(STATUS_UNSUPP, 1)),
        (
            "secure erase, not offered",
            |c| c.ranges(request_type::SECURE_ERASE, &range(0, 8, 0)),
            Completed(STATUS_UNSUPP, 1),
        ),
        (
            "identification with data to read",
            |c| {
                let data = c.data_out(DATA, &[1; 20]);
                c.request(request_type::GET_ID, 0, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        ("a discard of 0 ranges", |c| c.request(request_type::DISCARD, 0, &[]), Completed(STATUS_IOERR, 1)),
        (
            "a discard of 65 ranges",
            |c| c.ranges(request_type::DISCARD, &range(0, 1, 0).repeat(65)),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard of 65536 ranges",
            |c| {
                c.request(request_type::DISCARD, 0, &[readable(START, 1 << 20)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard of 15 bytes",
            |c| c.ranges(request_type::DISCARD, &range(0, 1, 0)[..15]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard of 17 bytes",
            |c| {
                c.ranges(request_type::DISCARD, &[range(0, 1, 0), vec![0]].concat());
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard with an unknown flag",
            |c| c.ranges(request_type::DISCARD, &range(0, 1, 2)),
            Completed(STATUS_UNSUPP, 1),
        ),
        ("a discard with UNMAP", |c| c.ranges(request_type::DISCARD, &range(0, 1, 1)), Completed(STATUS_UNSUPP, 1)),
        (
            "a discard past the end",
            |c| c.ranges(request_type::DISCARD, &range(SECTORS - 1, 2, 0)),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard of no sectors past the end",
            |c| {
                c.ranges(request_type::DISCARD, &range(SECTORS + 1, 0, 0));
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard whose sector overflows",
            |c| c.ranges(request_type::DISCARD, &range(1 << 55, 1, 0)),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard of the most sectors",
            |c| c.ranges(request_type::DISCARD, &range(0, u32::MAX, 0)),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard with one good and one bad range",
            |c| {
                c.ranges(request_type::DISCARD, &[range(0, 8, 0), range(u64::MAX, 8, 0)].concat());
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard with room to write",
            |c| {
                let list = c.data_out(DATA, &range(0, 1, 0));
                c.request(request_type::DISCARD, 0, &[list, writable(DATA + 4096, 16)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a discard whose list is outside memory",
            |c| {
                c.request(request_type::DISCARD, 0, &[readable(UNMAPPED, 16)]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "zeroes with an unknown flag",
            |c| c.ranges(request_type::WRITE_ZEROES, &range(0, 1, 3)),
            Completed(STATUS_UNSUPP, 1),
        ),
        (
            "zeroes past the end",
            |c| c.ranges(request_type::WRITE_ZEROES, &range(SECTORS, 1, 1)),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "zeroes in 65 ranges",
            |c| c.ranges(request_type::WRITE_ZEROES, &range(0, 1, 0).repeat(65)),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "zeroes with one good and one unknown range",
            |c| {
                c.ranges(request_type::WRITE_ZEROES, &[range(0, 8, 0), range(8, 8, 0x8000_0000)].concat());
            },
            Completed(STATUS_UNSUPP, 1),
        ),
    ];
    run_ring_cases("wrong", "", true, rows);
}

#[test]
fn a_read_only_disk() {
    let rows: &[RingCase] = &[
        (
            "a read",
            |c| {
                let data = c.data_in(DATA, 512);
                c.reads = Some((0, vec![data]));
                c.request(request_type::IN, 0, &[data]);
            },
            Completed(STATUS_OK, READ_USED_LEN),
        ),
        (
            "a write",
            |c| {
                let data = c.data_out(DATA, &[1; 512]);
                c.request(request_type::OUT, 0, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a write past the end",
            |c| {
                let data = c.data_out(DATA, &[1; 512]);
                c.request(request_type::OUT, SECTORS, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        ("a discard, not offered", |c| c.ranges(request_type::DISCARD, &range(0, 1, 0)), Completed(STATUS_UNSUPP, 1)),
        ("zeroes, not offered", |c| c.ranges(request_type::WRITE_ZEROES, &range(0, 1, 0)), Completed(STATUS_UNSUPP, 1)),
        ("a flush", |c| c.request(request_type::FLUSH, 0, &[]), Completed(STATUS_OK, 1)),
    ];
    run_ring_cases("readonly", ",readonly=on", false, rows);
}

#[test]
fn a_disk_of_4096_byte_blocks() {
    let rows: &[RingCase] = &[
        (
            "a block",
            |c| {
                let data = c.data_in(DATA, 4096);
                c.reads = Some((8, vec![data]));
                c.request(request_type::IN, 8, &[data]);
            },
            Completed(STATUS_OK, 4097),
        ),
        (
            "a block in pieces of 512 and less",
            |c| {
                let pieces = [c.data_in(DATA, 512), c.data_in(DATA + 4096, 3), c.data_in(DATA + 8192, 3581)];
                c.reads = Some((8, pieces.to_vec()));
                c.request(request_type::IN, 8, &pieces);
            },
            Completed(STATUS_OK, 4097),
        ),
        (
            "a sector at a block's start",
            |c| c.request(request_type::IN, 8, &[writable(DATA, 512)]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a block at a sector's start",
            |c| c.request(request_type::IN, 1, &[writable(DATA, 4096)]),
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a write of a sector",
            |c| {
                let data = c.data_out(DATA, &[1; 512]);
                c.request(request_type::OUT, 0, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        (
            "a write at a sector",
            |c| {
                let data = c.data_out(DATA, &[1; 4096]);
                c.request(request_type::OUT, 3, &[data]);
            },
            Completed(STATUS_IOERR, 1),
        ),
        ("nothing read between blocks", |c| c.request(request_type::IN, 3, &[]), Completed(STATUS_IOERR, 1)),
        ("a discard of a sector", |c| c.ranges(request_type::DISCARD, &range(0, 1, 0)), Completed(STATUS_IOERR, 1)),
        ("a discard at a sector", |c| c.ranges(request_type::DISCARD, &range(1, 8, 0)), Completed(STATUS_IOERR, 1)),
        ("zeroes of a sector", |c| c.ranges(request_type::WRITE_ZEROES, &range(8, 7, 1)), Completed(STATUS_IOERR, 1)),
        (
            "zeroes of a block",
            |c| {
                c.ranges(request_type::WRITE_ZEROES, &range(16, 8, 1));
                c.expect_content(16, &[0; 4096]);
            },
            Completed(STATUS_OK, 1),
        ),
    ];
    run_ring_cases("large", ",block-size=4096", false, rows);
}
