//! Errors of devices and of submissions.

use std::io;

use mqblk_memory::MemoryError;
use mqblk_ring::blkif;
use mqblk_ring::driver_ring as virtqueue;
use mqblk_ring::virtqueue::RingSetupError;
use mqblk_vhost_user_client::ClientError;
use mqblk_xen::XenError;
use mqblk_xen::store::XenstoreError;
use mqblk_xen::vbd::{MalformedValue, XenbusState};

/// A violation of blkif's ring protocol by a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    /// The response index is invalid.
    #[error("{0}")]
    Index(blkif::BackendError),
    /// A response with an id that is out of range.
    #[error("response: found id {found}, expected one below {ids}")]
    Id {
        /// The response's value.
        found: u64,
        /// Number of ids.
        ids: u16,
    },
    /// A response with an id that is not in flight.
    #[error("response: found id {0}, expected that of a request in flight")]
    NotOutstanding(u64),
    /// A response with the operation of another request.
    #[error("response to request {id}: found operation {found}, expected {expected}")]
    Operation {
        /// The request's id.
        id: u64,
        /// The response's value.
        found: u8,
        /// The request's operation.
        expected: u8,
    },
    /// A response with an undefined status.
    #[error("response to request {id}: found status {found}, expected 0, -1 or -2")]
    Status {
        /// The request's id.
        id: u64,
        /// The response's value.
        found: i16,
    },
}

impl From<blkif::BackendError> for ResponseError {
    fn from(error: blkif::BackendError) -> ResponseError {
        ResponseError::Index(error)
    }
}

/// A violation of a ring's protocol by the device. The queue cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Of a virtqueue.
    #[error(transparent)]
    Virtqueue(#[from] virtqueue::DeviceError),
    /// Of a blkif ring.
    #[error(transparent)]
    Blkif(#[from] ResponseError),
}

/// A failed submission. It has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The ring is full until completions are reaped.
    #[error("the ring is full")]
    Full,
    /// More segments than a request can have.
    #[error("the request has more segments than a request can have ({0})")]
    TooManySegments(u16),
    /// Readable segments come before writable ones (virtio 1.3 section 2.7.4.2).
    #[error("a readable segment after a writable one")]
    ReadableAfterWritable,
    /// A request without segments, or with an empty one.
    #[error("the request has no segments, or an empty one")]
    Empty,
    /// A segment that does not consist of whole sectors in granted memory.
    #[error("a segment of {len} bytes at {address:#x}, expected whole sectors of 512 bytes in granted memory")]
    NotGranted {
        /// Its address.
        address: u64,
        /// Its length in bytes.
        len: u32,
    },
    /// The backend has violated the protocol before.
    #[error("the queue is disabled: its backend violated the protocol")]
    Disabled,
}

impl From<virtqueue::ChainRefused> for SubmitError {
    #[inline]
    fn from(error: virtqueue::ChainRefused) -> SubmitError {
        match error {
            virtqueue::ChainRefused::Full => SubmitError::Full,
            virtqueue::ChainRefused::TooManySegments(max) => SubmitError::TooManySegments(max),
            virtqueue::ChainRefused::ReadableAfterWritable => SubmitError::ReadableAfterWritable,
            virtqueue::ChainRefused::Empty => SubmitError::Empty,
        }
    }
}

/// An error of a device or of its setup.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The vhost-user connection failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Shared memory could not be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A ring could not be set up.
    #[error(transparent)]
    Ring(#[from] RingSetupError),
    /// The device violated a ring's protocol.
    #[error("the device broke the ring's protocol: {0}")]
    Device(#[from] DeviceError),
    /// Packed rings cannot be resumed without a record of the requests in flight.
    #[error("packed rings: found no in-flight region, expected one to continue with another server")]
    NotResumable,
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation or resource.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// An option is out of range for this server.
    #[error("{field}: found {found}, expected {expected}")]
    Option {
        /// Its name.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The valid range.
        expected: String,
    },
    /// The device's configuration space is invalid.
    #[error("configuration field {field}: found {found}, expected {expected}")]
    Config {
        /// Its name.
        field: &'static str,
        /// The device's value.
        found: u64,
        /// The valid values.
        expected: &'static str,
    },
    /// Xenstore failed a request, or the connection is lost.
    #[error(transparent)]
    Xenstore(#[from] XenstoreError),
    /// Xen failed a request.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// The device does not exist (yet): its frontend directory has no `backend` key.
    #[error("{0}: found none, expected the directory of a backend: the toolstack has made no such device")]
    NoDevice(String),
    /// A value in xenstore is invalid.
    #[error(transparent)]
    MalformedKey(#[from] MalformedValue),
    /// A mandatory key is missing in xenstore.
    #[error("xenstore key {0}: found none, expected it of every device that is connected")]
    MissingKey(&'static str),
    /// The backend is in an unexpected state.
    #[error("the backend did not {step}: found it in state {found}: {why}")]
    BackendState {
        /// The step that was expected of the backend.
        step: &'static str,
        /// The backend's state.
        found: XenbusState,
        /// The error that the backend has written, or another reason.
        why: String,
    },
    /// A blkif ring could not be set up.
    #[error(transparent)]
    BlkifRing(#[from] blkif::BlkifSetupError),
    /// The device did not complete or reply in time.
    #[error("{0}: no completion in time")]
    Timeout(&'static str),
}

impl From<virtqueue::DeviceError> for DriverError {
    fn from(error: virtqueue::DeviceError) -> DriverError {
        DriverError::Device(error.into())
    }
}

impl DriverError {
    /// Wraps the error of an eventfd.
    pub(crate) fn eventfd(source: io::Error) -> DriverError {
        DriverError::System { what: "eventfd", source }
    }

    /// Wraps the error of the backend channel.
    pub(crate) fn backend_channel(source: io::Error) -> DriverError {
        DriverError::System { what: "backend request socket", source }
    }
}

/// Checks that an option is in its range.
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

/// Checks the size of a queue.
pub(crate) fn check_queue_size(found: u16) -> Result<(), DriverError> {
    if found.is_power_of_two() && (4..=32768).contains(&found) {
        return Ok(());
    }
    let expected = "a power of two from 4 to 32768".to_owned();
    Err(DriverError::Option { field: "queue size", found: found.into(), expected })
}
