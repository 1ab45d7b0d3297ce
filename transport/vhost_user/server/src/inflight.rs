//! The in-flight region of a connection: a table for each queue (`mqblk_ring::split::InflightTable`) in memory that the front-end
//! keeps while no back-end is there, and shows to the next. Source: QEMU's `vhost-user.rst`, "Inflight I/O tracking".

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, Region, SharedWords, UserAddress};
use mqblk_ring::split::InflightTable;
use mqblk_ring::split::layout::MAX_SIZE;
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;

/// Bytes at which a queue's table may start.
const ALIGN: u64 = 8;

/// What follows each queue's table in a region of ours: a cache line, of which the first queue's is in use.
const TAIL: u64 = 64;
/// `mqblkinf`, in the tail's first word: the region is one of ours.
const MAGIC: u64 = u64::from_le_bytes(*b"mqblkinf");

/// A region as the front-end showed it.
pub(crate) struct InflightRegion {
    memory: GuestMemory,
    queues: u16,
    /// From one queue's table to the next, in bytes.
    stride: u64,
    /// The tail of the first queue, if the region is one of ours: the magic, and what the driver has configured.
    device: Option<SharedWords>,
    /// Rings that were served with it before.
    used: Vec<u16>,
    fence: Option<Fence>,
}

impl InflightRegion {
    /// Memory for the tables of `queues` rings of at most `ring_size` entries, all of them fresh.
    pub(crate) fn create(queues: u16, ring_size: u16) -> io::Result<(VhostUserInflight, File)> {
        let stride = InflightTable::bytes(ring_size) + TAIL;
        let size = stride * u64::from(queues);
        let file = rustix::fs::memfd_create("mqblk-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, size)?;
        rustix::io::pwrite(&file, &MAGIC.to_ne_bytes(), stride - TAIL)?;
        // Neither side can cut it off under the other.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let told = VhostUserInflight { mmap_size: size, mmap_offset: 0, num_queues: queues, queue_size: ring_size };
        Ok((told, File::from(file)))
    }

    /// The region that a front-end shows; why not, for the log.
    pub(crate) fn open(told: &VhostUserInflight, file: &File) -> Result<InflightRegion, String> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, .. } = *told;
        if num_queues == 0 {
            return Err("in-flight region: queues: found 0, expected at least 1".to_owned());
        }
        let stride = mmap_size / u64::from(num_queues);
        if stride == 0 || !mmap_size.is_multiple_of(u64::from(num_queues)) || !stride.is_multiple_of(ALIGN) {
            return Err(format!(
                "in-flight region: size: found {mmap_size} bytes for {num_queues} queues, expected a multiple of {ALIGN} for each"
            ));
        }
        let region = Region::of_file(file, mmap_offset, mmap_size, GuestAddress(0), UserAddress(0));
        let memory = region.and_then(|region| GuestMemory::default().with(region));
        let memory = memory.map_err(|error| format!("in-flight region: {error}"))?;
        let fence = Fence::new(file).inspect_err(|error| {
            tracing::warn!("in-flight region: requests of a killed daemon cannot be waited for: {error}");
        });
        let tail = stride.checked_sub(TAIL).and_then(|at| memory.words(GuestAddress(at), TAIL as usize / 8));
        let word = |words: &SharedWords, at| words.get(at).map_or(0, |word| word.load(Ordering::Acquire));
        let device = tail.filter(|tail| word(tail, 0) == MAGIC);
        let header = |queue: u16| memory.words(GuestAddress(u64::from(queue) * stride), 2);
        let was_served = |queue: &u16| header(*queue).is_some_and(|header| word(&header, 1) != 0);
        let used = (0..num_queues).filter(was_served).collect();
        Ok(InflightRegion { memory, queues: num_queues, stride, device, used, fence: fence.ok() })
    }

    /// Whether rings were served with it before: the driver goes on where it was.
    pub(crate) fn is_used(&self) -> bool {
        !self.used.is_empty()
    }

    /// Which rings were.
    pub(crate) fn used(&self) -> &[u16] {
        &self.used
    }

    /// What the driver has configured, as the device noted it; 0 when nothing is known.
    pub(crate) fn configured(&self) -> u64 {
        let word = self.device.as_ref().and_then(|device| device.get(1));
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Notes what the driver has configured.
    pub(crate) fn note_configured(&self, configured: u64) {
        if let Some(word) = self.device.as_ref().and_then(|device| device.get(1)) {
            word.store(configured, Ordering::Release);
        }
    }

    /// The table of queue `index`; `None` when the region has none for it.
    pub(crate) fn table(&self, index: u16) -> Option<SharedWords> {
        if index >= self.queues {
            return None;
        }
        let bytes = if self.device.is_some() { self.stride - TAIL } else { self.stride };
        let words = bytes.min(InflightTable::bytes(MAX_SIZE)) / 8;
        self.memory.words(GuestAddress(u64::from(index) * self.stride), usize::try_from(words).ok()?)
    }

    /// Whether nobody before us has requests in flight with the kernel that belong to these rings: those of a daemon that was
    /// killed, or of an earlier connection, may still read or write guest memory, or write to the disk.
    pub(crate) fn is_clear(&self) -> bool {
        self.fence.as_ref().is_none_or(Fence::acquire)
    }

    /// What a worker keeps open while it has requests in flight for these rings.
    pub(crate) fn fence(&self) -> Option<&Arc<OwnedFd>> {
        self.fence.as_ref().map(|fence| &fence.file)
    }
}

/// A lock on the region, through an open file of our own. Each worker that serves a ring of the region has the file in the table of
/// its io_uring, which the kernel takes down only when everything that was asked for there has ended. So whoever gets the lock next
/// knows that nothing of an owner before, killed or not, is in flight.
struct Fence {
    file: Arc<OwnedFd>,
}

impl Fence {
    fn new(file: &File) -> io::Result<Fence> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Fence { file: Arc::new(file) })
    }

    /// Takes the lock if it is free or ours already.
    fn acquire(&self) -> bool {
        rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(mmap_size: u64, mmap_offset: u64, num_queues: u16) -> VhostUserInflight {
        VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size: 8 }
    }

    #[test]
    fn every_queue_has_a_table_of_its_own() {
        let (about, file) = InflightRegion::create(3, 8).unwrap();
        let region = InflightRegion::open(&about, &file).unwrap();
        for index in 0..3 {
            region.table(index).unwrap().get(17).unwrap().store(u64::from(index) + 1, Ordering::Relaxed);
        }
        assert!(region.table(3).is_none());
        let again = InflightRegion::open(&about, &file).unwrap();
        for index in 0..3 {
            let words = again.table(index).unwrap();
            assert_eq!(words.get(17).unwrap().load(Ordering::Relaxed), u64::from(index) + 1);
        }
    }

    #[test]
    fn what_the_driver_has_configured_outlives_the_region_s_user() {
        let (about, file) = InflightRegion::create(2, 8).unwrap();
        let region = InflightRegion::open(&about, &file).unwrap();
        assert_eq!((region.configured(), region.is_used()), (0, false));
        region.note_configured(7);
        InflightTable::open(region.table(1).unwrap(), 8, 0).unwrap();
        let again = InflightRegion::open(&about, &file).unwrap();
        assert_eq!((again.configured(), again.is_used()), (7, true));
        // One of another program has no place for it.
        let foreign = rustix::fs::memfd_create("foreign", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&foreign, about.mmap_size).unwrap();
        let foreign = InflightRegion::open(&about, &File::from(foreign)).unwrap();
        foreign.note_configured(7);
        assert_eq!((foreign.configured(), foreign.is_used()), (0, false));
        assert_eq!(foreign.table(1).unwrap().count() as u64, about.mmap_size / 16);
    }

    #[test]
    fn impossible_regions_are_named() {
        let (about, file) = InflightRegion::create(2, 8).unwrap();
        for (told, names) in [
            (told(about.mmap_size, 0, 0), "queues: found 0"),
            (told(0, 0, 2), "size: found 0 bytes"),
            (told(about.mmap_size + 1, 0, 2), "expected a multiple"),
            (told(100, 0, 2), "expected a multiple"),
            (told(about.mmap_size * 2, 0, 2), "the file has"),
            (told(about.mmap_size, 64, 2), "the file has"),
            (told(about.mmap_size, u64::MAX, 2), "in-flight region"),
        ] {
            let why = InflightRegion::open(&told, &file).err().unwrap();
            assert!(why.contains(names), "{why}");
        }
    }

    #[test]
    fn an_owner_before_is_waited_for() {
        let (about, file) = InflightRegion::create(1, 8).unwrap();
        let before = InflightRegion::open(&about, &file).unwrap();
        let after = InflightRegion::open(&about, &file).unwrap();
        assert!(before.is_clear() && before.is_clear() && !after.is_clear());
        let held = Arc::clone(before.fence().unwrap());
        drop(before);
        assert!(!after.is_clear(), "a worker has it");
        drop(held);
        assert!(after.is_clear());
    }
}
