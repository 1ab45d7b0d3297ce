//! A queue's share of the resources of its worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::dirty::DirtyLog;
use crate::fixed_buffers::FixedBufferUse;
use crate::guest::GuestMemory;
use crate::pool::{LeaseId, PooledContext};

/// A queue's share of the context of each worker that serves it: a lease on the guest's memory with its dirty log, a
/// share of the buffer pool, and an open file. It is the only list of these: it is used when a queue starts, when it
/// comes from another worker and when it leaves.
#[derive(Debug)]
pub struct MemoryShare {
    /// [`LeaseId::NONE`] while no worker serves the queue.
    lease: LeaseId,
    memory: Arc<GuestMemory>,
    fixed: FixedBufferUse,
    buffers: usize,
    log: Option<Arc<DirtyLog>>,
    fence: Option<Arc<OwnedFd>>,
}

impl MemoryShare {
    /// Returns the share of a queue that has at most `buffers` buffers of `memory` in use. The memory is not
    /// registered.
    pub fn new(memory: Arc<GuestMemory>, buffers: usize) -> MemoryShare {
        let fixed = FixedBufferUse::Off;
        MemoryShare { lease: LeaseId::NONE, memory, fixed, buffers, log: None, fence: None }
    }

    /// Registers the memory as fixed buffers.
    #[must_use]
    pub fn with_fixed_buffers(self, fixed: FixedBufferUse) -> MemoryShare {
        MemoryShare { fixed, ..self }
    }

    /// Marks writes to the memory in `log`.
    #[must_use]
    pub fn with_log(self, log: Option<Arc<DirtyLog>>) -> MemoryShare {
        MemoryShare { log, ..self }
    }

    /// Keeps `fence` open as [`PooledContext::keep_open`] does: if the lock of this file is free, the kernel has no
    /// request of the queue.
    #[must_use]
    pub fn with_fence(self, fence: Option<Arc<OwnedFd>>) -> MemoryShare {
        MemoryShare { fence, ..self }
    }

    /// Returns the lease of the worker that serves the queue; [`LeaseId::NONE`] if none does.
    #[inline(always)] // for each pull
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Takes the share of a context.
    ///
    /// # Errors
    /// Only with [`FixedBufferUse::On`], when the kernel refuses the registration. Nothing is taken then.
    pub fn enter(&mut self, context: &mut impl PooledContext) -> Result<(), String> {
        self.lease = self.adopt(context, &self.memory)?;
        context.pool().set_log(self.lease, self.log.as_ref());
        context.pool().reserve(self.buffers);
        if let Some(fence) = &self.fence {
            context.keep_open(fence);
        }
        Ok(())
    }

    /// Releases the share of a context that was [entered](Self::enter).
    pub fn leave(&mut self, context: &mut impl PooledContext) {
        context.pool().unreserve(self.buffers);
        context.retire(std::mem::replace(&mut self.lease, LeaseId::NONE));
        if let Some(fence) = &self.fence {
            context.let_close(fence);
        }
    }

    /// Switches to a new memory table of the same guest. Buffers in use keep the old one, and are logged as those of
    /// the new one.
    ///
    /// # Errors
    /// As [`enter`](Self::enter): the old table stays.
    pub fn relocate(&mut self, context: &mut impl PooledContext, memory: Arc<GuestMemory>) -> Result<(), String> {
        let lease = self.adopt(context, &memory)?;
        context.pool().inherit_log(self.lease, lease);
        context.retire(std::mem::replace(&mut self.lease, lease));
        self.memory = memory;
        Ok(())
    }

    /// Starts, changes or ends dirty logging of writes to the memory, also by buffers in use.
    pub fn set_log(&mut self, context: &mut impl PooledContext, log: Option<Arc<DirtyLog>>) {
        self.log = log;
        context.pool().set_log(self.lease, self.log.as_ref());
    }

    fn adopt(&self, context: &mut impl PooledContext, memory: &Arc<GuestMemory>) -> Result<LeaseId, String> {
        context.adopt(Arc::clone(memory), self.fixed).map_err(|error| format!("fixed-buffers=on: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, BufferPool, GuestAddress, Region, SharedFileRules, create_memfd};

    /// The context of a worker that counts the files that it keeps open.
    #[derive(Default)]
    struct TestContext {
        pool: BufferPool,
        open: usize,
    }

    impl mqblk_core::IoContext for TestContext {
        type Buffer = Buffer;
    }

    impl PooledContext for TestContext {
        fn pool(&mut self) -> &mut BufferPool {
            &mut self.pool
        }

        fn keep_open(&mut self, _: &Arc<OwnedFd>) {
            self.open += 1;
        }

        fn let_close(&mut self, _: &Arc<OwnedFd>) {
            self.open -= 1;
        }
    }

    fn table() -> Arc<GuestMemory> {
        let region = Region::shared("t", 4096, GuestAddress(0)).unwrap().0;
        Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
    }

    fn log() -> Arc<DirtyLog> {
        let file = create_memfd("log", 8).unwrap();
        Arc::new(DirtyLog::from_file(&file, SharedFileRules::default(), 0, 8).unwrap())
    }

    /// Returns true if a write by a queue with this share is marked in `log`.
    fn is_logged(context: &mut TestContext, share: &MemoryShare, log: &DirtyLog) -> bool {
        assert!(context.pool.write_bytes(share.lease(), GuestAddress(0), &[1]));
        log.test_and_clear(GuestAddress(0))
    }

    #[test]
    fn a_queue_takes_the_same_of_each_worker_and_leaves_nothing() {
        let (mut first, mut second) = (TestContext::default(), TestContext::default());
        let (memory, log) = (table(), log());
        let fence = Arc::new(OwnedFd::from(create_memfd("fence", 8).unwrap()));
        let share = MemoryShare::new(Arc::clone(&memory), 4).with_fence(Some(fence));
        let mut share = share.with_log(Some(Arc::clone(&log)));
        for context in [&mut first, &mut second] {
            share.enter(context).unwrap();
            assert!(context.open == 1 && is_logged(context, &share, &log));
            share.leave(context);
            assert_eq!((context.open, share.lease()), (0, LeaseId::NONE));
            assert_eq!(Arc::strong_count(&memory), 2, "the share has the table, and no lease");
        }
    }

    #[test]
    fn a_new_table_and_a_new_log_are_those_of_the_next_worker() {
        let (mut first, mut second) = (TestContext::default(), TestContext::default());
        let (old, new, log) = (table(), table(), log());
        let mut share = MemoryShare::new(Arc::clone(&old), 4);
        share.enter(&mut first).unwrap();
        let buffer = first.pool.take(share.lease());
        share.set_log(&mut first, Some(Arc::clone(&log)));
        share.relocate(&mut first, Arc::clone(&new)).unwrap();
        assert!(is_logged(&mut first, &share, &log));
        assert_eq!(Arc::strong_count(&old), 2, "a buffer in use keeps its table");
        first.pool.release(buffer);
        assert_eq!(Arc::strong_count(&old), 1);
        share.leave(&mut first);
        share.enter(&mut second).unwrap();
        assert!(is_logged(&mut second, &share, &log));
        share.set_log(&mut second, None);
        assert!(!is_logged(&mut second, &share, &log));
        assert_eq!(Arc::strong_count(&new), 3, "one lease");
    }

    #[test]
    #[should_panic(expected = "index out of bounds")]
    fn a_queue_that_no_worker_serves_has_no_memory() {
        let (mut context, mut share) = (TestContext::default(), MemoryShare::new(table(), 4));
        share.enter(&mut context).unwrap();
        share.leave(&mut context);
        let _buffer = context.pool.take(share.lease());
    }
}
