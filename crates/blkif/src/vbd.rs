//! A device: the state that its rings share.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;
use mqblk_core::{ByteLen, EventChannel, Wake};
use mqblk_memory::GrantAccess;
use mqblk_ring::blkif::{BackRing, RawRequest};

use crate::barrier::BarrierGate;
use crate::journal::{Journal, JournalSlot};
use crate::options::{MAX_INDIRECT_SEGMENTS, PoolScope, VbdOptions};
use crate::pool_handle::{PoolHandle, SharedPool};

/// The parts of a queue's ring.
pub struct RingParts {
    /// The ring, at the position where it is resumed.
    pub ring: BackRing,
    /// Access to the frontend's grants, for this ring alone.
    pub grants: Box<dyn GrantAccess>,
    /// The ring's event channel.
    pub channel: Box<dyn EventChannel>,
    /// Wakes the queue on its worker, from any thread.
    pub waker: Arc<dyn Wake>,
    /// Records requests without a response, for the next backend process.
    pub journal: Option<Journal>,
    /// Requests that the previous backend process left without a response, in ring order. They are validated again,
    /// and executed before those in the ring.
    pub replay: Vec<(JournalSlot, RawRequest)>,
    /// A worker that serves the ring keeps this file open: see
    /// [`MemoryShare::with_fence`](mqblk_memory::MemoryShare::with_fence).
    pub fence: Option<Arc<OwnedFd>>,
    /// Keeps the ring's pages mapped; dropped with the queue.
    pub guard: Option<Box<dyn Any + Send>>,
}

/// The shared page pool and the number of rings that use it.
#[derive(Default)]
struct SharedPoolUse {
    pool: Option<SharedPool>,
    rings: usize,
}

/// One device, from connection to disconnection: its negotiated options and the state that its rings share.
pub struct Vbd {
    options: VbdOptions,
    /// Size of the disk in bytes. Read once per batch.
    size: AtomicU64,
    pub(crate) gate: BarrierGate,
    shared_pool: Mutex<SharedPoolUse>,
    /// Wakers of the open rings.
    wakers: Mutex<Vec<Arc<dyn Wake>>>,
}

impl Vbd {
    /// Creates a device. Barriers wait until all its rings are open.
    pub fn new(mut options: VbdOptions) -> Arc<Vbd> {
        options.max_indirect_segments = options.max_indirect_segments.min(MAX_INDIRECT_SEGMENTS);
        Arc::new(Vbd {
            size: AtomicU64::new(options.geometry.size.0),
            gate: BarrierGate::new(options.rings),
            shared_pool: Mutex::default(),
            wakers: Mutex::default(),
            options,
        })
    }

    /// Returns the negotiated options.
    pub fn options(&self) -> &VbdOptions {
        &self.options
    }

    /// Sets the size of the disk. Later requests are validated against it.
    pub fn set_size(&self, size: ByteLen) {
        self.size.store(size.0, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn size(&self) -> ByteLen {
        ByteLen(self.size.load(Ordering::Relaxed))
    }

    /// Stops barriers from waiting for rings that are not open: they will not be opened. Without this a queue that has
    /// a barrier cannot be drained.
    pub fn skip_unopened_rings(&self) {
        self.gate.skip_unopened_rings();
    }

    /// Wakes each ring to release idle pages. A busy ring does so by itself; called by a control thread about once a
    /// second, for sleeping rings.
    pub fn reclaim(&self) {
        for waker in lock(&self.wakers).iter() {
            waker.wake();
        }
    }

    /// Opens a ring's page pool, for `requests` requests of at most `segments` segments.
    pub(crate) fn open_pool(
        &self,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<PoolHandle> {
        match self.options.pool {
            PoolScope::PerRing => PoolHandle::own(&self.options, requests, segments, grants),
            PoolScope::Shared => {
                let mut sharing = lock(&self.shared_pool);
                let all = requests.saturating_mul(self.options.rings.max(1).into());
                let pages = PoolHandle::shared(&mut sharing.pool, &self.options, all, segments, grants)?;
                sharing.rings += 1;
                Ok(pages)
            }
        }
    }

    /// Registers an open ring.
    pub(crate) fn ring_opened(&self, waker: &Arc<dyn Wake>) {
        lock(&self.wakers).push(Arc::clone(waker));
    }

    /// Unregisters a ring. Returns true if no other ring uses its page pool.
    pub(crate) fn ring_closed(&self, waker: &Arc<dyn Wake>) -> bool {
        let mut wakers = lock(&self.wakers);
        if let Some(at) = wakers.iter().position(|other| Arc::ptr_eq(other, waker)) {
            wakers.swap_remove(at);
        }
        drop(wakers);
        if self.options.pool == PoolScope::PerRing {
            return true;
        }
        let mut sharing = lock(&self.shared_pool);
        sharing.rings = sharing.rings.saturating_sub(1);
        let last = sharing.rings == 0;
        if last {
            sharing.pool = None;
        }
        last
    }
}

impl std::fmt::Debug for Vbd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vbd").field("options", &self.options).finish_non_exhaustive()
    }
}
