//! Flushes that share one `fdatasync`.
//!
//! A flush covers all writes that had completed before it. So one that arrives while an `fdatasync` is in flight needs another one, but all that
//! arrive meanwhile need the same one. It also bounds how many kernel threads a disk's flushes take when its storage hangs: one.

/// The flushes of a channel, by the index of their request.
#[derive(Debug, Default)]
pub(super) struct SyncGroup {
    running: bool,
    /// Complete with the `fdatasync` in flight, besides the request that issued it.
    members: Vec<u32>,
    /// Need one that is issued after that.
    waiting: Vec<u32>,
}

impl SyncGroup {
    /// Returns true if `index` may issue an `fdatasync` now; else it waits for the next one.
    pub(super) fn may_issue(&mut self, index: u32) -> bool {
        if self.running {
            self.waiting.push(index);
        }
        !self.running
    }

    /// An `fdatasync` was issued: it covers all requests that wait.
    pub(super) fn issued(&mut self) {
        debug_assert!(!self.running && self.members.is_empty());
        self.running = true;
        std::mem::swap(&mut self.members, &mut self.waiting);
    }

    /// The `fdatasync` has completed. Adds the other requests that it covers to `members`.
    pub(super) fn completed(&mut self, members: &mut Vec<u32>) {
        self.running = false;
        members.append(&mut self.members);
    }

    /// Returns a request that waits and may issue the next `fdatasync`.
    pub(super) fn next(&mut self) -> Option<u32> {
        if self.running { None } else { self.waiting.pop() }
    }

    /// Removes the requests that wait and are picked: their `fdatasync` is not in flight.
    pub(super) fn cancel_waiting(&mut self, mut pick: impl FnMut(u32) -> bool) {
        self.waiting.retain(|index| !pick(*index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_that_arrives_meanwhile_needs_the_next_sync() {
        let (mut group, mut members) = (SyncGroup::default(), vec![]);
        assert!(group.may_issue(1));
        group.issued();
        assert!(!group.may_issue(2) && !group.may_issue(3) && !group.may_issue(4));
        assert_eq!(group.next(), None, "one at a time");
        group.completed(&mut members);
        assert!(members.is_empty(), "none of them was covered");
        group.cancel_waiting(|index| index == 3);
        assert_eq!(group.next(), Some(4));
        group.issued();
        assert!(!group.may_issue(5));
        group.completed(&mut members);
        assert_eq!(members, [2]);
        assert_eq!(group.next(), Some(5));
    }
}
