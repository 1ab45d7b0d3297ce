//! The in-flight region of a connection: a table per queue (of the format of its ring) in memory that the frontend
//! keeps while no backend is connected, and passes to the next one by SET_INFLIGHT_FD. Source: QEMU's `vhost-user.rst`,
//! "Inflight I/O tracking".

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, SharedWords, UserAddress};
use mqblk_ring::virtqueue::{MAX_QUEUE_SIZE, MappedRing, RingFormat};
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;

use crate::memory::SharePolicy;

/// Alignment of a queue's table, in bytes.
const ALIGN: u64 = 8;

/// Bytes after each queue's table in a region that [`InflightRegion::create`] made: one cache line. Only the first
/// queue's is used.
const TAIL: u64 = 64;
/// `mqblkinf`, in the first word of the tail: the region was created by mqblk.
const MAGIC: u64 = u64::from_le_bytes(*b"mqblkinf");

/// A mapped in-flight region.
pub(crate) struct InflightRegion {
    memory: GuestMemory,
    queues: u16,
    /// Bytes from one queue's table to the next.
    stride: u64,
    /// The first queue's tail, if mqblk created the region: the magic and the driver's configuration.
    device_words: Option<SharedWords>,
    /// Queues that were served with this region before.
    used_queues: Vec<u16>,
    fence: Option<Fence>,
}

impl InflightRegion {
    /// Creates a region with empty tables for `queues` rings of at most `ring_size` entries.
    pub(crate) fn create(queues: u16, ring_size: u16, format: RingFormat) -> io::Result<(VhostUserInflight, File)> {
        let stride = MappedRing::inflight_bytes(ring_size, format) + TAIL;
        let size = stride * u64::from(queues);
        let file = rustix::fs::memfd_create("mqblk-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, size)?;
        rustix::io::pwrite(&file, &MAGIC.to_ne_bytes(), stride - TAIL)?;
        // Sealed: neither side can truncate it while the other has it mapped.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let layout = VhostUserInflight { mmap_size: size, mmap_offset: 0, num_queues: queues, queue_size: ring_size };
        Ok((layout, File::from(file)))
    }

    /// Maps the region that a frontend passes.
    ///
    /// # Errors
    /// The reason, for the log.
    pub(crate) fn open(
        layout: &VhostUserInflight,
        file: &File,
        sharing: &SharePolicy,
    ) -> Result<InflightRegion, String> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, .. } = *layout;
        if num_queues == 0 {
            return Err("in-flight region: queues: found 0, expected at least 1".to_owned());
        }
        let stride = mmap_size / u64::from(num_queues);
        if stride == 0 || !mmap_size.is_multiple_of(u64::from(num_queues)) || !stride.is_multiple_of(ALIGN) {
            return Err(format!(
                "in-flight region: size: found {mmap_size} bytes for {num_queues} queues, expected a multiple of {ALIGN} for each"
            ));
        }
        if !mmap_offset.is_multiple_of(ALIGN) {
            return Err(format!("in-flight region: offset: found {mmap_offset}, expected a multiple of {ALIGN}"));
        }
        let region = sharing.map(file, mmap_offset, mmap_size, (GuestAddress(0), UserAddress(0)));
        let memory = region.and_then(|region| GuestMemory::default().with_region(region));
        let memory = memory.map_err(|error| format!("in-flight region: {error}"))?;
        let fence = Fence::new(file).inspect_err(|error| {
            tracing::warn!("in-flight region: requests of a killed daemon cannot be waited for: {error}");
        });
        let tail = stride.checked_sub(TAIL).and_then(|at| memory.shared_words(GuestAddress(at), TAIL as usize / 8));
        let word = |words: &SharedWords, at| words.get(at).map_or(0, |word| word.load(Ordering::Acquire));
        let device = tail.filter(|tail| word(tail, 0) == MAGIC);
        let header = |queue: u16| memory.shared_words(GuestAddress(u64::from(queue) * stride), 2);
        let was_served = |queue: &u16| header(*queue).is_some_and(|header| word(&header, 1) != 0);
        let used = (0..num_queues).filter(was_served).collect();
        Ok(InflightRegion {
            memory,
            queues: num_queues,
            stride,
            device_words: device,
            used_queues: used,
            fence: fence.ok(),
        })
    }

    /// Returns true if queues were served with this region before: the driver continues.
    pub(crate) fn was_used(&self) -> bool {
        !self.used_queues.is_empty()
    }

    /// Returns the queues that were served with this region before.
    pub(crate) fn used_queues(&self) -> &[u16] {
        &self.used_queues
    }

    /// Returns the driver's configuration as the device recorded it; 0 if there is no record.
    pub(crate) fn driver_config(&self) -> u64 {
        let word = self.device_words.as_ref().and_then(|device| device.get(1));
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Records the driver's configuration.
    pub(crate) fn record_driver_config(&self, configured: u64) {
        if let Some(word) = self.device_words.as_ref().and_then(|device| device.get(1)) {
            word.store(configured, Ordering::Release);
        }
    }

    /// Returns the table of queue `index`, whose ring has this format; `None` if the region has none.
    pub(crate) fn table(&self, index: u16, format: RingFormat) -> Option<SharedWords> {
        if index >= self.queues {
            return None;
        }
        let bytes = if self.device_words.is_some() { self.stride - TAIL } else { self.stride };
        let words = bytes.min(MappedRing::inflight_bytes(MAX_QUEUE_SIZE, format)) / 8;
        self.memory.shared_words(GuestAddress(u64::from(index) * self.stride), usize::try_from(words).ok()?)
    }

    /// Acquires the fence. Returns false while the kernel still executes requests of these rings for a killed daemon or
    /// an earlier connection: they may still access guest memory or write to the disk.
    pub(crate) fn acquire_fence(&self) -> bool {
        self.fence.as_ref().is_none_or(Fence::acquire)
    }

    /// Releases the fence: no request of these rings is in flight.
    pub(crate) fn release_fence(&self) {
        if let Some(fence) = &self.fence {
            fence.release();
        }
    }

    /// Returns the file that a worker keeps registered while it has requests in flight for these rings.
    pub(crate) fn fence(&self) -> Option<&Arc<OwnedFd>> {
        self.fence.as_ref().map(|fence| &fence.file)
    }
}

/// An I/O fence: an flock on the region through its own open file description. Each worker that serves a ring of the
/// region has the file in its io_uring's table of registered files, which the kernel frees only after all the ring's
/// requests have completed. The next holder of the lock therefore knows that no request of an earlier holder, killed or
/// not, is in flight.
struct Fence {
    file: Arc<OwnedFd>,
}

impl Fence {
    fn new(file: &File) -> io::Result<Fence> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Fence { file: Arc::new(file) })
    }

    fn release(&self) {
        // A lock that stays is released with the file.
        let _ = rustix::fs::flock(&self.file, FlockOperation::NonBlockingUnlock);
    }

    /// Tries to lock. Returns true if the lock is held, also if it was held before.
    fn acquire(&self) -> bool {
        rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPLIT: RingFormat = RingFormat::Split;

    fn open(layout: &VhostUserInflight, file: &File) -> Result<InflightRegion, String> {
        InflightRegion::open(layout, file, &SharePolicy::default())
    }

    fn inflight_layout(mmap_size: u64, mmap_offset: u64, num_queues: u16) -> VhostUserInflight {
        VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size: 8 }
    }

    #[test]
    fn every_queue_has_its_own_table() {
        let (layout, file) = InflightRegion::create(3, 8, SPLIT).unwrap();
        let region = open(&layout, &file).unwrap();
        for index in 0..3 {
            region.table(index, SPLIT).unwrap().get(17).unwrap().store(u64::from(index) + 1, Ordering::Relaxed);
        }
        assert!(region.table(3, SPLIT).is_none());
        let again = open(&layout, &file).unwrap();
        for index in 0..3 {
            let words = again.table(index, SPLIT).unwrap();
            assert_eq!(words.get(17).unwrap().load(Ordering::Relaxed), u64::from(index) + 1);
        }
    }

    #[test]
    fn the_drivers_configuration_outlives_the_backend() {
        let (layout, file) = InflightRegion::create(2, 8, SPLIT).unwrap();
        let region = open(&layout, &file).unwrap();
        assert_eq!((region.driver_config(), region.was_used()), (0, false));
        region.record_driver_config(7);
        mqblk_ring::split::InflightTable::open(region.table(1, SPLIT).unwrap(), 8, 0).unwrap();
        let again = open(&layout, &file).unwrap();
        assert_eq!((again.driver_config(), again.was_used()), (7, true));
        // A region of another program has no tail.
        let foreign = rustix::fs::memfd_create("foreign", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&foreign, layout.mmap_size).unwrap();
        let foreign = open(&layout, &File::from(foreign)).unwrap();
        foreign.record_driver_config(7);
        assert_eq!((foreign.driver_config(), foreign.was_used()), (0, false));
        assert_eq!(foreign.table(1, SPLIT).unwrap().count() as u64, layout.mmap_size / 16);
    }

    #[test]
    fn invalid_regions_are_rejected() {
        let (layout, file) = InflightRegion::create(2, 8, SPLIT).unwrap();
        for (layout, names) in [
            (inflight_layout(layout.mmap_size, 0, 0), "queues: found 0"),
            (inflight_layout(0, 0, 2), "size: found 0 bytes"),
            (inflight_layout(layout.mmap_size + 1, 0, 2), "expected a multiple"),
            (inflight_layout(100, 0, 2), "expected a multiple"),
            (inflight_layout(layout.mmap_size * 2, 0, 2), "the file has"),
            (inflight_layout(layout.mmap_size, 64, 2), "the file has"),
            // Its tables could not be used: requests would be served without a record.
            (inflight_layout(layout.mmap_size / 2, 4, 2), "offset: found 4, expected a multiple of 8"),
            (inflight_layout(layout.mmap_size, u64::MAX - 7, 2), "in-flight region"),
        ] {
            let why = open(&layout, &file).err().unwrap();
            assert!(why.contains(names), "{why}");
        }
    }

    #[test]
    fn the_fence_is_held_while_a_worker_has_the_file() {
        let (layout, file) = InflightRegion::create(1, 8, SPLIT).unwrap();
        let before = open(&layout, &file).unwrap();
        let after = open(&layout, &file).unwrap();
        assert!(before.acquire_fence() && before.acquire_fence() && !after.acquire_fence());
        let registered = Arc::clone(before.fence().unwrap());
        drop(before);
        assert!(!after.acquire_fence(), "a worker has it");
        drop(registered);
        assert!(after.acquire_fence());
    }
}
