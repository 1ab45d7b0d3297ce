//! A queue that is attached to a worker, and what remains of it when it leaves.

use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use mqblk_uring::Kick;

use crate::attach_error::WorkerError;
use crate::attached_disks::AttachedDisks;
use crate::counters::QueueStats;
use crate::mailbox::Waker;
use crate::plug::Merges;
use crate::poll_list::Phase;
use crate::queue_options::QueueDisk;
use crate::runner::AnyQueue;

/// The action on a draining queue when none of its requests is in flight.
pub(crate) enum OnDrained {
    /// It is dismantled, and its remains are sent.
    Detach(SyncSender<LeftQueue>),
    /// It is sent to another worker, where it keeps its phase.
    Move(Phase, SyncSender<LeavingQueue>),
}

/// The remains of a detached queue.
#[derive(Clone, Debug)]
pub struct Detached<P> {
    /// The position at which a new owner resumes.
    pub position: P,
    /// The queue's statistics.
    pub report: QueueStats,
}

/// The remains of a drained queue.
pub(crate) struct LeftQueue {
    /// The queue's position, boxed with its own type.
    pub(crate) position: Box<dyn Any + Send>,
    pub(crate) report: QueueStats,
}

impl LeftQueue {
    /// Returns the remains, with a position of a known type.
    pub(crate) fn detached<P: 'static>(self) -> Result<Detached<P>, WorkerError> {
        let position = self.position.downcast::<P>().map_err(|_| WorkerError::Ended)?;
        Ok(Detached { position: *position, report: self.report })
    }
}

/// A queue that has left its worker for another one. None of its requests is in flight.
pub(crate) struct LeavingQueue {
    /// The [`IdleQueue`](crate::runner::IdleQueue), of the queue's own type.
    pub(crate) idle: Box<dyn Any + Send>,
    pub(crate) parts: MovingParts,
}

/// A moving queue's state besides itself.
pub(crate) struct MovingParts {
    pub(crate) disks: Vec<QueueDisk>,
    pub(crate) kick: Option<Kick>,
    pub(crate) phase: Phase,
    pub(crate) waker: Arc<Waker>,
    pub(crate) merges: Merges,
}

/// A queue and its worker's state for it.
#[repr(C)] // Each turn takes the address of `disks`: as the first field it costs no instruction.
pub(crate) struct AttachedQueue {
    pub(crate) disks: AttachedDisks,
    pub(crate) runner: Box<dyn AnyQueue>,
    pub(crate) kick: Option<Kick>,
    /// Distinguishes this queue from a later one in the same slot.
    pub(crate) generation: u32,
    /// Distinguishes this watch of the kick from an earlier one.
    pub(crate) watch: u32,
    /// True if it has completions to publish.
    pub(crate) dirty: bool,
    /// True if its requests in flight are abandoned, not completed.
    pub(crate) frozen: bool,
    /// The action when it is drained; `None` while it does not drain.
    pub(crate) on_drained: Option<OnDrained>,
    /// Wakes it at any worker.
    pub(crate) waker: Arc<Waker>,
}

impl AttachedQueue {
    /// Returns the state of a queue that begins to be served.
    pub(crate) fn new(
        runner: Box<dyn AnyQueue>,
        disks: AttachedDisks,
        kick: Option<Kick>,
        generation: u32,
        waker: Arc<Waker>,
    ) -> AttachedQueue {
        let (watch, dirty, frozen, on_drained) = (generation, false, false, None);
        AttachedQueue { runner, disks, kick, generation, watch, dirty, frozen, on_drained, waker }
    }

    /// Returns the cookie of this queue's kicks.
    #[inline]
    pub(crate) fn cookie(&self, slot: u16) -> u64 {
        u64::from(self.watch) << 16 | u64::from(slot)
    }
}

/// Adds the plugs' counters to a queue's statistics.
pub(super) fn with_merges(mut stats: QueueStats, merges: Merges) -> QueueStats {
    stats.counters.read_merges = merges.reads;
    stats.counters.write_merges = merges.writes;
    stats.counters.other_merges = merges.others;
    stats
}
