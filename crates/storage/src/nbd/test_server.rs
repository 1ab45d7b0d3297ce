//! An NBD server in a thread, for tests: a RAM disk whose replies tests can alter.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::connect::PROBE_COOKIE;
use super::protocol::{command, command_flag, export_flag, info, option, option_reply};

/// All flags of an export.
pub(super) const ALL_FLAGS: u16 = export_flag::HAS_FLAGS
    | export_flag::SEND_FLUSH
    | export_flag::SEND_FUA
    | export_flag::SEND_TRIM
    | export_flag::SEND_WRITE_ZEROES
    | export_flag::CAN_MULTI_CONN
    | export_flag::SEND_FAST_ZERO;

/// Alters replies; the number counts the connection's requests from 1. `None` ends the connection, and a truncated
/// reply ends it afterwards.
type Bend = dyn Fn(u64, &Command, Vec<u8>) -> Option<Vec<u8>> + Send + Sync;

/// A received command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u64,
}

/// Time of the end of a connection above the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    AtOnce,
    AfterNegotiation,
}

/// The server's offer.
pub(super) struct Offer {
    pub size: usize,
    /// The stated size, if not the size of the disk in memory.
    pub stated: Option<u64>,
    pub flags: u16,
    /// One connection at a time; others end before or after the negotiation.
    pub limit: Option<Refusal>,
    /// True if the size is stated only to users of the export (nbd-server).
    pub hides_size: bool,
    pub structured: bool,
    pub extended: bool,
    pub go: bool,
    /// Minimum and maximum block size; `None`: not stated.
    pub blocks: Option<(u32, u32)>,
    /// Bytes of each data chunk of a structured reply.
    pub chunk: usize,
    pub bend: Box<Bend>,
}

impl Default for Offer {
    fn default() -> Offer {
        Offer {
            size: 8 << 20,
            stated: None,
            flags: ALL_FLAGS,
            limit: None,
            hides_size: false,
            structured: true,
            extended: false,
            go: true,
            blocks: Some((1, 32 << 20)),
            chunk: 1 << 20,
            bend: Box::new(|_, _, reply| Some(reply)),
        }
    }
}

/// A server that listens.
pub(super) struct TestServer {
    pub path: PathBuf,
    /// Made so far, without probes.
    pub connections: AtomicU64,
    /// Users of the export now.
    open: AtomicU64,
    pub commands: Mutex<Vec<Command>>,
    pub disk: Mutex<Vec<u8>>,
    offer: Offer,
    _folder: tempfile::TempDir,
}

impl TestServer {
    pub(super) fn start(offer: Offer) -> Arc<TestServer> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nbd");
        let listener = UnixListener::bind(&path).unwrap();
        let server = Arc::new(TestServer {
            path,
            connections: AtomicU64::new(0),
            open: AtomicU64::new(0),
            commands: Mutex::default(),
            disk: Mutex::new(vec![0; offer.size]),
            offer,
            _folder: folder,
        });
        let of_thread = Arc::downgrade(&server);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let Some(server) = of_thread.upgrade() else { return };
                server.connections.fetch_add(1, Ordering::SeqCst);
                std::thread::spawn(move || {
                    let _ = server.serve(connection.unwrap());
                });
            }
        });
        server
    }

    fn stated_size(&self) -> u64 {
        self.offer.stated.unwrap_or_else(|| self.disk.lock().unwrap().len() as u64)
    }

    /// Counts a connection that uses the export: before the client knows it, so that its next connection is the second
    /// one.
    fn begin_use(&self) -> bool {
        self.open.fetch_add(1, Ordering::SeqCst) == 0
    }

    /// Transmits, unless there are too many connections.
    fn use_export(&self, is_first: bool, stream: UnixStream, structured: bool, extended: bool) -> io::Result<()> {
        let result = match self.offer.limit {
            Some(_) if !is_first => Ok(()),
            _ => self.transmit(stream, structured, extended),
        };
        self.open.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn serve(&self, mut stream: UnixStream) -> io::Result<()> {
        if self.offer.limit == Some(Refusal::AtOnce) && self.open.load(Ordering::SeqCst) > 0 {
            return Ok(());
        }
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        let mut client_flags = [0; 4];
        stream.read_exact(&mut client_flags)?;
        let (mut structured, mut extended) = (false, false);
        loop {
            let mut header = [0; 16];
            stream.read_exact(&mut header)?;
            let number = u32::from_be_bytes(header[8..12].try_into().unwrap());
            let mut data = vec![0; u32::from_be_bytes(header[12..].try_into().unwrap()) as usize];
            stream.read_exact(&mut data)?;
            let mut reply = |kind: u32, data: &[u8]| {
                let mut message = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
                message.extend([number, kind, data.len() as u32].into_iter().flat_map(u32::to_be_bytes));
                message.extend_from_slice(data);
                stream.write_all(&message)
            };
            match number {
                option::STRUCTURED_REPLY if self.offer.structured => {
                    structured = true;
                    reply(option_reply::ACK, &[])?;
                }
                option::EXTENDED_HEADERS if self.offer.extended => {
                    extended = true;
                    reply(option_reply::ACK, &[])?;
                }
                option::GO | option::INFO if self.offer.go => {
                    let mut export = info::EXPORT.to_be_bytes().to_vec();
                    let hides = self.offer.hides_size && number == option::INFO;
                    export.extend(if hides { 0 } else { self.stated_size() }.to_be_bytes());
                    export.extend(self.offer.flags.to_be_bytes());
                    reply(option_reply::INFO, &export)?;
                    if let Some((least, most)) = self.offer.blocks {
                        let mut blocks = info::BLOCK_SIZE.to_be_bytes().to_vec();
                        blocks.extend([least, 4096, most].into_iter().flat_map(u32::to_be_bytes));
                        reply(option_reply::INFO, &blocks)?;
                    }
                    if number == option::GO {
                        let is_first = self.begin_use();
                        reply(option_reply::ACK, &[])?;
                        return self.use_export(is_first, stream, structured, extended);
                    }
                    reply(option_reply::ACK, &[])?;
                }
                option::EXPORT_NAME => {
                    let mut export = self.stated_size().to_be_bytes().to_vec();
                    export.extend(self.offer.flags.to_be_bytes());
                    let is_first = self.begin_use();
                    stream.write_all(&export)?;
                    return self.use_export(is_first, stream, structured, extended);
                }
                option::ABORT => return reply(option_reply::ACK, &[]),
                _ => reply(option_reply::UNSUPPORTED, b"not here")?,
            }
        }
    }

    fn transmit(&self, mut stream: UnixStream, structured: bool, extended: bool) -> io::Result<()> {
        for number in 1.. {
            let mut header = [0; 32];
            let header = &mut header[..if extended { 32 } else { 28 }];
            stream.read_exact(header)?;
            assert_eq!(header[..4], if extended { *b"\x21\xe4\x1c\x71" } else { *b"\x25\x60\x95\x13" });
            let long = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap());
            let len = if extended { long(24) } else { u32::from_be_bytes(header[24..].try_into().unwrap()).into() };
            let half = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
            let request = Command { flags: half(4), command: half(6), cookie: long(8), offset: long(16), len };
            if request.cookie == PROBE_COOKIE {
                // A probe, which ends after its reply.
                self.connections.fetch_sub(1, Ordering::SeqCst);
                return stream.write_all(&simple(0, 0));
            }
            self.commands.lock().unwrap().push(request);
            let mut data = vec![0; if request.command == command::WRITE { len as usize } else { 0 }];
            stream.read_exact(&mut data)?;
            let range = request.offset as usize..(request.offset + len) as usize;
            let mut found = Vec::new();
            let mut disk = self.disk.lock().unwrap();
            match request.command {
                command::READ => found = disk[range].to_vec(),
                command::WRITE => disk[range].copy_from_slice(&data),
                command::WRITE_ZEROES => disk[range].fill(0),
                command::DISCONNECT => return Ok(()),
                _ => {}
            }
            drop(disk);
            let reply = if extended || structured && request.command == command::READ {
                self.chunks(&request, &found, extended)
            } else {
                [&simple(request.cookie, 0), found.as_slice()].concat()
            };
            let whole = reply.clone();
            let Some(reply) = (self.offer.bend)(number, &request, reply) else { return Ok(()) };
            // In parts, so that the client receives parts.
            reply.chunks(50_000).try_for_each(|part| stream.write_all(part))?;
            if reply.len() < whole.len() && whole.starts_with(&reply) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// A structured reply: data, and blocks of zeroes as holes.
    fn chunks(&self, request: &Command, data: &[u8], extended: bool) -> Vec<u8> {
        let mut reply = Vec::new();
        let parts: Vec<&[u8]> = data.chunks(self.offer.chunk).collect();
        for (at, part) in parts.iter().enumerate() {
            let done = at + 1 == parts.len();
            let offset = request.offset + (at * self.offer.chunk) as u64;
            let mut body = offset.to_be_bytes().to_vec();
            let kind = if part.iter().all(|byte| *byte == 0) {
                body.extend((part.len() as u32).to_be_bytes());
                2
            } else {
                body.extend_from_slice(part);
                1
            };
            reply.extend(chunk(request, done, kind, &body, extended));
        }
        if parts.is_empty() {
            reply.extend(chunk(request, true, 0, &[], extended));
        }
        reply
    }
}

/// A simple reply without data.
pub(super) fn simple(cookie: u64, error: u32) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

/// A chunk of a structured reply.
pub(super) fn chunk(request: &Command, done: bool, kind: u16, body: &[u8], extended: bool) -> Vec<u8> {
    let magic = if extended { 0x6e8a_278c_u32 } else { 0x668e_33ef };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend([u16::from(done), kind].into_iter().flat_map(u16::to_be_bytes));
    bytes.extend(request.cookie.to_be_bytes());
    if extended {
        bytes.extend([request.offset, body.len() as u64].into_iter().flat_map(u64::to_be_bytes));
    } else {
        bytes.extend((body.len() as u32).to_be_bytes());
    }
    bytes.extend_from_slice(body);
    bytes
}

/// An error chunk with a text.
pub(super) fn error_chunk(request: &Command, error: u32, text: &str) -> Vec<u8> {
    let body = [&error.to_be_bytes()[..], &(text.len() as u16).to_be_bytes(), text.as_bytes()].concat();
    chunk(request, true, 1 << 15 | 1, &body, false)
}

/// Returns true if a command is durable by itself.
pub(super) fn is_durable(request: &Command) -> bool {
    request.flags & command_flag::FUA != 0
}
