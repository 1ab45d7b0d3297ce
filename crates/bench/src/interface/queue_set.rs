//! Methods of [`ThreadQueues`](crate::device::ThreadQueues) that are the same words for the drivers' sets of queues.

/// Those that all sets have.
macro_rules! of_every_set {
    () => {
        fn wait(&mut self, count: u16, limit: Option<std::time::Duration>) -> Result<(), mqblk_driver::DriverError> {
            match limit {
                None => self.set.wait(count),
                Some(limit) => self.set.wait_at_most(count, limit),
            }
        }

        fn kicks(&self) -> u64 {
            self.set.kicks()
        }

        fn waker(&self) -> std::io::Result<mqblk_driver::Waker> {
            self.set.waker()
        }
    };
}

/// Those of sets whose queues belong to one disk, and to one thread.
macro_rules! of_a_disks_set {
    () => {
        const SPREADS: bool = true;
        const HANDS_OVER: bool = false;

        #[inline]
        fn queue_count(&self) -> usize {
            self.set.queues().len()
        }

        fn memory(&self) -> &std::sync::Arc<mqblk_memory::GuestMemory> {
            self.set.queues()[0].memory()
        }

        fn data_start(&self, queue: usize) -> mqblk_memory::GuestAddress {
            self.set.queues()[queue].data().0
        }

        #[inline]
        fn will_have_space(&self, queue: usize) -> bool {
            self.set.queues()[queue].in_flight() != 0
        }

        #[inline]
        fn peek(&mut self, queue: usize) -> Result<(u16, u16), mqblk_driver::DeviceError> {
            let queue = &mut self.set.queues_mut()[queue];
            Ok((queue.poll()?, queue.in_flight()))
        }

        #[inline(always)] // else the completion goes through memory
        fn reap(
            &mut self,
            queue: usize,
        ) -> Result<Option<crate::device::CompletedTransfer<Self::Status>>, mqblk_driver::DeviceError> {
            let done = self.set.queues_mut()[queue].reap()?;
            Ok(done.map(|done| crate::device::CompletedTransfer { user: done.user_data, status: done.status }))
        }
    };
}

pub(super) use {of_a_disks_set, of_every_set};
