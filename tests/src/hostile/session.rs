//! vhost-user sessions that a daemon must survive: the end of each, and the state that must be unchanged afterwards.

use std::path::PathBuf;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::fd::BorrowedFd;

use super::daemon::{HostileDaemon, HostileDaemonResources};
use super::frontend::HostileFrontend;
use super::load::start_neighbour;
use super::memory::{FileRegion, START};
use super::neighbour::Neighbour;
use super::request::{STATUS_OK, header, readable, request_type, writable, write_direct};
use super::ring_fixture::{read_disk, write_disk};
use super::socket::{NEED_REPLY, Received, VERSION, VhostUserSocket, message as m};

/// Bytes of the disk under attack.
pub const DISK_BYTES: usize = 1 << 20;

/// End of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionOutcome {
    /// The daemon closes the connection, and logs the reason.
    Closed,
    /// The daemon replies with an error, closes the connection, and logs the reason.
    Refused,
    /// The daemon replies with an error, and logs the reason; the session continues.
    Declined,
    /// The session has checked everything itself, and the daemon logs nothing.
    CheckedBySession,
}

/// A session, with the socket of the disk under attack.
pub struct SessionFixture {
    /// The disk's socket.
    pub socket: PathBuf,
    /// A directory for files.
    pub folder: PathBuf,
    /// The connection on which the daemon must react.
    pub connection: Option<VhostUserSocket>,
}

impl SessionFixture {
    /// Connects.
    pub fn connect(&self) -> VhostUserSocket {
        VhostUserSocket::connect(&self.socket)
    }

    /// Connects and negotiates features.
    pub fn connect_negotiated(&self) -> VhostUserSocket {
        let mut connection = self.connect();
        connection.negotiate(0);
        connection
    }

    /// Connects a frontend that has set the memory table.
    pub fn connect_frontend(&self) -> HostileFrontend {
        HostileFrontend::connect(&self.socket, 0)
    }

    /// Sends invalid bytes on a new connection.
    pub fn send_first(&mut self, bytes: &[u8]) {
        let connection = self.connect();
        connection.send_bytes(bytes, &[]);
        self.connection = Some(connection);
    }

    /// Sends an invalid message after the negotiation.
    pub fn send_after_negotiation(&mut self, message: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let connection = self.connect_negotiated();
        connection.send(message, VERSION | NEED_REPLY, payload, fds);
        self.connection = Some(connection);
    }

    /// Sends an invalid message after the memory table was set.
    pub fn send_after_memory(
        &mut self,
        frontend: HostileFrontend,
        message: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) {
        frontend.connection.send(message, VERSION | NEED_REPLY, payload, fds);
        self.connection = Some(frontend.connection);
    }
}

/// Name, session, and expected outcome.
pub type SessionCase = (&'static str, fn(&mut SessionFixture), SessionOutcome);

/// A daemon with a disk under attack and a good disk.
pub struct SessionHarness {
    /// Client of the good disk.
    pub neighbour: Neighbour,
    /// The daemon.
    pub daemon: HostileDaemon,
    /// Content of the disk under attack.
    pub expected_content: Vec<u8>,
    base_resources: HostileDaemonResources,
    warnings: usize,
}

impl SessionHarness {
    /// Starts the daemon, and fills the disk under attack.
    #[expect(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> SessionHarness {
        let daemon = HostileDaemon::start(
            1,
            &[("bad", "storage=ram,size=1M,queues=2"), ("good", "storage=ram,size=1M,queues=1")],
        );
        let neighbour = start_neighbour(daemon.socket("good"), 1, 2);
        let mut expected_content = vec![0; DISK_BYTES];
        SmallRng::seed_from_u64(3).fill(&mut expected_content[..]);
        write_disk(&daemon.socket("bad"), &expected_content);
        daemon.wait_for_session_end("bad");
        let base_resources = daemon.stable_resources();
        SessionHarness { daemon, neighbour, expected_content, base_resources, warnings: 0 }
    }

    /// Checks that the daemon is in the state before `after`, except for `lines` more warnings.
    ///
    /// # Panics
    /// When it is not.
    pub fn check(&mut self, after: &str, lines: usize) {
        self.daemon.wait_for_session_end("bad");
        self.daemon.assert_alive(after);
        self.daemon.wait_for_resources(self.base_resources, after);
        let all = self.daemon.warnings("bad");
        let new = &all[self.warnings..];
        assert_eq!(new.len(), lines, "after {after}: log lines: {new:#?}");
        self.warnings = all.len();
        assert!(
            read_disk(&self.daemon.socket("bad"), DISK_BYTES) == self.expected_content,
            "after {after}: the disk's content"
        );
        self.neighbour.assert_progress(after);
    }

    /// Stops the daemon.
    ///
    /// # Panics
    /// When anything failed.
    pub fn finish(self) {
        self.neighbour.finish();
        self.daemon.stop();
    }
}

/// Runs all these sessions.
///
/// # Panics
/// When one of them does not end as expected.
pub fn run_sessions(cases: &[SessionCase]) {
    let mut harness = SessionHarness::new();
    let mut failed = Vec::new();
    for (name, session, outcome) in cases {
        let mut fixture = SessionFixture {
            socket: harness.daemon.socket("bad"),
            folder: harness.daemon.folder().to_owned(),
            connection: None,
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            session(&mut fixture);
            if matches!(outcome, SessionOutcome::Refused | SessionOutcome::Declined) {
                match fixture.connection.as_mut().expect("a connection").receive() {
                    Received::Reply { payload, .. } => assert_ne!(payload, 0_u64.to_ne_bytes(), "it was accepted"),
                    Received::Closed => panic!("the daemon hung up without an answer"),
                }
            }
            if *outcome == SessionOutcome::Declined {
                assert_ne!(fixture.connection.as_mut().expect("a connection").request_u64(m::GET_FEATURES), 0);
            } else if *outcome != SessionOutcome::CheckedBySession {
                let received = fixture.connection.as_mut().expect("a connection").receive();
                assert_eq!(received, Received::Closed, "the daemon goes on");
            }
        }));
        drop(fixture);
        let lines = usize::from(*outcome != SessionOutcome::CheckedBySession);
        let check = std::panic::AssertUnwindSafe(|| {
            harness.check(name, lines);
            let last = harness.daemon.warnings("bad").pop().unwrap_or_default();
            assert!(*outcome != SessionOutcome::Declined || last.contains("declined"), "{last}");
        });
        if result.is_err() | std::panic::catch_unwind(check).is_err() {
            failed.push(*name);
            harness.warnings = harness.daemon.warnings("bad").len();
            harness.daemon.assert_alive(name);
        }
    }
    assert!(failed.is_empty(), "{} of {} conversations: {failed:#?}", failed.len(), cases.len());
    harness.finish();
}

/// Creates a region of one page.
pub fn one_page_region(guest: u64) -> FileRegion {
    FileRegion::new(guest, guest | 1 << 40, 4096, 0)
}

/// Returns true if a queue completes a read.
///
/// # Panics
/// When there is no completion.
pub fn completes_read(frontend: &mut HostileFrontend, index: usize) -> bool {
    let at = START + 0x1_8000;
    frontend.memory.write(at, &header(request_type::IN, 1));
    frontend.memory.write(at + 0x3000, &[0xee]);
    let segments = [readable(at, 16), writable(at + 0x1000, 512), writable(at + 0x3000, 1)];
    let queue = &mut frontend.queues[index];
    let head = write_direct(&queue.ring, &[0, 1, 2], &segments);
    queue.ring.offer(head);
    queue.publish_and_kick();
    queue.wait_completion() == (0, 513) && frontend.memory.read(at + 0x3000, 1) == [STATUS_OK]
}
