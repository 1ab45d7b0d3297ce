//! A device: what its rings have in common.

use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::{ByteLen, EventChannel, Wake};
use mqblk_memory::{GrantAccess, PooledContext};
use mqblk_ring::blkif::{BackRing, RawRequest};

use crate::barrier::Gate;
use crate::journal::{Journal, JournalSlot};
use crate::options::{MAX_INDIRECT_SEGMENTS, PoolOwner, VbdOptions};
use crate::pages::{Pages, SharedHolder};
use crate::queue::BlkifQueue;

/// What a ring needs to be served.
pub struct RingParts {
    /// The ring, at the position where it is taken up.
    pub ring: BackRing,
    /// The way to the frontend's pages, for this ring alone.
    pub grants: Box<dyn GrantAccess>,
    /// How the frontend is notified, and notifies.
    pub channel: Box<dyn EventChannel>,
    /// Has the queue looked at by its worker, from any thread.
    pub waker: Arc<dyn Wake>,
    /// Where unanswered requests are noted, for an owner after this one.
    pub journal: Option<Journal>,
    /// Requests that an owner before this one left unanswered, in their order. They are judged anew, and come before what lies in the ring.
    pub replay: Vec<(JournalSlot, RawRequest)>,
    /// Dropped when the queue is: what keeps the ring's pages mapped.
    pub keep: Option<Box<dyn Any + Send>>,
}

/// What rings share that share their pages.
#[derive(Default)]
struct Sharing {
    holder: Option<SharedHolder>,
    rings: usize,
}

/// One device, from connection to disconnection: what its two ends agreed on, and what its rings have in common.
pub struct Vbd {
    options: VbdOptions,
    /// In bytes. Read once a batch.
    size: AtomicU64,
    pub(crate) gate: Gate,
    sharing: Mutex<Sharing>,
    /// Of the rings that are served.
    wakers: Mutex<Vec<Arc<dyn Wake>>>,
}

impl Vbd {
    /// A device whose rings are still to be opened, all of them: barriers wait for that.
    pub fn new(mut options: VbdOptions) -> Arc<Vbd> {
        options.max_indirect_segments = options.max_indirect_segments.min(MAX_INDIRECT_SEGMENTS);
        Arc::new(Vbd {
            size: AtomicU64::new(options.geometry.size.0),
            gate: Gate::new(options.rings),
            sharing: Mutex::default(),
            wakers: Mutex::default(),
            options,
        })
    }

    /// What the two ends agreed on.
    pub fn options(&self) -> &VbdOptions {
        &self.options
    }

    /// The disk has another size: what is asked for from now on is judged by it.
    pub fn set_size(&self, size: ByteLen) {
        self.size.store(size.0, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn size(&self) -> ByteLen {
        ByteLen(self.size.load(Ordering::Relaxed))
    }

    /// The rings that have not been opened will not be: barriers do not wait for them any more. Without it a queue that has taken one
    /// cannot be drained.
    pub fn forget_absent(&self) {
        self.gate.forget_absent();
    }

    /// Has each ring let go of what it has not used for long. A busy ring does so by itself; to be called about once a second, for
    /// those that sleep. For control threads.
    pub fn tend(&self) {
        for waker in lock(&self.wakers).iter() {
            waker.wake();
        }
    }

    /// Makes a queue of a ring. `lane`: the worker's that will serve it.
    ///
    /// # Errors
    /// When the system has no addresses for its pages.
    pub fn queue<L: PooledContext>(self: &Arc<Self>, lane: &mut L, parts: RingParts) -> io::Result<BlkifQueue<L>> {
        BlkifQueue::new(Arc::clone(self), lane, parts)
    }

    /// A ring's pages, for `requests` requests of at most `segments` segments.
    pub(crate) fn pages(&self, requests: u32, segments: u16, grants: Box<dyn GrantAccess>) -> io::Result<Pages> {
        match self.options.pool {
            PoolOwner::PerRing => Pages::own(&self.options, requests, segments, grants),
            PoolOwner::Shared => {
                let mut sharing = lock(&self.sharing);
                let all = requests.saturating_mul(self.options.rings.max(1).into());
                let pages = Pages::shared(&mut sharing.holder, &self.options, all, segments, grants)?;
                sharing.rings += 1;
                Ok(pages)
            }
        }
    }

    /// A ring begins to be served.
    pub(crate) fn opened(&self, waker: &Arc<dyn Wake>) {
        lock(&self.wakers).push(Arc::clone(waker));
    }

    /// A ring ends. Whether nobody uses its pages any more.
    pub(crate) fn closed(&self, waker: &Arc<dyn Wake>) -> bool {
        let mut wakers = lock(&self.wakers);
        if let Some(at) = wakers.iter().position(|other| Arc::ptr_eq(other, waker)) {
            wakers.swap_remove(at);
        }
        drop(wakers);
        if self.options.pool == PoolOwner::PerRing {
            return true;
        }
        let mut sharing = lock(&self.sharing);
        sharing.rings = sharing.rings.saturating_sub(1);
        let last = sharing.rings == 0;
        if last {
            sharing.holder = None;
        }
        last
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Vbd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vbd").field("options", &self.options).finish_non_exhaustive()
    }
}
