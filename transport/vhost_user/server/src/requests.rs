//! Messages from the backend to the frontend over the socket of SET_BACKEND_REQ_FD: CONFIG_CHANGE_MSG.
//!
//! The `vhost` crate hides that socket and does not implement this message. [`BackendChannel::peek_message`] therefore peeks at each
//! message (MSG_PEEK) before the crate reads it, and duplicates the descriptor.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};

/// Bytes of a message header: request, flags, payload size; each a u32 in host byte order.
const HEADER: usize = 12;
/// Messages from the frontend. Source: QEMU's vhost-user.rst, "Front-end message types".
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
pub(crate) const CHECK_DEVICE_STATE: u32 = 43;
/// Message from the backend. Source: the same, "Back-end message types".
const CONFIG_CHANGE: u32 = 2;
/// Header flags: version 1, reply, reply wanted.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Protocol feature bits.
const REPLY_ACK: u64 = 1 << 3;
const BACKEND_REQ: u64 = 1 << 5;
const CONFIG: u64 = 1 << 9;

/// Result of notifying the frontend of a configuration change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigNotice {
    /// No frontend is connected. The next one reads the new configuration.
    NotConnected,
    /// The frontend did not negotiate BACKEND_REQ and CONFIG. It reads the new configuration when it reconnects.
    NoChannel,
    /// Sent. The frontend sends no reply (it did not negotiate REPLY_ACK).
    Sent,
    /// Sent, and the frontend replied with success.
    Acknowledged,
    /// Sent, and the frontend replied with an error.
    Refused,
    /// The socket is full or closed, or no reply arrived in time.
    Unanswered,
}

#[derive(Default)]
struct Connection {
    connected: bool,
    agreed: u64,
    socket: Option<Arc<OwnedFd>>,
    /// The configuration has changed since the frontend's last GET_CONFIG.
    unread: bool,
}

/// The channel from a device to its current frontend.
#[derive(Default)]
pub(crate) struct Requests {
    connection: Mutex<Connection>,
    /// Held during an exchange: a reply does not name its request.
    asking: Mutex<()>,
}

impl Requests {
    /// Starts over for a new connection.
    pub(crate) fn begin(&self) {
        *lock(&self.connection) = Connection { connected: true, ..Connection::default() };
    }

    /// Drops the socket: the frontend has disconnected.
    pub(crate) fn end(&self) {
        *lock(&self.connection) = Connection::default();
    }

    /// Waits for the connection's next message, peeks at it and returns its request number.
    ///
    /// A header that arrives in parts may be peeked at too early: then there is no number, and the socket is not seen.
    pub(crate) fn look_ahead(&self, stream: impl AsFd) -> Option<u32> {
        let mut bytes = [0; HEADER + 8];
        let (found, _) = rustix::io::retry_on_intr(|| recv(&stream, &mut bytes[..], RecvFlags::PEEK)).ok()?;
        let request = word(&bytes[..found], 0)?;
        match request {
            SET_PROTOCOL_FEATURES if found == bytes.len() => {
                let [.., a, b, c, d, e, f, g, h] = bytes;
                lock(&self.connection).agreed = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
            }
            SET_BACKEND_REQ_FD => {
                let socket = peek_descriptor(stream.as_fd()).map(Arc::new);
                lock(&self.connection).socket = socket;
            }
            GET_CONFIG => lock(&self.connection).unread = false,
            SET_VRING_ENABLE => self.remind(),
            _ => {}
        }
        Some(request)
    }

    /// Sends the message again when the device starts: QEMU ignores it before, and does not read the configuration again by itself.
    fn remind(&self) {
        let connection = lock(&self.connection);
        if connection.unread
            && let Some(socket) = usable(&connection)
        {
            let _ = send(&*socket, &message(0), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Returns true if a frontend is connected.
    pub(crate) fn is_connected(&self) -> bool {
        lock(&self.connection).connected
    }

    /// Sends CONFIG_CHANGE_MSG and waits at most `timeout` for the reply. Holds no lock that the control thread needs: the frontend
    /// sends GET_CONFIG before it replies.
    pub(crate) fn config_changed(&self, timeout: Duration) -> ConfigNotice {
        let until = Instant::now() + timeout;
        let _exchange = lock(&self.asking);
        let (socket, replies) = {
            let mut connection = lock(&self.connection);
            if !connection.connected {
                return ConfigNotice::NotConnected;
            }
            connection.unread = true;
            let Some(socket) = usable(&connection) else { return ConfigNotice::NoChannel };
            (socket, connection.agreed & REPLY_ACK != 0)
        };
        // Drops late replies to earlier messages.
        while let Ok((_, 1..)) = recv(&*socket, &mut [0; 64][..], RecvFlags::DONTWAIT) {}
        let message = message(if replies { NEED_REPLY } else { 0 });
        match send(&*socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(HEADER) if replies => answer(&socket, until),
            Ok(HEADER) => ConfigNotice::Sent,
            _ => ConfigNotice::Unanswered,
        }
    }
}

/// Returns the socket if the frontend negotiated BACKEND_REQ and CONFIG.
fn usable(connection: &Connection) -> Option<Arc<OwnedFd>> {
    let agreed = connection.agreed & (BACKEND_REQ | CONFIG) == BACKEND_REQ | CONFIG;
    connection.socket.clone().filter(|_| agreed)
}

fn message(flags: u32) -> [u8; HEADER] {
    let mut message = [0; HEADER];
    message[..4].copy_from_slice(&CONFIG_CHANGE.to_ne_bytes());
    message[4..8].copy_from_slice(&(VERSION | flags).to_ne_bytes());
    message
}

/// Waits for the reply: a header and a u64, 0 for success.
fn answer(socket: &OwnedFd, until: Instant) -> ConfigNotice {
    let mut bytes = [0; HEADER + 8];
    let mut found = 0;
    while found < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return ConfigNotice::Unanswered,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return ConfigNotice::Unanswered,
        }
        match recv(socket, &mut bytes[found..], RecvFlags::DONTWAIT) {
            Ok((more @ 1.., _)) => found += more,
            Err(Errno::AGAIN) if Instant::now() < until => {}
            _ => return ConfigNotice::Unanswered,
        }
    }
    let is_reply = word(&bytes, 0) == Some(CONFIG_CHANGE) && word(&bytes, 4).is_some_and(|flags| flags & REPLY != 0);
    match bytes[HEADER..].iter().all(|byte| *byte == 0) {
        true if is_reply => ConfigNotice::Acknowledged,
        false if is_reply => ConfigNotice::Refused,
        _ => ConfigNotice::Unanswered,
    }
}

/// Duplicates the one descriptor of the next message. `None` if the message has none, or several.
fn peek_descriptor(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    let mut header = [0; HEADER];
    // Space for several, to detect more than one.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(stream, &mut [IoSliceMut::new(&mut header)], &mut control, flags).ok()?;
    let mut found = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            found.extend(descriptors);
        }
    }
    if found.len() == 1 { found.pop() } else { None }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};

    use super::*;

    /// Only reached by a failing test.
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);
    const ALL: u64 = CONFIG | BACKEND_REQ | REPLY_ACK;

    fn frame(request: u32, body: &[u8]) -> Vec<u8> {
        let words = [request, VERSION, body.len() as u32];
        words.iter().flat_map(|word| word.to_ne_bytes()).chain(body.iter().copied()).collect()
    }

    /// Both ends of a connection: the control thread's and the frontend's.
    struct Rig {
        requests: Requests,
        ours: UnixStream,
        theirs: UnixStream,
    }

    impl Rig {
        fn new() -> Rig {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let rig = Rig { requests: Requests::default(), ours, theirs };
            assert_eq!(rig.requests.config_changed(LONG), ConfigNotice::NotConnected);
            rig.requests.begin();
            assert_eq!(rig.requests.config_changed(LONG), ConfigNotice::NoChannel);
            rig
        }

        /// Sends a message from the frontend; the control thread peeks at it and then reads it.
        fn says(&mut self, frame: &[u8]) {
            self.theirs.write_all(frame).unwrap();
            self.requests.look_ahead(&self.ours);
            let mut read = vec![0; frame.len()];
            self.ours.read_exact(&mut read).unwrap();
            assert_eq!(read, frame);
        }

        fn agrees(&mut self, features: u64) {
            self.says(&frame(SET_PROTOCOL_FEATURES, &features.to_ne_bytes()));
        }

        fn gives(&mut self, sockets: &[&UnixStream]) {
            let descriptors: Vec<_> = sockets.iter().map(|socket| socket.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            let frame = frame(SET_BACKEND_REQ_FD, &[]);
            sendmsg(&self.theirs, &[IoSlice::new(&frame)], &mut control, SendFlags::empty()).unwrap();
            self.requests.look_ahead(&self.ours);
            // The message and its descriptors are still in the socket.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut read = vec![0; frame.len()];
            recvmsg(&self.ours, &mut [IoSliceMut::new(&mut read)], &mut control, RecvFlags::empty()).unwrap();
            let descriptors = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(found) => Some(found.count()),
                _ => None,
            });
            assert_eq!((read, descriptors.sum::<usize>()), (frame, sockets.len()));
        }

        fn with_channel(agreed: u64) -> (Rig, UnixStream) {
            let mut rig = Rig::new();
            rig.agrees(agreed);
            let (sent, kept) = UnixStream::pair().unwrap();
            rig.gives(&[&sent]);
            drop(sent);
            (rig, kept)
        }
    }

    fn told(channel: &mut UnixStream) -> u32 {
        let mut header = [0; HEADER];
        channel.read_exact(&mut header).unwrap();
        assert_eq!((word(&header, 0), word(&header, 8)), (Some(CONFIG_CHANGE), Some(0)));
        word(&header, 4).unwrap()
    }

    fn reply(value: u64) -> Vec<u8> {
        let mut reply = frame(CONFIG_CHANGE, &value.to_ne_bytes());
        reply[4..8].copy_from_slice(&(VERSION | REPLY).to_ne_bytes());
        reply
    }

    #[test]
    fn a_frontend_is_notified_and_replies() {
        let (rig, mut channel) = Rig::with_channel(ALL);
        for (status, want) in [(0, ConfigNotice::Acknowledged), (1, ConfigNotice::Refused)] {
            std::thread::scope(|scope| {
                let exchange = scope.spawn(|| rig.requests.config_changed(LONG));
                assert_eq!(told(&mut channel), VERSION | NEED_REPLY);
                // In two parts.
                let (head, tail) = (&reply(status)[..7], &reply(status)[7..]);
                channel.write_all(head).unwrap();
                std::thread::sleep(SHORT);
                channel.write_all(tail).unwrap();
                assert_eq!(exchange.join().unwrap(), want);
            });
        }
    }

    #[test]
    fn a_wait_for_a_reply_is_bounded() {
        let (rig, mut channel) = Rig::with_channel(ALL);
        assert_eq!(rig.requests.config_changed(SHORT), ConfigNotice::Unanswered);
        // A late reply is not taken for the reply to the next message.
        told(&mut channel);
        channel.write_all(&reply(0)).unwrap();
        assert_eq!(rig.requests.config_changed(SHORT), ConfigNotice::Unanswered);
        // A full socket buffer does not block the sender.
        fill(&rig);
        assert_eq!(rig.requests.config_changed(LONG), ConfigNotice::Unanswered);
        drop(channel);
        assert_eq!(rig.requests.config_changed(LONG), ConfigNotice::Unanswered, "it has closed its end");
    }

    fn fill(rig: &Rig) {
        let connection = lock(&rig.requests.connection);
        let socket = connection.socket.as_ref().unwrap();
        while send(&**socket, &message(0), SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok() {}
    }

    #[test]
    fn without_the_features_nothing_is_sent() {
        for (agreed, want) in [
            (CONFIG, ConfigNotice::NoChannel),
            (BACKEND_REQ, ConfigNotice::NoChannel),
            (CONFIG | BACKEND_REQ, ConfigNotice::Sent),
        ] {
            let (rig, mut channel) = Rig::with_channel(agreed);
            assert_eq!(rig.requests.config_changed(LONG), want);
            drop(rig);
            let mut sent = Vec::new();
            channel.read_to_end(&mut sent).unwrap();
            assert_eq!(sent.len(), if want == ConfigNotice::Sent { HEADER } else { 0 });
        }
        let mut rig = Rig::new();
        rig.agrees(ALL);
        let (one, _one) = UnixStream::pair().unwrap();
        rig.gives(&[&one, &one]);
        assert_eq!(rig.requests.config_changed(LONG), ConfigNotice::NoChannel, "two descriptors");
        rig.requests.end();
        assert!(!rig.requests.is_connected());
    }

    #[test]
    fn a_change_before_the_start_is_sent_again() {
        let (mut rig, mut channel) = Rig::with_channel(CONFIG | BACKEND_REQ);
        rig.says(&frame(GET_CONFIG, &[0; 12]));
        rig.says(&frame(SET_VRING_ENABLE, &[0; 8]));
        assert_eq!(rig.requests.config_changed(LONG), ConfigNotice::Sent);
        told(&mut channel);
        // The frontend starts its device without GET_CONFIG.
        rig.says(&frame(SET_VRING_ENABLE, &[0; 8]));
        told(&mut channel);
        rig.says(&frame(GET_CONFIG, &[0; 12]));
        rig.says(&frame(SET_VRING_ENABLE, &[0; 8]));
        channel.set_nonblocking(true).unwrap();
        assert!(channel.read(&mut [0; 1]).is_err(), "it knows");
    }
}
