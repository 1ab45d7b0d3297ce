//! Broken rings: each stops its queue, and nothing else.

use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::request::{readable, request_type, writable};
use mqblk_tests::hostile::ring::{INDIRECT, NEXT, RawDescriptor, WRITE};
use mqblk_tests::hostile::ring_cases::{RingCase, run_ring_cases};
use mqblk_tests::hostile::ring_fixture::ExpectedResult::{Anything, Retired};
use mqblk_tests::hostile::ring_fixture::{DATA, HEADER, STATUS, TABLE};

#[test]
fn rings_that_are_broken() {
    let rows: &[RingCase] = &[
        (
            "a descriptor that follows itself",
            |c| {
                c.write_descriptor(0, DATA, 1, NEXT, 0);
                c.offer(0);
            },
            Retired,
        ),
        (
            "two descriptors that follow each other",
            |c| {
                c.write_descriptor(0, HEADER, 16, NEXT, 1);
                c.write_descriptor(1, DATA, 512, NEXT, 0);
                c.offer(0);
            },
            Retired,
        ),
        (
            "a loop at the end of a chain",
            |c| {
                for at in 0..64 {
                    c.write_descriptor(at, DATA, 8, NEXT | WRITE, if at == 63 { 62 } else { at + 1 });
                }
                c.offer(0);
            },
            Retired,
        ),
        (
            "a loop of empty descriptors",
            |c| {
                c.write_descriptor(0, DATA, 0, NEXT, 1);
                c.write_descriptor(1, DATA, 0, NEXT, 0);
                c.offer(0);
            },
            Retired,
        ),
        (
            "a loop in an indirect table",
            |c| {
                let entry = |next| RawDescriptor { address: DATA, len: 4, flags: NEXT, next };
                c.table(&[entry(1), entry(2), entry(0)], 48, INDIRECT);
            },
            Retired,
        ),
        (
            "an indirect entry that follows itself",
            |c| {
                c.table(&[RawDescriptor { address: DATA, len: 0, flags: NEXT, next: 0 }], 16, INDIRECT);
            },
            Retired,
        ),
        ("a head outside the table", |c| c.offer(64), Retired),
        ("the largest head", |c| c.offer(u16::MAX), Retired),
        (
            "a next outside the table",
            |c| {
                c.write_descriptor(0, HEADER, 16, NEXT, 64);
                c.offer(0);
            },
            Retired,
        ),
        (
            "the largest next",
            |c| {
                c.write_descriptor(0, HEADER, 16, NEXT, u16::MAX);
                c.offer(0);
            },
            Retired,
        ),
        (
            "an indirect next outside its table",
            |c| {
                c.table(&[RawDescriptor { address: DATA, len: 16, flags: NEXT, next: 3 }; 3], 48, INDIRECT);
            },
            Retired,
        ),
        ("more available than the ring holds", |c| c.publish_now(65), Retired),
        ("an available index that goes back", |c| c.publish_now(u16::MAX), Retired),
        ("the farthest available index", |c| c.publish_now(0x8000), Retired),
        (
            "a head offered twice",
            |c| {
                let head = c.header(request_type::FLUSH, 0);
                c.direct(&[head, c.status()]);
                c.offer(0);
            },
            Retired,
        ),
        (
            "a ring full of the same head",
            |c| {
                let head = c.header(request_type::FLUSH, 0);
                c.direct(&[head, c.status()]);
                (0..63).for_each(|_| c.offer(0));
            },
            Retired,
        ),
        (
            "an indirect table that names another",
            |c| {
                c.table(&[RawDescriptor { address: TABLE + 64, len: 48, flags: INDIRECT, next: 0 }], 16, INDIRECT);
            },
            Retired,
        ),
        (
            "an indirect table that names itself in its second entry",
            |c| {
                let first = RawDescriptor { address: HEADER, len: 16, flags: NEXT, next: 1 };
                c.table(
                    &[first, RawDescriptor { address: TABLE, len: 32, flags: INDIRECT | WRITE, next: 0 }],
                    32,
                    INDIRECT,
                );
            },
            Retired,
        ),
        (
            "INDIRECT and NEXT together",
            |c| {
                c.table(&[RawDescriptor { address: STATUS, len: 1, flags: WRITE, next: 0 }], 16, INDIRECT | NEXT);
            },
            Retired,
        ),
        ("an indirect table of length 0", |c| c.table(&[], 0, INDIRECT), Retired),
        ("an indirect table of 15 bytes", |c| c.table(&[RawDescriptor::default()], 15, INDIRECT), Retired),
        ("an indirect table of 17 bytes", |c| c.table(&[RawDescriptor::default(); 2], 17, INDIRECT), Retired),
        (
            "an indirect table of 4 GiB less 16",
            |c| c.table(&[RawDescriptor::default()], 0xffff_fff0, INDIRECT),
            Retired,
        ),
        ("an indirect table of 32769 entries", |c| c.table(&[RawDescriptor::default()], 32769 * 16, INDIRECT), Retired),
        (
            "a writable descriptor before a readable one",
            |c| {
                let (head, status) = (c.header(request_type::FLUSH, 0), c.status());
                c.direct(&[status, head]);
            },
            Retired,
        ),
        (
            "a readable descriptor among the writable ones, in a table",
            |c| {
                let (head, status) = (c.header(request_type::IN, 0), c.status());
                c.indirect(&[head, writable(DATA, 256), readable(DATA + 512, 8), writable(DATA + 256, 256), status]);
            },
            Retired,
        ),
        (
            "a read into the descriptor table",
            |c| {
                c.request(request_type::IN, 0, &[writable(START, 1024)]);
            },
            Anything,
        ),
        (
            "a read into the available ring",
            |c| {
                c.request(request_type::IN, 0, &[writable(START + 0x1000, 512)]);
            },
            Anything,
        ),
        (
            "a read into the used ring",
            |c| {
                c.request(request_type::IN, 0, &[writable(START + 0x2000, 1024)]);
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
    run_ring_cases("broken", "", true, rows);
}
