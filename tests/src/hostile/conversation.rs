//! vhost-user sessions that a daemon must survive: how each ends, and what must be unchanged afterwards.

use std::path::PathBuf;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::fd::BorrowedFd;

use super::case::{content, fill};
use super::daemon::{Daemon, Holds};
use super::front_end::FrontEnd;
use super::load::Neighbour;
use super::memory::{Region, START};
use super::request::{OK, direct, header, kind, readable, writable};
use super::socket::{Connection, Heard, NEED_REPLY, VERSION, message as m};

/// Bytes of the disk under attack.
pub const DISK: usize = 1 << 20;

/// How a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The daemon closes the connection, and logs why.
    Closed,
    /// The daemon replies with an error, closes the connection, and logs why.
    Refused,
    /// The daemon replies with an error, and logs why; the session continues.
    Declined,
    /// The session has checked everything itself, and the daemon logs nothing.
    Works,
}

/// A session with the socket of the disk under attack.
pub struct Talk {
    /// The disk's socket.
    pub socket: PathBuf,
    /// A directory for files.
    pub folder: PathBuf,
    /// The connection on which the daemon must react.
    pub connection: Option<Connection>,
}

impl Talk {
    /// Connects.
    pub fn open(&self) -> Connection {
        Connection::open(&self.socket)
    }

    /// Connects and negotiates features.
    pub fn negotiated(&self) -> Connection {
        let mut connection = self.open();
        connection.negotiate(0);
        connection
    }

    /// Connects a frontend that has set the memory table.
    pub fn front_end(&self) -> FrontEnd {
        FrontEnd::connect(&self.socket, 0)
    }

    /// Sends invalid bytes on a new connection.
    pub fn first(&mut self, bytes: &[u8]) {
        let connection = self.open();
        connection.bytes(bytes, &[]);
        self.connection = Some(connection);
    }

    /// Sends an invalid message after the negotiation.
    pub fn bad(&mut self, message: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let connection = self.negotiated();
        connection.send(message, VERSION | NEED_REPLY, payload, fds);
        self.connection = Some(connection);
    }

    /// Sends an invalid message after the memory table was set.
    pub fn late(&mut self, frontend: FrontEnd, message: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        frontend.connection.send(message, VERSION | NEED_REPLY, payload, fds);
        self.connection = Some(frontend.connection);
    }
}

/// Name, session, and how it ends.
pub type Row = (&'static str, fn(&mut Talk), Outcome);

/// A daemon with a disk under attack and a good disk.
pub struct Stage {
    /// The good disk's client.
    pub neighbour: Neighbour,
    /// The daemon.
    pub daemon: Daemon,
    /// Content of the disk under attack.
    pub model: Vec<u8>,
    base: Holds,
    complaints: usize,
}

impl Stage {
    /// Starts the daemon, and fills the disk under attack.
    #[expect(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Stage {
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

    /// Checks that the daemon is in the state before `after`, except for `lines` more warnings.
    ///
    /// # Panics
    /// When it is not.
    pub fn check(&mut self, after: &str, lines: usize) {
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

    /// Stops the daemon.
    ///
    /// # Panics
    /// When anything failed.
    pub fn end(self) {
        assert!(self.neighbour.finish() > 0);
        self.daemon.stop();
    }
}

/// Runs all these sessions.
///
/// # Panics
/// When one of them does not end as expected.
pub fn run(cases: &[Row]) {
    let mut harness = Stage::new();
    let mut failed = Vec::new();
    for (name, session, outcome) in cases {
        let mut fixture =
            Talk { socket: harness.daemon.socket("bad"), folder: harness.daemon.folder().to_owned(), connection: None };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            session(&mut fixture);
            if matches!(outcome, Outcome::Refused | Outcome::Declined) {
                match fixture.connection.as_mut().expect("a connection").hear() {
                    Heard::Reply { payload, .. } => assert_ne!(payload, 0_u64.to_ne_bytes(), "it was accepted"),
                    Heard::End => panic!("the daemon hung up without an answer"),
                }
            }
            if *outcome == Outcome::Declined {
                assert_ne!(fixture.connection.as_mut().expect("a connection").ask_u64(m::GET_FEATURES), 0);
            } else if *outcome != Outcome::Works {
                let received = fixture.connection.as_mut().expect("a connection").hear();
                assert_eq!(received, Heard::End, "the daemon goes on");
            }
        }));
        drop(fixture);
        let lines = usize::from(*outcome != Outcome::Works);
        let check = std::panic::AssertUnwindSafe(|| {
            harness.check(name, lines);
            let last = harness.daemon.complaints("bad").pop().unwrap_or_default();
            assert!(*outcome != Outcome::Declined || last.contains("declined"), "{last}");
        });
        if result.is_err() | std::panic::catch_unwind(check).is_err() {
            failed.push(*name);
            harness.complaints = harness.daemon.complaints("bad").len();
            harness.daemon.assert_alive(name);
        }
    }
    assert!(failed.is_empty(), "{} of {} conversations: {failed:#?}", failed.len(), cases.len());
    harness.end();
}

/// Creates a region of one page.
pub fn page(guest: u64) -> Region {
    Region::new(guest, guest | 1 << 40, 4096, 0)
}

/// Returns true if a queue completes a read.
///
/// # Panics
/// When there is no completion.
pub fn serves(frontend: &mut FrontEnd, index: usize) -> bool {
    let at = START + 0x1_8000;
    frontend.memory.write(at, &header(kind::IN, 1));
    frontend.memory.write(at + 0x3000, &[0xee]);
    let segments = [readable(at, 16), writable(at + 0x1000, 512), writable(at + 0x3000, 1)];
    let queue = &mut frontend.queues[index];
    let head = direct(&queue.ring, &[0, 1, 2], &segments);
    queue.ring.offer(head);
    queue.go();
    queue.answer() == (0, 513) && frontend.memory.read(at + 0x3000, 1) == [OK]
}
