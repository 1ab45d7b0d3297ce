//! The guest interfaces of a disk: their names, and the operations on a served disk that all of them have.

use std::sync::Arc;

use mqblk_blkif::GrantCounters;
use mqblk_core::Resize;
use mqblk_engine::{QueueStats, WorkerStats};

use super::config::DiskEndpoint;
use super::luns::ChangeError;
use super::resize::ResizeOutcome;
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
    /// The words of the configuration.
    pub const WORDS: &'static [&'static str] = &["virtio-blk", "virtio-scsi", "xen"];

    /// Returns the interface of one of [`Interface::WORDS`].
    pub fn from_word(word: &str) -> Interface {
        match word {
            "virtio-scsi" => Interface::VirtioScsi,
            "xen" => Interface::Xen,
            _ => Interface::VirtioBlk,
        }
    }

    /// Returns the configuration's word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Interface::VirtioBlk => "virtio-blk",
            Interface::VirtioScsi => "virtio-scsi",
            Interface::Xen => "xen",
        }
    }

    /// Returns the interface of an endpoint.
    pub const fn of(endpoint: &DiskEndpoint) -> Interface {
        match endpoint {
            DiskEndpoint::VhostUser(_) => Interface::VirtioBlk,
            DiskEndpoint::Xen(_) => Interface::Xen,
        }
    }
}

/// The guest side of a served disk.
pub trait Export: Send + Sync {
    /// Returns the statistics of each of its queues, out of those of the workers. `None` if a queue was attached or detached meanwhile.
    fn stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>>;

    /// Returns true if its VMM has set an in-flight region. `None` if there is no VMM, or the interface has no such region.
    fn in_flight_region(&self) -> Option<bool> {
        None
    }

    /// Starts to drain its queues, as the first step of a stop.
    fn begin_stop(&self) {}
    /// Resizes the disk and notifies its guest.
    ///
    /// # Errors
    /// If the disk cannot have that size.
    fn resize(&self, request: Resize) -> Result<ResizeOutcome, ChangeError>;

    /// Returns the grant counters; Xen only.
    fn grants(&self) -> Option<GrantCounters> {
        None
    }
}

impl Export for XenDisk {
    fn stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        XenDisk::stats(self, workers)
    }

    fn resize(&self, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        XenDisk::resize(self, request)
    }

    fn grants(&self) -> Option<GrantCounters> {
        XenDisk::grants(self)
    }
}

/// The guest side of a served disk, of any interface.
pub type AnyExport = Arc<dyn Export>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for word in Interface::WORDS {
            assert_eq!(Interface::from_word(word).word(), *word);
        }
    }
}
