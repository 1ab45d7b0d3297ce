//! Invalid queues and configuration.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::{UnixDatagram, UnixStream};

use mqblk_tests::hostile::eventfd::TestEventFd;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, HostileFrontend, PROTOCOL_FEATURES};
use mqblk_tests::hostile::memory::{END, SEAM, START};
use mqblk_tests::hostile::request::{header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::ring_fixture::UNMAPPED;
use mqblk_tests::hostile::session::SessionOutcome::{CheckedBySession, Closed, Refused};
use mqblk_tests::hostile::session::{DISK_BYTES, SessionCase, SessionFixture, completes_read, run_sessions};
use mqblk_tests::hostile::socket::{
    NEED_REPLY, NO_FD, VERSION, VhostUserSocket, config_payload, message as m, vring_state_payload,
};
use rustix::fd::AsFd;

#[test]
fn invalid_queues() {
    let rows: &[SessionCase] = &[
        (
            "a ring of 0 entries",
            |t| t.send_after_negotiation(m::SET_VRING_NUM, &vring_state_payload(0, 0), &[]),
            Refused,
        ),
        ("a ring of 1 entry", |t| t.send_after_negotiation(m::SET_VRING_NUM, &vring_state_payload(0, 1), &[]), Refused),
        (
            "a ring of 3 entries",
            |t| t.send_after_negotiation(m::SET_VRING_NUM, &vring_state_payload(0, 3), &[]),
            Refused,
        ),
        (
            "a ring of 65536 entries",
            |t| t.send_after_negotiation(m::SET_VRING_NUM, &vring_state_payload(0, 65536), &[]),
            Refused,
        ),
        (
            "a ring longer than was offered",
            |t| t.send_after_negotiation(m::SET_VRING_NUM, &vring_state_payload(0, 2048), &[]),
            Refused,
        ),
        (
            "a ring of 2 to the 31 entries",
            |t| t.send_after_negotiation(m::SET_VRING_NUM, &vring_state_payload(0, 1 << 31), &[]),
            Refused,
        ),
        (
            "the size of queue 2 of 2",
            |t| t.send_after_negotiation(m::SET_VRING_NUM, &vring_state_payload(2, 64), &[]),
            Refused,
        ),
        (
            "the base of queue 4294967295",
            |t| t.send_after_negotiation(m::SET_VRING_BASE, &vring_state_payload(u32::MAX, 0), &[]),
            Refused,
        ),
        (
            "a base of 65536",
            |t| t.send_after_negotiation(m::SET_VRING_BASE, &vring_state_payload(0, 65536), &[]),
            Refused,
        ),
        (
            "the kick of queue 255",
            |t| {
                let event = TestEventFd::new();
                t.send_after_negotiation(m::SET_VRING_KICK, &255_u64.to_ne_bytes(), &[event.as_fd()]);
            },
            Refused,
        ),
        (
            "a kick without a descriptor",
            |t| t.send_after_negotiation(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[]),
            Closed,
        ),
        (
            "a kick with two descriptors",
            |t| {
                let event = TestEventFd::new();
                t.send_after_negotiation(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[event.as_fd(); 2]);
            },
            Closed,
        ),
        (
            "a kick that says it has no descriptor, and one",
            |t| {
                let event = TestEventFd::new();
                t.send_after_negotiation(m::SET_VRING_KICK, &NO_FD.to_ne_bytes(), &[event.as_fd()]);
            },
            Closed,
        ),
        (
            "a pipe as kick",
            |t| {
                let (reader, _writer) = std::io::pipe().expect("a pipe");
                t.send_after_negotiation(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[reader.as_fd()]);
            },
            Refused,
        ),
        (
            "a full pipe as call",
            |t| {
                let (_reader, mut writer) = std::io::pipe().expect("a pipe");
                rustix::io::ioctl_fionbio(&writer, true).expect("non-blocking");
                while writer.write(&[0; 4096]).is_ok() {}
                rustix::io::ioctl_fionbio(&writer, false).expect("blocking");
                t.send_after_negotiation(m::SET_VRING_CALL, &0_u64.to_ne_bytes(), &[writer.as_fd()]);
            },
            Refused,
        ),
        (
            "a file as err",
            |t| {
                let file = File::create(t.folder.join("err")).expect("a file");
                t.send_after_negotiation(m::SET_VRING_ERR, &1_u64.to_ne_bytes(), &[file.as_fd()]);
            },
            Refused,
        ),
        (
            "a datagram socket as call",
            |t| {
                let (_ours, theirs) = UnixDatagram::pair().expect("sockets");
                t.send_after_negotiation(m::SET_VRING_CALL, &1_u64.to_ne_bytes(), &[theirs.as_fd()]);
            },
            Refused,
        ),
        (
            "a pipe as backend request channel",
            |t| {
                let (_reader, writer) = std::io::pipe().expect("a pipe");
                t.send_after_negotiation(m::SET_BACKEND_REQ_FD, &[], &[writer.as_fd()]);
            },
            Refused,
        ),
        (
            "a datagram socket as backend request channel",
            |t| {
                let (_ours, theirs) = UnixDatagram::pair().expect("sockets");
                t.send_after_negotiation(m::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
            },
            Refused,
        ),
        (
            "two backend request channels",
            |t| {
                let mut connection = t.connect_negotiated();
                for _ in 0..2 {
                    let (_ours, theirs) = UnixStream::pair().expect("sockets");
                    connection.send_acked(m::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
                }
            },
            CheckedBySession,
        ),
        (
            "a kick before memory",
            |t| {
                let (mut connection, event) = (t.connect_negotiated(), TestEventFd::new());
                connection.send_acked(m::SET_VRING_NUM, &vring_state_payload(0, 64), &[]);
                connection.send_acked(m::SET_VRING_ADDR, &[&vring_state_payload(0, 0)[..], &[0; 32]].concat(), &[]);
                connection.send(m::SET_VRING_KICK, VERSION | NEED_REPLY, &0_u64.to_ne_bytes(), &[event.as_fd()]);
                t.connection = Some(connection);
            },
            Refused,
        ),
        (
            "a kick before all else works once the rest comes",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.connection.send_acked(m::SET_VRING_KICK, &NO_FD.to_ne_bytes(), &[]);
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                frontend.stop_queue(0);
            },
            CheckedBySession,
        ),
        ("a ring outside memory", |t| start_at(t, RingAddresses::pages(UNMAPPED)), Refused),
        (
            "a descriptor table that leaves its region",
            |t| {
                start_at(t, RingAddresses { desc: SEAM - 512, ..RingAddresses::pages(START) });
            },
            Refused,
        ),
        (
            "an available ring that leaves memory",
            |t| {
                start_at(t, RingAddresses { avail: END - 130, ..RingAddresses::pages(START) });
            },
            Refused,
        ),
        (
            "a used ring that leaves memory",
            |t| start_at(t, RingAddresses { used: END - 516, ..RingAddresses::pages(START) }),
            Refused,
        ),
        (
            "a used ring across two regions",
            |t| {
                start_at(t, RingAddresses { used: SEAM - 256, ..RingAddresses::pages(START) });
            },
            Refused,
        ),
        (
            "a descriptor table that is not aligned",
            |t| {
                start_at(t, RingAddresses { desc: START + 8, ..RingAddresses::pages(START) });
            },
            Closed,
        ),
        (
            "an available ring that is not aligned",
            |t| {
                start_at(t, RingAddresses { avail: START + 0x1001, ..RingAddresses::pages(START) });
            },
            Closed,
        ),
        (
            "a used ring that is not aligned",
            |t| {
                start_at(t, RingAddresses { used: START + 0x2002, ..RingAddresses::pages(START) });
            },
            Closed,
        ),
        (
            "ring addresses with an unknown flag",
            |t| {
                let frontend = t.connect_frontend();
                let mut payload = frontend.vring_addr_payload(0, RingAddresses::pages(START));
                payload[4] = 2;
                t.send_after_memory(frontend, m::SET_VRING_ADDR, &payload, &[]);
            },
            Closed,
        ),
        (
            "a queue that is enabled with 2",
            |t| t.send_after_negotiation(m::SET_VRING_ENABLE, &vring_state_payload(0, 2), &[]),
            Closed,
        ),
        (
            "queue 7 is enabled",
            |t| t.send_after_negotiation(m::SET_VRING_ENABLE, &vring_state_payload(7, 1), &[]),
            Refused,
        ),
        (
            "queue 7 is stopped",
            |t| t.send_after_negotiation(m::GET_VRING_BASE, &vring_state_payload(7, 0), &[]),
            Closed,
        ),
        (
            "a running queue gets another size",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                t.send_after_memory(frontend, m::SET_VRING_NUM, &vring_state_payload(0, 128), &[]);
            },
            Refused,
        ),
        (
            "a running queue gets the same size",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                frontend.connection.send_acked(
                    m::SET_VRING_NUM,
                    &vring_state_payload(0, DEFAULT_RING_SIZE.into()),
                    &[],
                );
                let addresses = frontend.vring_addr_payload(0, RingAddresses::pages(START));
                frontend.connection.send_acked(m::SET_VRING_ADDR, &addresses, &[]);
            },
            CheckedBySession,
        ),
        (
            "a running queue is sent out of memory",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                let payload = frontend.vring_addr_payload(0, RingAddresses::pages(UNMAPPED));
                t.send_after_memory(frontend, m::SET_VRING_ADDR, &payload, &[]);
            },
            Refused,
        ),
        (
            "queues are stopped that never ran, and twice",
            |t| {
                let mut frontend = t.connect_frontend();
                assert_eq!(frontend.stop_queue(1), 0);
                frontend.connection.send_acked(m::SET_VRING_BASE, &vring_state_payload(1, 77), &[]);
                assert_eq!((frontend.stop_queue(1), frontend.stop_queue(1)), (77, 77));
                frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                assert_eq!((frontend.stop_queue(0), frontend.stop_queue(0)), (0, 0));
            },
            CheckedBySession,
        ),
        (
            "rings at the very end of their regions",
            |t| {
                let mut frontend = t.connect_frontend();
                let at = RingAddresses {
                    desc: SEAM - 16 * 64,
                    avail: END - (6 + 2 * 64),
                    used: END - 0x1000 - 6 - 8 * 64 - 2,
                };
                frontend.add_queue(at, DEFAULT_RING_SIZE);
                assert!(completes_read(&mut frontend, 0));
            },
            CheckedBySession,
        ),
        (
            "without protocol features rings are enabled at once",
            |t| {
                let mut frontend = HostileFrontend::start(&t.socket, PROTOCOL_FEATURES, 2);
                assert!(completes_read(&mut frontend, 0) && completes_read(&mut frontend, 1));
            },
            CheckedBySession,
        ),
        (
            "without a call, and with the smallest ring",
            |t| {
                let mut frontend = t.connect_frontend();
                frontend.add_queue(RingAddresses::pages(START), 2);
                frontend.connection.send_acked(m::SET_VRING_CALL, &NO_FD.to_ne_bytes(), &[]);
                let queue = &mut frontend.queues[0];
                for _ in 0..10 {
                    // With an indirect table, because two descriptors are too few.
                    frontend.memory.write(START + 0x7000, &header(request_type::IN, 0));
                    let pieces = [readable(START + 0x7000, 16), writable(START + 0x9000, 513)];
                    let head = write_direct(&queue.ring, &[0, 1], &pieces);
                    queue.ring.offer(head);
                    queue.publish_and_kick();
                    assert_eq!(queue.wait_completion(), (0, 513));
                }
            },
            CheckedBySession,
        ),
    ];
    run_sessions(rows);
}

/// Sets up a queue at these addresses, up to the message that the daemon must refuse.
fn start_at(t: &mut SessionFixture, at: RingAddresses) {
    let mut frontend = t.connect_frontend();
    let payload = frontend.vring_addr_payload(0, at);
    let kick = TestEventFd::new();
    frontend.connection.send_acked(m::SET_VRING_NUM, &vring_state_payload(0, DEFAULT_RING_SIZE.into()), &[]);
    frontend.connection.send_acked(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[kick.as_fd()]);
    t.send_after_memory(frontend, m::SET_VRING_ADDR, &payload, &[]);
}

#[test]
fn the_configuration() {
    let rows: &[SessionCase] = &[
        ("a read of nothing", |t| t.send_after_negotiation(m::GET_CONFIG, &config_payload(0, 0, 0, &[]), &[]), Closed),
        (
            "a read past 4096",
            |t| t.send_after_negotiation(m::GET_CONFIG, &config_payload(4096, 1, 0, &[0]), &[]),
            Closed,
        ),
        (
            "a read across 4096",
            |t| t.send_after_negotiation(m::GET_CONFIG, &config_payload(4095, 2, 0, &[0; 2]), &[]),
            Closed,
        ),
        (
            "a read whose end overflows",
            |t| t.send_after_negotiation(m::GET_CONFIG, &config_payload(u32::MAX, 8, 0, &[0; 8]), &[]),
            Closed,
        ),
        (
            "a read without room for it",
            |t| t.send_after_negotiation(m::GET_CONFIG, &config_payload(0, 60, 0, &[]), &[]),
            Closed,
        ),
        (
            "a read with unknown flags",
            |t| t.send_after_negotiation(m::GET_CONFIG, &config_payload(0, 8, 0x80, &[0; 8]), &[]),
            Closed,
        ),
        (
            "a write of the capacity",
            |t| t.send_after_negotiation(m::SET_CONFIG, &config_payload(0, 8, 0, &[0xff; 8]), &[]),
            Refused,
        ),
        (
            "a write across the cache mode",
            |t| t.send_after_negotiation(m::SET_CONFIG, &config_payload(31, 3, 0, &[1; 3]), &[]),
            Refused,
        ),
        (
            "a cache mode of 2",
            |t| t.send_after_negotiation(m::SET_CONFIG, &config_payload(32, 1, 0, &[2]), &[]),
            Refused,
        ),
        (
            "a write past the end",
            |t| t.send_after_negotiation(m::SET_CONFIG, &config_payload(200, 4, 0, &[7; 4]), &[]),
            Refused,
        ),
        (
            "a write of less than it says",
            |t| t.send_after_negotiation(m::SET_CONFIG, &config_payload(32, 8, 0, &[0]), &[]),
            Refused,
        ),
        (
            "the cache mode, both ways",
            |t| {
                let mut connection = t.connect_negotiated();
                for mode in [0, 1, 0] {
                    connection.send_acked(m::SET_CONFIG, &config_payload(32, 1, 0, &[mode]), &[]);
                    assert_eq!(connection.request(m::GET_CONFIG, &config_payload(32, 1, 0, &[9]))[12..], [mode]);
                }
                // The next driver finds the configured value again.
                drop(connection);
                assert_eq!(t.connect_negotiated().request(m::GET_CONFIG, &config_payload(32, 1, 0, &[0]))[12..], [1]);
            },
            CheckedBySession,
        ),
        (
            "every length at offset 0",
            |t| {
                let mut connection = t.connect_negotiated();
                let whole = whole_config(&mut connection);
                for size in 1..=4084 {
                    let reply =
                        connection.request(m::GET_CONFIG, &config_payload(0, size, 0, &vec![0xaa; size as usize]));
                    assert_eq!(reply[..12], config_payload(0, size, 0, &[])[..12], "{size} bytes");
                    assert!(reply[12..] == whole[..size as usize], "{size} bytes");
                }
            },
            CheckedBySession,
        ),
        (
            "every offset",
            |t| {
                let mut connection = t.connect_negotiated();
                let whole = whole_config(&mut connection);
                for offset in 1..4096 {
                    let size = [1, 7, 60, 4084][offset as usize % 4].min(4096 - offset);
                    let reply =
                        connection.request(m::GET_CONFIG, &config_payload(offset, size, 0, &vec![0xaa; size as usize]));
                    assert!(reply[12..] == whole[offset as usize..(offset + size) as usize], "{size} at {offset}");
                }
            },
            CheckedBySession,
        ),
    ];
    run_sessions(rows);
}

/// Returns the configuration space: its first 96 bytes from the daemon, then zeroes.
fn whole_config(connection: &mut VhostUserSocket) -> Vec<u8> {
    let mut whole = connection.request(m::GET_CONFIG, &config_payload(0, 96, 0, &[0xaa; 96])).split_off(12);
    assert_eq!(whole[..8], ((DISK_BYTES / 512) as u64).to_le_bytes(), "the capacity");
    assert_eq!(whole[34..36], [2, 0], "the queues");
    assert!(whole[72..].iter().all(|byte| *byte == 0), "past the known fields");
    whole.resize(4096, 0);
    whole
}
