//! The state that a disk, its channels and its thread share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::ByteLen;
use mqblk_core::lock::lock;
use nix::libc;

use crate::admission::DiskSize;
use crate::observers::{LostConnection, Observers};

/// State shared by a disk, its channels and its thread.
#[derive(Debug)]
pub(super) struct RbdState {
    /// The image in one word.
    pub(super) place: String,
    /// A user that may have the image, in words.
    pub(super) permitted_user: String,
    /// The size that guests see.
    pub(super) size: DiskSize,
    /// The size of the image last reported by the cluster.
    pub(super) found: DiskSize,
    pub(super) observers: Arc<Observers>,
    is_fenced: AtomicBool,
    is_not_permitted: AtomicBool,
    pub(super) fenced: Mutex<Option<LostConnection>>,
}

impl RbdState {
    pub(super) fn new(place: String, permitted_user: String, size: ByteLen) -> RbdState {
        let observers = Arc::new(Observers::default());
        // The library's own connections, to each server of the cluster, are not visible: the image counts as one.
        observers.count(|counters| (counters.connected, counters.made) = (1, 1));
        RbdState {
            place,
            permitted_user,
            size: DiskSize::new(size),
            found: DiskSize::new(size),
            observers,
            is_fenced: AtomicBool::new(false),
            is_not_permitted: AtomicBool::new(false),
            fenced: Mutex::default(),
        }
    }

    pub(super) fn set_found_size(&self, size: ByteLen) {
        if self.found.get() != size {
            self.found.set(size);
            self.observers.size_changed();
        }
    }

    /// Reports, once, an error that lasts until people change something.
    pub(super) fn check_errno(&self, errno: i32) {
        match errno {
            libc::ESHUTDOWN if !self.is_fenced.swap(true, Ordering::Relaxed) => self.report_fenced(),
            libc::EPERM | libc::EACCES if !self.is_not_permitted.swap(true, Ordering::Relaxed) => {
                tracing::error!(
                    "{}: the cluster does not permit requests of the user any more: requests fail; expected {}",
                    self.place,
                    self.permitted_user
                );
            }
            _ => {}
        }
    }

    /// Reports that the cluster has blocklisted this client.
    fn report_fenced(&self) {
        let why = format!(
            "{}: the cluster has blocklisted this client, because another one took the image's lock or an administrator fenced it: all \
             requests fail. Make sure that nobody else runs a guest on the image (`rbd lock ls`, `rbd status`, `ceph osd blocklist ls`), \
             then open it again: remove and add the disk, or restart the daemon",
            self.place
        );
        tracing::error!("{why}");
        let why = "blocklisted by the cluster";
        self.observers.failure(why, |counters| (counters.connected, counters.lost) = (0, 1));
        let lost = self.observers.connection_lost(why);
        *lock(&self.fenced) = Some(lost);
    }
}
