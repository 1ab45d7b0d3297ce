//! Layout of the memory shared with the server.

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;

use super::wire::{EVENT_BYTES, HEADER_BYTES, RESPONSE_BYTES, RESPONSE_HEAD_BYTES, TMF_STRIDE};
use crate::line::LINE;
use crate::setup::{AddressPlanner, DataArea, RingLayout};

/// Bytes from the header and response of one command to those of the next: header and fixed part of the response in
/// [one cache line](crate::line), then two lines for sense data.
pub(crate) const COMMAND_STRIDE: u32 = 3 * LINE;
/// Offset of the response behind the header.
pub(crate) const RESPONSE_OFFSET: u32 = LINE - RESPONSE_HEAD_BYTES;
const _: () = assert!(HEADER_BYTES <= RESPONSE_OFFSET && RESPONSE_OFFSET + RESPONSE_BYTES <= COMMAND_STRIDE);
/// Bytes that are allocated for a command: the lengths of [shared arrays](mqblk_memory::SharedArray) are powers of two.
pub(crate) const COMMAND_BYTES: u32 = COMMAND_STRIDE.next_power_of_two();

/// Guest addresses of a request queue's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScsiQueueLayout {
    pub(crate) ring: RingLayout,
    /// Headers and responses, [`COMMAND_STRIDE`] bytes each.
    pub(crate) commands: GuestAddress,
    pub(crate) data: DataArea,
}

impl ScsiQueueLayout {
    /// Returns the address of the header and of the response of the command in this slot.
    #[inline]
    pub(crate) fn command(&self, slot: u16) -> (GuestAddress, GuestAddress) {
        let header = self.commands.0 + u64::from(slot) * u64::from(COMMAND_STRIDE);
        (GuestAddress(header), GuestAddress(header + u64::from(RESPONSE_OFFSET)))
    }

    /// Allocates the memory of a queue of `size` entries.
    pub(crate) fn new(planner: &mut AddressPlanner, size: u16, data_len: ByteLen) -> ScsiQueueLayout {
        let n = u64::from(size);
        let ring = planner.allocate_ring(size);
        let commands = planner.allocate(u64::from(COMMAND_BYTES) * n);
        let data = DataArea { start: planner.allocate(data_len.0), len: data_len };
        ScsiQueueLayout { ring, commands, data }
    }
}

/// Guest addresses of the control and the event queue's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlLayout {
    pub(crate) control: RingLayout,
    pub(crate) requests: GuestAddress,
    pub(crate) responses: GuestAddress,
    pub(crate) event: RingLayout,
    pub(crate) events: GuestAddress,
}

impl ControlLayout {
    /// Allocates the memory of both queues, with `size` entries each.
    pub(crate) fn new(planner: &mut AddressPlanner, size: u16) -> ControlLayout {
        let n = u64::from(size);
        ControlLayout {
            control: planner.allocate_ring(size),
            requests: planner.allocate(u64::from(TMF_STRIDE) * n),
            responses: planner.allocate(n),
            event: planner.allocate_ring(size),
            events: planner.allocate(u64::from(EVENT_BYTES) * n),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_and_fixed_part_of_the_response_have_a_cache_line_of_their_own() {
        let layout = ScsiQueueLayout::new(&mut AddressPlanner::new(), 128, ByteLen(4096));
        let mut end = 0;
        for slot in 0..128 {
            let (header, response) = layout.command(slot);
            assert!(header.0 >= end, "the sense data of the slot before it end there");
            let lines = [header.0, header.0 + 50, response.0, response.0 + 11].map(|byte| byte / 64);
            assert_eq!(lines, [header.0 / 64; 4]);
            assert!(header.0 % 64 == 0 && response.0 >= header.0 + 51);
            end = response.0 + 108;
        }
        assert!(end <= layout.data.start.0);
    }
}
