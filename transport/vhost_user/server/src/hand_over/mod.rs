//! The hand-over of a device to another process: what serves it there is the same connection, without the frontend's knowledge.
//!
//! In three steps. The device is *held*: its control thread reads no more messages, and what the frontend has set up goes to the other
//! process, which maps the guest's memory while the queues still run here. Then the queues are *drained*, and their positions follow: from
//! there on the other process serves them. Last the device is *released* here, or *resumed* if the other process did not get so far.
//!
//! `state` is what is sent, `messages` is what the control threads of both processes get. [`hold`](mod@crate::hold) is the part of the process
//! that hands the device over, [`adopt`](mod@crate::adopt) that of the one that takes it.

mod messages;
pub(crate) mod state;

pub use messages::{AdoptError, HandedConnection};
pub(crate) use messages::{HoldEnd, HoldRequest, POSITIONS_ALONE, StandbyMessage, StandbyMessages};
