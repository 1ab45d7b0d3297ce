//! The result of resizing a disk, for all guest interfaces.

use mqblk_core::settings::Settings;
use mqblk_core::{DiskError, Resize, Resized};
use mqblk_vhost_user_server::ConfigChangeResult;

use crate::change::ChangeError;

/// The notice of a new size to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestNotice {
    /// The size has not changed.
    Unchanged,
    /// The guest, or its VMM, was notified.
    Notified,
    /// The VMM was notified, and replied with an error or not at all.
    Unanswered,
    /// The VMM cannot be notified: it reads the size when it reconnects.
    AtReconnect,
    /// No guest is connected. The next one reads the new size.
    NoGuest,
}

impl GuestNotice {
    /// Returns the word that the admin socket reports.
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

impl From<ConfigChangeResult> for GuestNotice {
    fn from(notice: ConfigChangeResult) -> GuestNotice {
        match notice {
            ConfigChangeResult::NotConnected => GuestNotice::NoGuest,
            ConfigChangeResult::NoChannel => GuestNotice::AtReconnect,
            ConfigChangeResult::Sent | ConfigChangeResult::Acknowledged => GuestNotice::Notified,
            ConfigChangeResult::Refused | ConfigChangeResult::NoReply => GuestNotice::Unanswered,
        }
    }
}

/// The result of a resize that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeOutcome {
    /// The sizes.
    pub resized: Resized,
    /// The notice to the guest.
    pub guest: GuestNotice,
}

/// Converts a disk's error: an invalid requested size is an error of the key `size`, all others are failures of
/// `subject`.
pub fn resize_error(subject: &str, request: Resize, error: DiskError) -> ChangeError {
    match error {
        DiskError::Size { found, expected } if request.size.is_some() => {
            ChangeError::Setting(Settings::new(subject).error("size", found, expected))
        }
        error => ChangeError::Failed(format!("{subject}: {error}")),
    }
}
