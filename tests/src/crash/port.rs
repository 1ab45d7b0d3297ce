//! What a load needs of an interface.

use std::sync::Arc;

use mqblk_driver::Waker;
use mqblk_memory::{GuestAddress, GuestMemory};

use super::oracle::Range;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Reads its one range.
    Read,
    /// Writes it.
    Write,
    /// Writes it, past every cache.
    WriteThrough,
    /// Makes what was written durable.
    Flush,
    /// Gives the space of its ranges back.
    Discard,
    /// Writes zeroes to its ranges.
    Zero,
    /// COMPARE AND WRITE of one block: its data is what to compare with, then what to write.
    Compare,
    /// ORWRITE of one block.
    Or,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Order {
    /// Which disk of the port.
    pub disk: usize,
    /// What it does.
    pub work: Work,
    /// Where.
    pub ranges: Vec<Range>,
    /// Where its data lies, and what it needs besides.
    pub data: GuestAddress,
}

impl Order {
    /// Sectors of its first range.
    pub fn sectors(&self) -> u32 {
        self.ranges.first().map_or(0, |(_, count)| *count)
    }

    /// The first sector.
    pub fn start(&self) -> u64 {
        self.ranges.first().map_or(0, |(start, _)| *start)
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Well.
    Good,
    /// By task management.
    Cancelled,
    /// Not carried out: the unit first had to say that something has happened to it (ASC and ASCQ).
    Attention(u8, u8),
    /// What was there is not what was expected.
    Miscompare,
}

/// Task management.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manage {
    /// Ends the request that was submitted for this user.
    Abort(u32),
    /// Ends all requests of the disk.
    Reset,
}

/// The queues of one device, driven by one thread. Everything panics where the device does wrong.
pub trait Port {
    /// How many queues.
    fn queues(&mut self) -> usize;
    /// Where data lies.
    fn memory(&mut self) -> Arc<GuestMemory>;
    /// Where a queue's stretch of data begins.
    fn data(&mut self, queue: usize) -> GuestAddress;
    /// Most bytes of a read or write.
    fn largest(&mut self) -> u32;
    /// What requests there are, some more than once: a load draws from these.
    fn works(&self) -> &[Work];
    /// Most ranges of a discard.
    fn ranges(&self) -> usize {
        3
    }
    /// Puts a request on a queue. `false`: there is no room now.
    fn submit(&mut self, queue: usize, user: u32, order: &Order) -> bool;
    /// Shows the device what was put on.
    fn publish(&mut self);
    /// Takes all answers that are there.
    fn reap(&mut self, done: &mut Vec<(u32, End)>);
    /// Sleeps until the device calls, if something is in flight.
    fn wait(&mut self);
    /// Ends such a sleep.
    fn waker(&mut self) -> Waker;
    /// Asks for task management. `false`: not now, or there is none.
    fn manage(&mut self, _disk: usize, _what: Manage) -> bool {
        false
    }
    /// Whether task management is under way.
    fn is_managing(&self) -> bool {
        false
    }
}
