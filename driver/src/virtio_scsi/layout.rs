//! Where everything lies in the memory that the driver shares with the server.

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;

use super::wire::{ANSWER_STRIDE, EVENT_BYTES, HEADER_STRIDE, TMF_STRIDE};
use crate::setup::{DataArea, Planner, RingLayout};

/// A request queue's memory, in guest addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLayout {
    pub(crate) ring: RingLayout,
    /// Headers, a cache line each.
    pub(crate) headers: GuestAddress,
    /// Answers, two cache lines each, of which the second is written with long sense data only.
    pub(crate) answers: GuestAddress,
    pub(crate) data: DataArea,
}

impl QueueLayout {
    /// Lays a queue of `size` entries out.
    pub(crate) fn new(planner: &mut Planner, size: u16, data_len: ByteLen) -> QueueLayout {
        let n = u64::from(size);
        let ring = planner.ring(size);
        let headers = planner.part(u64::from(HEADER_STRIDE) * n);
        let answers = planner.part(u64::from(ANSWER_STRIDE) * n);
        let data = DataArea { start: planner.part(data_len.0), len: data_len };
        QueueLayout { ring, headers, answers, data }
    }
}

/// The control and the event queue's memory, in guest addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlLayout {
    pub(crate) control: RingLayout,
    pub(crate) tasks: GuestAddress,
    pub(crate) answers: GuestAddress,
    pub(crate) event: RingLayout,
    pub(crate) events: GuestAddress,
}

impl ControlLayout {
    /// Lays both out with `size` entries.
    pub(crate) fn new(planner: &mut Planner, size: u16) -> ControlLayout {
        let n = u64::from(size);
        ControlLayout {
            control: planner.ring(size),
            tasks: planner.part(u64::from(TMF_STRIDE) * n),
            answers: planner.part(n),
            event: planner.ring(size),
            events: planner.part(u64::from(EVENT_BYTES) * n),
        }
    }
}
