//! Messages of our own to the front-end, on the backend request socket: that the configuration has changed.
//!
//! The `vhost` crate keeps that socket to itself and has no such message, so it is looked for in the connection before the crate reads
//! it: a peek leaves the message, and its descriptors, where they are.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};

/// Bytes of a message's header: request, flags, size of what follows; u32 each, in the host's order.
const HEADER: usize = 12;
/// Messages of the front-end. Source: QEMU's vhost-user.rst, "Front-end message types".
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
pub(crate) const CHECK_DEVICE_STATE: u32 = 43;
/// The message of ours. Source: the same, "Back-end message types".
const CONFIG_CHANGE: u32 = 2;
/// Bits of the flags: version 1, an answer, and that one is wanted.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Protocol features by bit.
const REPLY_ACK: u64 = 1 << 3;
const BACKEND_REQ: u64 = 1 << 5;
const CONFIG: u64 = 1 << 9;

/// What became of the news that the configuration has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigNotice {
    /// No front-end is connected: the next one reads the configuration as it is.
    NotConnected,
    /// The front-end has no backend request socket (BACKEND_REQ), or no configuration of ours (CONFIG): it reads the configuration
    /// when it connects again.
    NoChannel,
    /// It was sent. The front-end does not answer such messages (REPLY_ACK).
    Sent,
    /// It was sent, and the front-end answered that it is done.
    Acknowledged,
    /// It was sent, and the front-end answered that it could not.
    Refused,
    /// The front-end does not take it, or does not answer in time.
    Unanswered,
}

#[derive(Default)]
struct Connection {
    connected: bool,
    agreed: u64,
    socket: Option<Arc<OwnedFd>>,
    /// The configuration has changed since the front-end has read it.
    unread: bool,
}

/// The way to the front-end of a device, whoever that is.
#[derive(Default)]
pub(crate) struct Requests {
    connection: Mutex<Connection>,
    /// Held by whoever waits for an answer: answers carry no name.
    asking: Mutex<()>,
}

impl Requests {
    /// A front-end has connected.
    pub(crate) fn begin(&self) {
        *lock(&self.connection) = Connection { connected: true, ..Connection::default() };
    }

    /// It has left.
    pub(crate) fn end(&self) {
        *lock(&self.connection) = Connection::default();
    }

    /// Looks at the next message of the connection, waiting for it, and leaves it there. Gives its number.
    ///
    /// A front-end that sends a header in pieces is looked at too soon: it has no socket then, nor a number.
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

    /// QEMU ignores a change until its device is started, and does not read the configuration again by itself then.
    fn remind(&self) {
        let connection = lock(&self.connection);
        if connection.unread
            && let Some(socket) = usable(&connection)
        {
            let _ = send(&*socket, &message(0), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Whether a front-end is connected.
    pub(crate) fn is_connected(&self) -> bool {
        lock(&self.connection).connected
    }

    /// Tells the front-end that the configuration has changed, and waits at most `patience` for its answer. Nothing that its control
    /// thread needs is held meanwhile: the front-end reads the configuration before it answers.
    pub(crate) fn config_changed(&self, patience: Duration) -> ConfigNotice {
        let until = Instant::now() + patience;
        let _alone = lock(&self.asking);
        let (socket, answers) = {
            let mut connection = lock(&self.connection);
            if !connection.connected {
                return ConfigNotice::NotConnected;
            }
            connection.unread = true;
            let Some(socket) = usable(&connection) else { return ConfigNotice::NoChannel };
            (socket, connection.agreed & REPLY_ACK != 0)
        };
        // Answers that came too late for whoever asked before.
        while let Ok((_, 1..)) = recv(&*socket, &mut [0; 64][..], RecvFlags::DONTWAIT) {}
        let message = message(if answers { NEED_REPLY } else { 0 });
        match send(&*socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(HEADER) if answers => answer(&socket, until),
            Ok(HEADER) => ConfigNotice::Sent,
            _ => ConfigNotice::Unanswered,
        }
    }
}

/// The socket, where the front-end agreed to what a change of the configuration needs.
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

/// Waits for the answer: a header and a number, 0 for success.
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

/// The one descriptor that comes with the next message, which keeps its own.
fn peek_descriptor(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    let mut header = [0; HEADER];
    // Room for more than one, to see that there are more.
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

    /// Only a test that fails takes it.
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);
    const ALL: u64 = CONFIG | BACKEND_REQ | REPLY_ACK;

    fn frame(request: u32, body: &[u8]) -> Vec<u8> {
        let words = [request, VERSION, body.len() as u32];
        words.iter().flat_map(|word| word.to_ne_bytes()).chain(body.iter().copied()).collect()
    }

    /// A connection, as the control thread sees it, and the front-end's end of it.
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

        /// The front-end sends it; the control thread looks ahead and then reads it whole.
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
            // It is all still there, the descriptors too.
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
            let (given, kept) = UnixStream::pair().unwrap();
            rig.gives(&[&given]);
            drop(given);
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
    fn a_front_end_is_told_and_answers() {
        let (rig, mut channel) = Rig::with_channel(ALL);
        for (answer, want) in [(0, ConfigNotice::Acknowledged), (1, ConfigNotice::Refused)] {
            std::thread::scope(|scope| {
                let asked = scope.spawn(|| rig.requests.config_changed(LONG));
                assert_eq!(told(&mut channel), VERSION | NEED_REPLY);
                // In two pieces.
                let (head, tail) = (&reply(answer)[..7], &reply(answer)[7..]);
                channel.write_all(head).unwrap();
                std::thread::sleep(SHORT);
                channel.write_all(tail).unwrap();
                assert_eq!(asked.join().unwrap(), want);
            });
        }
    }

    #[test]
    fn one_that_does_not_answer_is_not_waited_for_for_ever() {
        let (rig, mut channel) = Rig::with_channel(ALL);
        assert_eq!(rig.requests.config_changed(SHORT), ConfigNotice::Unanswered);
        // Its answer comes after all, and is not taken for that to the next message.
        told(&mut channel);
        channel.write_all(&reply(0)).unwrap();
        assert_eq!(rig.requests.config_changed(SHORT), ConfigNotice::Unanswered);
        // Nor does one hold up anybody that reads nothing until its buffer is full.
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
    fn a_change_before_the_start_is_told_again() {
        let (mut rig, mut channel) = Rig::with_channel(CONFIG | BACKEND_REQ);
        rig.says(&frame(GET_CONFIG, &[0; 12]));
        rig.says(&frame(SET_VRING_ENABLE, &[0; 8]));
        assert_eq!(rig.requests.config_changed(LONG), ConfigNotice::Sent);
        told(&mut channel);
        // It did not read the configuration, but started its device.
        rig.says(&frame(SET_VRING_ENABLE, &[0; 8]));
        told(&mut channel);
        rig.says(&frame(GET_CONFIG, &[0; 12]));
        rig.says(&frame(SET_VRING_ENABLE, &[0; 8]));
        channel.set_nonblocking(true).unwrap();
        assert!(channel.read(&mut [0; 1]).is_err(), "it knows");
    }
}
