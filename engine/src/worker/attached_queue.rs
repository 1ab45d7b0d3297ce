//! A queue that is attached to a worker.

use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use mqblk_uring::{Kick, UringContext};

use super::LeftQueue;
use crate::attached_disks::AttachedDisks;
use crate::mailbox::Waker;
use crate::plug::Merges;
use crate::poll_list::Phase;
use crate::queue_options::QueueDisk;
use crate::runner::AnyQueue;

/// Takes a queue apart when it is detached; returns its position, boxed.
pub(crate) type DetachFn = Box<dyn FnOnce(Box<dyn AnyQueue>, &mut UringContext) -> Box<dyn Any + Send> + Send>;

/// Called with the reason when a ring is found to be broken.
pub(crate) type OnBroken = Box<dyn FnOnce(&str) + Send>;

/// Takes a queue that leaves its worker for another one.
pub(crate) type TakeFn = Box<dyn FnOnce(LeavingQueue, &mut UringContext) + Send>;

/// What happens to a draining queue when none of its requests is in flight.
pub(crate) enum OnDrained {
    /// It is taken apart, and what is left is sent.
    Detach(SyncSender<LeftQueue>),
    /// It moves to another worker, where its phase is the one it had here.
    Move(Phase, TakeFn),
}

/// A queue that leaves its worker for another one. None of its requests is in flight.
pub(crate) struct LeavingQueue {
    pub(crate) runner: Box<dyn AnyQueue>,
    pub(crate) disks: Vec<QueueDisk>,
    pub(crate) kick: Option<Kick>,
    pub(crate) phase: Phase,
    pub(crate) on_broken: Option<OnBroken>,
    pub(crate) detach: DetachFn,
    pub(crate) waker: Arc<Waker>,
    pub(crate) merges: Merges,
}

/// A queue and its worker's state for it.
pub(crate) struct AttachedQueue {
    pub(crate) runner: Box<dyn AnyQueue>,
    pub(crate) disks: AttachedDisks,
    pub(crate) kick: Option<Kick>,
    /// Distinguishes this queue from a later one in the same slot.
    pub(crate) generation: u32,
    /// Distinguishes this watch of the kick from an earlier one.
    pub(crate) watch: u32,
    /// It has completions to publish.
    pub(crate) dirty: bool,
    /// Its requests in flight are not completed any more.
    pub(crate) frozen: bool,
    pub(crate) on_broken: Option<OnBroken>,
    pub(crate) detach: DetachFn,
    /// What happens when it is drained; `None` while it does not drain.
    pub(crate) on_drained: Option<OnDrained>,
    /// Wakes it, wherever it is attached.
    pub(crate) waker: Arc<Waker>,
}

impl AttachedQueue {
    /// Returns the cookie of this queue's kicks.
    #[inline]
    pub(crate) fn cookie(&self, slot: u16) -> u64 {
        u64::from(self.watch) << 16 | u64::from(slot)
    }
}
