//! Errors of the library.

use std::io;

/// A library cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoadError {
    /// It is not installed, or the host refuses to load it.
    #[error("cannot load {library} ({why}): install the package {package}")]
    Library {
        /// The file name.
        library: &'static str,
        /// Debian's name of its package.
        package: &'static str,
        /// The loader's message.
        why: String,
    },
    /// It is too old.
    #[error("{library} has no {symbol}: install Ceph 16 or later (package {package})")]
    Symbol {
        /// The file name.
        library: &'static str,
        /// Debian's name of its package.
        package: &'static str,
        /// The function.
        symbol: &'static str,
    },
}

/// The step in which an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedStep {
    /// Loading the library.
    Load,
    /// Reading the cluster's configuration file.
    Configuration,
    /// Reaching the monitors.
    Connection,
    /// Authentication to the monitors.
    Authentication,
    /// Finding the pool.
    Pool,
    /// Opening the image or its snapshot.
    Image,
    /// An option of the pool or the image overrides one that this process needs.
    Override,
    /// Loading the image's encryption.
    Encryption,
    /// A call for the open image.
    Call,
}

/// An error of the library.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct RbdError {
    /// The step.
    pub step: FailedStep,
    /// The failed call, in words.
    pub what: String,
    /// The library's errno, or the reason that it was not called.
    #[source]
    pub source: io::Error,
}

impl RbdError {
    /// Returns the errno; 0 if the error has none.
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(0)
    }
}

impl From<LoadError> for RbdError {
    fn from(error: LoadError) -> RbdError {
        RbdError { step: FailedStep::Load, what: "Ceph's libraries".to_owned(), source: io::Error::other(error) }
    }
}

/// Returns the result of a call that returns 0 or more, or a negative errno.
pub(crate) fn check(
    result: libc::c_int,
    step: FailedStep,
    what: impl FnOnce() -> String,
) -> Result<libc::c_int, RbdError> {
    if result >= 0 {
        return Ok(result);
    }
    Err(RbdError { step, what: what(), source: io::Error::from_raw_os_error(-result) })
}
