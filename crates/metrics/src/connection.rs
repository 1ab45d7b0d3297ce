//! One client: reads a request, writes the response, and closes. Never blocks; each stage has a deadline.

use std::io::{ErrorKind, Read, Write};
use std::time::Instant;

use rustix::event::PollFlags;

use crate::limits::ServerLimits;
use crate::listener::{Peer, ScraperStream};
use crate::request::{self, Reply, Responder};

/// Bytes of one read.
const CHUNK: usize = 2048;

/// The stage of a client.
#[derive(Debug)]
enum Stage {
    /// Reading its request; the bytes so far.
    Reading(Vec<u8>),
    /// Writing the response; the bytes written so far.
    Writing(Reply, usize),
    /// Response written. Further input of the client is dropped until it closes: closing with unread bytes would reset
    /// the connection, and with it a response that is still under way.
    Lingering,
}

/// A client of the server.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: ScraperStream,
    stage: Stage,
    pub(crate) peer: Peer,
    /// Time of its connection, or of its last read or write.
    pub(crate) idle_since: Instant,
    /// Deadline of the stage.
    pub(crate) deadline: Instant,
}

/// State of a client after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Its connection is open.
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

    /// Returns a client that gets this response to any request.
    pub(crate) fn refuse(stream: ScraperStream, reply: Reply, now: Instant, limits: &ServerLimits) -> Connection {
        let (peer, stage) = (Peer::Unknown, Stage::Writing(reply, 0));
        Connection { stream, stage, peer, idle_since: now, deadline: now + limits.linger }
    }

    /// Returns the stream, and the events to wait for.
    pub(crate) fn waits_for(&self) -> (&ScraperStream, PollFlags) {
        let flags = if let Stage::Writing(..) = self.stage { PollFlags::OUT } else { PollFlags::IN };
        (&self.stream, flags)
    }

    /// Advances without waiting. Called when its socket is ready.
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
    // An interrupted call is repeated after the poll, which returns at once.
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

/// Drops the client's input. An endless client is limited by the deadline, and to one chunk for each poll.
fn drain(stream: &mut ScraperStream) -> StageResult {
    match stream.read(&mut [0; CHUNK]) {
        Ok(0) => StageResult::Closed,
        Ok(_) => StageResult::Waits,
        Err(error) => failed(&error),
    }
}
