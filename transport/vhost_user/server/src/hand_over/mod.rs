//! The hand-over of a device to another process: what serves it there is the same connection, without the frontend's knowledge.
//!
//! In three steps. The device is *held*: its control thread reads no more messages, and what the frontend has set up goes to the other
//! process, which maps the guest's memory while the queues still run here. Then the queues are *drained*, and their positions follow: from
//! there on the other process serves them. Last the device is *released* here, or *resumed* if the other process did not get so far.
//!
//! `state` is what is sent, `held` the device of the process that hands it over, `adopted` that of the one that takes it.

pub(crate) mod adopted;
mod held;
pub(crate) mod state;

pub use adopted::{AdoptError, HandedConnection};
pub use held::{BegunHold, HeldDevice};
pub(crate) use held::{HoldEnd, HoldRequest};
