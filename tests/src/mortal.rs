//! A backend that is killed before or after any use of a resource, inside the test's process.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mqblk_core::{DiskChannel, EventChannel, Finished, Request, Tag, Wake};
use mqblk_engine::Lane;
use mqblk_memory::{Buffer, GrantAccess, GrantCopy, GrantRef, PageArena, PageSlot};

use crate::overlay::AnyChannel;

/// Panic payload of a kill.
struct Killed;

/// Counts the kill points that the backend passes, and kills it at one of them.
#[derive(Debug)]
pub struct Kill {
    left: AtomicU32,
}

impl Kill {
    /// Never kills.
    pub const NEVER: u32 = u32::MAX;

    /// Creates a switch that never kills.
    pub fn new() -> Arc<Kill> {
        Arc::new(Kill { left: AtomicU32::new(Kill::NEVER) })
    }

    /// Kills the backend at the kill point after `moments` more.
    pub fn after(&self, moments: u32) {
        self.left.store(moments, Ordering::Relaxed);
    }

    /// Passes a kill point: panics with `Killed` if it is the armed one.
    pub fn moment(&self) {
        match self.left.load(Ordering::Relaxed) {
            Kill::NEVER => {}
            0 => {
                self.left.store(Kill::NEVER, Ordering::Relaxed);
                // `resume_unwind` does not print a message.
                resume_unwind(Box::new(Killed));
            }
            left => self.left.store(left - 1, Ordering::Relaxed),
        }
    }

    /// Runs `work` as part of the backend. Returns `None` if it was killed.
    pub fn survives<R>(work: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => Some(result),
            Err(why) if why.is::<Killed>() => None,
            Err(why) => resume_unwind(why),
        }
    }
}

/// A resource of the backend, with a kill point before and after each use.
#[derive(Debug)]
pub struct Mortal<T>(pub T, pub Arc<Kill>);

impl<T> Mortal<T> {
    /// Uses the resource.
    pub fn used<R>(&mut self, work: impl FnOnce(&mut T) -> R) -> R {
        self.1.moment();
        let result = work(&mut self.0);
        self.1.moment();
        result
    }
}

impl GrantAccess for Mortal<Box<dyn GrantAccess>> {
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        self.used(|grants| grants.copy(arena, copies))
    }
    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> io::Result<()> {
        self.used(|grants| grants.map(arena, first, refs, writable))
    }
    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> io::Result<()> {
        self.used(|grants| grants.unmap(arena, first))
    }
}

/// The event channel of a guest that polls.
#[derive(Debug)]
pub struct Silent;

impl EventChannel for Mortal<Silent> {
    fn notify(&self) {
        self.1.moment();
    }
    fn take(&self) {
        self.1.moment();
    }
    fn unmask(&self) {
        self.1.moment();
    }
}

impl Wake for Mortal<Arc<dyn Wake>> {
    fn wake(&self) {
        self.1.moment();
        self.0.wake();
        self.1.moment();
    }
}

impl DiskChannel<Lane> for Mortal<AnyChannel> {
    fn submit(
        &mut self,
        context: &mut Lane,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Finished<Buffer>>,
    ) -> usize {
        self.used(|channel| channel.submit(context, batch, finished))
    }
    fn reap(&mut self, context: &mut Lane, finished: &mut Vec<Finished<Buffer>>) -> usize {
        self.used(|channel| channel.reap(context, finished))
    }
    fn cancel(&mut self, context: &mut Lane, tags: &[Tag], finished: &mut Vec<Finished<Buffer>>) {
        self.0.cancel(context, tags, finished);
    }
    fn outstanding(&self) -> u32 {
        self.0.outstanding()
    }
    fn deadline(&self) -> Option<std::time::Instant> {
        self.0.deadline()
    }
    fn close(&mut self, context: &mut Lane) {
        self.0.close(context);
    }
}
