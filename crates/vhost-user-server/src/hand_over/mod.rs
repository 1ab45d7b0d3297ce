//! The hand-over of a device to another process: its connection continues there, without the frontend's knowledge.
//!
//! In three steps. The device is *held*: its control thread reads no more messages, and the frontend's setup goes to
//! the other process, which maps the guest's memory while the queues still run here. Then the queues are *drained*, and
//! their positions follow: from then on the other process serves them. Last the device is *released* here, or *resumed*
//! if the other process fails before.
//!
//! `state` is the data sent, `messages` are those to the control threads of both processes. [`hold`](mod@crate::hold)
//! is the part of the process that hands the device over, [`adopt`](mod@crate::adopt) the part of the one that takes
//! it.

mod messages;
pub(crate) mod state;

pub use messages::{AdoptError, HandedConnection};
pub(crate) use messages::{HoldEnd, HoldRequest, POSITIONS_ALONE, StandbyMessage, StandbyMessages};
