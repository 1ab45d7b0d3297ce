//! The merged requests that a channel has: who their members are.

use mqblk_core::{ByteLen, ByteOffset, Op, Tag};

/// In the place of a queue's slot in a merged request's tag. No queue has this slot.
pub(crate) const MERGED_SLOT: u16 = u16::MAX;

/// A member of a merged request. Where it starts follows from the lengths of those before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) tag: Tag,
    pub(crate) len: ByteLen,
    /// It is to end early: it is not done again.
    pub(crate) cancelled: bool,
}

/// A merged request.
#[derive(Debug)]
pub(crate) struct MergedRequest {
    pub(crate) op: Op,
    pub(crate) start: ByteOffset,
    pub(crate) len: ByteLen,
    pub(crate) members: Vec<Member>,
}

/// Merged requests by the index in their tag. Entries keep the room of their lists.
#[derive(Debug, Default)]
pub(crate) struct MergedTable {
    entries: Vec<MergedRequest>,
    free: Vec<u16>,
}

/// Room of a new list of members; it grows with the longest merged request.
const MEMBERS: usize = 64;
/// Entries that are there from the start: merged requests that a plug makes and storage works on at once.
const USUAL: u16 = 32;

impl MergedTable {
    /// A table that allocates only when more are in use at once than usual.
    pub(crate) fn with_room() -> MergedTable {
        let mut table = MergedTable::default();
        for _ in 0..USUAL {
            table.add(Op::Flush, ByteOffset(0));
        }
        table.free.extend((0..USUAL).rev());
        table
    }

    /// A new entry's index; `None` when there are as many as tags.
    fn add(&mut self, op: Op, start: ByteOffset) -> Option<u16> {
        let index = u16::try_from(self.entries.len()).ok()?;
        let members = Vec::with_capacity(MEMBERS);
        self.entries.push(MergedRequest { op, start, len: ByteLen::ZERO, members });
        // So that giving it back does not allocate.
        self.free.reserve(self.entries.len());
        Some(index)
    }

    /// Merged requests that the channel has.
    #[inline]
    pub(crate) fn in_use(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// A free entry without members, and its tag; `None` when there are as many as tags.
    pub(crate) fn take(&mut self, op: Op, start: ByteOffset) -> Option<(Tag, &mut MergedRequest)> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.add(op, start)?,
        };
        let entry = &mut self.entries[usize::from(index)];
        (entry.op, entry.start, entry.len) = (op, start, ByteLen::ZERO);
        entry.members.clear();
        Some((Tag::new(MERGED_SLOT, index), entry))
    }

    /// Whether a member of the merged request of this tag is chosen.
    pub(crate) fn any(&self, tag: Tag, chosen: impl Fn(Tag) -> bool) -> bool {
        self.entries[usize::from(tag.index())].members.iter().any(|member| chosen(member.tag))
    }

    /// The chosen members are to end early. The merged requests of which all members are.
    pub(crate) fn cancel(&mut self, chosen: impl Fn(Tag) -> bool) -> Vec<Tag> {
        let mut ended = vec![false; self.entries.len()];
        self.free.iter().for_each(|index| ended[usize::from(*index)] = true);
        let of = (0..).zip(&mut self.entries).filter(|(index, _)| !ended[usize::from(*index)]);
        of.filter_map(|(index, entry)| {
            entry.members.iter_mut().for_each(|member| member.cancelled |= chosen(member.tag));
            let all = entry.members.iter().all(|member| chosen(member.tag));
            all.then(|| Tag::new(MERGED_SLOT, index))
        })
        .collect()
    }

    /// Ends the request of a tag that [`take`](Self::take) gave. Its entry can be read until the next one is taken.
    pub(crate) fn end(&mut self, tag: Tag) -> &MergedRequest {
        self.free.push(tag.index());
        &self.entries[usize::from(tag.index())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_used_again_and_run_out() {
        let mut table = MergedTable::default();
        let first = table.take(Op::Read, ByteOffset(8)).unwrap().0;
        assert_eq!((first.queue(), table.in_use()), (MERGED_SLOT, 1));
        assert_eq!(table.end(first).start, ByteOffset(8));
        assert_eq!(table.in_use(), 0);
        let all: Vec<Tag> = (0..=u16::MAX).map(|_| table.take(Op::Read, ByteOffset(0)).unwrap().0).collect();
        assert!(table.take(Op::Read, ByteOffset(0)).is_none());
        assert_eq!(table.in_use(), 65536);
        table.end(all[777]);
        assert_eq!(table.take(Op::Flush, ByteOffset(0)).unwrap().0, all[777]);
    }
}
