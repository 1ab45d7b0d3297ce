//! The dirty log of one connection.
//!
//! The log (SET_LOG_BASE) and the request to log (VHOST_F_LOG_ALL, bit 26 of SET_FEATURES) arrive in any order; the log
//! is active when both are set. A message that changes this gets its reply after every queue has applied it, so that no
//! write after the reply is unlogged or goes to an old log.

use std::fs::File;
use std::sync::Arc;

use mqblk_core::ByteLen;
use mqblk_memory::{DirtyLog, DirtyLogError, GuestAddress, GuestMemory};
use mqblk_ring::virtqueue::{RingFormat, RingLog};
use vhost::vhost_user::message::{VhostUserLog, VhostUserVirtioFeatures};

use crate::memory::SharePolicy;

pub(crate) const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();

/// The logging state that a frontend has set.
#[derive(Debug, Default)]
pub(crate) struct DirtyLogging {
    log: Option<Arc<DirtyLog>>,
    /// True if LOG_ALL is set in the features.
    log_all: bool,
}

impl DirtyLogging {
    /// Returns the log if it is active: set, with LOG_ALL.
    pub(crate) fn active(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|_| self.log_all)
    }

    /// Returns the state with another log.
    ///
    /// # Errors
    /// When the log cannot be mapped or is too short for the guest's memory.
    pub(crate) fn with_log(
        &self,
        layout: &VhostUserLog,
        file: &File,
        sharing: &SharePolicy,
        memory: &GuestMemory,
    ) -> Result<DirtyLogging, DirtyLogError> {
        let charge = sharing.budget.charge_mapping(ByteLen(layout.mmap_size))?;
        let log = DirtyLog::from_file(file, sharing.files, layout.mmap_offset, layout.mmap_size)?.with_charge(charge);
        log.check_covers(memory)?;
        Ok(DirtyLogging { log: Some(Arc::new(log)), log_all: self.log_all })
    }

    /// Returns the state with other features. Clearing LOG_ALL releases the log: the frontend sets a new one before the
    /// next migration.
    ///
    /// # Errors
    /// When the log becomes active and is too short for the guest's memory.
    pub(crate) fn with_features(&self, features: u64, memory: &GuestMemory) -> Result<DirtyLogging, DirtyLogError> {
        let all = features & LOG_ALL != 0;
        let log = self.log.clone().filter(|_| all || !self.log_all);
        let logging = DirtyLogging { log, log_all: all };
        logging.check(memory)?;
        Ok(logging)
    }

    /// Checks that the active log has a bit for each page of a memory table.
    ///
    /// # Errors
    /// When it does not.
    pub(crate) fn check(&self, memory: &GuestMemory) -> Result<(), DirtyLogError> {
        self.active().map_or(Ok(()), |log| log.check_covers(memory))
    }

    /// Returns true if the frontend has truncated the active log.
    pub(crate) fn is_lost(&self) -> bool {
        self.active().is_some_and(|log| log.is_lost())
    }

    /// Returns the logging of a ring of `size` entries whose used ring (packed: the device's event suppression) is
    /// logged at `used`; `None` if it is not logged.
    ///
    /// # Errors
    /// When the active log is too short for it.
    pub(crate) fn ring_log(
        &self,
        used: Option<GuestAddress>,
        size: u16,
        format: RingFormat,
    ) -> Result<Option<RingLog>, DirtyLogError> {
        let (Some(log), Some(used)) = (self.active(), used) else { return Ok(None) };
        log.check_covers_address(RingLog::last_logged(used, size, format))?;
        Ok(Some(RingLog { log: Arc::clone(log), used }))
    }
}

#[cfg(test)]
mod tests {
    use mqblk_memory::{Region, SharedFileRules, create_memfd};

    use super::*;

    const SPLIT: RingFormat = RingFormat::Split;

    fn any() -> SharePolicy {
        let files = SharedFileRules { any_file_system: true, require_seals: false };
        SharePolicy { files, ..SharePolicy::default() }
    }

    fn layout(len: u64) -> VhostUserLog {
        VhostUserLog { mmap_size: len, mmap_offset: 0 }
    }

    #[test]
    fn a_log_and_log_all_are_set_in_any_order() {
        let memory = GuestMemory::default();
        let file = create_memfd("log", 4096).unwrap();
        let nothing = DirtyLogging::default();
        assert!(nothing.active().is_none());
        let log_all = nothing.with_features(LOG_ALL, &memory).unwrap();
        assert!(log_all.active().is_none());
        assert!(log_all.with_log(&layout(4096), &file, &any(), &memory).unwrap().active().is_some());
        let log = nothing.with_log(&layout(4096), &file, &any(), &memory).unwrap();
        assert!(log.active().is_none());
        let log = log.with_features(1, &memory).unwrap().with_features(LOG_ALL, &memory).unwrap();
        assert!(log.active().is_some());
        let ended = log.with_features(0, &memory).unwrap();
        assert!(ended.active().is_none() && ended.log.is_none(), "it is let go");
    }

    #[test]
    fn an_active_log_that_is_too_short_is_rejected() {
        let one = Region::shared("t", 4096 * 8 * 3, GuestAddress(0)).unwrap().0;
        let memory = GuestMemory::new(vec![Arc::new(one)]).unwrap();
        let file = create_memfd("log", 4096).unwrap();
        let nothing = DirtyLogging::default();
        assert!(nothing.with_log(&layout(2), &file, &any(), &memory).is_err());
        let short = nothing.with_log(&layout(2), &file, &any(), &GuestMemory::default()).unwrap();
        assert!(short.check(&memory).is_ok(), "it is not used");
        let error = short.with_features(LOG_ALL, &memory).unwrap_err().to_string();
        assert_eq!(error, "dirty log: found 2 bytes, expected at least 3 for guest memory up to 0x17fff");
        let enough =
            nothing.with_log(&layout(3), &file, &any(), &memory).unwrap().with_features(LOG_ALL, &memory).unwrap();
        assert!(enough.ring_log(Some(GuestAddress(4096 * 8 * 3 - 2048 - 6)), 256, SPLIT).unwrap().is_some());
        assert!(enough.ring_log(Some(GuestAddress(4096 * 8 * 3 - 2048 - 5)), 256, SPLIT).is_err());
        assert!(enough.ring_log(Some(GuestAddress(u64::MAX)), 256, SPLIT).is_err());
        let last = 4096 * 8 * 3 - 4;
        assert!(enough.ring_log(Some(GuestAddress(last)), 256, RingFormat::Packed).unwrap().is_some());
        assert!(enough.ring_log(Some(GuestAddress(last + 1)), 256, RingFormat::Packed).is_err());
        assert!(enough.ring_log(None, 256, SPLIT).unwrap().is_none());
    }
}
