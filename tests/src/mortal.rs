//! A back end that can be killed in the midst of what it does: wherever it uses something that tells.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mqblk_core::{DiskChannel, EventChannel, Finished, Request, Tag, Wake};
use mqblk_engine::Lane;
use mqblk_memory::{Buffer, GrantAccess, GrantCopy, GrantRef, PageArena, PageSlot};

use crate::overlay::AnyChannel;

/// What a panic carries that is a kill.
struct Killed;

/// Counts moments at which the back end may be killed, in the midst of what it does.
#[derive(Debug)]
pub struct Kill {
    left: AtomicU32,
}

impl Kill {
    /// Not at all.
    pub const NEVER: u32 = u32::MAX;

    /// Nobody is killed yet.
    pub fn new() -> Arc<Kill> {
        Arc::new(Kill { left: AtomicU32::new(Kill::NEVER) })
    }

    /// The back end dies at this moment from now.
    pub fn after(&self, moments: u32) {
        self.left.store(moments, Ordering::Relaxed);
    }

    /// A moment.
    pub fn moment(&self) {
        match self.left.load(Ordering::Relaxed) {
            Kill::NEVER => {}
            0 => {
                self.left.store(Kill::NEVER, Ordering::Relaxed);
                // Without the panic's message.
                resume_unwind(Box::new(Killed));
            }
            left => self.left.store(left - 1, Ordering::Relaxed),
        }
    }

    /// Does something within the back end. `None` when it was killed meanwhile.
    pub fn survives<R>(work: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => Some(result),
            Err(why) if why.is::<Killed>() => None,
            Err(why) => resume_unwind(why),
        }
    }
}

/// Something of the back end: it can be killed before and after each use of it.
#[derive(Debug)]
pub struct Mortal<T>(pub T, pub Arc<Kill>);

impl<T> Mortal<T> {
    /// Uses it.
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

/// A guest that looks by itself.
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
        lane: &mut Lane,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Finished<Buffer>>,
    ) -> usize {
        self.used(|channel| channel.submit(lane, batch, finished))
    }
    fn reap(&mut self, lane: &mut Lane, finished: &mut Vec<Finished<Buffer>>) -> usize {
        self.used(|channel| channel.reap(lane, finished))
    }
    fn cancel(&mut self, lane: &mut Lane, tags: &[Tag], finished: &mut Vec<Finished<Buffer>>) {
        self.0.cancel(lane, tags, finished);
    }
    fn outstanding(&self) -> u32 {
        self.0.outstanding()
    }
    fn deadline(&self) -> Option<std::time::Instant> {
        self.0.deadline()
    }
    fn close(&mut self, lane: &mut Lane) {
        self.0.close(lane);
    }
}
