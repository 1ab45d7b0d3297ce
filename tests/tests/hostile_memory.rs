//! Memory tables that cannot be, and as many regions as can be.

use std::fs::File;

use mqblk_tests::hostile::conversation::Outcome::{Closed, Refused, Works};
use mqblk_tests::hostile::conversation::{Row, Stage, page, run, serves};
use mqblk_tests::hostile::front_end::{FrontEnd, RING};
use mqblk_tests::hostile::memory::{END, Region, SEAM, START, table};
use mqblk_tests::hostile::request::{OK, direct, header, kind, readable, writable};
use mqblk_tests::hostile::ring::Places;
use mqblk_tests::hostile::socket::message as m;
use rustix::fd::AsFd;

fn pipe() -> (rustix::fd::OwnedFd, rustix::fd::OwnedFd) {
    rustix::pipe::pipe().expect("a pipe")
}

#[test]
fn memory_that_cannot_be() {
    let rows: &[Row] = &[
        ("a table of no region", |t| t.bad(m::SET_MEM_TABLE, &table(&[]), &[]), Refused),
        ("a table without descriptors", |t| t.bad(m::SET_MEM_TABLE, &table(&[&page(0)]), &[]), Refused),
        (
            "a table with too few descriptors",
            |t| {
                let (one, two) = (page(0), page(4096));
                t.bad(m::SET_MEM_TABLE, &table(&[&one, &two]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a table with too many descriptors",
            |t| {
                let one = page(0);
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd(); 3]);
            },
            Refused,
        ),
        (
            "a table with 60 descriptors",
            |t| {
                let one = page(0);
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd(); 60]);
            },
            Closed,
        ),
        (
            "a table that claims more regions than it has",
            |t| {
                let one = page(0);
                let mut payload = table(&[&one]);
                payload[0] = 2;
                t.bad(m::SET_MEM_TABLE, &payload, &[one.fd(); 2]);
            },
            Refused,
        ),
        (
            "a table of 4294967295 regions",
            |t| {
                let one = page(0);
                let mut payload = table(&[&one]);
                payload[..4].fill(0xff);
                t.bad(m::SET_MEM_TABLE, &payload, &[one.fd()]);
            },
            Refused,
        ),
        (
            "regions that overlap",
            |t| {
                let (one, two) = (page(0), page(4095));
                t.bad(m::SET_MEM_TABLE, &table(&[&one, &two]), &[one.fd(), two.fd()]);
            },
            Refused,
        ),
        (
            "the same region twice",
            |t| {
                let one = page(0);
                t.bad(m::SET_MEM_TABLE, &table(&[&one, &one]), &[one.fd(), one.fd()]);
            },
            Refused,
        ),
        (
            "a file shorter than its region",
            |t| {
                let one = page(0);
                one.file.set_len(4095).expect("shorter");
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "an empty file, the second of two",
            |t| {
                let (one, two) = (page(0), page(4096));
                two.file.set_len(0).expect("empty");
                t.bad(m::SET_MEM_TABLE, &table(&[&one, &two]), &[one.fd(), two.fd()]);
            },
            Refused,
        ),
        (
            "an offset past the file's end",
            |t| {
                let one = Region { offset: 1 << 40, ..page(0) };
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "an offset that overflows",
            |t| {
                let one = Region { offset: u64::MAX - 4095, ..page(0) };
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a region of no bytes",
            |t| {
                let one = Region { len: 0, ..page(0) };
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a region of the whole address space",
            |t| {
                let one = Region { len: u64::MAX, ..page(0) };
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a region of 2 to the 62 bytes",
            |t| {
                let one = Region { len: 1 << 62, ..page(0) };
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "guest addresses that overflow",
            |t| {
                let one = Region { guest: u64::MAX - 100, ..page(0) };
                t.bad(m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "user addresses that overflow",
            |t| {
                let one = Region { user: u64::MAX - 100, ..page(0) };
                t.bad(m::ADD_MEM_REG, &one.single(), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a pipe as memory",
            |t| {
                let (reader, _writer) = pipe();
                t.bad(m::SET_MEM_TABLE, &table(&[&page(0)]), &[reader.as_fd()]);
            },
            Refused,
        ),
        (
            "a folder as memory",
            |t| {
                let folder = File::open(&t.folder).expect("the folder");
                t.bad(m::ADD_MEM_REG, &page(0).single(), &[folder.as_fd()]);
            },
            Refused,
        ),
        (
            "a file that is only open for reading as memory",
            |t| {
                let path = t.folder.join("memory");
                File::create(&path).expect("a file").set_len(4096).expect("its length");
                let file = File::open(&path).expect("the file");
                t.bad(m::ADD_MEM_REG, &page(0).single(), &[file.as_fd()]);
            },
            Refused,
        ),
        ("a region without its descriptor", |t| t.bad(m::ADD_MEM_REG, &page(0).single(), &[]), Closed),
        (
            "a region with two descriptors",
            |t| {
                let one = page(0);
                t.bad(m::ADD_MEM_REG, &one.single(), &[one.fd(); 2]);
            },
            Closed,
        ),
        (
            "a region that overlaps what is there",
            |t| {
                let (front_end, one) = (t.front_end(), page(SEAM - 1));
                t.late(front_end, m::ADD_MEM_REG, &one.single(), &[one.fd()]);
            },
            Refused,
        ),
        ("a removal of what is not there", |t| t.bad(m::REM_MEM_REG, &page(0).single(), &[]), Refused),
        (
            "a removal of another length",
            |t| {
                let front_end = t.front_end();
                let wrong = Region { len: 4096, ..Region::new(SEAM, 0x7e00_0000_0000, 4096, 0) };
                t.late(front_end, m::REM_MEM_REG, &wrong.single(), &[]);
            },
            Refused,
        ),
        (
            "a removal of another user address",
            |t| {
                let front_end = t.front_end();
                let wrong = Region::new(SEAM, 0x7e00_0000_1000, END - SEAM, 0);
                t.late(front_end, m::REM_MEM_REG, &wrong.single(), &[]);
            },
            Refused,
        ),
        (
            "a removal with a descriptor",
            |t| {
                let mut front_end = t.front_end();
                let known = &front_end.memory.regions[1];
                let (payload, file) = (known.single(), known.file.try_clone().expect("a descriptor"));
                front_end.connection.tell(m::REM_MEM_REG, &payload, &[file.as_fd()]);
            },
            Works,
        ),
        (
            "a removal of the memory that a running ring is in",
            |t| {
                let mut front_end = t.front_end();
                front_end.add_queue(Places::pages(START), RING);
                let payload = front_end.memory.regions[0].single();
                t.late(front_end, m::REM_MEM_REG, &payload, &[]);
            },
            Refused,
        ),
        (
            "a table without the memory that a running ring is in",
            |t| {
                let mut front_end = t.front_end();
                front_end.add_queue(Places::pages(START), RING);
                let one = page(0);
                t.late(front_end, m::SET_MEM_TABLE, &table(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "the same memory again and again",
            |t| {
                let mut front_end = t.front_end();
                front_end.add_queue(Places::pages(START), RING);
                (0..50).for_each(|_| front_end.tell_memory());
            },
            Works,
        ),
    ];
    run(rows);
}

#[test]
fn memory_slots_up_to_the_limit() {
    let mut stage = Stage::new();
    let mut front_end = FrontEnd::start(&stage.daemon.socket("bad"), 0, 1);
    let slots = front_end.connection.ask_u64(m::GET_MAX_MEM_SLOTS);
    assert!(slots >= 509, "{slots} slots");
    let more: Vec<Region> = (2..slots).map(|at| page((1 << 32) + at * 8192)).collect();
    for region in &more {
        front_end.connection.tell(m::ADD_MEM_REG, &region.single(), &[region.fd()]);
    }
    // Every one of them is read into.
    for (at, region) in more.iter().enumerate() {
        front_end.memory.write(START + 0x1_8000, &header(kind::IN, at as u64));
        let pieces = [readable(START + 0x1_8000, 16), writable(region.guest + 100, 513)];
        let queue = &mut front_end.queues[0];
        let head = direct(&queue.ring, &[0, 1], &pieces);
        queue.ring.offer(head);
        queue.go();
        assert_eq!(queue.answer(), (0, 513), "slot {at}");
        let mut found = [0xee; 513];
        std::os::unix::fs::FileExt::read_exact_at(&region.file, &mut found, 100).expect("memory");
        assert!(found[..512] == stage.model[at * 512..(at + 1) * 512] && found[512] == OK, "slot {at}");
    }
    for region in more.iter().step_by(2) {
        front_end.connection.tell(m::REM_MEM_REG, &region.single(), &[]);
    }
    for region in more.iter().step_by(2) {
        front_end.connection.tell(m::ADD_MEM_REG, &region.single(), &[region.fd()]);
    }
    assert!(serves(&mut front_end, 0));
    let last = page(1 << 40);
    assert_eq!(front_end.connection.try_tell(m::ADD_MEM_REG, &last.single(), &[last.fd()]), Some(1));
    assert!(front_end.is_ended());
    drop(front_end);
    stage.check("one slot too many", 1);
    stage.end();
}
