//! The NBD protocol's numbers and messages (the NBD project's `doc/proto.md`). All numbers are big endian.

use mqblk_core::Outcome;

/// `NBDMAGIC`: the first word of a server.
pub(super) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: newstyle negotiation, and the start of an option.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// An oldstyle server's word in its place.
pub(super) const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Begins a reply to an option.
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flags, the same bits in both directions.
pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub(super) const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Options.
pub(super) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub(super) mod option_reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const INFO: u32 = 3;
    /// Set in all errors.
    pub(crate) const ERROR: u32 = 1 << 31;
    pub(crate) const UNSUPPORTED: u32 = ERROR | 1;

    /// Describes an error.
    pub(crate) fn describe(error: u32) -> &'static str {
        match error & !ERROR {
            1 => "it does not know the option",
            2 => "its policy forbids it",
            3 => "it calls the option invalid",
            4 => "its platform does not support it",
            5 => "it demands TLS (tls=on)",
            6 => "it has no such export",
            7 => "it is shutting down",
            8 => "it demands that block sizes are asked for",
            9 => "the request is too large for it",
            10 => "it demands extended headers",
            _ => "it answered with an unknown error",
        }
    }
}

/// Types of information about an export.
pub(super) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: capabilities of an export.
pub(super) mod export_flag {
    pub(crate) const HAS_FLAGS: u16 = 1 << 0;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub(super) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISCONNECT: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const WRITE_ZEROES: u16 = 6;
}

/// Flags of commands.
pub(super) mod command_flag {
    pub(crate) const FUA: u16 = 1 << 0;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
    /// With extended headers, of every command that has a payload.
    pub(crate) const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks of a structured reply.
pub(super) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    /// Set in all errors.
    pub(crate) const ERROR: u16 = 1 << 15;
    /// The last chunk of the reply (a flag).
    pub(crate) const FLAG_DONE: u16 = 1 << 0;
}

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Longest request and longest reply header.
pub(super) const MAX_HEADER: usize = 32;
/// Bytes of a simple reply.
const SIMPLE_REPLY: usize = 16;

/// The negotiated form of requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Headers {
    /// Simple replies.
    Simple,
    /// Structured replies to reads, and optionally to other commands.
    Structured,
    /// Extended headers: 64-bit lengths; all replies are structured.
    Extended,
}

impl Headers {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Headers::Simple => "simple",
            Headers::Structured => "structured",
            Headers::Extended => "extended",
        }
    }

    /// Returns the bytes of a request's header.
    pub(super) const fn request_bytes(self) -> usize {
        match self {
            Headers::Extended => 32,
            _ => 28,
        }
    }

    /// Returns the largest length of a request without a payload.
    pub(super) const fn max_len(self) -> u64 {
        match self {
            Headers::Extended => i64::MAX as u64,
            _ => u32::MAX as u64,
        }
    }
}

/// A request without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestHeader {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u64,
}

impl RequestHeader {
    /// Encodes it; [`Headers::request_bytes`] is the number of used bytes.
    pub(super) fn encode(&self, headers: Headers) -> [u8; MAX_HEADER] {
        let extended = headers == Headers::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let payload = if extended && self.command == command::WRITE { command_flag::PAYLOAD_LEN } else { 0 };
        let mut bytes = [0; MAX_HEADER];
        bytes[..4].copy_from_slice(&magic.to_be_bytes());
        bytes[4..6].copy_from_slice(&(self.flags | payload).to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        if extended {
            bytes[24..].copy_from_slice(&self.len.to_be_bytes());
        } else {
            bytes[24..28].copy_from_slice(&(self.len as u32).to_be_bytes());
        }
        bytes
    }
}

/// The header of a reply, or of a chunk of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyHeader {
    Simple { error: u32, cookie: u64 },
    Chunk { done: bool, kind: u16, cookie: u64, len: u64 },
}

/// Error of decoding a reply header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadHeader {
    /// More bytes are needed: this many in all.
    Short(usize),
    /// An unexpected magic number.
    Magic(u32),
}

/// Decodes a reply's header from the first bytes of `bytes`. Returns it with its length.
pub(super) fn decode_reply(headers: Headers, bytes: &[u8]) -> Result<(ReplyHeader, usize), BadHeader> {
    let Some(magic) = be32(bytes, 0) else { return Err(BadHeader::Short(SIMPLE_REPLY)) };
    let whole = match (headers, magic) {
        (Headers::Simple | Headers::Structured, SIMPLE_REPLY_MAGIC) => SIMPLE_REPLY,
        (Headers::Structured, CHUNK_MAGIC) => 20,
        (Headers::Extended, EXTENDED_CHUNK_MAGIC) => 32,
        _ => return Err(BadHeader::Magic(magic)),
    };
    if bytes.len() < whole {
        return Err(BadHeader::Short(whole));
    }
    let (half, cookie) = (be32(bytes, 4).unwrap_or(0), be64(bytes, 8).unwrap_or(0));
    if whole == SIMPLE_REPLY {
        return Ok((ReplyHeader::Simple { error: half, cookie }, whole));
    }
    let len = if headers == Headers::Extended { be64(bytes, 24) } else { be32(bytes, 16).map(u64::from) };
    let done = (half >> 16) as u16 & chunk::FLAG_DONE != 0;
    Ok((ReplyHeader::Chunk { done, kind: half as u16, cookie, len: len.unwrap_or(0) }, whole))
}

/// Returns the 32-bit number at `at`, if it is there.
pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Returns the 64-bit number at `at`, if it is there.
pub(super) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Returns a server's text for a log: one line of bounded length.
pub(super) fn printable(text: &str) -> String {
    text.chars().filter(|one| !one.is_control()).take(200).collect()
}

/// Returns the outcome of an error number of the protocol. The numbers are Linux's; unknown ones count as EINVAL, as
/// the protocol requires.
pub(super) fn outcome(error: u32) -> Outcome {
    match error {
        1 => Outcome::ReadOnly, // EPERM: the export is read-only.
        5 | 12 | 22 | 28 | 75 | 95 | 108 => Outcome::from_errno(error as i32),
        _ => Outcome::from_errno(22),
    }
}

/// ESHUTDOWN: the server is about to end the connection.
pub(super) const SHUTDOWN: u32 = 108;

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: RequestHeader =
        RequestHeader { flags: 1, command: command::WRITE, cookie: 0x0102_0304_0506_0708, offset: 0x1000, len: 0x200 };

    #[test]
    fn requests_are_as_the_protocol_says() {
        let compact = REQUEST.encode(Headers::Structured);
        let expected = "25609513 0001 0001 0102030405060708 0000000000001000 00000200";
        assert_eq!(hex(&compact[..Headers::Structured.request_bytes()]), expected.replace(' ', ""));
        let extended = REQUEST.encode(Headers::Extended);
        let expected = "21e41c71 0021 0001 0102030405060708 0000000000001000 0000000000000200";
        assert_eq!(hex(&extended), expected.replace(' ', ""));
    }

    #[test]
    fn replies_are_as_the_protocol_says() {
        let simple = unhex("67446698 00000005 0102030405060708");
        let cookie = 0x0102_0304_0506_0708;
        assert_eq!(decode_reply(Headers::Simple, &simple), Ok((ReplyHeader::Simple { error: 5, cookie }, 16)));
        assert_eq!(decode_reply(Headers::Structured, &simple[..15]), Err(BadHeader::Short(16)));
        assert_eq!(decode_reply(Headers::Extended, &simple), Err(BadHeader::Magic(0x6744_6698)));
        let chunk = unhex("668e33ef 0001 8001 0102030405060708 00000006");
        let header = ReplyHeader::Chunk { done: true, kind: chunk::ERROR | 1, cookie, len: 6 };
        assert_eq!(decode_reply(Headers::Structured, &chunk), Ok((header, 20)));
        assert_eq!(decode_reply(Headers::Simple, &chunk), Err(BadHeader::Magic(0x668e_33ef)));
        let extended = unhex("6e8a278c 0000 0001 0102030405060708 0000000000001000 0000000100000000");
        let header = ReplyHeader::Chunk { done: false, kind: chunk::OFFSET_DATA, cookie, len: 1 << 32 };
        assert_eq!(decode_reply(Headers::Extended, &extended), Ok((header, 32)));
        assert_eq!(decode_reply(Headers::Extended, &extended[..31]), Err(BadHeader::Short(32)));
        assert_eq!(decode_reply(Headers::Simple, &[0x67]), Err(BadHeader::Short(16)));
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn unhex(text: &str) -> Vec<u8> {
        let digits: String = text.split(' ').collect();
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
    }
}
