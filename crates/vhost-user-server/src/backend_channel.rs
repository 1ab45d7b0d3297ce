//! Messages from the backend to the frontend over the socket of SET_BACKEND_REQ_FD: CONFIG_CHANGE_MSG.
//!
//! The `vhost` crate hides that socket and does not implement this message. [`BackendChannel::peek_message`] therefore
//! peeks at each message (MSG_PEEK) before the crate reads it, and duplicates the descriptor.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mqblk_core::lock::{LockRank, RankedMutex, assert_may_wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recv, recvmsg, send};
use vhost::vhost_user::message::MAX_ATTACHED_FD_ENTRIES;

/// Bytes of a message header: request, flags, payload size; each a u32 in host byte order.
pub(crate) const HEADER: usize = 12;
/// Bytes of a table of memory regions: before the first one, and of each. Source: QEMU's vhost-user.rst, "Memory
/// regions description".
pub(crate) const TABLE_HEADER: usize = 8;
pub(crate) const TABLE_REGION: usize = 32;
/// Most bytes of a message with such a table.
pub(crate) const LONGEST_TABLE: usize = HEADER + TABLE_HEADER + MAX_ATTACHED_FD_ENTRIES * TABLE_REGION;
/// Messages from the frontend. Source: QEMU's vhost-user.rst, "Front-end message types".
pub(crate) const GET_FEATURES: u32 = 1;
pub(crate) const SET_FEATURES: u32 = 2;
pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
pub(crate) const CHECK_DEVICE_STATE: u32 = 43;
const GET_VRING_BASE_SKIP_DRAIN: u32 = 45;
/// Message from the backend. Source: the same, "Back-end message types".
const CONFIG_CHANGE: u32 = 2;
/// Header flags: version 1, reply, reply wanted.
pub(crate) const VERSION: u32 = 1;
pub(crate) const REPLY: u32 = 1 << 2;
pub(crate) const NEED_REPLY: u32 = 1 << 3;
const VERSION_NEED_REPLY: u32 = VERSION | NEED_REPLY;
/// Protocol feature bits.
const REPLY_ACK: u64 = 1 << 3;
const BACKEND_REQ: u64 = 1 << 5;
const CONFIG: u64 = 1 << 9;

/// Result of notifying the frontend of a configuration change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigChangeResult {
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
    NoReply,
}

/// The result of a peek at a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeekedMessage {
    /// The request number; `None` if the header was not complete.
    pub(crate) request: Option<u32>,
    /// True if it has more descriptors than any message may have.
    pub(crate) has_too_many_descriptors: bool,
    /// Set for a message that the `vhost` crate does not read.
    pub(crate) own: Option<OwnRequest>,
}

/// A message that the `vhost` crate does not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnRequest {
    /// A SET_MEM_TABLE that is longer than its regions.
    LongTable,
    /// GET_VRING_BASE_SKIP_DRAIN.
    SkipDrain,
}

#[derive(Default)]
struct ChannelState {
    connected: bool,
    protocol_features: u64,
    socket: Option<Arc<OwnedFd>>,
    /// True if the configuration has changed since the frontend's last GET_CONFIG.
    config_stale: bool,
}

/// See [`connection_changes`].
static CONNECTION_CHANGES: AtomicU64 = AtomicU64::new(0);

/// Returns a number that changes with each connect or disconnect of a frontend of any device of the process.
pub fn connection_changes() -> u64 {
    CONNECTION_CHANGES.load(Ordering::SeqCst)
}

/// Returns the kind of a message, of which these are the first bytes, if the `vhost` crate does not read it and the
/// whole message is there: nobody waits for the rest.
fn own_request(stream: BorrowedFd<'_>, bytes: &[u8]) -> Option<OwnRequest> {
    let words = [0, 4, 8, HEADER, HEADER + 4].map(|at| word(bytes, at));
    let [Some(request), Some(VERSION | VERSION_NEED_REPLY), Some(size), Some(first), Some(second)] = words else {
        return None;
    };
    let least = |regions: usize| (TABLE_HEADER + regions * TABLE_REGION) as u32;
    let kind = match (request, second) {
        (GET_VRING_BASE_SKIP_DRAIN, _) if size == 8 => OwnRequest::SkipDrain,
        (SET_MEM_TABLE, 0)
            if (1..=MAX_ATTACHED_FD_ENTRIES as u32).contains(&first)
                && size > least(first as usize)
                && size <= least(MAX_ATTACHED_FD_ENTRIES) =>
        {
            OwnRequest::LongTable
        }
        _ => return None,
    };
    let mut whole = [0; LONGEST_TABLE];
    let there = recv(stream, &mut whole, RecvFlags::PEEK | RecvFlags::DONTWAIT).map_or(0, |(_, bytes)| bytes);
    (there >= HEADER + size as usize).then_some(kind)
}

/// The channel from a device to its current frontend.
pub(crate) struct BackendChannel {
    state: RankedMutex<ChannelState>,
    /// Held during an exchange: a reply does not name its request.
    exchange: RankedMutex<()>,
}

impl Default for BackendChannel {
    fn default() -> BackendChannel {
        let exchange = RankedMutex::new(LockRank::FrontendExchange, ());
        BackendChannel { state: RankedMutex::leaf(ChannelState::default()), exchange }
    }
}

impl BackendChannel {
    /// Starts over for a new connection.
    pub(crate) fn on_connect(&self) {
        self.set(ChannelState { connected: true, ..ChannelState::default() });
    }

    fn set(&self, state: ChannelState) {
        *self.state.lock() = state;
        CONNECTION_CHANGES.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the state for [`restore`](Self::restore): the negotiated protocol features, the socket, and true if the
    /// frontend has not read the last configuration.
    pub(crate) fn saved(&self) -> (u64, Option<Arc<OwnedFd>>, bool) {
        let ChannelState { protocol_features, socket, config_stale, .. } = &*self.state.lock();
        (*protocol_features, socket.clone(), *config_stale)
    }

    /// Continues with the channel of another process.
    pub(crate) fn restore(&self, protocol_features: u64, socket: Option<OwnedFd>, config_stale: bool) {
        let socket = socket.map(Arc::new);
        self.set(ChannelState { connected: true, protocol_features, socket, config_stale });
    }

    /// Drops the socket: the frontend has disconnected.
    pub(crate) fn on_disconnect(&self) {
        self.set(ChannelState::default());
    }

    /// Waits for the connection's next message, and peeks at it.
    ///
    /// A header that arrives in parts may be peeked at too early: then the number is missing and the socket is not
    /// seen.
    pub(crate) fn peek_message(&self, stream: impl AsFd) -> PeekedMessage {
        let mut bytes = [0; HEADER + 8];
        // Without space for descriptors: the flags say if there are any.
        let peeked = rustix::io::retry_on_intr(|| {
            let parts = &mut [IoSliceMut::new(&mut bytes)];
            recvmsg(&stream, parts, &mut RecvAncillaryBuffer::default(), RecvFlags::PEEK)
        });
        let Ok(peeked) = peeked else { return PeekedMessage::default() };
        let has_descriptors = peeked.flags.contains(ReturnFlags::CTRUNC);
        let request = self.note_message(stream.as_fd(), &bytes[..peeked.bytes]);
        let has_too_many_descriptors = has_descriptors && has_too_many_descriptors(stream.as_fd());
        let own = own_request(stream.as_fd(), &bytes[..peeked.bytes]);
        PeekedMessage { request, has_too_many_descriptors, own }
    }

    /// Returns true if the frontend has negotiated REPLY_ACK.
    pub(crate) fn has_reply_ack(&self) -> bool {
        self.state.lock().protocol_features & REPLY_ACK != 0
    }

    /// Records the message's effect on this channel. Returns its request number.
    fn note_message(&self, stream: BorrowedFd<'_>, bytes: &[u8]) -> Option<u32> {
        let request = word(bytes, 0)?;
        match request {
            SET_PROTOCOL_FEATURES => {
                if let Some([low, high]) = word(bytes, HEADER).zip(word(bytes, HEADER + 4)).map(<[u32; 2]>::from) {
                    self.state.lock().protocol_features = u64::from(low) | u64::from(high) << 32;
                }
            }
            SET_BACKEND_REQ_FD => {
                let socket = peek_descriptor(stream).map(Arc::new);
                self.state.lock().socket = socket;
            }
            GET_CONFIG => self.state.lock().config_stale = false,
            SET_VRING_ENABLE => self.resend_config_change(),
            _ => {}
        }
        Some(request)
    }

    /// Sends the message again when the device starts: QEMU ignores it before, and does not read the configuration
    /// again by itself.
    fn resend_config_change(&self) {
        let connection = self.state.lock();
        if connection.config_stale
            && let Some(socket) = usable_socket(&connection)
        {
            let _ = send(&*socket, &config_change_message(0), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Returns true if a frontend is connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.state.lock().connected
    }

    /// Sends CONFIG_CHANGE_MSG and waits at most `timeout` for the reply. Holds no lock that the control thread needs:
    /// the frontend sends GET_CONFIG before it replies.
    pub(crate) fn config_changed(&self, timeout: Duration) -> ConfigChangeResult {
        let until = Instant::now() + timeout;
        assert_may_wait("a frontend's reply");
        let _exchange = self.exchange.lock();
        let (socket, replies) = {
            let mut connection = self.state.lock();
            if !connection.connected {
                return ConfigChangeResult::NotConnected;
            }
            connection.config_stale = true;
            let Some(socket) = usable_socket(&connection) else { return ConfigChangeResult::NoChannel };
            (socket, connection.protocol_features & REPLY_ACK != 0)
        };
        // Drops late replies to earlier messages.
        while let Ok((_, 1..)) = recv(&*socket, &mut [0; 64][..], RecvFlags::DONTWAIT) {}
        let message = config_change_message(if replies { NEED_REPLY } else { 0 });
        match send(&*socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(HEADER) if replies => wait_reply(&socket, until),
            Ok(HEADER) => ConfigChangeResult::Sent,
            _ => ConfigChangeResult::NoReply,
        }
    }
}

/// Returns the socket if the frontend negotiated BACKEND_REQ and CONFIG.
fn usable_socket(connection: &ChannelState) -> Option<Arc<OwnedFd>> {
    let agreed = connection.protocol_features & (BACKEND_REQ | CONFIG) == BACKEND_REQ | CONFIG;
    connection.socket.clone().filter(|_| agreed)
}

/// Returns a frontend's message, with a payload of a u64 or none.
pub(crate) fn message_of_frontend(request: u32, payload: Option<u64>) -> Vec<u8> {
    let header = [request, VERSION, if payload.is_some() { 8 } else { 0 }];
    let payload = payload.into_iter().flat_map(u64::to_ne_bytes);
    header.into_iter().flat_map(u32::to_ne_bytes).chain(payload).collect()
}

fn config_change_message(flags: u32) -> [u8; HEADER] {
    let mut message = [0; HEADER];
    message[..4].copy_from_slice(&CONFIG_CHANGE.to_ne_bytes());
    message[4..8].copy_from_slice(&(VERSION | flags).to_ne_bytes());
    message
}

/// Waits for the reply: a header and a u64, 0 for success.
fn wait_reply(socket: &OwnedFd, until: Instant) -> ConfigChangeResult {
    let mut bytes = [0; HEADER + 8];
    let mut found = 0;
    while found < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return ConfigChangeResult::NoReply,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return ConfigChangeResult::NoReply,
        }
        match recv(socket, &mut bytes[found..], RecvFlags::DONTWAIT) {
            Ok((more @ 1.., _)) => found += more,
            Err(Errno::AGAIN) if Instant::now() < until => {}
            _ => return ConfigChangeResult::NoReply,
        }
    }
    let is_reply = word(&bytes, 0) == Some(CONFIG_CHANGE) && word(&bytes, 4).is_some_and(|flags| flags & REPLY != 0);
    match bytes[HEADER..].iter().all(|byte| *byte == 0) {
        true if is_reply => ConfigChangeResult::Acknowledged,
        false if is_reply => ConfigChangeResult::Refused,
        _ => ConfigChangeResult::NoReply,
    }
}

/// Returns true if the next message has more descriptors than the `vhost` crate accepts. It would read the header, drop
/// it and all descriptors without an error, and take the payload for the next header.
fn has_too_many_descriptors(stream: BorrowedFd<'_>) -> bool {
    peek_descriptors(stream).is_none_or(|found| found.len() > MAX_ATTACHED_FD_ENTRIES)
}

/// Duplicates the one descriptor of the next message. `None` if the message has none, or several.
fn peek_descriptor(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    let mut found = peek_descriptors(stream)?;
    if found.len() == 1 { found.pop() } else { None }
}

/// Duplicates the descriptors of the next message. `None` if they are more than any message may have.
fn peek_descriptors(stream: BorrowedFd<'_>) -> Option<Vec<OwnedFd>> {
    let mut header = [0; HEADER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let Ok(peeked) = recvmsg(stream, &mut [IoSliceMut::new(&mut header)], &mut control, flags) else {
        return Some(Vec::new());
    };
    let mut found = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            found.extend(descriptors);
        }
    }
    (!peeked.flags.contains(ReturnFlags::CTRUNC)).then_some(found)
}

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
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
    struct ChannelFixture {
        requests: BackendChannel,
        ours: UnixStream,
        theirs: UnixStream,
    }

    impl ChannelFixture {
        fn new() -> ChannelFixture {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let rig = ChannelFixture { requests: BackendChannel::default(), ours, theirs };
            assert_eq!(rig.requests.config_changed(LONG), ConfigChangeResult::NotConnected);
            rig.requests.on_connect();
            assert_eq!(rig.requests.config_changed(LONG), ConfigChangeResult::NoChannel);
            rig
        }

        /// Sends a message from the frontend; the control thread peeks at it and then reads it.
        fn send(&mut self, frame: &[u8]) {
            self.theirs.write_all(frame).unwrap();
            self.requests.peek_message(&self.ours);
            let mut read = vec![0; frame.len()];
            self.ours.read_exact(&mut read).unwrap();
            assert_eq!(read, frame);
        }

        fn negotiate(&mut self, features: u64) {
            self.send(&frame(SET_PROTOCOL_FEATURES, &features.to_ne_bytes()));
        }

        fn send_descriptors(&mut self, sockets: &[&UnixStream]) {
            let descriptors: Vec<_> = sockets.iter().map(|socket| socket.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            let frame = frame(SET_BACKEND_REQ_FD, &[]);
            sendmsg(&self.theirs, &[IoSlice::new(&frame)], &mut control, SendFlags::empty()).unwrap();
            self.requests.peek_message(&self.ours);
            // The message and its descriptors are still in the socket.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut read = vec![0; frame.len()];
            recvmsg(&self.ours, &mut [IoSliceMut::new(&mut read)], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            let descriptors = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(found) => Some(found.count()),
                _ => None,
            });
            assert_eq!((read, descriptors.sum::<usize>()), (frame, sockets.len()));
        }

        fn with_channel(agreed: u64) -> (ChannelFixture, UnixStream) {
            let mut rig = ChannelFixture::new();
            rig.negotiate(agreed);
            let (sent, kept) = UnixStream::pair().unwrap();
            rig.send_descriptors(&[&sent]);
            drop(sent);
            (rig, kept)
        }
    }

    fn read_config_change(channel: &mut UnixStream) -> u32 {
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
    fn more_descriptors_than_any_message_has_are_seen() {
        for (count, too_many) in [(0, false), (1, false), (32, false), (33, true), (34, true), (35, true), (200, true)]
        {
            let rig = ChannelFixture::new();
            let descriptors = vec![rig.theirs.as_fd(); count];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(count == 0 || control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            let frame = frame(GET_CONFIG, &[]);
            sendmsg(&rig.theirs, &[IoSlice::new(&frame)], &mut control, SendFlags::empty()).unwrap();
            let peeked = rig.requests.peek_message(&rig.ours);
            let expected = PeekedMessage {
                request: Some(GET_CONFIG),
                has_too_many_descriptors: too_many,
                ..PeekedMessage::default()
            };
            assert_eq!(peeked, expected, "{count} descriptors");
        }
    }

    #[test]
    fn a_frontend_is_notified_and_replies() {
        let (rig, mut channel) = ChannelFixture::with_channel(ALL);
        for (status, want) in [(0, ConfigChangeResult::Acknowledged), (1, ConfigChangeResult::Refused)] {
            std::thread::scope(|scope| {
                let exchange = scope.spawn(|| rig.requests.config_changed(LONG));
                assert_eq!(read_config_change(&mut channel), VERSION | NEED_REPLY);
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
        let (rig, mut channel) = ChannelFixture::with_channel(ALL);
        assert_eq!(rig.requests.config_changed(SHORT), ConfigChangeResult::NoReply);
        // A late reply is not taken for the reply to the next message.
        read_config_change(&mut channel);
        channel.write_all(&reply(0)).unwrap();
        assert_eq!(rig.requests.config_changed(SHORT), ConfigChangeResult::NoReply);
        // A full socket buffer does not block the sender.
        fill(&rig);
        assert_eq!(rig.requests.config_changed(LONG), ConfigChangeResult::NoReply);
        drop(channel);
        assert_eq!(rig.requests.config_changed(LONG), ConfigChangeResult::NoReply, "it has closed its end");
    }

    fn fill(rig: &ChannelFixture) {
        let connection = rig.requests.state.lock();
        let socket = connection.socket.as_ref().unwrap();
        while send(&**socket, &config_change_message(0), SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok() {}
    }

    #[test]
    fn without_the_features_nothing_is_sent() {
        for (agreed, want) in [
            (CONFIG, ConfigChangeResult::NoChannel),
            (BACKEND_REQ, ConfigChangeResult::NoChannel),
            (CONFIG | BACKEND_REQ, ConfigChangeResult::Sent),
        ] {
            let (rig, mut channel) = ChannelFixture::with_channel(agreed);
            assert_eq!(rig.requests.config_changed(LONG), want);
            drop(rig);
            let mut sent = Vec::new();
            channel.read_to_end(&mut sent).unwrap();
            assert_eq!(sent.len(), if want == ConfigChangeResult::Sent { HEADER } else { 0 });
        }
        let mut rig = ChannelFixture::new();
        rig.negotiate(ALL);
        let (one, _one) = UnixStream::pair().unwrap();
        rig.send_descriptors(&[&one, &one]);
        assert_eq!(rig.requests.config_changed(LONG), ConfigChangeResult::NoChannel, "two descriptors");
        rig.requests.on_disconnect();
        assert!(!rig.requests.is_connected());
    }

    #[test]
    fn a_change_before_the_start_is_sent_again() {
        let (mut rig, mut channel) = ChannelFixture::with_channel(CONFIG | BACKEND_REQ);
        rig.send(&frame(GET_CONFIG, &[0; 12]));
        rig.send(&frame(SET_VRING_ENABLE, &[0; 8]));
        assert_eq!(rig.requests.config_changed(LONG), ConfigChangeResult::Sent);
        read_config_change(&mut channel);
        // The frontend starts its device without GET_CONFIG.
        rig.send(&frame(SET_VRING_ENABLE, &[0; 8]));
        read_config_change(&mut channel);
        rig.send(&frame(GET_CONFIG, &[0; 12]));
        rig.send(&frame(SET_VRING_ENABLE, &[0; 8]));
        channel.set_nonblocking(true).unwrap();
        assert!(channel.read(&mut [0; 1]).is_err(), "it knows");
    }
}
