//! A file by plain system calls, made by threads of the disk's own (`aio=threads`).

use std::io;
use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{OpenFile, host};
use crate::blocking::BlockingStorage;

/// The calls to a file.
pub(super) struct FileCalls(pub(super) Arc<OpenFile>);

impl FileCalls {
    fn allocate(&self, mode: FallocateFlags, at: ByteOffset, len: ByteLen) -> rustix::io::Result<()> {
        rustix::fs::fallocate(&self.0.fd, mode | FallocateFlags::KEEP_SIZE, at.0, len.0)
    }
}

impl BlockingStorage for FileCalls {
    fn size(&self) -> io::Result<ByteLen> {
        Ok(host::size(&self.0.fd, self.0.kind)?)
    }

    fn read_at(&self, bytes: &mut [u8], at: ByteOffset) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pread(&self.0.fd, &mut bytes[done..], at.0 + done as u64) {
                // The file has shrunk.
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], at: ByteOffset) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(&self.0.fd, &bytes[done..], at.0 + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.0.fd)?)
    }

    fn discard(&self, at: ByteOffset, len: ByteLen) -> io::Result<()> {
        Ok(self.allocate(FallocateFlags::PUNCH_HOLE, at, len)?)
    }

    fn write_zeroes(&self, at: ByteOffset, len: ByteLen, may_unmap: bool) -> io::Result<()> {
        let punched =
            may_unmap && self.0.discard.is_some() && self.allocate(FallocateFlags::PUNCH_HOLE, at, len).is_ok();
        if punched || self.allocate(FallocateFlags::ZERO_RANGE, at, len).is_ok() {
            return Ok(());
        }
        #[repr(align(4096))]
        struct Zeroes([u8; 1 << 16]);
        static ZEROES: Zeroes = Zeroes([0; 1 << 16]);
        let mut done = 0;
        while done < len.0 {
            let run = (len.0 - done).min(ZEROES.0.len() as u64);
            self.write_at(&ZEROES.0[..run as usize], ByteOffset(at.0 + done))?;
            done += run;
        }
        Ok(())
    }
}
