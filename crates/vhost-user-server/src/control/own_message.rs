//! Messages that the `vhost` crate does not read.
//!
//! User-Mode Linux sends its table of one region with room for two. libvhost-user goes by the number of regions; the
//! crate refuses such a message. The crate does not know GET_VRING_BASE_SKIP_DRAIN.

use std::fs::File;
use std::io::{self, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use vhost::vhost_user::message::{MAX_ATTACHED_FD_ENTRIES, VhostUserMemoryRegion, VhostUserVringState};
use vhost::vhost_user::{Error, Result};

use crate::backend_channel::{HEADER, LONGEST_TABLE, NEED_REPLY, REPLY, TABLE_HEADER, TABLE_REGION, VERSION, word};

/// A message as it was received.
pub(super) struct OwnMessage {
    bytes: [u8; LONGEST_TABLE],
    len: usize,
    files: Vec<File>,
}

impl OwnMessage {
    /// Reads the message, which was peeked at: it is whole, and its length is in bounds.
    ///
    /// # Errors
    /// When it does not arrive.
    pub(super) fn receive(stream: &UnixStream) -> Result<OwnMessage> {
        let mut message = OwnMessage { bytes: [0; LONGEST_TABLE], len: HEADER, files: Vec::new() };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        // Not beyond the header, with which the descriptors come: the next message may have arrived, too.
        let mut header = [IoSliceMut::new(&mut message.bytes[..HEADER])];
        let first = recvmsg(stream, &mut header, &mut control, RecvFlags::CMSG_CLOEXEC);
        let first = first.map_err(|error| Error::SocketError(error.into()))?.bytes;
        for ancillary in control.drain() {
            if let RecvAncillaryMessage::ScmRights(found) = ancillary {
                message.files.extend(found.map(File::from));
            }
        }
        (&mut &*stream).read_exact(&mut message.bytes[first..HEADER]).map_err(read_error)?;
        message.len = (HEADER + message.word(8) as usize).min(LONGEST_TABLE);
        (&mut &*stream).read_exact(&mut message.bytes[HEADER..message.len]).map_err(read_error)?;
        Ok(message)
    }

    /// Returns the number at `at`, which lies in the message.
    fn word(&self, at: usize) -> u32 {
        word(&self.bytes, at).unwrap_or(0)
    }

    /// Returns the index of the queue that it names.
    pub(super) fn queue(&self) -> u32 {
        self.word(HEADER)
    }

    /// Takes the regions of a table, each with its file.
    ///
    /// # Errors
    /// When a region is missing or invalid, or has no descriptor.
    pub(super) fn take(&mut self) -> Result<(Vec<VhostUserMemoryRegion>, Vec<File>)> {
        let (_, places) = self.bytes[HEADER..self.len].split_at_checked(TABLE_HEADER).ok_or(Error::InvalidMessage)?;
        let count = self.word(HEADER) as usize;
        let half = |place: &[u8], at: usize| word(place, at).map_or(0, u64::from);
        let number = |place: &[u8], at: usize| half(place, at) | half(place, at + 4) << 32;
        let region = |place: &[u8]| {
            let [guest, size, user, offset] = [0, 8, 16, 24].map(|at| number(place, at));
            let is_valid = size != 0 && [guest, user, offset].iter().all(|start| start.checked_add(size).is_some());
            is_valid.then(|| VhostUserMemoryRegion::new(guest, size, user, offset)).ok_or(Error::InvalidMessage)
        };
        let regions = places.chunks_exact(TABLE_REGION).take(count).map(region).collect::<Result<Vec<_>>>()?;
        match (regions.len(), self.files.len()) == (count, count) {
            true => Ok((regions, std::mem::take(&mut self.files))),
            false => Err(Error::InvalidMessage),
        }
    }

    /// Acknowledges the message if the frontend wants it.
    ///
    /// # Errors
    /// When the frontend does not take it.
    pub(super) fn acknowledge(&self, stream: &UnixStream, good: bool) -> Result<()> {
        if self.word(4) & NEED_REPLY == 0 { Ok(()) } else { self.reply(stream, [u32::from(!good), 0]) }
    }

    /// Replies with a queue's position.
    ///
    /// # Errors
    /// When the frontend does not take it.
    pub(super) fn reply_state(&self, stream: &UnixStream, state: VhostUserVringState) -> Result<()> {
        self.reply(stream, [state.index, state.num])
    }

    fn reply(&self, stream: &UnixStream, payload: [u32; 2]) -> Result<()> {
        let words = [self.word(0), VERSION | REPLY, 8, payload[0], payload[1]];
        let reply: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let sent = send(stream, &reply, SendFlags::NOSIGNAL).map_err(|error| Error::SocketError(error.into()))?;
        if sent == reply.len() { Ok(()) } else { Err(Error::PartialMessage) }
    }
}

fn read_error(error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::UnexpectedEof { Error::Disconnected } else { Error::SocketError(error) }
}
