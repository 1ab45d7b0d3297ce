//! Invalid in-flight regions.

use std::fs::File;
use std::os::unix::fs::FileExt;

use mqblk_admin::{Client, StatQuery};
use mqblk_tests::hostile::TIMEOUT;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, HostileFrontend};
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::session::SessionOutcome::{CheckedBySession, Closed, Refused};
use mqblk_tests::hostile::session::{SessionCase, SessionFixture, completes_read, run_sessions};
use mqblk_tests::hostile::socket::message as m;
use rustix::fd::AsFd;
use rustix::fs::MemfdFlags;

/// Queues of the device.
const QUEUES: u16 = 2;

/// The payload of GET_INFLIGHT_FD and SET_INFLIGHT_FD, as QEMU and the `vhost` crate pad it.
fn region_payload(size: u64, offset: u64, queues: u16, entries: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&size.to_ne_bytes());
    bytes.extend_from_slice(&offset.to_ne_bytes());
    bytes.extend_from_slice(&queues.to_ne_bytes());
    bytes.extend_from_slice(&entries.to_ne_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes
}

/// Memory whose file can be truncated.
fn memory(size: u64) -> File {
    let file = rustix::fs::memfd_create("inflight", MemfdFlags::CLOEXEC).expect("a memory file");
    rustix::fs::ftruncate(&file, size).expect("its size");
    File::from(file)
}

/// Bytes of a queue's table for the rings of these tests.
const TABLE: u64 = 16 + 16 * DEFAULT_RING_SIZE as u64;
const SIZE: u64 = TABLE * QUEUES as u64;

/// Version 1, entries, the last head, the used index.
fn header(entries: u16, last: u16, used: u16) -> [u8; 8] {
    let mut bytes = [0; 8];
    for (at, word) in [1, entries, last, used].into_iter().enumerate() {
        bytes[2 * at..2 * at + 2].copy_from_slice(&u16::to_ne_bytes(word));
    }
    bytes
}

/// Connects a frontend that sets a region with this header in the table of queue 0.
fn shows(talk: &SessionFixture, file: &File, header: [u8; 8]) -> HostileFrontend {
    file.write_all_at(&header, 8).expect("the header");
    let mut frontend = talk.connect_frontend();
    frontend.connection.send_acked(
        m::SET_INFLIGHT_FD,
        &region_payload(SIZE, 0, QUEUES, DEFAULT_RING_SIZE),
        &[file.as_fd()],
    );
    frontend
}

/// Starts queue 0, which the daemon must refuse.
fn starts(talk: &mut SessionFixture, header: [u8; 8]) {
    let file = memory(SIZE);
    let mut frontend = shows(talk, &file, header);
    let addresses = frontend.vring_addr_payload(0, RingAddresses::pages(START));
    frontend.connection.send_acked(
        m::SET_VRING_NUM,
        &mqblk_tests::hostile::socket::vring_state_payload(0, DEFAULT_RING_SIZE.into()),
        &[],
    );
    frontend.connection.send_acked(m::SET_VRING_ADDR, &addresses, &[]);
    let kick = mqblk_tests::hostile::eventfd::TestEventFd::new();
    talk.send_after_memory(frontend, m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[kick.as_fd()]);
}

#[test]
fn regions_that_make_no_sense() {
    let rows: &[SessionCase] = &[
        (
            "memory for no queue",
            |t| t.send_after_negotiation(m::GET_INFLIGHT_FD, &region_payload(0, 0, 0, 64), &[]),
            Closed,
        ),
        (
            "memory for a queue too many",
            |t| t.send_after_negotiation(m::GET_INFLIGHT_FD, &region_payload(0, 0, QUEUES + 1, 64), &[]),
            Closed,
        ),
        (
            "memory for all queues that can be",
            |t| t.send_after_negotiation(m::GET_INFLIGHT_FD, &region_payload(0, 0, u16::MAX, u16::MAX), &[]),
            Closed,
        ),
        (
            "no descriptor",
            |t| t.send_after_negotiation(m::SET_INFLIGHT_FD, &region_payload(SIZE, 0, QUEUES, DEFAULT_RING_SIZE), &[]),
            Closed,
        ),
        (
            "a region of no bytes",
            |t| {
                t.send_after_negotiation(
                    m::SET_INFLIGHT_FD,
                    &region_payload(0, 0, QUEUES, DEFAULT_RING_SIZE),
                    &[memory(SIZE).as_fd()],
                )
            },
            Refused,
        ),
        (
            "a region that no queues share evenly",
            |t| {
                t.send_after_negotiation(
                    m::SET_INFLIGHT_FD,
                    &region_payload(SIZE + 1, 0, QUEUES, DEFAULT_RING_SIZE),
                    &[memory(2 * SIZE).as_fd()],
                )
            },
            Refused,
        ),
        (
            "a region longer than its file",
            |t| {
                t.send_after_negotiation(
                    m::SET_INFLIGHT_FD,
                    &region_payload(SIZE, 0, QUEUES, DEFAULT_RING_SIZE),
                    &[memory(SIZE - 1).as_fd()],
                )
            },
            Refused,
        ),
        (
            "a region at the end of all files",
            |t| {
                t.send_after_negotiation(
                    m::SET_INFLIGHT_FD,
                    &region_payload(SIZE, u64::MAX - 8, QUEUES, DEFAULT_RING_SIZE),
                    &[memory(SIZE).as_fd()],
                )
            },
            Refused,
        ),
        (
            "a region of a file that cannot be mapped",
            |t| {
                let event = mqblk_tests::hostile::eventfd::TestEventFd::new();
                t.send_after_negotiation(
                    m::SET_INFLIGHT_FD,
                    &region_payload(SIZE, 0, QUEUES, DEFAULT_RING_SIZE),
                    &[event.as_fd()],
                );
            },
            Refused,
        ),
        (
            "a region while a queue runs",
            |t| {
                let frontend = HostileFrontend::start(&t.socket, 0, 1);
                t.send_after_memory(
                    frontend,
                    m::SET_INFLIGHT_FD,
                    &region_payload(SIZE, 0, QUEUES, DEFAULT_RING_SIZE),
                    &[memory(SIZE).as_fd()],
                );
            },
            Refused,
        ),
        (
            "tables too small for the ring",
            |t| {
                let mut frontend = t.connect_frontend();
                let file = memory(SIZE);
                frontend.connection.send_acked(
                    m::SET_INFLIGHT_FD,
                    &region_payload(64, 0, QUEUES, DEFAULT_RING_SIZE),
                    &[file.as_fd()],
                );
                let addresses = frontend.vring_addr_payload(0, RingAddresses::pages(START));
                frontend.connection.send_acked(
                    m::SET_VRING_NUM,
                    &mqblk_tests::hostile::socket::vring_state_payload(0, DEFAULT_RING_SIZE.into()),
                    &[],
                );
                frontend.connection.send_acked(m::SET_VRING_ADDR, &addresses, &[]);
                let kick = mqblk_tests::hostile::eventfd::TestEventFd::new();
                t.send_after_memory(frontend, m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[kick.as_fd()]);
            },
            Refused,
        ),
        ("a layout of another version", |t| starts(t, [2, 0, 64, 0, 0, 0, 0, 0]), Refused),
        (
            "a list that leaves the table",
            |t| starts(t, header(DEFAULT_RING_SIZE, DEFAULT_RING_SIZE, u16::MAX)),
            Refused,
        ),
        (
            "a region of an earlier life of the ring",
            |t| {
                let file = memory(SIZE);
                // All in flight, and a used index that the ring never had.
                (0..u64::from(DEFAULT_RING_SIZE))
                    .for_each(|entry| file.write_all_at(&[1], 16 + 16 * entry).expect("a mark"));
                let mut frontend = shows(t, &file, header(DEFAULT_RING_SIZE, 0, 30_000));
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                assert!(completes_read(&mut frontend, 0));
            },
            CheckedBySession,
        ),
        (
            "a region that is cut off while its queue runs",
            |t| {
                let file = memory(SIZE);
                let mut frontend = shows(t, &file, [0; 8]);
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                assert!(completes_read(&mut frontend, 0));
                rustix::fs::ftruncate(&file, 0).expect("a cut");
                assert!(completes_read(&mut frontend, 0));
            },
            CheckedBySession,
        ),
        (
            "a region that is scribbled over while its queue runs",
            |t| {
                let file = memory(SIZE);
                let mut frontend = shows(t, &file, [0; 8]);
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                for _ in 0..20 {
                    file.write_all_at(&[0xff; SIZE as usize], 0).expect("a scribble");
                    assert!(completes_read(&mut frontend, 0));
                }
            },
            CheckedBySession,
        ),
    ];
    run_sessions(rows);
}

#[test]
fn a_region_is_reported_also_when_the_device_was_reset_before_its_queues_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let admin = folder.path().join("admin");
    let disks = [("one", "storage=ram,size=1M,queues=2")];
    let daemon = HostileDaemon::start_with(1, &disks, &["--admin", &admin.display().to_string()]);
    let reported = || {
        let mut client = Client::connect_with(&admin, TIMEOUT.time()).expect("the admin socket");
        let stat = client.stat(&StatQuery::default()).expect("statistics");
        stat.disks.iter().find(|disk| disk.id == "one").expect("the disk").in_flight_region
    };
    let mut frontend = HostileFrontend::connect(&daemon.socket("one"), 0);
    let region = frontend.get_inflight(QUEUES);
    frontend.set_inflight(&region);
    // QEMU sends it at a reset of the machine, its start included.
    frontend.connection.send_acked(m::RESET_DEVICE, &[], &[]);
    assert_eq!(reported(), None);
    frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
    assert_eq!(reported(), Some(true));
    drop(frontend);
    daemon.stop();
}
