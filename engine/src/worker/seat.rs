//! A queue's place at a worker.

use std::any::Any;
use std::sync::mpsc::SyncSender;

use mqblk_uring::{Kick, Lane};

use super::Leaving;
use crate::runner::Served;
use crate::seat_disks::SeatDisks;

/// Takes a queue apart when it leaves; gives its position, boxed.
pub(crate) type Unseat = Box<dyn FnOnce(Box<dyn Served>, &mut Lane) -> Box<dyn Any + Send> + Send>;

/// Told why a ring is broken.
pub(crate) type TellBroken = Box<dyn FnOnce(&str) + Send>;

/// A queue and what its worker keeps for it.
pub(crate) struct Seat {
    pub(crate) runner: Box<dyn Served>,
    pub(crate) disks: SeatDisks,
    pub(crate) kick: Option<Kick>,
    /// Tells this queue from a later one in the same slot.
    pub(crate) generation: u32,
    /// Tells this watch of the kick from an earlier one.
    pub(crate) watch: u32,
    /// Has answers to publish.
    pub(crate) touched: bool,
    /// Its requests in flight stay unanswered.
    pub(crate) frozen: bool,
    pub(crate) on_broken: Option<TellBroken>,
    pub(crate) unseat: Unseat,
    /// Whoever waits for the drain.
    pub(crate) leave: Option<SyncSender<Leaving>>,
}

impl Seat {
    /// The cookie of this queue's kicks.
    #[inline]
    pub(crate) fn cookie(&self, slot: u16) -> u64 {
        u64::from(self.watch) << 16 | u64::from(slot)
    }
}
