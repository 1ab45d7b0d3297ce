//! Hypercalls from a program to the machine: messages of 32-bit words over a SOCK_SEQPACKET socket, with descriptors in
//! some results. Both ends are from one build, so there is no version; an invalid message ends the connection.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;

use mqblk_core::lock::lock;
use mqblk_memory::{DomainId, GrantRef};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use mqblk_xen::Port;

/// Name of the machine's socket in its folder.
pub(super) const SOCKET: &str = "hypervisor.sock";
/// Maximum number of references in one map call: fits a packet in the smallest send buffer of a host.
pub(super) const MOST_REFS: usize = 8192;
/// Maximum number of words of a message.
const MOST_WORDS: usize = MOST_REFS + 8;
/// Maximum number of descriptors in a result.
const MOST_DESCRIPTORS: usize = 2;

/// A program's hypercall.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Hypercall {
    /// First on each connection: the program's domain. Result: the connection's number; descriptor: the shared info.
    Connect(DomainId),
    /// Result: words of the grant table, pages of the memory; descriptors: the table and the memory.
    AttachDomain(DomainId),
    /// Result: a handle, then each page's frame.
    MapGrants { of: DomainId, writable: bool, refs: Vec<GrantRef> },
    /// Ends one mapping.
    UnmapGrants { handle: u32 },
    /// Result: an id, the first frame, the first reference; frames and references are consecutive.
    SharePages { with: DomainId, pages: u32, writable: bool },
    /// Ends the grants of one `SharePages`.
    UnsharePages { share: u32 },
    /// Result: as for `BindInterdomain`.
    AllocUnbound { remote: DomainId },
    /// Result: the local port, the lines of outgoing and incoming events; descriptors: the local and the remote
    /// eventfd.
    BindInterdomain { remote: DomainId, port: Port },
    /// Closes the local end.
    ClosePort { port: Port },
}

impl Hypercall {
    /// Encodes the message into `words`, replacing their content.
    pub(super) fn encode(&self, words: &mut Vec<u32>) {
        words.clear();
        match self {
            Hypercall::Connect(domain) => words.extend([0, domain.0.into()]),
            Hypercall::AttachDomain(domain) => words.extend([1, domain.0.into()]),
            Hypercall::MapGrants { of, writable, refs } => encode_map(words, *of, *writable, refs),
            Hypercall::UnmapGrants { handle } => words.extend([3, *handle]),
            Hypercall::SharePages { with, pages, writable } => {
                words.extend([4, with.0.into(), *pages, u32::from(*writable)])
            }
            Hypercall::UnsharePages { share } => words.extend([5, *share]),
            Hypercall::AllocUnbound { remote } => words.extend([6, remote.0.into()]),
            Hypercall::BindInterdomain { remote, port } => words.extend([7, remote.0.into(), port.0]),
            Hypercall::ClosePort { port } => words.extend([8, port.0]),
        }
    }

    /// Decodes a message; `None` if [`encode`](Self::encode) cannot have produced it.
    pub(super) fn decode(words: &[u32]) -> Option<Hypercall> {
        let domain = |word: u32| u16::try_from(word).ok().map(DomainId);
        let flag = |word: u32| (word < 2).then_some(word == 1);
        Some(match *words {
            [0, own] => Hypercall::Connect(domain(own)?),
            [1, of] => Hypercall::AttachDomain(domain(of)?),
            [2, of, writable, ref refs @ ..] => Hypercall::MapGrants {
                of: domain(of)?,
                writable: flag(writable)?,
                refs: refs.iter().copied().map(GrantRef).collect(),
            },
            [3, handle] => Hypercall::UnmapGrants { handle },
            [4, with, pages, writable] => {
                Hypercall::SharePages { with: domain(with)?, pages, writable: flag(writable)? }
            }
            [5, share] => Hypercall::UnsharePages { share },
            [6, remote] => Hypercall::AllocUnbound { remote: domain(remote)? },
            [7, remote, port] => Hypercall::BindInterdomain { remote: domain(remote)?, port: Port(port) },
            [8, port] => Hypercall::ClosePort { port: Port(port) },
            _ => return None,
        })
    }
}

/// Encodes [`Hypercall::MapGrants`] without allocating a list.
pub(super) fn encode_map(words: &mut Vec<u32>, of: DomainId, writable: bool, refs: &[GrantRef]) {
    words.clear();
    words.extend([2, of.0.into(), u32::from(writable)]);
    words.extend(refs.iter().map(|gref| gref.0));
}

/// Result of a hypercall: words and descriptors, or an errno.
pub(super) type HypercallResult = Result<(Vec<u32>, Vec<OwnedFd>), Errno>;

/// One end of a connection, with its message buffers.
#[derive(Debug)]
pub(super) struct HypercallSocket {
    socket: OwnedFd,
    bytes: Vec<u8>,
    words: Vec<u32>,
}

impl HypercallSocket {
    pub(super) fn new(socket: OwnedFd) -> HypercallSocket {
        HypercallSocket { socket, bytes: Vec::new(), words: Vec::new() }
    }

    /// Connects to the machine in a folder.
    pub(super) fn connect(folder: &Path) -> io::Result<HypercallSocket> {
        let socket = socket()?;
        rustix::net::connect(&socket, &address(&folder.join(SOCKET))?)?;
        Ok(HypercallSocket::new(socket))
    }

    /// Returns the words of the next message to [send](Self::send), or of the last [received](Self::receive) one.
    pub(super) fn words(&mut self) -> &mut Vec<u32> {
        &mut self.words
    }

    /// Sends the words, with descriptors.
    pub(super) fn send(&mut self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.bytes.clear();
        self.bytes.extend(self.words.iter().flat_map(|word| word.to_ne_bytes()));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let parts = [io::IoSlice::new(&self.bytes)];
        rustix::io::retry_on_intr(|| rustix::net::sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits for a message. `None` if the other end has disconnected.
    pub(super) fn receive(&mut self) -> io::Result<Option<Vec<OwnedFd>>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        self.bytes.resize(MOST_WORDS * size_of::<u32>() + 1, 0);
        let got = rustix::io::retry_on_intr(|| {
            let mut parts = [io::IoSliceMut::new(&mut self.bytes)];
            rustix::net::recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        });
        let got = match got {
            Err(Errno::CONNRESET) => return Ok(None),
            got => got?.bytes,
        };
        let mut descriptors = vec![];
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = message {
                descriptors.extend(list);
            }
        }
        if got == 0 {
            return Ok(None);
        }
        let (words, rest) = self.bytes[..got].as_chunks();
        if !rest.is_empty() {
            let text = format!("found a message of {got} bytes, expected whole words, {MOST_WORDS} at most");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        self.words.clear();
        self.words.extend(words.iter().map(|word| u32::from_ne_bytes(*word)));
        Ok(Some(descriptors))
    }

    /// Sends the words as a hypercall and replaces them by the words of its result.
    pub(super) fn call(&mut self) -> io::Result<Vec<OwnedFd>> {
        self.send(&[])?;
        let gone = || io::Error::new(io::ErrorKind::ConnectionAborted, "the simulated machine or our domain has ended");
        let descriptors = self.receive()?.ok_or_else(gone)?;
        match self.words.first() {
            Some(0) => Ok(descriptors),
            Some(errno) => Err(io::Error::from_raw_os_error(*errno as i32)),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends the result of a hypercall.
    pub(super) fn send_result(&mut self, result: &HypercallResult) -> io::Result<()> {
        self.words.clear();
        let mut descriptors = vec![];
        match result {
            Ok((words, list)) => {
                self.words.push(0);
                self.words.extend(words);
                descriptors.extend(list.iter().map(AsFd::as_fd));
            }
            Err(errno) => self.words.push(errno.raw_os_error() as u32),
        }
        self.send(&descriptors)
    }
}

pub(super) fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Returns a socket's address. The error for a too long path names the limit.
pub(super) fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|error| {
        let len = path.as_os_str().len();
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{}: found {len} bytes, expected 107 at most: {error}", path.display()),
        )
    })
}

/// Removes the socket of a killed machine.
pub(super) fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a hypercall to the machine, and parses its result.
pub(super) fn hypercall<T>(
    connection: &Mutex<HypercallSocket>,
    call: &Hypercall,
    read: impl FnOnce(&[u32], Vec<OwnedFd>) -> io::Result<T>,
) -> io::Result<T> {
    let mut packets = lock(connection);
    call.encode(packets.words());
    let descriptors = packets.call()?;
    read(&packets.words()[1..], descriptors)
}

/// Returns the error for a result that does not match its hypercall.
pub(super) fn malformed_result() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "found a malformed result, expected one of a machine of this build")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hypercalls_are_encoded_and_decoded() {
        let refs = vec![GrantRef(8), GrantRef(u32::MAX)];
        for call in [
            Hypercall::Connect(DomainId(7)),
            Hypercall::AttachDomain(DomainId(0)),
            Hypercall::MapGrants { of: DomainId(1), writable: true, refs },
            Hypercall::UnmapGrants { handle: 3 },
            Hypercall::SharePages { with: DomainId(2), pages: 9, writable: false },
            Hypercall::UnsharePages { share: 4 },
            Hypercall::AllocUnbound { remote: DomainId(5) },
            Hypercall::BindInterdomain { remote: DomainId(5), port: Port(6) },
            Hypercall::ClosePort { port: Port(8) },
        ] {
            let mut words = vec![];
            call.encode(&mut words);
            assert_eq!(Hypercall::decode(&words), Some(call));
        }
    }

    #[test]
    fn garbage_is_no_hypercall() {
        for words in [&[][..], &[0], &[0, 0x1_0000], &[2, 0, 2], &[4, 1, 1, 2], &[9, 0], &[3], &[3, 1, 1]] {
            assert_eq!(Hypercall::decode(words), None, "{words:?}");
        }
    }
}
