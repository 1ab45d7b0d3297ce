//! The takeover: a new process serves what this one serves, and no guest notices.
//!
//! The new process (the *successor*) is started with the same configuration. It calls the verb `takeover` of the running one (the
//! *predecessor*) with one end of a socket pair, over which all the rest goes:
//!
//! 1. The predecessor offers its sockets, the open images with their locks, and its devices. It changes nothing from here on.
//! 2. The successor opens its storage, starts its workers and its devices, which stand by, and says so.
//! 3. All control threads of the predecessor are held, and the connections go to the successor, which prepares each. Up to here a failure
//!    leaves the predecessor as it was.
//! 4. One device after the other: its queues are drained here and started there.
//! 5. Interfaces without connections stop here and start there. The predecessor ends.
//!
//! `channel` sends and receives, `predecessor` and `successor` are what each side knows of the other, `images` are open images of the other,
//! `limits` what guests have used of their limits.

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

/// The verb by which it begins.
pub(crate) const VERB: &str = "takeover";

/// The version of what is sent. Both processes must have the same.
pub(crate) const PROTOCOL: u64 = 1;

/// Why no takeover takes place.
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
        /// What it sent.
        found: String,
        /// What would fit.
        expected: String,
    },
    /// The other process has given up.
    #[error("takeover: the other process: {0}")]
    Refused(String),
    /// Something does not fit here.
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

/// What is sent. Descriptors are in the order in which fields name them.
#[derive(Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case", deny_unknown_fields)]
enum Message {
    /// From the predecessor. Descriptors: the listener of each device, admin, metrics, the lock of the state file, each image, the service
    /// manager's socket; as far as they are there.
    Offer(Offer),
    /// From the successor: its devices stand by.
    StandsBy {
        /// The ids of its devices.
        devices: Vec<String>,
        /// The paths of their sockets.
        sockets: Vec<PathBuf>,
        /// The ids of those that are out: their frontends have to connect again.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        out: Vec<String>,
    },
    /// From the predecessor: the connections of a device. Descriptors: those of `state`, and then that of a frontend that waits.
    Connection {
        /// The device's id.
        device: String,
        /// What the frontend has set up; `None` without a frontend.
        state: Option<String>,
        /// A second frontend waits.
        waits: bool,
    },
    /// From the predecessor: a device is served by the successor from now on.
    Serve {
        /// The device's id.
        device: String,
        /// The positions of its queues; `None` without a frontend.
        positions: Option<String>,
    },
    /// From the predecessor: it serves nothing any more.
    Finished {
        /// What guests have used of their limits.
        #[serde(default)]
        used: UsedLimits,
    },
    /// From the successor: what the last message asks is done.
    Done,
    /// From the successor: the frontend of this connection has to connect again.
    Evicted {
        /// Why.
        why: String,
    },
    /// The last message cannot be followed, or the takeover is given up.
    Failed {
        /// Why.
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
    /// What guests were given. Daemons before this field begin with what their configuration says.
    #[serde(default)]
    contracts: SavedContracts,
}

/// A device that guests' VMMs connect to.
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
    /// The predecessor has made its file, and would remove it at its end.
    owns_file: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferedMetrics {
    /// As in the configuration.
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
    /// Nothing but its header is read before a device of it is served. A successor that does not know this cannot read the offer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    in_memory: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferedNotifications {
    /// The time in which it expects a sign of life, in microseconds.
    watchdog_us: Option<u64>,
}
