//! The operations of channels and workers, as submission entries.

use std::os::fd::AsRawFd;

use io_uring::{opcode, squeue, types};
use mqblk_core::{ByteLen, ByteOffset};
use mqblk_memory::Buffer;

use crate::completion::{ClientId, IGNORED, Refused};
use crate::context::UringContext;
use crate::event::Kick;
use crate::pieces::{MAX_PIECES, fill_pieces};
use crate::tables::RingFile;

/// The file's end of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct FileTransfer<'a> {
    /// The file.
    pub file: &'a RingFile,
    /// Offset in the file of the buffer's first byte that is transferred.
    pub at: ByteOffset,
    /// Bytes at the start of the buffer that were transferred before.
    pub skip: u64,
    /// True if a kernel thread executes it from the start (`IOSQE_ASYNC`). Otherwise it starts within the submission,
    /// which may wait while the file system reads its own metadata.
    pub in_thread: bool,
}

impl UringContext {
    /// Reads into the buffer.
    ///
    /// # Errors
    /// [`Refused`] when the in-flight table is full.
    #[inline]
    pub fn read(
        &mut self,
        client: ClientId,
        cookie: u64,
        from: FileTransfer<'_>,
        buffer: Buffer,
    ) -> Result<(), Refused> {
        debug_assert!(self.buffers.will_be_logged(&buffer));
        self.transfer(client, cookie, from, buffer, Direction::Read)
    }

    /// Writes the buffer. With `durable` as with `RWF_DSYNC`.
    ///
    /// # Errors
    /// [`Refused`] when the in-flight table is full.
    #[inline]
    pub fn write(
        &mut self,
        client: ClientId,
        cookie: u64,
        to: FileTransfer<'_>,
        buffer: Buffer,
        durable: bool,
    ) -> Result<(), Refused> {
        self.transfer(client, cookie, to, buffer, Direction::Write { durable })
    }

    /// Makes written data durable (`fdatasync`).
    ///
    /// # Errors
    /// [`Refused`] when the in-flight table is full.
    pub fn datasync(&mut self, client: ClientId, cookie: u64, file: &RingFile) -> Result<(), Refused> {
        let flags = types::FsyncFlags::DATASYNC;
        let entry = match file {
            RingFile::Fixed(index) => opcode::Fsync::new(types::Fixed(*index)).flags(flags).build(),
            RingFile::Plain(fd) => opcode::Fsync::new(types::Fd(fd.as_raw_fd())).flags(flags).build(),
        };
        self.submit_without_buffer(client, cookie, file, entry)
    }

    /// Calls fallocate(2) with these mode bits.
    ///
    /// # Errors
    /// [`Refused`] when the in-flight table is full.
    pub fn fallocate(
        &mut self,
        client: ClientId,
        cookie: u64,
        file: &RingFile,
        mode: rustix::fs::FallocateFlags,
        at: ByteOffset,
        len: ByteLen,
    ) -> Result<(), Refused> {
        let mode = mode.bits() as i32;
        let entry = match file {
            RingFile::Fixed(i) => opcode::Fallocate::new(types::Fixed(*i), len.0).offset(at.0).mode(mode).build(),
            RingFile::Plain(fd) => {
                opcode::Fallocate::new(types::Fd(fd.as_raw_fd()), len.0).offset(at.0).mode(mode).build()
            }
        };
        self.submit_without_buffer(client, cookie, file, entry)
    }

    /// Polls `kick` (multishot): completes at each signal, and at once if it was signalled before. The descriptor is
    /// not read: each signal triggers the poll again. An eventfd's counter of 64 bits does not fill up; a
    /// descriptor that is not a counter must be read by its client, or no further signal arrives.
    ///
    /// # Errors
    /// [`Refused`] when the in-flight table is full.
    pub fn watch(&mut self, client: ClientId, cookie: u64, kick: impl Into<Kick>) -> Result<(), Refused> {
        let Some(index) = self.in_flight.take(client, cookie) else { return Err(Refused(None)) };
        let fd = kick.into().shared();
        let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).multi(true).build();
        self.in_flight.slot(index).file = Some(fd);
        self.push(entry, index);
        Ok(())
    }

    /// Cancels the client's operation with `cookie`. The operation completes in any case, perhaps with `-ECANCELED`.
    /// Does nothing without such an operation.
    pub fn cancel(&mut self, client: ClientId, cookie: u64) {
        if let Some(index) = self.in_flight.find(client, cookie) {
            let entry = opcode::AsyncCancel::new(u64::from(index)).build().user_data(IGNORED);
            self.push_raw(entry);
        }
    }

    /// Cancels all of the client's operations whose cookie is picked. Submitted with the next [`turn`](Self::turn).
    pub fn cancel_picked(&mut self, client: ClientId, pick: impl Fn(u64) -> bool) {
        for index in self.in_flight.pick(client, pick) {
            let entry = opcode::AsyncCancel::new(u64::from(index)).build().user_data(IGNORED);
            self.push_raw(entry);
        }
    }

    fn submit_without_buffer(
        &mut self,
        client: ClientId,
        cookie: u64,
        file: &RingFile,
        entry: squeue::Entry,
    ) -> Result<(), Refused> {
        let Some(index) = self.in_flight.take(client, cookie) else { return Err(Refused(None)) };
        self.in_flight.slot(index).file = file.keep();
        self.push(entry, index);
        Ok(())
    }

    #[inline]
    fn transfer(
        &mut self,
        client: ClientId,
        cookie: u64,
        FileTransfer { file, at, skip, in_thread }: FileTransfer<'_>,
        buffer: Buffer,
        direction: Direction,
    ) -> Result<(), Refused> {
        let Some(index) = self.in_flight.take(client, cookie) else { return Err(Refused(Some(buffer))) };
        let segments = self.buffers.segments(&buffer);
        let entry = match segments {
            [only] if skip == 0 => {
                let pointer = std::ptr::with_exposed_provenance_mut::<u8>(only.address() as usize);
                single(file, at, pointer, only.len(), only.fixed(), direction)
            }
            _ => {
                let pieces = &mut self.in_flight.pieces(index).iovecs;
                fill_pieces(pieces, segments, skip);
                vectored(file, at, pieces, direction)
            }
        };
        let slot = self.in_flight.slot(index);
        slot.buffer = Some(buffer);
        slot.file = file.keep();
        self.push(if in_thread { entry.flags(squeue::Flags::ASYNC) } else { entry }, index);
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write { durable: bool },
}

impl Direction {
    fn rw_flags(self) -> i32 {
        match self {
            Direction::Write { durable: true } => libc::RWF_DSYNC,
            _ => 0,
        }
    }
}

fn single(
    file: &RingFile,
    at: ByteOffset,
    pointer: *mut u8,
    len: u32,
    fixed: Option<u16>,
    direction: Direction,
) -> squeue::Entry {
    macro_rules! build {
        ($fd:expr) => {
            match (direction, fixed) {
                (Direction::Read, Some(index)) => opcode::ReadFixed::new($fd, pointer, len, index).offset(at.0).build(),
                (Direction::Read, None) => opcode::Read::new($fd, pointer, len).offset(at.0).build(),
                (Direction::Write { .. }, Some(index)) => {
                    let write = opcode::WriteFixed::new($fd, pointer, len, index);
                    write.offset(at.0).rw_flags(direction.rw_flags()).build()
                }
                (Direction::Write { .. }, None) => {
                    opcode::Write::new($fd, pointer, len).offset(at.0).rw_flags(direction.rw_flags()).build()
                }
            }
        };
    }
    match file {
        RingFile::Fixed(index) => build!(types::Fixed(*index)),
        RingFile::Plain(fd) => build!(types::Fd(fd.as_raw_fd())),
    }
}

fn vectored(file: &RingFile, at: ByteOffset, pieces: &[libc::iovec], direction: Direction) -> squeue::Entry {
    // A longer list would be refused; a short transfer is continued by the client.
    let (list, count) = (pieces.as_ptr(), pieces.len().min(MAX_PIECES) as u32);
    macro_rules! build {
        ($fd:expr) => {
            match direction {
                Direction::Read => opcode::Readv::new($fd, list, count).offset(at.0).build(),
                Direction::Write { .. } => {
                    opcode::Writev::new($fd, list, count).offset(at.0).rw_flags(direction.rw_flags()).build()
                }
            }
        };
    }
    match file {
        RingFile::Fixed(index) => build!(types::Fixed(*index)),
        RingFile::Plain(fd) => build!(types::Fd(fd.as_raw_fd())),
    }
}
