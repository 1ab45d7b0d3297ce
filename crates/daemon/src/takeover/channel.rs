//! Messages with descriptors over a socket of sequential packets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::{Message, TakeoverError};

/// Bytes of a packet, and maximum number of its descriptors: SCM_MAX_FD of Linux' `net/scm.h` is 253.
const PACKET: usize = 32 << 10;
const DESCRIPTORS: usize = 250;
/// Maximum bytes and descriptors of a message: thousands of disks, or a device of 256 queues with 512 memory slots.
const MAX_BYTES: usize = 16 << 20;
const MAX_DESCRIPTORS: usize = 32 << 10;
/// The first packet: the number of bytes and of descriptors.
const HEADER: usize = 16;

/// One end of the connection between both processes.
pub(super) struct Channel(OwnedFd);

impl Channel {
    /// Makes both ends.
    pub(super) fn pair() -> io::Result<(Channel, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Channel(ours), theirs))
    }

    /// Takes the end that came with a request.
    ///
    /// # Errors
    /// If it is another kind of descriptor.
    pub(super) fn of(descriptor: OwnedFd) -> io::Result<Channel> {
        match rustix::net::sockopt::socket_type(&descriptor)? {
            SocketType::SEQPACKET => Ok(Channel(descriptor)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "no socket of sequential packets")),
        }
    }

    /// Sends a message. `timeout` bounds each packet.
    pub(super) fn send(
        &self,
        message: &Message,
        descriptors: &[OwnedFd],
        timeout: Duration,
    ) -> Result<(), TakeoverError> {
        set_socket_timeout(&self.0, Timeout::Send, Some(timeout)).map_err(io::Error::from)?;
        let text = serde_json::to_vec(message).map_err(io::Error::from)?;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&(text.len() as u64).to_ne_bytes());
        header[8..].copy_from_slice(&(descriptors.len() as u64).to_ne_bytes());
        self.send_packet(&header, &[])?;
        for packet in text.chunks(PACKET) {
            self.send_packet(packet, &[])?;
        }
        for some in descriptors.chunks(DESCRIPTORS) {
            let some: Vec<BorrowedFd<'_>> = some.iter().map(|descriptor| descriptor.as_fd()).collect();
            self.send_packet(&[0], &some)?;
        }
        Ok(())
    }

    fn send_packet(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        loop {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) if sent == bytes.len() => return Ok(()),
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until a message begins to arrive, or the other end is closed. Returns false after `timeout`.
    pub(super) fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        let mut ready = [PollFd::new(&self.0, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        match poll(&mut ready, timeout.as_ref()) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Receives a message. `timeout` bounds each packet.
    ///
    /// # Errors
    /// Also if the message is [`Message::Failed`].
    pub(super) fn receive(&self, timeout: Duration) -> Result<(Message, Vec<OwnedFd>), TakeoverError> {
        set_socket_timeout(&self.0, Timeout::Recv, Some(timeout)).map_err(io::Error::from)?;
        let (header, _) = self.receive_packet(0)?;
        let number =
            |at: usize| header.get(at..at + 8).and_then(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?)));
        let (bytes, count) = match (number(0), number(8)) {
            (Some(bytes), Some(count)) if bytes <= MAX_BYTES as u64 && count <= MAX_DESCRIPTORS as u64 => {
                (bytes as usize, count as usize)
            }
            _ => return Err(TakeoverError::unexpected("a packet that begins no message", "another mqblk")),
        };
        let mut text = Vec::with_capacity(bytes);
        while text.len() < bytes {
            text.extend(self.receive_packet(0)?.0);
        }
        let mut descriptors = Vec::new();
        for _ in 0..count.div_ceil(DESCRIPTORS) {
            descriptors.extend(self.receive_packet(DESCRIPTORS)?.1);
        }
        let few = (descriptors.len() < count).then(|| format!("{} descriptors", descriptors.len()));
        match serde_json::from_slice(&text) {
            Ok(Message::Failed { why }) => Err(TakeoverError::Refused(why)),
            // A message of one device: only that device cannot be prepared then.
            Ok(message @ Message::Connection { .. }) if few.is_some() => Ok((message, Vec::new())),
            _ if few.is_some() => Err(TakeoverError::unexpected(
                few.unwrap_or_default(),
                format!("{count}: is the limit of open files (LimitNOFILE=) high enough?"),
            )),
            Ok(message) => Ok((message, descriptors)),
            Err(error) => Err(TakeoverError::unexpected(format!("a message that is none ({error})"), "another mqblk")),
        }
    }

    /// Waits until the other process has closed its end, and ignores its messages. Returns false after `timeout`.
    pub(super) fn wait_closed(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if set_socket_timeout(&self.0, Timeout::Recv, Some(left)).is_err() {
                return false;
            }
            match self.receive_packet(DESCRIPTORS) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return false,
                Err(_) => return true,
            }
        }
        false
    }

    fn receive_packet(&self, descriptors: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut bytes = vec![0; PACKET];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let space = if descriptors == 0 { &mut space[..0] } else { &mut space[..] };
        let mut control = RecvAncillaryBuffer::new(space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let received = loop {
            match recvmsg(&self.0, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                result => break result?,
            }
        };
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut found = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                found.extend(descriptors);
            }
        }
        bytes.truncate(received.bytes);
        Ok((bytes, found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn long_messages_arrive_with_all_descriptors() {
        let (one, other) = Channel::pair().unwrap();
        let other = Channel::of(other).unwrap();
        let devices = vec!["a".repeat(100); 3000];
        let descriptors: Vec<OwnedFd> =
            (0..600).map(|_| rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap()).collect();
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                one.send(
                    &Message::StandsBy { devices: devices.clone(), sockets: Vec::new(), out: Vec::new() },
                    &descriptors,
                    LONG,
                )
            });
            let (message, received) = other.receive(LONG).unwrap();
            sending.join().unwrap().unwrap();
            let Message::StandsBy { devices: found, .. } = message else { panic!("another message") };
            assert_eq!((found == devices, received.len()), (true, 600));
            let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
            assert!(received.iter().map(inode).eq(descriptors.iter().map(inode)), "in order");
        });
        one.send(&Message::Failed { why: "a reason".to_owned() }, &[], LONG).unwrap();
        assert_eq!(other.receive(LONG).err().unwrap().to_string(), "takeover: the other process: a reason");
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let (one, other) = Channel::pair().unwrap();
        let other = Channel::of(other).unwrap();
        let header = |bytes: u64, descriptors: u64| [bytes.to_ne_bytes(), descriptors.to_ne_bytes()].concat();
        for (packets, want) in [
            (vec![b"x".to_vec()], "a packet that begins no message"),
            (vec![header(u64::MAX, 0)], "a packet that begins no message"),
            (vec![header(2, u64::MAX)], "a packet that begins no message"),
            (vec![header(2, 0), b"{}".to_vec()], "missing field `message`"),
            (vec![header(2, 1), b"{}".to_vec(), b"x".to_vec()], "0 descriptors"),
        ] {
            packets.iter().for_each(|packet| one.send_packet(packet, &[]).unwrap());
            let error = other.receive(LONG).err().unwrap().to_string();
            assert!(error.contains(want), "{error}");
        }
        let silent = other.receive(Duration::from_millis(1)).err().unwrap();
        assert!(matches!(silent, TakeoverError::Io(error) if error.kind() == io::ErrorKind::TimedOut));
        drop(one);
        let gone = other.receive(LONG).err().unwrap();
        assert!(matches!(gone, TakeoverError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof));
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Channel::of(stream.into()).is_err());
    }
}
