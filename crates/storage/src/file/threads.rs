//! A file by plain system calls, made by the disk's own threads (`aio=threads`).

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use mqblk_core::{ByteLen, ByteOffset};
use mqblk_uring::discard_device;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::host;
use super::open_file::{FileKind, OpenFile};
use super::small_blocks::{Slice, SmallBlocks};
use crate::blocking::BlockingStorage;

/// The calls to a file.
pub(super) struct FileCalls {
    file: Arc<OpenFile>,
    /// For logical blocks smaller than the storage's units: shared by writes of whole units, exclusive for a write of
    /// a part.
    changes: RwLock<()>,
}

/// Alignment of a thread's memory for whole units.
const UNIT_ALIGN: usize = 4096;

impl FileCalls {
    pub(super) fn new(file: Arc<OpenFile>) -> FileCalls {
        FileCalls { file, changes: RwLock::new(()) }
    }

    /// Returns the file's units if a range has a part of one.
    fn cut_units(&self, at: ByteOffset, len: ByteLen) -> Option<&SmallBlocks> {
        self.file.small_blocks.as_ref().filter(|blocks| !blocks.is_whole(at, len))
    }

    /// As [`cut_units`](Self::cut_units), if direct I/O needs whole ones.
    fn cut_direct_units(&self, at: ByteOffset, len: ByteLen) -> Option<&SmallBlocks> {
        self.file.direct.and_then(|_| self.cut_units(at, len))
    }

    /// Excludes writes of parts of units, if there are units.
    fn changes_whole_units(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.file.small_blocks.as_ref().map(|_| self.changes.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn read_whole(&self, bytes: &mut [u8], at: ByteOffset) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pread(&self.file.fd, &mut bytes[done..], at.0 + done as u64) {
                // The file has shrunk.
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write_whole(&self, bytes: &[u8], at: ByteOffset) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(&self.file.fd, &bytes[done..], at.0 + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads a range that has parts of units, through memory for whole ones.
    fn read_cut(&self, blocks: &SmallBlocks, bytes: &mut [u8], at: ByteOffset) -> io::Result<()> {
        let len = ByteLen(bytes.len() as u64);
        let Slice { at, len, skip, .. } = blocks.read_slice(at, len, ByteLen(u64::MAX));
        with_aligned(len, |memory| {
            self.read_whole(memory, at)?;
            bytes.copy_from_slice(&memory[skip as usize..][..bytes.len()]);
            Ok(())
        })
    }

    /// Writes a range that has parts of units, exclusively: reads the rest of them first.
    fn write_cut(&self, blocks: &SmallBlocks, bytes: &[u8], at: ByteOffset) -> io::Result<()> {
        let _alone = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        let len = ByteLen(bytes.len() as u64);
        let Slice { at, len, skip, .. } = blocks.read_slice(at, len, ByteLen(u64::MAX));
        with_aligned(len, |memory| {
            self.read_whole(memory, at)?;
            memory[skip as usize..][..bytes.len()].copy_from_slice(bytes);
            self.write_whole(memory, at)
        })
    }

    fn allocate(&self, mode: FallocateFlags, at: ByteOffset, len: ByteLen) -> rustix::io::Result<()> {
        rustix::fs::fallocate(&self.file.fd, mode | FallocateFlags::KEEP_SIZE, at.0, len.0)
    }
}

impl BlockingStorage for FileCalls {
    fn size(&self) -> io::Result<ByteLen> {
        Ok(host::size(&self.file.fd, self.file.kind)?)
    }

    fn read_at(&self, bytes: &mut [u8], at: ByteOffset) -> io::Result<()> {
        match self.cut_direct_units(at, ByteLen(bytes.len() as u64)) {
            Some(blocks) => self.read_cut(blocks, bytes, at),
            None => self.read_whole(bytes, at),
        }
    }

    fn write_at(&self, bytes: &[u8], at: ByteOffset) -> io::Result<()> {
        match self.cut_direct_units(at, ByteLen(bytes.len() as u64)) {
            Some(blocks) => self.write_cut(blocks, bytes, at),
            None => {
                let _beside = self.changes_whole_units();
                self.write_whole(bytes, at)
            }
        }
    }

    fn flush(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file.fd)?)
    }

    fn discard(&self, at: ByteOffset, len: ByteLen) -> io::Result<()> {
        let whole = match &self.file.small_blocks {
            Some(blocks) => blocks.inner(at, len),
            None => Some((at, len)),
        };
        let Some((at, len)) = whole else { return Ok(()) };
        let _beside = self.changes_whole_units();
        match self.file.kind {
            FileKind::BlockDevice => discard_device(self.file.fd.as_fd(), at, len),
            _ => Ok(self.allocate(FallocateFlags::PUNCH_HOLE, at, len)?),
        }
    }

    fn write_zeroes(&self, at: ByteOffset, len: ByteLen, may_unmap: bool) -> io::Result<()> {
        if self.cut_units(at, len).is_none() {
            let _beside = self.changes_whole_units();
            let punched =
                may_unmap && self.file.discard.is_some() && self.allocate(FallocateFlags::PUNCH_HOLE, at, len).is_ok();
            if punched || self.allocate(FallocateFlags::ZERO_RANGE, at, len).is_ok() {
                return Ok(());
            }
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

/// Calls `use_memory` with zeroed memory of this length that is aligned for direct I/O.
fn with_aligned(len: ByteLen, use_memory: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
    let len = len.0 as usize;
    let mut memory = vec![0; len + UNIT_ALIGN];
    let start = memory.as_ptr().align_offset(UNIT_ALIGN);
    use_memory(&mut memory[start..start + len])
}
