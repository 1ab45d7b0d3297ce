//! Queues and configuration that cannot be.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::{UnixDatagram, UnixStream};

use mqblk_tests::hostile::case::NOWHERE;
use mqblk_tests::hostile::conversation::Outcome::{Closed, Refused, Works};
use mqblk_tests::hostile::conversation::{DISK, Row, Talk, run, serves};
use mqblk_tests::hostile::event::Event;
use mqblk_tests::hostile::front_end::{FrontEnd, PROTOCOL_FEATURES, RING};
use mqblk_tests::hostile::memory::{END, SEAM, START};
use mqblk_tests::hostile::request::{direct, header, kind, readable, writable};
use mqblk_tests::hostile::ring::Places;
use mqblk_tests::hostile::socket::{Connection, NEED_REPLY, NO_FD, VERSION, config, message as m, state};
use rustix::fd::AsFd;

fn pipe() -> (rustix::fd::OwnedFd, rustix::fd::OwnedFd) {
    rustix::pipe::pipe().expect("a pipe")
}

#[test]
fn queues_that_cannot_be() {
    let rows: &[Row] = &[
        ("a ring of 0 entries", |t| t.bad(m::SET_VRING_NUM, &state(0, 0), &[]), Refused),
        ("a ring of 1 entry", |t| t.bad(m::SET_VRING_NUM, &state(0, 1), &[]), Refused),
        ("a ring of 3 entries", |t| t.bad(m::SET_VRING_NUM, &state(0, 3), &[]), Refused),
        ("a ring of 65536 entries", |t| t.bad(m::SET_VRING_NUM, &state(0, 65536), &[]), Refused),
        ("a ring longer than was offered", |t| t.bad(m::SET_VRING_NUM, &state(0, 2048), &[]), Refused),
        ("a ring of 2 to the 31 entries", |t| t.bad(m::SET_VRING_NUM, &state(0, 1 << 31), &[]), Refused),
        ("the size of queue 2 of 2", |t| t.bad(m::SET_VRING_NUM, &state(2, 64), &[]), Refused),
        ("the base of queue 4294967295", |t| t.bad(m::SET_VRING_BASE, &state(u32::MAX, 0), &[]), Refused),
        ("a base of 65536", |t| t.bad(m::SET_VRING_BASE, &state(0, 65536), &[]), Refused),
        (
            "the kick of queue 255",
            |t| {
                let event = Event::new();
                t.bad(m::SET_VRING_KICK, &255_u64.to_ne_bytes(), &[event.as_fd()]);
            },
            Refused,
        ),
        ("a kick without a descriptor", |t| t.bad(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[]), Closed),
        (
            "a kick with two descriptors",
            |t| {
                let event = Event::new();
                t.bad(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[event.as_fd(); 2]);
            },
            Closed,
        ),
        (
            "a kick that says it has no descriptor, and one",
            |t| {
                let event = Event::new();
                t.bad(m::SET_VRING_KICK, &NO_FD.to_ne_bytes(), &[event.as_fd()]);
            },
            Closed,
        ),
        (
            "a pipe as kick",
            |t| {
                let (reader, _writer) = pipe();
                t.bad(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[reader.as_fd()]);
            },
            Refused,
        ),
        (
            "a full pipe as call",
            |t| {
                let (_reader, writer) = pipe();
                rustix::io::ioctl_fionbio(&writer, true).expect("non-blocking");
                let mut file = File::from(writer);
                while file.write(&[0; 4096]).is_ok() {}
                rustix::io::ioctl_fionbio(&file, false).expect("blocking");
                t.bad(m::SET_VRING_CALL, &0_u64.to_ne_bytes(), &[file.as_fd()]);
            },
            Refused,
        ),
        (
            "a file as err",
            |t| {
                let file = File::create(t.folder.join("err")).expect("a file");
                t.bad(m::SET_VRING_ERR, &1_u64.to_ne_bytes(), &[file.as_fd()]);
            },
            Refused,
        ),
        (
            "a socket as call",
            |t| {
                let (_ours, theirs) = UnixStream::pair().expect("sockets");
                t.bad(m::SET_VRING_CALL, &1_u64.to_ne_bytes(), &[theirs.as_fd()]);
            },
            Refused,
        ),
        (
            "a pipe as back-end request channel",
            |t| {
                let (_reader, writer) = pipe();
                t.bad(m::SET_BACKEND_REQ_FD, &[], &[writer.as_fd()]);
            },
            Refused,
        ),
        (
            "a datagram socket as back-end request channel",
            |t| {
                let (_ours, theirs) = UnixDatagram::pair().expect("sockets");
                t.bad(m::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
            },
            Refused,
        ),
        (
            "two back-end request channels",
            |t| {
                let mut connection = t.negotiated();
                for _ in 0..2 {
                    let (_ours, theirs) = UnixStream::pair().expect("sockets");
                    connection.tell(m::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
                }
            },
            Works,
        ),
        (
            "a kick before memory",
            |t| {
                let (mut connection, event) = (t.negotiated(), Event::new());
                connection.tell(m::SET_VRING_NUM, &state(0, 64), &[]);
                connection.tell(m::SET_VRING_ADDR, &[&state(0, 0)[..], &[0; 32]].concat(), &[]);
                connection.send(m::SET_VRING_KICK, VERSION | NEED_REPLY, &0_u64.to_ne_bytes(), &[event.as_fd()]);
                t.connection = Some(connection);
            },
            Refused,
        ),
        (
            "a kick before all else works once the rest comes",
            |t| {
                let mut front_end = t.front_end();
                front_end.connection.tell(m::SET_VRING_KICK, &NO_FD.to_ne_bytes(), &[]);
                front_end.add_queue(Places::pages(START), RING);
                front_end.stop_queue(0);
            },
            Works,
        ),
        ("a ring outside memory", |t| start_at(t, Places::pages(NOWHERE)), Refused),
        (
            "a descriptor table that leaves its region",
            |t| {
                start_at(t, Places { desc: SEAM - 512, ..Places::pages(START) });
            },
            Refused,
        ),
        (
            "an available ring that leaves memory",
            |t| {
                start_at(t, Places { avail: END - 130, ..Places::pages(START) });
            },
            Refused,
        ),
        (
            "a used ring that leaves memory",
            |t| start_at(t, Places { used: END - 516, ..Places::pages(START) }),
            Refused,
        ),
        (
            "a used ring across two regions",
            |t| {
                start_at(t, Places { used: SEAM - 256, ..Places::pages(START) });
            },
            Refused,
        ),
        (
            "a descriptor table that is not aligned",
            |t| {
                start_at(t, Places { desc: START + 8, ..Places::pages(START) });
            },
            Closed,
        ),
        (
            "an available ring that is not aligned",
            |t| {
                start_at(t, Places { avail: START + 0x1001, ..Places::pages(START) });
            },
            Closed,
        ),
        (
            "a used ring that is not aligned",
            |t| {
                start_at(t, Places { used: START + 0x2002, ..Places::pages(START) });
            },
            Closed,
        ),
        (
            "ring addresses with an unknown flag",
            |t| {
                let front_end = t.front_end();
                let mut payload = front_end.addresses(0, Places::pages(START));
                payload[4] = 2;
                t.late(front_end, m::SET_VRING_ADDR, &payload, &[]);
            },
            Closed,
        ),
        ("a queue that is enabled with 2", |t| t.bad(m::SET_VRING_ENABLE, &state(0, 2), &[]), Closed),
        ("queue 7 is enabled", |t| t.bad(m::SET_VRING_ENABLE, &state(7, 1), &[]), Refused),
        ("queue 7 is stopped", |t| t.bad(m::GET_VRING_BASE, &state(7, 0), &[]), Closed),
        (
            "a running queue gets another size",
            |t| {
                let mut front_end = t.front_end();
                front_end.add_queue(Places::pages(START), RING);
                t.late(front_end, m::SET_VRING_NUM, &state(0, 128), &[]);
            },
            Refused,
        ),
        (
            "a running queue gets the same size",
            |t| {
                let mut front_end = t.front_end();
                front_end.add_queue(Places::pages(START), RING);
                front_end.connection.tell(m::SET_VRING_NUM, &state(0, RING.into()), &[]);
                let addresses = front_end.addresses(0, Places::pages(START));
                front_end.connection.tell(m::SET_VRING_ADDR, &addresses, &[]);
            },
            Works,
        ),
        (
            "a running queue is sent out of memory",
            |t| {
                let mut front_end = t.front_end();
                front_end.add_queue(Places::pages(START), RING);
                let payload = front_end.addresses(0, Places::pages(NOWHERE));
                t.late(front_end, m::SET_VRING_ADDR, &payload, &[]);
            },
            Refused,
        ),
        (
            "queues are stopped that never ran, and twice",
            |t| {
                let mut front_end = t.front_end();
                assert_eq!(front_end.stop_queue(1), 0);
                front_end.connection.tell(m::SET_VRING_BASE, &state(1, 77), &[]);
                assert_eq!((front_end.stop_queue(1), front_end.stop_queue(1)), (77, 77));
                front_end.add_queue(Places::pages(START), RING);
                assert_eq!((front_end.stop_queue(0), front_end.stop_queue(0)), (0, 0));
            },
            Works,
        ),
        (
            "rings at the very end of their regions",
            |t| {
                let mut front_end = t.front_end();
                let at =
                    Places { desc: SEAM - 16 * 64, avail: END - (6 + 2 * 64), used: END - 0x1000 - 6 - 8 * 64 - 2 };
                front_end.add_queue(at, RING);
                assert!(serves(&mut front_end, 0));
            },
            Works,
        ),
        (
            "without protocol features rings are enabled at once",
            |t| {
                let mut front_end = FrontEnd::start(&t.socket, PROTOCOL_FEATURES, 2);
                assert!(serves(&mut front_end, 0) && serves(&mut front_end, 1));
            },
            Works,
        ),
        (
            "without a call, and with the smallest ring",
            |t| {
                let mut front_end = t.front_end();
                front_end.add_queue(Places::pages(START), 2);
                front_end.connection.tell(m::SET_VRING_CALL, &NO_FD.to_ne_bytes(), &[]);
                let queue = &mut front_end.queues[0];
                for _ in 0..10 {
                    // A table, as two descriptors are too few.
                    front_end.memory.write(START + 0x7000, &header(kind::IN, 0));
                    let pieces = [readable(START + 0x7000, 16), writable(START + 0x9000, 513)];
                    let head = direct(&queue.ring, &[0, 1], &pieces);
                    queue.ring.offer(head);
                    queue.go();
                    assert_eq!(queue.answer(), (0, 513));
                }
            },
            Works,
        ),
    ];
    run(rows);
}

/// Sets a queue up at these places, up to the message that the daemon must not like.
fn start_at(t: &mut Talk, at: Places) {
    let mut front_end = t.front_end();
    let payload = front_end.addresses(0, at);
    let kick = Event::new();
    front_end.connection.tell(m::SET_VRING_NUM, &state(0, RING.into()), &[]);
    front_end.connection.tell(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[kick.as_fd()]);
    t.late(front_end, m::SET_VRING_ADDR, &payload, &[]);
}

#[test]
fn the_configuration() {
    let rows: &[Row] = &[
        ("a read of nothing", |t| t.bad(m::GET_CONFIG, &config(0, 0, 0, &[]), &[]), Closed),
        ("a read past 4096", |t| t.bad(m::GET_CONFIG, &config(4096, 1, 0, &[0]), &[]), Closed),
        ("a read across 4096", |t| t.bad(m::GET_CONFIG, &config(4095, 2, 0, &[0; 2]), &[]), Closed),
        ("a read whose end overflows", |t| t.bad(m::GET_CONFIG, &config(u32::MAX, 8, 0, &[0; 8]), &[]), Closed),
        ("a read without room for it", |t| t.bad(m::GET_CONFIG, &config(0, 60, 0, &[]), &[]), Closed),
        ("a read with unknown flags", |t| t.bad(m::GET_CONFIG, &config(0, 8, 0x80, &[0; 8]), &[]), Closed),
        ("a write of the capacity", |t| t.bad(m::SET_CONFIG, &config(0, 8, 0, &[0xff; 8]), &[]), Refused),
        ("a write across the cache mode", |t| t.bad(m::SET_CONFIG, &config(31, 3, 0, &[1; 3]), &[]), Refused),
        ("a cache mode of 2", |t| t.bad(m::SET_CONFIG, &config(32, 1, 0, &[2]), &[]), Refused),
        ("a write past the end", |t| t.bad(m::SET_CONFIG, &config(200, 4, 0, &[7; 4]), &[]), Refused),
        ("a write of less than it says", |t| t.bad(m::SET_CONFIG, &config(32, 8, 0, &[0]), &[]), Refused),
        (
            "the cache mode, both ways",
            |t| {
                let mut connection = t.negotiated();
                for mode in [0, 1, 0] {
                    connection.tell(m::SET_CONFIG, &config(32, 1, 0, &[mode]), &[]);
                    assert_eq!(connection.ask(m::GET_CONFIG, &config(32, 1, 0, &[9]))[12..], [mode]);
                }
                // The next driver finds the user's choice again.
                drop(connection);
                assert_eq!(t.negotiated().ask(m::GET_CONFIG, &config(32, 1, 0, &[0]))[12..], [1]);
            },
            Works,
        ),
        (
            "every length at offset 0",
            |t| {
                let mut connection = t.negotiated();
                let whole = whole_config(&mut connection);
                for size in 1..=4084 {
                    let reply = connection.ask(m::GET_CONFIG, &config(0, size, 0, &vec![0xaa; size as usize]));
                    assert_eq!(reply[..12], config(0, size, 0, &[])[..12], "{size} bytes");
                    assert!(reply[12..] == whole[..size as usize], "{size} bytes");
                }
            },
            Works,
        ),
        (
            "every offset",
            |t| {
                let mut connection = t.negotiated();
                let whole = whole_config(&mut connection);
                for offset in 1..4096 {
                    let size = [1, 7, 60, 4084][offset as usize % 4].min(4096 - offset);
                    let reply = connection.ask(m::GET_CONFIG, &config(offset, size, 0, &vec![0xaa; size as usize]));
                    assert!(reply[12..] == whole[offset as usize..(offset + size) as usize], "{size} at {offset}");
                }
            },
            Works,
        ),
    ];
    run(rows);
}

/// The configuration space: its first 96 bytes as the daemon says, and zeroes.
fn whole_config(connection: &mut Connection) -> Vec<u8> {
    let mut whole = connection.ask(m::GET_CONFIG, &config(0, 96, 0, &[0xaa; 96])).split_off(12);
    assert_eq!(whole[..8], ((DISK / 512) as u64).to_le_bytes(), "the capacity");
    assert_eq!(whole[34..36], [2, 0], "the queues");
    assert!(whole[72..].iter().all(|byte| *byte == 0), "past the known fields");
    whole.resize(4096, 0);
    whole
}
