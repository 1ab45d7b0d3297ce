//! A backend that is killed before or after any use of a resource, inside the test's process.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mqblk_core::{Completion, DiskChannel, EventChannel, Request, Tag, Wake};
use mqblk_engine::{AnyDisk, UringContext};
use mqblk_memory::{Buffer, GrantAccess, GrantCopy, GrantRef, PageArena, PageSlot};

use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};

/// Panic payload of a kill.
struct Killed;

/// Counts the kill points that the backend passes, and kills it at one of them.
#[derive(Debug)]
pub(crate) struct KillSwitch {
    points_left: AtomicU32,
}

impl KillSwitch {
    /// Never kills.
    pub(crate) const NEVER: u32 = u32::MAX;

    /// Creates a switch that never kills.
    pub(crate) fn new() -> Arc<KillSwitch> {
        Arc::new(KillSwitch { points_left: AtomicU32::new(KillSwitch::NEVER) })
    }

    /// Kills the backend after `moments` more kill points.
    pub(crate) fn arm(&self, moments: u32) {
        self.points_left.store(moments, Ordering::Relaxed);
    }

    /// Passes a kill point: panics with `Killed` if it is the armed one.
    pub(crate) fn kill_point(&self) {
        match self.points_left.load(Ordering::Relaxed) {
            KillSwitch::NEVER => {}
            0 => {
                self.points_left.store(KillSwitch::NEVER, Ordering::Relaxed);
                // `resume_unwind` does not print a message.
                resume_unwind(Box::new(Killed));
            }
            left => self.points_left.store(left - 1, Ordering::Relaxed),
        }
    }

    /// Runs `work` as part of the backend. Returns `None` if it was killed.
    pub(crate) fn run<R>(work: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => Some(result),
            Err(why) if why.is::<Killed>() => None,
            Err(why) => resume_unwind(why),
        }
    }
}

/// A resource of the backend, with a kill point before and after each use.
#[derive(Debug)]
pub(crate) struct Killable<T>(pub T, pub Arc<KillSwitch>);

impl<T> Killable<T> {
    /// Uses the resource.
    pub(crate) fn with<R>(&mut self, work: impl FnOnce(&mut T) -> R) -> R {
        self.1.kill_point();
        let result = work(&mut self.0);
        self.1.kill_point();
        result
    }
}

impl GrantAccess for Killable<Box<dyn GrantAccess>> {
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        self.with(|grants| grants.copy(arena, copies))
    }
    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> io::Result<()> {
        self.with(|grants| grants.map(arena, first, refs, writable))
    }
    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> io::Result<()> {
        self.with(|grants| grants.unmap(arena, first))
    }
}

/// The event channel of a guest that polls.
#[derive(Debug)]
pub(crate) struct NoEvents;

impl EventChannel for Killable<NoEvents> {
    fn notify(&self) {
        self.1.kill_point();
    }
    fn take(&self) {
        self.1.kill_point();
    }
    fn unmask(&self) {
        self.1.kill_point();
    }
}

impl Wake for Killable<Arc<dyn Wake>> {
    fn wake(&self) {
        self.1.kill_point();
        self.0.wake();
        self.1.kill_point();
    }
}

/// Returns a disk with kill points before and after each submission and completion.
pub(crate) fn killable_disk(disk: Arc<AnyDisk>, kill: &Arc<KillSwitch>) -> Arc<AnyDisk> {
    let kill = Arc::clone(kill);
    Arc::new(FilterDisk::new(disk, move |channel| Box::new(Killable(channel, Arc::clone(&kill))) as AnyChannel))
}

impl DiskChannel<UringContext> for Killable<AnyChannel> {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.with(|channel| channel.submit(context, batch, finished))
    }
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        self.with(|channel| channel.reap(context, finished))
    }
    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        self.0.cancel(context, tags, finished);
    }
    fn outstanding(&self) -> u32 {
        self.0.outstanding()
    }
    fn deadline(&self) -> Option<std::time::Instant> {
        self.0.deadline()
    }
    fn close(&mut self, context: &mut UringContext) {
        self.0.close(context);
    }
}
