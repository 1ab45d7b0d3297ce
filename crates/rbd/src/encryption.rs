//! Encryption of an image by the library.

use std::ffi::c_int;
use std::fmt;
use std::io::{self, Read};

use crate::error::{FailedStep, RbdError, check};
use crate::handles::{Handles, size_of_image};
use crate::library::EncryptionOptions;

/// The format of an encrypted image (`rbd_encryption_format_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncryptionFormat {
    /// LUKS version 1.
    Luks1,
    /// LUKS version 2.
    Luks2,
}

impl EncryptionFormat {
    fn raw(self) -> c_int {
        match self {
            EncryptionFormat::Luks1 => 0,
            EncryptionFormat::Luks2 => 1,
        }
    }
}

/// A passphrase. It is not printed, and its memory is zeroed.
pub struct Passphrase(Vec<u8>);

impl Passphrase {
    /// Reads a passphrase: all bytes of `source`, of which at most `max` are accepted.
    ///
    /// # Errors
    /// When reading fails; `InvalidData` if there are no or too many bytes.
    pub fn read(mut source: impl Read, max: usize) -> io::Result<Passphrase> {
        // One byte more, and no later growth that would leave a copy.
        let mut passphrase = Passphrase(vec![0; max + 1]);
        let mut len = 0;
        while len <= max {
            match source.read(&mut passphrase.0[len..]) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if len == 0 || len > max {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                if len == 0 { "it is empty" } else { "it is too long" },
            ));
        }
        passphrase.0.truncate(len);
        Ok(passphrase)
    }

    /// Returns the passphrases to try: without a newline at the end, which Ceph's programs strip, and then with it,
    /// which some of their versions do not.
    fn variants(&self) -> impl Iterator<Item = &[u8]> {
        let stripped = self.0.strip_suffix(b"\n").filter(|stripped| !stripped.is_empty());
        stripped.into_iter().chain([&*self.0])
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase")
    }
}

impl Drop for Passphrase {
    fn drop(&mut self) {
        // Also bytes beyond the length: the passphrase was longer while it was read.
        self.0.resize(self.0.capacity(), 0);
        for byte in &mut self.0 {
            // SAFETY: a valid reference. A plain store would be left out, since nobody reads it.
            unsafe { std::ptr::write_volatile(byte, 0) };
        }
    }
}

/// The encryption of an image.
#[derive(Debug)]
pub struct Encryption {
    /// Its format.
    pub format: EncryptionFormat,
    /// Its passphrase.
    pub passphrase: Passphrase,
}

/// Loads the encryption of an open image: reads, writes and sizes are of its decrypted data from then on. Returns the
/// bytes of its header.
///
/// # Errors
/// EPERM for another passphrase, EINVAL if the image does not have the format, ENOTSUP for an image with journaling.
pub(crate) fn load(handles: &Handles, encryption: &Encryption) -> Result<u64, RbdError> {
    let whole = size_of_image(handles)?;
    let mut result = 0;
    for passphrase in encryption.passphrase.variants() {
        result = load_with(handles, encryption.format, passphrase)?;
        if result != -libc::EPERM {
            break;
        }
    }
    check(result, FailedStep::Encryption, || "loading the encryption".to_owned())?;
    Ok(whole.saturating_sub(size_of_image(handles)?))
}

/// Returns the library's result: 0 or a negative errno.
fn load_with(handles: &Handles, format: EncryptionFormat, passphrase: &[u8]) -> Result<c_int, RbdError> {
    let Some(load) = handles.libraries.rbd.rbd_encryption_load else {
        let source = io::Error::new(io::ErrorKind::Unsupported, "librbd.so.1 has no rbd_encryption_load");
        return Err(RbdError { step: FailedStep::Encryption, what: "loading the encryption".to_owned(), source });
    };
    let options =
        EncryptionOptions { algorithm: 0, passphrase: passphrase.as_ptr().cast(), passphrase_size: passphrase.len() };
    // SAFETY: the image is open and has no requests; the passphrase has its length, and the library copies it.
    Ok(unsafe { load(handles.image, format.raw(), &raw const options, size_of::<EncryptionOptions>()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passphrase_has_all_bytes_of_its_file_and_is_not_printed() {
        let read = |bytes: &[u8]| Passphrase::read(bytes, 8).map_err(|error| error.to_string());
        assert_eq!(read(b"12345678").unwrap().0, b"12345678");
        let text = read(b"a secr\n").unwrap();
        assert_eq!(text.variants().collect::<Vec<_>>(), [&b"a secr"[..], b"a secr\n"]);
        for one in [&b"12345678"[..], b"\n"] {
            assert_eq!(read(one).unwrap().variants().collect::<Vec<_>>(), [one]);
        }
        assert_eq!(format!("{text:?}"), "Passphrase");
        assert_eq!(read(b"").unwrap_err(), "it is empty");
        assert_eq!(read(b"123456789").unwrap_err(), "it is too long");
    }
}
