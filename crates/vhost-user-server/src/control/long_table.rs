//! Tables of memory regions with room for more regions than they have.
//!
//! User-Mode Linux sends its table of one region with room for two. libvhost-user goes by the number of regions; the
//! `vhost` crate refuses such a message, so it is read here.

use std::fs::File;
use std::io::{self, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use vhost::vhost_user::message::{MAX_ATTACHED_FD_ENTRIES, VhostUserMemoryRegion};
use vhost::vhost_user::{Error, Result};

use crate::backend_channel::{HEADER, LONGEST_TABLE, NEED_REPLY, REPLY, TABLE_HEADER, TABLE_REGION, VERSION, word};

/// A table as it was received.
pub(super) struct LongTable {
    bytes: [u8; LONGEST_TABLE],
    len: usize,
    files: Vec<File>,
}

impl LongTable {
    /// Reads the message, which was peeked at: it is whole, and its length is in bounds.
    ///
    /// # Errors
    /// When it does not arrive.
    pub(super) fn receive(stream: &UnixStream) -> Result<LongTable> {
        let mut table = LongTable { bytes: [0; LONGEST_TABLE], len: HEADER, files: Vec::new() };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        // Not beyond the header, with which the descriptors come: the next message may have arrived, too.
        let mut header = [IoSliceMut::new(&mut table.bytes[..HEADER])];
        let first = recvmsg(stream, &mut header, &mut control, RecvFlags::CMSG_CLOEXEC);
        let first = first.map_err(|error| Error::SocketError(error.into()))?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(found) = message {
                table.files.extend(found.map(File::from));
            }
        }
        (&mut &*stream).read_exact(&mut table.bytes[first..HEADER]).map_err(read_error)?;
        table.len = (HEADER + table.word(8) as usize).min(LONGEST_TABLE);
        (&mut &*stream).read_exact(&mut table.bytes[HEADER..table.len]).map_err(read_error)?;
        Ok(table)
    }

    /// Returns the number at `at`, which lies in the message.
    fn word(&self, at: usize) -> u32 {
        word(&self.bytes, at).unwrap_or(0)
    }

    /// Takes the regions, each with its file.
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

    /// Replies if the frontend wants it. `good`: the table is in force.
    ///
    /// # Errors
    /// When the frontend does not take it.
    pub(super) fn reply(&self, stream: &UnixStream, good: bool) -> Result<()> {
        let [request, flags] = [0, 4].map(|at| self.word(at));
        if flags & NEED_REPLY == 0 {
            return Ok(());
        }
        let words = [request, VERSION | REPLY, 8, u32::from(!good), 0];
        let reply: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let sent = send(stream, &reply, SendFlags::NOSIGNAL).map_err(|error| Error::SocketError(error.into()))?;
        if sent == reply.len() { Ok(()) } else { Err(Error::PartialMessage) }
    }
}

fn read_error(error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::UnexpectedEof { Error::Disconnected } else { Error::SocketError(error) }
}
