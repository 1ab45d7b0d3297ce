//! A disk as given to a guest, on storage that has changed.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::disk::ConnectionStats;
use mqblk_core::{
    ByteLen, Completion, Disk, DiskChannel, DiskError, DiskObserver, Geometry, Limits, Op, OpenImage, Outcome, Request,
    Tag,
};
use mqblk_engine::{AnyDisk, UringContext};
use mqblk_memory::Buffer;

/// A disk with the geometry and the limits that its guest relies on.
pub(super) struct GivenDisk {
    inner: Arc<AnyDisk>,
    /// Its size is unused: the storage's applies.
    geometry: Geometry,
    limits: Limits,
    /// True if the storage cannot discard: discards of the guest have no effect.
    ignores_discards: bool,
}

impl GivenDisk {
    pub(super) fn new(inner: Arc<AnyDisk>, geometry: Geometry, limits: Limits) -> GivenDisk {
        let ignores_discards = limits.discard.is_some() && inner.limits().discard.is_none();
        GivenDisk { inner, geometry, limits, ignores_discards }
    }
}

impl Disk<UringContext> for GivenDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.inner.geometry().size, ..self.geometry }
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        self.inner.resolved()
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn found_size(&self) -> Result<ByteLen, DiskError> {
        self.inner.found_size()
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.inner.resize(size)
    }

    fn activate(&self, timeout: Duration) -> Result<(), DiskError> {
        self.inner.activate(timeout)
    }

    fn is_passed_on(&self) -> bool {
        self.inner.is_passed_on()
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.inner.deactivate()
    }

    fn close(&self) {
        self.inner.close();
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        self.inner.hand_over()
    }

    fn leave(&self) -> Result<(), String> {
        self.inner.leave()
    }

    fn raw_identity(&self) -> Option<String> {
        self.inner.raw_identity()
    }

    fn observe(&self, observer: Arc<dyn DiskObserver>) {
        self.inner.observe(observer);
    }

    fn connections(&self) -> Option<ConnectionStats> {
        self.inner.connections()
    }

    fn max_channels(&self) -> Option<u16> {
        self.inner.max_channels()
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let channel = self.inner.open_channel(context)?;
        Ok(if self.ignores_discards { Box::new(IgnoringDiscards(channel)) } else { channel })
    }
}

/// A channel to storage that cannot discard. A discard is a hint: it completes without effect.
struct IgnoringDiscards(Box<dyn DiskChannel<UringContext>>);

impl DiskChannel<UringContext> for IgnoringDiscards {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let discards = batch.extract_if(.., |request| request.op == Op::Discard { secure: false });
        let before = finished.len();
        finished.extend(discards.map(|Request { tag, buffer, .. }| Completion {
            outcome: Outcome::Done(ByteLen::ZERO),
            tag,
            buffer,
        }));
        let done = finished.len() - before;
        done + self.0.submit(context, batch, finished)
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        self.0.reap(context, finished)
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        self.0.cancel(context, tags, finished);
    }

    fn outstanding(&self) -> u32 {
        self.0.outstanding()
    }

    fn deadline(&self) -> Option<Instant> {
        self.0.deadline()
    }

    fn close(&mut self, context: &mut UringContext) {
        self.0.close(context);
    }
}
