//! Xen's block interface.

use std::sync::Arc;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::blkfront::{Device, Options, Queue, QueueSet, Status};
use mqblk_driver::{Piece, Refused, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use super::load::DATA;
use super::port::{End, Order, Port, Work};

/// The distribution that a load draws request types from.
const WORKS: [Work; 16] = {
    let mut works = [Work::Read; 16];
    let mut at = 7;
    while at < 13 {
        works[at] = Work::Write;
        at += 1;
    }
    works[13] = Work::Discard;
    works[14] = Work::WriteThrough;
    works[15] = Work::Flush;
    works
};

/// Most bytes of a write barrier.
const BARRIER_BYTES: u32 = 11 * 4096;

/// All rings of a device.
pub struct Xen(QueueSet);

impl Xen {
    /// Connects. Returns the device and its rings.
    ///
    /// # Panics
    /// When the daemon does not play along.
    pub fn connect(options: &Options, queues: u16) -> (Device, Xen) {
        let mut options = options.clone();
        options.queues = queues;
        options.data_per_queue = ByteLen(DATA);
        let mut device = Device::connect(&options).expect("the disk");
        let set = device.take_queues().pop().expect("one set of queues");
        (device, Xen(set))
    }

    /// Returns the rings.
    pub fn into_set(self) -> QueueSet {
        self.0
    }

    fn queue(&mut self, index: usize) -> &mut Queue {
        &mut self.0.queues()[index]
    }
}

impl Port for Xen {
    fn queues(&mut self) -> usize {
        self.0.queues().len()
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(self.queue(0).memory())
    }
    fn data(&mut self, queue: usize) -> GuestAddress {
        self.queue(queue).data().0
    }
    fn largest(&mut self) -> u32 {
        u32::from(self.queue(0).segments()) * 4096
    }
    fn works(&self) -> &[Work] {
        &WORKS
    }
    fn ranges(&self) -> usize {
        1
    }
    fn submit(&mut self, queue: usize, user: u32, request: &Order) -> bool {
        let start = Sector512(request.start());
        let segment = Piece { address: request.data, len: request.sectors() * 512 };
        let queue = self.queue(queue);
        let result = match request.work {
            Work::Read => queue.read(user, start, segment),
            Work::WriteThrough if segment.len <= BARRIER_BYTES => queue.barrier(user, start, [segment]),
            Work::Write | Work::WriteThrough => queue.write(user, start, segment),
            Work::Flush => queue.flush(user),
            Work::Discard => queue.discard(user, start, request.sectors().into(), false),
            other => panic!("{other:?} is none of Xen's"),
        };
        match result {
            Ok(()) => true,
            Err(Refused::Full) => false,
            Err(other) => panic!("{request:?}: {other}"),
        }
    }
    fn publish(&mut self) {
        self.0.queues().iter_mut().for_each(Queue::publish);
    }
    fn reap(&mut self, done: &mut Vec<(u32, End)>) {
        for queue in self.0.queues() {
            queue.look().expect("a backend that keeps the protocol");
            while let Some(one) = queue.reap().expect("a backend that keeps the protocol") {
                assert_eq!(one.status, Status::Ok, "request {}", one.user);
                done.push((one.user, End::Good));
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
