//! The dirty log of one connection: which log, whether it is in use, and how queues come to use it.
//!
//! The log (SET_LOG_BASE) and the wish to log (bit 26 of SET_FEATURES) come apart and in any order; what both say together is in force.
//! A message that changes that is answered when every queue goes by it, so that nothing is written unlogged, or to an old log, after
//! the answer.

use std::fs::File;
use std::sync::Arc;

use mqblk_memory::{DirtyLog, GuestAddress, GuestMemory, LogError};
use mqblk_ring::split::RingLog;
use vhost::vhost_user::message::{VhostUserLog, VhostUserVirtioFeatures};

pub(crate) const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();

/// What a VMM said about logging.
#[derive(Debug, Default)]
pub(crate) struct Logging {
    log: Option<Arc<DirtyLog>>,
    /// LOG_ALL is among the features.
    all: bool,
}

impl Logging {
    /// The log that is in force: there is one, and writes are to be logged.
    pub(crate) fn in_force(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|_| self.all)
    }

    /// What is in force with another log.
    ///
    /// # Errors
    /// When it cannot be mapped or is too short for the guest's memory.
    pub(crate) fn with_log(&self, told: &VhostUserLog, file: &File, memory: &GuestMemory) -> Result<Logging, LogError> {
        let log = DirtyLog::of_file(file, told.mmap_offset, told.mmap_size)?;
        log.check(memory)?;
        Ok(Logging { log: Some(Arc::new(log)), all: self.all })
    }

    /// What is in force with these features. A log that is not used any more is let go: the VMM makes another one next time.
    ///
    /// # Errors
    /// When writes are to be logged to a log that is too short for the guest's memory.
    pub(crate) fn with_features(&self, features: u64, memory: &GuestMemory) -> Result<Logging, LogError> {
        let all = features & LOG_ALL != 0;
        let log = self.log.clone().filter(|_| all || !self.all);
        let logging = Logging { log, all };
        logging.check(memory)?;
        Ok(logging)
    }

    /// Whether the log in force has a bit for each page of a memory table.
    ///
    /// # Errors
    /// When it has not.
    pub(crate) fn check(&self, memory: &GuestMemory) -> Result<(), LogError> {
        self.in_force().map_or(Ok(()), |log| log.check(memory))
    }

    /// Whether the VMM cut the log off while it was in force.
    pub(crate) fn is_lost(&self) -> bool {
        self.in_force().is_some_and(|log| log.is_lost())
    }

    /// How a ring of `size` entries is logged that the VMM wants logged at `used`.
    ///
    /// # Errors
    /// When the log in force has no bit for some of it.
    pub(crate) fn ring(&self, used: Option<GuestAddress>, size: u16) -> Result<Option<RingLog>, LogError> {
        let (Some(log), Some(used)) = (self.in_force(), used) else { return Ok(None) };
        log.check_address(RingLog::last(used, size))?;
        Ok(Some(RingLog { log: Arc::clone(log), used }))
    }
}

#[cfg(test)]
mod tests {
    use mqblk_memory::{Region, create_memfd};

    use super::*;

    fn told(len: u64) -> VhostUserLog {
        VhostUserLog { mmap_size: len, mmap_offset: 0 }
    }

    #[test]
    fn a_log_and_the_wish_to_log_come_in_any_order() {
        let memory = GuestMemory::default();
        let file = create_memfd("log", 4096).unwrap();
        let nothing = Logging::default();
        assert!(nothing.in_force().is_none());
        let wish = nothing.with_features(LOG_ALL, &memory).unwrap();
        assert!(wish.in_force().is_none());
        assert!(wish.with_log(&told(4096), &file, &memory).unwrap().in_force().is_some());
        let log = nothing.with_log(&told(4096), &file, &memory).unwrap();
        assert!(log.in_force().is_none());
        let log = log.with_features(1, &memory).unwrap().with_features(LOG_ALL, &memory).unwrap();
        assert!(log.in_force().is_some());
        let ended = log.with_features(0, &memory).unwrap();
        assert!(ended.in_force().is_none() && ended.log.is_none(), "it is let go");
    }

    #[test]
    fn a_log_that_is_too_short_is_refused_where_it_matters() {
        let one = Region::shared("t", 4096 * 8 * 3, GuestAddress(0)).unwrap().0;
        let memory = GuestMemory::new(vec![Arc::new(one)]).unwrap();
        let file = create_memfd("log", 4096).unwrap();
        let nothing = Logging::default();
        assert!(nothing.with_log(&told(2), &file, &memory).is_err());
        let short = nothing.with_log(&told(2), &file, &GuestMemory::default()).unwrap();
        assert!(short.check(&memory).is_ok(), "it is not used");
        let error = short.with_features(LOG_ALL, &memory).unwrap_err().to_string();
        assert_eq!(error, "dirty log: found 2 bytes, expected at least 3 for guest memory up to 0x17fff");
        let enough = nothing.with_log(&told(3), &file, &memory).unwrap().with_features(LOG_ALL, &memory).unwrap();
        assert!(enough.ring(Some(GuestAddress(4096 * 8 * 3 - 2048 - 6)), 256).unwrap().is_some());
        assert!(enough.ring(Some(GuestAddress(4096 * 8 * 3 - 2048 - 5)), 256).is_err());
        assert!(enough.ring(Some(GuestAddress(u64::MAX)), 256).is_err());
        assert!(enough.ring(None, 256).unwrap().is_none());
    }
}
