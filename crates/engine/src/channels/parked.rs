//! Requests that are parked at stopped disks: each channel's guard has its own.

use std::sync::Arc;

use mqblk_core::Tag;

use super::Channels;
use crate::errors::DiskHealth;
use crate::request::Buffer;

impl Channels {
    /// Resumes a disk: repeats or fails its guards' parked requests.
    pub(crate) fn resume(&mut self, health: &Arc<DiskHealth>, report: Option<mqblk_core::Outcome>) {
        let mut finished = std::mem::take(&mut self.completions);
        let mut pending = Vec::new();
        for (at, open) in self.all() {
            let Some(guard) = open.guard.as_ref().filter(|_| Arc::ptr_eq(&open.health, health)) else { continue };
            guard.borrow_mut().resume(report, &mut finished);
            pending.push(at);
        }
        self.completions = finished;
        pending.into_iter().for_each(|at| self.mark_busy(at));
    }

    /// Fails a draining queue's parked requests; no more of its requests are parked.
    pub(crate) fn begin_leave(&mut self, slot: u16) {
        let mut finished = std::mem::take(&mut self.completions);
        for guard in self.all().filter_map(|(_, open)| open.guard.as_ref()) {
            guard.borrow_mut().begin_leave(slot, &mut finished);
        }
        self.completions = finished;
    }

    /// Ends [`begin_leave`](Self::begin_leave): the queue is detached.
    pub(crate) fn end_leave(&mut self, slot: u16) {
        for guard in self.all().filter_map(|(_, open)| open.guard.as_ref()) {
            guard.borrow_mut().end_leave(slot);
        }
    }

    pub(crate) fn parked_of(&self, slot: u16) -> Vec<Tag> {
        let guards = self.all().filter_map(|(_, open)| open.guard.as_ref());
        guards.flat_map(|guard| guard.borrow().parked_of(slot).collect::<Vec<_>>()).collect()
    }

    pub(crate) fn drop_parked(&mut self, chosen: impl Fn(Tag) -> bool) -> Vec<(Tag, Option<Buffer>)> {
        let guards = self.all().filter_map(|(_, open)| open.guard.as_ref());
        guards.flat_map(|guard| guard.borrow_mut().drop_parked(&chosen)).collect()
    }
}
