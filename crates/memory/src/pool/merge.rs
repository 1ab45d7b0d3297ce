//! Buffers merged from other buffers: the data of a merged request.
//!
//! A merged buffer owns its members: nobody else has their handles, and each keeps its own lease, so all their memory
//! stays mapped as long as the merged buffer lives. The members are linked through their entries.

use super::*;

/// Used instead of a lease index: the members hold the leases. No lease has this index.
pub(super) const MERGED: u32 = u32::MAX;

impl BufferPool {
    /// Merges the members into one buffer of all their segments, in order. Segments that are adjacent in host memory
    /// become one. The members may lie in different leases. Undo with [`split`](Self::split), or
    /// [`release`](Self::release) the buffer with its members.
    ///
    /// # Panics
    /// When a member is itself merged, or there are more than 65535 segments.
    pub fn merge(&mut self, members: impl IntoIterator<Item = Buffer>) -> Buffer {
        let merged = self.take_entry(MERGED);
        let mut tail = self.index(&merged);
        for member in members {
            let at = self.index(&member);
            let entry = &self.entries[at];
            assert!(entry.lease < FREE, "a member is a live buffer that is not joined");
            if entry.spill == NO_SPILL {
                let (segments, count) = (entry.inline, usize::from(entry.segments));
                self.append_merging(self.index(&merged), &segments[..count]);
            } else {
                let list = entry.spill as usize;
                let segments = std::mem::take(&mut self.spills[list]);
                self.append_merging(self.index(&merged), &segments);
                self.spills[list] = segments;
            }
            self.entries[tail].next = at as u32 + 1;
            tail = at;
        }
        merged
    }

    fn append_merging(&mut self, index: usize, segments: &[Segment]) {
        for segment in segments {
            let entry = &mut self.entries[index];
            let last = match entry.spill {
                NO_SPILL => entry.inline[..usize::from(entry.segments)].last_mut(),
                list => self.spills[list as usize].last_mut(),
            };
            let adjacent = last.filter(|last| {
                last.address + u64::from(last.len) == segment.address
                    && u64::from(last.len) + u64::from(segment.len) <= MAX_SEGMENT_LEN
            });
            if let Some(last) = adjacent {
                last.len += segment.len;
                if last.fixed != segment.fixed {
                    // It spans two registered buffers, so neither contains all of it.
                    last.fixed = NOT_FIXED;
                }
                entry.total += u64::from(segment.len);
            } else {
                self.append(index, *segment, u16::MAX).expect("at most 65535 segments are joined");
            }
        }
    }

    /// Returns true if a buffer is merged.
    #[inline]
    pub fn is_merged(&self, buffer: &Buffer) -> bool {
        self.entries[self.unchecked_index(buffer)].lease == MERGED
    }

    /// Splits a merged buffer. Calls `each` with its members, in order.
    ///
    /// # Panics
    /// When it is not merged.
    pub fn split(&mut self, merged: Buffer, mut each: impl FnMut(Buffer)) {
        assert!(self.is_merged(&merged), "only a joined buffer has members");
        let index = self.index(&merged);
        self.free_entry(index);
        let mut next = std::mem::take(&mut self.entries[index].next);
        while let Some(member) = self.next_member(&mut next) {
            each(member);
        }
    }

    /// Releases the members of a merged buffer that has been freed.
    #[cold]
    pub(super) fn release_members(&mut self, index: usize) {
        let mut next = std::mem::take(&mut self.entries[index].next);
        while let Some(member) = self.next_member(&mut next) {
            self.release(member);
        }
    }

    /// Unlinks a member from the list. Its handle was moved into [`merge`](Self::merge), so this is the only one again.
    fn next_member(&mut self, next: &mut u32) -> Option<Buffer> {
        let member = self.handle(next.checked_sub(1)?);
        let index = self.index(&member);
        *next = std::mem::take(&mut self.entries[index].next);
        Some(member)
    }
}

#[cfg(test)]
mod tests;
