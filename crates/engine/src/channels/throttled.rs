//! Requests that wait in front of the plug until their disk's limits allow them: see [`Throttle`].

use std::time::Instant;

use mqblk_core::Tag;

use super::{Channels, OpenChannel};
use crate::limits::Throttle;
use crate::request::{AnyCompletion, Buffer};

impl OpenChannel {
    /// Returns the number of throttled requests.
    #[inline]
    pub(super) fn throttled(&self) -> usize {
        self.throttle.as_ref().map_or(0, |throttle| throttle.waiting())
    }

    /// Returns true if its disk has limits.
    pub(crate) fn has_throttle(&self) -> bool {
        self.throttle.is_some()
    }

    /// Returns the tags of the throttled requests.
    pub(crate) fn throttled_tags(&self) -> impl Iterator<Item = Tag> {
        self.throttle.iter().flat_map(|throttle| throttle.waiting_tags())
    }

    /// Holds back requests that the limits do not allow, and plugs those that they allow now.
    #[inline(never)] // so that a disk without limits does not pay for it in registers
    pub(super) fn pass_throttle(&mut self) {
        if let Some(throttle) = &mut self.throttle {
            // Requests that waited are stamped at their submission, like those that the channel did not take before.
            self.left |= throttle.pass(&mut self.plug);
        }
    }

    /// Called after the plug was offered: the rest of it has passed.
    #[inline]
    pub(super) fn end_pass_throttle(&mut self) {
        if let Some(throttle) = &mut self.throttle {
            throttle.set_passed(self.plug.len());
        }
    }

    /// Cancels the chosen requests that are throttled. The caller then cancels those in the plug.
    pub(super) fn cancel_throttled(&mut self, chosen: impl Fn(Tag) -> bool, finished: &mut Vec<AnyCompletion>) {
        if let Some(throttle) = &mut self.throttle {
            let passed = &self.plug[..throttle.passed().min(self.plug.len())];
            throttle.forget_passed(passed.iter().filter(|request| chosen(request.tag)).count());
            throttle.cancel(chosen, finished);
        }
    }

    pub(super) fn throttle_deadline(&self) -> Option<Instant> {
        self.throttle.as_ref()?.deadline()
    }

    /// Uses the disk's current limits.
    pub(super) fn reload_limits(&mut self) {
        match &mut self.throttle {
            Some(throttle) => {
                if !throttle.reload() {
                    throttle.let_all_go(&mut self.plug);
                    self.throttle = None;
                }
            }
            None => self.throttle = Throttle::new(self.health.limits(), self.plug.len()),
        }
        self.is_bounded = self.depth > 0 || self.throttle.is_some();
    }
}

impl Channels {
    /// Returns the number of channels with requests that may pass their throttle now.
    pub(super) fn due_throttles(&self) -> usize {
        self.busy().filter(|open| open.throttle.as_ref().is_some_and(|throttle| throttle.is_due())).count()
    }

    /// Returns the leased tokens of idle disks to their limits.
    pub(super) fn rest_throttles(&mut self) {
        let throttles = self.open.iter_mut().flatten().filter_map(|open| open.throttle.as_mut());
        throttles.for_each(|throttle| throttle.rest());
    }

    /// Ends a sleep: requests whose time has come may pass.
    #[inline]
    pub(crate) fn end_sleep(&mut self) {
        if self.throttles > 0 {
            self.left |= self.due_throttles() > 0;
        }
    }

    /// Returns the tags of a queue's throttled requests, one for each part.
    pub(crate) fn throttled_of(&self, slot: u16) -> impl Iterator<Item = Tag> {
        let tags = self.open.iter().flatten().flat_map(|open| open.throttled_tags());
        tags.filter(move |tag| tag.queue() == slot)
    }

    /// Removes chosen throttled requests without completing them. Returns their tags and buffers.
    pub(crate) fn take_throttled(&mut self, chosen: impl Fn(Tag) -> bool) -> Vec<(Tag, Option<Buffer>)> {
        let throttles = self.open.iter_mut().flatten().filter_map(|open| open.throttle.as_mut());
        throttles.flat_map(|throttle| throttle.take_unserved(&chosen)).collect()
    }

    /// Lets the throttled requests of a leaving queue pass; its later ones are not throttled.
    pub(crate) fn begin_leave_throttles(&mut self, slot: u16) {
        (0..self.open.len()).for_each(|at| self.let_go(at, slot, true));
    }

    /// Ends [`begin_leave_throttles`](Self::begin_leave_throttles): the queue is detached, or stays.
    pub(crate) fn end_leave_throttles(&mut self, slot: u16) {
        self.open
            .iter_mut()
            .flatten()
            .filter_map(|open| open.throttle.as_mut())
            .for_each(|throttle| throttle.end_leave(slot));
    }

    /// Lets a queue's throttled requests for the disk of a channel pass.
    pub(crate) fn let_go(&mut self, at: usize, slot: u16, leaving: bool) {
        let Some(open) = self.open.get_mut(at).and_then(Option::as_mut) else { return };
        if let Some(throttle) = &mut open.throttle {
            throttle.let_go(slot, leaving, &mut open.plug);
            open.left = true;
            self.left = true;
            self.mark_busy(at);
        }
    }
}
