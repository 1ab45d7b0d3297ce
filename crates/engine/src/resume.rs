//! Resuming a stopped disk by control threads, and abandoning a queue's requests that no storage has.

use std::sync::Arc;

use mqblk_core::Tag;

use crate::attach_error::WorkerError;
use crate::engine::Engine;
use crate::errors::DiskHealth;
use crate::worker::Worker;

/// Handling of a stopped disk's parked requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// They are executed in the order of arrival. Only a flush or durable write that failed behind the host's page
    /// cache fails: the lost data is unknown.
    Replay,
    /// They fail: each with its own error, those that were never tried with the one that stopped the disk.
    Report,
}

impl Engine {
    /// Resumes a stopped disk, on all workers. Returns the number of parked requests; `None` when it is not stopped. A
    /// request that fails again stops it again.
    ///
    /// # Errors
    /// When a worker has ended, or does not respond: it resumes the disk when it does.
    pub fn resume(&self, health: &Arc<DiskHealth>, how: Resume) -> Result<Option<u64>, WorkerError> {
        let parked = health.stats().parked;
        let Some(outcome) = health.clear_stop() else { return Ok(None) };
        tracing::info!(disk = health.name(), parked, how = ?how, "the disk is resumed");
        for mailbox in self.mailboxes() {
            let health = Arc::clone(health);
            mailbox.send_and_wait(move |worker| worker.resume(&health, how, outcome))?;
        }
        Ok(Some(parked))
    }
}

impl Worker {
    /// Repeats or fails the parked requests of a disk. Those that were never tried fail with `untried`.
    pub(crate) fn resume(&mut self, health: &Arc<DiskHealth>, how: Resume, untried: mqblk_core::Outcome) {
        let report = (how == Resume::Report).then_some(untried);
        if report.is_none() && health.is_stopped() {
            // It has failed again on another worker.
            return;
        }
        self.channels.resume(health, report);
    }

    /// Returns the indexes of a queue's parked and throttled requests, except those with a part at the storage.
    pub(crate) fn unserved(&mut self, slot: u16, generation: u32) -> Vec<u16> {
        let mut tags: Vec<Tag> = self.channels.parked_of(slot);
        tags.extend(self.channels.throttled_of(slot));
        tags.sort_unstable();
        let Some((attached, _)) = self.find(slot, generation) else { return Vec::new() };
        let whole = |run: &[Tag]| attached.runner.parts_left(run[0].index()) == Some(run.len());
        tags.chunk_by(|one, next| one == next).filter(|run| whole(run)).map(|run| run[0].index()).collect()
    }

    /// Abandons parked and throttled requests of a queue. Returns their number.
    pub(crate) fn abandon_unserved(&mut self, slot: u16, generation: u32) -> usize {
        let indexes = self.unserved(slot, generation);
        let chosen = |tag: Tag| tag.queue() == slot && indexes.binary_search(&tag.index()).is_ok();
        let mut unserved = self.channels.drop_parked(chosen);
        unserved.extend(self.channels.take_throttled(chosen));
        for (tag, buffer) in unserved {
            let Some((attached, context)) = self.find(slot, generation) else { continue };
            attached.runner.abandon_part(context, tag.index(), buffer);
        }
        self.end_drained();
        indexes.len()
    }
}
