//! What came of giving a disk another size, whichever way its guest reaches it.

use mqblk_core::settings::Settings;
use mqblk_core::{DiskError, Resize, Resized};
use mqblk_vhost_user_server::ConfigNotice;

use super::luns::ChangeError;

/// Whether the guest knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestNotice {
    /// The size is the one that it was.
    Unchanged,
    /// The guest, or its VMM, was told.
    Notified,
    /// The VMM was told and said that it could not pass it on, or says nothing.
    Unanswered,
    /// The VMM cannot be told: the guest sees it when it connects again.
    AtReconnect,
    /// No guest is connected. The next one finds the new size.
    NoGuest,
}

impl GuestNotice {
    /// The word that the admin socket says.
    pub fn word(self) -> &'static str {
        match self {
            GuestNotice::Unchanged => "unchanged",
            GuestNotice::Notified => "told",
            GuestNotice::Unanswered => "unanswered",
            GuestNotice::AtReconnect => "at-reconnect",
            GuestNotice::NoGuest => "no-guest",
        }
    }
}

impl From<ConfigNotice> for GuestNotice {
    fn from(notice: ConfigNotice) -> GuestNotice {
        match notice {
            ConfigNotice::NotConnected => GuestNotice::NoGuest,
            ConfigNotice::NoChannel => GuestNotice::AtReconnect,
            ConfigNotice::Sent | ConfigNotice::Acknowledged => GuestNotice::Notified,
            ConfigNotice::Refused | ConfigNotice::Unanswered => GuestNotice::Unanswered,
        }
    }
}

/// A disk that has, or keeps, its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The sizes.
    pub resized: Resized,
    /// Whether the guest knows.
    pub guest: GuestNotice,
}

/// The error in the words of whoever asked: a size that was asked for, or what the storage of `subject` has.
pub fn refused(subject: &str, asked: Resize, error: DiskError) -> ChangeError {
    match error {
        DiskError::Size { found, expected } if asked.size.is_some() => {
            ChangeError::Setting(Settings::new(subject).error("size", found, expected))
        }
        error => ChangeError::Failed(format!("{subject}: {error}")),
    }
}
