//! A queue's place at a worker.

use std::any::Any;
use std::sync::mpsc::SyncSender;

use mqblk_uring::{Kick, UringContext};

use super::Leaving;
use crate::attached_disks::AttachedDisks;
use crate::runner::AnyQueue;

/// Takes a queue apart when it leaves; gives its position, boxed.
pub(crate) type Unseat = Box<dyn FnOnce(Box<dyn AnyQueue>, &mut UringContext) -> Box<dyn Any + Send> + Send>;

/// Told why a ring is broken.
pub(crate) type TellBroken = Box<dyn FnOnce(&str) + Send>;

/// A queue and what its worker keeps for it.
pub(crate) struct AttachedQueue {
    pub(crate) runner: Box<dyn AnyQueue>,
    pub(crate) disks: AttachedDisks,
    pub(crate) kick: Option<Kick>,
    /// Tells this queue from a later one in the same slot.
    pub(crate) generation: u32,
    /// Tells this watch of the kick from an earlier one.
    pub(crate) watch: u32,
    /// Has answers to publish.
    pub(crate) dirty: bool,
    /// Its requests in flight stay unanswered.
    pub(crate) frozen: bool,
    pub(crate) on_broken: Option<TellBroken>,
    pub(crate) unseat: Unseat,
    /// Whoever waits for the drain.
    pub(crate) leave: Option<SyncSender<Leaving>>,
}

impl AttachedQueue {
    /// The cookie of this queue's kicks.
    #[inline]
    pub(crate) fn cookie(&self, slot: u16) -> u64 {
        u64::from(self.watch) << 16 | u64::from(slot)
    }
}
