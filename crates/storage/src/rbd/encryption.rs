//! Encryption by the library: its keys, its passphrase, and errors of loading it.

use std::path::{Path, PathBuf};

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::{BlockSize, ImageAccess, ImageOpener};
use mqblk_rbd::{Encryption, EncryptionFormat, Passphrase, RbdError};
use nix::libc;

use crate::secret_file::warn_if_public;

static FORMATS: [&str; 2] = ["luks1", "luks2"];
pub(super) static ENCRYPTION: Key = Key::words("encryption", &FORMATS)
    .about("librbd decrypts the image: its format, luks1 or luks2", "[storage/rbd.md](storage/rbd.md#encryption).");
pub(super) static KEY_FILE: Key =
    Key::text("key-file", "FILE", "a path").about("the file of the encryption's passphrase", "With `encryption`.");

/// Most bytes of a passphrase.
const MAX_PASSPHRASE: usize = 8 << 10;

/// The encryption of an image, as given.
#[derive(Debug)]
pub(super) struct EncryptionSettings {
    format: EncryptionFormat,
    key_file: PathBuf,
}

impl EncryptionSettings {
    /// Takes `encryption` and `key-file`.
    ///
    /// # Errors
    /// When only one of them is given.
    pub(super) fn take(settings: &mut Settings) -> Result<Option<EncryptionSettings>, SettingError> {
        let format = settings.word(&ENCRYPTION)?;
        match (format, settings.text(&KEY_FILE)) {
            (None, None) => Ok(None),
            (Some(word), Some(path)) => {
                let format = if word == FORMATS[0] { EncryptionFormat::Luks1 } else { EncryptionFormat::Luks2 };
                Ok(Some(EncryptionSettings { format, key_file: PathBuf::from(path) }))
            }
            (None, Some(_)) => Err(settings.error(&ENCRYPTION, "nothing, with a key-file", "the format of the image")),
            (Some(_), None) => Err(settings.error(&KEY_FILE, "nothing, with encryption", "a file with the passphrase")),
        }
    }

    /// Reads the passphrase.
    ///
    /// # Errors
    /// When the file cannot be read, or cannot be a passphrase.
    pub(super) fn load(&self, settings: &Settings, opener: &dyn ImageOpener) -> Result<Encryption, SettingError> {
        let path: &Path = &self.key_file;
        let opened = opener.open(path, ImageAccess::default()).map_err(std::io::Error::from);
        let read = opened.and_then(|file| {
            warn_if_public(path, &file.metadata()?);
            Passphrase::read(file, MAX_PASSPHRASE)
        });
        let passphrase = read.map_err(|error| {
            let expected = format!("a file with the passphrase, of 1 to {MAX_PASSPHRASE} bytes");
            settings.refused(&KEY_FILE, format!("{path:?} ({error})"), expected)
        })?;
        Ok(Encryption { format: self.format, passphrase })
    }

    /// Returns the size of a sector that is encrypted as a whole: the library reads the rest for a smaller write.
    pub(super) fn sector(&self) -> BlockSize {
        match self.format {
            EncryptionFormat::Luks1 => BlockSize::B512,
            EncryptionFormat::Luks2 => BlockSize::B4096,
        }
    }

    fn word(&self) -> &'static str {
        match self.format {
            EncryptionFormat::Luks1 => FORMATS[0],
            EncryptionFormat::Luks2 => FORMATS[1],
        }
    }

    /// Returns its keys.
    pub(super) fn resolved(&self) -> [(&'static str, String); 2] {
        [("encryption", self.word().to_owned()), ("key-file", self.key_file.display().to_string())]
    }

    /// Returns the error of loading the encryption, with the setting that it is about.
    pub(super) fn refused(&self, settings: &Settings, place: &str, error: &RbdError) -> SettingError {
        let (word, path) = (self.word(), &self.key_file);
        match error.errno() {
            libc::EPERM => {
                let expected =
                    format!("a file with a passphrase of {place}: all its bytes, with or without a newline at the end");
                settings.refused(&KEY_FILE, format!("{path:?} ({error})"), expected)
            }
            libc::EINVAL => {
                let expected = "the format that the image has (`rbd encryption format` makes one), or nothing for an image without encryption";
                settings.refused(&ENCRYPTION, format!("{word}, of {place} ({error})"), expected)
            }
            libc::EOPNOTSUPP => {
                let expected = "an image without the feature journaling (`rbd feature disable IMAGE journaling`)";
                settings.refused(&ENCRYPTION, format!("{word}, of {place} ({error})"), expected)
            }
            _ => {
                let expected = "librbd of Ceph 16 or later with encryption, and an image that it can decrypt";
                settings.refused(&ENCRYPTION, format!("{word}, of {place} ({error})"), expected)
            }
        }
    }
}
