//! The interface between a load and a device's queues.

use std::sync::Arc;

use mqblk_driver::Waker;
use mqblk_memory::{GuestAddress, GuestMemory};

/// Sectors of a request: the first one, and their number.
pub type SectorRange = (u64, u32);

/// Type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestType {
    /// Reads its range.
    Read,
    /// Writes its range.
    Write,
    /// Writes its range with FUA.
    WriteThrough,
    /// Flushes the write cache.
    Flush,
    /// Discards its ranges.
    Discard,
    /// Writes zeroes to its ranges.
    WriteZeroes,
    /// COMPARE AND WRITE of one block: the data is the verify instance, then the write instance.
    CompareAndWrite,
    /// ORWRITE of one block.
    OrWrite,
}

/// A request.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// Index of the disk.
    pub disk: usize,
    /// Its type.
    pub request_type: RequestType,
    /// Sectors.
    pub ranges: Vec<SectorRange>,
    /// Address of its data and its parameter list.
    pub data: GuestAddress,
}

impl LoadRequest {
    /// Returns the length of its first range in sectors.
    pub fn sectors(&self) -> u32 {
        self.ranges.first().map_or(0, |(_, count)| *count)
    }

    /// Returns its first sector.
    pub fn start(&self) -> u64 {
        self.ranges.first().map_or(0, |(start, _)| *start)
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// Success.
    Good,
    /// Cancelled by task management.
    Cancelled,
    /// Not executed: the logical unit had a unit attention pending (ASC and ASCQ).
    Attention(u8, u8),
    /// COMPARE AND WRITE: the data differs.
    Miscompare,
}

/// Task management.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskFunction {
    /// ABORT TASK of the request with this user value.
    Abort(u32),
    /// LOGICAL UNIT RESET.
    Reset,
}

/// The queues of one device, driven by one thread. Methods panic on a device error.
pub trait DeviceQueues {
    /// Returns the number of queues.
    fn queue_count(&mut self) -> usize;
    /// Returns the memory of the data.
    fn memory(&mut self) -> Arc<GuestMemory>;
    /// Returns the start of a queue's data area.
    fn data_address(&mut self, queue: usize) -> GuestAddress;
    /// Returns the most bytes of a read or write.
    fn max_request_bytes(&mut self) -> u32;
    /// Returns the distribution of request types.
    fn request_mix(&self) -> &[RequestType];
    /// Returns the most ranges of a discard.
    fn max_ranges(&self) -> usize {
        3
    }
    /// Puts a request on a queue. Returns false if the queue is full.
    fn submit(&mut self, queue: usize, user: u32, request: &LoadRequest) -> bool;
    /// Publishes the requests.
    fn publish(&mut self);
    /// Appends all completions.
    fn reap(&mut self, done: &mut Vec<(u32, RequestOutcome)>);
    /// Waits for a call, if a request is in flight.
    fn wait(&mut self);
    /// Returns a handle that wakes [`wait`](Self::wait).
    fn waker(&mut self) -> Waker;
    /// Sends a task management function. Returns false if that is not possible now, or not supported.
    fn manage(&mut self, _disk: usize, _what: TaskFunction) -> bool {
        false
    }
    /// Returns true if a task management function is in flight.
    fn is_managing(&self) -> bool {
        false
    }
}
