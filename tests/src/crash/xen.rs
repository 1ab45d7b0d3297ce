//! Xen's block interface.

use std::sync::Arc;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions, BlkfrontQueue, BlkfrontQueueSet, BlkfrontStatus};
use mqblk_driver::{DataSegment, SubmitError, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use super::load::DATA_BYTES;
use crate::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType};

/// Distribution of a load's request types.
const REQUEST_MIX: [RequestType; 16] = {
    let mut works = [RequestType::Read; 16];
    let mut at = 7;
    while at < 13 {
        works[at] = RequestType::Write;
        at += 1;
    }
    works[13] = RequestType::Discard;
    works[14] = RequestType::WriteThrough;
    works[15] = RequestType::Flush;
    works
};

/// Most bytes of a write barrier.
const BARRIER_BYTES: u32 = 11 * 4096;

/// All rings of a device.
pub struct XenQueues(BlkfrontQueueSet);

impl XenQueues {
    /// Connects. Returns the device and its rings.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(options: &BlkfrontOptions, queues: u16) -> (BlkfrontDevice, XenQueues) {
        let mut options = options.clone();
        options.queues = queues;
        options.data_per_queue = ByteLen(DATA_BYTES);
        let mut device = BlkfrontDevice::connect(&options).expect("the disk");
        let set = device.take_queues().pop().expect("one set of queues");
        (device, XenQueues(set))
    }

    /// Returns the rings.
    pub fn into_set(self) -> BlkfrontQueueSet {
        self.0
    }

    fn queue(&mut self, index: usize) -> &mut BlkfrontQueue {
        &mut self.0.queues_mut()[index]
    }
}

impl DeviceQueues for XenQueues {
    fn queue_count(&mut self) -> usize {
        self.0.queues_mut().len()
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(self.queue(0).memory())
    }
    fn data_address(&mut self, queue: usize) -> GuestAddress {
        self.queue(queue).data().0
    }
    fn max_request_bytes(&mut self) -> u32 {
        u32::from(self.queue(0).max_segments()) * 4096
    }
    fn request_mix(&self) -> &[RequestType] {
        &REQUEST_MIX
    }
    fn max_ranges(&self) -> usize {
        1
    }
    fn submit(&mut self, queue: usize, user: u32, request: &LoadRequest) -> bool {
        let start = Sector512(request.start());
        let segment = DataSegment { address: request.data, len: request.sectors() * 512 };
        let queue = self.queue(queue);
        let result = match request.request_type {
            RequestType::Read => queue.read(user, start, segment),
            RequestType::WriteThrough if segment.len <= BARRIER_BYTES => queue.barrier(user, start, [segment]),
            RequestType::Write | RequestType::WriteThrough => queue.write(user, start, segment),
            RequestType::Flush => queue.flush(user),
            RequestType::Discard => queue.discard(user, start, request.sectors().into(), false),
            other => panic!("{other:?} is none of Xen's"),
        };
        match result {
            Ok(()) => true,
            Err(SubmitError::Full) => false,
            Err(other) => panic!("{request:?}: {other}"),
        }
    }
    fn publish(&mut self) {
        self.0.queues_mut().iter_mut().for_each(BlkfrontQueue::publish);
    }
    fn reap(&mut self, done: &mut Vec<(u32, RequestOutcome)>) {
        for queue in self.0.queues_mut() {
            queue.poll().expect("a backend that keeps the protocol");
            while let Some(one) = queue.reap().expect("a backend that keeps the protocol") {
                assert_eq!(one.status, BlkfrontStatus::Ok, "request {}", one.user_data);
                done.push((one.user_data, RequestOutcome::Good));
            }
        }
    }
    fn wait(&mut self) {
        self.0.wait(1).expect("a backend that keeps the protocol");
    }
    fn waker(&mut self) -> Waker {
        self.0.waker().expect("a waker")
    }
}
