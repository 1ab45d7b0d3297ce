//! The merged requests at a channel, and their members.

use mqblk_core::{ByteLen, ByteOffset, Op, Tag};

use crate::request::MERGED_SLOT;

/// A member of a merged request. Its start follows from the lengths of the members before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) tag: Tag,
    pub(crate) len: ByteLen,
    /// True if it is cancelled: it is not repeated.
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

/// Merged requests by the index in their tag. Entries keep the capacity of their lists.
#[derive(Debug, Default)]
pub(crate) struct MergedTable {
    entries: Vec<MergedRequest>,
    free: Vec<u16>,
}

/// Capacity of a new list of members; it grows with the longest merged request.
const INITIAL_MEMBERS: usize = 64;
/// Entries that are allocated at the start: the usual number of merged requests in flight.
const INITIAL_ENTRIES: u16 = 32;

impl MergedTable {
    /// Returns a table with [`INITIAL_ENTRIES`] entries.
    pub(crate) fn with_room() -> MergedTable {
        let mut table = MergedTable::default();
        for _ in 0..INITIAL_ENTRIES {
            table.add(Op::Flush, ByteOffset(0));
        }
        table.free.extend((0..INITIAL_ENTRIES).rev());
        table
    }

    /// Adds an entry and returns its index; `None` when all tags are used.
    fn add(&mut self, op: Op, start: ByteOffset) -> Option<u16> {
        let index = u16::try_from(self.entries.len()).ok()?;
        let members = Vec::with_capacity(INITIAL_MEMBERS);
        self.entries.push(MergedRequest { op, start, len: ByteLen::ZERO, members });
        // So that `end` does not allocate.
        self.free.reserve(self.entries.len());
        Some(index)
    }

    /// Returns the number of merged requests at the channel.
    #[inline]
    pub(crate) fn in_use(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Takes an entry without members. Returns it with its tag; `None` when all tags are in use.
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

    /// Returns true if a member of this merged request is chosen.
    pub(crate) fn has_member(&self, tag: Tag, chosen: impl Fn(Tag) -> bool) -> bool {
        self.entries[usize::from(tag.index())].members.iter().any(|member| chosen(member.tag))
    }

    /// Marks the chosen members as cancelled. Returns the tags of the merged requests of which all members are chosen.
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

    /// Ends a merged request. Its entry can be read until the next one is taken.
    pub(crate) fn end(&mut self, tag: Tag) -> &MergedRequest {
        self.free.push(tag.index());
        &self.entries[usize::from(tag.index())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_reused_and_run_out() {
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
