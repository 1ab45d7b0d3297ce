//! Why a device cannot be used (any more).

use std::io;

use mqblk_memory::MemoryError;
use mqblk_ring::split::SetupError;
use mqblk_ring::split::driver::DeviceError;
use mqblk_vhost_user_client::ClientError;

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
    Ring(#[from] SetupError),
    /// The device broke the protocol.
    #[error("the device broke the ring's protocol: {0}")]
    Device(#[from] DeviceError),
    /// The host refused a resource.
    #[error("{what}: {source}")]
    Host {
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
    /// The device did not answer in time.
    #[error("{0}: no answer in time")]
    NoAnswer(&'static str),
}

impl DriverError {
    /// The error of an eventfd.
    pub(crate) fn event(source: io::Error) -> DriverError {
        DriverError::Host { what: "eventfd", source }
    }
}

/// Judges a number of the options.
pub(crate) fn check(field: &'static str, found: u16, range: std::ops::RangeInclusive<u16>) -> Result<(), DriverError> {
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
