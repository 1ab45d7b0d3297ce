//! The chains that one pull takes off a ring.

use mqblk_memory::{BufferPool, LeaseId};
use mqblk_ring::split::{Broken, DeviceRing};

use crate::chain::ChainStart;

/// Most chains taken in one pull. A batch is fetched in passes, so that its cache lines travel together; a larger one would
/// make the guest wait for the whole of it before it sees the first answer.
pub const BATCH: usize = 16;

/// Room for one batch; kept from one pull to the next.
#[derive(Debug, Default)]
pub struct Batch {
    /// Its chains. Those past the count that [`fetch`](Self::fetch) gave are old ones.
    pub starts: [ChainStart; BATCH],
}

impl Batch {
    /// Takes the chains that wait, at most [`BATCH`] and at most `room`: heads first, then their descriptors, then what indirect
    /// tables begin with. Chains that are to be taken up again come before all others. Returns how many, and whether more wait.
    ///
    /// # Errors
    /// When the ring is broken.
    #[inline]
    pub fn fetch(
        &mut self,
        ring: &mut DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        room: usize,
    ) -> Result<(usize, bool), Broken> {
        let waiting = usize::from(ring.waiting()?);
        if ring.replays() > 0 {
            return Ok(self.fetch_replays(ring, pool, lease, room, waiting));
        }
        let count = waiting.min(BATCH).min(room);
        for (ahead, start) in (0..).zip(&mut self.starts[..count]) {
            start.head = ring.peek(ahead);
        }
        for start in &mut self.starts[..count] {
            ring.take(start.head)?;
            *start = ChainStart::fetch(ring, pool, lease, start.head);
        }
        for start in &mut self.starts[..count] {
            start.fetch_indirect(pool, lease);
        }
        Ok((count, waiting > count))
    }

    /// Takes chains that a process before this one left unanswered.
    #[cold]
    fn fetch_replays(
        &mut self,
        ring: &mut DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        room: usize,
        waiting: usize,
    ) -> (usize, bool) {
        let most = BATCH.min(room);
        let mut count = 0;
        while count < most
            && let Some(head) = ring.take_replay()
        {
            self.starts[count] = ChainStart::fetch(ring, pool, lease, head);
            self.starts[count].fetch_indirect(pool, lease);
            count += 1;
        }
        (count, ring.replays() > 0 || waiting > 0)
    }
}
