//! One client: reads a request, writes the response, and closes. Never blocks; each stage has a deadline.

use std::io::{ErrorKind, Read, Write};
use std::time::Instant;

use rustix::event::PollFlags;

use crate::limits::ServerLimits;
use crate::listener::{Peer, ScraperStream};
use crate::request::{self, Reply, Responder};

/// Bytes of one read.
const CHUNK: usize = 2048;

/// What is done for the client next.
#[derive(Debug)]
enum Stage {
    /// Its request is read; so far this.
    Reading(Vec<u8>),
    /// The response is written; so much has been.
    Writing(Reply, usize),
    /// The response is written. What the client still sends is dropped until it closes: a close with bytes that nobody has read would
    /// reset the connection, and with it a response that is still on its way.
    Lingering,
}

/// A client of the server.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: ScraperStream,
    stage: Stage,
    pub(crate) peer: Peer,
    /// When it connected, or last read or wrote something.
    pub(crate) idle_since: Instant,
    /// When the stage has to be done.
    pub(crate) deadline: Instant,
}

/// Whether a client is served further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// It is.
    Open,
    /// Its connection is closed.
    Done,
}

impl Connection {
    /// Returns a client that has just connected.
    pub(crate) fn new(stream: ScraperStream, now: Instant, limits: &ServerLimits) -> Connection {
        let stage = Stage::Reading(Vec::new());
        Connection { peer: stream.peer(), stream, stage, idle_since: now, deadline: now + limits.request }
    }

    /// Returns a client that gets this response, whatever it asks for.
    pub(crate) fn refuse(stream: ScraperStream, reply: Reply, now: Instant, limits: &ServerLimits) -> Connection {
        let (peer, stage) = (Peer::Unknown, Stage::Writing(reply, 0));
        Connection { stream, stage, peer, idle_since: now, deadline: now + limits.linger }
    }

    /// Returns the stream, and what it is waited for.
    pub(crate) fn waits_for(&self) -> (&ScraperStream, PollFlags) {
        let flags = if let Stage::Writing(..) = self.stage { PollFlags::OUT } else { PollFlags::IN };
        (&self.stream, flags)
    }

    /// Does what can be done without waiting. Called when its socket is ready.
    pub(crate) fn advance(&mut self, limits: &ServerLimits, metrics: &mut Responder<'_>) -> Progress {
        self.idle_since = Instant::now();
        loop {
            let step = match &mut self.stage {
                Stage::Reading(bytes) => read(&mut self.stream, bytes, limits, metrics),
                Stage::Writing(reply, written) => write(&mut self.stream, reply, written),
                Stage::Lingering => drain(&mut self.stream),
            };
            match step {
                StageResult::Waits => return Progress::Open,
                StageResult::Closed => return Progress::Done,
                StageResult::Next(stage) => {
                    // A sample may have taken time: the clock is read after it.
                    let limit = if let Stage::Lingering = stage { limits.linger } else { limits.response };
                    self.deadline = Instant::now() + limit;
                    self.stage = stage;
                }
            }
        }
    }
}

enum StageResult {
    Waits,
    Closed,
    Next(Stage),
}

/// Returns the result of a failed call.
fn failed(error: &std::io::Error) -> StageResult {
    // An interrupted call is made again when the poll returns, which is at once.
    let waits = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted);
    if waits { StageResult::Waits } else { StageResult::Closed }
}

fn read(
    stream: &mut ScraperStream,
    bytes: &mut Vec<u8>,
    limits: &ServerLimits,
    metrics: &mut Responder<'_>,
) -> StageResult {
    loop {
        let before = bytes.len();
        bytes.resize(before + CHUNK.min(limits.request_bytes + 1 - before), 0);
        let got = stream.read(&mut bytes[before..]);
        bytes.truncate(before + *got.as_ref().unwrap_or(&0));
        match got {
            Ok(0) => return StageResult::Closed,
            Ok(_) => {}
            Err(error) => return failed(&error),
        }
        if let Some(reply) = request::reply(bytes, metrics) {
            return StageResult::Next(Stage::Writing(reply, 0));
        }
        if bytes.len() > limits.request_bytes {
            return StageResult::Next(Stage::Writing(request::too_long(), 0));
        }
    }
}

fn write(stream: &mut ScraperStream, reply: &Reply, written: &mut usize) -> StageResult {
    let (head, body) = (reply.head.as_bytes(), reply.body.as_bytes());
    while *written < head.len() + body.len() {
        let rest = if *written < head.len() { &head[*written..] } else { &body[*written - head.len()..] };
        match stream.write(rest) {
            Ok(0) => return StageResult::Closed,
            Ok(count) => *written += count,
            Err(error) => return failed(&error),
        }
    }
    if stream.end_writing().is_err() { StageResult::Closed } else { StageResult::Next(Stage::Lingering) }
}

/// Drops what the client sends. One that never ends has only until the deadline, and one chunk for each poll.
fn drain(stream: &mut ScraperStream) -> StageResult {
    match stream.read(&mut [0; CHUNK]) {
        Ok(0) => StageResult::Closed,
        Ok(_) => StageResult::Waits,
        Err(error) => failed(&error),
    }
}
