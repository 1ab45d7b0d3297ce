//! A filter disk: a disk between the engine and another disk, for tests that observe or change requests.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_engine::{AnyDisk, UringContext};

/// A worker's channel to any disk.
pub type AnyChannel = Box<dyn DiskChannel<UringContext>>;

/// A disk with the properties of `inner` and its own limits. Its channels are those of `inner`, wrapped by `channel`.
pub struct FilterDisk<F> {
    /// The filtered disk.
    pub inner: Arc<AnyDisk>,
    /// Limits that the engine sees.
    pub limits: Limits,
    /// Wraps each channel.
    pub wrap_channel: F,
}

impl<F: Fn(AnyChannel) -> AnyChannel + Send + Sync + 'static> FilterDisk<F> {
    /// Filters `inner`, with its limits.
    pub fn new(inner: Arc<AnyDisk>, wrap_channel: F) -> FilterDisk<F> {
        FilterDisk { limits: inner.limits(), inner, wrap_channel }
    }
}

impl<F: Fn(AnyChannel) -> AnyChannel + Send + Sync> Disk<UringContext> for FilterDisk<F> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.inner.resize(size)
    }

    fn activate(&self, timeout: Duration) -> Result<(), DiskError> {
        self.inner.activate(timeout)
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.inner.deactivate()
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        self.inner.resolved()
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<AnyChannel, DiskError> {
        Ok((self.wrap_channel)(self.inner.open_channel(context)?))
    }
}
