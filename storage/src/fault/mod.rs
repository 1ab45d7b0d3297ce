//! `storage=fault`: another backend with injected faults. For tests of everything above storage.
//!
//! `storage=fault,inner=ram,size=64M,fail-read=1M+4K:EIO` is a RAM disk with a bad 4 KiB at 1 MiB. Keys that are not listed
//! here are the inner backend's.
//!
//! | setting | meaning |
//! |---|---|
//! | `inner` | the backend that does the work |
//! | `fail-read`, `fail-write`, `fail-discard`, `fail-zeroes` | `OFFSET+LEN:ERRNO[*TIMES]`, several separated by `/`: requests that overlap the range fail without being executed. `ERRNO` is a name (`EIO`) or a number. With `*TIMES` that many times in each channel, then the range is good |
//! | `fail-flush` | `ERRNO[*TIMES]` |
//! | `fault-torn` | percentage of reads and writes that transfer only a first part, and then fail with EIO |
//! | `fault-latency-us` | added to every request |
//! | `fault-jitter-us` | a random time up to this is added to every request, so that they complete in another order |
//! | `fault-reorder` | completions are delayed until this many are available, or nothing else is in flight, and then delivered in random order |
//! | `fault-seed` | seed of the random streams (0); each channel that is opened gets its own stream of it |
//!
//! With none of them set the disk behaves exactly as the inner one.

mod channel;
mod plan;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_uring::UringContext;

use channel::FaultChannel;
use plan::FaultPlan;

/// Opens the inner disk and wraps it with faults.
///
/// # Errors
/// When a setting does not fit, or as the inner backend.
pub fn open(settings: &mut Settings) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let Some(kind) = settings.text("inner") else {
        return Err(settings.error("inner", "nothing", "the storage that faults are put on, such as ram").into());
    };
    let Some(kind) = crate::backend_names().find(|known| *known == kind) else {
        let known = crate::backend_names().collect::<Vec<_>>().join(", ");
        return Err(settings.error("inner", format!("{kind:?}"), format!("one of {known}")).into());
    };
    let plan = FaultPlan::from_settings(settings)?;
    let inner = crate::open(kind, settings)?;
    Ok(Arc::new(FaultDisk { kind, plan: Arc::new(plan), inner, channels: AtomicU64::new(0) }))
}

struct FaultDisk {
    kind: &'static str,
    plan: Arc<FaultPlan>,
    inner: Arc<dyn Disk<UringContext>>,
    /// Number of channels opened so far: each has its own random stream.
    channels: AtomicU64,
}

impl Disk<UringContext> for FaultDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn found_size(&self) -> Result<ByteLen, DiskError> {
        self.inner.found_size()
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
        let mut all = vec![("inner", self.kind.to_owned())];
        all.extend(self.plan.resolved());
        all.extend(self.inner.resolved());
        all
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let stream = self.channels.fetch_add(1, Ordering::Relaxed);
        let inner = self.inner.open_channel(context)?;
        let block = self.inner.geometry().logical_block;
        match FaultChannel::new(Arc::clone(&self.plan), inner, block, stream, context) {
            Ok(channel) => Ok(Box::new(channel)),
            Err(source) => Err(DiskError::Os { what: "memory for torn transfers".to_owned(), source }),
        }
    }
}

#[cfg(test)]
mod tests;
