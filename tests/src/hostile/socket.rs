//! A vhost-user socket that sends any bytes. Source: QEMU's `vhost-user.rst`.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use super::frontend::RING_PACKED;
use super::{TIMEOUT, wait_for};

/// Numbers of the frontend's messages.
#[allow(missing_docs, reason = "the specification's own names")]
pub mod message {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const POSTCOPY_ADVISE: u32 = 28;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const GPU_SET_SOCKET: u32 = 33;
    pub const RESET_DEVICE: u32 = 34;
    pub const VRING_KICK: u32 = 35;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    pub const CHECK_DEVICE_STATE: u32 = 43;
    pub const GET_VRING_BASE_SKIP_DRAIN: u32 = 45;
}

/// Header flags: protocol version 1.
pub const VERSION: u32 = 1;
/// Header flags: this is a reply.
pub const REPLY: u32 = 4;
/// Header flags: the sender requests an acknowledgement.
pub const NEED_REPLY: u32 = 8;
/// Payload bit of SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR: the message has no descriptor.
pub const NO_FD: u64 = 0x100;

/// Most descriptors of one sent message.
pub const MAX_FDS: usize = 64;

/// A reply, or the end of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// A reply.
    Reply {
        /// The message that it replies to.
        message: u32,
        /// Its payload.
        payload: Vec<u8>,
    },
    /// The daemon closed the connection.
    Closed,
}

/// A connection to a vhost-user socket.
#[derive(Debug)]
pub struct VhostUserSocket {
    stream: UnixStream,
}

impl VhostUserSocket {
    /// Connects, and retries while nobody listens.
    ///
    /// # Panics
    /// On timeout.
    pub fn connect(path: &Path) -> VhostUserSocket {
        let stream = wait_for("a connection", || UnixStream::connect(path).ok());
        stream.set_read_timeout(Some(TIMEOUT.time())).expect("a read time-out");
        stream.set_write_timeout(Some(TIMEOUT.time())).expect("a write time-out");
        VhostUserSocket { stream }
    }

    /// Sends bytes as they are, with descriptors. Returns false if the daemon has closed the connection.
    ///
    /// # Panics
    /// When the daemon does not receive them in time.
    pub fn send_bytes(&self, mut bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut fds = fds;
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
            match sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return false,
                Err(error) => panic!("sendmsg: {error}"),
            }
            fds = &[];
        }
        true
    }

    /// Sends one message. Returns false if the daemon has closed the connection.
    pub fn send(&self, message: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.send_bytes(&message_bytes(message, flags, payload.len() as u32, payload), fds)
    }

    /// Returns true if a reply has arrived, or the connection has ended.
    pub fn is_readable(&self) -> bool {
        let mut waited = [PollFd::new(&self.stream, PollFlags::IN)];
        poll(&mut waited, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Receives the next reply.
    ///
    /// # Panics
    /// When there is none within [`TIMEOUT`], or the message is not a reply.
    pub fn receive(&mut self) -> Received {
        let mut header = [0; 12];
        if !self.read_exact(&mut header) {
            return Received::Closed;
        }
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (message, flags, size) = (word(0), word(4), word(8));
        assert_eq!(flags & !NEED_REPLY, VERSION | REPLY, "message {message}: flags");
        assert!(size <= 4096, "message {message}: {size} bytes");
        let mut payload = vec![0; size as usize];
        assert!(self.read_exact(&mut payload), "message {message}: the reply breaks off");
        Received::Reply { message, payload }
    }

    /// Sends a request. Returns the reply's payload and descriptor.
    ///
    /// # Panics
    /// When there is no such reply.
    pub fn request_fd(&mut self, message: u32, payload: &[u8]) -> (Vec<u8>, OwnedFd) {
        assert!(self.send(message, VERSION, payload, &[]), "message {message}: the daemon has gone");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        // The descriptor arrives with the first byte.
        let mut reply = vec![0; 12 + 24];
        let parts = &mut [IoSliceMut::new(&mut reply)];
        let got = recvmsg(&self.stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("a reply").bytes;
        let mut files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        let file = files.next().and_then(|mut files| files.next()).expect("a descriptor");
        assert!(self.read_exact(&mut reply[got..]), "message {message}: the reply breaks off");
        (reply.split_off(12), file)
    }

    /// Returns false at the end of the stream.
    fn read_exact(&mut self, bytes: &mut [u8]) -> bool {
        match self.stream.read_exact(bytes) {
            Ok(()) => true,
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => false,
            Err(error) => panic!("the daemon says nothing: {error}"),
        }
    }

    /// Sends a request. Returns the reply's payload.
    ///
    /// # Panics
    /// When the reply is to another message, or the connection ends.
    pub fn request(&mut self, message: u32, payload: &[u8]) -> Vec<u8> {
        self.send(message, VERSION, payload, &[]);
        match self.receive() {
            Received::Reply { message: answered, payload } if answered == message => payload,
            other => panic!("message {message}: found {other:?}, expected its reply"),
        }
    }

    /// Sends a request whose reply is a number.
    ///
    /// # Panics
    /// As [`request`](Self::request).
    pub fn request_u64(&mut self, message: u32) -> u64 {
        u64::from_ne_bytes(self.request(message, &[]).try_into().expect("8 bytes"))
    }

    /// Sends a message with NEED_REPLY. Returns the acknowledgement, where 0 is success, or `None` if the connection
    /// ends without one.
    pub fn try_send_acked(&mut self, message: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Option<u64> {
        self.send(message, VERSION | NEED_REPLY, payload, fds);
        match self.receive() {
            Received::Closed => None,
            Received::Reply { payload, .. } => Some(u64::from_ne_bytes(payload.try_into().expect("8 bytes"))),
        }
    }

    /// Sends a message with NEED_REPLY that must succeed.
    ///
    /// # Panics
    /// When it does not.
    pub fn send_acked(&mut self, message: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.try_send_acked(message, payload, fds), Some(0), "message {message}");
    }

    /// Sets owner and features, and turns acknowledgements on. Does not accept the virtio feature bits `without`. Rings
    /// are split. Returns the negotiated features.
    pub fn negotiate(&mut self, without: u64) -> u64 {
        self.negotiate_without(without | RING_PACKED)
    }

    /// Sets owner and all features. Rings are packed.
    pub fn negotiate_packed(&mut self) -> u64 {
        self.negotiate_without(0)
    }

    fn negotiate_without(&mut self, without: u64) -> u64 {
        self.send(message::SET_OWNER, VERSION, &[], &[]);
        let features = self.request_u64(message::GET_FEATURES) & !without;
        let protocol = self.request_u64(message::GET_PROTOCOL_FEATURES);
        self.send(message::SET_PROTOCOL_FEATURES, VERSION, &protocol.to_ne_bytes(), &[]);
        self.send_acked(message::SET_FEATURES, &features.to_ne_bytes(), &[]);
        features
    }

    /// Closes the sending direction.
    pub fn shutdown_write(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

/// Returns the bytes of a message with any header.
pub fn message_bytes(message: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(12 + payload.len());
    for word in [message, flags, size] {
        frame.extend_from_slice(&word.to_ne_bytes());
    }
    frame.extend_from_slice(payload);
    frame
}

/// Returns two numbers of 32 bits: the payload of SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE.
pub fn vring_state_payload(index: u32, value: u32) -> Vec<u8> {
    [index.to_ne_bytes(), value.to_ne_bytes()].concat()
}

/// Returns the payload of GET_CONFIG and SET_CONFIG.
pub fn config_payload(offset: u32, size: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let mut payload = [offset.to_ne_bytes(), size.to_ne_bytes(), flags.to_ne_bytes()].concat();
    payload.extend_from_slice(bytes);
    payload
}
