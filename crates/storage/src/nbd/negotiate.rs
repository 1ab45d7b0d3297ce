//! The negotiation of a connection (fixed newstyle). Blocks: only for control threads and threads that connect.

use std::io::{self, ErrorKind, Read, Write};

use super::protocol::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, Headers, OLDSTYLE_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, be32,
    be64, export_flag, info, option, option_reply, printable,
};

/// Longest accepted reply to an option. The longest sensible one is a text of 4096 bytes.
const MAX_REPLY: u32 = 64 << 10;
/// Most replies to one option.
const MAX_REPLIES: usize = 64;
/// The largest payload of a server that states no limit.
const DEFAULT_MAX_PAYLOAD: u32 = 32 << 20;

/// The negotiated properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportInfo {
    /// Bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    pub headers: Headers,
    /// The unit of requests in bytes: a power of two.
    pub block: u32,
    /// The server's preferred unit in bytes; 0 if it has none.
    pub preferred_block: u32,
    /// The largest payload of a request or reply in bytes.
    pub max_payload: u32,
}

impl ExportInfo {
    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Purpose of a negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The export is used on this connection.
    Transmission,
    /// The export is tested for use, and the connection ends.
    Probe,
    /// The export is queried, and the connection ends.
    Information,
}

/// Returns a server's error reply as an I/O error.
fn refused(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// Reads the greeting and answers it. Returns true if the server omits the zeroes of an old reply.
///
/// # Errors
/// When it is not an NBD server, or has no fixed newstyle negotiation.
pub(super) fn greet(stream: &mut (impl Read + Write)) -> io::Result<bool> {
    let mut magics = [0; 16];
    read_exact(stream, &mut magics, "the server ended the connection before its greeting")?;
    if be64(&magics, 0) != Some(SERVER_MAGIC) {
        return Err(refused("greeting: found other bytes, expected NBDMAGIC: not an NBD server"));
    }
    match be64(&magics, 8) {
        Some(OPTION_MAGIC) => {}
        Some(OLDSTYLE_MAGIC) => return Err(refused("found an oldstyle server, expected newstyle negotiation")),
        _ => return Err(refused("greeting: found other bytes after NBDMAGIC, expected IHAVEOPT")),
    }
    let mut flags = [0; 2];
    stream.read_exact(&mut flags)?;
    let flags = u16::from_be_bytes(flags);
    if flags & FLAG_FIXED_NEWSTYLE == 0 {
        return Err(refused("found a server with unfixed newstyle negotiation, expected a fixed one"));
    }
    let ours = flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
    stream.write_all(&u32::from(ours).to_be_bytes())?;
    Ok(flags & FLAG_NO_ZEROES != 0)
}

/// Requests TLS. The handshake follows.
///
/// # Errors
/// When the server refuses.
pub(super) fn start_tls(stream: &mut (impl Read + Write)) -> io::Result<()> {
    send_option(stream, option::STARTTLS, &[])?;
    match read_reply(stream, option::STARTTLS)? {
        (option_reply::ACK, _) => Ok(()),
        (error, text) => Err(option_error("TLS", error, &text)),
    }
}

/// Negotiates the headers and the export.
///
/// # Errors
/// When the server refuses, or violates the protocol.
pub(super) fn negotiate(
    stream: &mut (impl Read + Write),
    export: &str,
    purpose: Purpose,
    no_zeroes: bool,
) -> io::Result<ExportInfo> {
    let mut headers = Headers::Simple;
    for (number, better) in
        [(option::EXTENDED_HEADERS, Headers::Extended), (option::STRUCTURED_REPLY, Headers::Structured)]
    {
        if headers == Headers::Simple && is_accepted(stream, number)? {
            headers = better;
        }
    }
    let number = if purpose == Purpose::Information { option::INFO } else { option::GO };
    let mut data = (export.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(export.as_bytes());
    data.extend_from_slice(&1u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    send_option(stream, number, &data)?;
    let (mut size, mut sizes) = (None, [1, 0, DEFAULT_MAX_PAYLOAD]);
    for _ in 0..MAX_REPLIES {
        match read_reply(stream, number)? {
            (option_reply::INFO, data) => {
                match (data.get(..2).map(|kind| u16::from_be_bytes([kind[0], kind[1]])), data.len()) {
                    (Some(info::EXPORT), 12) => {
                        size = be64(&data, 2).map(|size| (size, u16::from_be_bytes([data[10], data[11]])));
                    }
                    (Some(info::BLOCK_SIZE), 14) => sizes = [2, 6, 10].map(|at| be32(&data, at).unwrap_or(0)),
                    (Some(info::EXPORT | info::BLOCK_SIZE) | None, len) => {
                        return Err(refused(&format!("information about the export: found {len} bytes")));
                    }
                    (Some(_), _) => {}
                }
            }
            (option_reply::ACK, _) => {
                let Some((size, flags)) = size else {
                    return Err(refused("found no size of the export, expected it before the acknowledgement"));
                };
                if purpose == Purpose::Information {
                    // The server may end the connection without an answer.
                    send_option(stream, option::ABORT, &[])?;
                }
                let [block, preferred_block, max_payload] = sizes;
                return check(ExportInfo { size, flags, headers, block, preferred_block, max_payload });
            }
            (option_reply::UNSUPPORTED, _) if purpose != Purpose::Information => {
                return export_name(stream, export, headers, no_zeroes);
            }
            (error, text) => return Err(option_error("the export", error, &text)),
        }
    }
    Err(refused(&format!("found more than {MAX_REPLIES} replies to one option")))
}

/// Requests the export of a server without NBD_OPT_GO, which ends the connection if there is none.
fn export_name(
    stream: &mut (impl Read + Write),
    export: &str,
    headers: Headers,
    no_zeroes: bool,
) -> io::Result<ExportInfo> {
    send_option(stream, option::EXPORT_NAME, export.as_bytes())?;
    let mut reply = [0; 10 + 124];
    let len = if no_zeroes { 10 } else { reply.len() };
    read_exact(stream, &mut reply[..len], "the server ended the connection: it has no such export")?;
    let (size, flags) = (be64(&reply, 0).unwrap_or(0), u16::from_be_bytes([reply[8], reply[9]]));
    let (block, preferred_block, max_payload) = (1, 0, DEFAULT_MAX_PAYLOAD);
    check(ExportInfo { size, flags, headers, block, preferred_block, max_payload })
}

/// Checks the server's properties of the export.
fn check(export: ExportInfo) -> io::Result<ExportInfo> {
    let ExportInfo { size, block, max_payload, .. } = export;
    if !export.has(export_flag::HAS_FLAGS) {
        return Err(refused("transmission flags: found none, expected NBD_FLAG_HAS_FLAGS"));
    }
    if size > i64::MAX as u64 {
        return Err(refused(&format!("the export's size: found {size} bytes, expected at most {}", i64::MAX)));
    }
    if !block.is_power_of_two() || block > 64 << 10 {
        return Err(refused(&format!("minimum block size: found {block}, expected a power of two up to 65536")));
    }
    if max_payload < MIN_PAYLOAD || !max_payload.is_multiple_of(block) {
        let expected = format!("a multiple of the minimum block size {block} of at least {MIN_PAYLOAD}");
        return Err(refused(&format!("maximum block size: found {max_payload}, expected {expected}")));
    }
    Ok(export)
}

/// The smallest maximum payload accepted: a worker's largest request.
pub(super) const MIN_PAYLOAD: u32 = 1 << 20;

/// Requests an option that an older server does not have.
fn is_accepted(stream: &mut (impl Read + Write), number: u32) -> io::Result<bool> {
    send_option(stream, number, &[])?;
    match read_reply(stream, number)? {
        (option_reply::ACK, _) => Ok(true),
        (error, _) if error & option_reply::ERROR != 0 => Ok(false),
        (other, _) => {
            Err(refused(&format!("reply to option {number}: found type {other}, expected an acknowledgement")))
        }
    }
}

fn send_option(stream: &mut impl Write, number: u32, data: &[u8]) -> io::Result<()> {
    let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
    message.extend_from_slice(&number.to_be_bytes());
    message.extend_from_slice(&(data.len() as u32).to_be_bytes());
    message.extend_from_slice(data);
    stream.write_all(&message)
}

/// Reads all of `bytes`. `ended`: the error if the server has ended the connection.
fn read_exact(stream: &mut impl Read, bytes: &mut [u8], ended: &str) -> io::Result<()> {
    stream.read_exact(bytes).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => refused(ended),
        _ => error,
    })
}

/// Reads a reply to an option. Returns its type and its data.
fn read_reply(stream: &mut impl Read, number: u32) -> io::Result<(u32, Vec<u8>)> {
    let mut header = [0; 20];
    read_exact(stream, &mut header, "the server ended the connection in the negotiation")?;
    if be64(&header, 0) != Some(OPTION_REPLY_MAGIC) {
        return Err(refused("reply to an option: found other bytes, expected its magic number"));
    }
    match be32(&header, 8) {
        Some(found) if found == number => {}
        found => return Err(refused(&format!("reply to option {number}: found one to option {}", found.unwrap_or(0)))),
    }
    let (kind, len) = (be32(&header, 12).unwrap_or(0), be32(&header, 16).unwrap_or(0));
    if len > MAX_REPLY {
        return Err(refused(&format!("reply to option {number}: found {len} bytes, expected at most {MAX_REPLY}")));
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

/// Returns the error that a server has replied, with its text.
fn option_error(what: &str, error: u32, text: &[u8]) -> io::Error {
    if error & option_reply::ERROR == 0 {
        return refused(&format!("{what}: found a reply of type {error}, expected an acknowledgement or an error"));
    }
    let words = printable(&String::from_utf8_lossy(text));
    let words = if words.is_empty() { words } else { format!(": {words:?}") };
    refused(&format!("the server refuses {what}: {}{words}", option_reply::describe(error)))
}
