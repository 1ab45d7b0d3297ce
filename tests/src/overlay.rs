//! A disk between the engine and another one: for tests that watch what passes, or meddle with it.

use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_engine::{AnyDisk, Lane};

/// A worker's channel to any disk.
pub type AnyChannel = Box<dyn DiskChannel<Lane>>;

/// Looks like `inner`, but for its limits; its channels are what `channel` makes of those of `inner`.
pub struct Overlay<F> {
    /// What lies below.
    pub inner: Arc<AnyDisk>,
    /// What the engine is told of it.
    pub limits: Limits,
    /// Wraps each channel.
    pub channel: F,
}

impl<F: Fn(AnyChannel) -> AnyChannel + Send + Sync + 'static> Overlay<F> {
    /// Over `inner`, with its limits.
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

    fn open_channel(&self, lane: &mut Lane) -> Result<AnyChannel, DiskError> {
        Ok((self.channel)(self.inner.open_channel(lane)?))
    }
}
