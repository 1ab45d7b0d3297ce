//! The client.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Map, Value, json};

use crate::lines::{Line, LineDeadline, Lines};
use crate::model::Stat;
use crate::protocol::ErrorObject;

/// Longest response that is accepted: far above what 256 queues of a few disks with all their histograms need.
const MAX_RESPONSE_BYTES: usize = 256 << 20;
/// Default time to wait for a response.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between attempts to connect while the server's backlog is full.
const CONNECT_RETRY: Duration = Duration::from_millis(10);

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No server listens at that path.
    #[error("found {path:?}: {source}, expected the admin socket of a daemon (is it running, with --admin?)")]
    Connect {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The server closed the connection.
    #[error(
        "found a connection that closed without an answer, expected one that lasts: is it the path of --admin, not of a disk?"
    )]
    Closed,
    /// The connection broke.
    #[error("the connection to the daemon: {0}")]
    Io(#[from] io::Error),
    /// No response in time.
    #[error("found no answer in {} seconds, expected one: is the daemon stuck, or is it a disk's socket?", .0.as_secs_f64())]
    Late(Duration),
    /// The server responded with an error.
    #[error("the daemon answered: {0}")]
    Refused(#[source] ErrorObject),
    /// The server's line is not a response to the request.
    #[error("found {0}, expected an answer of mqblk's admin socket: is this another program's socket?")]
    Strange(String),
}

/// The parameters of `stat`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatQuery {
    /// Include every queue, not only the sums of each disk.
    pub queues: bool,
    /// Include the buckets of the latency histograms.
    pub latency: bool,
    /// Only the disk of this id.
    pub disk: Option<String>,
}

/// A connection to a daemon's admin socket.
#[derive(Debug)]
pub struct Client {
    lines: Lines,
    timeout: Duration,
    last_id: u64,
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// When no server accepts there in time.
    pub fn connect(path: &Path) -> Result<Client, ClientError> {
        Client::connect_with(path, DEFAULT_TIMEOUT)
    }

    /// Connects; `timeout` bounds this and each call.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with(path: &Path, timeout: Duration) -> Result<Client, ClientError> {
        let connected = open(path, Instant::now() + timeout).and_then(|stream| Client::over(stream, timeout));
        connected.map_err(|source| ClientError::Connect { path: path.to_owned(), source })
    }

    /// Returns a client over a connected socket.
    ///
    /// # Errors
    /// When the socket cannot be made non-blocking.
    pub fn over(stream: UnixStream, timeout: Duration) -> io::Result<Client> {
        Ok(Client { lines: Lines::new(stream, None, MAX_RESPONSE_BYTES)?, timeout, last_id: 0 })
    }

    /// Returns the user of the process that listened when this client connected (SO_PEERCRED of unix(7)).
    pub fn server_uid(&self) -> Option<u32> {
        self.lines.peer_uid()
    }

    /// Calls a verb. `params` is an object, or null for none.
    ///
    /// # Errors
    /// When the daemon refuses, is gone or does not respond in time. Only after [`ClientError::Refused`] the connection
    /// can be used again.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value, ClientError> {
        self.call_with(method, params, None)
    }

    /// Calls a verb, and sends it a descriptor.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn call_with(
        &mut self,
        method: &str,
        params: &Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Value, ClientError> {
        self.last_id += 1;
        let mut request = json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method });
        if !params.is_null() {
            request["params"] = params.clone();
        }
        let deadline = Instant::now() + self.timeout;
        let request = format!("{request}\n");
        let written = match descriptor {
            Some(descriptor) => self.lines.write_with(request.as_bytes(), descriptor),
            None => self.lines.write(request.as_bytes(), deadline),
        };
        // A server that closes at once, because it has too many clients, has sent the reason before.
        let line = match (self.lines.read(LineDeadline::Until(deadline)), written) {
            (Ok(Line::Whole(line)), _) => line,
            (Ok(Line::TimedOut), _) => return Err(ClientError::Late(self.timeout)),
            (Ok(Line::TooLong), _) => {
                return Err(ClientError::Strange(format!("more than {MAX_RESPONSE_BYTES} bytes")));
            }
            (Ok(Line::Closed | Line::Stopped), _) => return Err(ClientError::Closed),
            (Err(error), _) if error.kind() == io::ErrorKind::ConnectionReset => return Err(ClientError::Closed),
            (Err(error), _) => return Err(ClientError::Io(error)),
        };
        self.check_response(&line)
    }

    fn check_response(&self, line: &[u8]) -> Result<Value, ClientError> {
        let mut response: Map<String, Value> = serde_json::from_slice(line)
            .map_err(|error| ClientError::Strange(format!("a line that is none ({error})")))?;
        if response.get("jsonrpc").is_none_or(|version| version != "2.0") {
            return Err(ClientError::Strange("a line without jsonrpc \"2.0\"".to_owned()));
        }
        let id = response.remove("id").unwrap_or(Value::Null);
        // An error that is not about one request has no id.
        if let Some(error) = response.remove("error").filter(|_| id.is_null() || id == self.last_id) {
            let error = serde_json::from_value(error)
                .map_err(|error| ClientError::Strange(format!("an error that is none ({error})")))?;
            return Err(ClientError::Refused(error));
        }
        match response.remove("result").filter(|_| id == self.last_id) {
            Some(result) => Ok(result),
            None => Err(ClientError::Strange(format!("an answer to {id} when {} was asked", self.last_id))),
        }
    }

    /// Calls `stat`.
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

/// Connects without blocking for ever on a stopped server whose backlog is full.
fn open(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    loop {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket.into()),
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(CONNECT_RETRY),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}
