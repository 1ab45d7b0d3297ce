//! Bounds of the walk along a descriptor chain.

use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, Region};

use super::*;
use crate::format::{MAX_QUEUE_SIZE, RingAddresses};

/// Guest address of the available ring.
const AVAIL: u64 = 0x8_0000;

/// A ring whose descriptors form a circle.
fn circle(size: u16) -> SplitDevice {
    circle_in_memory(size).0
}

/// As [`circle`], with its memory.
fn circle_in_memory(size: u16) -> (SplitDevice, GuestMemory) {
    let region = Region::shared("ring", 1 << 20, GuestAddress(0)).unwrap().0;
    let memory = GuestMemory::new(vec![Arc::new(region)]).unwrap();
    for index in 0..size {
        let desc = Descriptor { address: 0, len: 0, flags: DESC_NEXT, next: (index + 1) % size };
        let bytes = desc.to_words().map(u64::to_ne_bytes).concat();
        memory.write(GuestAddress(u64::from(index) * 16), &bytes).unwrap();
    }
    let at = RingAddresses { desc: GuestAddress(0), avail: GuestAddress(AVAIL), used: GuestAddress(0xa_0000) };
    (SplitDevice::new(SplitRing::resolve(&memory, &at, size).unwrap(), 0, false), memory)
}

/// Follows a chain to its end. Returns the number of descriptors and the error that ended it.
fn follow(ring: &SplitDevice) -> (u16, VirtqueueError) {
    let mut desc = ring.descriptor(0);
    let mut seen = 1;
    loop {
        match ring.next_descriptor(&desc, seen) {
            Ok(next) => desc = next,
            Err(broken) => return (seen, broken),
        }
        seen += 1;
    }
}

#[test]
fn a_chain_is_as_long_as_its_table_at_most() {
    for size in [1, 2, 64, 1024] {
        assert_eq!(follow(&circle(size)), (size, CHAIN_LOOP));
    }
}

#[test]
fn a_chain_of_a_large_ring_is_no_longer_than_a_request_can_be() {
    for size in [2048, MAX_QUEUE_SIZE] {
        assert_eq!(follow(&circle(size)), (1026, CHAIN_TOO_LONG));
    }
}
