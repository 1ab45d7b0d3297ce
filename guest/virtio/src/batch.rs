//! A batch of chains that one pull takes off a ring.

use mqblk_memory::{BufferPool, LeaseId};
use mqblk_ring::split::{DeviceRing, VirtqueueError};

use crate::chain::ChainHead;

/// Most chains taken in one pull. A batch is fetched in passes, so that its cache misses overlap. In a larger one the guest would wait
/// longer for its first completion.
pub const MAX_BATCH: usize = 16;

/// Storage for one batch; reused by each pull.
#[derive(Debug, Default)]
pub struct ChainBatch {
    /// The chains. Those beyond the count that [`fetch`](Self::fetch) returned are stale.
    pub heads: [ChainHead; MAX_BATCH],
}

impl ChainBatch {
    /// Takes the available chains, at most [`MAX_BATCH`] and at most `max`: heads first, then their descriptors, then the first entries of
    /// indirect tables. Chains to replay come before all others. Returns how many, and whether more are available.
    ///
    /// # Errors
    /// When the ring violates the protocol.
    #[inline]
    pub fn fetch(
        &mut self,
        ring: &mut DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        max: usize,
    ) -> Result<(usize, bool), VirtqueueError> {
        let waiting = usize::from(ring.waiting()?);
        if ring.replays() > 0 {
            return Ok(self.fetch_replays(ring, pool, lease, max, waiting));
        }
        let count = waiting.min(MAX_BATCH).min(max);
        for (ahead, head) in (0..).zip(&mut self.heads[..count]) {
            head.index = ring.peek(ahead);
        }
        for head in &mut self.heads[..count] {
            ring.take(head.index)?;
            *head = ChainHead::fetch(ring, pool, lease, head.index);
        }
        for head in &mut self.heads[..count] {
            head.fetch_indirect(pool, lease);
        }
        Ok((count, waiting > count))
    }

    /// Takes chains to replay, which an earlier process did not complete.
    #[cold]
    fn fetch_replays(
        &mut self,
        ring: &mut DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        max: usize,
        waiting: usize,
    ) -> (usize, bool) {
        let limit = MAX_BATCH.min(max);
        let mut count = 0;
        while count < limit
            && let Some(head) = ring.take_replay()
        {
            self.heads[count] = ChainHead::fetch(ring, pool, lease, head);
            self.heads[count].fetch_indirect(pool, lease);
            count += 1;
        }
        (count, ring.replays() > 0 || waiting > 0)
    }
}
