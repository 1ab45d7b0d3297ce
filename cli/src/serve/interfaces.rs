//! The guest interfaces of a disk: a word each, and what the program asks of a disk that is served, whichever way guests reach it.

use std::sync::Arc;

use mqblk_blkif::GrantCounters;
use mqblk_core::Resize;
use mqblk_engine::{QueueReport, WorkerReport};

use super::config::DiskFront;
use super::luns::ChangeError;
use super::resize::Changed;
use super::xen::XenDisk;

/// A guest interface: the key `interface` of `--disk`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interface {
    /// virtio-blk over vhost-user.
    #[default]
    VirtioBlk,
    /// virtio-scsi over vhost-user: a controller with one LUN.
    VirtioScsi,
    /// Xen blkif.
    Xen,
}

impl Interface {
    /// The words that a user writes, in the order of [`Interface::from_word`].
    pub const WORDS: &'static [&'static str] = &["virtio-blk", "virtio-scsi", "xen"];

    /// The interface of one of [`Interface::WORDS`].
    pub fn from_word(word: &str) -> Interface {
        match word {
            "virtio-scsi" => Interface::VirtioScsi,
            "xen" => Interface::Xen,
            _ => Interface::VirtioBlk,
        }
    }

    /// The word that a user writes for it.
    pub const fn word(self) -> &'static str {
        match self {
            Interface::VirtioBlk => "virtio-blk",
            Interface::VirtioScsi => "virtio-scsi",
            Interface::Xen => "xen",
        }
    }

    /// The one that a front belongs to.
    pub const fn of(front: &DiskFront) -> Interface {
        match front {
            DiskFront::VhostUser(_) => Interface::VirtioBlk,
            DiskFront::Xen(_) => Interface::Xen,
        }
    }
}

/// A disk that is served.
pub trait Guest: Send + Sync {
    /// What each of its queues has counted, by what the workers said. `None` when they were asked while a queue came or went.
    fn report(&self, workers: &[WorkerReport]) -> Option<Vec<QueueReport>>;

    /// Whether its VMM keeps an in-flight region. `None` when there is no VMM, or the interface needs none.
    fn in_flight_region(&self) -> Option<bool> {
        None
    }

    /// Begins to drain its queues, as a part of stopping.
    fn begin_stop(&self) {}
    /// Gives it another size, and tells its guest.
    ///
    /// # Errors
    /// When it cannot have that size.
    fn resize(&self, asked: Resize) -> Result<Changed, ChangeError>;

    /// What it counted of grants, where there are any.
    fn grants(&self) -> Option<GrantCounters> {
        None
    }
}

impl Guest for XenDisk {
    fn report(&self, workers: &[WorkerReport]) -> Option<Vec<QueueReport>> {
        XenDisk::report(self, workers)
    }

    fn resize(&self, asked: Resize) -> Result<Changed, ChangeError> {
        XenDisk::resize(self, asked)
    }

    fn grants(&self) -> Option<GrantCounters> {
        XenDisk::grants(self)
    }
}

/// A disk that is served, of whichever interface.
pub type AnyGuest = Arc<dyn Guest>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_mean_themselves() {
        for word in Interface::WORDS {
            assert_eq!(Interface::from_word(word).word(), *word);
        }
    }
}
