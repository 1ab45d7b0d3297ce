//! A filter disk: a disk between the engine and another disk, for tests that observe or change requests.

use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_engine::{AnyDisk, Lane};

/// A worker's channel to any disk.
pub type AnyChannel = Box<dyn DiskChannel<Lane>>;

/// A disk with the properties of `inner` and its own limits. Its channels are those of `inner`, wrapped by `channel`.
pub struct Overlay<F> {
    /// The filtered disk.
    pub inner: Arc<AnyDisk>,
    /// Limits that the engine sees.
    pub limits: Limits,
    /// Wraps each channel.
    pub channel: F,
}

impl<F: Fn(AnyChannel) -> AnyChannel + Send + Sync + 'static> Overlay<F> {
    /// Filters `inner`, with its limits.
    pub fn over(inner: Arc<AnyDisk>, channel: F) -> Overlay<F> {
        Overlay { limits: inner.limits(), inner, channel }
    }
}

impl<F: Fn(AnyChannel) -> AnyChannel + Send + Sync> Disk<Lane> for Overlay<F> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.inner.resize(size)
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.inner.activate()
    }

    fn deactivate(&self) {
        self.inner.deactivate();
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        self.inner.resolved()
    }

    fn open_channel(&self, context: &mut Lane) -> Result<AnyChannel, DiskError> {
        Ok((self.channel)(self.inner.open_channel(context)?))
    }
}
