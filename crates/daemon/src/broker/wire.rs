//! The messages between daemon and broker: one packet each, on a socket of type `SOCK_SEQPACKET`.
//!
//! A request is a number (4 bytes, little endian), a verb, the access and a path. A response is the number of its
//! request, a status and a text or the host's error number; with the status [`Status::Done`] of an `open` comes one
//! descriptor. All are bounded.

use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use mqblk_core::{ImageAccess, ImageOpenError};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Longest path: that of the kernel (PATH_MAX, with its final 0).
const MAX_PATH: usize = 4095;
/// Longest text of a response. It quotes at most two paths.
const MAX_TEXT: usize = 3 * MAX_PATH;
const REQUEST_HEAD: usize = 6;
const RESPONSE_HEAD: usize = 5;
/// Longest request.
pub(super) const MAX_REQUEST: usize = REQUEST_HEAD + MAX_PATH;
const MAX_RESPONSE: usize = RESPONSE_HEAD + MAX_TEXT;

/// The requests of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Allow the file, or the images beneath the folder, from now on. Only before the seal.
    Allow(PathBuf),
    /// Open an image.
    Open(PathBuf, ImageAccess),
    /// As [`Request::Open`], by the rules alone even before the seal.
    OpenAllowed(PathBuf, ImageAccess),
    /// Remember the configuration file's path. Only before the seal.
    AllowConfig(PathBuf),
    /// Open the configuration file for reading.
    OpenConfig,
    /// Add no more rules, and give up all other rights.
    Seal,
}

impl Request {
    /// Encodes the request `number`.
    ///
    /// # Errors
    /// If the path is too long.
    pub(super) fn encode(&self, number: u32) -> io::Result<Vec<u8>> {
        let bits = |access: &ImageAccess| {
            let ImageAccess { write, direct, exclusive } = *access;
            u8::from(write) | u8::from(direct) << 1 | u8::from(exclusive) << 2
        };
        let (verb, access, path) = match self {
            Request::Allow(path) => (1, 0, path.as_os_str()),
            Request::Open(path, access) => (2, bits(access), path.as_os_str()),
            Request::Seal => (3, 0, OsStr::new("")),
            Request::OpenAllowed(path, access) => (4, bits(access), path.as_os_str()),
            Request::AllowConfig(path) => (5, 0, path.as_os_str()),
            Request::OpenConfig => (6, 0, OsStr::new("")),
        };
        if path.len() > MAX_PATH {
            return Err(rustix::io::Errno::NAMETOOLONG.into());
        }
        Ok([&number.to_le_bytes()[..], &[verb, access], path.as_bytes()].concat())
    }

    /// Decodes a request.
    ///
    /// # Errors
    /// Says what was found and expected.
    fn decode(verb: u8, access: u8, path: &[u8]) -> Result<Request, String> {
        let absolute = || match Path::new(OsStr::from_bytes(path)) {
            path if path.is_absolute() && !path.as_os_str().as_bytes().contains(&0) => Ok(path.to_owned()),
            path => Err(format!("request: path: found {path:?}, expected an absolute path")),
        };
        match (verb, access) {
            (1, 0) => Ok(Request::Allow(absolute()?)),
            (2 | 4, 0..=7) => {
                let (write, direct, exclusive) = (access & 1 != 0, access & 2 != 0, access & 4 != 0);
                let access = ImageAccess { write, direct, exclusive };
                let path = absolute()?;
                Ok(if verb == 2 { Request::Open(path, access) } else { Request::OpenAllowed(path, access) })
            }
            (3, 0) if path.is_empty() => Ok(Request::Seal),
            (5, 0) => Ok(Request::AllowConfig(absolute()?)),
            (6, 0) if path.is_empty() => Ok(Request::OpenConfig),
            _ => Err(format!("request: found verb {verb} with access {access}, expected one of this version")),
        }
    }
}

/// A received request: its number, and its content or the reason why it is malformed.
pub(super) type Received = (u32, Result<Request, String>);

/// Waits for a request. `None`: the daemon has ended.
///
/// # Errors
/// If the socket fails.
pub(super) fn receive_request(socket: BorrowedFd<'_>) -> io::Result<Option<Received>> {
    let mut bytes = [0; MAX_REQUEST];
    // Without space for control messages the kernel closes descriptors that are sent along.
    let (len, flags, _) = receive(socket, &mut bytes, 0)?;
    if len == 0 {
        return Ok(None);
    }
    let Some((head, path)) = bytes[..len].split_first_chunk::<REQUEST_HEAD>() else {
        return Ok(Some((0, Err(format!("request: found {len} bytes, expected {REQUEST_HEAD} at least")))));
    };
    let [n0, n1, n2, n3, verb, access] = *head;
    let number = u32::from_le_bytes([n0, n1, n2, n3]);
    if flags.contains(ReturnFlags::TRUNC) {
        let why = format!("request: found more than {MAX_REQUEST} bytes, expected {MAX_REQUEST} at most");
        return Ok(Some((number, Err(why))));
    }
    Ok(Some((number, Request::decode(verb, access, path))))
}

/// The broker's answer: a text for the log to [`Request::Seal`], a descriptor to [`Request::Open`].
pub(super) type Answer = Result<(Option<OwnedFd>, String), ImageOpenError>;

#[derive(Clone, Copy)]
#[repr(u8)]
enum Status {
    Done = 0,
    Os = 1,
    NotAnImage = 2,
    Refused = 3,
}

/// Sends the response to the request `number`.
///
/// # Errors
/// If the socket fails.
pub(super) fn send_response(socket: BorrowedFd<'_>, number: u32, answer: &Answer) -> io::Result<()> {
    let (status, content, file) = match answer {
        Ok((file, text)) => (Status::Done, text.clone().into_bytes(), file.as_ref()),
        Err(ImageOpenError::Os(error)) => match error.raw_os_error() {
            Some(errno) => (Status::Os, errno.to_le_bytes().to_vec(), None),
            None => (Status::Refused, error.to_string().into_bytes(), None),
        },
        Err(ImageOpenError::NotAnImage(what)) => (Status::NotAnImage, what.clone().into_bytes(), None),
        Err(ImageOpenError::Refused(why)) => (Status::Refused, why.clone().into_bytes(), None),
    };
    let content = &content[..content.len().min(MAX_TEXT)];
    let bytes = [&number.to_le_bytes()[..], &[status as u8], content].concat();
    send(socket, &bytes, file.map(|file| file.as_fd()))
}

/// Sends a packet, with at most one descriptor.
///
/// # Errors
/// If the socket fails, or the other end has not read earlier packets.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = file.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let parts = [IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &parts, &mut control, flags))?;
    Ok(())
}

/// Receives a response with its number. `None`: the broker has ended.
///
/// # Errors
/// If the socket fails, or the response is malformed.
pub(super) fn receive_response(socket: BorrowedFd<'_>) -> io::Result<Option<(u32, Answer)>> {
    let mut bytes = vec![0; MAX_RESPONSE];
    let (len, _, file) = receive(socket, &mut bytes, 1)?;
    if len == 0 {
        return Ok(None);
    }
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed response");
    let (head, content) = bytes[..len].split_first_chunk::<RESPONSE_HEAD>().ok_or_else(malformed)?;
    let [n0, n1, n2, n3, status] = *head;
    let text = || String::from_utf8_lossy(content).into_owned();
    let answer = match status {
        0 => Ok((file, text())),
        1 => {
            let errno = content.try_into().map(i32::from_le_bytes).map_err(|_| malformed())?;
            Err(ImageOpenError::Os(io::Error::from_raw_os_error(errno)))
        }
        2 => Err(ImageOpenError::NotAnImage(text())),
        3 => Err(ImageOpenError::Refused(text())),
        _ => return Err(malformed()),
    };
    Ok(Some((u32::from_le_bytes([n0, n1, n2, n3]), answer)))
}

/// Receives a packet with at most `files` descriptors, 0 or 1. Treats a killed peer like one that has closed its end.
fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    files: usize,
) -> io::Result<(usize, ReturnFlags, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let room = if files == 0 { 0 } else { space.len() };
    let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    let received = match received {
        Err(rustix::io::Errno::CONNRESET) => return Ok((0, ReturnFlags::empty(), None)),
        received => received?,
    };
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((received.bytes, received.flags, descriptors.flatten().next()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_decoded_as_encoded() {
        let access = [ImageAccess::default(), ImageAccess { write: true, direct: false, exclusive: true }];
        let open = access.map(|access| Request::Open("/images/a b".into(), access));
        let allowed = access.map(|access| Request::OpenAllowed("/images/a b".into(), access));
        let others =
            [Request::Allow("/x".into()), Request::Seal, Request::AllowConfig("/c".into()), Request::OpenConfig];
        for request in open.into_iter().chain(allowed).chain(others) {
            let bytes = request.encode(7).unwrap();
            assert_eq!(bytes[..4], 7_u32.to_le_bytes());
            assert_eq!(Request::decode(bytes[4], bytes[5], &bytes[6..]), Ok(request));
        }
        let long = Path::new("/").join("x".repeat(MAX_PATH));
        assert!(Request::Allow(long).encode(0).is_err());
    }

    #[test]
    fn malformed_requests_are_refused() {
        for (verb, access, path) in [
            (0, 0, &b"/a"[..]),
            (1, 1, b"/a"),
            (1, 0, b""),
            (2, 8, b"/a"),
            (2, 0, b"a"),
            (2, 0, b"../a"),
            (2, 0, b"/a\0b"),
            (2, 0, b""),
            (3, 0, b"/a"),
            (3, 1, b""),
            (4, 8, b"/a"),
            (5, 1, b"/a"),
            (5, 0, b"a"),
            (6, 0, b"/a"),
            (6, 1, b""),
            (7, 0, b"/a"),
            (255, 255, b""),
        ] {
            assert!(Request::decode(verb, access, path).is_err(), "{verb} {access} {path:?}");
        }
    }
}
