//! The takeover: a new process takes over all devices of this one, unnoticed by guests.
//!
//! The new process (the *successor*) is started with the same configuration. It calls the verb `takeover` of the
//! running one (the *predecessor*) with one end of a socket pair, which carries all further messages:
//!
//! 1. The predecessor offers its sockets, the open images with their locks, and its devices. It changes nothing from
//!    here on.
//! 2. The successor opens its storage, starts its workers and its devices, which stand by, and reports that.
//! 3. All control threads of the predecessor are held, and the connections go to the successor, which prepares each. Up
//!    to here a failure leaves the predecessor as it was.
//! 4. One device after the other is drained here and started there.
//! 5. Interfaces without connections stop here and start there. The predecessor ends.
//!
//! `channel` sends and receives. `predecessor` and `successor` are each side's view of the other. `images` are open
//! images of the other, `limits` the used tokens of guests' limits.

mod channel;
mod images;
mod limits;
mod predecessor;
mod successor;

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use self::limits::UsedLimits;
use crate::config_error::ConfigError;
use crate::contract::SavedContracts;

pub(crate) use images::{HandedFiles, HandedImages};
pub use predecessor::Predecessor;
pub(crate) use successor::start;

/// The verb that begins it.
pub(crate) const VERB: &str = "takeover";

/// The version of the messages. Both processes must have the same.
pub(crate) const PROTOCOL: u64 = 1;

/// Reasons why a takeover fails.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// The admin socket of the predecessor.
    #[error("takeover: {0}")]
    Admin(#[from] mqblk_admin::ClientError),
    /// The connection to the other process.
    #[error("takeover: the connection to the other process: {0}")]
    Io(#[from] io::Error),
    /// The other process has another version, or is another program.
    #[error("takeover: found {found}, expected {expected}")]
    Unexpected {
        /// The value that was found.
        found: String,
        /// The expected one.
        expected: String,
    },
    /// The other process has given up.
    #[error("takeover: the other process: {0}")]
    Refused(String),
    /// A mismatch in this process.
    #[error("takeover: {0}")]
    Failed(String),
}

impl From<TakeoverError> for ConfigError {
    fn from(error: TakeoverError) -> ConfigError {
        ConfigError::Host(Box::new(error))
    }
}

impl TakeoverError {
    fn unexpected(found: impl Into<String>, expected: impl Into<String>) -> TakeoverError {
        TakeoverError::Unexpected { found: found.into(), expected: expected.into() }
    }
}

/// A message. Descriptors are in the order of the fields that name them.
#[derive(Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case", deny_unknown_fields)]
enum Message {
    /// From the predecessor. Descriptors, as far as they exist: the listener of each device, admin, metrics, the lock
    /// of the state file, each image, the service manager's socket.
    Offer(Offer),
    /// From the successor: its devices stand by.
    StandsBy {
        /// The ids of its devices.
        devices: Vec<String>,
        /// The paths of their sockets.
        sockets: Vec<PathBuf>,
        /// The ids of devices that are out: their frontends have to connect again.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        out: Vec<String>,
    },
    /// From the predecessor: the connections of a device. Descriptors: those of `state`, then that of a waiting
    /// frontend.
    Connection {
        /// The device's id.
        device: String,
        /// The frontend's setup; `None` without a frontend.
        state: Option<String>,
        /// True if a second frontend waits.
        waits: bool,
    },
    /// From the predecessor: a device is served by the successor from now on.
    Serve {
        /// The device's id.
        device: String,
        /// The positions of its queues; `None` without a frontend.
        positions: Option<String>,
    },
    /// From the predecessor: it no longer serves anything.
    Finished {
        /// The used tokens of guests' limits.
        #[serde(default)]
        used: UsedLimits,
    },
    /// From the successor: the last message is done.
    Done,
    /// From the successor: the frontend of this connection has to connect again.
    Evicted {
        /// The reason.
        why: String,
    },
    /// The last message cannot be done, or the takeover is given up.
    Failed {
        /// The reason.
        why: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    protocol: u64,
    version: String,
    devices: Vec<OfferedDevice>,
    admin: Option<OfferedSocket>,
    metrics: Option<OfferedMetrics>,
    /// The path of the state file whose lock is passed.
    state: Option<PathBuf>,
    images: Vec<OfferedImage>,
    service_manager: Option<OfferedNotifications>,
    /// The devices as guests were given them. Daemons before this field begin with their configuration.
    #[serde(default)]
    contracts: SavedContracts,
}

/// A device that VMMs of guests connect to.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferedDevice {
    id: String,
    interface: String,
    socket: OfferedSocket,
    is_connected: bool,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferedSocket {
    path: PathBuf,
    /// True if the predecessor has made its file, which it would remove at its end.
    owns_file: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferedMetrics {
    /// As configured.
    address: String,
    owns_file: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferedImage {
    path: PathBuf,
    write: bool,
    direct: bool,
    exclusive: bool,
    /// True if only its header is read before a device of it is served. A successor that does not know this field
    /// cannot read the offer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    in_memory: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferedNotifications {
    /// The time in which it expects a sign of life, in microseconds.
    watchdog_us: Option<u64>,
}
