//! Messages to a control thread of a device that is handed over.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender};

/// A device's connections, on their way to another process.
#[derive(Debug, Default)]
pub struct HandedConnection {
    /// The served frontend's state, as JSON; `None` without one.
    pub state: Option<String>,
    /// The descriptors that the state refers to.
    pub descriptors: Vec<OwnedFd>,
    /// Connection of a second frontend, which waits until the first has left.
    pub waiting: Option<OwnedFd>,
}

/// Error of taking a connection over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// The device here differs from the guest's: the configuration must be changed.
    #[error("{0}")]
    Configuration(String),
    /// The frontend's setup is not possible here: it must connect again.
    #[error("{0}")]
    Frontend(String),
}

/// A message to a control thread in standby.
pub(crate) enum StandbyMessage {
    /// Prepare to serve a connection.
    Adopt(HandedConnection, SyncSender<Result<(), AdoptError>>),
    /// Serve, with the positions of the connection's queues.
    Serve(Option<String>, SyncSender<Result<(), String>>),
}

pub(crate) type StandbyMessages = Receiver<StandbyMessage>;

/// The error for positions without a connection.
pub(crate) const POSITIONS_ALONE: &str = "positions: found some without a connection";

/// Asks a control thread to hold its device.
pub(crate) struct HoldRequest {
    pub(crate) reply: SyncSender<Result<HandedConnection, String>>,
    /// The end of the hold. Disconnected: the device is served further.
    pub(crate) end: Receiver<HoldEnd>,
}

/// The end of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldEnd {
    /// The device is served further.
    Resume,
    /// Another process serves the device.
    Release,
    /// The device is served further without the connection: the frontend connects again.
    Disconnect,
}
