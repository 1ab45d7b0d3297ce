//! The trait of storage whose calls block.

use std::io;

use mqblk_core::{ByteLen, ByteOffset};

/// Storage whose calls may block. Called by several threads at once; ranges lie on the disk and are aligned to its
/// logical blocks.
pub trait BlockingStorage: Send + Sync + 'static {
    /// Returns the current size of the storage.
    ///
    /// # Errors
    /// When it does not report it.
    fn size(&self) -> io::Result<ByteLen>;

    /// Fills all of `bytes`.
    ///
    /// # Errors
    /// When a byte cannot be read. The errno goes to the guest interface: `Unsupported`, `StorageFull` and
    /// `ReadOnlyFilesystem` have their own outcomes.
    fn read_at(&self, bytes: &mut [u8], at: ByteOffset) -> io::Result<()>;

    /// Writes all of `bytes`. The data need not be durable before [`flush`](Self::flush).
    ///
    /// # Errors
    /// When a byte cannot be written.
    fn write_at(&self, bytes: &[u8], at: ByteOffset) -> io::Result<()>;

    /// Makes durable all writes that have returned.
    ///
    /// # Errors
    /// When the storage cannot guarantee it.
    fn flush(&self) -> io::Result<()>;

    /// Forgets the content of a range. Called only with [`BlockingOptions::discard`](super::BlockingOptions::discard).
    ///
    /// # Errors
    /// When it cannot be discarded.
    fn discard(&self, _at: ByteOffset, _len: ByteLen) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Zeroes a range. `may_unmap`: its space may be released. The default implementation writes zeroes.
    ///
    /// # Errors
    /// When a byte cannot be zeroed.
    fn write_zeroes(&self, at: ByteOffset, len: ByteLen, _may_unmap: bool) -> io::Result<()> {
        static ZEROES: [u8; 1 << 16] = [0; 1 << 16];
        let mut done = 0;
        while done < len.0 {
            let run = (len.0 - done).min(ZEROES.len() as u64);
            self.write_at(&ZEROES[..run as usize], ByteOffset(at.0 + done))?;
            done += run;
        }
        Ok(())
    }

    /// Resizes the storage. The added part of a larger one reads as zeroes. Called by control threads.
    ///
    /// # Errors
    /// When it cannot have that size.
    fn set_size(&self, _size: ByteLen) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
