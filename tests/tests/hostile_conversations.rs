//! Malformed vhost-user conversations against a real daemon: each ends, with one log line; the next front-end is served,
//! nothing is left open or mapped, and a good disk on the same worker is verified all through.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use mqblk_tests::hostile::case::{NOWHERE, content, fill};
use mqblk_tests::hostile::daemon::{Daemon, Holds};
use mqblk_tests::hostile::event::Event;
use mqblk_tests::hostile::front_end::{EVENT_IDX, FrontEnd, PROTOCOL_FEATURES, RING};
use mqblk_tests::hostile::load::Neighbour;
use mqblk_tests::hostile::memory::{END, Memory, Region, SEAM, START, table};
use mqblk_tests::hostile::request::{OK, direct, header, kind, readable, writable};
use mqblk_tests::hostile::ring::Places;
use mqblk_tests::hostile::socket::{
    Connection, Heard, NEED_REPLY, NO_FD, REPLY, VERSION, config, frame, message as m, state,
};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::fd::{AsFd, BorrowedFd};

const DISK: usize = 1 << 20;

/// How a conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The daemon hangs up, and logs why.
    Closed,
    /// The daemon answers no, hangs up, and logs why.
    Refused,
    /// The daemon answers no, and logs why; the conversation goes on.
    Declined,
    /// The conversation itself has checked all; nothing to complain of.
    Works,
}
use Outcome::{Closed, Declined, Refused, Works};

/// A conversation with a socket, not yet begun.
struct Talk {
    socket: PathBuf,
    folder: PathBuf,
    /// What the daemon has to react to.
    connection: Option<Connection>,
}

impl Talk {
    /// A new connection.
    fn open(&self) -> Connection {
        Connection::open(&self.socket)
    }

    /// A new connection after its negotiation.
    fn negotiated(&self) -> Connection {
        let mut connection = self.open();
        connection.negotiate(0);
        connection
    }

    /// A front-end that has told its memory.
    fn front_end(&self) -> FrontEnd {
        FrontEnd::connect(&self.socket, 0)
    }

    /// A message that the daemon must not like, as the first of a new connection.
    fn first(&mut self, bytes: &[u8]) {
        let connection = self.open();
        connection.bytes(bytes, &[]);
        self.connection = Some(connection);
    }

    /// A message that the daemon must not like, after the negotiation.
    fn bad(&mut self, message: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let connection = self.negotiated();
        connection.send(message, VERSION | NEED_REPLY, payload, fds);
        self.connection = Some(connection);
    }

    /// A message that the daemon must not like, after memory was told.
    fn late(&mut self, front_end: FrontEnd, message: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        front_end.connection.send(message, VERSION | NEED_REPLY, payload, fds);
        self.connection = Some(front_end.connection);
    }
}

type Row = (&'static str, fn(&mut Talk), Outcome);

/// A daemon with a disk to be abused and a good one beside it.
struct Stage {
    neighbour: Neighbour,
    daemon: Daemon,
    model: Vec<u8>,
    base: Holds,
    complaints: usize,
}

impl Stage {
    fn new() -> Stage {
        let daemon =
            Daemon::start(1, &[("bad", "storage=ram,size=1M,queues=2"), ("good", "storage=ram,size=1M,queues=1")]);
        let neighbour = Neighbour::start(daemon.socket("good"), 1, 2);
        let mut model = vec![0; DISK];
        SmallRng::seed_from_u64(3).fill(&mut model[..]);
        fill(&daemon.socket("bad"), &model);
        daemon.settle("bad");
        let base = daemon.quiet_holds();
        Stage { daemon, neighbour, model, base, complaints: 0 }
    }

    /// The daemon is as it was before `after`, but for `lines` more lines of complaint.
    fn check(&mut self, after: &str, lines: usize) {
        self.daemon.settle("bad");
        self.daemon.assert_alive(after);
        self.daemon.wait_holds(self.base, after);
        let all = self.daemon.complaints("bad");
        let new = &all[self.complaints..];
        assert_eq!(new.len(), lines, "after {after}: log lines: {new:#?}");
        self.complaints = all.len();
        assert!(content(&self.daemon.socket("bad"), DISK) == self.model, "after {after}: the disk's content");
        self.neighbour.assert_goes_on(after);
    }

    fn end(self) {
        assert!(self.neighbour.finish() > 0);
        self.daemon.stop();
    }
}

fn run(rows: &[Row]) {
    let mut stage = Stage::new();
    let mut failed = Vec::new();
    for (name, talk, outcome) in rows {
        let mut it =
            Talk { socket: stage.daemon.socket("bad"), folder: stage.daemon.folder().to_owned(), connection: None };
        let went = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            talk(&mut it);
            if matches!(outcome, Refused | Declined) {
                match it.connection.as_mut().expect("a connection").hear() {
                    Heard::Reply { payload, .. } => assert_ne!(payload, 0_u64.to_ne_bytes(), "it was accepted"),
                    Heard::End => panic!("the daemon hung up without an answer"),
                }
            }
            if *outcome == Declined {
                assert_ne!(it.connection.as_mut().expect("a connection").ask_u64(m::GET_FEATURES), 0);
            } else if *outcome != Works {
                let heard = it.connection.as_mut().expect("a connection").hear();
                assert_eq!(heard, Heard::End, "the daemon goes on");
            }
        }));
        drop(it);
        let lines = usize::from(*outcome != Works);
        let check = std::panic::AssertUnwindSafe(|| {
            stage.check(name, lines);
            let last = stage.daemon.complaints("bad").pop().unwrap_or_default();
            assert!(*outcome != Declined || last.contains("declined"), "{last}");
        });
        if went.is_err() | std::panic::catch_unwind(check).is_err() {
            failed.push(*name);
            stage.complaints = stage.daemon.complaints("bad").len();
            stage.daemon.assert_alive(name);
        }
    }
    assert!(failed.is_empty(), "{} of {} conversations: {failed:#?}", failed.len(), rows.len());
    stage.end();
}

fn pipe() -> (rustix::fd::OwnedFd, rustix::fd::OwnedFd) {
    rustix::pipe::pipe().expect("a pipe")
}

/// A region of one page.
fn page(guest: u64) -> Region {
    Region::new(guest, guest | 1 << 40, 4096, 0)
}

#[test]
fn frames_that_make_no_sense() {
    let rows: &[Row] = &[
        (
            "garbage",
            |t| {
                let mut bytes = vec![0; 4096];
                SmallRng::seed_from_u64(1).fill(&mut bytes[..]);
                t.first(&bytes);
            },
            Closed,
        ),
        ("zeroes", |t| t.first(&[0; 64]), Closed),
        ("an HTTP request", |t| t.first(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), Closed),
        (
            "half a header, then the end",
            |t| {
                t.first(&frame(m::GET_FEATURES, VERSION, 0, &[])[..6]);
                t.connection.as_ref().expect("open").fall_silent();
            },
            Closed,
        ),
        (
            "a header, then the end",
            |t| {
                t.first(&frame(m::SET_FEATURES, VERSION, 8, &[]));
                t.connection.as_ref().expect("open").fall_silent();
            },
            Closed,
        ),
        (
            "a header and half a payload, then the end",
            |t| {
                t.first(&frame(m::SET_FEATURES, VERSION, 8, &[0; 4]));
                t.connection.as_ref().expect("open").fall_silent();
            },
            Closed,
        ),
        ("a payload of 4097 bytes", |t| t.first(&frame(m::SET_MEM_TABLE, VERSION, 4097, &[0; 4097])), Closed),
        ("a payload of 4 GiB", |t| t.first(&frame(m::SET_CONFIG, VERSION, u32::MAX, &[0; 64])), Closed),
        ("version 0", |t| t.first(&frame(m::GET_FEATURES, 0, 0, &[])), Closed),
        ("version 2", |t| t.first(&frame(m::GET_FEATURES, 2, 0, &[])), Closed),
        ("version 3", |t| t.first(&frame(m::GET_FEATURES, 3, 0, &[])), Closed),
        ("the reply flag", |t| t.first(&frame(m::GET_FEATURES, VERSION | REPLY, 0, &[])), Closed),
        ("reserved flags", |t| t.first(&frame(m::GET_FEATURES, VERSION | 0x10, 0, &[])), Closed),
        ("message 0", |t| t.first(&frame(0, VERSION, 0, &[])), Closed),
        ("message 1000", |t| t.first(&frame(1000, VERSION, 8, &[0; 8])), Closed),
        ("the largest message", |t| t.first(&frame(u32::MAX, VERSION, 0, &[])), Closed),
        ("a question with a payload", |t| t.first(&frame(m::GET_FEATURES, VERSION, 8, &[0; 8])), Closed),
        ("a payload too short", |t| t.bad(m::SET_FEATURES, &[0; 4], &[]), Closed),
        ("a payload too long", |t| t.bad(m::SET_VRING_NUM, &[0; 12], &[]), Closed),
        ("no payload", |t| t.bad(m::SET_VRING_ADDR, &[], &[]), Closed),
        (
            "a descriptor where none belongs",
            |t| {
                let event = Event::new();
                t.bad(m::SET_FEATURES, &[0; 8], &[event.as_fd()]);
            },
            Closed,
        ),
        (
            "64 descriptors, which go with their message",
            |t| {
                let (mut connection, event) = (t.negotiated(), Event::new());
                connection.send(m::SET_OWNER, VERSION, &[], &[event.as_fd(); 64]);
                assert_ne!(connection.ask_u64(m::GET_FEATURES), 0);
            },
            Works,
        ),
        (
            "descriptors in the middle of a payload",
            |t| {
                let connection = t.negotiated();
                let event = Event::new();
                connection.bytes(&frame(m::SET_VRING_CALL, VERSION | NEED_REPLY, 8, &[]), &[]);
                connection.bytes(&0_u64.to_ne_bytes(), &[event.as_fd(); 8]);
                t.connection = Some(connection);
            },
            Closed,
        ),
        (
            "SET_OWNER twice",
            |t| {
                let mut connection = t.negotiated();
                connection.tell(m::SET_OWNER, &[], &[]);
                connection.tell(m::SET_OWNER, &[], &[]);
            },
            Works,
        ),
        ("RESET_OWNER", |t| t.negotiated().tell(m::RESET_OWNER, &[], &[]), Works),
    ];
    run(rows);
}

#[test]
fn features_that_were_not_offered() {
    let rows: &[Row] = &[
        (
            "the packed ring",
            |t| {
                let offered = t.open().ask_u64(m::GET_FEATURES);
                t.bad(m::SET_FEATURES, &(offered | 1 << 34).to_ne_bytes(), &[]);
            },
            Refused,
        ),
        ("all virtio features", |t| t.bad(m::SET_FEATURES, &u64::MAX.to_ne_bytes(), &[]), Refused),
        ("dirty logging", |t| t.bad(m::SET_FEATURES, &(1_u64 << 26 | 1 << 32).to_ne_bytes(), &[]), Refused),
        ("all protocol features", |t| t.bad(m::SET_PROTOCOL_FEATURES, &u64::MAX.to_ne_bytes(), &[]), Refused),
        (
            "the inflight region's protocol feature",
            |t| {
                t.bad(m::SET_PROTOCOL_FEATURES, &(1_u64 << 3 | 1 << 12).to_ne_bytes(), &[]);
            },
            Refused,
        ),
        ("GET_QUEUE_NUM without MQ", |t| t.first(&frame(m::GET_QUEUE_NUM, VERSION, 0, &[])), Closed),
        (
            "GET_CONFIG without CONFIG",
            |t| {
                let payload = config(0, 8, 0, &[0; 8]);
                t.first(&frame(m::GET_CONFIG, VERSION, payload.len() as u32, &payload));
            },
            Closed,
        ),
        ("RESET_DEVICE without its feature", |t| t.first(&frame(m::RESET_DEVICE, VERSION, 0, &[])), Closed),
        ("GET_MAX_MEM_SLOTS without its feature", |t| t.first(&frame(m::GET_MAX_MEM_SLOTS, VERSION, 0, &[])), Closed),
        (
            "SET_VRING_ENABLE without protocol features",
            |t| {
                let mut connection = t.open();
                connection.negotiate(PROTOCOL_FEATURES);
                connection.send(m::SET_VRING_ENABLE, VERSION, &state(0, 1), &[]);
                t.connection = Some(connection);
            },
            Closed,
        ),
        (
            "SET_LOG_BASE",
            |t| {
                let log = page(0);
                t.bad(m::SET_LOG_BASE, &[0; 16], &[log.fd()]);
            },
            Closed,
        ),
        (
            "SET_LOG_FD",
            |t| {
                let event = Event::new();
                t.bad(m::SET_LOG_FD, &[], &[event.as_fd()]);
            },
            Closed,
        ),
        ("GET_INFLIGHT_FD", |t| t.bad(m::GET_INFLIGHT_FD, &[1; 20], &[]), Closed),
        (
            "SET_INFLIGHT_FD",
            |t| {
                let region = page(0);
                t.bad(m::SET_INFLIGHT_FD, &[1; 20], &[region.fd()]);
            },
            Closed,
        ),
        ("SET_STATUS", |t| t.bad(m::SET_STATUS, &15_u64.to_ne_bytes(), &[]), Closed),
        ("GET_STATUS", |t| t.bad(m::GET_STATUS, &[], &[]), Closed),
        ("POSTCOPY_ADVISE", |t| t.bad(m::POSTCOPY_ADVISE, &[], &[]), Closed),
        ("VRING_KICK in band", |t| t.bad(m::VRING_KICK, &state(0, 0), &[]), Closed),
        ("CHECK_DEVICE_STATE", |t| t.bad(m::CHECK_DEVICE_STATE, &[], &[]), Declined),
        (
            "SET_DEVICE_STATE_FD",
            |t| {
                let (_reader, writer) = pipe();
                t.bad(m::SET_DEVICE_STATE_FD, &state(0, 0), &[writer.as_fd()]);
            },
            Declined,
        ),
        (
            "SET_DEVICE_STATE_FD without a descriptor",
            |t| {
                t.bad(m::SET_DEVICE_STATE_FD, &state(0, 0), &[]);
            },
            Closed,
        ),
        (
            "GPU_SET_SOCKET",
            |t| {
                let (_ours, theirs) = UnixStream::pair().expect("sockets");
                t.bad(m::GPU_SET_SOCKET, &[], &[theirs.as_fd()]);
            },
            Refused,
        ),
    ];
    run(rows);
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
fn queues_that_cannot_be() {
    let rows: &[Row] = &[
        ("a ring of 0 entries", |t| t.bad(m::SET_VRING_NUM, &state(0, 0), &[]), Refused),
        ("a ring of 1 entry", |t| t.bad(m::SET_VRING_NUM, &state(0, 1), &[]), Refused),
        ("a ring of 3 entries", |t| t.bad(m::SET_VRING_NUM, &state(0, 3), &[]), Refused),
        ("a ring of 65536 entries", |t| t.bad(m::SET_VRING_NUM, &state(0, 65536), &[]), Refused),
        ("a ring longer than was offered", |t| t.bad(m::SET_VRING_NUM, &state(0, 512), &[]), Refused),
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

/// Whether a queue answers a read.
fn serves(front_end: &mut FrontEnd, index: usize) -> bool {
    let at = START + 0x1_8000;
    front_end.memory.write(at, &header(kind::IN, 1));
    front_end.memory.write(at + 0x3000, &[0xee]);
    let pieces = [readable(at, 16), writable(at + 0x1000, 512), writable(at + 0x3000, 1)];
    let queue = &mut front_end.queues[index];
    let head = direct(&queue.ring, &[0, 1, 2], &pieces);
    queue.ring.offer(head);
    queue.go();
    queue.answer() == (0, 513) && front_end.memory.read(at + 0x3000, 1) == [OK]
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

#[test]
fn a_front_end_may_leave_at_any_step() {
    type Step = fn(&mut FrontEnd);
    let steps: &[Step] = &[
        |f| assert_ne!(f.connection.ask_u64(m::GET_FEATURES), 0),
        |f| f.features = f.connection.negotiate(EVENT_IDX),
        |f| assert_eq!(f.connection.ask_u64(m::GET_QUEUE_NUM), 2),
        |f| assert!(f.connection.ask_u64(m::GET_MAX_MEM_SLOTS) >= 509),
        FrontEnd::tell_memory,
        |f| {
            let region = page(1 << 40);
            f.connection.tell(m::ADD_MEM_REG, &region.single(), &[region.fd()]);
        },
        |f| f.connection.tell(m::SET_VRING_NUM, &state(1, 64), &[]),
        |f| f.connection.tell(m::SET_VRING_BASE, &state(1, 0), &[]),
        |f| {
            let addresses = f.addresses(1, Places::pages(START + 0x4_0000));
            f.connection.tell(m::SET_VRING_ADDR, &addresses, &[]);
        },
        |f| f.connection.tell(m::SET_VRING_CALL, &1_u64.to_ne_bytes(), &[Event::new().as_fd()]),
        |f| f.connection.tell(m::SET_VRING_ERR, &1_u64.to_ne_bytes(), &[Event::new().as_fd()]),
        |f| f.connection.tell(m::SET_VRING_KICK, &1_u64.to_ne_bytes(), &[Event::new().as_fd()]),
        |f| f.connection.tell(m::SET_VRING_ENABLE, &state(1, 1), &[]),
        |f| {
            f.add_queue(Places::pages(START), RING);
        },
        |f| assert!(serves(f, 0)),
        |f| f.connection.tell(m::SET_VRING_ENABLE, &state(0, 0), &[]),
        |f| assert_eq!(f.stop_queue(0), 1),
        |f| f.connection.tell(m::RESET_DEVICE, &[], &[]),
    ];
    let mut stage = Stage::new();
    for count in 0..=steps.len() {
        for by_half in [false, true] {
            let connection = Connection::open(&stage.daemon.socket("bad"));
            let memory = Arc::new(Memory::usual());
            let mut front_end = FrontEnd { connection, memory, queues: Vec::new(), features: 0 };
            steps[..count].iter().for_each(|step| step(&mut front_end));
            if by_half {
                // In the middle of its next message.
                front_end.connection.bytes(&frame(m::SET_FEATURES, VERSION, 8, &[1, 2, 3]), &[]);
            }
            drop(front_end);
            stage.check(&format!("leaving after step {count}"), usize::from(by_half));
        }
    }
    stage.end();
}

#[test]
fn a_thousand_front_ends() {
    let mut stage = Stage::new();
    let socket = stage.daemon.socket("bad");
    for number in 0..1000 {
        match number % 50 {
            // Comes and serves a request.
            0 => assert!(serves(&mut FrontEnd::start(&socket, 0, 2), 1)),
            // Comes with a ring, and goes.
            1..5 => drop(FrontEnd::start(&socket, 0, 1)),
            5..20 => assert_ne!(Connection::open(&socket).ask_u64(m::GET_FEATURES), 0),
            // Comes, asks, and does not wait for the answer.
            20..30 => {
                Connection::open(&socket).send(m::GET_FEATURES, VERSION, &[], &[]);
            }
            _ => drop(Connection::open(&socket)),
        }
    }
    stage.daemon.settle("bad");
    // Whoever asks and does not wait is told of no more than a broken pipe, and that is no complaint.
    stage.check("a thousand front-ends", 0);
    stage.end();
}

#[test]
fn half_a_message_holds_up_nobody_else() {
    let mut stage = Stage::new();
    let socket = stage.daemon.socket("bad");
    for cut in [1, 6, 12, 15] {
        let silent = Connection::open(&socket);
        silent.bytes(&frame(m::SET_FEATURES, VERSION, 8, &[0; 8])[..cut], &[]);
        let mut waiting = Connection::open(&socket);
        waiting.send(m::GET_FEATURES, VERSION, &[], &[]);
        stage.neighbour.assert_goes_on("half a message");
        drop(silent);
        assert!(matches!(waiting.hear(), Heard::Reply { message: m::GET_FEATURES, .. }), "the next front-end");
        drop(waiting);
        stage.check("half a message", 1);
    }
    stage.end();
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
