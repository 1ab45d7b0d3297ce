//! A queue's place at a worker.

use std::any::Any;
use std::sync::mpsc::SyncSender;

use mqblk_core::Geometry;
use mqblk_uring::{EventFd, Lane};

use super::Leaving;
use crate::runner::Served;

/// Takes a queue apart when it leaves; gives its position, boxed.
pub(crate) type Unseat = Box<dyn FnOnce(Box<dyn Served>, &mut Lane) -> Box<dyn Any + Send> + Send>;

/// Told why a ring is broken.
pub(crate) type TellBroken = Box<dyn FnOnce(&str) + Send>;

/// What a queue is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SeatState {
    /// Served.
    Running,
    /// Not pulled from; requests in flight end as usual.
    Paused,
    /// Its ring is broken: never pulled from again.
    Broken,
    /// Leaves as soon as nothing is in flight.
    Draining,
}

/// A queue and what its worker keeps for it.
pub(crate) struct Seat {
    pub(crate) runner: Box<dyn Served>,
    pub(crate) geometry: Geometry,
    /// Place of its disk's channel.
    pub(crate) channel: usize,
    pub(crate) kick: Option<EventFd>,
    /// Tells this queue from a later one in the same slot.
    pub(crate) generation: u32,
    /// Tells this watch of the kick from an earlier one.
    pub(crate) watch: u32,
    pub(crate) state: SeatState,
    /// Looked at in every turn (else it was armed and will kick).
    pub(crate) polled: bool,
    /// Has answers to publish.
    pub(crate) touched: bool,
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

    /// Retires the queue and says so, once.
    pub(crate) fn fail(&mut self, why: &str) {
        if self.state != SeatState::Draining {
            self.state = SeatState::Broken;
        }
        if let Some(tell) = self.on_broken.take() {
            tell(why);
        }
    }
}
