//! Why a device cannot be used (any more), and why it does not take a request.

use std::io;

use mqblk_memory::MemoryError;
use mqblk_ring::blkif;
use mqblk_ring::split::SplitSetupError;
use mqblk_ring::split::driver as virtqueue;
use mqblk_vhost_user_client::ClientError;
use mqblk_xen::XenError;
use mqblk_xen::store::XenstoreError;
use mqblk_xen::vbd::{MalformedValue, XenbusState};

use crate::blkfront::ResponseError;

/// How a device broke a ring's protocol. The queue is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// A virtqueue's.
    #[error(transparent)]
    Virtqueue(#[from] virtqueue::DeviceError),
    /// A blkif ring's.
    #[error(transparent)]
    Blkif(#[from] ResponseError),
}

/// Why a request was not taken. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Back-pressure: no room until answers are taken.
    #[error("the ring is full")]
    Full,
    /// More pieces than a request can have.
    #[error("the request has more pieces than a request can have ({0})")]
    TooManySegments(u16),
    /// Readable pieces come before writable ones (virtio 1.3 section 2.7.4.2).
    #[error("a readable piece after a writable one")]
    ReadableAfterWritable,
    /// A request needs a piece, and a piece a byte.
    #[error("the request has no pieces, or an empty one")]
    Empty,
    /// A piece that no segments can name.
    #[error("a piece of {len} bytes at {address:#x}, expected whole sectors of 512 bytes in granted memory")]
    NotGranted {
        /// Where it starts.
        address: u64,
        /// Its bytes.
        len: u32,
    },
    /// The backend broke the protocol before.
    #[error("the queue is disabled: its back-end broke the protocol")]
    Disabled,
}

impl From<virtqueue::ChainRefused> for SubmitError {
    #[inline]
    fn from(refused: virtqueue::ChainRefused) -> SubmitError {
        match refused {
            virtqueue::ChainRefused::Full => SubmitError::Full,
            virtqueue::ChainRefused::TooManySegments(most) => SubmitError::TooManySegments(most),
            virtqueue::ChainRefused::ReadableAfterWritable => SubmitError::ReadableAfterWritable,
            virtqueue::ChainRefused::Empty => SubmitError::Empty,
        }
    }
}

/// Why a device cannot be used (any more).
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The conversation on the socket failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Shared memory could not be made.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A ring could not be laid out.
    #[error(transparent)]
    Ring(#[from] SplitSetupError),
    /// The device broke the protocol.
    #[error("the device broke the ring's protocol: {0}")]
    Device(#[from] DeviceError),
    /// The host refused a resource.
    #[error("{what}: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The host's answer.
        source: io::Error,
    },
    /// A value of the options does not fit the server.
    #[error("{field}: found {found}, expected {expected}")]
    Option {
        /// Which one.
        field: &'static str,
        /// What it was.
        found: u64,
        /// What it may be.
        expected: String,
    },
    /// The device's configuration makes no sense.
    #[error("configuration field {field}: found {found}, expected {expected}")]
    Config {
        /// Which one.
        field: &'static str,
        /// What the device says.
        found: u64,
        /// What it may say.
        expected: &'static str,
    },
    /// Xenstore refused, or is gone.
    #[error(transparent)]
    Xenstore(#[from] XenstoreError),
    /// Xen refused a resource.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// There is no such device (yet): its frontend's directory has no backend.
    #[error("{0}: found none, expected the directory of a back-end: the toolstack has made no such device")]
    NoDevice(String),
    /// A value in xenstore makes no sense.
    #[error(transparent)]
    MalformedKey(#[from] MalformedValue),
    /// A value that every device has is not there.
    #[error("xenstore key {0}: found none, expected it of every device that is connected")]
    MissingKey(&'static str),
    /// The backend's state is not what it should be now.
    #[error("the back-end did not {step}: found it in state {found}: {why}")]
    BackendState {
        /// What it was to do.
        step: &'static str,
        /// Its state.
        found: XenbusState,
        /// What it says, or what is known.
        why: String,
    },
    /// A blkif ring could not be laid out.
    #[error(transparent)]
    BlkifRing(#[from] blkif::BlkifSetupError),
    /// The device did not answer in time.
    #[error("{0}: no answer in time")]
    Timeout(&'static str),
}

impl From<virtqueue::DeviceError> for DriverError {
    fn from(error: virtqueue::DeviceError) -> DriverError {
        DriverError::Device(error.into())
    }
}

impl DriverError {
    /// The error of an eventfd.
    pub(crate) fn eventfd(source: io::Error) -> DriverError {
        DriverError::System { what: "eventfd", source }
    }

    /// The error of the socket that the server asks on.
    pub(crate) fn backend_channel(source: io::Error) -> DriverError {
        DriverError::System { what: "backend request socket", source }
    }
}

/// Judges a number of the options.
pub(crate) fn check_range(
    field: &'static str,
    found: u16,
    range: std::ops::RangeInclusive<u16>,
) -> Result<(), DriverError> {
    if range.contains(&found) {
        return Ok(());
    }
    let expected = format!("{} to {}", range.start(), range.end());
    Err(DriverError::Option { field, found: found.into(), expected })
}

/// Judges the entries of a split queue.
pub(crate) fn check_queue_size(found: u16) -> Result<(), DriverError> {
    if found.is_power_of_two() && (4..=32768).contains(&found) {
        return Ok(());
    }
    let expected = "a power of two from 4 to 32768".to_owned();
    Err(DriverError::Option { field: "queue size", found: found.into(), expected })
}
