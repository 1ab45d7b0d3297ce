//! The tag table: the requests of a queue that are in flight. Its occupancy *is* the in-flight count.

use std::mem::discriminant;

use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Op, Outcome};

use crate::clock::Ticks;

/// Timestamps of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timestamps {
    /// Time at which it was taken off the ring.
    pub pulled: Ticks,
    /// Time at which it was submitted to the storage.
    pub submitted: Ticks,
}

#[derive(Debug)]
struct Slot<T> {
    token: Option<T>,
    /// Disk ranges. While the slot is free: the next free one.
    parts: u16,
    /// Ranges that have not completed.
    remaining: u16,
    op: Op,
    disk: DiskSlot,
    /// Start of its first range.
    start: ByteOffset,
    stamps: Timestamps,
    /// The first failure, or the length done so far. Not used for a request of one part, which ends with the part's
    /// outcome.
    outcome: Outcome,
}

/// A copy of the entry of a request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TagEntry {
    /// Its disk.
    pub disk: DiskSlot,
    /// Its operation.
    pub op: Op,
    /// Disk ranges.
    pub parts: u16,
    /// Ranges that have not completed.
    pub remaining: u16,
    /// The first failure of the ranges that have completed.
    pub outcome: Outcome,
    /// Its timestamps.
    pub stamps: Timestamps,
}

impl<T> Slot<T> {
    /// Adds the outcome of one of several parts.
    fn add(&mut self, outcome: Outcome) {
        self.outcome = match (self.outcome, outcome) {
            (Outcome::Done(before), Outcome::Done(now)) => Outcome::Done(ByteLen(before.0 + now.0)),
            (Outcome::Done(_), failure) => failure,
            (first_failure, _) => first_failure,
        };
        self.remaining = self.remaining.saturating_sub(1);
    }
}

/// An index that no request has.
pub(crate) const NO_TAG: u16 = u16::MAX;

/// Slots for `depth` requests. A slot is allocated when the number of requests in flight first reaches it.
#[derive(Debug)]
pub(crate) struct TagTable<T> {
    slots: Vec<Slot<T>>,
    /// The slot that was freed last; [`NO_TAG`] if none is free. A list through the slots: taking and freeing one
    /// never allocates.
    first_free: u16,
    in_flight: u16,
    depth: u16,
}

impl<T> TagTable<T> {
    /// Returns an empty table.
    pub(crate) fn new(depth: u16) -> TagTable<T> {
        debug_assert!(depth < NO_TAG, "rings have at most 32768 entries");
        TagTable { slots: Vec::with_capacity(depth.into()), first_free: NO_TAG, in_flight: 0, depth }
    }

    fn grow(&mut self) -> Option<u16> {
        let index = u16::try_from(self.slots.len()).ok().filter(|index| *index < self.depth)?;
        self.slots.push(Slot {
            token: None,
            parts: NO_TAG,
            remaining: 0,
            op: Op::Flush,
            disk: DiskSlot::FIRST,
            start: ByteOffset(0),
            stamps: Timestamps::default(),
            outcome: Outcome::Done(ByteLen::ZERO),
        });
        Some(index)
    }

    /// Returns the number of free tags.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        usize::from(self.depth - self.in_flight)
    }

    /// Returns the number of requests in flight.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.into()
    }

    /// Takes a tag for a request of `parts` ranges, the first of which starts at `start`; `None` when the table is
    /// full.
    #[inline(always)] // else the token would travel through memory
    pub(crate) fn take(
        &mut self,
        token: T,
        (disk, op, start): (DiskSlot, Op, ByteOffset),
        parts: u16,
        now: Ticks,
    ) -> Option<u16> {
        let index = if self.first_free == NO_TAG { self.grow()? } else { self.first_free };
        self.in_flight += 1;
        let slot = &mut self.slots[usize::from(index)];
        self.first_free = slot.parts;
        (slot.token, slot.disk, slot.op, slot.start) = (Some(token), disk, op, start);
        slot.stamps = Timestamps { pulled: now, submitted: now };
        (slot.parts, slot.remaining) = (parts, parts);
        if parts > 1 {
            slot.outcome = Outcome::Done(ByteLen::ZERO);
        }
        Some(index)
    }

    /// Returns true if a request to this disk is in flight.
    pub(crate) fn uses(&self, disk: DiskSlot) -> bool {
        self.disks().any(|used| used == disk)
    }

    /// Returns the request with this index.
    pub(crate) fn get(&self, index: u16) -> Option<TagEntry> {
        let slot = self.slots.get(usize::from(index)).filter(|slot| slot.token.is_some())?;
        let Slot { parts, remaining: left, op, disk, stamps, .. } = *slot;
        let outcome = if parts > 1 { slot.outcome } else { Outcome::Done(ByteLen::ZERO) };
        Some(TagEntry { disk, op, parts, remaining: left, outcome, stamps })
    }

    /// Returns disk and start of the request that has, or had last, this index.
    pub(crate) fn place(&self, index: u16) -> Option<(DiskSlot, ByteOffset)> {
        self.slots.get(usize::from(index)).map(|slot| (slot.disk, slot.start))
    }

    /// Drops a part that will never complete. With the last part the tag is freed and the token returned.
    pub(crate) fn forget_part(&mut self, index: u16) -> Option<T> {
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.remaining = slot.remaining.saturating_sub(1);
        if slot.remaining > 0 {
            return None;
        }
        self.end(index)
    }

    /// Returns disk and pull time of each request in flight.
    pub(crate) fn pulls(&self) -> impl Iterator<Item = (DiskSlot, Ticks)> {
        let taken = self.slots.iter().filter(|slot| slot.token.is_some());
        taken.map(|slot| (slot.disk, slot.stamps.pulled))
    }

    /// Returns index, disk and timestamps of each request in flight.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u16, DiskSlot, Timestamps)> {
        let taken = (0..).zip(&self.slots).filter(|(_, slot)| slot.token.is_some());
        taken.map(|(index, slot)| (index, slot.disk, slot.stamps))
    }

    /// Returns the indexes of the requests in flight to a disk.
    pub(crate) fn of_disk(&self, disk: DiskSlot) -> impl Iterator<Item = u16> {
        (0..)
            .zip(&self.slots)
            .filter(move |(_, slot)| slot.token.is_some() && slot.disk == disk)
            .map(|(index, _)| index)
    }

    /// Returns the disk of each request in flight.
    pub(crate) fn disks(&self) -> impl Iterator<Item = DiskSlot> {
        self.slots.iter().filter(|slot| slot.token.is_some()).map(|slot| slot.disk)
    }

    /// Returns index and disk of the requests in flight whose token `pick` chooses.
    pub(crate) fn pick(&mut self, pick: &mut dyn FnMut(&mut T) -> bool) -> impl Iterator<Item = (u16, DiskSlot)> {
        (0..).zip(&mut self.slots).filter_map(move |(index, slot)| {
            let picked = slot.token.as_mut().is_some_and(&mut *pick);
            picked.then_some((index, slot.disk))
        })
    }

    /// Records when a request was submitted to the storage.
    #[inline]
    pub(crate) fn submitted(&mut self, index: u16, now: Ticks) {
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            slot.stamps.submitted = now;
        }
    }

    /// Returns the operation and the timestamps of the request that has, or had last, this index.
    #[inline]
    pub(crate) fn kind(&self, index: u16) -> Option<(Op, Timestamps)> {
        self.slots.get(usize::from(index)).map(|slot| (slot.op, slot.stamps))
    }

    /// Returns true for a request of one part with this operation, with any flags, and these timestamps.
    #[inline]
    pub(crate) fn is_single(&self, index: u16, op: Op, stamps: Timestamps) -> bool {
        self.slots.get(usize::from(index)).is_some_and(|slot| {
            slot.token.is_some()
                && slot.parts <= 1
                && slot.stamps == stamps
                && discriminant(&slot.op) == discriminant(&op)
        })
    }

    /// Completes one part. With the last part returns the request's operation, outcome and timestamps: the caller
    /// [ends](Self::end) the request.
    #[inline]
    pub(crate) fn complete_part(&mut self, index: u16, outcome: Outcome) -> Option<(Op, Outcome, Timestamps)> {
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.token.as_ref()?;
        let outcome = if slot.parts > 1 {
            slot.add(outcome);
            if slot.remaining > 0 {
                return None;
            }
            slot.outcome
        } else {
            outcome
        };
        Some((slot.op, outcome, slot.stamps))
    }

    /// Frees the tag of a request of one part. Returns its token, operation and timestamps; `None` for any other.
    #[inline(always)] // else the token would travel through memory
    pub(crate) fn end_single(&mut self, index: u16) -> Option<(T, Op, Timestamps)> {
        let slot = self.slots.get_mut(usize::from(index)).filter(|slot| slot.parts <= 1)?;
        let token = slot.token.take()?;
        slot.parts = self.first_free;
        self.first_free = index;
        self.in_flight -= 1;
        Some((token, slot.op, slot.stamps))
    }

    /// Frees a tag. Returns the request's token.
    #[inline(always)] // else the token would travel through memory
    pub(crate) fn end(&mut self, index: u16) -> Option<T> {
        let slot = self.slots.get_mut(usize::from(index))?;
        let token = slot.token.take()?;
        slot.parts = self.first_free;
        self.first_free = index;
        self.in_flight -= 1;
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mqblk_core::Errno;
    use proptest::prelude::*;

    impl<T> TagTable<T> {
        fn finish_part(&mut self, index: u16, outcome: Outcome) -> Option<(T, Op, Outcome, Timestamps)> {
            let (op, outcome, stamps) = self.complete_part(index, outcome)?;
            Some((self.end(index)?, op, outcome, stamps))
        }
    }

    #[test]
    fn a_request_of_several_parts_completes_once_with_its_first_failure() {
        let mut tags = TagTable::new(2);
        let tag = tags.take("a", (DiskSlot::FIRST, Op::Discard { secure: false }, ByteOffset(0)), 3, Ticks(5)).unwrap();
        tags.submitted(tag, Ticks(7));
        assert!(tags.finish_part(tag, Outcome::Done(ByteLen(5))).is_none());
        assert!(tags.finish_part(tag, Outcome::Failed(Errno(5))).is_none());
        let (token, _, outcome, stamps) = tags.finish_part(tag, Outcome::OutOfRange).unwrap();
        assert_eq!((token, outcome), ("a", Outcome::Failed(Errno(5))));
        assert_eq!(stamps, Timestamps { pulled: Ticks(5), submitted: Ticks(7) });
        assert!(tags.finish_part(tag, Outcome::Done(ByteLen(1))).is_none(), "its tag is free");
        assert_eq!(tags.in_flight(), 0);
    }

    #[test]
    fn a_request_is_forgotten_with_its_last_part() {
        let mut tags = TagTable::new(2);
        let tag = tags.take("a", (DiskSlot(3), Op::Discard { secure: false }, ByteOffset(0)), 3, Ticks(5)).unwrap();
        assert!(tags.finish_part(tag, Outcome::Done(ByteLen(5))).is_none());
        assert_eq!((tags.forget_part(tag), tags.get(tag).map(|entry| entry.remaining)), (None, Some(1)));
        assert_eq!(tags.pulls().collect::<Vec<_>>(), [(DiskSlot(3), Ticks(5))]);
        assert_eq!((tags.of_disk(DiskSlot(3)).collect::<Vec<_>>(), tags.of_disk(DiskSlot(0)).count()), (vec![tag], 0));
        assert_eq!((tags.forget_part(tag), tags.in_flight()), (Some("a"), 0));
        let one = tags.take("b", (DiskSlot(3), Op::Read, ByteOffset(0)), 1, Ticks(6)).unwrap();
        assert_eq!((tags.forget_part(one), tags.in_flight()), (Some("b"), 0));
    }

    proptest! {
        /// Compared with a plain map: every token is returned once, in-flight counts agree, a full table refuses.
        #[test]
        fn behaves_like_a_map(steps in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..200)) {
            let mut tags = TagTable::new(8);
            let mut model: Vec<(u16, usize)> = Vec::new();
            for (number, (put, pick)) in steps.into_iter().enumerate() {
                if put {
                    match tags.take(number, (DiskSlot::FIRST, Op::Read, ByteOffset(0)), 1, Ticks(0)) {
                        Some(tag) => {
                            prop_assert!(model.iter().all(|(other, _)| *other != tag));
                            model.push((tag, number));
                        }
                        None => prop_assert_eq!(model.len(), 8),
                    }
                } else if !model.is_empty() {
                    let (tag, number) = model.swap_remove(pick.index(model.len()));
                    prop_assert_eq!(tags.finish_part(tag, Outcome::Aborted).map(|(token, ..)| token), Some(number));
                }
                prop_assert_eq!(tags.in_flight(), model.len());
            }
        }
    }
}
