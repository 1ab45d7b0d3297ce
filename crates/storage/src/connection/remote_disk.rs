//! A disk behind a socket, for tests: the smallest backend that connects, and that sends and receives on the worker's
//! ring. Its server is a thread with a RAM disk, which can end connections on command.
//!
//! A request is 32 bytes: op, fua or may_unmap, 6 bytes of nothing, cookie, start, length; the data of a write follows.
//! A reply is 16 bytes: errno, 4 bytes of nothing, cookie; the data of a read follows.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::settings::Settings;
use mqblk_core::{
    BlockSize, ByteLen, Completion, Disk, DiskChannel, DiskError, DiskObserver, Errno, Geometry, ImageOpener, Limits,
    Op, Outcome, Request,
};
use mqblk_memory::{BouncePool, Buffer};
use mqblk_uring::{ClientId, IoCompletion, Message, RefusedMessage, RingFile, UringContext};

use super::{ConnectingChannel, ConnectionHandle, ConnectionOptions, Connector, SessionChannel};
use crate::admission::{self, DiskSize};
use crate::observers::Observers;

const REQUEST: usize = 32;
const REPLY: usize = 16;
const MAX_INFLIGHT: usize = 64;
/// EIO: the outcome of requests whose connection is lost.
const LOST: Outcome = Outcome::Failed(Errno(5));
/// Cookies of the two operations that a channel has in flight.
const SEND: u64 = 0;
const RECEIVE: u64 = 1;

/// Opens `path`, a socket; `size` is the server's.
pub(crate) fn open(
    settings: &mut Settings,
    _: &Arc<dyn ImageOpener>,
) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let path = settings.text(&crate::keys::PATH).expect("a test gives it");
    let size = admission::size(settings, BlockSize::B512)?;
    let read_only = settings.switch_or_default(&crate::keys::READONLY)?;
    let geometry = admission::plain_geometry(size, BlockSize::B512, read_only);
    let server = Arc::new(RemoteServer { path: path.into(), geometry, size: Arc::new(DiskSize::new(size)) });
    Ok(Arc::new(RemoteDisk { server, observers: Arc::default() }))
}

struct RemoteDisk {
    server: Arc<RemoteServer>,
    observers: Arc<Observers>,
}

/// Address of the server.
struct RemoteServer {
    path: PathBuf,
    geometry: Geometry,
    size: Arc<DiskSize>,
}

impl Disk<UringContext> for RemoteDisk {
    fn geometry(&self) -> Geometry {
        self.server.geometry
    }

    fn limits(&self) -> Limits {
        let writable = !self.server.geometry.read_only;
        Limits {
            max_transfer: admission::MAX_TRANSFER,
            max_segments: u32::from(u16::MAX),
            discard: None,
            write_zeroes: writable.then_some(self.server.geometry.size),
            volatile_cache: true,
            cost_per_request: true,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![
            ("path", self.server.path.display().to_string()),
            ("size", self.server.geometry.size.to_string()),
            ("readonly", admission::on_off(self.server.geometry.read_only)),
        ]
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        match size {
            None => Ok(self.server.geometry.size),
            Some(size) => {
                admission::check_resize(&self.server.geometry, size)?;
                Err(DiskError::Size { found: size.to_string(), expected: "no change".to_owned() })
            }
        }
    }

    fn observe(&self, observer: Arc<dyn DiskObserver>) {
        self.observers.set(observer);
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let (server, observers) = (Arc::clone(&self.server), Arc::clone(&self.observers));
        Ok(Box::new(ConnectingChannel::new(server, ConnectionOptions::default(), observers, context)?))
    }
}

impl Connector for RemoteServer {
    type Session = UnixStream;

    fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(&self.path)
    }

    fn open(
        self: Arc<Self>,
        session: UnixStream,
        connection: ConnectionHandle,
        context: &mut UringContext,
    ) -> Result<Box<dyn SessionChannel>, DiskError> {
        let os = |source| DiskError::Os { what: "memory for headers".to_owned(), source };
        // One header is sent and one received at a time.
        let mut headers = BouncePool::new(&mut context.buffers, 2, ByteLen(REQUEST as u64)).map_err(os)?;
        let mut channel = RemoteChannel {
            geometry: Geometry { size: self.size.get(), ..self.geometry },
            connection,
            client: context.add_client(),
            socket: Some(context.register_file(Arc::new(session.into()))),
            send_header: headers.take(&mut context.buffers, ByteLen(REQUEST as u64)).map(|(buffer, _)| buffer),
            headers: Some(headers),
            requests: (0..MAX_INFLIGHT).map(|_| None).collect(),
            to_send: VecDeque::with_capacity(MAX_INFLIGHT),
            sent: 0,
            receiving: Receiving::Header,
            received: 0,
            lost: false,
        };
        let header = channel.headers.as_mut().and_then(|pool| pool.take(&mut context.buffers, ByteLen(REPLY as u64)));
        channel.receive(context, header.map(|(buffer, _)| buffer), None);
        Ok(Box::new(channel))
    }
}

/// Content of the bytes being received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Receiving {
    Header,
    /// The data of the request with this index.
    Data(usize),
}

struct Pending {
    request: Request<Buffer>,
    outcome: Option<Outcome>,
}

struct RemoteChannel {
    geometry: Geometry,
    connection: ConnectionHandle,
    client: ClientId,
    /// `None` once it is closed.
    socket: Option<RingFile>,
    headers: Option<BouncePool>,
    /// `None` while it is being sent.
    send_header: Option<Buffer>,
    /// By the cookie sent to the server.
    requests: Vec<Option<Pending>>,
    /// Requests to send; the first is being sent.
    to_send: VecDeque<usize>,
    /// Sent bytes of the first one.
    sent: u64,
    receiving: Receiving,
    /// Received bytes of the current part.
    received: u64,
    lost: bool,
}

impl RemoteChannel {
    fn header(&self, index: usize, request: &Request<Buffer>) -> [u8; REQUEST] {
        let (op, flag) = match request.op {
            Op::Read => (0, false),
            Op::Write { fua } => (1, fua),
            Op::Flush => (2, false),
            Op::Discard { .. } => (3, false),
            Op::WriteZeroes { may_unmap, .. } => (4, may_unmap),
        };
        let mut header = [0; REQUEST];
        (header[0], header[1]) = (op, u8::from(flag));
        header[8..16].copy_from_slice(&(index as u64).to_be_bytes());
        header[16..24].copy_from_slice(&request.start.0.to_be_bytes());
        header[24..].copy_from_slice(&request.len.0.to_be_bytes());
        header
    }

    /// Sends the first waiting request, or continues with it.
    fn send(&mut self, context: &mut UringContext) {
        let Some(index) = self.to_send.front().copied() else { return };
        let (Some(socket), Some(header)) = (&self.socket, self.send_header.take()) else { return };
        let header_bytes = self.requests[index].as_ref().map(|pending| self.header(index, &pending.request));
        let Some(pending) = &mut self.requests[index] else { return };
        assert!(context.buffers.copy_in(&header, 0, &header_bytes.unwrap_or_default()));
        let payload = if pending.request.op == Op::Read { None } else { pending.request.buffer.take() };
        let message = Message { header: Some(header), payload, skip: self.sent, ..Message::default() };
        if let Err(RefusedMessage(message)) = context.send(self.client, SEND, socket, message) {
            // Other channels fill the context: the next turn tries again.
            self.send_header = message.header;
            pending.request.buffer = pending.request.buffer.take().or(message.payload);
        }
    }

    fn has_sent(&mut self, context: &mut UringContext, done: IoCompletion) {
        self.send_header = done.header;
        let Some(index) = self.to_send.front().copied() else { return };
        let Some(pending) = &mut self.requests[index] else { return };
        pending.request.buffer = pending.request.buffer.take().or(done.buffer);
        let Ok(sent) = u64::try_from(done.result) else { return self.lose(context, "send") };
        self.sent += sent;
        let data = if matches!(pending.request.op, Op::Write { .. }) { pending.request.len.0 } else { 0 };
        if self.sent == REQUEST as u64 + data {
            (self.sent, _) = (0, self.to_send.pop_front());
        }
        if !self.lost {
            self.send(context);
        }
    }

    fn receive(&mut self, context: &mut UringContext, header: Option<Buffer>, payload: Option<Buffer>) {
        let message = match self.receiving {
            Receiving::Header => Message { header, skip: self.received, ..Message::default() },
            Receiving::Data(_) => Message {
                header,
                payload,
                order: mqblk_uring::MessageOrder::PayloadFirst,
                skip: self.received,
                ..Message::default()
            },
        };
        let Some(socket) = &self.socket else { return };
        if let Err(RefusedMessage(message)) = context.receive(self.client, RECEIVE, socket, message) {
            if let Receiving::Data(index) = self.receiving
                && let Some(pending) = &mut self.requests[index]
            {
                pending.request.buffer = message.payload;
            }
            if let Some(header) = message.header {
                context.buffers.release(header);
            }
            self.lose(context, "no room to receive");
        }
    }

    fn has_received(&mut self, context: &mut UringContext, done: IoCompletion) {
        if let Receiving::Data(index) = self.receiving
            && let Some(pending) = &mut self.requests[index]
        {
            pending.request.buffer = done.buffer;
        }
        if done.result <= 0 || self.lost {
            if let Some(header) = done.header {
                context.buffers.release(header);
            }
            return self.lose(context, "the server has ended the connection");
        }
        self.received += done.result as u64;
        let Some(header) = done.header else { return };
        // The data first, then the header of the next reply, which may be partial.
        if let Receiving::Data(index) = self.receiving {
            let len = self.requests[index].as_ref().map_or(0, |pending| pending.request.len.0);
            if self.received < len {
                let payload = self.requests[index].as_mut().and_then(|pending| pending.request.buffer.take());
                return self.receive(context, Some(header), payload);
            }
            self.received -= len;
            self.receiving = Receiving::Header;
            self.end(index, Outcome::Done(ByteLen(len)));
        }
        if self.received < REPLY as u64 {
            return self.receive(context, Some(header), None);
        }
        self.received = 0;
        let mut reply = [0; REPLY];
        assert!(context.buffers.copy_out(&header, 0, &mut reply));
        let errno = i32::from_be_bytes([reply[0], reply[1], reply[2], reply[3]]);
        let index = u64::from_be_bytes(reply[8..].try_into().unwrap_or_default()) as usize;
        let Some(Some(pending)) = self.requests.get_mut(index) else {
            context.buffers.release(header);
            return self.lose(context, "an unknown reply");
        };
        let mut payload = None;
        if errno != 0 {
            self.end(index, Outcome::from_errno(errno));
        } else if pending.request.op == Op::Read {
            self.receiving = Receiving::Data(index);
            payload = pending.request.buffer.take();
        } else {
            let done = if pending.request.op.has_data() { pending.request.len } else { ByteLen::ZERO };
            self.end(index, Outcome::Done(done));
        }
        self.receive(context, Some(header), payload);
    }

    fn end(&mut self, index: usize, outcome: Outcome) {
        if let Some(pending) = &mut self.requests[index] {
            pending.outcome.get_or_insert(outcome);
        }
    }

    /// Ends all requests when their buffers are back, and the connection with them.
    fn lose(&mut self, context: &mut UringContext, why: &str) {
        self.lost = true;
        self.connection.lost(why);
        context.cancel_picked(self.client, |_| true);
        for index in 0..self.requests.len() {
            self.end(index, LOST);
        }
    }
}

/// A server may have executed requests that it has not answered: they end with an error.
impl SessionChannel for RemoteChannel {}

impl DiskChannel<UringContext> for RemoteChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let offered = batch.len();
        while !batch.is_empty() && !self.lost {
            let Some(index) = self.requests.iter().position(Option::is_none) else { break };
            let request = batch.remove(0);
            let is_short = |buffer: &Buffer| request.op.has_data() && context.buffers.len(buffer) != request.len;
            let odd = request.buffer.as_ref().is_some_and(is_short).then_some(admission::INVALID);
            let unsupported = matches!(request.op, Op::Discard { .. }).then_some(Outcome::Unsupported);
            let refused = admission::check_request(&self.geometry, &request).or(odd).or(unsupported);
            if let Some(outcome) = refused {
                completions.push(Completion { outcome, tag: request.tag, buffer: request.buffer });
                continue;
            }
            self.requests[index] = Some(Pending { request, outcome: None });
            self.to_send.push_back(index);
        }
        self.send(context);
        offered - batch.len()
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        while let Some(done) = context.next(self.client) {
            match done.cookie {
                SEND => self.has_sent(context, done),
                _ => self.has_received(context, done),
            }
        }
        if !self.lost {
            self.send(context);
        }
        let before = completions.len();
        for place in &mut self.requests {
            // A write whose connection was lost in mid-send has its buffer in the ring.
            let is_back = |pending: &mut Pending| {
                pending.outcome.is_some() && (pending.request.buffer.is_some() || !pending.request.op.has_data())
            };
            if let Some(Pending { request, outcome: Some(outcome) }) = place.take_if(is_back) {
                completions.push(Completion { outcome, tag: request.tag, buffer: request.buffer });
            }
        }
        completions.len() - before
    }

    fn outstanding(&self) -> u32 {
        self.requests.iter().flatten().count() as u32
    }

    fn close(&mut self, context: &mut UringContext) {
        // Including the receive that waits for the server.
        context.remove_client(self.client);
        if let Some(socket) = self.socket.take() {
            context.unregister_file(socket);
        }
        if let Some(header) = self.send_header.take() {
            context.buffers.release(header);
        }
        if let Some(headers) = self.headers.take() {
            headers.close(&mut context.buffers);
        }
    }
}

/// The server of a RAM disk.
pub(crate) struct TestServer {
    /// Ends a connection after this many requests; 0: never.
    pub(crate) lose_after: AtomicU64,
    pub(crate) connections: AtomicU64,
    disk: Mutex<Vec<u8>>,
}

impl TestServer {
    pub(crate) fn start(path: &Path, size: usize, lose_after: u64) -> Arc<TestServer> {
        let listener = UnixListener::bind(path).unwrap();
        let (connections, disk) = (AtomicU64::new(0), Mutex::new(vec![0; size]));
        let server = Arc::new(TestServer { lose_after: AtomicU64::new(lose_after), connections, disk });
        let of_thread = Arc::clone(&server);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let server = Arc::clone(&of_thread);
                server.connections.fetch_add(1, Ordering::Relaxed);
                std::thread::spawn(move || server.serve(connection.unwrap()));
            }
        });
        server
    }

    /// Serves until the client or the limit ends the connection.
    fn serve(&self, mut stream: UnixStream) -> Option<()> {
        let mut data = Vec::new();
        for number in 1.. {
            let mut header = [0; REQUEST];
            stream.read_exact(&mut header).ok()?;
            let field = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap_or_default()) as usize;
            let range = field(16)..field(16) + field(24);
            if header[0] == 1 {
                data.resize(range.len(), 0);
                stream.read_exact(&mut data).ok()?;
            }
            let limit = self.lose_after.load(Ordering::Relaxed);
            if limit > 0 && number > limit {
                return None;
            }
            let mut reply = [0; REPLY];
            reply[8..].copy_from_slice(&header[8..16]);
            let mut disk = self.disk.lock().unwrap();
            match header[0] {
                0 => {
                    let found = disk[range].to_vec();
                    drop(disk);
                    stream.write_all(&reply).ok()?;
                    // In parts, so that the client receives parts.
                    for part in found.chunks(50_000) {
                        stream.write_all(part).ok()?;
                    }
                    continue;
                }
                1 => disk[range].copy_from_slice(&data),
                4 => disk[range].fill(0),
                _ => {}
            }
            drop(disk);
            stream.write_all(&reply).ok()?;
        }
        None
    }
}
