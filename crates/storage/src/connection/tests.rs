use std::collections::VecDeque;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use mqblk_core::counters::ConnectionCounters;
use mqblk_core::{ByteLen, ByteOffset, Op};
use mqblk_test_bounds::Bound;
use mqblk_uring::{FixedBufferUse, UringOptions, Wait};

use super::remote_disk::TestServer;
use super::*;
use crate::conformance::{TestRequest, TestTarget, TestWorker, run};
use crate::observers::tests::Log;

fn long() -> Duration {
    Bound::seconds(20).time()
}
const DONE: Outcome = Outcome::Done(ByteLen::ZERO);

/// State shared by the test and the backend.
#[derive(Default)]
struct Server {
    /// Handle of the last connection.
    connection: Mutex<Option<ConnectionHandle>>,
    /// True if the next reap ends outstanding requests.
    answers: AtomicBool,
    /// Channels that are open.
    open: AtomicU32,
    /// Unused sessions.
    dropped: AtomicU32,
    refuses_channels: AtomicBool,
    /// True if requests of a lost connection are returned, false if they are ended.
    returns_unfinished: AtomicBool,
}

struct Session(Arc<Server>, bool);

impl Drop for Session {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(u32::from(!self.1), Ordering::SeqCst);
    }
}

/// Each attempt lasts until the test sets its result.
struct TestConnector {
    server: Arc<Server>,
    attempts: Mutex<Receiver<io::Result<()>>>,
}

impl Connector for TestConnector {
    type Session = Session;

    fn connect(&self) -> io::Result<Session> {
        let attempts = self.attempts.lock().unwrap();
        let ended = attempts.recv().unwrap_or_else(|_| Err(io::ErrorKind::NotFound.into()));
        ended.map(|()| Session(Arc::clone(&self.server), false))
    }

    fn open(
        self: Arc<Self>,
        mut session: Session,
        connection: ConnectionHandle,
        _: &mut UringContext,
    ) -> Result<Box<dyn SessionChannel>, DiskError> {
        if self.server.refuses_channels.load(Ordering::SeqCst) {
            return Err(DiskError::Os { what: "channel".to_owned(), source: io::ErrorKind::OutOfMemory.into() });
        }
        session.1 = true;
        *self.server.connection.lock().unwrap() = Some(connection);
        self.server.open.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(InnerChannel { server: Arc::clone(&self.server), outstanding: VecDeque::new() }))
    }
}

struct InnerChannel {
    server: Arc<Server>,
    outstanding: VecDeque<Request<Buffer>>,
}

impl SessionChannel for InnerChannel {
    fn take_unfinished(&mut self, requests: &mut Vec<Request<Buffer>>) {
        if self.server.returns_unfinished.load(Ordering::SeqCst) {
            requests.extend(self.outstanding.drain(..));
        }
    }
}

impl DiskChannel<UringContext> for InnerChannel {
    fn submit(
        &mut self,
        _: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let taken = batch.len();
        self.outstanding.extend(batch.drain(..));
        taken
    }

    fn reap(&mut self, _: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        if !self.server.answers.load(Ordering::SeqCst) {
            return 0;
        }
        let count = self.outstanding.len();
        let done = |request: Request<Buffer>| Completion { outcome: DONE, tag: request.tag, buffer: request.buffer };
        completions.extend(self.outstanding.drain(..).map(done));
        count
    }

    fn outstanding(&self) -> u32 {
        self.outstanding.len() as u32
    }

    fn close(&mut self, _: &mut UringContext) {
        assert!(self.outstanding.is_empty(), "a channel is drained before it is closed");
        self.server.open.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Fixture {
    context: UringContext,
    channel: ConnectingChannel<TestConnector>,
    server: Arc<Server>,
    attempts: Sender<io::Result<()>>,
    observers: Arc<Observers>,
    log: Arc<Log>,
    waiting: Vec<Request<Buffer>>,
    completions: Vec<Completion<Buffer>>,
}

fn fixture(while_disconnected: WhileDisconnected) -> Fixture {
    let mut context = UringContext::new(UringOptions { submissions: 4, in_flight: 8, files: 1, buffers: 1 }).unwrap();
    let (attempts, receiver) = channel();
    let server = Arc::new(Server::default());
    let connector = Arc::new(TestConnector { server: Arc::clone(&server), attempts: Mutex::new(receiver) });
    let short = Duration::from_millis(1);
    let options = ConnectionOptions { while_disconnected, first_pause: short, longest_pause: short };
    let (observers, log) = (Arc::new(Observers::default()), Arc::new(Log::default()));
    observers.set(log.clone());
    let channel = ConnectingChannel::new(connector, options, Arc::clone(&observers), &mut context).unwrap();
    Fixture { context, channel, server, attempts, observers, log, waiting: vec![], completions: vec![] }
}

impl Fixture {
    /// Adds requests to the waiting ones. Returns the number that the channel takes.
    fn submit(&mut self, count: u16) -> usize {
        self.waiting.extend((0..count).map(|at| Request {
            start: ByteOffset(0),
            len: ByteLen::ZERO,
            tag: Tag::new(0, at),
            buffer: None,
            op: Op::Flush,
        }));
        self.channel.submit(&mut self.context, &mut self.waiting, &mut self.completions)
    }

    /// Sleeps as a worker does, and reaps after completions, until `done`.
    fn run_until(&mut self, done: impl Fn(&mut Fixture) -> bool) {
        let end = Instant::now() + long();
        while !done(self) {
            assert!(Instant::now() < end, "nothing woke the worker");
            self.context.turn(Wait::AtMost(long()));
            self.channel.reap(&mut self.context, &mut self.completions);
            assert!(!self.context.has_unread(), "the channel reads all that it was brought");
        }
    }

    fn lose(&self) {
        self.server.connection.lock().unwrap().as_ref().unwrap().lost("reset by peer");
    }

    fn outcomes(&mut self) -> Vec<Outcome> {
        self.completions.drain(..).map(|completion| completion.outcome).collect()
    }

    /// Returns the numbers of open, made and lost connections, failed attempts, and repeated requests.
    fn counted(&self) -> [u64; 5] {
        let ConnectionCounters { connected, made, lost, failed_attempts, repeated, .. } =
            self.observers.stats().counters;
        [connected, made, lost, failed_attempts, repeated]
    }

    fn close(mut self) -> Fixture {
        self.channel.close(&mut self.context);
        assert_eq!((self.server.open.load(Ordering::SeqCst), self.channel.outstanding()), (0, 0));
        assert_eq!(self.context.busy(), 0);
        self
    }
}

fn refused() -> io::Result<()> {
    Err(io::ErrorKind::ConnectionRefused.into())
}

#[test]
fn requests_wait_for_the_first_connection_and_the_worker_is_woken() {
    for policy in [WhileDisconnected::Wait, WhileDisconnected::Fail] {
        let mut f = fixture(policy);
        assert_eq!((f.submit(3), f.channel.outstanding()), (0, 0));
        f.attempts.send(Ok(())).unwrap();
        f.run_until(|f| f.submit(0) == 3);
        f.server.answers.store(true, Ordering::SeqCst);
        f.channel.reap(&mut f.context, &mut f.completions);
        assert_eq!(f.outcomes(), [DONE; 3]);
        assert!(f.log.take().is_empty(), "nothing was lost");
        f.close();
    }
}

#[test]
fn after_a_failed_attempt_requests_wait_or_fail() {
    let mut f = fixture(WhileDisconnected::Wait);
    f.attempts.send(refused()).unwrap();
    f.run_until(|f| !f.log.take().is_empty());
    assert_eq!(f.submit(2), 0);
    f.attempts.send(refused()).unwrap();
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.submit(0) == 2);
    assert_eq!(f.log.take(), ["restored"]);
    f.server.answers.store(true, Ordering::SeqCst);
    f.channel.reap(&mut f.context, &mut f.completions);
    f.close();

    let mut f = fixture(WhileDisconnected::Fail);
    assert_eq!(f.submit(2), 0, "they wait for the first attempt");
    f.attempts.send(refused()).unwrap();
    f.run_until(|f| f.submit(0) == 2);
    assert_eq!((f.outcomes(), f.submit(1)), (vec![NOT_CONNECTED; 2], 1));
    assert_eq!(f.log.take(), ["lost: connection refused"]);
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.log.take() == ["restored"]);
    f.close();
}

#[test]
fn a_lost_connection_is_replaced_when_its_requests_have_ended() {
    let mut f = fixture(WhileDisconnected::Wait);
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.server.open.load(Ordering::SeqCst) == 1);
    assert_eq!(f.submit(2), 2);
    let from_another_thread = {
        let server = Arc::clone(&f.server);
        std::thread::spawn(move || server.connection.lock().unwrap().as_ref().unwrap().lost("reset by peer"))
    };
    f.run_until(|f| f.log.take() == ["lost: reset by peer"]);
    from_another_thread.join().unwrap();
    // The backend has not ended them yet.
    assert_eq!((f.submit(1), f.channel.outstanding(), f.server.open.load(Ordering::SeqCst)), (0, 2, 1));
    f.server.answers.store(true, Ordering::SeqCst);
    f.channel.reap(&mut f.context, &mut f.completions);
    assert_eq!((f.outcomes(), f.server.open.load(Ordering::SeqCst)), (vec![DONE; 2], 0));
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.submit(0) == 1);
    assert_eq!(f.log.take(), ["restored"]);
    assert_eq!((f.counted(), f.observers.stats().unreachable), ([1, 2, 1, 0, 0], None));
    // Lost again, without outstanding requests.
    f.channel.reap(&mut f.context, &mut f.completions);
    f.lose();
    f.run_until(|f| f.server.open.load(Ordering::SeqCst) == 0);
    assert_eq!(f.counted(), [0, 2, 2, 0, 0]);
    let stats = f.observers.stats();
    assert!(stats.unreachable.is_some() && stats.last_failure.as_deref() == Some("reset by peer"));
    f.close();
}

#[test]
fn unfinished_requests_are_the_first_of_the_next_connection() {
    let mut f = fixture(WhileDisconnected::Wait);
    f.server.returns_unfinished.store(true, Ordering::SeqCst);
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.submit(0) == 0 && f.server.open.load(Ordering::SeqCst) == 1);
    assert_eq!(f.submit(3), 3);
    f.lose();
    f.run_until(|f| f.server.open.load(Ordering::SeqCst) == 0);
    assert_eq!((f.submit(1), f.channel.outstanding()), (0, 3));
    let mut cancelled = vec![];
    f.channel.cancel(&mut f.context, &[Tag::new(0, 1), Tag::new(0, 7)], &mut cancelled);
    assert_eq!(
        cancelled.iter().map(|one| (one.tag, one.outcome)).collect::<Vec<_>>(),
        [(Tag::new(0, 1), Outcome::Aborted)]
    );
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.submit(0) == 1);
    assert_eq!(f.channel.outstanding(), 3);
    f.server.answers.store(true, Ordering::SeqCst);
    f.channel.reap(&mut f.context, &mut f.completions);
    let tags: Vec<Tag> = f.completions.iter().map(|completion| completion.tag).collect();
    assert_eq!(tags, [Tag::new(0, 0), Tag::new(0, 2), Tag::new(0, 0)], "the last was submitted last");
    assert_eq!(f.counted(), [1, 2, 1, 0, 3]);
    assert_eq!(f.close().counted(), [0, 2, 1, 0, 3], "a connection that is closed is not lost");
}

#[test]
fn requests_fail_after_their_time_and_until_there_is_a_connection() {
    let mut f = fixture(WhileDisconnected::FailAfter(Duration::from_millis(20)));
    f.server.returns_unfinished.store(true, Ordering::SeqCst);
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.server.open.load(Ordering::SeqCst) == 1);
    assert_eq!(f.submit(2), 2);
    f.lose();
    // A worker sleeps until the deadline at most.
    let end = Instant::now() + long();
    while f.completions.len() < 2 {
        assert!(Instant::now() < end, "they do not fail");
        let deadline = f.channel.deadline().map_or(long(), |at| at.saturating_duration_since(Instant::now()));
        f.context.turn(Wait::AtMost(deadline));
        f.channel.reap(&mut f.context, &mut f.completions);
    }
    assert_eq!((f.outcomes(), f.channel.outstanding()), (vec![NOT_CONNECTED; 2], 0));
    assert_eq!((f.submit(1), f.outcomes()), (1, vec![NOT_CONNECTED]), "there is none yet");
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.server.open.load(Ordering::SeqCst) == 1);
    assert_eq!((f.submit(1), f.channel.outstanding()), (1, 1));
    f.server.answers.store(true, Ordering::SeqCst);
    f.channel.reap(&mut f.context, &mut f.completions);
    assert_eq!(f.outcomes(), [DONE]);
    f.close();
}

#[test]
fn a_session_that_makes_no_channel_is_a_failed_attempt() {
    let mut f = fixture(WhileDisconnected::Fail);
    f.server.refuses_channels.store(true, Ordering::SeqCst);
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.submit(0) == 0 && f.log.take() == ["lost: channel: out of memory"]);
    assert_eq!(f.submit(1), 1);
    assert_eq!(f.outcomes(), [NOT_CONNECTED]);
    f.server.refuses_channels.store(false, Ordering::SeqCst);
    f.attempts.send(Ok(())).unwrap();
    f.run_until(|f| f.server.open.load(Ordering::SeqCst) == 1);
    assert_eq!(f.counted(), [1, 1, 0, 1, 0]);
    f.close();
}

#[test]
fn a_channel_that_is_closed_while_it_connects_waits_for_nothing() {
    let f = fixture(WhileDisconnected::Wait);
    let mut f = f.close();
    let next = f.context.add_client();
    f.attempts.send(Ok(())).unwrap();
    let end = Instant::now() + long();
    while f.server.dropped.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < end, "the session that nobody wants is dropped");
        std::thread::yield_now();
    }
    f.context.turn(Wait::No);
    assert!(!f.context.has_completions(next) && !f.context.has_unread(), "the next client is not woken");
}

/// Header and data in one operation each way, on the worker's ring, straight from and to guest memory.
#[test]
fn a_disk_behind_a_socket_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("server.sock");
    let server = TestServer::start(&path, 4 << 20, 0);
    let settings = [("path", path.to_str().unwrap()), ("size", "4M")];
    run(&TestTarget { kind: "remote", settings: &settings, keeps_data: true, seed: 11 });
    assert!(server.connections.load(Ordering::Relaxed) >= 10);
}

/// A server that ends connections: requests succeed or fail, successful ones have had their effect, and the next ones
/// find a new connection.
#[test]
fn a_disk_whose_server_ends_connections() {
    const BLOCKS: u64 = 16;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("server.sock");
    let server = TestServer::start(&path, 4 << 20, 21);
    let settings = [("path", path.to_str().unwrap()), ("size", "4M")];
    let trial = TestTarget { kind: "remote", settings: &settings, keeps_data: true, seed: 0 };
    let disk = trial.open(&[]).unwrap();
    let log = Arc::new(Log::default());
    disk.observe(log.clone());
    let mut worker = TestWorker::new(disk.as_ref(), 16, FixedBufferUse::Off);
    let (len, done, lost) = (64 << 10, Outcome::Done(ByteLen(64 << 10)), Outcome::Failed(Errno(5)));
    // The possible content of each block before each round.
    let mut may_hold = vec![vec![0_u8]; BLOCKS as usize];
    let (mut succeeded, mut failed) = (0, 0);
    for round in 1..40_u8 {
        let at = |block: u64| TestRequest::with_data(Op::Write { fua: false }, block * len, len, block * len);
        (0..BLOCKS).for_each(|block| worker.write_memory(block * len, &vec![round; len as usize]));
        let writes: Vec<_> = (0..BLOCKS).map(at).collect();
        for (result, may_hold) in worker.run(&writes).iter().zip(&mut may_hold) {
            if result.outcome == done {
                may_hold.clear();
            }
            may_hold.push(round);
        }
        let reads: Vec<_> = writes.into_iter().map(|write| TestRequest { op: Op::Read, ..write }).collect();
        for (block, result) in (0..).zip(worker.run(&reads)) {
            if result.outcome == done {
                succeeded += 1;
                let found = worker.read_memory(block * len, len as usize);
                let may_hold = &may_hold[block as usize];
                assert!(found.iter().all(|byte| may_hold.contains(byte)), "{} of {may_hold:?}", found[0]);
            } else {
                assert_eq!(result.outcome, lost);
                failed += 1;
            }
        }
    }
    assert!(succeeded > 100 && failed > 20, "{succeeded} reads succeeded, {failed} failed");
    assert!(server.connections.load(Ordering::Relaxed) > 20);
    let log = log.take();
    assert!(log.chunks(2).all(|pair| pair[0].starts_with("lost: ") && pair[1..].iter().all(|next| next == "restored")));
    worker.close();
}
