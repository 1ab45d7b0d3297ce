//! The client's end.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Map, Value, json};

use crate::lines::{Line, Lines, Timeouts};
use crate::model::Stat;
use crate::protocol::ErrorObject;

/// Longest answer that is taken: far above what 256 queues of a few disks with all their histograms need.
const ANSWER_BYTES: usize = 256 << 20;
/// How long an answer is waited for, if nothing else was asked for.
const DEFAULT_TIMEOUTS: Duration = Duration::from_secs(10);
/// Pause between attempts to connect to a server that has not accepted those before.
const BUSY: Duration = Duration::from_millis(10);

/// Why a call gave no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers at that path.
    #[error("found {path:?}: {source}, expected the admin socket of a daemon (is it running, with --admin?)")]
    Connect {
        /// The path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The server went away.
    #[error(
        "found a connection that closed without an answer, expected one that lasts: is it the path of --admin, not of a disk?"
    )]
    Closed,
    /// The connection broke.
    #[error("the connection to the daemon: {0}")]
    Io(#[from] io::Error),
    /// No answer in time.
    #[error("found no answer in {} seconds, expected one: is the daemon stuck, or is it a disk's socket?", .0.as_secs_f64())]
    Late(Duration),
    /// The server said no.
    #[error("the daemon answered: {0}")]
    Refused(#[source] ErrorObject),
    /// What came is no answer to what was asked.
    #[error("found {0}, expected an answer of mqblk's admin socket: is this another program's socket?")]
    Strange(String),
}

/// What to ask `stat` for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatQuery {
    /// Every queue too, not only each disk's sums.
    pub queues: bool,
    /// The buckets of the latencies' distributions too.
    pub latency: bool,
    /// Only the disk of this id.
    pub disk: Option<String>,
}

/// A connection to a daemon's admin socket.
#[derive(Debug)]
pub struct Client {
    lines: Lines,
    timeouts: Duration,
    last_id: u64,
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// When nobody accepts there in time.
    pub fn connect(path: &Path) -> Result<Client, ClientError> {
        Client::connect_with(path, DEFAULT_TIMEOUTS)
    }

    /// Connects; `timeouts` bounds this and each call.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with(path: &Path, timeouts: Duration) -> Result<Client, ClientError> {
        let connected = open(path, Instant::now() + timeouts).and_then(|stream| Client::over(stream, timeouts));
        connected.map_err(|source| ClientError::Connect { path: path.to_owned(), source })
    }

    /// Speaks over a socket that is connected already.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn over(stream: UnixStream, timeouts: Duration) -> io::Result<Client> {
        Ok(Client { lines: Lines::new(stream, None, ANSWER_BYTES)?, timeouts, last_id: 0 })
    }

    /// Calls a verb. `params` is an object, or null for none.
    ///
    /// # Errors
    /// When the daemon says no, is gone or does not answer in time. Only after [`ClientError::Refused`] is the connection
    /// good for more.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value, ClientError> {
        self.last_id += 1;
        let mut request = json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method });
        if !params.is_null() {
            request["params"] = params.clone();
        }
        let deadline = Instant::now() + self.timeouts;
        let written = self.lines.write(format!("{request}\n").as_bytes(), deadline);
        // A server that closes at once, because it has too many clients, has said why before.
        let line = match (self.lines.read(Timeouts::Until(deadline)), written) {
            (Ok(Line::Whole(line)), _) => line,
            (Ok(Line::Late), _) => return Err(ClientError::Late(self.timeouts)),
            (Ok(Line::TooLong), _) => return Err(ClientError::Strange(format!("more than {ANSWER_BYTES} bytes"))),
            (Ok(Line::Ended | Line::Stopped), _) => return Err(ClientError::Closed),
            (Err(error), _) if error.kind() == io::ErrorKind::ConnectionReset => return Err(ClientError::Closed),
            (Err(error), _) => return Err(ClientError::Io(error)),
        };
        self.judge(&line)
    }

    fn judge(&self, line: &[u8]) -> Result<Value, ClientError> {
        let mut answer: Map<String, Value> = serde_json::from_slice(line)
            .map_err(|error| ClientError::Strange(format!("a line that is none ({error})")))?;
        if answer.get("jsonrpc").is_none_or(|version| version != "2.0") {
            return Err(ClientError::Strange("a line without jsonrpc \"2.0\"".to_owned()));
        }
        let id = answer.remove("id").unwrap_or(Value::Null);
        // An error that is not about one request has no id.
        if let Some(error) = answer.remove("error").filter(|_| id.is_null() || id == self.last_id) {
            let error = serde_json::from_value(error)
                .map_err(|error| ClientError::Strange(format!("an error that is none ({error})")))?;
            return Err(ClientError::Refused(error));
        }
        match answer.remove("result").filter(|_| id == self.last_id) {
            Some(result) => Ok(result),
            None => Err(ClientError::Strange(format!("an answer to {id} when {} was asked", self.last_id))),
        }
    }

    /// What the daemon counted so far.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn stat(&mut self, query: &StatQuery) -> Result<Stat, ClientError> {
        let mut params = json!({ "queues": query.queues, "latency": query.latency });
        if let Some(disk) = &query.disk {
            params["disk"] = json!(disk);
        }
        let result = self.call("stat", &params)?;
        serde_json::from_value(result).map_err(|error| ClientError::Strange(format!("a stat that is none ({error})")))
    }
}

/// Connects without blocking for ever on a server that is stopped and whose backlog is full.
fn open(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    loop {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket.into()),
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(BUSY),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}
