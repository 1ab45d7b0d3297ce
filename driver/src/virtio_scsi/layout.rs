//! Layout of the memory shared with the server.

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;

use super::wire::{EVENT_BYTES, HEADER_STRIDE, RESPONSE_STRIDE, TMF_STRIDE};
use crate::setup::{AddressPlanner, DataArea, RingLayout};

/// Guest addresses of a request queue's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScsiQueueLayout {
    pub(crate) ring: RingLayout,
    /// Headers, one cache line each.
    pub(crate) headers: GuestAddress,
    /// Responses, two cache lines each. The second one is written only for long sense data.
    pub(crate) responses: GuestAddress,
    pub(crate) data: DataArea,
}

impl ScsiQueueLayout {
    /// Allocates the memory of a queue of `size` entries.
    pub(crate) fn new(planner: &mut AddressPlanner, size: u16, data_len: ByteLen) -> ScsiQueueLayout {
        let n = u64::from(size);
        let ring = planner.allocate_ring(size);
        let headers = planner.allocate(u64::from(HEADER_STRIDE) * n);
        let responses = planner.allocate(u64::from(RESPONSE_STRIDE) * n);
        let data = DataArea { start: planner.allocate(data_len.0), len: data_len };
        ScsiQueueLayout { ring, headers, responses, data }
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
