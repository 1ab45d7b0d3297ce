//! vhost-user messages as bytes on a socket, right or wrong. Source: QEMU's `vhost-user.rst`.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use mqblk_test_bounds::Bound;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Numbers of the frontend's messages.
pub(crate) mod message {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_LOG_BASE: u32 = 6;
    pub(crate) const SET_LOG_FD: u32 = 7;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const GPU_SET_SOCKET: u32 = 33;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
    pub(crate) const SET_DEVICE_STATE_FD: u32 = 42;
    pub(crate) const CHECK_DEVICE_STATE: u32 = 43;
}

/// Header flags.
pub(crate) const VERSION: u32 = 1;
pub(crate) const REPLY: u32 = 4;
pub(crate) const NEED_REPLY: u32 = 8;

/// The longest wait for an expected event.
pub(crate) const LIMIT: Bound = Bound::seconds(15);
/// Most descriptors of a message that this end sends.
pub(crate) const MAX_FDS: usize = 36;

/// Waits until `done`. Polls first without a pause, because most events take microseconds.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    for turn in 0_u32.. {
        if done() {
            return;
        }
        assert!(!LIMIT.is_exceeded_since(begin), "waited for {what}: not within {LIMIT}");
        match turn {
            0..50 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}

/// A message: header, payload, descriptors.
#[derive(Clone, Debug)]
pub(crate) struct Message<F> {
    pub(crate) request: u32,
    pub(crate) flags: u32,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<F>,
}

impl<F> Message<F> {
    pub(crate) fn new(request: u32, payload: Vec<u8>, fds: Vec<F>) -> Message<F> {
        Message { request, flags: VERSION, payload, fds }
    }

    /// Returns its bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = words(&[self.request, self.flags, self.payload.len() as u32]);
        bytes.extend_from_slice(&self.payload);
        bytes
    }
}

/// Returns 32-bit numbers as bytes.
pub(crate) fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Returns 64-bit numbers as bytes.
pub(crate) fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// A reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) request: u32,
    pub(crate) flags: u32,
    pub(crate) payload: Vec<u8>,
    pub(crate) fd: Option<OwnedFd>,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Wire(UnixStream);

impl Wire {
    pub(crate) fn connect(path: &Path) -> Wire {
        let stream = UnixStream::connect(path).expect("the server listens");
        stream.set_read_timeout(Some(LIMIT.time())).expect("a time limit");
        stream.set_write_timeout(Some(LIMIT.time())).expect("a time limit");
        Wire(stream)
    }

    /// Sends bytes, the descriptors with the first of them. Returns false if the server has closed the connection.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let (mut bytes, mut fds) = (bytes, fds);
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
            match retry_on_intr(|| sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return false,
                Err(error) => panic!("sendmsg: {error}"),
            }
            fds = &[];
        }
        true
    }

    /// Receives a reply. Returns `None` if the server has closed the connection.
    ///
    /// # Panics
    /// When no reply or half a reply comes.
    pub(crate) fn receive(&mut self) -> Option<Reply> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut header)];
        let found = match retry_on_intr(|| recvmsg(&self.0, into, &mut control, RecvFlags::CMSG_CLOEXEC)) {
            Ok(found) => found.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => panic!("the server says nothing: {error}"),
        };
        if found == 0 {
            return None;
        }
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        let mut files: Vec<OwnedFd> = files.flatten().collect();
        assert!(files.len() <= 1, "found {} descriptors with a reply", files.len());
        self.read(&mut header[found..]);
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (request, flags, size) = (word(0), word(4), word(8));
        assert!(size <= 4096, "a reply of {size} bytes");
        let mut payload = vec![0; size as usize];
        self.read(&mut payload);
        Some(Reply { request, flags, payload, fd: files.pop() })
    }

    fn read(&mut self, bytes: &mut [u8]) {
        match self.0.read_exact(bytes) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => panic!("a reply breaks off"),
            Err(error) => panic!("the server says only half: {error}"),
        }
    }

    /// Returns true if data has arrived, or the server has closed the connection.
    pub(crate) fn is_readable(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        retry_on_intr(|| poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now))).expect("a poll") > 0
    }

    /// Checks that the server has closed the connection without further data.
    pub(crate) fn expect_closed(mut self, after: &str) {
        if let Some(reply) = self.receive() {
            panic!("{after}: found {reply:?}, expected the end of the connection");
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
