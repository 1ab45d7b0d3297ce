use mqblk_core::ByteLen;
use mqblk_test_bounds::Bound;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_memory::{BouncePool, GuestAddress, GuestMemory, LeaseId, PooledContext as _, Region};

use super::*;
use crate::{FixedBufferUse, IoCompletion, UringOptions, Wait};

fn long() -> Duration {
    Bound::seconds(20).time()
}
const MEMORY: u64 = 8 << 20;
const HEADER: u64 = 28;

/// The other end of a socket.
trait Peer: Read + Write + Send {}

impl Peer for UnixStream {}
impl Peer for TcpStream {}

fn unix() -> (OwnedFd, Box<dyn Peer>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(long())).unwrap();
    (ours.into(), Box::new(theirs))
}

fn tcp() -> (OwnedFd, Box<dyn Peer>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    theirs.set_nodelay(true).unwrap();
    theirs.set_read_timeout(Some(long())).unwrap();
    (ours.into(), Box::new(theirs))
}

type MakePair = fn() -> (OwnedFd, Box<dyn Peer>);

const SOCKETS: [MakePair; 2] = [unix, tcp];

struct Fixture {
    context: UringContext,
    client: ClientId,
    memory: Arc<GuestMemory>,
    lease: LeaseId,
    headers: BouncePool,
    socket: RingFile,
}

/// With registered files, or without room for them.
fn fixture(socket: OwnedFd, files: u32) -> Fixture {
    let mut context = UringContext::new(UringOptions { submissions: 4, in_flight: 8, files, buffers: 1 }).unwrap();
    let client = context.add_client();
    let region = Region::shared("t", MEMORY, GuestAddress(0)).unwrap().0;
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
    let lease = context.adopt(Arc::clone(&memory), FixedBufferUse::Off).unwrap();
    let headers = BouncePool::new(&mut context.buffers, 4, ByteLen(64)).unwrap();
    let socket = context.register_file(Arc::new(socket));
    Fixture { context, client, memory, lease, headers, socket }
}

impl Fixture {
    fn payload(&mut self, pieces: &[(u64, u32)]) -> Option<Buffer> {
        let buffer = self.context.buffers.take(self.lease);
        for (at, len) in pieces {
            self.context.buffers.push(&buffer, GuestAddress(*at), *len, 2000).unwrap();
        }
        Some(buffer)
    }

    fn header(&mut self, bytes: &[u8]) -> Option<Buffer> {
        let (buffer, _) = self.headers.take(&mut self.context.buffers, ByteLen(HEADER)).unwrap();
        assert!(self.context.buffers.copy_in(&buffer, 0, bytes));
        Some(buffer)
    }

    fn next(&mut self) -> IoCompletion {
        let end = Instant::now() + long();
        loop {
            if let Some(done) = self.context.next(self.client) {
                return done;
            }
            assert!(Instant::now() < end, "no completion");
            self.context.turn(Wait::AtMost(long()));
        }
    }

    fn bytes(&self, buffer: &Option<Buffer>) -> Vec<u8> {
        let buffer = buffer.as_ref().expect("the buffer comes back");
        let mut bytes = vec![0; self.context.buffers.len(buffer).0 as usize];
        assert!(self.context.buffers.copy_out(buffer, 0, &mut bytes));
        bytes
    }

    fn release(&mut self, done: IoCompletion) {
        [done.buffer, done.header].into_iter().flatten().for_each(|buffer| self.context.buffers.release(buffer));
        assert_eq!(self.context.busy(), 0);
    }
}

/// Bytes with a different value at each position.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at + seed) * 31 % 251) as u8).collect()
}

#[test]
fn a_header_and_the_guests_data_are_one_operation() {
    for pair in SOCKETS {
        for files in [4, 0] {
            let (ours, mut theirs) = pair();
            let mut f = fixture(ours, files);
            f.memory.write(GuestAddress(0x1000), &pattern(5000, 1)).unwrap();
            f.memory.write(GuestAddress(0x9000), &pattern(100, 2)).unwrap();
            let (header, payload) = (f.header(&pattern(28, 3)), f.payload(&[(0x1000, 5000), (0x9000, 100)]));
            let whole = Message { header, payload, whole: true, ..Message::default() };
            f.context.send(f.client, 1, &f.socket, whole).unwrap();
            let done = f.next();
            assert_eq!((done.cookie, done.result, done.more), (1, 5128, false));
            let mut found = vec![0; 5128];
            theirs.read_exact(&mut found).unwrap();
            assert!(found == [pattern(28, 3), pattern(5000, 1), pattern(100, 2)].concat());
            f.release(done);

            // And back, in pieces that do not match.
            let (header, payload) = (f.header(&[]), f.payload(&[(0x20000, 100), (0x30000, 5000)]));
            let space = Message { header, payload, whole: true, ..Message::default() };
            f.context.receive(f.client, 2, &f.socket, space).unwrap();
            f.context.turn(Wait::No);
            for part in found.chunks(777) {
                theirs.write_all(part).unwrap();
                std::thread::yield_now();
            }
            let done = f.next();
            assert_eq!((done.cookie, done.result), (2, 5128));
            assert!(f.bytes(&done.header) == found[..28] && f.bytes(&done.buffer) == found[28..]);
            let mut guest = vec![0; 5000];
            f.memory.read(GuestAddress(0x30000), &mut guest).unwrap();
            assert!(guest == found[128..], "received straight into guest memory");
            f.release(done);
        }
    }
}

/// A peer that sends a few bytes at a time: each completion is short, and the next operation continues.
#[test]
fn short_receives_are_continued() {
    for pair in SOCKETS {
        let (ours, mut theirs) = pair();
        let mut f = fixture(ours, 4);
        let sent = pattern(28 + 3000, 9);
        let (mut header, mut payload) = (f.header(&[]), f.payload(&[(0x1000, 1000), (0x4000, 2000)]));
        let (mut received, mut written, mut operations) = (0, 0, 0);
        while received < sent.len() {
            let message = Message { header, payload, skip: received as u64, ..Message::default() };
            f.context.receive(f.client, 7, &f.socket, message).unwrap();
            f.context.turn(Wait::No);
            if written == received {
                written = sent.len().min(received + 333);
                theirs.write_all(&sent[received..written]).unwrap();
            }
            let done = f.next();
            assert!(done.result > 0 && received + done.result as usize <= written, "{done:?}");
            (header, payload) = (done.header, done.buffer);
            received += done.result as usize;
            operations += 1;
        }
        assert!(operations >= 10, "{operations} operations");
        assert!(f.bytes(&header) == sent[..28] && f.bytes(&payload) == sent[28..]);
    }
}

/// More than the socket's buffers hold, to a peer that reads late.
#[test]
fn short_sends_are_continued() {
    for pair in SOCKETS {
        for whole in [false, true] {
            let (ours, mut theirs) = pair();
            rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
            let mut f = fixture(ours, 4);
            let data = pattern(MEMORY as usize, 5);
            f.memory.write(GuestAddress(0), &data).unwrap();
            let reader = std::thread::spawn(move || {
                let mut found = vec![0; 28 + MEMORY as usize];
                theirs.read_exact(&mut found).unwrap();
                found
            });
            let (mut header, mut payload) = (f.header(&pattern(28, 6)), f.payload(&[(0, MEMORY as u32)]));
            let (mut sent, mut operations) = (0, 0);
            while sent < 28 + MEMORY {
                let message = Message { header, payload, skip: sent, whole, ..Message::default() };
                f.context.send(f.client, 3, &f.socket, message).unwrap();
                let done = f.next();
                assert!(done.result > 0, "{done:?}");
                (header, payload, sent) = (done.header, done.buffer, sent + done.result as u64);
                operations += 1;
            }
            assert!(if whole { operations == 1 } else { operations > 1 }, "{operations} operations, whole: {whole}");
            let found = reader.join().unwrap();
            assert!(found[..28] == pattern(28, 6) && found[28..] == data);
        }
    }
}

#[test]
fn a_reply_is_received_with_the_header_of_the_next() {
    let (ours, mut theirs) = unix();
    let mut f = fixture(ours, 4);
    theirs.write_all(&[pattern(512, 1), pattern(28, 2)].concat()).unwrap();
    let (header, payload) = (f.header(&[]), f.payload(&[(0x5000, 512)]));
    let message = Message { header, payload, order: MessageOrder::PayloadFirst, ..Message::default() };
    f.context.receive(f.client, 1, &f.socket, message).unwrap();
    let done = f.next();
    assert_eq!(done.result, 540);
    assert!(f.bytes(&done.header) == pattern(28, 2) && f.bytes(&done.buffer) == pattern(512, 1));
    f.release(done);
}

#[test]
fn a_connection_that_ends_is_a_result() {
    for pair in SOCKETS {
        let (ours, theirs) = pair();
        let mut f = fixture(ours, 4);
        drop(theirs);
        let (header, payload) = (f.header(&[]), f.payload(&[(0, 512)]));
        f.context
            .receive(f.client, 1, &f.socket, Message { header, payload, whole: true, ..Message::default() })
            .unwrap();
        let done = f.next();
        assert_eq!(done.result, 0);
        f.release(done);
        // TCP reports the closed connection to the second send.
        let mut result = 0;
        for _ in 0..2 {
            let payload = f.payload(&[(0, 512)]);
            f.context.send(f.client, 2, &f.socket, Message { payload, ..Message::default() }).unwrap();
            let done = f.next();
            result = done.result;
            f.release(done);
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!([-libc::EPIPE, -libc::ECONNRESET].contains(&result), "{result}");
    }
}

#[test]
fn a_receive_is_cancelled_and_a_full_table_refuses() {
    let (ours, theirs) = unix();
    let mut f = fixture(ours, 4);
    for cookie in 0..8 {
        let (header, payload) = (if cookie < 2 { f.header(&[]) } else { None }, f.payload(&[(0, 512)]));
        f.context.receive(f.client, cookie, &f.socket, Message { header, payload, ..Message::default() }).unwrap();
    }
    let (header, payload) = (f.header(&[1]), f.payload(&[(0, 512)]));
    let message = Message { header, payload, ..Message::default() };
    let Err(RefusedMessage(message)) = f.context.send(f.client, 9, &f.socket, message) else { panic!("accepted") };
    [message.header, message.payload].into_iter().flatten().for_each(|buffer| f.context.buffers.release(buffer));
    f.context.turn(Wait::No);
    f.context.cancel_picked(f.client, |_| true);
    for _ in 0..8 {
        let done = f.next();
        assert_eq!((done.result, done.header.is_some()), (-libc::ECANCELED, done.cookie < 2));
        [done.buffer, done.header].into_iter().flatten().for_each(|buffer| f.context.buffers.release(buffer));
    }
    assert_eq!((f.context.busy(), f.context.buffers.buffers_in_use(f.lease)), (0, 0));
    drop(theirs);
}

/// Memory stays mapped while the kernel may receive into it, also when its table was replaced or the worker ends.
#[test]
fn memory_is_mapped_while_a_receive_is_in_flight() {
    let (ours, theirs) = unix();
    let mut f = fixture(ours, 4);
    let (header, payload) = (f.header(&[]), f.payload(&[(0, 512)]));
    f.context.receive(f.client, 1, &f.socket, Message { header, payload, ..Message::default() }).unwrap();
    f.context.turn(Wait::No);
    f.context.retire(f.lease);
    let weak = Arc::downgrade(&f.memory);
    let Fixture { context, memory, headers, .. } = f;
    drop(memory);
    assert!(weak.upgrade().is_some(), "unmapped with an operation in flight");
    // The context ends the operation.
    drop(context);
    assert!(weak.upgrade().is_none());
    drop((headers, theirs));
}
