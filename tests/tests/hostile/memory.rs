//! Invalid memory tables, and the most regions that are allowed.

use std::fs::File;

use mqblk_test_bounds::Bound;
use mqblk_tests::crash::blk::{BlkQueues, connect_options};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, HostileFrontend};
use mqblk_tests::hostile::memory::{END, FileRegion, SEAM, START, SharedMemory, mem_table_payload};
use mqblk_tests::hostile::request::{STATUS_OK, header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::session::SessionOutcome::{CheckedBySession, Closed, Refused};
use mqblk_tests::hostile::session::{SessionCase, SessionHarness, completes_read, one_page_region, run_sessions};
use mqblk_tests::hostile::socket::message as m;
use mqblk_tests::hostile::timed_load::RunningTimedLoad;
use rustix::fd::AsFd;

#[test]
fn invalid_memory_tables() {
    let rows: &[SessionCase] = &[
        ("a table of no region", |t| t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[]), &[]), Refused),
        (
            "a table without descriptors",
            |t| t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one_page_region(0)]), &[]),
            Refused,
        ),
        (
            "a table with too few descriptors",
            |t| {
                let (one, two) = (one_page_region(0), one_page_region(4096));
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one, &two]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a table with too many descriptors",
            |t| {
                let one = one_page_region(0);
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd(); 3]);
            },
            Refused,
        ),
        (
            "a table with 60 descriptors",
            |t| {
                let one = one_page_region(0);
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd(); 60]);
            },
            Closed,
        ),
        (
            "a table that claims more regions than it has",
            |t| {
                let one = one_page_region(0);
                let mut payload = mem_table_payload(&[&one]);
                payload[0] = 2;
                t.send_after_negotiation(m::SET_MEM_TABLE, &payload, &[one.fd(); 2]);
            },
            Refused,
        ),
        (
            "a table of 4294967295 regions",
            |t| {
                let one = one_page_region(0);
                let mut payload = mem_table_payload(&[&one]);
                payload[..4].fill(0xff);
                t.send_after_negotiation(m::SET_MEM_TABLE, &payload, &[one.fd()]);
            },
            Refused,
        ),
        (
            "a table with room for another region",
            |t| {
                let mut frontend = t.connect_frontend();
                let regions: Vec<&FileRegion> = frontend.memory.regions.iter().collect();
                let fds: Vec<_> = regions.iter().map(|region| region.fd()).collect();
                // As User-Mode Linux sends it.
                let payload = [mem_table_payload(&regions), vec![0xff; 32]].concat();
                frontend.connection.send_acked(m::SET_MEM_TABLE, &payload, &fds);
                drop(fds);
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                assert!(completes_read(&mut frontend, 0), "the table is in force");
            },
            CheckedBySession,
        ),
        (
            "a table with room for another region, and too few descriptors",
            |t| {
                let (one, two) = (one_page_region(0), one_page_region(4096));
                let payload = [mem_table_payload(&[&one, &two]), vec![0; 32]].concat();
                t.send_after_negotiation(m::SET_MEM_TABLE, &payload, &[one.fd()]);
            },
            Refused,
        ),
        (
            "a table with room for another region, and one of no bytes",
            |t| {
                let one = FileRegion { len: 0, ..one_page_region(0) };
                let payload = [mem_table_payload(&[&one]), vec![0; 32]].concat();
                t.send_after_negotiation(m::SET_MEM_TABLE, &payload, &[one.fd()]);
            },
            Refused,
        ),
        (
            "regions that overlap",
            |t| {
                let (one, two) = (one_page_region(0), one_page_region(4095));
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one, &two]), &[one.fd(), two.fd()]);
            },
            Refused,
        ),
        (
            "the same region twice",
            |t| {
                let one = one_page_region(0);
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one, &one]), &[one.fd(), one.fd()]);
            },
            Refused,
        ),
        (
            "a file shorter than its region",
            |t| {
                let one = one_page_region(0);
                one.file.set_len(4095).expect("shorter");
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "an empty file, the second of two",
            |t| {
                let (one, two) = (one_page_region(0), one_page_region(4096));
                two.file.set_len(0).expect("empty");
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one, &two]), &[one.fd(), two.fd()]);
            },
            Refused,
        ),
        (
            "an offset past the file's end",
            |t| {
                let one = FileRegion { offset: 1 << 40, ..one_page_region(0) };
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "an offset that overflows",
            |t| {
                let one = FileRegion { offset: u64::MAX - 4095, ..one_page_region(0) };
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a region of no bytes",
            |t| {
                let one = FileRegion { len: 0, ..one_page_region(0) };
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a region of the whole address space",
            |t| {
                let one = FileRegion { len: u64::MAX, ..one_page_region(0) };
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a region of 2 to the 62 bytes",
            |t| {
                let one = FileRegion { len: 1 << 62, ..one_page_region(0) };
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "guest addresses that overflow",
            |t| {
                let one = FileRegion { guest: u64::MAX - 100, ..one_page_region(0) };
                t.send_after_negotiation(m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "user addresses that overflow",
            |t| {
                let one = FileRegion { user: u64::MAX - 100, ..one_page_region(0) };
                t.send_after_negotiation(m::ADD_MEM_REG, &one.mem_reg_payload(), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a pipe as memory",
            |t| {
                let (reader, _writer) = std::io::pipe().expect("a pipe");
                t.send_after_negotiation(
                    m::SET_MEM_TABLE,
                    &mem_table_payload(&[&one_page_region(0)]),
                    &[reader.as_fd()],
                );
            },
            Refused,
        ),
        (
            "a folder as memory",
            |t| {
                let folder = File::open(&t.folder).expect("the folder");
                t.send_after_negotiation(m::ADD_MEM_REG, &one_page_region(0).mem_reg_payload(), &[folder.as_fd()]);
            },
            Refused,
        ),
        (
            "a file that is only open for reading as memory",
            |t| {
                let path = t.folder.join("memory");
                File::create(&path).expect("a file").set_len(4096).expect("its length");
                let file = File::open(&path).expect("the file");
                t.send_after_negotiation(m::ADD_MEM_REG, &one_page_region(0).mem_reg_payload(), &[file.as_fd()]);
            },
            Refused,
        ),
        (
            "a region without its descriptor",
            |t| t.send_after_negotiation(m::ADD_MEM_REG, &one_page_region(0).mem_reg_payload(), &[]),
            Closed,
        ),
        (
            "a region with two descriptors",
            |t| {
                let one = one_page_region(0);
                t.send_after_negotiation(m::ADD_MEM_REG, &one.mem_reg_payload(), &[one.fd(); 2]);
            },
            Closed,
        ),
        (
            "a region that overlaps what is there",
            |t| {
                let (frontend, one) = (t.connect_frontend(), one_page_region(SEAM - 1));
                t.send_after_memory(frontend, m::ADD_MEM_REG, &one.mem_reg_payload(), &[one.fd()]);
            },
            Refused,
        ),
        (
            "a removal of what is not there",
            |t| t.send_after_negotiation(m::REM_MEM_REG, &one_page_region(0).mem_reg_payload(), &[]),
            Refused,
        ),
        (
            "a removal of another length",
            |t| {
                let frontend = t.connect_frontend();
                let wrong = FileRegion { len: 4096, ..FileRegion::new(SEAM, 0x7e00_0000_0000, 4096, 0) };
                t.send_after_memory(frontend, m::REM_MEM_REG, &wrong.mem_reg_payload(), &[]);
            },
            Refused,
        ),
        (
            "a removal of another user address",
            |t| {
                let frontend = t.connect_frontend();
                let wrong = FileRegion::new(SEAM, 0x7e00_0000_1000, END - SEAM, 0);
                t.send_after_memory(frontend, m::REM_MEM_REG, &wrong.mem_reg_payload(), &[]);
            },
            Refused,
        ),
        (
            "a removal with a descriptor",
            |t| {
                let mut frontend = t.connect_frontend();
                let known = &frontend.memory.regions[1];
                let (payload, file) = (known.mem_reg_payload(), known.file.try_clone().expect("a descriptor"));
                frontend.connection.send_acked(m::REM_MEM_REG, &payload, &[file.as_fd()]);
            },
            CheckedBySession,
        ),
        (
            "a removal of the memory that a running ring is in",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                let payload = frontend.memory.regions[0].mem_reg_payload();
                t.send_after_memory(frontend, m::REM_MEM_REG, &payload, &[]);
            },
            Refused,
        ),
        (
            "a table without the memory that a running ring is in",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                let one = one_page_region(0);
                t.send_after_memory(frontend, m::SET_MEM_TABLE, &mem_table_payload(&[&one]), &[one.fd()]);
            },
            Refused,
        ),
        (
            "the same memory again and again",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                (0..50).for_each(|_| frontend.set_memory_table());
            },
            CheckedBySession,
        ),
    ];
    run_sessions(rows);
}

#[test]
fn memory_slots_up_to_the_limit() {
    let mut stage = SessionHarness::new();
    let mut frontend = HostileFrontend::start(&stage.daemon.socket("bad"), 0, 1);
    let slots = frontend.connection.request_u64(m::GET_MAX_MEM_SLOTS);
    assert!(slots >= 509, "{slots} slots");
    let more: Vec<FileRegion> = (2..slots).map(|at| one_page_region((1 << 32) + at * 8192)).collect();
    for region in &more {
        frontend.connection.send_acked(m::ADD_MEM_REG, &region.mem_reg_payload(), &[region.fd()]);
    }
    // Each of them gets data of a read.
    for (at, region) in more.iter().enumerate() {
        frontend.memory.write(START + 0x1_8000, &header(request_type::IN, at as u64));
        let pieces = [readable(START + 0x1_8000, 16), writable(region.guest + 100, 513)];
        let queue = &mut frontend.queues[0];
        let head = write_direct(&queue.ring, &[0, 1], &pieces);
        queue.ring.offer(head);
        queue.publish_and_kick();
        assert_eq!(queue.wait_completion(), (0, 513), "slot {at}");
        let mut found = [0xee; 513];
        std::os::unix::fs::FileExt::read_exact_at(&region.file, &mut found, 100).expect("memory");
        assert!(
            found[..512] == stage.expected_content[at * 512..(at + 1) * 512] && found[512] == STATUS_OK,
            "slot {at}"
        );
    }
    for region in more.iter().step_by(2) {
        frontend.connection.send_acked(m::REM_MEM_REG, &region.mem_reg_payload(), &[]);
    }
    for region in more.iter().step_by(2) {
        frontend.connection.send_acked(m::ADD_MEM_REG, &region.mem_reg_payload(), &[region.fd()]);
    }
    assert!(completes_read(&mut frontend, 0));
    let last = one_page_region(1 << 40);
    assert_eq!(frontend.connection.try_send_acked(m::ADD_MEM_REG, &last.mem_reg_payload(), &[last.fd()]), Some(1));
    assert!(frontend.wait_closed());
    drop(frontend);
    stage.check("one slot too many", 1);
    stage.finish();
}

/// Reads the disk's only MiB into each MiB of guest memory from `from` on, so that the daemon has its pages mapped.
fn touch(frontend: &mut HostileFrontend, from: u64, mib: u64) {
    for number in 0..mib {
        frontend.memory.write(START + 0x1_8000, &header(request_type::IN, 0));
        let pieces =
            [readable(START + 0x1_8000, 16), writable(from + (number << 20), 1 << 20), writable(START + 0x1_8010, 1)];
        let queue = &mut frontend.queues[0];
        let head = write_direct(&queue.ring, &[0, 1, 2], &pieces);
        queue.ring.offer(head);
        queue.publish_and_kick();
        assert_eq!(queue.wait_completion(), (0, (1 << 20) + 1));
    }
}

/// The table of a guest of 512 GiB, set again as by hot-plugged memory while 512 MiB of it are mapped page by page,
/// does not hold up a neighbour on the same worker.
#[test]
fn tables_of_512_gib_hold_up_no_neighbour() {
    const REGION: u64 = 64 << 30;
    let daemon = HostileDaemon::start(1, &[("bad", "storage=ram,size=1M,queues=1"), ("good", "storage=ram,size=8M")]);
    let options = connect_options(daemon.socket("good"), 1);
    let load = RunningTimedLoad::start("good", 1, 1, move || BlkQueues::connect(&options));
    let regions = (0..8).map(|at| FileRegion::new(at * REGION, 0x6000_0000_0000 + at * REGION, REGION, 0)).collect();
    let mut frontend = HostileFrontend::with_memory(&daemon.socket("bad"), 0, SharedMemory { regions });
    frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
    for number in 0..4 {
        // Both places together take a GiB of the host's memory.
        touch(&mut frontend, number % 2 * REGION + (4 << 30), 512);
        load.end_phase();
        for _ in 0..10 {
            frontend.set_memory_table();
            assert!(completes_read(&mut frontend, 0), "after table {number}");
        }
        load.assert_runs();
        let phase = load.end_phase();
        // Seen: 0.05 to 2 ms.
        assert!(phase.record.worst() < Bound::seconds(1).time(), "{}", phase.to_json());
    }
    load.finish();
    drop(frontend);
    daemon.stop();
}
