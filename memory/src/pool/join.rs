//! Buffers made of other buffers: what a joined request transfers.
//!
//! A joined buffer owns its members: nobody else has their handles, and each keeps its own lease, so that all their memory
//! stays mapped for as long as the joined buffer lives. The members hang on it in a chain through their entries.

use super::*;

/// In the place of a lease: the memory is held by members. No lease has this index.
const JOINED: u32 = u32::MAX;

impl BufferPool {
    /// One buffer of all the members' pieces, in order. Pieces that touch in host memory become one. The members may lie in
    /// different leases. Give it back with [`split`](Self::split), or with [`release`](Self::release), which releases the
    /// members too.
    ///
    /// # Panics
    /// When a member is itself joined, or there are more than 65535 pieces.
    pub fn join(&mut self, members: impl IntoIterator<Item = Buffer>) -> Buffer {
        let joined = self.take_entry(JOINED);
        let mut tail = joined.index();
        for member in members {
            let at = member.index();
            let entry = &self.entries[at];
            assert!(entry.live && entry.lease != JOINED, "a member is a live buffer that is not joined");
            if entry.spill == NO_SPILL {
                let (pieces, count) = (entry.inline, usize::from(entry.pieces));
                self.append_touching(joined.index(), &pieces[..count]);
            } else {
                let list = entry.spill as usize;
                let pieces = std::mem::take(&mut self.spills[list]);
                self.append_touching(joined.index(), &pieces);
                self.spills[list] = pieces;
            }
            self.entries[tail].next = at as u32 + 1;
            tail = at;
        }
        joined
    }

    fn append_touching(&mut self, index: usize, pieces: &[Segment]) {
        for piece in pieces {
            let entry = &mut self.entries[index];
            let last = match entry.spill {
                NO_SPILL => entry.inline[..usize::from(entry.pieces)].last_mut(),
                list => self.spills[list as usize].last_mut(),
            };
            let touching = last.filter(|last| {
                last.address + u64::from(last.len) == piece.address
                    && u64::from(last.len) + u64::from(piece.len) <= MOST_RUN
            });
            if let Some(last) = touching {
                last.len += piece.len;
                if last.fixed != piece.fixed {
                    // It lies in two registered buffers, so in none as a whole.
                    last.fixed = NOT_FIXED;
                }
                entry.total += u64::from(piece.len);
            } else {
                self.append(index, *piece, u16::MAX).expect("at most 65535 pieces are joined");
            }
        }
    }

    /// Whether a buffer is made of others.
    #[inline]
    pub fn is_joined(&self, buffer: &Buffer) -> bool {
        self.entries[buffer.index()].lease == JOINED
    }

    /// Ends a joined buffer and gives its members back, in order.
    ///
    /// # Panics
    /// When it is not joined.
    pub fn split(&mut self, joined: Buffer, mut each: impl FnMut(Buffer)) {
        assert!(self.is_joined(&joined), "only a joined buffer has members");
        let index = joined.index();
        self.free_entry(index);
        let mut next = std::mem::take(&mut self.entries[index].next);
        while let Some(member) = self.next_member(&mut next) {
            each(member);
        }
    }

    /// Releases the members of a joined buffer that was just freed.
    #[cold]
    pub(super) fn release_members(&mut self, index: usize) {
        let mut next = std::mem::take(&mut self.entries[index].next);
        while let Some(member) = self.next_member(&mut next) {
            self.release(member);
        }
    }

    /// Takes a member off its chain. Its handle was moved into [`join`](Self::join), so this is the only one again.
    fn next_member(&mut self, next: &mut u32) -> Option<Buffer> {
        let member = Buffer(std::num::NonZeroU32::new(*next)?);
        *next = std::mem::take(&mut self.entries[member.index()].next);
        Some(member)
    }
}

#[cfg(test)]
mod tests;
